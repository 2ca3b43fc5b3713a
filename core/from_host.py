"""Units that find no room in the region: operators read their bytes from pinned host memory, where the device can address it.

A model may need more units at once than the region holds: one operator uses several, or a view of a weight is kept beyond
its unit's run. Every read of such a unit crosses the link, so it is slow; it takes no device memory, and the same kernels
compute the same bits. The units that are in the way stay resident from the next layout on, where the budget allows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .slots import Slot
from .store.arena import Block, HostArena, storage_bytes
from .streamed import Streamed, Views, make_views

if TYPE_CHECKING:
    from .streamer import Streamer

NOWHERE = -1  # the offset of a slot that is not in the region


@dataclass(frozen=True)
class _Known:
    """Views of a unit's bytes as of one version. ``copied``: the block holds a copy of them for this purpose alone."""

    version: int
    views: Views
    block: Block
    copied: bool


class FromHost:
    """Slots of one streamer over host memory. Called under the streamer's lock."""

    def __init__(self, streamer: Streamer) -> None:
        self._streamer = streamer
        self._arena: HostArena | None = None
        self._known: dict[int, _Known] = {}  # by the unit's index

    def start(self, arena: HostArena) -> None:
        """Memory for units whose plain bytes are not on the host (packed ones, and those of files) comes from ``arena``."""
        self._arena = arena

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that hold copies of units for this purpose alone."""
        return sum(known.block.data.numel() for known in self._known.values() if known.copied)

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
        if known is not None and known.version == unit.version():
            return known.views
        with torch.inference_mode(False), torch.no_grad():
            if known is not None:  # kernels may still read the former bytes
                self._streamer.engine.synchronize()
                del self._known[unit.index]
            copied = unit.decoder is not None or unit.block.data.numel() < unit.nbytes
            block = self._copy_of(unit) if copied else unit.block
            base = self._streamer.engine.mapped(block.data, block.pinned)
            if base is None:
                return None
            views = make_views(unit, base[: unit.nbytes])
        self._known[unit.index] = _Known(unit.version(), views, block, copied)
        return views

    def _copy_of(self, unit: Streamed) -> Block:
        assert self._arena is not None
        self._streamer.make_host_room(unit.nbytes)
        block = self._arena.allocate(unit.nbytes)
        for owner in unit.owners:
            start = owner.entry.offset
            block.data[start : start + owner.entry.nbytes].copy_(storage_bytes(owner.read()))
        self._arena.pin(block)
        return block

    def close(self) -> None:
        for known in self._known.values():
            if known.copied:
                known.block.unpin()
        self._known.clear()
