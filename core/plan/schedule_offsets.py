"""The offsets of streamed units in the region, by the rule of the longest lead.

A streamed unit is copied for its uses to its place in the region, the device memory through which units stream. Each
unit has one place, and places overlap, because the region is smaller than the units together. What overlaps decides
when a unit can be fetched: after the last reader of the bytes that the fetch overwrites. The *lead* of a fetch is how
much is used between that reader and the unit's own use. A copy that has less lead than it takes makes the device
wait. So each unit is placed, at its first use, where the bytes were last read longest ago and are needed latest. Both
distances are counted in streamed bytes, because these are known before any time was measured, and the seconds of a
copy are in proportion to them. The order is cyclic, so "read longest ago" looks back into the cycle before, and
"needed latest" ahead into the next one. The unit that is used next must fit beside the new place, or its lead would
be nothing.

A unit whose uses contain uses of others (`UseOrder.enclosing`) lies at the begin of the region, apart from the rest,
so that it is never overwritten by what is used inside it.

The module imports no torch and has no side effects.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate

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
