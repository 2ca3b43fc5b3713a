"""What a session did: bytes and copies counted on the host, times taken from events that are read later.

Nothing here waits for the device: a step's events are turned into figures once they are all reached.
A step is one root forward or, when training, everything from the first forward after a backward to
that backward's end.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from .learn import Forward, Profile, Turn
from .report import Span
from .transfer import Engine, StreamEngine

_KEPT_STEPS = 64  # figures the medians are taken over
_OPEN_STEPS = 6  # steps whose events may be outstanding before the oldest loses its timing
_TIMED_FIRST = 8  # steps that take times, before only
_TIMED_EVERY = 16  # two in so many do
_PROFILED = range(2, 8)  # steps of a kind (with gradients, without) in which each unit's turn is marked
_MARKS = 8  # made to see what one costs
_FORWARDS = 8  # forwards that may precede a backward before they count as inference


@dataclass
class _Copy:
    name: str
    started: Any
    done: Any
    nbytes: int
    backward: bool


@dataclass
class _Step:
    begin: Any
    gradient: bool
    timed: bool
    end: Any = None
    turn: Any = None  # event where the backward begins
    forwards: int = 1
    clock: float = field(default_factory=time.perf_counter)  # of the host, when it began
    transfers: int = 0
    wire_bytes: int = 0
    raw_bytes: int = 0
    disk_bytes: int = 0
    copies: list[_Copy] = field(default_factory=list)
    decodes: list[tuple[Any, Any]] = field(default_factory=list)
    waits: list[tuple[Any, Any, str, bool]] = field(default_factory=list)
    turns: list[list[Any]] = field(default_factory=list)  # of units in the forward: name, came, went on, left
    # At each turn's end: was the device right behind the host?
    close: list[bool] = field(default_factory=list)
    spent: float = 0.0  # seconds of the host in the turns' beginnings and ends


@dataclass(frozen=True)
class StepFigures:
    """Seconds and bytes of one finished step."""

    train: bool
    timed: bool
    seconds: float
    copied_bytes: int
    stall_seconds: float
    copy_seconds: float
    decode_seconds: float
    wire_bytes: int
    raw_bytes: int
    transfers: int
    disk_bytes: int
    compute_by_phase: tuple[float, float]
    bytes_by_phase: tuple[int, int]


@dataclass(frozen=True)
class Medians:
    """Medians over the steps of the latest kind; None where nothing was measured."""

    train: bool = False
    steps: int = 0
    seconds: float | None = None
    stall_seconds: float | None = None
    compute_seconds: float | None = None
    roofline_seconds: float | None = None
    hidden_fraction: float | None = None
    link_bytes_per_second: float | None = None
    decode_seconds: float = 0.0
    wire_bytes: float = 0
    raw_bytes: float = 0
    transfers: float = 0
    disk_bytes: float = 0
    host_bound: bool = False


class Meter:
    """Collects a session's steps. Called under the streamer's lock."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._open: _Step | None = None
        self._waiting: deque[_Step] = deque()
        self._figures: deque[StepFigures] = deque(maxlen=_KEPT_STEPS)
        self._pictured: tuple[_Step, float] | None = None
        self._profiled: deque[tuple[bool, Forward]] = deque(maxlen=2 * len(_PROFILED))
        self._copies: tuple[tuple[int, float], ...] = ()  # bytes, seconds: of the last profiled step
        self._steps = 0
        self.disk_bytes: Callable[[], int] = int  # bytes read from disk so far; none without a disk
        self._disk_before = 0
        # (what, start, end, bytes) of reads, on the host's clock; None where the device's clock is another one
        self.disk_reads: Callable[[], Iterable[tuple[str, float, float, int]]] | None = None
        self._read_steps = 0
        self._kinds = [0, 0]  # steps begun without gradients, with
        self.profiling = False  # whether the streamer tells of each unit's turn
        self.timing = True  # whether the present step takes times; the streamer asks before it makes marks
        # Elsewhere copies block the host, or a virtual clock knows nothing of it.
        self.watches_host = isinstance(engine, StreamEngine) and not engine.virtual_clock
        self._mark_seconds: float | None = None  # of the host, for a mark

    # -- what happens

    def forward_begins(self, gradient: bool) -> None:
        """The root's forward starts; ``gradient``: a backward may follow."""
        step = self._open
        if step is not None and step.end is not None:
            if gradient and step.gradient and step.turn is None and step.forwards < _FORWARDS:
                step.end = None  # a further forward before the backward
                step.forwards += 1
                return
            self._close()
        # Times cost host time: the first steps take them, then some. Bytes and copies are always counted.
        self.timing = self._steps < _TIMED_FIRST or self._steps % _TIMED_EVERY < 2
        self._steps += 1
        self.profiling = self.timing and self._kinds[gradient] in _PROFILED
        if self.profiling and self.watches_host and self._mark_seconds is None:
            began = time.perf_counter()
            for _ in range(_MARKS):
                self._engine.mark()
            self._mark_seconds = (time.perf_counter() - began) / _MARKS
        self._kinds[gradient] += 1
        self._open = _Step(self._engine.mark(), gradient, self.timing)

    def no_backward(self) -> None:
        """The root's forward under way gives nothing that a backward could begin at: a step by itself."""
        if self._open is not None and self._open.forwards == 1:
            self._open.gradient = False

    def forward_ends(self) -> None:
        if self._open is not None:
            self._open.end = self._engine.mark()
            if not self._open.gradient:
                self._close()

    def backward_begins(self) -> None:
        self.profiling = False
        if self._open is not None and self._open.turn is None:
            self._open.turn = self._engine.mark()

    def backward_ends(self) -> None:
        if self._open is not None:
            self._open.end = self._engine.mark()
            self._close()

    def abandon(self) -> None:
        """The step failed: what was measured of it is not a step."""
        self._open = None

    def copied(
        self, name: str, marks: Any, nbytes: int, raw_bytes: int, backward: bool, transfers: int = 1
    ) -> None:
        step = self._open
        if step is not None:
            step.transfers += transfers
            step.wire_bytes += nbytes
            step.raw_bytes += raw_bytes
            if marks is not None:
                step.copies.append(_Copy(name, marks[0], marks[1], nbytes, backward))

    def decoded(self, marks: Any) -> None:
        """A unit was unpacked on the device between two marks."""
        if self._open is not None and marks is not None:
            self._open.decodes.append(marks)

    def waited(self, before: Any, after: Any, name: str, backward: bool) -> None:
        if self._open is not None:
            self._open.waits.append((before, after, name, backward))

    def came(self, name: str, came: Any, went_on: Any) -> None:
        """The stream came to a unit in a forward, and went on when it was there."""
        if self._open is not None:
            self._open.turns.append([name, came, went_on, None, False])

    def left(self, name: str, left: Any) -> None:
        """The unit's kernels were issued."""
        if self._open is not None:
            for turn in reversed(self._open.turns):
                if turn[0] == name and turn[3] is None:
                    turn[3] = left
                    if self.watches_host:
                        # The kernels were issued just now, and the device has begun them: it waits for more.
                        turn[4] = self._engine.done(turn[2])
                        self._open.close.append(turn[4])
                    return

    def spent(self, seconds: float) -> None:
        """The host's time for the beginning or the end of a unit's turn."""
        if self._open is not None:
            self._open.spent += seconds

    # -- what comes of it

    def _use_seconds(self, step: _Step) -> float:
        """Seconds of the host for a turn in the forward, less those of the marks that only profiled steps make."""
        copies = sum(not copy.backward for copy in step.copies)
        decodes = min(len(step.decodes), max(copies, len(step.turns)))
        waits = sum(not backward for *_, backward in step.waits)
        marks = 3 * len(step.turns) + 2 * (copies + decodes + waits)
        return max(0.0, step.spent - marks * (self._mark_seconds or 0.0)) / len(step.turns)

    def _close(self) -> None:
        step, self._open = self._open, None
        if step is not None and step.end is not None:
            read = self.disk_bytes()  # since the step before: reads run on between steps
            step.disk_bytes, self._disk_before = read - self._disk_before, read
            self._waiting.append(step)
        while self._waiting and self._reached(self._waiting[0]):
            self._figures.append(self._read(self._waiting.popleft()))
        while len(self._waiting) > _OPEN_STEPS:
            self._waiting.popleft()

    def _reached(self, step: _Step) -> bool:
        done = self._engine.done
        return (
            done(step.end)
            and all(done(copy.done) for copy in step.copies)
            and all(done(after) for _, after in step.decodes)
            # Marks on a side stream, or of a unit used after the root's forward, may be reached later than its end.
            and all(done(after) for _, after, _, _ in step.waits)
            and all(done(mark) for turn in step.turns for mark in turn[1:4] if mark is not None)
        )

    def _read(self, step: _Step) -> StepFigures:
        between = self._engine.elapsed
        seconds = between(step.begin, step.end)
        self._read_steps += 1
        stalls = [0.0, 0.0]
        for before, after, _, backward in step.waits:
            stalls[backward] += max(0.0, between(before, after))
        forward = between(step.begin, step.turn) if step.turn is not None else seconds
        copies = [(copy, max(0.0, between(copy.started, copy.done))) for copy in step.copies]
        if step.timed:
            self._pictured = step, seconds
        if step.turns:
            at = lambda event: between(step.begin, event)  # noqa: E731
            turns = tuple(
                Turn(name, at(came), at(went_on), at(left), close)
                for name, came, went_on, left, close in step.turns
                if left is not None
            )
            late = step.close[
                len(step.close) // 2 :
            ]  # a step that begins on an idle device has to get ahead first
            close = sum(late) / len(late) if late else 0.0
            use = self._use_seconds(step)
            self._profiled.append((step.turn is not None, Forward(turns, forward, close, use)))
            self._copies = tuple((copy.nbytes, time) for copy, time in copies)
        return StepFigures(
            train=step.turn is not None,
            seconds=seconds,
            stall_seconds=sum(stalls),
            copy_seconds=sum(time for _, time in copies),
            decode_seconds=sum(max(0.0, between(*marks)) for marks in step.decodes),
            timed=step.timed,
            copied_bytes=sum(copy.nbytes for copy, _ in copies),
            wire_bytes=step.wire_bytes,
            raw_bytes=step.raw_bytes,
            transfers=step.transfers,
            disk_bytes=step.disk_bytes,
            compute_by_phase=(max(0.0, forward - stalls[0]), max(0.0, seconds - forward - stalls[1])),
            bytes_by_phase=(
                sum(copy.nbytes for copy, _ in copies if not copy.backward),
                sum(copy.nbytes for copy, _ in copies if copy.backward),
            ),
        )

    def spans(self) -> tuple[Span, ...]:
        """The timeline of the last step that took times."""
        return () if self._pictured is None else self._timeline(*self._pictured)

    def _timeline(self, step: _Step, seconds: float) -> tuple[Span, ...]:
        at = lambda event: self._engine.elapsed(step.begin, event)  # noqa: E731
        spans = [Span("link", c.name, at(c.started), at(c.done), c.nbytes) for c in step.copies]
        cursor = 0.0
        for before, after, name, _ in sorted(step.waits, key=lambda wait: at(wait[0])):
            start, end = at(before), at(after)
            if end > start:
                spans.append(Span("stall", name, start, end))
                if start > cursor:
                    spans.append(Span("compute", "compute", cursor, start))
                cursor = max(cursor, end)
        if seconds > cursor:
            spans.append(Span("compute", "compute", cursor, seconds))
        for name, start, end, nbytes in self.disk_reads() if self.disk_reads is not None else ():
            first, last = max(0.0, start - step.clock), min(seconds, end - step.clock)
            if first < last:
                spans.append(Span("disk", name, first, last, nbytes))
        return tuple(spans)

    @property
    def settled(self) -> int:
        """Steps that have been read and are past the learning of the order."""
        return max(0, self._read_steps - 2)

    @property
    def steps(self) -> int:
        """Steps begun."""
        return self._steps

    @property
    def awaiting(self) -> bool:
        """Whether a forward has run that a backward may still follow."""
        step = self._open
        return step is not None and step.gradient and step.turn is None and step.end is not None

    def profile(self) -> Profile | None:
        """A step of the latest kind that was profiled, None before there is any."""
        if not self._profiled:
            return None
        train = self._profiled[-1][0]
        timed = [figures for figures in self._figures if figures.train == train and figures.timed]
        timed = timed[2:] or timed[-1:]
        if not timed:
            return None
        copy_seconds = sum(figures.copy_seconds for figures in timed)
        return Profile(
            train=train,
            seconds=median(figures.seconds for figures in timed),
            compute=(
                median(figures.compute_by_phase[0] for figures in timed),
                median(figures.compute_by_phase[1] for figures in timed),
            ),
            link_bytes_per_second=sum(figures.copied_bytes for figures in timed) / copy_seconds
            if copy_seconds > 0
            else None,
            forwards=tuple(forward for kind, forward in self._profiled if kind == train),
            copies=self._copies,
        )

    def finish(self) -> None:
        """Wait for the device and read what is outstanding."""
        self._engine.synchronize()
        if self._open is not None and self._open.end is not None:
            self._close()
        while self._waiting:
            self._figures.append(self._read(self._waiting.popleft()))

    def medians(self, disk: float | None = None) -> Medians:
        """Medians over the recorded steps of the latest kind (inference or training); ``disk``: its rate in bytes per
        second, which bounds a step as a whole, because reads run on across the turn."""
        if not self._figures:
            return Medians()
        train = self._figures[-1].train
        steps = [figures for figures in self._figures if figures.train == train]
        # The first steps learn the order and fill caches; they are left out once there are others.
        steps = steps[2:] or steps[-1:]
        timed = [step for step in steps if step.timed] or steps
        copy_seconds = sum(step.copy_seconds for step in timed)
        link = sum(step.copied_bytes for step in timed) / copy_seconds if copy_seconds > 0 else None

        def roofline(step: StepFigures) -> float:
            wire = [count / link if link else 0.0 for count in step.bytes_by_phase]
            phases = sum(max(pair) for pair in zip(step.compute_by_phase, wire, strict=True))
            return max(phases, step.disk_bytes / disk if disk else 0.0)

        return Medians(
            train=train,
            steps=len(steps),
            seconds=median(step.seconds for step in steps),
            stall_seconds=median(step.stall_seconds for step in timed),
            compute_seconds=median(sum(step.compute_by_phase) for step in timed),
            roofline_seconds=median(roofline(step) for step in timed),
            hidden_fraction=median(
                max(0.0, 1 - step.stall_seconds / step.copy_seconds) if step.copy_seconds > 0 else 1.0
                for step in timed
            ),
            link_bytes_per_second=link,
            decode_seconds=median(step.decode_seconds for step in timed),
            wire_bytes=median(step.wire_bytes for step in steps),
            raw_bytes=median(step.raw_bytes for step in steps),
            transfers=median(step.transfers for step in steps),
            host_bound=(profile := self.profile()) is not None
            and profile.train == train
            and profile.host_bound,
            disk_bytes=median(step.disk_bytes for step in steps),
        )
