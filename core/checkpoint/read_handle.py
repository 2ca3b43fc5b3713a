"""Handles of submitted reads: futures for the caller, and the bookkeeping of which parts workers have still
to read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any

import numpy as np

from ..common import interruptible
from ..common.errors import WeightsError
from .index import SourceFile


class SubmittedRead:
    """A future for a read of file bytes into a buffer of the caller.

    The buffer belongs to the reader until `done` is True, even after `cancel`. ``from_memory``: bytes of the
    read that were in RAM already, so that the drive did not read them.
    """

    def __init__(self, file: SourceFile, offset: int, nbytes: int, label: str, priority: float) -> None:
        self.file, self.offset, self.nbytes, self.label = file, offset, nbytes, label
        self.priority = priority
        self.from_memory = 0
        self._lock = threading.Lock()
        self._event = interruptible.Event()
        self._error: BaseException | None = None
        self._cancelled = False
        self._callbacks: list[Callable[[SubmittedRead], Any]] = []

    def done(self) -> bool:
        """Return True once no thread will touch the buffer any more."""
        return self._event.is_set()

    def cancelled(self) -> bool:
        """Return whether the read was cancelled."""
        return self._cancelled

    def cancel(self) -> bool:
        """Cancel the read; return False if the read was done already. Wait for `done` before using the buffer
        again.
        """
        with self._lock:
            if self._event.is_set():
                return False
            self._cancelled = True
            idle = self._abandon()
        if idle:
            self._finish()
        return True

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the read is done; return False if ``timeout`` seconds passed first."""
        return self._event.wait(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait, then return the read's error, or None on success; raise TimeoutError or CancelledError as
        `result` does.
        """
        if not self._event.wait(timeout):
            raise TimeoutError(f"{self.label} was not read within {timeout} s")
        if self._cancelled:
            raise CancelledError
        return self._error

    def result(self, timeout: float | None = None) -> int:
        """Wait, then return the number of bytes; raise WeightsError (naming file and tensor), CancelledError
        or TimeoutError.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self.nbytes

    def add_done_callback(self, function: Callable[[SubmittedRead], Any]) -> None:
        """Call ``function(self)`` from the thread that finishes the read, or at once if the read is done."""
        with self._lock:
            if not self._event.is_set():
                self._callbacks.append(function)
                return
        function(self)

    def _abandon(self) -> bool:
        """Prevent workers from beginning further parts of the read; return whether none is at work.

        Called with the lock held.
        """
        raise NotImplementedError

    def _release(self) -> None:
        """Drop the reference to the buffer. Called with the lock held."""
        raise NotImplementedError

    def _finish(self, error: BaseException | None = None) -> None:
        """Mark the read as done, with ``error`` if it failed, and call the callbacks.

        A file that changed since its header was read is an error too.
        """
        with self._lock:
            if self._event.is_set():
                return
            self._error = self._error or error
            if self._error is None and not self._cancelled:
                try:
                    self.file.check()
                except WeightsError as found:
                    self._error = found
            self._release()
            callbacks, self._callbacks = self._callbacks, []
            self._event.set()
        for function in callbacks:
            function(self)


class ReadHandle(SubmittedRead):
    """A future for a read of a file's own bytes, which worker threads read chunk by chunk."""

    def __init__(
        self, file: SourceFile, offset: int, target: memoryview, label: str, priority: float
    ) -> None:
        super().__init__(file, offset, len(target), label, priority)
        self._target: memoryview | None = target
        self._address = np.frombuffer(target, np.uint8).ctypes.data if len(target) else 0
        self._waiting: dict[int, int] = {}  # {file offset: bytes} of the chunks that no worker has claimed
        self._running = 0

    def _abandon(self) -> bool:
        self._waiting.clear()
        return self._running == 0

    def _release(self) -> None:
        self._target = None

    def _claim_chunk(self, start: int) -> int:
        """Claim the chunk at offset ``start``; return its bytes, or 0 if the chunk was claimed, cancelled or
        failed before.
        """
        with self._lock:
            nbytes = self._waiting.pop(start, 0)
            self._running += nbytes > 0
            return nbytes

    def _chunk_done(self, error: BaseException | None, from_memory: int = 0) -> None:
        """Count a claimed chunk as done, and finish the read after the last one or after an error.

        ``from_memory``: bytes of the chunk that were copied from RAM.
        """
        with self._lock:
            self._running -= 1
            self.from_memory += from_memory
            if error is not None:
                self._error = self._error or error
                self._waiting.clear()
            finished = self._running == 0 and not self._waiting
        if finished:
            self._finish()
