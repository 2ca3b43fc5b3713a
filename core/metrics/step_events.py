"""`StepEvents`: what is recorded during one step of a session, and its conversion to seconds.

Events are recorded on the device. Once all of a step's events have completed, the functions here convert them, by
``elapsed(first, last)``, the seconds between two events (`Engine.elapsed`).
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ..plan.profile import ForwardTiming, UnitTiming
from .report import Span
from .step_figures import StepFigures

Elapsed = Callable[[Any, Any], float]


@dataclass
class Copy:
    """A copy of one unit from host to device, with the events ``started`` and ``done``."""

    name: str
    started: Any
    done: Any
    nbytes: int
    backward: bool
    from_peer: bool = False  # whether from the memory of another device

    def seconds(self, elapsed: Elapsed) -> float:
        return max(0.0, elapsed(self.started, self.done))


@dataclass
class Use:
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
class StepEvents:
    """The counts and events of one step. Events are recorded on the device; times are host times in seconds
    (`time.perf_counter`).
    """

    begin: Any
    gradient: bool  # whether a backward may follow the forward
    timed: bool
    end: Any = None
    records: bool = False  # whether the first forward recorded gradients
    turn: Any = None  # event recorded where the backward begins
    forwards: Counter[int] = field(
        default_factory=Counter
    )  # number of forwards: 0 for the root, else by part
    backwards: int = 0
    clock: float = field(default_factory=time.perf_counter)  # host time when the step began
    turn_clock: float = math.inf  # host time when the backward began
    end_clock: float = math.inf  # host time when the step ended
    transfers: int = 0
    wire_bytes: int = 0
    peer_bytes: int = 0
    raw_bytes: int = 0
    disk_bytes: int = 0
    copies: list[Copy] = field(default_factory=list)
    decodes: list[tuple[Any, Any]] = field(default_factory=list)
    waits: list[tuple[Any, Any, str, bool]] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    # For each of ``waits``, and for the end: whether the device had begun all work before it by the time at which the
    # host reached it. The device may then have waited for the host since the wait before.
    late: list[bool] = field(default_factory=list)
    # Seconds for which the device is held at the begin and at each of ``waits``; None if it is not held.
    holds: Iterator[float] | None = None

    def completed(self, done: Callable[[Any], bool]) -> bool:
        """Return whether all events have completed. ``done``: tells it of one event (`Engine.done`)."""
        return all(map(done, self._marks()))

    def _marks(self) -> Iterator[Any]:
        """Yield the events that complete last. Those on other streams, or of a unit that is used after the root's
        forward, may complete later than `end`.
        """
        yield self.end
        yield from (copy.done for copy in self.copies)
        yield from (after for _, after in self.decodes)
        yield from (after for _, after, _, _ in self.waits)
        for use in self.uses:
            yield from (mark for mark in (use.came, use.went_on, use.left) if mark is not None)

    def seconds(self, elapsed: Elapsed) -> float:
        """Return the seconds of the step."""
        return elapsed(self.begin, self.end)

    def figures(self, elapsed: Elapsed) -> StepFigures:
        """Return the seconds and bytes of the step."""
        seconds = self.seconds(elapsed)
        stalls = [0.0, 0.0]
        for before, after, _, backward in self.waits:
            stalls[backward] += max(0.0, elapsed(before, after))
        forward = self._forward_seconds(elapsed)
        late = self._late_by_phase(elapsed)
        host, peer = self._undelayed()
        return StepFigures(
            train=self.turn is not None,
            root=self.forwards[0] > 0,
            timed=self.timed,
            seconds=seconds,
            copied_bytes=_bytes(host),
            stall_seconds=sum(stalls),
            copy_seconds=_seconds(host, elapsed),
            decode_seconds=sum(max(0.0, elapsed(*marks)) for marks in self.decodes),
            wire_bytes=self.wire_bytes,
            raw_bytes=self.raw_bytes,
            transfers=self.transfers,
            disk_bytes=self.disk_bytes,
            compute_by_phase=(max(0.0, forward - stalls[0]), max(0.0, seconds - forward - stalls[1])),
            bytes_by_phase=(
                _bytes(copy for copy in self.copies if not (copy.from_peer or copy.backward)),
                _bytes(copy for copy in self.copies if copy.backward and not copy.from_peer),
            ),
            late_seconds=self._late_seconds(elapsed) if self.uses and not self.held else None,
            held=self.held,
            host_by_phase=late,
            peer_bytes=self.peer_bytes,
            peer_copied_bytes=_bytes(peer),
            peer_seconds=_seconds(peer, elapsed),
        )

    @property
    def held(self) -> bool:
        """Whether the device was held back in this step."""
        return self.holds is not None

    def late_spans(self, elapsed: Elapsed) -> list[float]:
        """Return the seconds from the begin to the first wait, between waits, and to the end, each 0 where the device
        did not wait for the host.
        """
        begins = [self.begin, *(after for _, after, _, _ in self.waits)]
        ends = [*(before for before, _, _, _ in self.waits), self.end]
        return [
            max(0.0, elapsed(begin, end)) if late else 0.0
            for begin, end, late in zip(begins, ends, self.late, strict=False)
        ]

    def _late_by_phase(self, elapsed: Elapsed) -> tuple[float, float]:
        """Return the sums of `late_spans` by phase. A span begins in its phase."""
        sums = [0.0, 0.0]
        backwards = [False, *(backward for _, _, _, backward in self.waits)]
        for seconds, backward in zip(self.late_spans(elapsed), backwards, strict=False):
            sums[backward] += seconds
        return sums[0], sums[1]

    def forward_timing(self, elapsed: Elapsed) -> ForwardTiming:
        """Return the times of the units of a step of which every unit was timed."""

        def at(event: Any) -> float:
            return elapsed(self.begin, event)

        timings = tuple(
            UnitTiming(use.name, at(use.came), at(use.went_on), at(use.left), use.close)
            for use in self.uses
            if use.left is not None
        )
        # If the device was idle when the step began, it waits for the host at first in any case. So use only the
        # second half of the step.
        recent = timings[len(timings) // 2 :]
        close = sum(timing.close for timing in recent) / len(recent) if recent else 0.0
        return ForwardTiming(timings, self._forward_seconds(elapsed), close, self.held)

    def copy_times(self, elapsed: Elapsed) -> tuple[tuple[int, float], ...]:
        """Return (bytes, seconds) of each copy of which the host did not delay the start. Links that copy at the same time
        count as one link: the seconds of all copies together are those of the link that copied longest.
        """
        links = self._undelayed()
        each = [_seconds(link, elapsed) for link in links]
        share = max(each) / sum(each) if sum(each) else 1.0
        return tuple((copy.nbytes, copy.seconds(elapsed) * share) for link in links for copy in link)

    def _undelayed(self) -> tuple[list[Copy], list[Copy]]:
        """Return the copies from the host and those from peers, which tell the rates of the links.

        The first copies of a step that holds the device go to places that are free already, so they start when the host
        issues them. Later ones wait for the device, and the host is ahead of it.
        """
        copies = self.copies[len(self.copies) // 2 :] if self.held else self.copies
        return [copy for copy in copies if not copy.from_peer], [copy for copy in copies if copy.from_peer]

    def spans(
        self, elapsed: Elapsed, disk_reads: Iterable[tuple[str, float, float, int]]
    ) -> tuple[Span, ...]:
        """Return the timeline of the step: copies, waits for copies (stalls), computing in between, and disk reads.

        ``disk_reads``: (name, start, end, bytes) with times of the host's clock.
        """
        seconds = self.seconds(elapsed)

        def at(event: Any) -> float:
            return elapsed(self.begin, event)

        spans = [
            Span("peer" if c.from_peer else "link", c.name, at(c.started), at(c.done), c.nbytes)
            for c in self.copies
        ]
        cursor = 0.0
        for before, after, name, _ in sorted(self.waits, key=lambda wait: at(wait[0])):
            start, end = at(before), at(after)
            if end > start:
                spans.append(Span("stall", name, start, end))
                if start > cursor:
                    spans.append(Span("compute", "compute", cursor, start))
                cursor = max(cursor, end)
        if seconds > cursor:
            spans.append(Span("compute", "compute", cursor, seconds))
        for name, start, end, nbytes in disk_reads:
            first, last = max(0.0, start - self.clock), min(seconds, end - self.clock)
            if first < last:
                spans.append(Span("disk", name, first, last, nbytes))
        return tuple(spans)

    def _forward_seconds(self, elapsed: Elapsed) -> float:
        return elapsed(self.begin, self.end if self.turn is None else self.turn)

    def _late_seconds(self, elapsed: Elapsed) -> float:
        """Return the seconds in which the device had finished one unit and the host had not reached the next."""
        return sum(
            max(0.0, elapsed(before.left, use.came)) for before, use in pairwise(self.uses) if use.idle
        )


def _bytes(copies: Iterable[Copy]) -> int:
    return sum(copy.nbytes for copy in copies)


def _seconds(copies: Iterable[Copy], elapsed: Elapsed) -> float:
    return sum(copy.seconds(elapsed) for copy in copies)
