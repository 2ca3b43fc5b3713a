"""The region's part of a schedule: the offsets of streamed units, and the fetches that follow from them.

A streamed unit is copied for its uses to its place in the region, the device memory through which units stream. Here each
unit has one place (`schedule_maker.place_by_need` may replace the result by one with several), and places overlap, because
the region is smaller than the units together. What overlaps decides when a unit can be fetched: after the last reader of
the bytes that the fetch overwrites. The *lead* of a fetch is how
much is used between that reader and the unit's own use. A copy that has less lead than it takes makes the device
wait. So each unit is placed, at its first use, where the bytes were last read longest ago and are needed latest. Both
distances are counted in streamed bytes, because these are known before any time was measured, and the seconds of a
copy are in proportion to them. The order is cyclic, so "read longest ago" looks back into the cycle before, and
"needed latest" ahead into the next one. The unit that is used next must fit beside the new place, or its lead would
be nothing.

A unit whose uses contain uses of others (`UseOrder.enclosing`) lies at the begin of the region, apart from the rest,
so that it is never overwritten by what is used inside it.

A walk over the cyclic order with a cache that has one place for each unit finds the fetches. At a use of a unit, either
its place still holds it, or a unit that overlaps the place was used since. In the second case the unit has to be fetched,
at the earliest after the last of these uses. So a unit is fetched at most once between two of its uses, and every
cycle is the same as the one before.

Fetches are issued in the order in which they are needed, because the link copies in the order of issue. A fetch whose
place is free early waits behind those that are needed sooner. Trainable units are the exception: their weights change
at an update (`UseOrder.updates`), so they are fetched again between the update and their next use, and a fetch that
is held back for an update holds no other fetch back.

The module imports no torch and has no side effects.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from itertools import count as count_up
from typing import NamedTuple

from .schedule import UseOrder

# Segments of the region, beginning behind the unit placed last, that are looked at for a new place. Twice as many make
# predicted steps shorter by less than 0.1 % on average, and tables of many small units slower.
WINDOW = 12
# A lead of this share of the region's other bytes ends the search. A ring would give every unit all of them.
ENOUGH = 0.75
NEVER = 1 << 62  # the time of a read that never was is -NEVER, that of a need that never comes NEVER


def place_units(
    sequence: Sequence[int],
    sizes: Mapping[int, int],
    room: tuple[int, int],
    placed: Mapping[int, int] | None = None,
) -> dict[int, int]:
    """Return the offset of each unit of ``sequence``, which is used in that order, cyclically.

    ``sizes``: bytes by unit, multiples of `ALIGN`. ``room``: the first byte for them in the region, and the end; the
    largest unit must fit there. ``placed``: units that have a place already.
    """
    (low, high), count, distinct = room, len(sequence), len(set(sequence))
    clock = [0, *accumulate(sizes[unit] for unit in sequence)]
    next_use = next_uses(sequence)
    segments = _Segments(low, high)
    offsets = {unit: placed[unit] for unit in set(sequence) if unit in placed} if placed else {}
    behind = low
    for index, unit in enumerate(sequence):
        nbytes = sizes[unit]
        if unit not in offsets:
            following = sequence[(index + 1) % count]
            # The unit that is used next fits beside an offset that is at most ``below`` or at least ``above``.
            if following in offsets:
                below, above = offsets[following] - nbytes, offsets[following] + sizes[following]
            else:
                below, above = high - sizes[following] - nbytes, low + sizes[following]
            found = segments.longest_lead((behind,), nbytes, clock[index], clock[index + 1])
            if found is None or found[1] < ENOUGH * (high - low - nbytes) or below < behind < above:
                tried = (*segments.candidates(nbytes, behind), below, above)
                beside = [offset for offset in tried if offset <= below or offset >= above]
                found = segments.longest_lead(beside, nbytes, clock[index], clock[index + 1])
                if found is None:
                    found = segments.longest_lead(tried, nbytes, clock[index], clock[index + 1])
            assert found is not None, "the low end is among the offsets, and every unit fits there"
            offsets[unit] = found[0]
            if len(offsets) == distinct:
                break
            behind = offsets[unit] + nbytes
        cycles, place = divmod(next_use[index], count)
        needed = cycles * clock[count] + clock[place]
        segments.record(offsets[unit], offsets[unit] + nbytes, clock[index + 1], needed)
    return offsets


def next_uses(sequence: Sequence[int]) -> list[int]:
    """Return for each use of the cyclic ``sequence`` the index of the unit's next use, counted on over the cycles."""
    count = len(sequence)
    found, last = [0] * count, dict[int, int]()
    for index in range(2 * count - 1, -1, -1):
        unit = sequence[index % count]
        if index < count:
            found[index] = last[unit]
        last[unit] = index
    return found


