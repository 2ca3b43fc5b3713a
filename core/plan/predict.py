"""Simulation of a step under a given plan: predicts seconds, bytes copied and stalls without running the
model.

The streamer copies weights to the device in units (groups of tensors), into slots of a preallocated region.
The streamer issues copies in an order that depends on the order of use, the sizes of the units and the
region, and never on measured times. Therefore `predict` can replay the same decisions with the same `Region`
allocator, under the assumption that the access order has been learned, and compute times along the way. The
simulated machine has one link to the device, which copies in the order of issue, and one stream, which
computes. A copy starts when the
link is free and the last readers of the bytes it overwrites have finished. A use of a unit starts when the
stream is free and the unit's copy has finished. On devices where copies block the host, the stream computes
nothing during a copy.

By default the host is assumed to issue work ahead of the device, which holds while the kernels of a unit take
longer than their launches. With `LaunchSeconds`, no kernel or copy starts before the host has issued that
work. A unit is *resident* if it stays on the device, and *streamed* if it is copied to a slot for its uses. The
module imports no torch and has no side effects.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .region import Region

HOST_BINDS = 0.97  # a step is bound by the host where issuing it takes more than this share of its seconds
# Seconds between the end of one copy and the first byte of the next, where that was not measured.
LATENCY = 10e-6


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


class PackedTransfer(NamedTuple):
    """The transfer of a unit in packed (compressed) form.

    ``nbytes``: packed bytes copied to the device, 0 for a unit whose packed bytes stay on the device;
    ``seconds``: time the device takes to unpack them. Kernels that run beside the unpacking take that much longer.
    """

    nbytes: int
    seconds: float


@dataclass(frozen=True)
class LaunchSeconds:
    """The host seconds that Python takes to issue one use of a unit.

    ``streamed`` and ``resident``: (forward, backward) seconds for a unit that streams, and for a unit that
    stays on the device. Raises ValueError for negative or infinite seconds.
    """

    streamed: tuple[float, float]
    resident: tuple[float, float]

    def __post_init__(self) -> None:
        if any(not 0 <= s < float("inf") for s in (*self.streamed, *self.resident)):
            raise ValueError(f"{self}: host seconds must be finite and not negative")


class Use(NamedTuple):
    """One use of a unit by a step.

    ``seconds``: computing time from the start of this use to the start of the next one; ``backward``: whether
    the use belongs to the backward; ``held``: the share of ``seconds`` during which the unit's slot is in
    use.
    """

    unit: int
    seconds: float
    backward: bool = False
    held: float = 1.0


@dataclass(frozen=True)
class Workload:
    """The computation of one step, described by unit.

    ``order``: unit indices in the order of the forward; ``forward`` and ``backward``: computing seconds by
    unit index, where an empty ``backward`` means inference. ``groups``: units that are recomputed together,
    in forward order, before their backward (the parts of a block under activation checkpointing); a unit in
    no group keeps its activations. ``pause``: seconds between two steps in which the device computes
    something else, such as an optimizer or a sampler. ``without_backward``: units that the backward does not
    use. ``recompute_share``: seconds of a recomputation over seconds of the forward. ``held``: for each unit,
    the share of its forward seconds during which its slot is in use (empty: all of them). ``trains``:
    streamed unit with trainable weights -> the unit's bytes that are never packed; these bytes change on the
    host before each step.

    Raises ValueError for fields that contradict each other.
    """

    order: tuple[int, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()
    pause: float = 0.0
    without_backward: frozenset[int] = frozenset()
    recompute_share: float = 1.0
    held: tuple[float, ...] = ()
    trains: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        count = len(self.forward)
        if sorted(self.order) != list(range(count)) or (self.backward and len(self.backward) != count):
            raise ValueError("a workload must name every unit once in its order and give seconds for each")
        if self.held and (len(self.held) != count or any(not 0 <= share <= 1 for share in self.held)):
            raise ValueError("a workload's `held` must give each unit a share from 0 to 1")
        if any(
            not 0 <= s < float("inf")
            for s in (*self.forward, *self.backward, self.pause, self.recompute_share)
        ):
            raise ValueError("the seconds of a workload must be finite and not negative")
        grouped = [unit for group in self.groups for unit in group]
        if len(set(grouped)) != len(grouped) or not set(grouped) <= set(range(count)):
            raise ValueError("a unit of a workload may be in at most one group")

    @property
    def train(self) -> bool:
        """Whether the step has a backward."""
        return bool(self.backward)

    @property
    def phases(self) -> tuple[float, ...]:
        """The computing seconds of each phase: (forward,) or (forward, backward)."""
        if not self.backward:
            return (sum(self.forward),)
        recomputed = self.recompute_share * sum(self.forward[unit] for group in self.groups for unit in group)
        graded = sum(
            seconds for unit, seconds in enumerate(self.backward) if unit not in self.without_backward
        )
        return sum(self.forward), recomputed + graded

    def uses(self) -> list[Use]:
        """Return the uses of one step, in order; a checkpointed group is recomputed right before its
        backward.
        """
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
            uses += [Use(part, self.recompute_share * self.forward[part], True, held[part]) for part in group]
            parts = group or (unit,)
            uses += [
                Use(part, self.backward[part], True)
                for part in reversed(parts)
                if part not in self.without_backward
            ]
            done.update(parts)
        return uses


@dataclass(frozen=True)
class Prediction:
    """The predicted figures of one step, after the first steps have filled the slots.

    ``stall_seconds``: time the device waits for weights; ``wire_bytes`` and ``transfers``: bytes and copies
    from host to device; ``phases``: seconds of the forward and, when training, of the backward;
    ``host_seconds``: time Python takes to issue the step, 0 where that was not modelled.
    """

    seconds: float
    stall_seconds: float
    wire_bytes: int
    transfers: int
    phases: tuple[float, ...]
    host_seconds: float = 0.0

    @property
    def host_bound(self) -> bool:
        """Whether Python takes as long to issue the step's work as the device takes to do that work."""
        return self.host_seconds > HOST_BINDS * self.seconds


