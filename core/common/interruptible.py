"""Waits that Ctrl-C ends on Windows too, for what may take long or never end: a drive, a compiler.

On Windows a thread that waits for a lock without a time limit does not notice Ctrl-C before it has the lock, and all waits of
`threading` and `concurrent.futures` are waits for locks. So there the waits below are divided into short ones. Elsewhere
they are Python's own, without another call.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

T = TypeVar("T")

_SECONDS = 0.2  # a person who presses Ctrl-C does not notice this delay


def _repeat(attempt: Callable[[float], bool]) -> None:
    """Call ``attempt`` with a short time limit until it returns True."""
    while not attempt(_SECONDS):
        pass


class PolledEvent(threading.Event):
    """An Event whose `wait` without a time limit is divided into short waits."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the event is set; return False if ``timeout`` seconds passed first."""
        if timeout is None:
            _repeat(super().wait)
            return True
        return super().wait(timeout)


def polled_result(future: Future[T]) -> T:
    """Return the result of ``future`` as `Future.result` does, by short waits."""
    _repeat(lambda seconds: not wait([future], seconds).not_done)
    return future.result()


def polled_join(thread: threading.Thread) -> None:
    """Wait for the end of ``thread`` as `Thread.join` does, by short waits."""

    def ended(seconds: float) -> bool:
        thread.join(seconds)
        return not thread.is_alive()

    _repeat(ended)


Event: type[threading.Event] = threading.Event
result: Callable[[Future[Any]], Any] = Future.result
join: Callable[[threading.Thread], None] = threading.Thread.join
if sys.platform == "win32":
    Event, result, join = PolledEvent, polled_result, polled_join
