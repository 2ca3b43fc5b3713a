"""The meter of a session: counts the bytes and copies of each step on the host, and times the step with
device events.

The meter never waits for the device, except in `Meter.finish`: the events of a step are converted to seconds
once all of them have completed. A step is one forward of the root module (the module that the session
streams) or, in training, everything from the first forward after a backward to the end of the last backward
before the next forward. A forward of a part of the root (a module below it) that is called outside the root's
forward counts like one of the root, but figures of steps without the root are kept apart. So a step of a
GPipe schedule has the forwards and the backwards of all microbatches, and a step of a 1F1B schedule mostly
has those of one. A unit is a group of weights that are copied together.

Events tell when the device did its work, delays by the host included. Where the device waited for the host in an
early step, the meter can *hold* the device in a later one (`Meter.hold_next`): at each wait for weights the device waits
for about the seconds that the host took to issue the work up to the next wait. The host is then ahead, and the events
tell what the device alone takes. The waits count as stalls, not as computing.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any

from ..device.engine import Engine
from ..plan.profile import ForwardTiming, StepProfile
from .kernel_times import Kernel, StepSplit, kernel_times
from .report import Span
from .step_events import Copy, StepEvents, Use
from .step_figures import LATE, Medians, StepFigures, medians, step_profile

_KEPT_STEPS = 64  # number of latest steps over which medians are taken
_OPEN_STEPS = 6  # most finished steps whose events are not read yet; beyond that the oldest step is dropped
_TIMED_FIRST = 8  # number of first steps that are all timed
_TIMED_EVERY = 16  # after these, two of every 16 steps are timed
# Steps of which every unit is timed: numbers 2 to 7, counted separately for steps with and without gradients.
_PROFILED = range(2, 8)
_MOST_HOLDS = 3  # number of steps in which the device is held back, at most, for each kind of step
_LONGER = 1.5  # the device is held for this multiple of the host's seconds
# With more forwards than this without a backward, the steps count as inference. After steps with more backwards
# than this (a schedule with many microbatches), the number is that of the backwards.
_FORWARDS = 8


class Meter:
    """A recorder of a session's steps. All methods are called with the streamer's lock held."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._open: StepEvents | None = None
        self._closed: StepEvents | None = None  # the step that ended last, until another one begins
        self._most_backwards = 0  # in one step
        self._waiting: deque[StepEvents] = deque()
        self._figures: deque[StepFigures] = deque(maxlen=_KEPT_STEPS)
        self._timeline_step: StepEvents | None = None
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
        # host, and a clock on which the host's work takes time.
        self.watches_host = not engine.blocking and engine.host_on_clock
        # By kind of step (without gradients, with gradients): the seconds for which a step would hold the device, those
        # for which the next step holds it, and the number of steps that held it.
        self._late: list[list[float] | None] = [None, None]
        self._holds: list[list[float] | None] = [None, None]
        self._held = [0, 0]
        self._profile_next = False  # whether the next step is to be timed for `kernels_ran`
        self._last_step: StepEvents | None = None  # the last step with figures
        self._split: StepSplit | None = None  # of the last step that ran under the profiler

    # -- called by the streamer while a step runs

    def forward_begins(self, gradient: bool, part: int = 0) -> None:
        """Record the start of a forward. ``gradient``: whether a backward may follow. ``part``: the id of the part
        whose forward it is, 0 for the root.
        """
        step = self._open
        if step is not None and step.end is not None:
            most = max(_FORWARDS, self._most_backwards)
            if gradient and step.gradient and step.turn is None and step.forwards[part] < most:
                step.end = None  # another forward of the same step, before the step's backward
                if part == 0 == step.forwards[0]:
                    self._profile(gradient)
                step.forwards[part] += 1
                return
            self._close()
        # Recording events takes host time, so only the first steps and some later steps are timed. Bytes are
        # always counted.
        holds = self._holds[gradient] if part == 0 else None
        self.timing = (
            self._steps < _TIMED_FIRST or self._steps % _TIMED_EVERY < 2 or self._profile_next or bool(holds)
        )
        self._profile_next = False
        self._steps += 1
        self.profiling = False
        if part == 0:
            self._profile(gradient)
        self._closed = None
        if holds:
            self._holds[gradient], self.profiling = None, True
            self._held[gradient] += 1
            self._engine.hold(holds[0])
        self._open = StepEvents(
            self._engine.mark(), gradient, self.timing, records=gradient, forwards=Counter([part])
        )
        if holds:
            self._open.holds = iter(holds[1:])

    def _profile(self, gradient: bool) -> None:
        """Time every unit of the root's forward that begins, in some early steps."""
        self.profiling = self.timing and self._kinds[gradient] in _PROFILED
        self._kinds[gradient] += 1

    def no_backward(self) -> None:
        """Mark the running forward as a whole step, because none of its outputs requires gradients."""
        if self._running and self._open is not None and self._open.forwards.total() == 1:
            self._open.gradient = False

    @property
    def _running(self) -> bool:
        """Whether a forward or backward of the open step is in progress."""
        return self._open is not None and self._open.end is None

    def forward_failed(self) -> None:
        """Discard the step whose forward raised an error."""
        if self._running:
            self.abandon()

    def forward_ends(self) -> None:
        """Record the end of a forward. This ends the step, unless a backward may follow."""
        if self._open is not None and self._running:
            self._end(self._open)
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
            self._end(self._open)
            self._close()

    def _end(self, step: StepEvents) -> None:
        self._note_late(step)
        step.end, step.end_clock = self._engine.mark(), time.perf_counter()

    def _note_late(self, step: StepEvents) -> None:
        """Record whether the device has begun all work that the host has issued so far, so that it may be waiting."""
        if self.watches_host and self.timing:
            last = step.waits[-1][1] if step.waits else step.begin
            del step.late[len(step.waits) :]  # an end, after which the step went on
            step.late.append(self._engine.done(last))

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
                step.copies.append(Copy(name, marks[0], marks[1], nbytes, backward, from_peer))

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
            self._open.late += [False] * (len(self._open.waits) - len(self._open.late))

    def wait_begins(self) -> Any:
        """Record that the computing stream is about to wait for a unit; return the event before the wait."""
        if self._open is not None:
            self._note_late(self._open)
        return self._engine.mark()

    def hold(self) -> None:
        """Hold the device at a wait for a unit, in a step that holds it."""
        if self._open is not None and self._open.holds is not None:
            seconds = next(self._open.holds, 0.0)
            if seconds:
                self._engine.hold(seconds)

    def unit_begins(self, name: str, came: Any, went_on: Any) -> None:
        """Record the start of a unit's forward. ``came``, ``went_on``: events before and after the wait for
        the unit's weights.
        """
        if self._open is not None:
            uses = self._open.uses
            use = Use(name, came, went_on)
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

    # -- figures of finished steps

    def _close(self) -> None:
        """End the present step, and convert the steps whose events have completed to figures."""
        step, self._open = self._open, None
        if step is not None and step.end is not None:
            # reads go on between steps, so the bytes are counted from the end of the previous step
            read = self.disk_bytes()
            step.disk_bytes, self._disk_before = read - self._disk_before, read
            self._closed = step
            self._waiting.append(step)
        while self._waiting and self._waiting[0].completed(self._engine.done):
            self._figures.append(self._read(self._waiting.popleft()))
        while len(self._waiting) > _OPEN_STEPS:
            self._waiting.popleft()

    def _read(self, step: StepEvents) -> StepFigures:
        """Convert the completed events of ``step`` to seconds."""
        elapsed = self._engine.elapsed
        self._read_steps += 1
        self._last_step = step
        if step.timed:
            self._timeline_step = step
        if step.uses:
            self._profiled.append((step.turn is not None, step.forward_timing(elapsed)))
            if step.held or not any(self._held):
                self._copies = step.copy_times(elapsed)
            self._note_holds(step)
        return step.figures(elapsed)

    def _note_holds(self, step: StepEvents) -> None:
        """Record for how long the device would have to be held so that it does not wait for the host as in ``step``."""
        elapsed, kind = self._engine.elapsed, step.records
        late, held = step.late_spans(elapsed), self._held[kind]
        computed = sum(step.figures(elapsed).compute_by_phase)
        if (step.held or not held) and held < _MOST_HOLDS and sum(late) > LATE * computed:
            self._late[kind] = [2**held * _LONGER * seconds for seconds in late]

    def hold_next(self) -> bool:
        """Hold the device in the next step of the latest kind, if its own times are not known because it waited for the
        host. Return whether figures of a step that holds the device are still to come.
        """
        if self._last_step is None:
            return False
        kind = self._last_step.records
        if self._late[kind] is not None:
            self._holds[kind], self._late[kind] = self._late[kind], None
        return self._holds[kind] is not None or any(
            step.held for step in (self._open, *self._waiting) if step is not None
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

    def spans(self) -> tuple[Span, ...]:
        """Return the timeline of the last timed step."""
        if self._timeline_step is None:
            return ()
        return self._timeline_step.spans(
            self._engine.elapsed, () if self.disk_reads is None else self.disk_reads()
        )

    @property
    def settled(self) -> int:
        """The number of steps with figures, without the first two, in which the order of use is learnt."""
        return max(0, self._read_steps - 2)

    @property
    def steps(self) -> int:
        """The number of steps begun."""
        return self._steps

    @property
    def records(self) -> bool:
        """Whether the forward of the last step with figures recorded gradients."""
        return self._last_step is not None and self._last_step.records

    @property
    def awaiting(self) -> bool:
        """Whether a forward has finished and its backward may still follow."""
        step = self._open
        return step is not None and step.gradient and step.turn is None and step.end is not None

    def profile(self) -> StepProfile | None:
        """Return the timings of the units in steps of the latest kind. Returns None before units were timed
        in any step.
        """
        return step_profile(self._figures, self._profiled, self._copies)

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
        source = "events" if self.watches_host else "clock"
        return medians(self._figures, self._split, self.profile(), source, disk)
