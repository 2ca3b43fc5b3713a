"""Defines `SlotWaiters`: host threads that wait, with a deadline, until another thread no longer uses a slot
(device memory that holds a unit, a group of weights that are copied together).
"""

from __future__ import annotations

import threading
import time

_PATIENCE = 20.0  # seconds that a thread waits for a slot that other threads use
_POLL = 0.001  # seconds between checks whether other threads have dropped their views


class SlotWaiters:
    """The threads of one session that wait for a slot. Must be called under ``lock``, which protects the slots.

    ``asleep``: ids of the threads that wait now. `Pool.leave` reads the set instead of calling a method.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self._freed = threading.Condition(lock)
        self.asleep: set[int] = set()
        self._used: dict[int, int] = {}  # by waiting thread: the number of slots that the thread itself uses

    @property
    def sleeping(self) -> int:
        """The number of threads that wait now."""
        return len(self.asleep)

    def forget(self) -> None:
        """Forget which threads wait. Called while none does."""
        self.asleep.clear()
        self._used.clear()

    def forget_thread(self, thread: int) -> None:
        """Forget that ``thread`` waits, because an interrupt has ended that."""
        self.asleep.discard(thread)
        self._used.pop(thread, None)

    def new_deadline(self) -> float:
        """Return the time (`time.monotonic`, in seconds) at which a thread that begins to wait now has to
        give up.
        """
        return time.monotonic() + _PATIENCE

    def slot_freed(self) -> None:
        """Wake all waiting threads, because a slot was released."""
        if self.asleep:
            self._freed.notify_all()

    def wait_for_slot(self, mine: int, used: int, views_may_be_dropped: bool, deadline: float) -> bool:
        """Wait until another thread releases a slot. Returns False if waiting cannot help or the deadline has
        passed.

        ``mine``: number of slots that this thread uses.
        ``used``: number of slots that all threads use.
        ``views_may_be_dropped``: another thread keeps a view of a slot (for instance in the traceback of a
        checkpoint's early stop), and may drop the view at any time without a notification.
        """
        left = max(0.0, deadline - time.monotonic())
        # Waiting helps only if a thread that does not itself wait uses a slot.
        if used - mine > sum(self._used.values()):
            thread = threading.get_ident()
            try:
                self._used[thread] = mine
                return self._sleep(left)
            finally:
                self._used.pop(thread, None)
        if views_may_be_dropped:
            self._sleep(min(left, _POLL))
            return left > 0
        return False

    def _sleep(self, seconds: float) -> bool:
        """Wait for a notification, at most ``seconds``. Returns whether there was a notification."""
        thread = threading.get_ident()
        try:
            self.asleep.add(thread)
            return self._freed.wait(seconds)
        finally:
            self.asleep.discard(thread)
