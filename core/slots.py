"""Device slots: one preallocated region in which units of differing sizes come and go.

Every slot is a stretch of the region. A stretch may be given to another unit at once, on the host's
clock, because the copy that overwrites it waits on the device for the events of its last readers.
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections.abc import Callable
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
        # Below three of the largest unit a slot in the middle could leave no room on either side:
        # there slots stand at the two ends only, so one in use always leaves room for another.
        self._ends_only = nbytes < 3 * largest

    def place(
        self,
        nbytes: int,
        next_use: Callable[[Slot], float | None],
        later_than: float = -1,
        guarded: Slot | None = None,
    ) -> tuple[int, list[Slot]] | None:
        """Where ``nbytes`` could go, and which slots give way, None when nowhere.

        ``next_use`` tells when a slot's unit is expected again, None when the slot must stay; so must
        ``guarded``, and slots expected no later than ``later_than``. The stretch whose soonest-needed
        victim is needed last is taken (Belady), then the one that evicts the fewest bytes, then the lowest.
        """
        slots = self.slots
        lows, highs, values = [], [], []
        available = self.nbytes
        for slot in slots:
            use = None if slot is guarded else next_use(slot)
            if use is None or use <= later_than:
                use = -1.0
                available -= slot.nbytes
            lows.append(slot.offset)
            highs.append(slot.offset + slot.nbytes)
            values.append(use)
        if nbytes > available:
            return None
        last = (self.nbytes - nbytes) // ALIGN * ALIGN
        starts = {0, last}
        if not self._ends_only:
            for low, high in zip(lows, highs, strict=True):
                starts.update((low, high, high - nbytes, low - nbytes))
        best: tuple[float, int, int] | None = None
        count = len(slots)
        for start in starts:
            if not 0 <= start <= last:
                continue
            end = start + nbytes
            soonest, evicted = _FOREVER, 0
            at = bisect_right(highs, start)  # the first slot that ends beyond the start
            while at < count and lows[at] < end:
                evicted += highs[at] - lows[at]
                if values[at] < soonest:
                    soonest = values[at]
                    if soonest < 0:
                        break
                at += 1
            if soonest < 0:
                continue
            score = (soonest, -evicted, -start)
            if best is None or score > best:
                best = score
        if best is None:
            return None
        start = -best[2]
        return start, [slot for slot in slots if slot.offset < start + nbytes and start < slot.end]

    def add(self, slot: Slot) -> None:
        self.slots.append(slot)
        self.slots.sort(key=lambda s: s.offset)

    def remove(self, slot: Slot) -> None:
        self.slots.remove(slot)
