"""PURE. What a step will take under a plan, in seconds: the streamer's own decisions replayed on a virtual clock.

The streamer decides on the host's order of events, never on times: which copy is issued when follows from
the order of use, the units' sizes and the region alone. So its decisions are replayed here with the same
`Region` (and, for when a unit is needed again, what `Order` knows once it has learnt a period), and times
are worked out along the way: one link that copies in the order of issue, one stream that computes. A copy
starts when the link is free and the last readers of what it overwrites are done; a use starts when the
stream is free and its unit is there. Where copies block the host, each is computing time lost.

The host is taken to be ahead of the device, as it is while units take longer than their launches, unless a `Host` says
what it takes to issue them: then nothing starts before it was issued.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from .slots import Region

HOST_BINDS = 0.97  # of a step
LATENCY = 10e-6  # seconds from one copy's end to the next one's first byte, where it was not measured


@dataclass(frozen=True)
class Link:
    """Host to device: bytes/s, seconds a copy costs beside, whether the host waits for every copy (a device
    without streams)."""

    bytes_per_second: float
    latency: float = LATENCY
    blocking: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.bytes_per_second < float("inf") or self.latency < 0:
            raise ValueError(f"{self} is no link: it needs a positive rate and a latency of at least zero")

    def seconds(self, nbytes: int) -> float:
        """On the wire."""
        return self.latency + nbytes / self.bytes_per_second


class Packed(NamedTuple):
    """A unit that crosses packed: bytes on the wire (0: it stays packed on the device), seconds of unpacking it there."""

    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Host:
    """Seconds of Python for one use of a unit that streams, and of one that stays; each in the forward and backward."""

    streamed: tuple[float, float]
    resident: tuple[float, float]

    def __post_init__(self) -> None:
        if any(not 0 <= s < float("inf") for s in (*self.streamed, *self.resident)):
            raise ValueError(f"{self}: seconds of the host are finite and not negative")


class Use(NamedTuple):
    """One use of a unit: seconds of computing from here to the next use; ``backward``: in the second phase;
    ``held``: the share of the seconds after which the slot is free."""

    unit: int
    seconds: float
    backward: bool = False
    held: float = 1.0


@dataclass(frozen=True)
class Workload:
    """What a step computes, by unit: ``order`` of the forward, seconds of its ``forward`` and ``backward``.

    ``backward`` () is inference; ``idle`` units are not used in it. ``groups``: units that are recomputed together, in forward order, before
    their backward (a checkpointed block's parts); a unit in none keeps its activations. ``pause``: seconds
    between two steps in which the device computes something else (an optimizer, a sampler). ``trains``: units that stream
    with weights that train, and their bytes that never pack: before each step these change on the host.
    """

    order: tuple[int, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()
    pause: float = 0.0
    idle: frozenset[int] = frozenset()
    again: float = 1.0
    held: tuple[float, ...] = ()
    trains: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        count = len(self.forward)
        if sorted(self.order) != list(range(count)) or (self.backward and len(self.backward) != count):
            raise ValueError("a workload names every unit once in its order and gives seconds for each")
        if self.held and (len(self.held) != count or any(not 0 <= share <= 1 for share in self.held)):
            raise ValueError("what a workload holds of a unit's seconds is a share")
        if any(not 0 <= s < float("inf") for s in (*self.forward, *self.backward, self.pause, self.again)):
            raise ValueError("seconds of a workload are finite and not negative")
        grouped = [unit for group in self.groups for unit in group]
        if len(set(grouped)) != len(grouped) or not set(grouped) <= set(range(count)):
            raise ValueError("a unit of a workload is in one group at most")

    def beside(self, seconds: Sequence[float]) -> Workload:
        """As it is when the device does ``seconds`` of something else by unit at each of its uses (unpacking it: that takes
        the memory's time, as computing does)."""
        forward = tuple(a + b for a, b in zip(self.forward, seconds, strict=True))
        backward = tuple(
            a + (0.0 if unit in self.idle else b)
            for unit, (a, b) in enumerate(zip(self.backward, seconds, strict=bool(self.backward)))
        )
        return replace(self, forward=forward, backward=backward)

    @property
    def train(self) -> bool:
        return bool(self.backward)

    @property
    def phases(self) -> tuple[float, ...]:
        """Seconds of computing, phase by phase."""
        if not self.backward:
            return (sum(self.forward),)
        again = self.again * sum(self.forward[unit] for group in self.groups for unit in group)
        graded = sum(seconds for unit, seconds in enumerate(self.backward) if unit not in self.idle)
        return sum(self.forward), again + graded

    def uses(self) -> list[Use]:
        """One step."""
        held = self.held or (1.0,) * len(self.forward)
        uses = [Use(unit, self.forward[unit], False, held[unit]) for unit in self.order]
        if not self.backward:
            return uses
        group_of = {unit: group for group in self.groups for unit in group}
        done: set[int] = set()
        for unit in reversed(self.order):
            if unit in done:
                continue
            group = group_of.get(unit, ())
            uses += [Use(part, self.again * self.forward[part], True, held[part]) for part in group]
            parts = group or (unit,)
            uses += [
                Use(part, self.backward[part], True) for part in reversed(parts) if part not in self.idle
            ]
            done.update(parts)
        return uses


@dataclass(frozen=True)
class Prediction:
    """A step in the steady state: seconds, bytes, copies; ``phases``: seconds of forward and of backward."""

    seconds: float
    stall_seconds: float
    wire_bytes: int
    transfers: int
    phases: tuple[float, ...]
    host_seconds: float = 0.0

    @property
    def host_bound(self) -> bool:
        """Whether issuing the work takes as long as doing it."""
        return self.host_seconds > HOST_BINDS * self.seconds


@dataclass(eq=False, slots=True)
class _Place:
    """A slot of the replay: what `slots.Slot` is to the streamer."""

    unit: int
    offset: int
    nbytes: int
    end: int
    there: float  # when its bytes are
    read: float = -1.0  # when its last reader ends; -1: nobody has
    users: int = 0


@dataclass(eq=False)
class _Replay:
    """The streamer's decisions over a cyclic sequence of uses, with clocks."""

    sizes: Sequence[int]
    region: Region
    sequence: list[int]  # streamed units, by use; one step
    link: Link
    compute: float = 0.0
    wire: float = 0.0
    issued: float = 0.0  # the host's clock
    wire_bytes: int = 0
    transfers: int = 0
    packed: Mapping[int, Packed] = field(default_factory=dict)
    staged: tuple[float, float] = (0.0, 0.0)  # when the last but one and the last that crossed were unpacked
    unpacked: float = 0.0  # when anything last was
    at: int = -1  # the present use, over all steps
    trains: Mapping[int, int] = field(default_factory=dict)
    renewed: dict[int, int] = field(
        default_factory=dict
    )  # the step in which what trains of a unit last crossed
    slots: dict[int, _Place] = field(default_factory=dict)
    tails: list[tuple[int, int, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        period = len(self.sequence)
        last: dict[int, int] = {}
        self.gap = [0] * period  # uses until the same unit's next, by place in the sequence
        for place in range(2 * period - 1, -1, -1):
            unit = self.sequence[place % period]
            if place < period:
                self.gap[place] = last[unit] - place
            last[unit] = place
        self.next = last  # absolute place of the next use

    def use(self, seconds: float, held: float) -> None:
        """The next use of the sequence."""
        self.at += 1
        place = self.at % len(self.sequence)
        unit = self.sequence[place]
        self.next[unit] = self.at + self.gap[place]
        slot = self.slots.get(unit)
        surprised = slot is None
        if slot is None:
            found = self.region.place(self.sizes[unit], self._next_uses())
            assert found is not None, "nothing is in use between two uses"
            slot = self._fill(unit, *found)
        slot.users = 1
        self.compute = max(self.compute, slot.there)
        if surprised:
            self._look_ahead()
        self.compute += held * seconds
        slot.users = 0
        slot.read = self.compute
        self._look_ahead()
        self.compute += seconds - held * seconds

    def rest(self) -> None:
        """A step ends: what trains changes on the host, and slots are not kept of it."""
        for unit in self.trains.keys() & self.slots.keys():
            self._give_up(self.slots[unit])

    def _give_up(self, victim: Any) -> None:
        self.region.remove(victim)
        del self.slots[victim.unit]
        if victim.read >= 0:
            self.tails.append((victim.offset, victim.end, victim.read))

    def _next_uses(self) -> list[float | None]:
        next_, at, slots = self.next, self.at, self.region.slots
        return [None if s.users else next_[s.unit] - at for s in slots]

    def _look_ahead(self) -> None:
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
            if unit in slots or (unit in self.trains and at % period + distance >= period):
                continue
            found = self.region.place(sizes[unit], self._next_uses(), later_than=distance)
            if found is None:
                return
            self._fill(unit, *found)

    def _fill(self, unit: int, offset: int, victims: list) -> _Place:
        for victim in victims:
            self._give_up(victim)
        nbytes = self.sizes[unit]
        end = offset + nbytes
        free, kept = self.issued, []
        for low, high, read in self.tails:
            if low < end and offset < high:
                free = max(free, read)
                kept += [(a, b, read) for a, b in ((low, offset), (end, high)) if a < b]
            else:
                kept.append((low, high, read))
        self.tails = kept
        start = max(self.wire, free)
        packed = self.packed.get(unit)
        crossing, unpacking = packed or (nbytes, 0.0)
        if packed is not None and not crossing:
            fresh, step = self.trains.get(unit, 0), max(self.at, 0) // len(self.sequence)
            if fresh and self.renewed.get(unit) != step:
                self.renewed[unit] = step
                self.wire = max(self.wire, self.issued) + self.link.seconds(fresh)
                self.wire_bytes += fresh
                free = max(free, self.wire)
            there = self.unpacked = max(free, self.unpacked) + unpacking
        elif self.link.blocking:
            self.compute = max(self.compute, start) + self.link.seconds(crossing) + unpacking
            there = self.wire = self.compute
        elif packed is None:
            there = self.wire = start + self.link.seconds(crossing)
        else:  # to the staging buffer, which holds two: the slot is needed for unpacking only
            self.wire = max(self.wire, self.staged[0]) + self.link.seconds(crossing)
            there = self.unpacked = max(self.wire, start, self.unpacked) + unpacking
            self.staged = self.staged[1], there
        self.wire_bytes += crossing
        self.transfers += crossing > 0
        slot = self.slots[unit] = _Place(unit, offset, nbytes, end, there)
        self.region.add(slot)  # type: ignore[arg-type]
        return slot


def predict(
    sizes: Sequence[int],
    resident: Collection[int],
    region_bytes: int,
    workload: Workload,
    link: Link,
    *,
    steps: int = 4,
    packed: Mapping[int, Packed] | None = None,
    host: Host | None = None,
) -> Prediction:
    """The steady state of ``workload`` when units in ``resident`` stay and the rest passes through the region.

    ``packed``: the units that cross packed; what unpacking takes of computing is to be in the workload. ``host``: what
    issuing takes; None: less than doing, always.

    ``sizes``: bytes by unit. Means over ``steps`` steps after one that fills the slots (slots of several sizes
    may come to lie differently from step to step). Raises ValueError where a streamed unit is larger than the
    region.
    """
    if len(sizes) != len(workload.forward):
        raise ValueError(f"{len(sizes)} sizes for {len(workload.forward)} units of work")
    uses = workload.uses()
    streamed = [size for unit, size in enumerate(sizes) if unit not in resident]
    if not streamed and host is None:
        phases = workload.phases
        return Prediction(sum(phases), 0.0, 0, 0, phases)
    if max(streamed, default=0) > region_bytes:
        raise ValueError(f"a region of {region_bytes} bytes has no slot for a unit of {max(streamed)}")
    sequence = [use.unit for use in uses if use.unit not in resident]
    largest = max(streamed, default=1)
    replay = _Replay(
        sizes,
        Region(max(region_bytes, largest), largest),
        sequence,
        link,
        packed=packed or {},
        trains=workload.trains,
    )
    calls = Host((0.0, 0.0), (0.0, 0.0)) if host is None else host
    before = 0, 0
    spent = [0.0, 0.0]  # forward, backward
    for step in range(steps + 1):
        replay.rest()
        replay.compute += workload.pause
        begin, turn = replay.compute, None
        if step == 1:
            before = replay.wire_bytes, replay.transfers
        for use in uses:
            if use.backward and turn is None:
                turn = replay.compute
            stays = use.unit in resident
            replay.compute = max(replay.compute, replay.issued)
            if stays:
                replay.compute += use.seconds
            else:
                replay.use(use.seconds, use.held)
            replay.issued += (calls.resident if stays else calls.streamed)[use.backward]
            replay.compute = max(replay.compute, replay.issued)  # the last kernel comes with the last call
        if step:
            spent[0] += (replay.compute if turn is None else turn) - begin
            spent[1] += 0.0 if turn is None else replay.compute - turn
    phases = tuple(total / steps for total in spent[: 1 + workload.train])
    return Prediction(
        sum(phases),
        max(0.0, sum(phases) - sum(workload.phases)),
        round((replay.wire_bytes - before[0]) / steps),
        round((replay.transfers - before[1]) / steps),
        phases,
        replay.issued / (steps + 1),
    )


def floor_seconds(sizes: Sequence[int], available: int, workload: Workload, link: Link) -> float:
    """No plan within ``available`` device bytes is faster: each phase computes all, and fetches what never fits."""
    wire = max(0, sum(sizes) - available) / link.bytes_per_second
    if link.blocking:
        return sum(phase + wire for phase in workload.phases)
    return sum(max(phase, wire) for phase in workload.phases)