class _Segments:
    """The bytes from ``low`` to ``high`` as segments without gaps: when each was last read and is needed again.

    Segment i reaches from ``starts[i]`` to ``starts[i + 1]``, the last one to ``high``. Times are streamed bytes since
    the cycle began.
    """

    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = low, high
        self.starts, self.read, self.needed = [low], [-NEVER], [NEVER]

    def record(self, offset: int, end: int, read: int, needed: int) -> None:
        """Record that the bytes from ``offset`` to ``end`` are read until ``read`` and needed again at ``needed``."""
        starts = self.starts
        first, behind = bisect_right(starts, offset) - 1, bisect_left(starts, end)
        old_end = starts[behind] if behind < len(starts) else self.high
        # What the use leaves of the first and of the last segment that it touches keeps its times.
        cut = first + (starts[first] < offset)
        if end < old_end:
            starts[cut:behind] = offset, end
            self.read[cut:behind] = read, self.read[behind - 1]
            self.needed[cut:behind] = needed, self.needed[behind - 1]
        else:
            starts[cut:behind], self.read[cut:behind], self.needed[cut:behind] = (offset,), (read,), (needed,)

    def candidates(self, nbytes: int, behind: int) -> list[int]:
        """Return offsets to try for ``nbytes`` bytes: at edges of segments, those behind ``behind`` first."""
        starts = self.starts
        count = len(starts)
        index = bisect_right(starts, behind) - 1
        found = []
        for _ in range(min(count, WINDOW)):
            found.append(starts[index])
            index = (index + 1) % count
            found.append((starts[index] if index else self.high) - nbytes)
        found += (self.low, self.high - nbytes)
        return found

    def longest_lead(
        self, offsets: Sequence[int], nbytes: int, now: int, after: int
    ) -> tuple[int, int] | None:
        """Return the offset with the longest lead among ``offsets``, and that lead; None if none of them fits.

        ``now``, ``after``: the times before and after the use of the unit that is placed. Among equal leads the one
        with the longer of both distances is taken, then the lower offset.
        """
        starts, reads, needs, count = self.starts, self.read, self.needed, len(self.starts)
        low, top = self.low, self.high - nbytes
        enough = ENOUGH * (top - low)
        best, best_lead, best_sum = None, -1, 0
        for offset in offsets:
            if not low <= offset <= top:
                continue
            end = offset + nbytes
            index = bisect_right(starts, offset) - 1
            read, needed = reads[index], needs[index]
            index += 1
            while index < count and starts[index] < end:
                if reads[index] > read:
                    read = reads[index]
                if needs[index] < needed:
                    needed = needs[index]
                index += 1
            back, ahead = now - read, needed - after
            lead = back if back < ahead else ahead
            if lead < best_lead:
                continue
            whole = back + ahead
            if lead > best_lead or whole > best_sum or (whole == best_sum and offset < (best or 0)):
                best, best_lead, best_sum = offset, lead, whole
                if lead >= enough:
                    break
        return None if best is None else (best, best_lead)


class Visit(NamedTuple):
    """Uses of one streamed unit, with no use of another streamed unit between them.

    ``begin``: position of the first use; ``end``: last position at which the unit is in use; ``update``: for a
    trainable unit whose weights changed since its visit before, the position of the latest update, which is negative
    if it lies in the cycle before; None for the others.
    """

    begin: int
    end: int
    unit: int
    update: int | None = None


class Fetch(NamedTuple):
    """One fetch of a cycle: ``unit`` is needed at position ``needed``.

    ``moment``: when the fetch is issued, 2 * position before the use at that position, 2 * position + 1 after it. A
    negative moment lies in the cycle before.
    """

    needed: int
    moment: int
    unit: int


class FetchTable(NamedTuple):
    """The fetches that are issued after each position, and those that are issued before a position, by position."""

    after: tuple[tuple[int, ...], ...]
    before: Mapping[int, tuple[int, ...]]


