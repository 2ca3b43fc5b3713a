"""The time of a prompt by part, and samples of the stack of the thread that runs it.

The module is loaded by its path, so it imports nothing of Carom.
"""

from __future__ import annotations

import collections
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

PARTS = ("load", "encode", "switch", "first step", "other steps", "decode", "rest")
MEASURE = "measure"  # the time of the benchmark itself, in no part
EVERY_S = 0.01


class Clock:
    """Adds the time since the last change of part to the part that ends.

    ``part``: the part that runs now. ``alarm``: a part, and a function that is called when it begins the next time.
    """

    def __init__(self) -> None:
        self.part = "rest"
        self.alarm: tuple[str | None, Callable[[], Any]] = (None, _nothing)
        self._since = time.perf_counter()
        self._seconds: dict[str, float] = collections.defaultdict(float)

    def start(self) -> None:
        """Begin a prompt."""
        self._seconds.clear()
        self.part, self._since = "rest", time.perf_counter()

    def enter(self, part: str) -> None:
        """End the part that runs, and begin ``part``."""
        now = time.perf_counter()
        self._seconds[self.part] += now - self._since
        self.part, self._since = part, now
        if part == self.alarm[0]:
            call, self.alarm = self.alarm[1], (None, _nothing)
            call()

    def seconds(self) -> dict[str, float]:
        """End the prompt; return the seconds of each part, without those of the benchmark itself."""
        self.enter("rest")
        return {part: round(self._seconds.get(part, 0.0), 4) for part in PARTS}


def _nothing() -> None:
    pass


class StackSampler:
    """Samples the stack of the main thread, which makes this object, by a timer signal; ``clock`` says the part.

    A thread that reads the stack of another one made the process hang on a GPU, in torch's memory_stats.
    Raises RuntimeError where the system has no timer signals (Windows).
    """

    def __init__(self, clock: Clock, every_s: float = EVERY_S) -> None:
        if not hasattr(signal, "setitimer"):
            raise RuntimeError("--profile needs timer signals, which this system does not have")
        self._clock = clock
        self._forget()
        self._last = time.perf_counter()
        self._handler = signal.signal(signal.SIGALRM, self._sample)
        self._timer = signal.setitimer(signal.ITIMER_REAL, every_s, every_s)

    def _sample(self, _: int, frame: FrameType | None) -> None:
        now = time.perf_counter()
        if frame is not None:
            self._take(self._clock.part, frame, now - self._last)
        self._last = now

    def _forget(self) -> None:
        self._taken: dict[str, float] = collections.defaultdict(float)
        self._places: dict[str, dict[str, float]] = collections.defaultdict(_seconds)
        self._within: dict[str, dict[str, float]] = collections.defaultdict(_seconds)

    def _take(self, part: str, frame: FrameType, seconds: float) -> None:
        """Add a sample. It counts the seconds since the last one: Python runs the handler after a call into C ends."""
        self._taken[part] += seconds
        self._places[part][" < ".join(_chain(frame))] += seconds
        seen = set()
        walked: FrameType | None = frame
        while walked is not None:
            seen.add(_place(walked, line=False))
            walked = walked.f_back
        for place in seen:
            self._within[part][place] += seconds

    def text(self, top: int = 80) -> str:
        """Return the places that took the most time in each part since the last call: innermost frames first, then
        functions with all that they call, but those that run the whole part.
        """
        lines = []
        for part, total in sorted(self._taken.items(), key=lambda found: -found[1]):
            lines.append(f"== {part}: {total:.2f} s")
            for title, found in (("innermost", self._places[part]), ("within", self._within[part])):
                lines.append(f"-- {title}")
                some = {place: seconds for place, seconds in found.items() if seconds < 0.95 * total}
                longest = sorted((some or found).items(), key=lambda place: -place[1])[:top]
                lines += [f"{seconds:8.3f} s  {place}" for place, seconds in longest]
        self._forget()
        return "\n".join(lines)

    def stop(self) -> None:
        """Set the timer and the handler that were there before."""
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, *self._timer)
            signal.signal(signal.SIGALRM, self._handler)


def _seconds() -> dict[str, float]:
    return collections.defaultdict(float)


def _chain(frame: FrameType, longest: int = 4) -> list[str]:
    """Return the innermost frames, the innermost first."""
    found: list[str] = []
    walked: FrameType | None = frame
    while walked is not None and len(found) < longest:
        found.append(_place(walked))
        walked = walked.f_back
    return found


def _place(frame: FrameType, *, line: bool = True) -> str:
    code = frame.f_code
    file = "/".join(code.co_filename.split("/")[-2:])
    return f"{file}:{frame.f_lineno if line else code.co_firstlineno} {code.co_name}"
