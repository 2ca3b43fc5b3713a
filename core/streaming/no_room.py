"""What follows when a unit finds no room on the device during a pass: the error, and a larger region in the next layout.

A unit is a group of weights that cross to the device together. The region is the device memory through which units that
stream pass. A plan sizes it for two or three of the largest units. A model may use more units at once: one operator takes
weights of several units, or the model keeps a view of a weight beyond its unit's forward. If even the bytes of unused units
do not suffice, the pass ends with the error that `no_room` makes. `region_for` says how large the next layout should make
the region, at the expense of units that stay on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..common.errors import BudgetError
from ..common.sizes import format_size
from ..device.slot import SlotState, SlotUnit
from ..plan.residency import Wish, resident_cost, round_up

if TYPE_CHECKING:
    from .streamer import Streamer
    from .unit import StreamedUnit


@dataclass(frozen=True)
class PlannedBytes:
    """The device memory in bytes that a plan gives to other things than the region.

    ``outside``: all of it. ``fixed``: of it, what every plan needs, whatever the budget.
    """

    outside: int
    fixed: int


NOTHING_PLANNED = PlannedBytes(0, 0)


def region_for(together: Sequence[SlotUnit], region_bytes: int) -> int:
    """Return the bytes to ask for, so that the units ``together`` find room in the region at the same time.

    That is the largest one's bytes for each, because those in use cannot move together. ``region_bytes``: the present
    region, which did not suffice. The result is at least twice as large, because the pass ended at the first unit without
    room, and those after it are not known.
    """
    return max(len(together) * max(unit.nbytes for unit in together), 2 * region_bytes)


def no_room(streamer: Streamer, unit: StreamedUnit, found: BudgetError) -> BudgetError:
    """Return the error of a pass in which ``unit`` found no room, and ask for a larger region in the next layout. The error
    names a larger budget: one for the number of slots that plans ask for, or, if the present budget is not smaller than
    that, one for all units.

    ``found``: the pool's error, which names the unit and those that take the memory.
    """
    region_bytes, planned, grain = streamer.region_bytes, streamer.planned, streamer.engine.grain
    extents = streamer.pool.memory.region.extents
    stuck = [
        extent.slot.unit for extent in extents if extent.slot.state in (SlotState.IN_USE, SlotState.HELD)
    ]
    asked = streamer.next_layout
    asked.region_bytes = max(asked.region_bytes, region_for([unit, *stuck], region_bytes))
    # A budget in which the units just fit is not enough: a plan for it may use the bytes for units that stay, and the
    # rest of the step may use still more units at once. So name the budget with all the slots that a plan asks for, in
    # which that number of units find room whatever their sizes. If the present budget is not smaller, name the budget
    # that holds every unit.
    sizes, slots = [other.nbytes for other in streamer.units], Wish().slots
    least = planned.outside + resident_cost(sizes, grain)
    with_slots = planned.fixed + round_up(slots * max(sizes), grain)
    if len(stuck) < slots and planned.outside + region_bytes < with_slots:
        least = min(least, with_slots)
    return BudgetError(
        f"{found}; raise vram to {least} bytes ({format_size(least)}), use a finer granularity, or enable gradient "
        "checkpointing. The next forward gets a larger region, if units that stay on the device can give way to it",
        least,
    )
