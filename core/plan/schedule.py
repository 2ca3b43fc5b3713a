"""The schedule: a table, made before a pass, of which units stay on the device and when the others are fetched.

A unit is a group of weights that crosses to the device together. A use of a unit is one forward, recomputation or
backward that reads its weights. A position is the index of a use in the order of uses, which is cyclic. A unit either
stays on the device in memory of its own, or is fetched for its uses to its place in the region, the device memory
through which units pass. An *entry* of the table is a unit, or one fetch of a unit where a unit has several places
(`Schedule.unit_of` gives the unit of each entry). Each entry has one place, so the offsets decide everything else: which
fetches a cycle needs, after which use each of them is issued, and what it overwrites.

The table only hints. What lies in a place, and who still reads it, is looked up when a fetch is issued and when a unit
is used, so a wrong table costs time and never a result. A session's units that stay are chosen by its plan
(`plan.residency`), and `schedule_maker.schedule_in_region` makes the schedule of the others.
`schedule_maker.make_schedule` chooses the units that stay as well; no session uses it yet, because residents are not units
of the pool yet. `schedule_check.check_schedule` proves a schedule's promises, `schedule_seconds.predict_schedule` predicts
its seconds. The module imports no torch and has no side effects.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from .region import ALIGN
from .residency import packed_cost, resident_cost, round_up

# Seconds between the end of one copy and the first byte of the next, where that was not measured.
LATENCY = 10e-6


class Way(enum.Enum):
    """How a unit is held between its uses.

    ``packed``: whether its weights are decoded into the region for a use; ``crosses``: whether they are copied over
    the link for a use.
    """

    CACHED_RAW = "cached raw"  # stays on the device as it is used
    CACHED_PACKED = "cached packed"  # its packed bytes stay on the device
    STREAMED_PACKED = "streamed packed"  # its packed bytes cross the link to a staging buffer
    STREAMED_RAW = "streamed raw"  # its bytes cross the link into the region

    # Plain attributes instead of properties, because a simulation reads them for each unit.
    packed: bool
    crosses: bool

    def __init__(self, _value: str) -> None:
        self.packed = self.name.endswith("PACKED")
        self.crosses = self.name.startswith("STREAMED")


@dataclass(frozen=True)
class UnitCost:
    """The bytes of one unit.

    ``nbytes``: bytes on the device, unpacked. ``packed``: bytes of the packed form, 0 where the unit cannot be packed.
    ``trainable``: whether an optimizer changes the unit's weights at the updates of the order; such a unit is never
    packed. Raises ValueError for sizes that cannot be.
    """

    nbytes: int
    packed: int = 0
    trainable: bool = False

    def __post_init__(self) -> None:
        if self.nbytes <= 0 or self.packed < 0 or (self.trainable and self.packed):
            raise ValueError(f"{self}: bytes must be positive, and a trainable unit has no packed form")


@dataclass(frozen=True)
class UseOrder:
    """The cyclic order of uses: after the last use the first one follows again.

    ``uses``: the unit's index of each use. ``ends``: for each use the last position at which the unit is still in use;
    empty where each use ends before the next one begins. A unit whose forward contains the uses of other units ends
    at the last of these. ``phases``: the first position of each phase. A phase is a stretch in which some units are
    used again and again, such as the denoising steps of one model in a prompt. ``updates``: the positions before
    which trainable weights change, usually 0: an optimizer runs between a backward and the next forward.

    Raises ValueError for positions outside the order, and for uses that overlap without being nested.
    """

    uses: tuple[int, ...]
    ends: tuple[int, ...] = ()
    phases: tuple[int, ...] = (0,)
    updates: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        count = len(self.uses)
        if self.ends and len(self.ends) != count:
            raise ValueError("an order must give each use an end, or none")
        if list(self.phases) != sorted({0, *self.phases}) or (count and self.phases[-1] >= count):
            raise ValueError(f"phases must begin at 0 and ascend inside the order, got {self.phases}")
        if any(not 0 <= position < count for position in self.updates):
            raise ValueError(f"updates must be positions of the order, got {sorted(self.updates)}")
        open_until: list[int] = []
        for position, end in enumerate(self.ends):
            while open_until and open_until[-1] < position:
                open_until.pop()
            if not position <= end < count or (open_until and end > open_until[-1]):
                raise ValueError(f"the use at position {position} ends at {end}, outside the uses around it")
            open_until.append(end)

    def end(self, position: int) -> int:
        """Return the last position at which the use at ``position`` still reads its unit."""
        return self.ends[position] if self.ends else position

    @cached_property
    def enclosing(self) -> frozenset[int]:
        """The units of which some use contains uses of other units."""
        return frozenset(self.uses[position] for position, end in enumerate(self.ends) if end > position)


@dataclass(frozen=True)
class Link:
    """The speed of copies from host to device: a rate in bytes/s and a fixed cost of each copy in seconds.

    ``blocking``: the host waits for every copy, as on a device without streams. Raises ValueError for a rate
    that is not positive and finite, or for a negative latency.
    """

    bytes_per_second: float
    latency: float = LATENCY
    blocking: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.bytes_per_second < float("inf") or self.latency < 0:
            raise ValueError(
                f"{self} is not a valid link: the rate must be positive and the latency at least zero"
            )

    def seconds(self, nbytes: int) -> float:
        """Return the seconds that a copy of ``nbytes`` bytes occupies the link."""
        return self.latency + nbytes / self.bytes_per_second


@dataclass(frozen=True)
class Times:
    """The times of a machine that runs an order.

    ``link``: the rate of copies to the device. ``compute``: seconds of computing of each use, by position.
    ``decode_bytes_per_second``: unpacked bytes that the device decodes in a second, None without a decoder.
    ``host_seconds``: seconds that the host takes for one crossing (a use of a unit that does not stay unpacked), above
    those of a use of a unit that stays. ``pause``: seconds between the last use and the first one of the next cycle,
    in which the device does something else.
    """

    link: Link
    compute: Sequence[float]
    decode_bytes_per_second: float | None = None
    host_seconds: float = 0.0
    pause: float = 0.0


@dataclass(frozen=True)
class Schedule:
    """The table. Where the text says unit, that is an entry of the table, see ``originals``.

    ``capacity``: device bytes that the schedule may take. ``grain``: bytes to whose multiples the device's allocator
    rounds. ``ways``: how each unit is held. ``region_bytes``: bytes of the region. ``staging_bytes``: bytes of the
    buffers in which packed units arrive. ``offsets``: for each unit its one offset in the region, -1 for a unit that
    stays unpacked or is not used. ``after``: for each position the units whose fetches are issued, in that order, when
    all uses that end there have ended. ``before``: position -> units whose fetches are issued before the use there,
    because their trainable weights change at an update before that position. ``laps``: the number of cycles of the
    table. ``originals``: the unit of each entry, where each fetch is an entry of its own, so that a unit has several
    places (`schedule_maker.place_by_need`); empty where the entries are the units.
    """

    order: UseOrder
    units: tuple[UnitCost, ...]
    capacity: int
    grain: int
    ways: tuple[Way, ...]
    region_bytes: int
    staging_bytes: int
    offsets: tuple[int, ...]
    after: tuple[tuple[int, ...], ...]
    before: Mapping[int, tuple[int, ...]]
    laps: int = 1
    originals: tuple[int, ...] = ()

    @cached_property
    def unit_of(self) -> Sequence[int]:
        """The unit of each entry of the table."""
        return self.originals or range(len(self.units))

    def stays(self, unit: int) -> bool:
        """Return whether ``unit`` stays on the device unpacked, so that it is never fetched."""
        return self.ways[unit] is Way.CACHED_RAW

    @cached_property
    def residents(self) -> frozenset[int]:
        """The units that stay on the device unpacked."""
        return frozenset(unit for unit, way in enumerate(self.ways) if way is Way.CACHED_RAW)

    @cached_property
    def fetched(self) -> tuple[int, ...]:
        """The units of all fetches of a cycle, those that only decode included; a unit may occur several times."""
        listed = [unit for units in self.after for unit in units]
        return (*listed, *(unit for units in self.before.values() for unit in units))

    @cached_property
    def fetches_in_turn(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The units of all fetches in the order of issue, and by position how many of them are issued until it has ended."""
        found: list[int] = []
        ends: list[int] = []
        for position, after in enumerate(self.after):
            found += [self.unit_of[number] for number in (*self.before.get(position, ()), *after)]
            ends.append(len(found))
        return tuple(found), tuple(ends)

    @property
    def transfers(self) -> int:
        """The number of copies over the link in a cycle."""
        return sum(self.ways[unit].crosses for unit in self.fetched)

    @property
    def wire_bytes(self) -> int:
        """The bytes that cross the link in a cycle."""
        return sum(
            self.units[unit].packed if self.ways[unit].packed else self.units[unit].nbytes
            for unit in self.fetched
            if self.ways[unit].crosses
        )

    @property
    def device_bytes(self) -> int:
        """The device bytes that the schedule takes: units that stay, the region, and staging."""
        raw = [cost.nbytes for cost, way in zip(self.units, self.ways, strict=True) if way is Way.CACHED_RAW]
        packed = [
            cost.packed for cost, way in zip(self.units, self.ways, strict=True) if way is Way.CACHED_PACKED
        ]
        cached = resident_cost(raw, self.grain) + packed_cost(packed, self.grain)
        return cached + round_up(self.region_bytes, self.grain) + round_up(self.staging_bytes, self.grain)


def slot_bytes(nbytes: int) -> int:
    """Return the bytes of the region that a unit of ``nbytes`` bytes takes."""
    return -(-nbytes // ALIGN) * ALIGN
