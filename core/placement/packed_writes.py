"""Defines `PackedWrites`, which stores the values that the program writes to packed weights (a merge of adapters, for
example).

The bytes of a packed unit are in one block of host memory. A new value of a weight seldom packs to the same number of
bytes as the old one. If the block has room for it, the value is written over the old one. Otherwise the unit is copied
to a new block before its next use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..codec.lossless import Code
from ..codec.lossless_format import Header
from ..device.engine import Engine
from ..host.arena import Block, storage_bytes
from .packed_tensor import PackedTensor, pack
from .packer import OutOfMemory

if TYPE_CHECKING:
    from .packed_backing import PackedBacking
    from .packed_home import PackedHome


class PackedWrites:
    """The writes to the packed weights of one tier since its units were used last.

    ``in_place``: whether values may be written over the old ones.
    ``most``: the most bytes that a weight may take packed.
    ``new_block``: returns a block of the size that a unit needs, without the unit's bytes. Raises MemoryError.
    ``rebuild``: copies a unit to a block that ``new_block`` returned.
    ``renew_decoder``: replaces the decoder of a unit by one for the present bytes in its block.
    """

    def __init__(
        self, engine: Engine, in_place: bool, most: int, new_block: Callable[[PackedBacking], Block],
        rebuild: Callable[[PackedBacking, Block], None], renew_decoder: Callable[[PackedBacking], None],
    ) -> None:  # fmt: skip
        self._engine, self._in_place, self._most = engine, in_place, most
        self._new_block, self._rebuild, self._renew_decoder = new_block, rebuild, renew_decoder
        # The unit with weights that its block has no room for, and the block to which the unit moves before it is used.
        # There is at most one, so that only one unit is in host memory twice.
        self._moving: tuple[PackedBacking, Block] | None = None
        # The other units with weights that were written since their decoders were made.
        self._overwritten: list[PackedBacking] = []

    def replace(self, home: PackedHome, value: torch.Tensor) -> None:
        """Store ``value`` as the value of a packed weight. Raises MemoryError; the weight then keeps its previous value."""
        packed, backing = home.packed, cast("PackedBacking", home.unit)
        with backing.runtime.lock, torch.inference_mode(False), torch.no_grad():
            room = self._room(packed, backing)
            header, blob = self._encode(packed, value, room)
            if room >= blob.numel() and (header is None) == (packed.header is None):
                self._overwrite(packed, backing, header, blob)
            else:
                self._put_beside(packed, backing, header, blob.cpu())

    def _room(self, packed: PackedTensor, backing: PackedBacking) -> int:
        """Return the bytes of the unit's block that the weight's new value may take; 0 if the old value must stay."""
        moving = self._moving is not None and self._moving[0] is backing
        # The unit of a parked session has no block, because the block is kept for the next layout.
        if not self._in_place or moving or packed.snapshots or not packed.lies_in(backing.block.data):
            return 0
        return packed.blob.numel() if packed.header is None else min(self._most, packed.room)

    def _overwrite(
        self, packed: PackedTensor, backing: PackedBacking, header: Header | None, blob: torch.Tensor
    ) -> None:
        """Write the bytes ``blob`` over the weight's old bytes."""
        if backing not in self._overwritten:
            self._overwritten.append(backing)
            backing.outdated = True
            self._engine.synchronize()  # copies from the block may be running
        backing.epoch += 1
        start = packed.blob.data_ptr() - backing.block.data.data_ptr()
        # An interrupt in the copy loses nothing: `settle` repeats it.
        packed.header, packed.blob = header, blob
        _copy_to(backing.block, start, packed)

    def _put_beside(
        self, packed: PackedTensor, backing: PackedBacking, header: Header | None, blob: torch.Tensor
    ) -> None:
        """Keep the bytes ``blob`` in host memory of their own until the unit is copied to a new block."""
        before = packed.header, packed.blob
        if backing.runtime.closed:
            packed.header, packed.blob = header, blob
            return
        if self._moving is None or self._moving[0] is not backing:
            self.settle()
        packed.header, packed.blob = header, blob
        backing.epoch += 1
        try:
            block = self._new_block(backing)
            self._moving, backing.outdated = (backing, block), True
        except BaseException:  # there is no memory for a new block
            packed.header, packed.blob = before
            raise

    def _encode(
        self, packed: PackedTensor, value: torch.Tensor, room: int
    ) -> tuple[Header | None, torch.Tensor]:
        """Return header and bytes of ``value``, packed if ``packed`` is.

        A value on the device is packed there if the device packs faster than the host, and its bytes are on the device.
        """
        if self._engine.unpacks and value.device == self._engine.device:
            try:
                return _pack_at(packed, value, value.device, room)
            except OutOfMemory:
                pass
        return _pack_at(packed, value, torch.device("cpu"), room)

    def settle(self) -> None:
        """Make the units whose weights were written ready for use. Waits for copies that read their blocks."""
        if self._moving is None and not self._overwritten:
            return
        # A fetch calls this within a step, where dispatch modes must not see the copies.
        with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
            if self._moving is not None:
                backing, block = self._moving
                self._rebuild(backing, block)
                self._moving, backing.outdated = None, False
            if self._overwritten:
                self._engine.synchronize()
            while self._overwritten:
                backing = self._overwritten[-1]
                if backing.outdated:
                    self._renew_decoder(backing)
                    backing.outdated = False
                self._overwritten.pop()

    def forget(self) -> None:
        """Make no unit ready any more. The values are in the weights' own bytes."""
        self._moving = None
        self._overwritten.clear()


def put_back(backing: PackedBacking, places: list[int]) -> None:
    """Copy the bytes of weights that are not in the unit's block, because an interrupt came, to their ``places`` in it."""
    for packed, start in zip(backing.tensors, places, strict=True):
        if packed is not None and not packed.lies_in(backing.block.data):
            _copy_to(backing.block, start, packed)


def _copy_to(block: Block, start: int, packed: PackedTensor) -> None:
    """Copy the bytes of ``packed`` to ``block``, from the byte ``start`` on, and let them be there."""
    piece = block.data[start : start + packed.blob.numel()]
    with _disable_current_modes():
        piece.copy_(packed.blob)
    packed.blob = piece


def _pack_at(
    packed: PackedTensor, value: torch.Tensor, device: torch.device, room: int
) -> tuple[Header | None, torch.Tensor]:
    """Return header and bytes of ``value`` on ``device``, packed if ``packed`` is.

    The exponent code of the weight's old value is tried first, because new values are mostly close to the old ones. If
    the result has more than ``room`` bytes, the code is chosen anew.
    """
    layout, old = packed.layout, packed.header
    fresh = torch.empty_strided(layout.shape, layout.stride(), dtype=layout.dtype, device=device)
    fresh.copy_(value)
    found = None
    if old is not None and room:
        found = pack(fresh, code=Code(old.k, old.base, old.escape_table))
    if old is not None and (found is None or found[1].numel() > room):
        found = pack(fresh)
    return found or (None, storage_bytes(fresh))
