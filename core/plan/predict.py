"""Simulation of a step under a given plan: predicts seconds, bytes copied and stalls without running the
model.

The streamer copies weights to the device in units (groups of tensors), into places in a region of device memory. It
issues the fetches of a schedule, which depends on the order of use, the sizes of the units and the region, and never on
measured times. `predict` replays these fetches and computes times along the way. The simulated machine has one link to
the device, which copies in the order of issue, and one stream, which computes. A copy starts when the link is free and
the last readers of the bytes it overwrites have finished. A use of a unit starts when the stream is free and the unit's
copy has finished. On devices where copies block the host, the stream computes nothing during a copy.

By default the host is assumed to issue work ahead of the device, which holds while the kernels of a unit take
longer than their launches. With `LaunchSeconds`, no kernel or copy starts before the host has issued that
work. A unit is *resident* if it stays on the device, and *streamed* if it is copied to the region for its uses. The
module imports no torch and has no side effects.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from .schedule import Link

HOST_BINDS = 0.97  # a step is bound by the host where issuing it takes more than this share of its seconds


class PackedTransfer(NamedTuple):
    """The transfer of a unit in packed (compressed) form.

    ``nbytes``: packed bytes copied to the device, 0 for a unit whose packed bytes stay on the device;
    ``seconds``: time the device takes to unpack them. Kernels that run beside the unpacking take that much longer.
    ``pieces``: the number of pieces in which they are copied and unpacked, one after the other. ``buffers``: how many such
    pieces the staging memory holds, 1 or 2.
    """

    nbytes: int
    seconds: float
    pieces: int = 1
    buffers: int = 2


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


class Fetches(NamedTuple):
    """The fetches that a schedule issues, see `Schedule`. The cycles of the schedule are the steps.

    ``uses``: the number of each use; ``after`` and ``before``: by position, the numbers of the fetches that are issued
    after the use there and before it; ``unit_of``: the unit of each number. ``laps``: the steps of the table.
    """

    uses: Sequence[int] = ()
    after: Sequence[Sequence[int]] = ()
    before: Mapping[int, Sequence[int]] = MappingProxyType({})
    unit_of: Sequence[int] = ()
    laps: int = 1


@dataclass(eq=False)
class _Simulation:
    """A replay of a schedule over repeated steps, with a clock for each resource."""

    sizes: Sequence[int]
    fetches: Fetches
    link: Link
    compute: float = 0.0  # time up to which the computing stream is busy
    wire: float = 0.0  # time up to which the link is busy
    issued: float = 0.0  # time up to which the host is busy issuing work
    wire_bytes: int = 0
    transfers: int = 0
    packed: Mapping[int, PackedTransfer] = field(default_factory=dict)
    # Times when the last two pieces were unpacked, the older one first. The staging memory, to which packed bytes are
    # copied, holds one or two pieces.
    staged: tuple[float, float] = (0.0, 0.0)
    unpacked: float = 0.0  # time when the latest unpacking ended
    at: int = -1  # number of the present use, counted over all steps
    trains: Mapping[int, int] = field(default_factory=dict)
    # Unit -> step in which its trained bytes were last copied.
    renewed: dict[int, int] = field(default_factory=dict)
    there: dict[int, float] = field(default_factory=dict)  # when what each fetch brings is there

    def use(self, seconds: float, held: float) -> None:
        """Simulate the next use of the schedule, which computes for ``seconds``; ``held``: see `Use`."""
        self.at += 1
        uses, after, before = self.fetches[:3]
        position = self.at % len(uses)
        self._issue(before.get(position, ()))
        self.compute = max(self.compute, self.there.get(uses[position], 0.0)) + held * seconds
        self._issue(after[position])
        self.compute += seconds - held * seconds

    def _issue(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self.there[number] = self._copy(self.fetches.unit_of[number], max(self.compute, self.issued))

    def _copy(self, unit: int, free: float) -> float:
        """Copy (and unpack) ``unit`` to a place that is free at ``free``. Returns the time when it is there."""
        start = max(self.wire, free)
        packed = self.packed.get(unit)
        copied, unpacking, pieces, buffers = packed or PackedTransfer(self.sizes[unit], 0.0)
        if not self.link.blocking:
            self.compute += (
                unpacking  # both use the device's memory; a stream that waits for weights loses nothing
            )
        if packed is not None and not copied:
            fresh, step = (
                self.trains.get(unit, 0),
                max(self.at, 0) * self.fetches.laps // len(self.fetches.uses),
            )
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
            # Packed bytes are copied to the staging memory. Only the unpacking needs the slot.
            there = 0.0
            for _ in range(pieces):
                self.wire = max(self.wire, self.staged[2 - buffers]) + self.link.seconds(copied // pieces)
                there = self.unpacked = max(self.wire, start, self.unpacked) + unpacking / pieces
                self.staged = self.staged[1], there
        self.wire_bytes += copied
        self.transfers += copied > 0
        return there


def predict(
    sizes: Sequence[int],
    resident: Collection[int],
    region_bytes: int,
    workload: Workload,
    link: Link,
    fetches: Fetches,
    *,
    steps: int = 4,
    packed: Mapping[int, PackedTransfer] | None = None,
    host: LaunchSeconds | None = None,
) -> Prediction:
    """Predict a step of ``workload`` when the units in ``resident`` stay on the device and the others stream.

    ``sizes``: bytes by unit; ``region_bytes``: size of the region. ``fetches``: those of the schedule by which the units
    stream (`session.measured_planner.fetches_of_step`). ``packed``: the units that are copied
    packed. ``host``: seconds that Python takes to issue the uses; None means that
    the device never waits for Python.

    The figures are means over ``steps`` times all steps of the schedule, after one step that fills the region. Raises
    ValueError where a streamed unit is larger than the region.
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
    simulation = _Simulation(sizes, fetches, link, packed=packed or {}, trains=workload.trains)
    steps *= fetches.laps
    calls = LaunchSeconds((0.0, 0.0), (0.0, 0.0)) if host is None else host
    before = 0, 0
    spent = [0.0, 0.0]  # forward, backward
    for step in range(steps + 1):
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
