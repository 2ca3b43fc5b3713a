"""Threads that wait for each other's slots: whether waiting can help, and for how long."""

from __future__ import annotations

import threading
import time

_PATIENCE = 20.0  # seconds to wait for a slot that another thread uses
_POLL = 0.001  # seconds between looks at views that others keep


class Waiting:
    """The threads of one streamer that wait for a slot. Called under the streamer's ``lock``."""

    def __init__(self, lock: threading.RLock) -> None:
        self._freed = threading.Condition(lock)
        self._sleeping = 0
        self._used: dict[int, int] = {}  # by the threads that wait: how many slots each uses meanwhile

    def patience(self) -> float:
        """When a thread that begins to wait now gives up (of `time.monotonic`)."""
        return time.monotonic() + _PATIENCE

    def slot_freed(self) -> None:
        if self._sleeping:
            self._freed.notify_all()

    def another(self, mine: int, used: int, momentary: bool, give_up: float) -> bool:
        """Wait until another thread frees a slot; False when none will by waiting.

        ``mine``: slots this thread uses, ``used``: all threads; ``momentary``: a view is kept that another thread
        may drop at any time (in the traceback of a checkpoint's early stop) without telling.
        """
        left = max(0.0, give_up - time.monotonic())
        # What this thread itself uses does not end by waiting, nor what threads use that wait for it.
        if used - mine > sum(self._used.values()):
            thread = threading.get_ident()
            self._used[thread] = mine
            try:
                return self._sleep(left)
            finally:
                del self._used[thread]
        if momentary:
            self._sleep(min(left, _POLL))
            return left > 0
        return False

    def _sleep(self, seconds: float) -> bool:
        self._sleeping += 1
        try:
            return self._freed.wait(seconds)
        finally:
            self._sleeping -= 1
