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

from .plan import SMALL_UNIT
from .store.arena import Block, storage_bytes
from .units import Unit

if TYPE_CHECKING:
    from .codec.unit import UnitDecoder
    from .packed_tensors import PackedTensor

_WIDTHS = (
    61,
    67,
)  # odd and prime to each other: what cancels out in the lines of one table does not in the other's


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

    def has(self, blob: torch.Tensor) -> bool:
        """Whether ``blob`` lies in the block: a packed weight that was given another value has another one."""
        start = self.block.data.data_ptr()
        return start <= blob.data_ptr() and blob.data_ptr() + blob.numel() <= start + self.nbytes

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
                _let_go(copy, always=False)
            self._copies.clear()


def _let_go(copy: HostCopy, always: bool = True) -> None:
    """Whoever still refers to it must not keep the bytes; ``always`` as in `clear_of`."""
    clear_of(copy.tensors, copy.block, always)
    copy.block.unpin()
    copy.block = Block(torch.empty(0, dtype=torch.uint8), False, 0)
    copy.tensors, copy.views, copy.packed, copy.decoder, copy.seen = [], [], [], None, None


def clear_of(tensors: Iterable[torch.Tensor], block: Block, always: bool = True) -> None:
    """Small tensors that stand in ``block`` get memory of their own: a norm's weight must not keep a unit's whole block
    when the others have left it. Not ``always``: only where most of the block is left already."""
    start, end = block.data.data_ptr(), block.data.data_ptr() + block.data.numel()
    with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        there = [t for t in tensors if t.device.type == "cpu" and start <= t.data_ptr() < end]
        if not always and 2 * sum(t.numel() * t.element_size() for t in there) >= block.data.numel():
            return
        for tensor in there:
            if tensor.numel() * tensor.element_size() < SMALL_UNIT and not tensor.is_inference():
                tensor.data = tensor.detach().clone(memory_format=torch.preserve_format)


@torch.no_grad()
def fingerprint(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Sums of the dense tensors' bytes as 64-bit integers, over the rows and columns of two tables, each mixed with its
    place: int64, where they are. Edits that leave all of these as they are (signs, rows or elements exchanged are none)
    are not to be expected. Nothing waits for the device; it takes about a tenth of a tensor's bytes there meanwhile."""
    with torch.inference_mode(False), torch._C.DisableTorchFunctionSubclass():
        sums = []
        for tensor in tensors:
            flat = storage_bytes(tensor)
            for width in _WIDTHS:
                whole = flat.numel() // (8 * width) * 8 * width
                table = flat[:whole].view(torch.int64).view(-1, width)
                sums += [_mixed(table.sum(0)).sum(), _mixed(table.sum(1)).sum()]
            sums.append(_mixed(flat[whole:].to(torch.int64)).sum())
        return torch.stack(sums) if sums else torch.empty(0, dtype=torch.int64)


def _mixed(values: torch.Tensor) -> torch.Tensor:
    """Many bits of every value and of its place (the finalizer of SplitMix64): sums of them stand for all of it. A sum
    that is weighted only would not: two flips of the uppermost bit cancel out under any odd weights."""
    mixed = torch.arange(1, values.numel() + 1, device=values.device).mul_(-0x61C8864680B583EB).add_(values)
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        mixed ^= (mixed >> shift) & ((1 << (64 - shift)) - 1)
        mixed *= factor
    return mixed ^ ((mixed >> 31) & ((1 << 33) - 1))
