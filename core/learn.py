"""PURE. What the first steps taught: seconds of computing by tensor, the link, the order of use, what is recomputed.

In a few early steps the meter marks each streamed unit's turn: what it took itself, and what was computed
between it and the next. That is of the residents used there, in the ratio of what streamed units of their kind
(a name up to its numbers, and a size) take, or of their bytes. The whole is scaled to the phase's median. Kept
by tensor, so that it holds for any way of carving.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import NamedTuple

from .predict import LATENCY, Link, Workload

OURS = 0.9  # of what the host takes at most
STALLED = 0.15  # of a step: what waits longer for weights does not wait for the host


class Turn(NamedTuple):
    """A unit's turn in a forward, in seconds from the step's begin: when the computing stream came to it, went on
    (it was there), and had done its kernels; ``close``: the device had begun them when the host had just issued the last."""

    unit: str
    came: float
    went_on: float
    left: float
    close: bool = False


class Forward(NamedTuple):
    """The streamed units' turns in one forward, and its seconds; ``close``: of its later turns, the share at whose end the
    device had begun what the host had only just issued; ``use``: seconds of the host that Carom takes for one."""

    turns: tuple[Turn, ...]
    seconds: float
    close: float = 0.0
    use: float = 0.0


@dataclass(frozen=True)
class Profile:
    """A step as it was measured: medians of computing seconds by phase, and the units' turns in some forwards."""

    train: bool
    seconds: float
    compute: tuple[float, float]
    link_bytes_per_second: float | None
    forwards: tuple[Forward, ...]
    copies: tuple[tuple[int, float], ...] = ()  # bytes and seconds of its copies

    @property
    def host_bound(self) -> bool:
        """Whether the device waits for Python: it is right behind the host, and does not wait for weights instead."""
        stalled = self.seconds - sum(self.compute)
        close = median(forward.close for forward in self.forwards) if self.forwards else 0.0
        return close > 0.5 and stalled < STALLED * self.seconds

    @property
    def use_seconds(self) -> float:
        """Of the host, for one use of a streamed unit."""
        return median(forward.use for forward in self.forwards) if self.forwards else 0.0


class Piece(NamedTuple):
    """A unit for these purposes: its tensors' bytes by name; ``trains``: where any of them does, the bytes of it that never
    pack."""

    name: str
    tensors: Mapping[str, int]
    trains: int = 0

    @property
    def nbytes(self) -> int:
        return sum(self.tensors.values())


class Calls(NamedTuple):
    """Seconds of the host: for all that is not Carom's in a step, and for each use of a streamed unit."""

    model: float
    use: float


