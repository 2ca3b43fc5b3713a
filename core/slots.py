"""Device slots: one preallocated region in which units of differing sizes come and go.

Every slot is a stretch of the region. A stretch may be given to another unit at once, on the host's
clock, because the copy that overwrites it waits on the device for the events of its last readers.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

ALIGN = 512  # bytes; every slot and every tensor in it starts on this boundary


_FOREVER = float("inf")
_offset = attrgetter("offset")


class SlotState(enum.Enum):
    """What is true of a slot on the host's clock."""

    FILLING = enum.auto()  # its copy was issued, nothing has used it; readable after `copied`
    IN_USE = enum.auto()  # a unit runs on it
    KEPT = enum.auto()  # whole and unused; overwritten only after the events in `reads`
    HELD = enum.auto()  # its unit has run, but something still keeps a view of it


class Slot:
    """A stretch of the region that holds one unit. (No dataclass: one is made at every fetch.)"""

    def __init__(self, unit: Any, offset: int, nbytes: int, version: int = 0, key: int = 0) -> None:
        self.unit, self.offset, self.nbytes, self.end = unit, offset, nbytes, offset + nbytes
        self.state = SlotState.FILLING
        self.copied: Any = None  # event: the bytes are there
        self.waited: set[Any] = set()  # streams that already wait for `copied`
        self.reads: dict[Any, Any] = {}  # stream -> event after its last read
        self.users = 0
        self.version = version  # of the host bytes that were copied
        self.next_place = -1  # where the order has its unit's next use, as of `epoch`
        self.epoch = -1
        self.views: Any = None  # the unit's tensors here, once they were made
        self.key = key  # which unit, and where: of what is remembered


class Region:
    """Places slots in ``nbytes`` bytes. Knows offsets only; the device memory belongs to the streamer."""

    def __init__(self, nbytes: int, largest: int) -> None:
        self.nbytes = nbytes
        self.slots: list[Slot] = []  # by offset, never overlapping
        # Below three of the largest unit a slot in the middle could leave no room on either side: there every
        # slot leaves the largest unit's room before it or behind it, so one in use always leaves room for another.
        self._room = -(-largest // ALIGN) * ALIGN if nbytes < 3 * largest else 0

    def place(
        self, nbytes: int, uses: Sequence[float | None], later_than: float = -1
    ) -> tuple[int, list[Slot]] | None:
        """Where ``nbytes`` could go, and which slots give way, None when nowhere.

        ``uses`` tells, for each of `slots`, when its unit is expected again, None when it must stay; so must
        slots expected no later than ``later_than``. The stretch whose soonest-needed victim is needed last is
        taken (Belady), then the one that evicts the fewest bytes, then the lowest.
        """
        if nbytes > self.nbytes:
            return None
        slots, last = self.slots, (self.nbytes - nbytes) // ALIGN * ALIGN
        best: tuple[float, int, int] | None = None
        # A stretch without slots that must stay: where it begins, its first slot.
        begin = first = 0
        for index, (slot, use) in enumerate(zip(slots, uses, strict=True)):
            if use is None or use <= later_than:
                if slot.offset - begin >= nbytes:
                    run = slots[first:index], uses[first:index]
                    best = self._best(begin, slot.offset, *run, nbytes, last, best)
                begin, first = slot.end, index + 1
        if self.nbytes - begin >= nbytes:
            best = self._best(begin, self.nbytes, slots[first:], uses[first:], nbytes, last, best)
        if best is None:
            return None
        start = -best[2]
        end = start + nbytes
        return start, [slot for slot in slots if slot.offset < end and start < slot.end]

    def _best(
        self,
        begin: int,
        end: int,
        run: list[Slot],
        uses: Sequence[Any],
        nbytes: int,
        last: int,
        best: tuple[float, int, int] | None,
    ) -> tuple[float, int, int] | None:
        """The better of ``best`` and the best place in a stretch that holds ``run``: its soonest-needed victim, the bytes
        evicted (negative), where it starts (negative); more is better."""
        high = min(end - nbytes, last)
        if not run and not self._room:  # nothing to evict, and every place is as good: the lowest
            found = (_FOREVER, 0, -begin)
            return found if begin <= high and (best is None or found > best) else best
        for start in self._starts(begin, high, run, nbytes, last):
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

    def _starts(self, begin: int, high: int, run: list[Slot], nbytes: int, last: int) -> set[int]:
        """Where from ``begin`` to ``high`` a slot could start: at the stretch's ends, and against each slot's edges."""
        starts = {begin, high}
        for slot in run:
            low, end = slot.offset, slot.end
            starts.update((low, end, end - nbytes, low - nbytes))
        if not self._room:
            return {start for start in starts if begin <= start <= high}
        room, before = self._room, (self.nbytes - self._room) // ALIGN * ALIGN - nbytes
        starts.update((0, room, before, last))
        return {
            start for start in starts
            if begin <= start <= high and (start <= before or start >= room or start == last or not start)
        }  # fmt: skip

    def at(self, offset: int) -> Slot | None:
        """The slot that holds the byte at ``offset``."""
        for slot in self.slots:
            if slot.offset <= offset < slot.end:
                return slot
        return None

    @property
    def users(self) -> int:
        """Uses in progress, of all slots."""
        return sum(slot.users for slot in self.slots)

    def add(self, slot: Slot) -> None:
        self.slots.append(slot)
        self.slots.sort(key=_offset)

    def remove(self, slot: Slot) -> None:
        self.slots.remove(slot)


class Tails:
    """Stretches whose slot is gone, with the events of its last reads: the next copy there waits for them."""

    def __init__(self, tails: Iterable[tuple[int, int, list[Any]]] = ()) -> None:
        self._tails = list(tails)

    def leave(self, slot: Slot) -> None:
        """The slot gives its stretch up."""
        # What was not read may still be on its way: copies are in order among themselves, but not with what is unpacked.
        self._tails.append((slot.offset, slot.end, list(slot.reads.values()) or [slot.copied]))

    def over(self, low: int, high: int) -> tuple[list[Any], Tails]:
        """What a copy to the bytes from ``low`` to ``high`` waits for, and the tails once it was issued."""
        after, left = [], []
        for tail in self._tails:
            begin, end, events = tail
            if begin >= high or low >= end:
                left.append(tail)
                continue
            after += events
            # What sticks out on either side keeps its events.
            if begin < low:
                left.append((begin, low, events))
            if high < end:
                left.append((high, end, events))
        return after, Tails(left)
