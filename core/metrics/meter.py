"""The meter of a session: counts the bytes and copies of each step on the host, and times the step with
device events.

The meter never waits for the device, except in `Meter.finish`: the events of a step are converted to seconds
once all of them have completed. A step is one forward of the root module (the module that the session
streams) or, in training, everything from the first forward after a backward to the end of the last backward
before the next forward. So a step of a GPipe schedule has the forwards and the backwards of all microbatches,
and a step of a 1F1B schedule mostly has those of one. A unit is a group of weights that are copied together.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

from ..device.engine import Engine
from ..plan.profile import ForwardTiming, StepProfile, UnitTiming
from ..plan.roofline import PhaseWork, roofline_seconds
from .kernel_times import Kernel, StepSplit, kernel_times
from .report import Span

_KEPT_STEPS = 64  # number of latest steps over which medians are taken
_OPEN_STEPS = 6  # most finished steps whose events are not read yet; beyond that the oldest step is dropped
_TIMED_FIRST = 8  # number of first steps that are all timed
_TIMED_EVERY = 16  # after these, two of every 16 steps are timed
# Steps of which every unit is timed: numbers 2 to 7, counted separately for steps with and without gradients.
_PROFILED = range(2, 8)
_MARKS = 8  # number of events that are recorded to measure the host seconds that recording one event takes
# With more forwards than this without a backward, the steps count as inference. After steps with more backwards
# than this (a schedule with many microbatches), the number is that of the backwards.
_FORWARDS = 8


@dataclass
class _Copy:
    """A copy of one unit from host to device, with the events ``started`` and ``done``."""

    name: str
    started: Any
    done: Any
    nbytes: int
    backward: bool
    from_peer: bool = False  # whether from the memory of another device


@dataclass
class _Use:
    """One use of a unit in a forward, with the events ``came``, ``went_on`` and ``left`` (see UnitTiming).

    ``idle``: whether the device had finished the unit before by the time at which the host reached this one.
    ``close``: whether the device had begun this unit's kernels by the time at which the host had issued the
    last of them. In both cases the device was waiting for the host.
    """

    name: str
    came: Any
    went_on: Any
    left: Any = None
    idle: bool = False
    close: bool = False


@dataclass
class _Step:
    """The counts and events of one step. Events are recorded on the device; times are host times in seconds
    (`time.perf_counter`).
    """

    begin: Any
    gradient: bool  # whether a backward may follow the forward
    timed: bool
    end: Any = None
    turn: Any = None  # event recorded where the backward begins
    forwards: int = 1
    backwards: int = 0
    clock: float = field(default_factory=time.perf_counter)  # host time when the step began
    turn_clock: float = math.inf  # host time when the backward began
    end_clock: float = math.inf  # host time when the step ended
    transfers: int = 0
    wire_bytes: int = 0
    peer_bytes: int = 0
    raw_bytes: int = 0
    disk_bytes: int = 0
    copies: list[_Copy] = field(default_factory=list)
    decodes: list[tuple[Any, Any]] = field(default_factory=list)
    waits: list[tuple[Any, Any, str, bool]] = field(default_factory=list)
    uses: list[_Use] = field(default_factory=list)
    spent: float = 0.0  # host seconds that Carom's code took before and after the units' forwards


@dataclass(frozen=True)
class StepFigures:
    """The seconds and bytes of one finished step.

    ``raw_bytes``: bytes of the copied weights when unpacked.
    ``wire_bytes``: bytes that were copied from the host (packed or not). ``peer_bytes``: those from other devices.
    ``copied_bytes``: bytes of those copies from the host that were timed. ``copy_seconds``: their seconds.
    ``peer_copied_bytes``, ``peer_seconds``: the same of copies from other devices.
    ``late_seconds``: seconds of the forward in which the device had finished one unit and the host had not
    reached the next; None where units were not timed.
    ``..._by_phase``: pairs (forward, backward).
    """

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
    late_seconds: float | None = None
    peer_bytes: int = 0
    peer_copied_bytes: int = 0
    peer_seconds: float = 0.0


@dataclass(frozen=True)
class Medians:
    """Medians over the latest steps of the latest kind (inference or training). None where nothing was
    measured.

    ``roofline_seconds``: the roofline of a step (core/plan/roofline.py).
    ``split``: the parts of a step.
    ``hidden_fraction``: share of the copies' seconds during which the device did not wait for copies.
    """

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
    peer_bytes: float = 0
    raw_bytes: float = 0
    transfers: float = 0
    disk_bytes: float = 0
    host_bound: bool = False
    split: StepSplit | None = None


class Meter:
    """A recorder of a session's steps. All methods are called with the streamer's lock held."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._open: _Step | None = None
        self._closed: _Step | None = None  # the step that ended last, until another one begins
        self._most_backwards = 0  # in one step
        self._waiting: deque[_Step] = deque()
        self._figures: deque[StepFigures] = deque(maxlen=_KEPT_STEPS)
        self._timeline_step: tuple[_Step, float] | None = None
        self._profiled: deque[tuple[bool, ForwardTiming]] = deque(maxlen=2 * len(_PROFILED))
        # (bytes, seconds) of the copies of the last step of which every unit was timed.
        self._copies: tuple[tuple[int, float], ...] = ()
        self._steps = 0
        self.disk_bytes: Callable[[], int] = int  # returns the bytes read from disk so far; 0 without a disk
        self._disk_before = 0
        # Returns (name, start, end, bytes) of disk reads on the host's clock. None if the device has a
        # virtual clock.
        self.disk_reads: Callable[[], Iterable[tuple[str, float, float, int]]] | None = None
        self._read_steps = 0
        self._kinds = [0, 0]  # number of steps begun so far: [without gradients, with gradients]
        self.profiling = False  # whether the streamer reports the begin and end of each unit's forward
        # Whether the present step is timed; the streamer checks this before it records events.
        self.timing = True
        # Whether to measure that the device waits for the host. This requires copies that do not block the
        # host, and a real device clock.
        self.watches_host = not engine.blocking and not engine.virtual_clock
        self._mark_seconds: float | None = None  # host seconds that recording one event takes
        self._profile_next = False  # whether the next step is to be timed for `kernels_ran`
        self._last_step: _Step | None = None  # the last step with figures
        self._split: StepSplit | None = None  # of the last step that ran under the profiler

    # -- called by the streamer while a step runs

    def forward_begins(self, gradient: bool) -> None:
        """Record the start of a forward of the root module. ``gradient``: whether a backward may follow."""
        step = self._open
        if step is not None and step.end is not None:
            most = max(_FORWARDS, self._most_backwards)
            if gradient and step.gradient and step.turn is None and step.forwards < most:
                step.end = None  # another forward of the same step, before the step's backward
                step.forwards += 1
                return
            self._close()
        # Recording events takes host time, so only the first steps and some later steps are timed. Bytes are
        # always counted.
        self.timing = self._steps < _TIMED_FIRST or self._steps % _TIMED_EVERY < 2 or self._profile_next
        self._profile_next = False
        self._steps += 1
        self.profiling = self.timing and self._kinds[gradient] in _PROFILED
        if self.profiling and self.watches_host and self._mark_seconds is None:
            began = time.perf_counter()
            for _ in range(_MARKS):
                self._engine.mark()
            self._mark_seconds = (time.perf_counter() - began) / _MARKS
        self._kinds[gradient] += 1
        self._closed = None
        self._open = _Step(self._engine.mark(), gradient, self.timing)

    def no_backward(self) -> None:
        """Mark the running forward as a whole step, because none of its outputs requires gradients."""
        if self._open is not None and self._open.forwards == 1:
            self._open.gradient = False

    def forward_ends(self) -> None:
        """Record the end of the root's forward. This ends the step, unless a backward may follow."""
        if self._open is not None:
            self._open.end, self._open.end_clock = self._engine.mark(), time.perf_counter()
            if not self._open.gradient:
                self._close()

    def backward_begins(self) -> None:
        """Record the start of a backward. Without a forward in between, it belongs to the step of the last one."""
        self.profiling = False
        if self._open is None:
            self._reopen()
        if self._open is not None:
            self._open.backwards += 1
            self._most_backwards = max(self._most_backwards, self._open.backwards)
            if self._open.turn is None:
                self._open.turn, self._open.turn_clock = self._engine.mark(), time.perf_counter()

    def _reopen(self) -> None:
        """Go on with the training step that ended last, and take its figures back."""
        step, self._closed = self._closed, None
        if step is None or step.turn is None:
            return
        if self._waiting and self._waiting[-1] is step:
            self._waiting.pop()
        elif self._last_step is step:  # its figures are the last ones
            self._figures.pop()
            self._read_steps -= 1
            if step.uses:
                self._profiled.pop()
        else:  # dropped, because the device is far behind
            return
        self._disk_before -= step.disk_bytes
        self._open = step

    def backward_ends(self) -> None:
        """Record the end of a backward. This ends the step, unless another backward follows before a forward."""
        if self._open is not None:
            self._open.end, self._open.end_clock = self._engine.mark(), time.perf_counter()
            self._close()

    def abandon(self) -> None:
        """Discard the present step, because an operator in it raised an error."""
        self._open = self._closed = None

    def copied(
        self, name: str, marks: Any, nbytes: int, raw_bytes: int, backward: bool, transfers: int = 1,
        from_peer: bool = False,
    ) -> None:  # fmt: skip
        """Record a copy of unit ``name``, between the two events ``marks`` (None: not timed).

        ``nbytes``: bytes copied; ``raw_bytes``: bytes of the unit when unpacked; ``transfers``: number to
        count the copy as; ``from_peer``: whether from the memory of another device.
        """
        step = self._open
        if step is not None:
            step.transfers += transfers
            step.raw_bytes += raw_bytes
            if from_peer:
                step.peer_bytes += nbytes
            else:
                step.wire_bytes += nbytes
            if marks is not None:
                step.copies.append(_Copy(name, marks[0], marks[1], nbytes, backward, from_peer))

    def decoded(self, marks: Any) -> None:
        """Record that the device unpacked a unit between the two events ``marks`` (None: not timed)."""
        if self._open is not None and marks is not None:
            self._open.decodes.append(marks)

    def waited(self, before: Any, after: Any, name: str, backward: bool) -> None:
        """Record that the computing stream waited for unit ``name`` between the events ``before`` and
        ``after``.
        """
        if self._open is not None:
            self._open.waits.append((before, after, name, backward))

    def unit_begins(self, name: str, came: Any, went_on: Any) -> None:
        """Record the start of a unit's forward. ``came``, ``went_on``: events before and after the wait for
        the unit's weights.
        """
        if self._open is not None:
            uses = self._open.uses
            use = _Use(name, came, went_on)
            if self.watches_host and uses and uses[-1].left is not None:
                use.idle = self._engine.done(uses[-1].left)
            uses.append(use)

    def unit_ends(self, name: str, left: Any) -> None:
        """Record the end of a unit's forward. ``left``: an event after the unit's kernels."""
        if self._open is not None:
            for use in reversed(self._open.uses):
                if use.name == name and use.left is None:
                    use.left = left
                    if self.watches_host:
                        # The host has just issued the unit's last kernel. If the device has already begun the
                        # unit, the device has nothing else queued, so it waits for the host.
                        use.close = self._engine.done(use.went_on)
                    return

    def add_host_seconds(self, seconds: float) -> None:
        """Add host seconds that Carom's code took before or after a unit's forward."""
        if self._open is not None:
            self._open.spent += seconds

    # -- figures of finished steps

    def _use_seconds(self, step: _Step) -> float:
        """Return the host seconds that Carom's code takes for one use of a unit.

        Seconds of recording events that only steps with timed units record are subtracted.
        """
        copies = sum(not copy.backward for copy in step.copies)
        decodes = min(len(step.decodes), max(copies, len(step.uses)))
        waits = sum(not backward for *_, backward in step.waits)
        marks = 3 * len(step.uses) + 2 * (copies + decodes + waits)
        return max(0.0, step.spent - marks * (self._mark_seconds or 0.0)) / len(step.uses)

    def _close(self) -> None:
        """End the present step, and convert the steps whose events have completed to figures."""
        step, self._open = self._open, None
        if step is not None and step.end is not None:
            # reads go on between steps, so the bytes are counted from the end of the previous step
            read = self.disk_bytes()
            step.disk_bytes, self._disk_before = read - self._disk_before, read
            self._closed = step
            self._waiting.append(step)
        while self._waiting and self._reached(self._waiting[0]):
            self._figures.append(self._read(self._waiting.popleft()))
        while len(self._waiting) > _OPEN_STEPS:
            self._waiting.popleft()

    def _reached(self, step: _Step) -> bool:
        """Return whether all events of ``step`` have completed."""
        done = self._engine.done
        return (
            done(step.end)
            and all(done(copy.done) for copy in step.copies)
            and all(done(after) for _, after in step.decodes)
            # Events on another stream, or of a unit that is used after the root's forward, may complete later
            # than `step.end`.
            and all(done(after) for _, after, _, _ in step.waits)
            and all(
                done(mark)
                for use in step.uses
                for mark in (use.came, use.went_on, use.left)
                if mark is not None
            )
        )

    def _read(self, step: _Step) -> StepFigures:
        """Convert the completed events of ``step`` to seconds."""
        between = self._engine.elapsed
        seconds = between(step.begin, step.end)
        self._read_steps += 1
        stalls = [0.0, 0.0]
        for before, after, _, backward in step.waits:
            stalls[backward] += max(0.0, between(before, after))
        forward = between(step.begin, step.turn) if step.turn is not None else seconds
        timed = [(copy, max(0.0, between(copy.started, copy.done))) for copy in step.copies]
        copies = [pair for pair in timed if not pair[0].from_peer]
        from_peers = [pair for pair in timed if pair[0].from_peer]
        if step.timed:
            self._timeline_step = step, seconds
        late = None
        if step.uses:
            at = lambda event: between(step.begin, event)  # noqa: E731
            timings = tuple(
                UnitTiming(use.name, at(use.came), at(use.went_on), at(use.left), use.close)
                for use in step.uses
                if use.left is not None
            )
            # If the device was idle when the step began, it waits for the host at first in any case. So use
            # only the second half of the step.
            ended = [use.close for use in step.uses if use.left is not None]
            recent = ended[len(ended) // 2 :]
            close = sum(recent) / len(recent) if recent else 0.0
            forward_timing = ForwardTiming(timings, forward, close, self._use_seconds(step))
            self._profiled.append((step.turn is not None, forward_timing))
            together = sum(time for _, time in timed)
            share = _busiest(copies, from_peers) / together if together else 1.0
            self._copies = tuple((copy.nbytes, time * share) for copy, time in timed)
            late = sum(
                max(0.0, between(before.left, use.came)) for before, use in pairwise(step.uses) if use.idle
            )
        self._last_step = step
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
            late_seconds=late,
            peer_bytes=step.peer_bytes,
            peer_copied_bytes=sum(copy.nbytes for copy, _ in from_peers),
            peer_seconds=sum(time for _, time in from_peers),
        )

    # -- the kernels of a step

    def profile_next(self) -> None:
        """Time the next step, which will run under the profiler, whatever its number is."""
        self._profile_next = True

    def kernels_ran(self, kernels: Iterable[Kernel], clock: float) -> None:
        """Record the kernels of the last finished step.

        ``kernels``: what `record_kernels` returned for a call that ran the step; kernels that the host
        launched before or after the step are ignored. ``clock``: `time.time` minus `time.perf_counter`.
        """
        self.finish()
        if self._last_step is None or not self._figures:
            return
        step, figures = self._last_step, self._figures[-1]
        times = kernel_times(
            kernels, begin=step.clock + clock, turn=step.turn_clock + clock, end=step.end_clock + clock
        )
        self._split = StepSplit.from_kernels(
            times, train=figures.train, seconds=figures.seconds, stall_seconds=figures.stall_seconds
        )

    def _split_of(self, train: bool, timed: list[StepFigures]) -> StepSplit | None:
        """Return the parts of a step of the kind ``train``; ``timed``: its steps with times."""
        if self._split is not None and self._split.train == train:
            return self._split
        late = [step.late_seconds for step in timed if step.late_seconds is not None]
        if not timed:
            return None
        gaps = median(late) if late else 0.0
        forward, backward = (median(step.compute_by_phase[phase] for step in timed) for phase in (0, 1))
        return StepSplit(
            train=train,
            kernel_seconds=(max(0.0, forward - gaps), backward),
            stall_seconds=median(step.stall_seconds for step in timed),
            host_late_seconds=gaps,
            source="events" if self.watches_host else "clock",
        )

    def spans(self) -> tuple[Span, ...]:
        """Return the timeline of the last timed step."""
        return () if self._timeline_step is None else self._timeline(*self._timeline_step)

    def _timeline(self, step: _Step, seconds: float) -> tuple[Span, ...]:
        """Return the spans of ``step``, which took ``seconds``: copies, waits for copies (stalls), computing
        in between, and disk reads.
        """
        at = lambda event: self._engine.elapsed(step.begin, event)  # noqa: E731
        spans = [
            Span("peer" if c.from_peer else "link", c.name, at(c.started), at(c.done), c.nbytes)
            for c in step.copies
        ]
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
        """The number of steps with figures, without the first two, in which the order of use is learnt."""
        return max(0, self._read_steps - 2)

    @property
    def steps(self) -> int:
        """The number of steps begun."""
        return self._steps

    @property
    def awaiting(self) -> bool:
        """Whether a forward has finished and its backward may still follow."""
        step = self._open
        return step is not None and step.gradient and step.turn is None and step.end is not None

    def profile(self) -> StepProfile | None:
        """Return the timings of the units in steps of the latest kind. Returns None before units were timed
        in any step.
        """
        if not self._profiled:
            return None
        train = self._profiled[-1][0]
        timed = [figures for figures in self._figures if figures.train == train and figures.timed]
        timed = timed[2:] or timed[-1:]
        if not timed:
            return None
        # All links together count as one link, as they copy at the same time.
        copy_seconds = sum(max(figures.copy_seconds, figures.peer_seconds) for figures in timed)
        copied_bytes = sum(figures.copied_bytes + figures.peer_copied_bytes for figures in timed)
        return StepProfile(
            train=train,
            seconds=median(figures.seconds for figures in timed),
            compute=(
                median(figures.compute_by_phase[0] for figures in timed),
                median(figures.compute_by_phase[1] for figures in timed),
            ),
            link_bytes_per_second=copied_bytes / copy_seconds if copy_seconds > 0 else None,
            forwards=tuple(forward for kind, forward in self._profiled if kind == train),
            copies=self._copies,
        )

    def finish(self) -> None:
        """Wait for the device, then convert the events of all remaining steps to figures."""
        self._engine.synchronize()
        if self._open is not None and self._open.end is not None:
            self._close()
        while self._waiting:
            self._figures.append(self._read(self._waiting.popleft()))

    def medians(self, disk: float | None = None) -> Medians:
        """Return medians over the recorded steps of the latest kind (inference or training).

        ``disk``: the drive's rate in bytes/s, or None. In the roofline, the drive limits the step as a whole
        and not each phase, because reads that begin in the forward continue in the backward.
        """
        if not self._figures:
            return Medians()
        train = self._figures[-1].train
        steps = [figures for figures in self._figures if figures.train == train]
        # In the first two steps the order of use is learnt and caches are filled. Leave them out if there are
        # other steps.
        steps = steps[2:] or steps[-1:]
        timed = [step for step in steps if step.timed] or steps
        copy_seconds = sum(step.copy_seconds for step in timed)
        link = sum(step.copied_bytes for step in timed) / copy_seconds if copy_seconds > 0 else None

        split = self._split_of(train, timed)

        def roofline(step: StepFigures) -> float:
            """Return the roofline of ``step``."""
            kernels = step.compute_by_phase if split is None else split.undisturbed_seconds
            phases = [PhaseWork(*pair) for pair in zip(kernels, step.bytes_by_phase, strict=True)]
            seconds = roofline_seconds(phases, link, step.disk_bytes / disk if disk else 0.0)
            return max(seconds, step.peer_seconds)

        def hidden(step: StepFigures) -> float:
            """Return the share of the seconds of copies in ``step`` in which the device did not wait for them."""
            copying = step.copy_seconds + step.peer_seconds
            return max(0.0, 1 - step.stall_seconds / copying) if copying > 0 else 1.0

        return Medians(
            train=train,
            steps=len(steps),
            seconds=median(step.seconds for step in steps),
            stall_seconds=median(step.stall_seconds for step in timed),
            compute_seconds=median(sum(step.compute_by_phase) for step in timed),
            roofline_seconds=median(roofline(step) for step in timed),
            hidden_fraction=median(hidden(step) for step in timed),
            link_bytes_per_second=link,
            decode_seconds=median(step.decode_seconds for step in timed),
            wire_bytes=median(step.wire_bytes for step in steps),
            peer_bytes=median(step.peer_bytes for step in steps),
            raw_bytes=median(step.raw_bytes for step in steps),
            transfers=median(step.transfers for step in steps),
            host_bound=(profile := self.profile()) is not None
            and profile.train == train
            and profile.host_bound,
            disk_bytes=median(step.disk_bytes for step in steps),
            split=split,
        )


def _busiest(*links: Sequence[tuple[_Copy, float]]) -> float:
    """Return the seconds of the copies of that link which copied longest."""
    return max(sum(seconds for _, seconds in copies) for copies in links)
