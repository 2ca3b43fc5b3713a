"""Defines `HostMappedSlots`: kernels read a unit directly from pinned host memory, if the slot region has no
room for the unit.

A unit is a group of streamed tensors. A slot is the memory that holds a unit while it is used, normally in
the region, one range of device memory. A model may need more units at once than the region holds: one
operator uses several units, or the model keeps a view of a weight beyond its unit's forward. Every kernel
that reads a unit in host memory reads it over the link between host and device, which is slow. But the unit
takes no device memory, and the same kernels compute the same bits. If the budget allows, the next layout
keeps the units that fill the region on the device for good.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..common.errors import BudgetError
from ..host.arena import Block, HostArena, storage_bytes
from ..plan.region import Slot
from ..plan.residency import Wish, resident_cost, round_up
from .unit import StreamedUnit, Views, make_views

if TYPE_CHECKING:
    from .streamer import Streamer

NOWHERE = -1  # the offset of a slot outside the region


@dataclass(frozen=True)
class ReservedBytes:
    """The device memory in bytes that a plan reserves outside the region.

    ``outside``: all of it. ``fixed``: of it, what every plan reserves, whatever the budget.
    """

    outside: int
    fixed: int


NOTHING_RESERVED = ReservedBytes(0, 0)


@dataclass(frozen=True)
class _Known:
    """Views of a unit's bytes in host memory, valid as long as `ManagedUnit.version` returns ``version``.

    ``copied``: whether the memory is a copy that was made for these views.
    """

    version: int
    views: Views
    block: Block
    copied: bool


class HostMappedSlots:
    """The slots of one streamer that are in host memory. Must be called under the streamer's lock."""

    def __init__(self, streamer: Streamer) -> None:
        self._streamer = streamer
        self._arena: HostArena | None = None
        self._known: dict[int, _Known] = {}
        # (first address, address after the last byte) of each entry of `_known`. Hooks on other threads keep this
        # list, so it is changed in place.
        self.ranges: list[tuple[int, int]] = []

    def start(self, arena: HostArena) -> None:
        """Set ``arena`` as the allocator for copies of units that have no plain bytes on the host (packed
        units, units of files).
        """
        self._arena = arena

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that hold copies made for these slots."""
        return sum(known.block.data.numel() for known in self._known.values() if known.copied)

    def slot(self, unit: StreamedUnit) -> Slot | None:
        """Return a slot in host memory with the unit's bytes, or None if the device cannot address host
        memory.
        """
        views = self._views(unit)
        if views is None:
            return None
        engine, meter = self._streamer.engine, self._streamer.meter
        slot = Slot(unit, NOWHERE, unit.nbytes, unit.version())
        slot.views, slot.copied = views, engine.record(engine.stream())
        meter.copied(unit.name, None, unit.nbytes, unit.unit.raw_bytes, False)
        return slot

    def unit_at(self, address: int) -> tuple[StreamedUnit, int] | None:
        """Return the unit whose bytes in host memory include ``address``, and the offset of ``address`` in it."""
        for index, known in tuple(self._known.items()):  # other threads may add units
            start = address - known.views.base.data_ptr()
            if 0 <= start < known.views.base.numel():
                return self._streamer.units[index], start
        return None

    def _views(self, unit: StreamedUnit) -> Views | None:
        """Return views of the unit's present bytes in host memory, or None if the device cannot address that
        memory.
        """
        known = self._known.get(unit.index)
        if known is not None and known.version == unit.version():
            return known.views
        with torch.inference_mode(False), torch.no_grad():
            if known is not None:  # kernels may still be reading the outdated copy
                self._streamer.engine.synchronize()
                self._forget(unit.index)
            plain = unit.backing.plain_block()
            block = self._copy_of(unit) if plain is None else plain
            base = self._streamer.engine.mapped(block.data, block.pinned)
            if base is None:
                return None
            views = make_views(unit, base[: unit.nbytes])
        self._known[unit.index] = _Known(unit.version(), views, block, plain is None)
        self.ranges.append(_range_of(views))
        return views

    def _forget(self, index: int) -> None:
        """Drop the views of the unit with the number ``index``."""
        self.ranges.remove(_range_of(self._known.pop(index).views))

    def _copy_of(self, unit: StreamedUnit) -> Block:
        """Return a pinned block with a copy of the unit's plain bytes."""
        assert self._arena is not None
        self._streamer.tier.make_host_room(unit.nbytes)
        block = self._arena.allocate(unit.nbytes)
        for home in unit.homes:
            start = home.entry.offset
            block.data[start : start + home.entry.nbytes].copy_(storage_bytes(home.read()))
        self._arena.pin(block)
        return block

    def close(self) -> None:
        """Unpin and drop the copies."""
        for known in self._known.values():
            if known.copied:
                known.block.unpin()
        self._known.clear()
        self.ranges.clear()


def _range_of(views: Views) -> tuple[int, int]:
    """Return the first address of the unit's bytes, and the address after the last one."""
    start = views.base.data_ptr()
    return start, start + views.base.numel()


def no_room(streamer: Streamer, unit: StreamedUnit, stuck: list[Slot]) -> BudgetError:
    """Return the BudgetError for a unit that has no room in the region and that the device cannot read from
    host memory.

    ``stuck``: the slots that cannot be evicted from the region.
    """
    region, engine, reserved = streamer.region, streamer.engine, streamer.reserved
    # A budget in which the units just fit is not enough: a plan for it may use the bytes for residents, and the
    # rest of the step may use still more units at once. So name the budget with all the slots that a plan asks
    # for, in which that number of units find room whatever their sizes. If the present budget is not smaller, name
    # the budget that holds every unit.
    sizes, slots = [other.nbytes for other in streamer.units], Wish().slots
    least = reserved.outside + resident_cost(sizes, engine.grain)
    with_slots = reserved.fixed + round_up(slots * max(sizes), engine.grain)
    if len(stuck) < slots and reserved.outside + region.nbytes < with_slots:
        least = min(least, with_slots)
    names = ", ".join(repr(slot.unit.name) for slot in stuck)
    return BudgetError(
        f"no slot for unit {unit.name!r} ({unit.nbytes} bytes): the region of {region.nbytes} bytes is taken "
        f"by {names}, in use at the same time or kept by the model beyond their run, and {engine.name} cannot read "
        f"host memory that is not pinned; raise vram to {least} bytes or ram, use a finer granularity, or enable "
        "gradient checkpointing",
        least,
    )
