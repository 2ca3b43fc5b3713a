"""Computing times by tensor, derived from timings of a session's first steps.

A unit is a group of tensors that is copied to the device together. A unit is *resident* if it stays on the
device, and *streamed* if it is copied for its uses. A *turn* is one use of a streamed unit. In a few early
steps the session's meter (core/metrics/meter.py) records for each turn how long the unit itself computed, and
how long the device computed between this turn and the next one. The time between two turns belongs to the
resident units used in between. It is divided among them in the ratio of the times of streamed units of the same
kind (same name except for numbers, and same size), or else in the ratio of their bytes. All times are then
scaled to the median of the phase (forward or backward). The result, `TensorTimes`, is stored by tensor, so that
it can be applied to any way of grouping the tensors into units. The result also contains the speed of the link,
the order of use, and which tensors a backward recomputes. The module imports no torch and has no side effects.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

from .predict import Workload
from .schedule import LATENCY, Link

# A step that waits for weights longer than this share of its seconds does not count as bound by the host.
STALLED = 0.15


class UnitTiming(NamedTuple):
    """The times of one streamed unit in a forward, in seconds since the step began.

    ``came``: the computing stream reached the unit; ``went_on``: the unit's weights had arrived and its
    kernels could start; ``left``: its kernels had finished. ``close``: whether the device had already started
    on the unit when the host had just issued the unit's last kernel, that is, whether the device was waiting
    for the host.
    """

    unit: str
    came: float
    went_on: float
    left: float
    close: bool = False


class ForwardTiming(NamedTuple):
    """The timings of the streamed units in one forward.

    ``turns``: one entry for each use of a unit; ``seconds``: duration of the forward; ``close``: the share of
    turns with `UnitTiming.close` among the later half of the turns; ``held``: whether the device was held back, so that
    the times contain no delay by the host (see `Meter`).
    """

    turns: tuple[UnitTiming, ...]
    seconds: float
    close: float = 0.0
    held: bool = False

    @property
    def at_once(self) -> bool:
        """Whether the use of a unit began before that of another one had ended."""
        last, left = "", 0.0
        for turn in self.turns:
            if turn.came < left and turn.unit != last:
                return True
            if turn.left >= left:
                last, left = turn.unit, turn.left
        return False


@dataclass(frozen=True)
class StepProfile:
    """The measured timings of a step.

    ``train``: whether the step had a backward; ``seconds``: median duration; ``compute``: median computing
    seconds of the device in (forward, backward), without the host's delays; ``link_bytes_per_second``: rate of the copies, None where none was
    measured; ``forwards``: the unit timings of some forwards.
    """

    train: bool
    seconds: float
    compute: tuple[float, float]
    link_bytes_per_second: float | None
    forwards: tuple[ForwardTiming, ...]
    copies: tuple[tuple[int, float], ...] = ()  # (bytes, seconds) of each copy of a step
    stalled: float = 0.0  # median seconds of waits for weights

    @property
    def host_bound(self) -> bool:
        """Whether the device waits for Python: kernels start as soon as they are issued, and waits for
        weights are short.
        """
        closes = [forward.close for forward in self.forwards if not forward.held]
        return bool(closes) and median(closes) > 0.5 and self.stalled < STALLED * self.seconds


class UnitTensors(NamedTuple):
    """A unit described by its tensors: ``tensors`` maps each tensor's name to its bytes.

    ``trains``: where any of the tensors is trainable, the bytes of the unit that are never packed; else 0.
    """

    name: str
    tensors: Mapping[str, int]
    trains: int = 0

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(self.tensors.values())


@dataclass(frozen=True)
class TensorTimes:
    """The computing seconds of a step by tensor, with the properties of the step that a prediction needs.

    ``forward`` and ``backward``: tensor name -> seconds of the forward, and of the gradients. ``position``:
    tensor name -> position in the order of use. ``recomputed``: tensors used again by a recomputation in the
    backward. ``unused``: tensors that the backward does not use. ``at_once``: whether several units were in use at the
    same time.
    """

    train: bool
    link: Link
    forward: Mapping[str, float]
    backward: Mapping[str, float]
    position: Mapping[str, int]
    recomputed: frozenset[str]
    unused: frozenset[str]
    held: Mapping[str, float]  # unit name -> share of the unit's seconds during which its slot is in use
    recompute_share: float  # seconds of a recomputation over seconds of the same tensors' forward
    seconds: float  # measured seconds of a step
    host_bound: bool = False  # whether the device waited for Python to issue its work
    at_once: bool = False

    def without_unpacking(self, rate: float, units: Sequence[UnitTensors], link: Link) -> TensorTimes:
        """Return the times as if ``units`` had not been unpacked on the device.

        ``rate``: bytes/s of the unpacking that the measured times contain; ``link``: the link of the returned
        times.
        """
        less = {name: nbytes / rate for unit in units for name, nbytes in unit.tensors.items()}

        def without(seconds: Mapping[str, float], kept: frozenset[str] = frozenset()) -> dict[str, float]:
            """Return ``seconds`` less the unpacking time of each tensor in ``names`` that is not in ``kept``."""
            return {
                name: spent if name in kept else max(0.0, spent - less.get(name, 0.0))
                for name, spent in seconds.items()
            }

        # What is recomputed in the backward is unpacked once for the recomputation and the gradients.
        backward = without(self.backward, self.recomputed)
        forward, held = without(self.forward), dict(self.held)
        for unit in units:  # its slot is in use for as long as before, but for a larger share of its seconds
            before, after = (
                sum(each.get(name, 0.0) for name in unit.tensors) for each in (self.forward, forward)
            )
            if unit.name in held and after > 0:
                held[unit.name] = min(1.0, held[unit.name] * before / after)
        return replace(self, forward=forward, backward=backward, link=link, held=held)

    def workload(self, units: Sequence[UnitTensors], blocks: Sequence[frozenset[str]] = ()) -> Workload:
        """Return the workload of a step whose tensors are grouped into ``units``.

        ``blocks``: sets of tensors that are recomputed together, under activation checkpointing.
        """
        forward = tuple(_sum(self.forward, unit) for unit in units)
        last = len(self.position)
        order = sorted(
            range(len(units)),
            key=lambda i: (
                min((self.position.get(name, last) for name in units[i].tensors), default=last),
                i,
            ),
        )
        held = tuple(self.held.get(unit.name, 1.0) for unit in units)
        if not self.train:
            return Workload(tuple(order), forward, held=held)
        backward = tuple(_sum(self.backward, unit) for unit in units)
        groups: dict[object, list[int]] = defaultdict(list)
        for index in order:
            names = units[index].tensors.keys()
            if names & self.recomputed:
                block = next((i for i, block in enumerate(blocks) if names & block), None)
                groups[("unit", index) if block is None else block].append(index)
        idle = frozenset(i for i, unit in enumerate(units) if unit.tensors.keys() <= self.unused)
        return Workload(
            tuple(order), forward, backward, tuple(tuple(group) for group in groups.values()), without_backward=idle,
            recompute_share=self.recompute_share, held=held, trains={i: unit.trains for i, unit in enumerate(units) if unit.trains},
        )  # fmt: skip


def learn(
    units: Sequence[UnitTensors],
    streamed: Sequence[int],
    expected: Sequence[tuple[int, bool]],
    profile: StepProfile,
    *,
    blocking: bool = False,
    unpacking: Mapping[str, float] | None = None,
) -> TensorTimes | None:
    """Derive the computing times of all tensors of ``units`` from ``profile``; return None where no copy was
    measured.

    ``streamed``: for each streamed unit, its index in ``units``. ``expected``: the uses over one period of
    the access order, as (index into ``streamed``, whether the use computes gradients). ``blocking``: whether
    the host waits for each copy. ``unpacking``: unit name -> seconds in which the device unpacks the unit at each use, None
    for none. They are counted among the seconds of that unit.
    """
    if profile.link_bytes_per_second is None or not expected:
        return None
    uses = [(streamed[unit], backward) for unit, backward in expected]
    index_of = {unit.name: index for index, unit in enumerate(units)}
    timed = (
        [index_of[turn.unit] for turn in profile.forwards[-1].turns if turn.unit in index_of]
        if profile.forwards
        else []
    )
    order = _forward_order(len(units), timed + [unit for unit, _ in uses])
    # A unit that is used twice for each computation of its gradients is recomputed in the backward.
    forward_uses = Counter(unit for unit, backward in uses if not backward)
    gradient_uses = Counter(unit for unit, backward in uses if backward)
    recomputed = (
        {unit for unit in forward_uses if forward_uses[unit] >= 2 * max(1, gradient_uses[unit])}
        if profile.train
        else set()
    )
    unused = {
        unit for unit in forward_uses if profile.train and not gradient_uses[unit] and unit not in recomputed
    }
    # Uses of resident units are not recorded. Assume that residents are used like streamed units of the same
    # kind, or like the majority of the streamed units.
    mostly = profile.train and 2 * len(recomputed) >= len(forward_uses)
    kinds: dict[str, list[bool]] = defaultdict(list)
    for unit in forward_uses:
        kinds[_kind(units[unit])].append(unit in recomputed)
    for unit, tensors in enumerate(units):
        seen = kinds.get(_kind(tensors))
        if unit not in forward_uses and (median(seen) >= 0.5 if seen else mostly):
            recomputed.add(unit)
    forward, held = _forward_seconds(units, order, profile, unpacking or {})
    spent = sum(forward[unit] for unit in recomputed)
    # The gradients of the inputs take at least as long as the recomputation, so at most half of the backward
    # recomputes.
    share = min(1.0, profile.compute[1] / (2 * spent)) if spent else 1.0
    left = max(0.0, profile.compute[1] - share * spent)
    whole = sum(forward) - sum(forward[unit] for unit in unused) or 1.0
    backward = [0.0 if unit in unused else left * forward[unit] / whole for unit in range(len(units))]
    return TensorTimes(
        train=profile.train,
        link=_link(profile, blocking),
        forward=_by_tensor(units, forward),
        backward=_by_tensor(units, backward) if profile.train else {},
        position={name: position for position, unit in enumerate(order) for name in units[unit].tensors},
        recomputed=frozenset(name for unit in recomputed for name in units[unit].tensors),
        unused=frozenset(name for unit in unused for name in units[unit].tensors),
        held={unit.name: share for unit, share in zip(units, held, strict=True)},
        recompute_share=share,
        seconds=profile.seconds,
        host_bound=profile.host_bound,
        at_once=any(forward.at_once for forward in profile.forwards),
    )


def _link(profile: StepProfile, blocking: bool) -> Link:
    """Return the link's rate and latency, fitted to the measured copies.

    Copies of differing sizes give both by linear regression. Otherwise assume `LATENCY` where the copies are
    much longer than that, and 0 else.
    """
    sizes = [nbytes for nbytes, _ in profile.copies]
    if sizes and max(sizes) >= 2 * min(sizes):
        mean, time = sum(sizes) / len(sizes), sum(s for _, s in profile.copies) / len(sizes)
        spread = sum((size - mean) ** 2 for size in sizes)
        slope = sum((size - mean) * (s - time) for size, s in profile.copies) / spread
        if slope > 0 and 0 <= time - slope * mean < time / 2:
            return Link(1 / slope, time - slope * mean, blocking)
    assert profile.link_bytes_per_second is not None
    mean = sum(sizes) / len(sizes) if sizes else 0.0
    time = mean / profile.link_bytes_per_second
    if time > 20 * LATENCY:
        return Link(mean / (time - LATENCY), LATENCY, blocking)
    return Link(profile.link_bytes_per_second, 0.0, blocking)


def _forward_order(count: int, uses: Sequence[int]) -> list[int]:
    """Return the indices of all ``count`` units in the order of the forward.

    Streamed units come in the order of their first use in ``uses``. Each resident unit, whose uses are not
    recorded, comes after the unit registered before it in the module.
    """
    first = list(dict.fromkeys(uses))
    used = set(first)
    following: dict[int, list[int]] = defaultdict(list)
    before = -1
    for unit in range(count):
        if unit in used:
            before = unit
        else:
            following[before].append(unit)
    order = list(following[-1])
    for unit in first:
        order += [unit, *following[unit]]
    return order


def _forward_seconds(
    units: Sequence[UnitTensors], order: Sequence[int], profile: StepProfile, unpacking: Mapping[str, float]
) -> tuple[list[float], list[float]]:
    """Return each unit's forward seconds, scaled to the forward's median, and the share of these seconds
    during which its slot is in use.
    """
    position_of = {units[unit].name: position for position, unit in enumerate(order)}
    inside: dict[int, list[float]] = defaultdict(list)  # streamed unit -> seconds of its own kernels
    # Streamed unit -> seconds until the next streamed unit's turn.
    beside: dict[int, list[float]] = defaultdict(list)
    # Residents between two turns -> seconds in between.
    gaps: dict[tuple[int, ...], list[float]] = defaultdict(list)
    held_back = [
        forward for forward in profile.forwards if forward.held
    ]  # these contain no delays by the host
    for forward in held_back or profile.forwards:
        before, end = -1, 0.0
        for name, came, went_on, left, _ in (*forward.turns, UnitTiming("", forward.seconds, 0.0, 0.0)):
            position = position_of.get(name, -1) if name else len(order)
            if position <= before:  # a further use of a unit in the same forward; only the first one counts
                continue
            between = max(0.0, came - end)
            if position > before + 1:
                # A unit of about the same size is unpacked after this one's use, which takes seconds of the gap.
                slowed = min(between, unpacking.get(units[order[before]].name, 0.0)) if before >= 0 else 0.0
                gaps[tuple(order[before + 1 : position])].append(between - slowed)
                if slowed:
                    beside[order[before]].append(slowed)
            elif before >= 0:
                beside[order[before]].append(between)
            if name:
                inside[order[position]].append(max(0.0, left - went_on))
            before, end = position, left
    seconds = [0.0] * len(units)
    held = [1.0] * len(units)
    kinds: dict[str, list[float]] = defaultdict(list)
    for unit, samples in inside.items():
        own, rest = median(samples), median(beside.get(unit, (0.0,)))
        seconds[unit] = own + rest
        held[unit] = own / (own + rest) if own + rest > 0 else 1.0
        kinds[_kind(units[unit])].append(own)
    known = sum(units[unit].nbytes for unit in inside)
    dense = sum(seconds) / known if known else 1.0
    for residents, gap in gaps.items():
        weights = [
            median(kinds[kind]) if (kind := _kind(units[unit])) in kinds else dense * units[unit].nbytes
            for unit in residents
        ]
        whole = sum(weights)
        for unit, weight in zip(residents, weights, strict=True):
            seconds[unit] = median(gap) * (weight / whole if whole > 0 else 1 / len(residents))
    whole = sum(seconds)
    if whole <= 0:
        nbytes = sum(unit.nbytes for unit in units) or 1
        return [profile.compute[0] * unit.nbytes / nbytes for unit in units], held
    return [profile.compute[0] * each / whole for each in seconds], held


def _kind(unit: UnitTensors) -> str:
    """Return a key that units of the same kind share: the name with numbers replaced, and the bytes."""
    return f"{re.sub('[0-9]+', '#', unit.name)} {unit.nbytes}"


def _by_tensor(units: Sequence[UnitTensors], seconds: Sequence[float]) -> dict[str, float]:
    """Return the seconds of each tensor: its share, by bytes, of its unit's seconds."""
    return {
        name: each * nbytes / (unit.nbytes or 1)
        for unit, each in zip(units, seconds, strict=True)
        for name, nbytes in unit.tensors.items()
    }


def _sum(seconds: Mapping[str, float], unit: UnitTensors) -> float:
    """Return the sum of ``seconds`` over the unit's tensors. A tensor without an entry counts with the mean
    seconds per byte of the tensors that have one.
    """
    known = [name for name in unit.tensors if name in seconds]
    found = sum(seconds[name] for name in known)
    nbytes = sum(unit.tensors[name] for name in known)
    return found * unit.nbytes / nbytes if nbytes else 0.0
