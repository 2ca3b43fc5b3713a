"""Makes schedules: how units are held, the region's size, the places in it, and the fetches of a cycle.

The units that stay are a prefix of one fixed permutation (`schedule_ways.resident_order`), so only its length is
to be chosen. It follows from the size of the region: a larger region gives fetches more lead and keeps more of what is
used again soon, a smaller one leaves more memory for units that stay. A few sizes are tried, in multiples of the largest
unit that passes through the region, and all of the capacity as region; the simulation of a cycle decides. Whether units
are packed is decided by a formula (`schedule_ways`), and by the simulation where the formula's two results are close. For
an order with phases the layout of `schedule_phases` is tried as well.

Where all units pass through a region (`schedule_in_region`), a unit may have another place at each of its fetches. With
one place for each unit, units that are needed at nearly the same time may need the same place. Then the device waits in
each cycle. For example, five units that pass through a region of two go to the places A, B, A, B, B, and the last one is
fetched only after the fourth was used. Over two cycles they can go to A, B, A, B, A and B, A, B, A, B, and none of them
waits. In training, units are used in one direction in forward and in the other one in backward, and the places that suit
the forward do not suit the backward.

So where the device would wait, the places are found by a replay of the order: after each use the units that are needed
next are fetched, each to the place whose contents are needed latest (Belady's rule, `Region.place`). A fetch overwrites
nothing that is needed sooner than what it brings. The replay ends when the region is as it was at the end of an earlier
cycle. The cycles from there on, the *laps*, are the table. In it each fetch is an entry of its own
(`Schedule.unit_of`).

The module imports no torch and has no side effects.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from heapq import heapreplace

from .region import ALIGN, Region, Slot
from .residency import GRAIN, round_up
from .schedule import Link, Schedule, Times, UnitCost, UseOrder, Way, slot_bytes
from .schedule_phases import place_by_phase
from .schedule_region import find_visits, in_order_of_need, next_uses, place_units, required_fetches
from .schedule_seconds import predict_schedule
from .schedule_ways import (
    Split,
    WayCosts,
    bytes_at_once,
    enclosing_zone,
    least_capacity,
    refuse_too_little,
    way_costs,
)

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
    order: UseOrder, units: Sequence[UnitCost], region_bytes: int, grain: int = GRAIN, links: int = 1
) -> Schedule:
    """Return the schedule of ``order`` in which no unit stays, and all pass raw through a region of ``region_bytes`` bytes.

    A unit may have several places there (`place_by_need`). ``links``: the number of links that copy at the same time.
    Raises BudgetError, with the least bytes that work, if the units that are in use at the same time do not fit.
    """
    refuse_too_little(region_bytes, bytes_at_once(order, units, grain))
    # Times have no part in it, because there is nothing to choose.
    costs = way_costs(order, units, Times(Link(1.0), (0.0,) * len(order.uses)), grain)
    return place_by_need(lay_out(costs, Split(0, 0, False), region_bytes), region_bytes, links)


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


def lay_out(costs: WayCosts, split: Split, capacity: int, by_phase: bool = False) -> Schedule:
    """Return the schedule in ``capacity`` bytes in which units are held as ``split`` says.

    ``by_phase``: whether units are placed by phases (`schedule_phases`).
    """
    order, units, count = costs.order, costs.units, len(costs.order.uses)
    ways = costs.ways(split)
    passing = {unit for unit in order.uses if ways[unit] is not Way.CACHED_RAW}
    visits = find_visits(order, passing, {unit for unit in passing if units[unit].trainable})
    sizes = {unit: slot_bytes(units[unit].nbytes) for unit in passing}
    zone = enclosing_zone(order, sorted(passing), units)
    single = [visit for visit in visits if visit.unit not in zone.offsets]
    everything = zone.nbytes + sum(size for unit, size in sizes.items() if unit not in zone.offsets)
    room = zone.nbytes, min(costs.room(split, capacity) // ALIGN * ALIGN, everything)
    if by_phase:
        places = place_by_phase(order, single, sizes, room)
    else:
        places = place_units([visit.unit for visit in single], sizes, room)
    offsets = {**zone.offsets, **places}
    after, before = in_order_of_need(required_fetches(visits, offsets, sizes, count), count)
    used = max((offset + sizes[unit] for unit, offset in offsets.items()), default=0)
    return Schedule(
        order,
        units,
        capacity,
        costs.grain,
        ways,
        round_up(used, costs.grain),
        costs.staging_bytes(split),
        tuple(offsets.get(unit, -1) for unit in range(len(units))),
        after,
        before,
    )


# A region of more units of the mean size gives fetches lead enough in any case, and its replay takes longer.
FEW = 8
MOST_LAPS = 8  # cycles in which the replay must come back to an earlier state
# The `_Region.work` in which it must, about 25 ms: so orders of thousands of uses have few laps. It is counted and not timed,
# because all ranks of a group must make the same schedule.
MOST_WORK = 30_000
_TRY = 8
SAVES = 0.01  # the share of the seconds that a replay must save
LOOK = 16  # after every so many uses a replay looks whether it repeats itself
_CYCLES = 3  # the first one, whose fetches of the cycle before are missing, does not count


def place_by_need(one: Schedule, region_bytes: int, links: int = 1) -> Schedule:
    """Return ``one``, in which each unit has one place in the region, or a schedule of the same order in which it has
    several, if that makes the device wait less.

    ``links``: the number of links that copy at the same time.
    """
    order, units = one.order, one.units
    # As in `_seconds`, a use takes one second a byte.
    compute_seconds = sum(units[unit].nbytes for unit in order.uses)
    if order.ends or not one.wire_bytes or region_bytes * len(order.uses) > FEW * compute_seconds:
        return one
    if order.updates and any(units[unit].trainable for unit in order.uses):
        return one
    # Assume a link that is busy for as long as the device computes: there the places matter most. Where the link binds,
    # copies are late in any place. Where computing binds, they come in time with less lead.
    copying = links * compute_seconds / one.wire_bytes
    seconds = _seconds(one, links, copying)
    if seconds <= compute_seconds:
        return one
    found = _replay(one, region_bytes)
    if found is None or _seconds(found, links, copying) > (1 - SAVES) * seconds:
        return one
    return found


def _seconds(schedule: Schedule, links: int, copying: float) -> float:
    """Return the seconds of a cycle of ``schedule``, if a use of a unit takes one second for each of its bytes, and a copy
    takes ``copying`` seconds for each byte.
    """
    sizes = [cost.nbytes for cost in schedule.units]
    free = [0.0] * links  # when each link has copied what was issued to it
    there = [0.0] * len(sizes)
    clock = begin = 0.0
    for cycle in range(_CYCLES):
        for unit, after in zip(schedule.order.uses, schedule.after, strict=True):
            arrived = there[unit]
            clock = (arrived if arrived > clock else clock) + sizes[unit]
            for fetched in after:
                begun = free[0] if free[0] > clock else clock
                there[fetched] = arrives = begun + copying * sizes[fetched]
                heapreplace(free, arrives)
        if cycle == 0:
            begin = clock
    return (clock - begin) / (_CYCLES - 1) / schedule.laps


def _replay(one: Schedule, region_bytes: int) -> Schedule | None:
    """Return the schedule by a replay of the order of ``one``, None if the replay does not repeat itself."""
    count = len(one.order.uses)
    region = _Region(one.order, one.units, region_bytes)
    seen: list[tuple] = []  # the region's contents at the end of each cycle
    issued: list[int] = []  # the number of fetches until then
    repeats = False
    while not repeats and (state := region.contents()) not in seen:
        if len(seen) > MOST_LAPS:
            return None
        seen.append(state)
        issued.append(len(region.fetches))
        repeats = region.run_cycle()
        if region.work > MOST_WORK:
            return None
    first = seen.index(state)
    begin, laps = first * count, len(seen) - first
    fetches = [(moment - begin, unit, offset) for moment, unit, offset in region.fetches[issued[first] :]]
    return _table(one, laps, fetches, state)


class _Region:
    """The region in a replay. ``fetches``: (position of the use after which it is issued, unit, offset) of each fetch.
    ``work``: slots that were looked at for places, and `_TRY` for each place that was looked for.
    """

    def __init__(self, order: UseOrder, units: Sequence[UnitCost], nbytes: int) -> None:
        self._sizes = [slot_bytes(cost.nbytes) for cost in units]
        self._region = Region(nbytes, max(self._sizes[unit] for unit in order.uses))
        self._uses = order.uses * 2  # twice, so that no cycle of uses from any position on passes its end
        self._held = set[int]()  # the units in the region
        self._next: dict[int, int] = {}  # unit -> position of its next use, counted on over all cycles
        for position in reversed(range(len(order.uses))):
            self._next[order.uses[position]] = position
        self._again = next_uses(order.uses)  # the position of the next use of the unit at each position
        self._at = -1  # position of the latest use, counted on over all cycles
        self._states: dict[int, tuple] = {}  # the region's contents after some positions of the latest cycle
        self.fetches: list[tuple[int, int, int]] = []
        self.work = 0
        self._fetch_next()

    def contents(self) -> tuple:
        return tuple((slot.unit, slot.offset) for slot in self._region.slots)

    def run_cycle(self) -> bool:
        """Use each unit in order. Where the region's contents equal those at the same position of the cycle before, the rest
        of both cycles is equal too. Then the fetches of that rest are taken over, and nothing more is replayed.

        Returns whether fetches were taken over.
        """
        before, self._states = self._states, {}
        for position in range(len(self._again)):
            self._use_next()
            if self.work > MOST_WORK:
                break
            if position % LOOK == 0:
                state = self._states[position] = self.contents()
                if before.get(position) == state:
                    self._copy_fetches()
                    return True
        return False

    def _copy_fetches(self) -> None:
        """Issue in the rest of this cycle what was issued in the same part of the cycle before."""
        count = len(self._again)
        begin, end = self._at - count, self._at // count * count
        rest = [(at + count, unit, offset) for at, unit, offset in self.fetches if begin < at < end]
        self.fetches += rest

    def _use_next(self) -> None:
        """Use the next unit, and fetch what is needed after it."""
        self._at += 1
        cycles, position = divmod(self._at, len(self._again))
        self._next[self._uses[position]] = cycles * len(self._again) + self._again[position]
        self._fetch_next()

    def _fetch_next(self) -> None:
        """Fetch the units that are needed next, as many as the region has room for. There is room for the first one."""
        uses, sizes, held = self._uses, self._sizes, self._held
        room, tried = self._region.nbytes, set[int]()
        begin = (self._at + 1) % len(self._again)
        for position in range(begin, begin + len(self._again)):
            unit = uses[position]
            if unit in tried:
                continue
            tried.add(unit)
            room -= sizes[unit]
            if room < 0 or not (unit in held or self._fetch(unit, position - begin + 1)):
                return

    def _fetch(self, unit: int, later_than: int) -> bool:
        """Fetch ``unit`` to a place whose contents are not needed in the next ``later_than`` uses. Returns False if there is
        no such place.
        """
        region, at, following = self._region, self._at, self._next
        self.work += _TRY + len(region.slots)
        uses_until = [following[slot.unit] - at for slot in region.slots]
        place = region.place(self._sizes[unit], uses_until, later_than)
        if place is None:
            return False
        offset, victims = place
        for victim in victims:
            region.remove(victim)
            self._held.discard(victim.unit)
        region.add(Slot(unit, offset, self._sizes[unit]))
        self._held.add(unit)
        self.fetches.append((at, unit, offset))
        return True


def _table(
    one: Schedule, laps: int, fetches: Sequence[tuple[int, int, int]], state: Sequence[tuple[int, int]]
) -> Schedule:
    """Return the schedule over ``laps`` cycles with ``fetches``. ``state``: what lies in the region when it begins."""
    count = len(one.order.uses)
    total = laps * count
    unit_of: list[int] = []
    offsets: list[int] = []
    after: list[list[int]] = [[] for _ in range(total)]
    begun: dict[int, list[tuple[int, int]]] = {}  # unit -> moment and number of each fetch
    for moment, unit, offset in fetches:
        begun.setdefault(unit, []).append((moment, len(unit_of)))
        after[moment].append(len(unit_of))
        unit_of.append(unit)
        offsets.append(offset)
    for unit, offset in state:
        if unit not in begun:  # stays
            begun[unit] = [(-1, len(unit_of))]
            unit_of.append(unit)
            offsets.append(offset)
    numbers: list[int] = []
    for position in range(total):
        found = begun[one.order.uses[position % count]]
        numbers.append(found[bisect_left(found, (position, 0)) - 1][1])  # -1: the last one of the laps before
    return replace(
        one,
        order=UseOrder(tuple(numbers)),
        units=tuple(one.units[unit] for unit in unit_of),
        ways=(Way.STREAMED_RAW,) * len(unit_of),
        region_bytes=max(
            offset + slot_bytes(one.units[unit].nbytes) for unit, offset in zip(unit_of, offsets, strict=True)
        ),
        offsets=tuple(offsets),
        after=tuple(map(tuple, after)),
        laps=laps,
        originals=tuple(unit_of),
    )