@dataclass(frozen=True)
class Learnt:
    """Seconds by tensor of ``forward`` and of gradients (``backward``); ``place``: of tensors in the order of use.

    ``again``: tensors that a backward recomputes with; ``unused``: those it does not use at all.
    """

    train: bool
    link: Link
    forward: Mapping[str, float]
    backward: Mapping[str, float]
    place: Mapping[str, int]
    again: frozenset[str]
    unused: frozenset[str]
    held: Mapping[str, float]  # by unit: of its seconds, those in which its slot is in use
    share: float  # what recomputing takes, of the forward
    seconds: float  # of a step, measured
    calls: Calls | None = None  # where the seconds are of Python's calls, which nothing hides
    # The share of a tensor's uses that wait for Python; what of ``forward`` is that.
    close: Mapping[str, float] = field(default_factory=dict)
    late: Mapping[str, float] = field(default_factory=dict)
    use: float = 0.0  # seconds of Python for a use of a streamed unit
    apart: bool = False  # whether ``forward`` is without it

    @property
    def host_bound(self) -> bool:
        return self.calls is not None

    def issuing(self, uses: int) -> float:
        """Seconds that the host takes for a step with ``uses`` of streamed units; 0 where it does not bind."""
        return 0.0 if self.calls is None else self.calls.model + uses * self.calls.use

    def unhurried(self) -> Learnt:
        """With the seconds in which the device waited for Carom's part of a use apart: a layout may have other uses."""
        forward = {name: max(0.0, spent - self.late.get(name, 0.0)) for name, spent in self.forward.items()}
        return replace(self, forward=forward, apart=True)

    def waits(self, units: Sequence[Piece]) -> list[float]:
        """Seconds for which the device waits for Python at each use of a unit that does not stay as it is."""
        if not self.apart:
            return [0.0] * len(units)
        return [
            self.use
            * sum(self.close.get(name, 0.0) * n for name, n in unit.tensors.items())
            / (unit.nbytes or 1)
            for unit in units
        ]

    def plainly(self, rate: float, names: Mapping[str, int], link: Link) -> Learnt:
        """As if the tensors ``names`` (bytes by name) had not been unpacked at ``rate`` (bytes/s) while they were used."""
        less = {name: nbytes / rate for name, nbytes in names.items()}

        def without(seconds: Mapping[str, float]) -> dict[str, float]:
            return {name: max(0.0, spent - less.get(name, 0.0)) for name, spent in seconds.items()}

        return replace(self, forward=without(self.forward), backward=without(self.backward), link=link)

    def workload(self, units: Sequence[Piece], blocks: Sequence[frozenset[str]] = ()) -> Workload:
        """The step for another carving; ``blocks``: tensors that are recomputed together."""
        forward = tuple(_sum(self.forward, unit) for unit in units)
        late = len(self.place)
        order = sorted(
            range(len(units)),
            key=lambda i: (min((self.place.get(name, late) for name in units[i].tensors), default=late), i),
        )
        held = tuple(self.held.get(unit.name, 1.0) for unit in units)
        if not self.train:
            return Workload(tuple(order), forward, held=held)
        backward = tuple(_sum(self.backward, unit) for unit in units)
        groups: dict[object, list[int]] = defaultdict(list)
        for index in order:
            names = units[index].tensors.keys()
            if names & self.again:
                block = next((i for i, block in enumerate(blocks) if names & block), None)
                groups[("unit", index) if block is None else block].append(index)
        idle = frozenset(i for i, unit in enumerate(units) if unit.tensors.keys() <= self.unused)
        return Workload(
            tuple(order), forward, backward, tuple(tuple(group) for group in groups.values()), idle=idle,
            again=self.share, held=held, trains={i: unit.trains for i, unit in enumerate(units) if unit.trains},
        )  # fmt: skip


def learn(
    units: Sequence[Piece],
    streamed: Sequence[int],
    expected: Sequence[tuple[int, bool]],
    profile: Profile,
    *,
    blocking: bool = False,
) -> Learnt | None:
    """What ``profile`` tells of ``units``; None where no copy was measured.

    ``streamed``: indices of the streamed units, as ``expected`` counts them: (streamed unit, whether its use was
    a backward's), over one period of the order.
    """
    if profile.link_bytes_per_second is None or not expected:
        return None
    uses = [(streamed[unit], backward) for unit, backward in expected]
    named = {piece.name: unit for unit, piece in enumerate(units)}
    seen_so = (
        [named[turn.unit] for turn in profile.forwards[-1].turns if turn.unit in named]
        if profile.forwards
        else []
    )
    order = _forward_order(len(units), seen_so + [unit for unit, _ in uses])
    plain = Counter(unit for unit, backward in uses if not backward)
    graded = Counter(unit for unit, backward in uses if backward)
    again = {unit for unit in plain if plain[unit] >= 2 * max(1, graded[unit])} if profile.train else set()
    unused = {unit for unit in plain if profile.train and not graded[unit] and unit not in again}
    # Residents are not seen: they are taken to be used as the streamed of their kind, or as most are.
    mostly = profile.train and 2 * len(again) >= len(plain)
    kinds: dict[str, list[bool]] = defaultdict(list)
    for unit in plain:
        kinds[_kind(units[unit])].append(unit in again)
    for unit, piece in enumerate(units):
        seen = kinds.get(_kind(piece))
        if unit not in plain and (median(seen) >= 0.5 if seen else mostly):
            again.add(unit)
    forward, held = _forward_seconds(units, order, profile)
    spent = sum(forward[unit] for unit in again)
    # Gradients of the inputs take as long as the recomputation, or longer.
    share = min(1.0, profile.compute[1] / (2 * spent)) if spent else 1.0
    left = max(0.0, profile.compute[1] - share * spent)
    whole = sum(forward) - sum(forward[unit] for unit in unused) or 1.0
    calls, scale = None, 1.0
    if profile.host_bound:  # what was measured as computing is issuing, ours included
        busy = sum(profile.compute)
        use = min(profile.use_seconds, OURS * busy / len(uses))
        model = busy - len(uses) * use
        calls, scale = Calls(model, use), model / busy if busy > 0 else 1.0
    close, late = _close(units, profile), [0.0] * len(units)
    each = profile.use_seconds
    if calls is None and not profile.train and each > 0:
        # No more than it took.
        close = [min(share, seconds / each) for share, seconds in zip(close, forward, strict=True)]
        for unit in set(streamed):
            late[unit] = each * close[unit]
    backward = [0.0 if unit in unused else left * forward[unit] / whole for unit in range(len(units))]
    return Learnt(
        train=profile.train,
        link=_link(profile, blocking),
        forward=_by_tensor(units, [scale * each for each in forward]),
        backward=_by_tensor(units, [scale * each for each in backward]) if profile.train else {},
        place={name: place for place, unit in enumerate(order) for name in units[unit].tensors},
        again=frozenset(name for unit in again for name in units[unit].tensors),
        unused=frozenset(name for unit in unused for name in units[unit].tensors),
        held={piece.name: share for piece, share in zip(units, held, strict=True)},
        share=share,
        seconds=profile.seconds,
        calls=calls,
        close={name: share for piece, share in zip(units, close, strict=True) for name in piece.tensors},
        use=each if any(late) else 0.0,
        late=_by_tensor(units, late),
    )


