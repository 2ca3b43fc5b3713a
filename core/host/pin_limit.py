"""The limit that the operating system sets on the pinned memory of a whole process, and the bytes that the process has
pinned.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True)
class PinLimit:
    """``nbytes``: the most bytes that all sessions of this process together may have pinned. ``reason``: who sets the
    limit, in words for the report.
    """

    nbytes: int
    reason: str


class PinnedTotal:
    """The bytes of pinned memory of all arenas of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes = 0
        # Bytes that were unpinned and are still counted. The garbage collector may run `release` on a thread that holds
        # the lock.
        self._released: deque[int] = deque()

    @property
    def nbytes(self) -> int:
        """Bytes that are pinned now."""
        with self._lock:
            return self._count()

    def take(self, nbytes: int, limit: PinLimit | None) -> bool:
        """Count ``nbytes`` more as pinned if ``limit`` allows them; return whether it does."""
        with self._lock:
            if limit is not None and self._count() + nbytes > limit.nbytes:
                return False
            self._bytes += nbytes
            return True

    def release(self, nbytes: int) -> None:
        """Count ``nbytes`` less. Takes no lock."""
        self._released.append(nbytes)

    def _count(self) -> int:
        """Return the pinned bytes. Called with the lock held."""
        while self._released:
            self._bytes -= self._released.popleft()
        return self._bytes


ALL_PINNED = PinnedTotal()