def find_visits(order: UseOrder, streamed: Collection[int], trainable: Collection[int]) -> list[Visit]:
    """Return the visits of the ``streamed`` units in one cycle, in order; the ``trainable`` ones are among these."""
    found: list[Visit] = []
    latest = -1
    for position, (unit, end) in enumerate(zip(order.uses, order.ends or count_up(), strict=False)):
        if unit not in streamed:
            continue
        if unit == latest and position not in order.updates:
            found[-1] = Visit(found[-1].begin, max(end, found[-1].end), unit)
        else:
            found.append(Visit(position, end, unit))
        latest = unit
    if not trainable or not order.updates:
        return found
    count, updates = len(order.uses), sorted(order.updates)
    before = {visit.unit: visit.begin - count for visit in found}
    for index, visit in enumerate(found):
        if visit.unit in trainable:
            past = bisect_right(updates, visit.begin)
            update = updates[past - 1] if past else updates[-1] - count
            if update > before[visit.unit]:
                found[index] = visit._replace(update=update)
            before[visit.unit] = visit.begin
    return found


def required_fetches(
    visits: Sequence[Visit], offsets: Mapping[int, int], sizes: Mapping[int, int], count: int
) -> list[Fetch]:
    """Return the fetches of one cycle of ``count`` positions by need, each at its earliest moment.

    ``offsets``, ``sizes``: the places of the units in the region.
    """
    # The region as segments: the unit that lies there, and the last position at which it was in use, counted on over
    # two cycles. The first cycle only fills the segments, for which the last visit of each unit suffices.
    high = max((offset + sizes[unit] for unit, offset in offsets.items()), default=0)
    starts, owners, reads = [0], [-1], [-1]
    found: list[Fetch] = []
    placed = [(visit, offsets[visit.unit], offsets[visit.unit] + sizes[visit.unit]) for visit in visits]
    latest: dict[int, tuple[Visit, int, int]] = {}
    for row in reversed(placed):
        latest.setdefault(row[0].unit, row)
    for base, rows in ((0, list(latest.values())[::-1]), (count, placed)):
        for (begin, last, unit, update), offset, end in rows:
            first, segments = bisect_right(starts, offset) - 1, len(starts)
            # A unit owns segments of its own place only, so one that ends where the place ends is all of it.
            whole = owners[first] == unit and starts[first] == offset and update is None
            if whole and (starts[first + 1] if first + 1 < segments else high) == end:
                reads[first] = base + last
                continue
            behind, read = first, -1
            while behind < segments and starts[behind] < end:
                # What is left of the unit itself was read before the uses that took the rest of its place.
                if reads[behind] > read:
                    read = reads[behind]
                behind += 1
            if base:
                moment = 2 * (read - count) + 1
                found.append(Fetch(begin, moment if update is None else max(moment, 2 * update), unit))
            # The new segment covers the place. Of the first and last segment that it touches, the bytes outside the place
            # keep their owner and read.
            cut = first + (starts[first] < offset)
            if end < (starts[behind] if behind < segments else high):
                starts[cut:behind] = offset, end
                owners[cut:behind] = unit, owners[behind - 1]
                reads[cut:behind] = base + last, reads[behind - 1]
            else:
                starts[cut:behind], owners[cut:behind], reads[cut:behind] = (offset,), (unit,), (base + last,)
    return found


def in_order_of_need(fetches: Sequence[Fetch], count: int) -> FetchTable:
    """Return when each of ``fetches``, which are ordered by need, is issued in a cycle of ``count`` positions."""
    moments: dict[int, list[int]] = {}
    later: list[tuple[int, int]] = []
    latest = -(4 * count)
    for base in (-2 * count, 0):
        for fetch in fetches:
            moment = max(fetch.moment + base, latest)
            # Only a fetch that is held back for an update is issued before a use. The others do not wait behind it.
            if fetch.moment % 2:
                latest = moment
            if base == 0 and moment >= 0:
                moments.setdefault(moment, []).append(fetch.unit)
            elif base == 0:
                later.append((moment + 2 * count, fetch.unit))
    # What is issued in this cycle for the next one is needed after what is issued for this one.
    for moment, unit in later:
        moments.setdefault(moment, []).append(unit)
    after = tuple(tuple(moments.get(2 * position + 1, ())) for position in range(count))
    return FetchTable(
        after, {moment // 2: tuple(units) for moment, units in sorted(moments.items()) if not moment % 2}
    )
