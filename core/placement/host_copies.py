"""Defines `HostCopies`: host copies of units that are kept from one layout of a session to the next, to avoid
copying bytes again.

A layout assigns each unit (a group of tensors) either to device memory, as a resident, or to host memory,
from which it is streamed. A unit's bytes are copied once to a host block of their own, plain or packed, and
pinned. While the unit streams, the block is its store. While the unit is resident, the block is kept. Before
the unit is streamed again, a fingerprint of the tensors on the device shows whether the block still holds
their values. So after a change of the budget, only units whose present values are not in host memory are
copied to the host.

`HostStore` is all host memory that is kept so: an arena of pinned blocks, the host copies, and packed weights.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..host.arena import Block, HostArena, storage_bytes
from ..host.spare_blocks import SpareBlocks
from ..model.managed_tensor import waits_elsewhere
from ..model.units import Unit
from ..plan.residency import SMALL_UNIT
from .packed_tensor import PackedTensor

if TYPE_CHECKING:
    from ..codec.unit_decoder import UnitDecoder
    from .packed_tensor import PackedTensor


@dataclass(eq=False)
class HostCopy:
    """A host copy of one unit in ``block``.

    ``tensors``: the model's tensors.
    ``views``: the tensors' values in the block, None for packed tensors.
    ``packed``: the packed form of each tensor, None for unpacked tensors.
    ``decoder``: decodes the packed block, None if nothing is packed.
    ``device_fingerprint``: the fingerprint of the values that were copied to the device, None while the unit
    is not resident.
    ``aside``: whether the block has the plain bytes of a resident that was put aside when the session was parked.
    ``known_fingerprint``: the fingerprint of the block's bytes, where they are those of the device.
    """

    tensors: list[torch.Tensor]
    views: list[torch.Tensor | None]
    block: Block
    packed: list[PackedTensor | None]
    decoder: UnitDecoder | None = None
    device_fingerprint: torch.Tensor | None = None
    aside: bool = False
    known_fingerprint: torch.Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether nothing is packed, so that the block has the bytes of the unit on the device."""
        return self.decoder is None and bool(self.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of the block."""
        return self.block.data.numel()

    def lies_in_block(self) -> bool:
        """Return whether all unpacked tensors of the model still use the memory of the block."""
        return all(
            view is None
            or (
                tensor.data_ptr() == view.data_ptr()
                and (tensor.dtype, tensor.shape, tensor.stride()) == (view.dtype, view.shape, view.stride())
            )
            for tensor, view in zip(self.tensors, self.views, strict=True)
        )

    def has(self, blob: torch.Tensor) -> bool:
        """Return whether ``blob``, the packed bytes of a weight, is in this block.

        The result is False for a weight whose value was replaced: its packed bytes are elsewhere.
        """
        start = self.block.data.data_ptr()
        return start <= blob.data_ptr() and blob.data_ptr() + blob.numel() <= start + self.nbytes

    def matches(self, unit: Unit, data: torch.Tensor) -> bool:
        """Return whether the tensors of ``unit`` are those of this copy, and ``data``, the bytes of the unit on the
        device, have not changed since the fingerprint was made.
        """
        if self.device_fingerprint is None or len(unit.entries) != len(self.tensors):
            return False
        if any(mine is not entry.tensor for mine, entry in zip(self.tensors, unit.entries, strict=True)):
            return False
        if not self._lie_as(unit, data.data_ptr()):
            return False
        return torch.equal(self.device_fingerprint, fingerprint([data]))

    def _lie_as(self, unit: Unit, start: int) -> bool:
        """Return whether the tensors on the device, from address ``start``, have the layout of this copy."""
        like = [
            view if packed is None else packed.layout
            for view, packed in zip(self.views, self.packed, strict=True)
        ]
        return all(
            entry.tensor.data_ptr() == start + entry.offset
            and (entry.tensor.dtype, entry.tensor.shape, entry.tensor.stride())
            == (view.dtype, view.shape, view.stride())  # type: ignore[union-attr]
            for entry, view in zip(unit.entries, like, strict=True)
        )


def _copy_key(unit: Unit) -> Hashable:
    """Return a key for the unit: the identities and offsets of its tensors."""
    return tuple((id(entry.tensor), entry.offset) for entry in unit.entries)


class HostCopies:
    """The host copies of one session, by unit. All methods are thread-safe."""

    def __init__(self) -> None:
        self._copies: dict[Hashable, HostCopy] = {}
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._copies)

    @property
    def packs(self) -> bool:
        """Whether any copy holds packed tensors."""
        return any(packed is not None for copy in self._copies.values() for packed in copy.packed)

    def keep(self, unit: Unit, copy: HostCopy) -> None:
        """Store ``copy`` as the host copy of ``unit``."""
        with self._lock:
            self._copies[_copy_key(unit)] = copy

    def find(self, unit: Unit) -> HostCopy | None:
        """Return the unit's copy, or None."""
        with self._lock:
            return self._copies.get(_copy_key(unit))

    def take(self, unit: Unit) -> HostCopy | None:
        """Remove and return the unit's copy, or return None. The caller owns the copy from then on."""
        with self._lock:
            return self._copies.pop(_copy_key(unit), None)

    def keep_only(self, units: Iterable[Unit]) -> None:
        """Release the copies of all units that are not in ``units``, except residents that were put aside."""
        wanted = {_copy_key(unit) for unit in units}
        with self._lock:
            for key in [key for key, copy in self._copies.items() if key not in wanted and not copy.aside]:
                _release(self._copies.pop(key))

    def drop_unused(self) -> None:
        """Release the copies of residents that were put aside and did not come back as the same units."""
        with self._lock:
            for key in [
                key for key, copy in self._copies.items() if copy.aside and copy.device_fingerprint is None
            ]:
                _release(self._copies.pop(key))

    def tensors(self) -> set[int]:
        """Return the ids of the tensors of all copies."""
        with self._lock:
            return {id(tensor) for copy in self._copies.values() for tensor in copy.tensors}

    def drop(self, unit: Unit) -> None:
        """Release the copy of ``unit``, if there is one."""
        copy = self.take(unit)
        if copy is not None:
            _release(copy)

    def discard(self, copy: HostCopy) -> None:
        """Release ``copy``. To be called if its bytes are outdated."""
        with self._lock:
            for key in [key for key, one in self._copies.items() if one is copy]:
                del self._copies[key]
        _release(copy)

    def unpin_resident_copies(self, nbytes: int) -> None:
        """Release pinned copies of resident units until ``nbytes`` of pinned memory are freed, or no such
        copy is left.

        The pinned memory is needed for streamed units, which are copied faster from it.
        """
        with self._lock:
            for key, copy in list(self._copies.items()):
                if nbytes <= 0:
                    return
                if copy.device_fingerprint is not None and copy.block.pinned:
                    nbytes -= copy.block.registered_bytes
                    _release(self._copies.pop(key))

    def unpin(self) -> None:
        """Unpin the blocks of all copies; the copies remain in pageable memory."""
        with self._lock:
            for copy in self._copies.values():
                copy.block.unpin()

    def clear(self) -> None:
        """Release all copies. Tensors of the model that use a block keep the block's memory, unpinned."""
        with self._lock:
            for copy in self._copies.values():
                _release(copy, always=False)
            self._copies.clear()


def _release(copy: HostCopy, always: bool = True) -> None:
    """Release the bytes of the copy, even if other code still refers to the object.

    ``always``: as in `move_small_tensors_out`.
    """
    move_small_tensors_out(copy.tensors, copy.block, always)
    copy.block.unpin()
    copy.block = Block(torch.empty(0, dtype=torch.uint8), False, 0)
    copy.tensors, copy.views, copy.packed, copy.decoder, copy.device_fingerprint = [], [], [], None, None
    copy.known_fingerprint = None


def move_small_tensors_out(tensors: Iterable[torch.Tensor], block: Block, always: bool = True) -> None:
    """Give small tensors that use the memory of ``block`` memory of their own, so that one small weight does
    not keep a whole block alive.

    ``always``: if False, this is done only if the tensors that still use the block take less than half of it.
    """
    start, end = block.data.data_ptr(), block.data.data_ptr() + block.data.numel()
    with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        # A tensor that was put aside as it is may be packed since then. Its storage has no address to ask for.
        with_bytes = [t for t in tensors if t.device.type == "cpu" and not waits_elsewhere(t)]
        in_block = [t for t in with_bytes if start <= t.data_ptr() < end]
        if not always and 2 * sum(t.numel() * t.element_size() for t in in_block) >= block.data.numel():
            return
        for tensor in in_block:
            if tensor.numel() * tensor.element_size() < SMALL_UNIT and not tensor.is_inference():
                tensor.data = tensor.detach().clone(memory_format=torch.preserve_format)


@torch.no_grad()
def fingerprint(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return an int64 tensor that identifies the bytes of dense tensors. The result is on the tensors'
    device.

    The bytes of each tensor, as 64-bit integers, are arranged in two square tables. The row sums and column sums of
    both tables are hashed together with their positions. Common edits (changed signs, exchanged rows or elements)
    change at least one of these sums. The call does not synchronize with the device. It takes about 30 operators for
    each tensor, whatever the tensor's size, and temporarily needs device memory of some hundred KiB.
    """
    with torch.inference_mode(False), torch._C.DisableTorchFunctionSubclass():
        hashes = [_mixed(_sums(storage_bytes(tensor))).sum() for tensor in tensors]
        return torch.stack(hashes) if hashes else torch.empty(0, dtype=torch.int64)


def _sums(flat: torch.Tensor) -> torch.Tensor:
    """Return the sums of the two tables of ``flat`` (uint8), and the bytes that are in no table."""
    words = flat[: flat.numel() // 8 * 8].view(torch.int64)
    parts = [flat[8 * words.numel() :].to(torch.int64)]
    # The two widths are odd and relatively prime. Changes that cancel out in the sums of one table then do not cancel
    # out in the sums of the other.
    narrow = math.isqrt(words.numel()) | 1
    for width in (narrow, narrow + 2):
        whole = words.numel() // width * width
        table = words[:whole].view(-1, width)
        parts += [table.sum(0), table.sum(1), words[whole:]]
    return torch.cat(parts)


def _mixed(values: torch.Tensor) -> torch.Tensor:
    """Return a hash of every value and its position (the finalizer of SplitMix64). Sums of these hashes
    identify the values.

    Sums with odd weights would not suffice: two flips of the highest bit cancel out in them, whatever the
    weights.
    """
    mixed = torch.arange(1, values.numel() + 1, device=values.device).mul_(-0x61C8864680B583EB).add_(values)
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        mixed ^= (mixed >> shift) & ((1 << (64 - shift)) - 1)
        mixed *= factor
    return mixed ^ ((mixed >> 31) & ((1 << 33) - 1))


def _always(copy: HostCopy) -> bool:
    """Return True. The default of ``serves`` in `HostStore.reuse`: every host copy is accepted."""
    return True


@dataclass(frozen=True, eq=False)
class HostStore:
    """Host memory that the successive placements of a session share.

    ``arena``: allocates and pins blocks.
    ``copies``: host copies of units from the previous layout, None if none are kept.
    ``shelf``: packed weights, by the id of the model's tensor. While a weight is on the shelf, the model's
    tensor has no bytes of its own.
    ``spares``: pinned blocks that were made ahead for residents, None if none are.
    """

    arena: HostArena
    copies: HostCopies | None
    shelf: dict[int, PackedTensor]
    spares: SpareBlocks | None = None

    # -- packed weights

    def value(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return the value of ``tensor``: the tensor itself, or its packed weight decoded on ``device``."""
        packed = self.shelf.get(id(tensor))
        return tensor.detach() if packed is None else packed.value(device)

    def take(self, tensor: torch.Tensor) -> PackedTensor | None:
        """Remove the packed weight of ``tensor`` from the shelf and return it, or return None.

        The caller has to give the tensor its value in another form.
        """
        tensor.__dict__.pop("_carom", None)
        return self.shelf.pop(id(tensor), None)

    # -- host copies of units from the previous layout

    def find(self, unit: Unit) -> HostCopy | None:
        """Return the unit's host copy, or None."""
        return None if self.copies is None else self.copies.find(unit)

    def is_current(self, copy: HostCopy) -> bool:
        """Return whether ``copy`` holds the present values of its tensors, and none of them is on the
        device."""
        mine = all(
            packed is None or (self.shelf.get(id(tensor)) is packed and copy.has(packed.blob))
            for tensor, packed in zip(copy.tensors, copy.packed, strict=True)
        )
        return copy.device_fingerprint is None and mine and copy.lies_in_block()

    def reuse(self, unit: Unit, serves: Callable[[HostCopy], bool] = _always) -> HostCopy | None:
        """Remove the unit's host copy from the store and return it, if it is current and ``serves(copy)`` is
        true. Otherwise discard the copy and return None.
        """
        copy = self.find(unit)
        if copy is None or self.copies is None:
            return None
        if not self.is_current(copy) or not serves(copy):
            self.copies.discard(copy)
            return None
        return self.copies.take(unit)

    def attach_to_copy(self, copy: HostCopy) -> None:
        """Let the tensors of ``copy``, which were on the device, use the memory of the copy again."""
        for tensor, view, packed in zip(copy.tensors, copy.views, copy.packed, strict=True):
            if packed is None:
                assert view is not None
                tensor.data = view
            else:
                self.shelf[id(tensor)] = packed
                packed.give_up_memory()
