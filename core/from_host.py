"""Units that find no room in the region: operators read their bytes from pinned host memory, where the device can address it.

A model may need more units at once than the region holds: one operator uses several, or a view of a weight is kept beyond
its unit's run. Every read of such a unit crosses the link, so it is slow; it takes no device memory, and the same kernels
compute the same bits. The units that are in the way stay resident from the next layout on, where the budget allows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .slots import Slot
from .store.arena import Block, HostArena, storage_bytes
from .streamed import Streamed, Views, make_views

if TYPE_CHECKING:
    from .streamer import Streamer

NOWHERE = -1  # the offset of a slot that is not in the region


class FromHost:
    """Slots of one streamer over host memory. Called under the streamer's lock."""

    def __init__(self, streamer: Streamer) -> None:
        self._streamer = streamer
        self._arena: HostArena | None = None
        self._known: dict[
            int, tuple[int, Views, Block]
        ] = {}  # unit -> its version, views of its bytes, the bytes

    def start(self, arena: HostArena) -> None:
        """Memory for units whose plain bytes are not on the host (packed ones, and those of files) comes from ``arena``."""
        self._arena = arena

    def slot(self, unit: Streamed) -> Slot | None:
        """A slot over the unit's bytes on the host; None where the device cannot address them."""
        views = self._views(unit)
        if views is None:
            return None
        engine, meter = self._streamer.engine, self._streamer.meter
        slot = Slot(unit, NOWHERE, unit.nbytes, unit.version())
        slot.views, slot.copied = views, engine.record(engine.stream())
        meter.copied(unit.name, None, unit.nbytes, unit.unit.raw_bytes, False)
        return slot

    def _views(self, unit: Streamed) -> Views | None:
        known = self._known.get(unit.index)
        if known is not None and known[0] == unit.version():
            return known[1]
        with torch.inference_mode(False), torch.no_grad():
            block = self._block(unit)
            base = self._streamer.engine.mapped(block.data, block.pinned)
            if base is None:
                return None
            views = make_views(unit, base[: unit.nbytes])
        self._known[unit.index] = unit.version(), views, block
        return views

    def _block(self, unit: Streamed) -> Block:
        if unit.decoder is None and unit.block.data.numel() >= unit.nbytes:
            return unit.block
        assert self._arena is not None
        block = self._arena.allocate(unit.nbytes)
        for owner in unit.owners:
            start = owner.entry.offset
            block.data[start : start + owner.entry.nbytes].copy_(storage_bytes(owner.read()))
        self._arena.pin(block)
        return block

    def close(self) -> None:
        for _, _, block in self._known.values():
            if not any(block is unit.block for unit in self._streamer.units):
                block.unpin()
        self._known.clear()
