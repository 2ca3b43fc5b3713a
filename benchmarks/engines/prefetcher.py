"""The base of `schedules`: a replay of a prefetcher, which decides at each use what to fetch next and where to.

It is what Carom had before it had schedules. After each use the units that are needed next are copied, in order, as far
as the region has room for them, each to the place whose contents are needed latest (Belady's rule, `Region.place`). The
machine is that of `core/plan/predict.py`: one link, which copies in the order of issue, and one stream, which computes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...core.plan.predict import Link, PackedTransfer, Use
from ...core.plan.region import Region

STEPS = 2  # cycles whose mean counts, after the first one


@dataclass(eq=False, slots=True)
class _ReplayedSlot:
    """A slot of the simulation, with times in seconds in place of device events."""

    unit: int
    offset: int
    nbytes: int
    end: int
    there: float  # time when the unit's bytes have arrived
    read: float = -1.0  # time when the last read ends; -1: the slot was never read
    users: int = 0


@dataclass(eq=False)
class _Replay:
    """A replay over a repeated ``sequence`` of uses of streamed units, with a clock for each resource."""

    sizes: Sequence[int]
    region: Region
    sequence: list[int]
    link: Link
    packed: Mapping[int, PackedTransfer]
    compute: float = 0.0  # time up to which the computing stream is busy
    wire: float = 0.0  # time up to which the link is busy
    # Times when the last two packed units were unpacked, the older unit first. The staging buffer, to which
    # packed bytes are copied, holds two units.
    staged: tuple[float, float] = (0.0, 0.0)
    unpacked: float = 0.0  # time when the latest unpacking ended
    at: int = -1  # number of the present use, counted over all cycles
    slots: dict[int, _ReplayedSlot] = field(default_factory=dict)
    # Byte ranges of evicted slots: (first byte, end, time of the last read).
    freed: list[tuple[int, int, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        period = len(self.sequence)
        last: dict[int, int] = {}
        # For each use of the sequence, the number of uses until the same unit's next use.
        self.gap = [0] * period
        for place in range(2 * period - 1, -1, -1):
            unit = self.sequence[place % period]
            if place < period:
                self.gap[place] = last[unit] - place
            last[unit] = place
        self.next = last  # unit -> number of its next use, counted over all steps

    def use(self, seconds: float) -> None:
        """Simulate the next use of the sequence, which computes for ``seconds``."""
        self.at += 1
        place = self.at % len(self.sequence)
        unit = self.sequence[place]
        self.next[unit] = self.at + self.gap[place]
        slot = self.slots.get(unit)
        surprised = slot is None
        if slot is None:
            found = self.region.place(self.sizes[unit], self._next_uses())
            assert found is not None, "no slot is in use between two uses, so any unit can be placed"
            slot = self._fill(unit, *found)
        slot.users = 1
        self.compute = max(self.compute, slot.there)
        if surprised:
            self._prefetch()
        self.compute += seconds
        slot.users = 0
        slot.read = self.compute
        self._prefetch()

    def _evict(self, victim: Any) -> None:
        """Remove the slot ``victim`` and remember when its bytes may be overwritten."""
        self.region.remove(victim)
        del self.slots[victim.unit]
        if victim.read >= 0:
            self.freed.append((victim.offset, victim.end, victim.read))

    def _next_uses(self) -> list[float | None]:
        """Return, for each slot of the region, the number of uses until its unit's next use; None for a slot
        in use.
        """
        next_, at, slots = self.next, self.at, self.region.slots
        return [None if self.slots[slot.unit].users else next_[slot.unit] - at for slot in slots]

    def _prefetch(self) -> None:
        """Issue copies of the next units, in order of use, as far as the region has space for them."""
        room, at, sequence, slots, sizes = self.region.nbytes, self.at, self.sequence, self.slots, self.sizes
        period = len(sequence)
        seen = set()
        for distance in range(1, period + 1):
            unit = sequence[(at + distance) % period]
            if unit in seen:
                continue
            seen.add(unit)
            room -= sizes[unit]
            if room < 0:
                return
            if unit in slots:
                continue
            found = self.region.place(sizes[unit], self._next_uses(), later_than=distance)
            if found is None:
                return
            self._fill(unit, *found)

    def _fill(self, unit: int, offset: int, victims: list) -> _ReplayedSlot:
        """Evict ``victims``, issue the copy (and unpacking) of ``unit`` to ``offset``, and return the new
        slot.
        """
        for victim in victims:
            self._evict(victim)
        nbytes = self.sizes[unit]
        end = offset + nbytes
        free, kept = 0.0, []
        for low, high, read in self.freed:
            if low < end and offset < high:
                free = max(free, read)
                kept += [(a, b, read) for a, b in ((low, offset), (end, high)) if a < b]
            else:
                kept.append((low, high, read))
        self.freed = kept
        there = self._copy(unit, free)
        slot = self.slots[unit] = _ReplayedSlot(unit, offset, nbytes, end, there)
        self.region.add(slot)  # type: ignore[arg-type]
        return slot

    def _copy(self, unit: int, free: float) -> float:
        """Copy (and unpack) ``unit`` to a place that is free at ``free``. Returns the time when it is there."""
        packed = self.packed.get(unit)
        # Whole units, two of which the staging memory holds, as the prefetcher copied them.
        copied, unpacking = (self.sizes[unit], 0.0) if packed is None else (packed.nbytes, packed.seconds)
        self.compute += unpacking  # both use the device's memory
        if packed is None:
            self.wire = max(self.wire, free) + self.link.seconds(copied)
            return self.wire
        if not copied:
            self.unpacked = max(free, self.unpacked) + unpacking
            return self.unpacked
        # Packed bytes are copied to the staging buffer. Only the unpacking needs the slot.
        start = max(self.wire, free)
        self.wire = max(self.wire, self.staged[0]) + self.link.seconds(copied)
        self.unpacked = max(self.wire, start, self.unpacked) + unpacking
        self.staged = self.staged[1], self.unpacked
        return self.unpacked


def prefetcher_seconds(
    sizes: Sequence[int],
    resident: Collection[int],
    region_bytes: int,
    cycle: Sequence[Use],
    link: Link,
    packed: Mapping[int, PackedTransfer] | None = None,
) -> float:
    """Return the seconds of a ``cycle`` of uses when the units in ``resident`` stay on the device and the others pass
    through a region of ``region_bytes`` bytes. ``packed``: the units that are copied packed.
    """
    sequence = [use.unit for use in cycle if use.unit not in resident]
    largest = max((size for unit, size in enumerate(sizes) if unit not in resident), default=1)
    replay = _Replay(sizes, Region(max(region_bytes, largest), largest), sequence, link, packed or {})
    begin = 0.0
    for step in range(STEPS + 1):
        for use in cycle:
            if use.unit in resident:
                replay.compute += use.seconds
            else:
                replay.use(use.seconds)
        begin = begin if step else replay.compute
    return (replay.compute - begin) / STEPS
