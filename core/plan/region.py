"""Allocation of slots by Belady's rule: where a unit is placed in the region, and what it overwrites there.

A unit is a group of weights that is copied to the device together; units differ in size. The region is the device memory
through which units pass. A slot is a byte range of the region that holds the weights of one unit. Schedules
(`schedule_maker.place_by_need`) are found by a replay of an order of uses with it. The module works with byte offsets only.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

ALIGN = 512  # bytes; every slot, and every tensor in a slot, starts on this boundary


_FOREVER = float("inf")
_offset = attrgetter("offset")


class Slot:
    """A byte range of the region that holds the weights of one unit."""

    __slots__ = ("unit", "offset", "nbytes", "end")

    def __init__(self, unit: Any, offset: int, nbytes: int) -> None:
        self.unit, self.offset, self.nbytes, self.end = unit, offset, nbytes, offset + nbytes


class Region:
    """An allocator of slots in a region of ``nbytes`` bytes, for units of at most ``largest`` bytes."""

    def __init__(self, nbytes: int, largest: int) -> None:
        self.nbytes = nbytes
        self.slots: list[Slot] = []  # sorted by offset, never overlapping
        # In a region smaller than three times the largest unit, a slot in the middle could leave too little
        # space on either side of it. There, every slot is placed so that the largest unit still fits before
        # or after the slot; a slot in use then never prevents another unit from being placed. 0: no such
        # restriction is needed.
        self._keep_free = -(-largest // ALIGN) * ALIGN if nbytes < 3 * largest else 0

    def place(
        self, nbytes: int, uses: Sequence[float | None], later_than: float = -1
    ) -> tuple[int, list[Slot]] | None:
        """Return the offset for a new slot of ``nbytes`` bytes and the slots to evict for it; None if the new
        slot does not fit.

        ``uses`` has one entry for each of `slots`: the number of accesses until the slot's unit is needed
        again, or None where the slot must stay. Slots needed within ``later_than`` accesses must stay too. The
        method chooses the offset at which the first evicted slot to be needed again is needed as late as
        possible (Belady's rule). Among equal offsets it chooses the one that evicts the fewest bytes, and then
        the lowest.
        """
        if nbytes > self.nbytes:
            return None
        slots, last = self.slots, (self.nbytes - nbytes) // ALIGN * ALIGN
        best: tuple[float, int, int] | None = None
        # The current gap between slots that must stay: the gap's first byte, and the index of the first slot
        # in the gap.
        begin = first = 0
        for index, (slot, use) in enumerate(zip(slots, uses, strict=True)):
            if use is None or use <= later_than:
                if slot.offset - begin >= nbytes:
                    run = slots[first:index], uses[first:index]
                    best = self._better_start(begin, slot.offset, *run, nbytes, last, best)
                begin, first = slot.end, index + 1
        if self.nbytes - begin >= nbytes:
            best = self._better_start(begin, self.nbytes, slots[first:], uses[first:], nbytes, last, best)
        if best is None:
            return None
        start = -best[2]
        end = start + nbytes
        return start, [slot for slot in slots if slot.offset < end and start < slot.end]

    def _better_start(
        self,
        begin: int,
        end: int,
        run: list[Slot],
        uses: Sequence[Any],
        nbytes: int,
        last: int,
        best: tuple[float, int, int] | None,
    ) -> tuple[float, int, int] | None:
        """Return the better of ``best`` and the best start offset between ``begin`` and ``end``, where
        ``run`` may be evicted.

        A candidate is a tuple of which the greatest wins: (accesses until the first evicted slot is needed
        again, minus the evicted bytes, minus the start offset).
        """
        high = min(end - nbytes, last)
        if not run and not self._keep_free:  # nothing would be evicted anywhere, so the lowest offset wins
            found = (_FOREVER, 0, -begin)
            return found if begin <= high and (best is None or found > best) else best
        for start in self._candidate_starts(begin, high, run, nbytes, last):
            until = start + nbytes
            soonest, evicted = _FOREVER, 0
            floor = -1.0 if best is None else best[0]
            for slot, use in zip(run, uses, strict=True):
                if slot.offset < until and start < slot.end:
                    if use < soonest:
                        if use < floor:
                            break
                        soonest = use
                    evicted -= slot.nbytes
            else:
                if best is None or (soonest, evicted, -start) > best:
                    best = soonest, evicted, -start
        return best

    def _candidate_starts(self, begin: int, high: int, run: list[Slot], nbytes: int, last: int) -> set[int]:
        """Return the start offsets from ``begin`` to ``high`` to try: both ends, and next to the edges of
        each slot in ``run``.
        """
        starts = {begin, high}
        for slot in run:
            low, end = slot.offset, slot.end
            starts.update((low, end, end - nbytes, low - nbytes))
        if not self._keep_free:
            return {start for start in starts if begin <= start <= high}
        room, before = self._keep_free, (self.nbytes - self._keep_free) // ALIGN * ALIGN - nbytes
        starts.update((0, room, before, last))
        return {
            start for start in starts
            if begin <= start <= high and (start <= before or start >= room or start == last or not start)
        }  # fmt: skip

    def add(self, slot: Slot) -> None:
        """Insert ``slot`` into `slots`, sorted by offset."""
        self.slots.append(slot)
        self.slots.sort(key=_offset)

    def remove(self, slot: Slot) -> None:
        """Remove ``slot`` from `slots`."""
        self.slots.remove(slot)
