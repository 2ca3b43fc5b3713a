"""Makes schedules: how units are held, the region's size, the places in it, and the fetches of a cycle.

The units that stay are a prefix of one fixed permutation (`schedule_residents.resident_order`), so only its length is
to be chosen. It follows from the size of the region: a larger region gives fetches more lead and keeps more of what is
used again soon, a smaller one leaves more memory for units that stay. A few sizes are tried, in multiples of the largest
unit that passes through the region, and all of the capacity as region; the simulation of a cycle decides. Whether units
are packed is decided by a formula (`schedule_ways`), and by the simulation where the formula's two results are close. For
an order with phases the layout of `schedule_phases` is tried as well.

The module imports no torch and has no side effects.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .predict import Link
from .residency import GRAIN
from .schedule import Schedule, Times, UnitCost, UseOrder, Way
from .schedule_layout import lay_out
from .schedule_residents import bytes_at_once, least_capacity, refuse_too_little
from .schedule_seconds import predict_schedule
from .schedule_ways import Split, WayCosts, way_costs

# Sizes of the region to try, in multiples of the largest unit that passes through it; None: the whole capacity.
FIRST_MULTIPLE = 2.0
OTHER_MULTIPLES = (3.0, None, 1.5, 1.0)
# In an order of more uses than this only two of them are tried, so that the table is made in time. Where the link binds,
# more lead is of no use, and each unit more that stays saves copies.
MANY_USES = 500
LINK_BOUND_MULTIPLES = (None, 1.0)
UNBOUND_MULTIPLES = (3.0, None)
LINK_BINDS = 0.95  # the link binds a cycle if it is busy for more than this share of the cycle's seconds
# Regions to try with packed units, and whether what streams is packed, too. Packed bytes wait for a staging buffer and not
# for a place, so a region of one decoded unit may do. Raw ones share the region with what is decoded, and need more.
PACKED_REGIONS = ((1.0, True), (2.0, True), (3.0, False))
# What exceeds the least seconds by more than this factor is not looked at further: splits with packed units by the formula,
# and other regions with raw units by the first one's simulation. The formula does not know what the region keeps for
# later uses, so with raw units only more than `FAR` counts.
CLOSE, FAR = 1.2, 1.5


def make_schedule(
    order: UseOrder, units: Sequence[UnitCost], capacity: int, times: Times, grain: int = GRAIN
) -> Schedule:
    """Return the schedule of ``order`` with the least predicted seconds in ``capacity`` bytes of device memory.

    ``units``: costs by unit. ``grain``: bytes to whose multiples the device's allocator rounds, a multiple of `ALIGN`.
    The same arguments always give the same schedule. Raises BudgetError, with the least capacity that works, if the
    units that are in use at the same time do not fit, and ValueError if ``times`` does not fit ``order``.
    """
    if len(times.compute) != len(order.uses):
        raise ValueError(f"got {len(times.compute)} times for an order of {len(order.uses)} uses")
    costs = way_costs(order, units, times, grain)
    if costs.raw_bytes[-1] <= capacity:
        return lay_out(costs, Split(len(units), len(units), False), capacity)
    refuse_too_little(capacity, least_capacity(order, units, grain))
    search = _Search(costs, capacity)
    raw = costs.raw_split(capacity, FIRST_MULTIPLE)
    packed = [costs.packed_split(capacity, *region) for region in PACKED_REGIONS if any(costs.packed)]
    splits = [split for split in packed if split and costs.seconds(split) < costs.seconds(raw)]
    least = min(map(costs.seconds, [raw, *splits]))
    if costs.seconds(raw) < FAR * least:
        search.try_split(raw)
    for split in splits:
        if costs.seconds(split) < CLOSE * least:
            search.try_split(split)
    search.try_raw_regions(raw)
    assert search.best is not None, "the split of the least seconds was tried"
    if len(order.phases) > 1:
        nothing = Split(0, 0, Way.STREAMED_PACKED in search.best.ways)
        if not costs.leaves_region(nothing, capacity, 1.0):
            nothing = Split(0, 0, False)
        search.try_split(nothing, by_phase=True)
    return search.best


def schedule_in_region(
    order: UseOrder, units: Sequence[UnitCost], region_bytes: int, grain: int = GRAIN
) -> Schedule:
    """Return the schedule of ``order`` in which no unit stays, and all pass raw through a region of ``region_bytes`` bytes.

    Raises BudgetError, with the least bytes that work, if the units that are in use at the same time do not fit.
    """
    refuse_too_little(region_bytes, bytes_at_once(order, units, grain))
    # Times have no part in it, because there is nothing to choose.
    costs = way_costs(order, units, Times(Link(1.0), (0.0,) * len(order.uses)), grain)
    return lay_out(costs, Split(0, 0, False), region_bytes)


class _Search:
    """Lays splits out and keeps the schedule with the least predicted seconds."""

    def __init__(self, costs: WayCosts, capacity: int) -> None:
        self._costs, self._capacity = costs, capacity
        self.best: Schedule | None = None
        self._seconds = float("inf")
        self._floor = sum(costs.times.compute) * (1 + 1e-9)
        self._tried: dict[tuple[Split, bool], tuple[Schedule, float]] = {}

    def try_raw_regions(self, first: Split) -> None:
        """Try other sizes of the region with raw units, if the schedule of ``first`` is close to the best one."""
        costs = self._costs
        schedule, seconds = self._tried.get((first, False), (None, math.inf))
        if schedule is None or seconds > CLOSE * self._seconds:
            return
        multiples: tuple[float | None, ...] = OTHER_MULTIPLES
        if len(costs.order.uses) > MANY_USES:
            busy = schedule.wire_bytes / costs.times.link.bytes_per_second
            multiples = LINK_BOUND_MULTIPLES if busy > LINK_BINDS * seconds else UNBOUND_MULTIPLES
        for multiple in multiples:
            self.try_split(
                Split(0, 0, False) if multiple is None else costs.raw_split(self._capacity, multiple)
            )

    def try_split(self, split: Split, by_phase: bool = False) -> None:
        """Keep the schedule of ``split`` if it takes less seconds than the best one so far."""
        if (split, by_phase) in self._tried or self._seconds <= self._floor:
            return
        schedule = lay_out(self._costs, split, self._capacity, by_phase)
        seconds = predict_schedule(schedule, self._costs.times).seconds
        self._tried[split, by_phase] = schedule, seconds
        if seconds < self._seconds:
            self.best, self._seconds = schedule, seconds
