"""Host copies of units, kept from one layout of a session to the next: only the boundary of what stays moves.

A unit's bytes lie in a block of their own, filled and pinned once, as they are or packed. The block serves for as long as it
says the truth: while the unit streams it is where the weights are; while the unit is resident it waits, and what is on
the device is compared by a fingerprint before it is believed again. So a budget that changes copies on the host what the
device alone had, and nothing else.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .store.arena import Block, storage_bytes
from .units import Unit

if TYPE_CHECKING:
    from .codec.unit import UnitDecoder
    from .packed_tensors import PackedTensor

_COLUMNS = 64


@dataclass(eq=False)
class HostCopy:
    """A unit's bytes in ``block``. ``views``: its tensors there, None for those that are ``packed``; ``seen``: the
    fingerprint of what went to the device, None while the unit is not resident."""

    tensors: list[torch.Tensor]
    views: list[torch.Tensor | None]
    block: Block
    packed: list[PackedTensor | None]
    decoder: UnitDecoder | None = None
    seen: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.block.data.numel()

    def stands(self) -> bool:
        """Whether the tensors that are not packed have their memory in the block."""
        return all(
            view is None
            or (
                tensor.data_ptr() == view.data_ptr()
                and (tensor.dtype, tensor.shape, tensor.stride()) == (view.dtype, view.shape, view.stride())
            )
            for tensor, view in zip(self.tensors, self.views, strict=True)
        )

    def true_of(self, tensors: list[torch.Tensor]) -> bool:
        """Whether ``tensors``, on the device, are the copy's own and still hold what went there."""
        if self.seen is None or len(tensors) != len(self.tensors):
            return False
        if any(mine is not other for mine, other in zip(self.tensors, tensors, strict=True)):
            return False
        return torch.equal(self.seen, fingerprint(tensors))


def key_of(unit: Unit) -> Hashable:
    return tuple((id(entry.tensor), entry.offset) for entry in unit.entries)


class HostCopies:
    """The copies of one session, by unit."""

    def __init__(self) -> None:
        self._copies: dict[Hashable, HostCopy] = {}
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._copies)

    @property
    def packs(self) -> bool:
        """Whether any of them is packed."""
        return any(packed is not None for copy in self._copies.values() for packed in copy.packed)

    def keep(self, unit: Unit, copy: HostCopy) -> None:
        with self._lock:
            self._copies[key_of(unit)] = copy

    def find(self, unit: Unit) -> HostCopy | None:
        with self._lock:
            return self._copies.get(key_of(unit))

    def take(self, unit: Unit) -> HostCopy | None:
        """The unit's copy, which is the caller's from now on."""
        with self._lock:
            return self._copies.pop(key_of(unit), None)

    def only(self, units: Iterable[Unit]) -> None:
        """Let go of copies of anything else."""
        wanted = {key_of(unit) for unit in units}
        with self._lock:
            for key in [key for key in self._copies if key not in wanted]:
                _let_go(self._copies.pop(key))

    def drop(self, unit: Unit) -> None:
        copy = self.take(unit)
        if copy is not None:
            _let_go(copy)

    def discard(self, copy: HostCopy) -> None:
        """``copy`` is true no more."""
        with self._lock:
            for key in [key for key, one in self._copies.items() if one is copy]:
                del self._copies[key]
        _let_go(copy)

    def spare(self, nbytes: int) -> None:
        """Give up ``nbytes`` pinned for residents, or all of that: what streams needs them more."""
        with self._lock:
            for key, copy in list(self._copies.items()):
                if nbytes <= 0:
                    return
                if copy.seen is not None and copy.block.pinned:
                    nbytes -= copy.block.registered_bytes
                    _let_go(self._copies.pop(key))

    def unpin(self) -> None:
        """The pages are the system's again; the bytes wait on."""
        with self._lock:
            for copy in self._copies.values():
                copy.block.unpin()

    def clear(self) -> None:
        """Tensors that stand in a block keep its memory, unpinned."""
        with self._lock:
            for copy in self._copies.values():
                _let_go(copy)
            self._copies.clear()


def _let_go(copy: HostCopy) -> None:
    """Whoever still refers to it must not keep the bytes."""
    copy.block.unpin()
    copy.block = Block(torch.empty(0, dtype=torch.uint8), False, 0)
    copy.tensors, copy.views, copy.packed, copy.decoder, copy.seen = [], [], [], None, None


@torch.no_grad()
def fingerprint(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Weighted sums of the dense tensors' bytes as 64-bit integers, where they are: int64, alike only for equal bytes but
    for one case in 2**64. Nothing waits for the device."""
    with torch.inference_mode(False), torch._C.DisableTorchFunctionSubclass():
        sums = []
        for tensor in tensors:
            flat = storage_bytes(tensor)
            whole = flat.numel() // (8 * _COLUMNS) * 8 * _COLUMNS
            table = flat[:whole].view(torch.int64).view(-1, _COLUMNS)
            tail = flat[whole:].to(torch.int64)
            for row in (table.sum(0), table.sum(1), tail):
                sums.append((row * _odd(row)).sum())
        return torch.stack(sums) if sums else torch.empty(0, dtype=torch.int64)


def _odd(like: torch.Tensor) -> torch.Tensor:
    """Odd numbers of many bits, another for every place."""
    mixed = (2 * torch.arange(like.numel(), device=like.device) + 1) * 0x1E3779B97F4A7C15
    return (mixed ^ (mixed >> 29)) * 0x3F58476D1CE4E5B9 | 1
