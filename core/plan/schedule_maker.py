"""Makes schedules: how units are held, the region's size, the places in it, and the fetches of a cycle.

The units that stay are a prefix of one fixed permutation (`schedule_residents.resident_order`), so only its length is
to be chosen. It follows from the size of the region: a larger region gives fetches more lead and keeps more of what is
used again soon, a smaller one leaves more memory for units that stay. A few sizes are tried, in multiples of the largest
unit that passes through the region, and all of the capacity as region; the simulation of a cycle decides. Whether units
are packed is decided by a formula (`schedule_ways`), and by the simulation where the formula's two results are close. For
an order with phases the layouts of `schedule_phases` are tried as well.

The module imports no torch and has no side effects.
"""

from __future__ import annotations

from collections.abc import Sequence

from .residency import GRAIN
from .schedule import Schedule, Times, UnitCost, UseOrder
from .schedule_layout import lay_out
from .schedule_phases import PhaseLayout
from .schedule_residents import refuse_too_little
from .schedule_seconds import predict_schedule
from .schedule_ways import Split, WayCosts, way_costs

# Sizes of the region to try, in multiples of the largest unit that passes through it; None: the whole capacity. Where
# the link binds, more lead is of no use, and each unit more that stays saves copies.
FIRST_MULTIPLE = 2.0
LINK_BOUND_MULTIPLES = (None, 1.0)
OTHER_MULTIPLES = (3.0, None)
LINK_BINDS = 0.95  # the link binds a cycle if it is busy for more than this share of the cycle's seconds
# Packed bytes wait for a staging buffer and not for a place, so that a region of one decoded unit may do.
PACKED_MULTIPLES = (1.0, 2.0)
# If the formula's seconds with packed units are below this share of those without, the latter are not simulated.
SURE = 0.8
PHASE_LAYOUTS = (PhaseLayout(2.0, True), PhaseLayout(2.0, False))


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
    refuse_too_little(order, units, capacity, grain)
    search = _Search(costs, capacity)
    raw = costs.raw_split(capacity, FIRST_MULTIPLE)
    packed = (
        [costs.packed_split(capacity, multiple) for multiple in PACKED_MULTIPLES] if any(costs.packed) else []
    )
    packed_seconds = min(
        (costs.seconds(split) for split in packed if split is not None), default=float("inf")
    )
    if packed_seconds >= SURE * costs.seconds(raw):
        search.try_raw(raw)
    packs = False
    if packed_seconds < costs.seconds(raw):
        for split in packed:
            if split is not None:
                search.try_split(split)
                packs |= split.packs
    if len(order.phases) > 1:
        for layout in PHASE_LAYOUTS:
            search.try_split(Split(0, 0, packs), layout)
    assert search.best is not None, "the empty prefix leaves the whole capacity as region, which suffices"
    return search.best


class _Search:
    """Lays splits out and keeps the schedule with the least predicted seconds."""

    def __init__(self, costs: WayCosts, capacity: int) -> None:
        self._costs, self._capacity = costs, capacity
        self.best: Schedule | None = None
        self._seconds = float("inf")
        self._floor = sum(costs.times.compute) * (1 + 1e-9)
        self._tried = set[tuple[Split, PhaseLayout | None]]()

    def try_raw(self, first: Split) -> None:
        """Try ``first`` and other sizes of the region, with raw units only."""
        self.try_split(first)
        link = self._costs.times.link
        assert self.best is not None
        busy = self.best.wire_bytes / link.bytes_per_second + self.best.transfers * link.latency
        for multiple in LINK_BOUND_MULTIPLES if busy > LINK_BINDS * self._seconds else OTHER_MULTIPLES:
            split = (
                Split(0, 0, False) if multiple is None else self._costs.raw_split(self._capacity, multiple)
            )
            self.try_split(split)

    def try_split(self, split: Split, layout: PhaseLayout | None = None) -> None:
        """Keep the schedule of ``split`` if it takes less seconds than the best one so far."""
        if (split, layout) in self._tried or self._seconds <= self._floor:
            return
        self._tried.add((split, layout))
        schedule = lay_out(self._costs, split, self._capacity, layout)
        seconds = predict_schedule(schedule, self._costs.times).seconds
        if seconds < self._seconds:
            self.best, self._seconds = schedule, seconds