def _link(profile: Profile, blocking: bool) -> Link:
    """Rate and price of a copy, from copies of differing sizes; else the usual price, where it can be in it."""
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
    """All units: the streamed as they were used first, each resident after the one registered before it."""
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
    units: Sequence[Piece], order: Sequence[int], profile: Profile
) -> tuple[list[float], list[float]]:
    """Seconds of each unit's forward, in all what the forward took; and the share of it that its slot is in use."""
    at = {units[unit].name: place for place, unit in enumerate(order)}
    inside: dict[int, list[float]] = defaultdict(list)
    beside: dict[int, list[float]] = defaultdict(list)
    gaps: dict[tuple[int, ...], list[float]] = defaultdict(list)  # residents -> seconds
    for forward in profile.forwards:
        before, end = -1, 0.0
        for name, came, went_on, left, _ in (*forward.turns, Turn("", forward.seconds, 0.0, 0.0)):
            place = at.get(name, -1) if name else len(order)
            if place <= before:  # what is used again later in the forward has had its turn
                continue
            between = max(0.0, came - end)
            if place > before + 1:
                gaps[tuple(order[before + 1 : place])].append(between)
            elif before >= 0:
                beside[order[before]].append(between)
            if name:
                inside[order[place]].append(max(0.0, left - went_on))
            before, end = place, left
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
        nbytes = sum(piece.nbytes for piece in units) or 1
        return [profile.compute[0] * piece.nbytes / nbytes for piece in units], held
    return [profile.compute[0] * each / whole for each in seconds], held


def _close(units: Sequence[Piece], profile: Profile) -> list[float]:
    """The share of a unit's uses at which the device was right behind the host; residents are as the streamed of their kind
    are, or as all."""
    seen: dict[str, list[bool]] = defaultdict(list)
    for forward in profile.forwards:
        for turn in forward.turns:
            seen[turn.unit].append(turn.close)
    kinds: dict[str, list[bool]] = defaultdict(list)
    for piece in units:
        kinds[_kind(piece)] += seen.get(piece.name, [])
    all_ = [close for closes in seen.values() for close in closes]
    found = [seen.get(piece.name) or kinds[_kind(piece)] or all_ or [False] for piece in units]
    return [sum(closes) / len(closes) for closes in found]


def _kind(piece: Piece) -> str:
    return f"{re.sub('[0-9]+', '#', piece.name)} {piece.nbytes}"


def _by_tensor(units: Sequence[Piece], seconds: Sequence[float]) -> dict[str, float]:
    return {
        name: each * nbytes / (unit.nbytes or 1)
        for unit, each in zip(units, seconds, strict=True)
        for name, nbytes in unit.tensors.items()
    }


def _sum(seconds: Mapping[str, float], unit: Piece) -> float:
    """Of a unit's tensors; one that came later takes its bytes' share of what the others of the unit take."""
    known = [name for name in unit.tensors if name in seconds]
    found = sum(seconds[name] for name in known)
    nbytes = sum(unit.tensors[name] for name in known)
    return found * unit.nbytes / nbytes if nbytes else 0.0