@dataclass(eq=False, slots=True)
class _SimulatedSlot:
    """A slot of the simulation, with times in seconds in place of device events."""

    unit: int
    offset: int
    nbytes: int
    end: int
    there: float  # time when the unit's bytes have arrived
    read: float = -1.0  # time when the last read ends; -1: the slot was never read
    users: int = 0


@dataclass(eq=False)
class _Simulation:
    """A replay of the streamer's decisions over a repeated sequence of uses, with a clock for each resource."""

    sizes: Sequence[int]
    region: Region
    sequence: list[int]  # the streamed unit of each use of one step
    link: Link
    compute: float = 0.0  # time up to which the computing stream is busy
    wire: float = 0.0  # time up to which the link is busy
    issued: float = 0.0  # time up to which the host is busy issuing work
    wire_bytes: int = 0
    transfers: int = 0
    packed: Mapping[int, PackedTransfer] = field(default_factory=dict)
    # Times when the last two packed units were unpacked, the older unit first. The staging buffer, to which
    # packed bytes are copied, holds two units.
    staged: tuple[float, float] = (0.0, 0.0)
    unpacked: float = 0.0  # time when the latest unpacking ended
    at: int = -1  # number of the present use, counted over all steps
    trains: Mapping[int, int] = field(default_factory=dict)
    # Unit -> step in which its trained bytes were last copied.
    renewed: dict[int, int] = field(default_factory=dict)
    slots: dict[int, _SimulatedSlot] = field(default_factory=dict)
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

    def use(self, seconds: float, held: float) -> None:
        """Simulate the next use of the sequence, which computes for ``seconds``; ``held``: see `Use`."""
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
        self.compute += held * seconds
        slot.users = 0
        slot.read = self.compute
        self._prefetch()
        self.compute += seconds - held * seconds

    def end_step(self) -> None:
        """Evict the units with trainable weights, because an optimizer changes their host weights after each
        step.
        """
        for unit in self.trains.keys() & self.slots.keys():
            self._evict(self.slots[unit])

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
        return [None if s.users else next_[s.unit] - at for s in slots]

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
            if unit in slots or (unit in self.trains and at % period + distance >= period):
                continue
            found = self.region.place(sizes[unit], self._next_uses(), later_than=distance)
            if found is None:
                return
            self._fill(unit, *found)

    def _fill(self, unit: int, offset: int, victims: list) -> _SimulatedSlot:
        """Evict ``victims``, issue the copy (and unpacking) of ``unit`` to ``offset``, and return the new
        slot.
        """
        for victim in victims:
            self._evict(victim)
        nbytes = self.sizes[unit]
        end = offset + nbytes
        free, kept = self.issued, []
        for low, high, read in self.freed:
            if low < end and offset < high:
                free = max(free, read)
                kept += [(a, b, read) for a, b in ((low, offset), (end, high)) if a < b]
            else:
                kept.append((low, high, read))
        self.freed = kept
        start = max(self.wire, free)
        packed = self.packed.get(unit)
        copied, unpacking = packed or (nbytes, 0.0)
        if not self.link.blocking:
            self.compute += (
                unpacking  # both use the device's memory; a stream that waits for weights loses nothing
            )
        if packed is not None and not copied:
            fresh, step = self.trains.get(unit, 0), max(self.at, 0) // len(self.sequence)
            if fresh and self.renewed.get(unit) != step:
                self.renewed[unit] = step
                self.wire = max(self.wire, self.issued) + self.link.seconds(fresh)
                self.wire_bytes += fresh
                free = max(free, self.wire)
            there = self.unpacked = max(free, self.unpacked) + unpacking
        elif self.link.blocking:
            self.compute = max(self.compute, start) + self.link.seconds(copied) + unpacking
            there = self.wire = self.compute
        elif packed is None:
            there = self.wire = start + self.link.seconds(copied)
        else:
            # Packed bytes are copied to the staging buffer, which holds two units. Only the unpacking needs
            # the slot.
            self.wire = max(self.wire, self.staged[0]) + self.link.seconds(copied)
            there = self.unpacked = max(self.wire, start, self.unpacked) + unpacking
            self.staged = self.staged[1], there
        self.wire_bytes += copied
        self.transfers += copied > 0
        slot = self.slots[unit] = _SimulatedSlot(unit, offset, nbytes, end, there)
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
    packed: Mapping[int, PackedTransfer] | None = None,
    host: LaunchSeconds | None = None,
) -> Prediction:
    """Predict a step of ``workload`` when the units in ``resident`` stay on the device and the others stream.

    ``sizes``: bytes by unit; ``region_bytes``: size of the slot region. ``packed``: the units that are copied
    packed. ``host``: seconds that Python takes to issue the uses; None means that
    the device never waits for Python.

    The figures are means over ``steps`` steps, after one step that fills the slots: slots of several sizes
    may lie at other offsets from step to step. Raises ValueError where a streamed unit is larger than the
    region.
    """
    if len(sizes) != len(workload.forward):
        raise ValueError(f"got {len(sizes)} sizes for a workload of {len(workload.forward)} units")
    uses = workload.uses()
    streamed = [size for unit, size in enumerate(sizes) if unit not in resident]
    if not streamed and host is None:
        phases = workload.phases
        return Prediction(sum(phases), 0.0, 0, 0, phases)
    if max(streamed, default=0) > region_bytes:
        raise ValueError(f"a region of {region_bytes} bytes has no slot for a unit of {max(streamed)}")
    sequence = [use.unit for use in uses if use.unit not in resident]
    largest = max(streamed, default=1)
    simulation = _Simulation(
        sizes,
        Region(max(region_bytes, largest), largest),
        sequence,
        link,
        packed=packed or {},
        trains=workload.trains,
    )
    calls = LaunchSeconds((0.0, 0.0), (0.0, 0.0)) if host is None else host
    before = 0, 0
    spent = [0.0, 0.0]  # forward, backward
    for step in range(steps + 1):
        simulation.end_step()
        simulation.compute += workload.pause
        begin, turn = simulation.compute, None
        if step == 1:
            before = simulation.wire_bytes, simulation.transfers
        for use in uses:
            if use.backward and turn is None:
                turn = simulation.compute
            stays = use.unit in resident
            simulation.compute = max(simulation.compute, simulation.issued)
            if stays:
                simulation.compute += use.seconds
            else:
                simulation.use(use.seconds, use.held)
            simulation.issued += (calls.resident if stays else calls.streamed)[use.backward]
            # The last kernel of a use cannot start before the last call that issues the use.
            simulation.compute = max(simulation.compute, simulation.issued)
        if step:
            spent[0] += (simulation.compute if turn is None else turn) - begin
            spent[1] += 0.0 if turn is None else simulation.compute - turn
    phases = tuple(total / steps for total in spent[: 1 + workload.train])
    return Prediction(
        sum(phases),
        max(0.0, sum(phases) - sum(workload.phases)),
        round((simulation.wire_bytes - before[0]) / steps),
        round((simulation.transfers - before[1]) / steps),
        phases,
        simulation.issued / (steps + 1),
    )
