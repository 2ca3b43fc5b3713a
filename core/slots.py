"""Device slots: one preallocated region in which units of differing sizes come and go.

Every slot is a stretch of the region. A stretch may be given to another unit at once, on the host's
clock, because the copy that overwrites it waits on the device for the events of its last readers.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

ALIGN = 512  # bytes; every slot and every tensor in it starts on this boundary


_FOREVER = float("inf")


class SlotState(enum.Enum):
    """What is true of a slot on the host's clock."""

    FILLING = enum.auto()  # its copy was issued, nothing has used it; readable after `copied`
    IN_USE = enum.auto()  # a unit runs on it
    KEPT = enum.auto()  # whole and unused; overwritten only after the events in `reads`
    HELD = enum.auto()  # its unit has run, but something still keeps a view of it


@dataclass(eq=False)
class Slot:
    """A stretch of the region that holds one unit."""

    unit: Any
    offset: int
    nbytes: int
    state: SlotState = SlotState.FILLING
    copied: Any = None  # event: the bytes are there
    waited: set = field(default_factory=set)  # streams that already wait for `copied`
    reads: dict = field(default_factory=dict)  # stream -> event after its last read
    users: int = 0
    version: int = 0  # of the host bytes that were copied
    next_place: int = -1  # where the order has its unit's next use, as of `epoch`
    epoch: int = -1

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


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
        # A stretch without slots that must stay: where it begins, its first slot, how many.
        begin = first = 0
        for index in range(len(slots) + 1):
            if index < len(slots):
                use = uses[index]
                if use is not None and use > later_than:
                    continue
                end = slots[index].offset
            else:
                end = self.nbytes
            if end - begin >= nbytes:
                run, expected = slots[first:index], uses[first:index]
                for start in self._starts(begin, end, run, nbytes, last):
                    score = _score(start, start + nbytes, run, expected)
                    if best is None or score > best:
                        best = score
            if index < len(slots):
                begin, first = slots[index].end, index + 1
        if best is None:
            return None
        start = -best[2]
        return start, [slot for slot in slots if slot.offset < start + nbytes and start < slot.end]

    def _starts(self, begin: int, end: int, run: list[Slot], nbytes: int, last: int) -> set[int]:
        """Where in a stretch a slot could start: at its ends, and against each slot's edges."""
        starts = {begin, min(end - nbytes, last)}
        for slot in run:
            low, high = slot.offset, slot.end
            starts.update((low, high, high - nbytes, low - nbytes))
        if self._room:
            room, before = self._room, (self.nbytes - self._room) // ALIGN * ALIGN - nbytes
            starts.update((0, room, before, last))
            return {
                start for start in starts
                if begin <= start <= last and start + nbytes <= end and (start <= before or start >= room or start in (0, last))
            }  # fmt: skip
        return {start for start in starts if begin <= start <= last and start + nbytes <= end}

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
        self.slots.sort(key=lambda s: s.offset)

    def remove(self, slot: Slot) -> None:
        self.slots.remove(slot)


def _score(start: int, end: int, slots: Sequence[Slot], uses: Sequence[Any]) -> tuple[float, int, int]:
    """How well a stretch serves: its soonest-needed victim, the bytes evicted, its place; more is better."""
    soonest, evicted = _FOREVER, 0
    for slot, use in zip(slots, uses, strict=True):
        if slot.offset < end and start < slot.offset + slot.nbytes:
            evicted += slot.nbytes
            if use < soonest:
                soonest = use
    return soonest, -evicted, -start
