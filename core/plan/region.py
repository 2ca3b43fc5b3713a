"""Allocation of device slots: places units in one preallocated region of device memory.

A unit is a group of weights that is copied to the device together; units differ in size. A slot is a byte
range of the region that holds the weights of one unit. The host may give the range to another unit while the
device still reads the old weights, because the copy that overwrites the range first waits, on the device, for
the events recorded after those reads. The module works with byte offsets only; the caller owns the device
memory.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

ALIGN = 512  # bytes; every slot, and every tensor in a slot, starts on this boundary


_FOREVER = float("inf")
_offset = attrgetter("offset")


class SlotState(enum.Enum):
    """The state of a slot, as seen by the host when it issues work to the device."""

    # The copy was issued and no operator has read the slot; readable after event `copied`.
    FILLING = enum.auto()
    IN_USE = enum.auto()  # the unit's forward or backward is running on the slot
    # Filled and unused; a copy that overwrites the slot must wait for the events in `reads`.
    KEPT = enum.auto()
    # The unit has run, but some object (autograd, for example) still refers to a view of the slot.
    HELD = enum.auto()


class Slot:
    """A byte range of the region that holds the weights of one unit.

    This is a plain class and not a dataclass because a slot is created at every fetch.
    """

    def __init__(self, unit: Any, offset: int, nbytes: int, version: int = 0, key: int = 0) -> None:
        self.unit, self.offset, self.nbytes, self.end = unit, offset, nbytes, offset + nbytes
        self.state = SlotState.FILLING
        self.copied: Any = None  # event recorded after the copy that fills the slot
        self.waited: set[Any] = set()  # streams that already wait for `copied`
        self.reads: dict[Any, Any] = {}  # stream -> event recorded after the stream's last read of the slot
        self.users = 0  # number of forwards, backwards and operators that use the slot now
        self.version = version  # version of the host weights that were copied
        # Position of the unit's next use in the access order, valid while `epoch` is current.
        self.next_place = -1
        self.epoch = -1  # the access order's epoch when `next_place` was looked up
        self.views: Any = None  # the unit's tensors as views of this slot, once they were created
        self.key = key  # identifies the pair (unit, offset) in caches of earlier decisions


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

    def slot_at(self, offset: int) -> Slot | None:
        """Return the slot that contains the byte at ``offset``, or None."""
        for slot in self.slots:
            if slot.offset <= offset < slot.end:
                return slot
        return None

    @property
    def users(self) -> int:
        """The number of uses in progress, summed over all slots."""
        return sum(slot.users for slot in self.slots)

    def add(self, slot: Slot) -> None:
        """Insert ``slot`` into `slots`, sorted by offset."""
        self.slots.append(slot)
        self.slots.sort(key=_offset)

    def remove(self, slot: Slot) -> None:
        """Remove ``slot`` from `slots`."""
        self.slots.remove(slot)


class FreedRanges:
    """Byte ranges of evicted slots, each with the events after which the range may be overwritten."""

    def __init__(self, ranges: Iterable[tuple[int, int, list[Any]]] = ()) -> None:
        self._ranges = list(ranges)  # (first byte, end, events)

    def add(self, slot: Slot) -> None:
        """Record the byte range of an evicted ``slot`` with the events of its last reads."""
        # The copy into a slot that was never read may still be running. Copies run in order among themselves,
        # but a kernel that unpacks weights into the range would not wait for that copy; hence the copy's own
        # event.
        self._ranges.append((slot.offset, slot.end, list(slot.reads.values()) or [slot.copied]))

    def events_over(self, low: int, high: int) -> tuple[list[Any], FreedRanges]:
        """Return the events that a copy to bytes [low, high) must wait for, and the freed ranges left after
        that copy.
        """
        after, left = [], []
        for freed in self._ranges:
            begin, end, events = freed
            if begin >= high or low >= end:
                left.append(freed)
                continue
            after += events
            # The parts of the freed range outside [low, high) keep their events.
            if begin < low:
                left.append((begin, low, events))
            if high < end:
                left.append((high, end, events))
        return after, FreedRanges(left)
