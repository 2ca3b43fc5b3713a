"""Makes schedules: which units stay on the device, the region's size, and the fetches of a cycle.

The units that stay are a prefix of one fixed permutation (`schedule_residents.resident_order`), so only the prefix's length is to be
chosen. It follows from the size of the region: a larger region gives fetches more lead and keeps more of what is used
again soon, a smaller one leaves more memory for units that stay. A few sizes are tried, in multiples of the largest
unit that passes through the region, and all of the capacity as region; the simulation of a cycle decides. The module
imports no torch and has no side effects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..common.errors import BudgetError
from ..common.sizes import format_size
from .residency import GRAIN, round_up
from .schedule import Schedule, Times, UnitCost, UseOrder, Way, slot_bytes
from .schedule_fetches import find_visits, in_order_of_need, required_fetches
from .schedule_offsets import place_units
from .schedule_residents import enclosing_zone, prefix_costs, resident_order
from .schedule_seconds import predict_schedule

# Sizes of the region to try, in multiples of the largest unit that passes through it; None: the whole capacity. Where
# the link binds, more lead is of no use, and each unit more that stays saves copies.
FIRST_MULTIPLE = 2.0
LINK_BOUND_MULTIPLES = (None, 1.0)
OTHER_MULTIPLES = (3.0, None)
LINK_BINDS = 0.95  # the link binds a cycle if it is busy for more than this share of the cycle's seconds


def make_schedule(
    order: UseOrder, units: Sequence[UnitCost], capacity: int, times: Times, grain: int = GRAIN
) -> Schedule:
    """Return the schedule of ``order`` with the least predicted seconds in ``capacity`` bytes of device memory.

    ``units``: costs by unit. ``grain``: bytes to whose multiples the device's allocator rounds. The same arguments
    always give the same schedule. Raises BudgetError, with the least capacity that works, if the units that are in use
    at the same time do not fit, and ValueError if ``times`` does not fit ``order``.
    """
    if len(times.compute) != len(order.uses):
        raise ValueError(f"got {len(times.compute)} times for an order of {len(order.uses)} uses")
    problem = _Problem(order, tuple(units), capacity, grain)
    permutation = resident_order(order, len(units))
    costs = prefix_costs(permutation, units, grain)
    if costs[-1] <= capacity:
        return problem.schedule(permutation, 0)
    least = least_capacity(order, units, grain)
    if capacity < least:
        raise BudgetError(
            f"{format_size(capacity)} of device memory are too small: the units that are in use at the same time take "
            f"{format_size(least)}; the least capacity that works is {least} bytes",
            least,
        )
    lengths = _PrefixLengths(problem, permutation, costs)

    def with_region(multiple: float | None) -> tuple[Schedule, float]:
        length = lengths.longest(multiple)
        made = problem.schedule(permutation[:length], (capacity - costs[length]) // grain * grain)
        return made, predict_schedule(made, times).seconds

    best, seconds = with_region(FIRST_MULTIPLE)
    busy = best.wire_bytes / times.link.bytes_per_second + best.transfers * times.link.latency
    floor = sum(times.compute) * (1 + 1e-9)
    for multiple in LINK_BOUND_MULTIPLES if busy > LINK_BINDS * seconds else OTHER_MULTIPLES:
        if seconds > floor:
            other, other_seconds = with_region(multiple)
            if other_seconds < seconds:
                best, seconds = other, other_seconds
    return best


def least_capacity(order: UseOrder, units: Sequence[UnitCost], grain: int = GRAIN) -> int:
    """Return the least capacity in bytes with which ``order`` can run: all units, or those in use at the same time."""
    used = sorted(set(order.uses))
    single = max((slot_bytes(units[unit].nbytes) for unit in used if unit not in order.enclosing), default=0)
    at_once = round_up(enclosing_zone(order, used, units).nbytes + single, grain)
    return min(at_once, prefix_costs(range(len(units)), units, grain)[-1])


@dataclass(frozen=True)
class _Problem:
    """What a schedule is made for, and how it follows from the units that stay and the bytes of the region."""

    order: UseOrder
    units: tuple[UnitCost, ...]
    capacity: int
    grain: int

    def schedule(self, residents: Sequence[int], region_bytes: int) -> Schedule:
        """Return the schedule in which ``residents`` stay and the others pass through ``region_bytes`` bytes."""
        order, units, count = self.order, self.units, len(self.order.uses)
        staying = set(residents)
        streamed = sorted(set(order.uses) - staying)
        sizes = [slot_bytes(cost.nbytes) for cost in units]
        trainable = {unit for unit in streamed if units[unit].trainable}
        visits = find_visits(order, set(streamed), trainable)
        zone = enclosing_zone(order, streamed, units)
        sequence = [visit.unit for visit in visits if visit.unit not in zone.offsets]
        high = min(region_bytes, zone.nbytes + sum(sizes[unit] for unit in set(sequence)))
        offsets = dict(zone.offsets)
        offsets.update(place_units(sequence, sizes, zone.nbytes, high))
        table = in_order_of_need(required_fetches(visits, offsets, sizes, count), count)
        used = max((offset + sizes[unit] for unit, offset in offsets.items()), default=0)
        return Schedule(
            order,
            units,
            self.capacity,
            self.grain,
            tuple(Way.CACHED_RAW if unit in staying else Way.STREAMED_RAW for unit in range(len(units))),
            round_up(used, self.grain),
            0,
            tuple(offsets.get(unit, -1) for unit in range(len(units))),
            *table,
        )


class _PrefixLengths:
    """The lengths of prefixes of ``permutation`` that leave room for a region."""

    def __init__(self, problem: _Problem, permutation: Sequence[int], costs: Sequence[int]) -> None:
        order, used = problem.order, set(problem.order.uses)
        self._problem, self._costs = problem, costs
        self._largest = [0]  # the largest slot of the units behind each prefix
        for unit in reversed(permutation):
            single = unit in used and unit not in order.enclosing
            self._largest.append(
                max(self._largest[-1], slot_bytes(problem.units[unit].nbytes) if single else 0)
            )
        self._largest.reverse()

    def longest(self, multiple: float | None) -> int:
        """Return the length of the longest prefix that leaves a region of ``multiple`` times the largest unit behind it.

        None stands for the whole capacity. 0 if there is no such prefix.
        """
        if multiple is None:
            return 0
        capacity, grain = self._problem.capacity, self._problem.grain
        # The units whose uses contain others come first; all of them stay, or none.
        for length in range(len(self._costs) - 1, max(0, len(self._problem.order.enclosing) - 1), -1):
            region_bytes = round_up(int(multiple * self._largest[length]), grain)
            if self._costs[length] + region_bytes <= capacity:
                return length
        return 0
