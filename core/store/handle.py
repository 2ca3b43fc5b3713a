"""One submitted read: what its caller waits for, and what the workers know of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any

import numpy as np

from ..errors import WeightsError
from .index import SourceFile


class SubmittedRead:
    """A read that was asked for. The buffer belongs to the reader until `done` is True, also after `cancel`."""

    def __init__(self, file: SourceFile, offset: int, nbytes: int, what: str, priority: float) -> None:
        self.file, self.offset, self.nbytes, self.what = file, offset, nbytes, what
        self.priority = priority
        self._lock = threading.Lock()
        self._event = threading.Event()
        self._error: BaseException | None = None
        self._cancelled = False
        self._callbacks: list[Callable[[SubmittedRead], Any]] = []

    def done(self) -> bool:
        """True once nobody will touch the buffer any more."""
        return self._event.is_set()

    def cancelled(self) -> bool:
        return self._cancelled

    def cancel(self) -> bool:
        """Give the read up; False when it was done already. Wait for `done` before the buffer is used again."""
        with self._lock:
            if self._event.is_set():
                return False
            self._cancelled = True
            idle = self._drop()
        if idle:
            self._finish()
        return True

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until `done`; False when ``timeout`` seconds passed first. Raises nothing else."""
        return self._event.wait(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The read's error, None if it succeeded; TimeoutError, CancelledError as `result`."""
        if not self._event.wait(timeout):
            raise TimeoutError(f"{self.what} was not read within {timeout} s")
        if self._cancelled:
            raise CancelledError
        return self._error

    def result(self, timeout: float | None = None) -> int:
        """Wait; the bytes read. Raises WeightsError (names file and tensor), CancelledError or TimeoutError."""
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self.nbytes

    def add_done_callback(self, function: Callable[[SubmittedRead], Any]) -> None:
        """Call ``function(self)`` when done, from the thread that finishes it (at once if it is done)."""
        with self._lock:
            if not self._event.is_set():
                self._callbacks.append(function)
                return
        function(self)

    def _drop(self) -> bool:
        """Under the lock: begin no more of it; whether nobody is at work on it."""
        raise NotImplementedError

    def _release(self) -> None:
        """Under the lock: let the buffer go."""
        raise NotImplementedError

    def _finish(self, error: BaseException | None = None) -> None:
        """The end, with ``error`` or well: bytes of a file that is not the same any more are an error too."""
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
    """A read of a file's own bytes, which workers take piece by piece."""

    def __init__(self, file: SourceFile, offset: int, target: memoryview, what: str, priority: float) -> None:
        super().__init__(file, offset, len(target), what, priority)
        self._target: memoryview | None = target
        self._address = np.frombuffer(target, np.uint8).ctypes.data if len(target) else 0
        self._waiting: dict[int, int] = {}  # piece's start -> its bytes, not yet taken by a worker
        self._running = 0

    def _drop(self) -> bool:
        self._waiting.clear()
        return self._running == 0

    def _release(self) -> None:
        self._target = None

    def _take(self, start: int) -> int:
        """Claim the piece at ``start``: its bytes, or 0 if it was taken, cancelled or failed before."""
        with self._lock:
            nbytes = self._waiting.pop(start, 0)
            self._running += nbytes > 0
            return nbytes

    def _piece_done(self, error: BaseException | None) -> None:
        with self._lock:
            self._running -= 1
            if error is not None:
                self._error = self._error or error
                self._waiting.clear()
            finished = self._running == 0 and not self._waiting
        if finished:
            self._finish()
