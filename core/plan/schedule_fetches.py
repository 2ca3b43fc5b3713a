"""The fetches of a cycle, which follow from the order of uses and from the one place of each streamed unit.

A walk over the cyclic order with a cache that has one place for each unit finds them. At a use of a unit, either its
place still holds it, or a unit that overlaps the place was used since. In the second case the unit has to be fetched,
at the earliest after the last of these uses. So a unit is fetched at most once between two of its uses, and every
cycle is the same as the one before.

Fetches are issued in the order in which they are needed, because the link copies in the order of issue. A fetch whose
place is free early waits behind those that are needed sooner. Trainable units are the exception: their weights change
at an update (`UseOrder.updates`), so they are fetched again between the update and their next use, and a fetch that
is held back for an update holds no other fetch back.

The module imports no torch and has no side effects.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from itertools import count as count_up
from typing import NamedTuple

from .schedule import UseOrder


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
            # The segment before the place keeps what the place leaves of it, and so does the one behind.
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
