"""Device slots: one preallocated region in which units of differing sizes come and go.

Every slot is a stretch of the region. A stretch may be given to another unit at once, on the host's
clock, because the copy that overwrites it waits on the device for the events of its last readers.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

ALIGN = 512  # bytes; every slot and every tensor in it starts on this boundary


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

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


class Region:
    """Places slots in ``nbytes`` bytes. Knows offsets only; the device memory belongs to the streamer."""

    def __init__(self, nbytes: int, largest: int) -> None:
        self.nbytes = nbytes
        self.slots: list[Slot] = []  # by offset, never overlapping
        # Below three of the largest unit a slot in the middle could leave no room on either side:
        # there slots stand at the two ends only, so one in use always leaves room for another.
        self._ends_only = nbytes < 3 * largest

    def place(self, nbytes: int, next_use: Callable[[Slot], float | None]) -> tuple[int, list[Slot]] | None:
        """Where ``nbytes`` could go, and which slots give way, None when nowhere.

        ``next_use`` tells when a slot's unit is expected again, None when the slot must stay. The
        stretch whose soonest-needed victim is needed last is taken (Belady), then the one that evicts
        the fewest bytes, then the lowest.
        """
        if nbytes > self.nbytes:
            return None
        last = (self.nbytes - nbytes) // ALIGN * ALIGN
        starts = {0, last}
        if not self._ends_only:
            for slot in self.slots:
                starts.update((slot.offset, slot.end, slot.end - nbytes, slot.offset - nbytes))
        value = {id(slot): next_use(slot) for slot in self.slots}
        best: tuple[tuple[float, int, int], int, list[Slot]] | None = None
        for start in starts:
            if not 0 <= start <= last:
                continue
            victims = [s for s in self.slots if s.offset < start + nbytes and start < s.end]
            uses = [value[id(s)] for s in victims]
            if any(use is None for use in uses):
                continue
            soonest = min((use for use in uses if use is not None), default=float("inf"))
            score = (soonest, -sum(s.nbytes for s in victims), -start)
            if best is None or score > best[0]:
                best = (score, start, victims)
        return None if best is None else (best[1], best[2])

    def add(self, slot: Slot) -> None:
        self.slots.append(slot)
        self.slots.sort(key=lambda s: s.offset)

    def remove(self, slot: Slot) -> None:
        self.slots.remove(slot)
