"""Makes the schedule of the units that stream: one place in the region for each fetch, and when fetches are issued.

A unit is a group of weights that cross to the device together. The region is the device memory through which units pass.
The schedule is a table for an order of uses (`plan.schedule.Schedule`).
"""

from __future__ import annotations

from collections.abc import Sequence

from ..placement.backing import Backing
from ..plan.learnt_order import KnownSchedules, LearntOrder
from ..plan.region import ALIGN
from ..plan.schedule import Schedule, UnitCost, UseOrder
from ..plan.schedule_maker import schedule_in_region


def kept_units(
    backings: Sequence[Backing], region_bytes: int, known: LearntOrder, schedules: KnownSchedules
) -> set[int]:
    """Return the ids of the `Unit` objects that stay in the region from one pass to the next, if the order of use is
    ``known``. ``backings``: of the units that stream. ``schedules``: those of the module.

    Updates by an optimizer are not in the order. They only make units stream that would stay, and trainable units
    stream in any case.
    """
    uses = known.positions([backing.unit.names for backing in backings])
    order = UseOrder(tuple(unit for unit, _ in uses))
    schedule = schedule_units(order, backings, region_bytes, schedules)
    fetched = {schedule.unit_of[number] for number in schedule.fetched}
    return {id(backing.unit) for backing in backings if backing.index not in fetched}


def schedule_units(
    order: UseOrder, backings: Sequence[Backing], region_bytes: int, schedules: KnownSchedules
) -> Schedule:
    """Return the schedule of ``order`` in a region of ``region_bytes`` bytes. ``backings``: of the units that stream.
    ``schedules``: those of the module, among which it is looked for.
    """
    costs = tuple(UnitCost(backing.nbytes, 0, backing.trainable) for backing in backings)
    links = 1 + len({id(backing.peer.peer) for backing in backings if backing.peer is not None})
    return schedules.find(
        (order, costs, region_bytes, links),
        lambda: schedule_in_region(order, costs, region_bytes, ALIGN, links),
    )
