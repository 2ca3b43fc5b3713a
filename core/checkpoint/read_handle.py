"""Handles of submitted reads: futures for the caller, and the bookkeeping of which parts workers have still
to read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from typing import Any

from ..common import interruptible
from ..common.errors import WeightsError
from .file_read import FileRead, ReadTarget

# A part of a read that one worker reads at a time: the range that it belongs to, its first byte in the file, its bytes.
Chunk = tuple[FileRead, int, int]


class SubmittedRead:
    """A future for a read of the file ranges ``reads``, at least one, into the memory ``target`` of the caller.

    ``chunks``: the ranges in parts, which worker threads claim and read one at a time. ``when_done``: a function as
    `add_done_callback` takes it. The memory belongs to the reader until `done` is True, even after `cancel`.
    ``from_memory``: bytes of the read that were in RAM already, so that the drive did not read them.
    """

    def __init__(
        self, reads: Sequence[FileRead], chunks: Sequence[Chunk], target: ReadTarget, priority: float,
        when_done: Callable[[SubmittedRead], Any] | None = None,
    ) -> None:  # fmt: skip
        self.reads, self.priority = reads, priority
        self.from_memory = 0
        self._target: ReadTarget | None = target
        self._lock = threading.Lock()
        self._waiting = dict(enumerate(chunks))  # the chunks that no worker has claimed, by their numbers
        self._running = 0  # the number of chunks that workers have claimed and not ended
        self._done = False
        self._event: threading.Event | None = None  # made by the first thread that waits
        self._error: BaseException | None = None
        self._cancelled = False
        self._callbacks: list[Callable[[SubmittedRead], Any]] = [] if when_done is None else [when_done]

    @property
    def label(self) -> str:
        """The name of the first range, for errors and the timeline."""
        return self.reads[0].label

    @property
    def nbytes(self) -> int:
        """Bytes of all ranges."""
        return sum(read.nbytes for read in self.reads)

    def done(self) -> bool:
        """Return True once no thread will touch the memory any more."""
        return self._done

    def cancelled(self) -> bool:
        """Return whether the read was cancelled."""
        return self._cancelled

    def cancel(self) -> bool:
        """Cancel the read; return False if the read was done already. Wait for `done` before using the buffer
        again.
        """
        with self._lock:
            if self._done:
                return False
            self._cancelled = True
            self._waiting.clear()
            idle = not self._running
        if idle:
            self.finish()
        return True

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the read is done; return False if ``timeout`` seconds passed first."""
        with self._lock:
            if self._done:
                return True
            event = self._event = self._event or interruptible.Event()
        return event.wait(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait, then return the read's error, or None on success; raise TimeoutError or CancelledError as
        `result` does.
        """
        if not self.wait(timeout):
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
            if not self._done:
                self._callbacks.append(function)
                return
        function(self)

    # -- called by the reader

    def waiting(self) -> list[int]:
        """Return the numbers of the chunks that no worker has claimed."""
        with self._lock:
            return list(self._waiting)

    def claim_chunk(self, number: int) -> tuple[Chunk, ReadTarget] | None:
        """Claim a chunk; return it and the memory of the read, or None if the chunk was claimed, cancelled or failed
        before. `end_chunk` must follow.
        """
        with self._lock:
            chunk = self._waiting.pop(number, None)
            if chunk is None or self._target is None:
                return None
            self._running += 1
            return chunk, self._target

    def end_chunk(self, error: BaseException | None, from_memory: int = 0) -> None:
        """Count a claimed chunk as done, and finish the read after the last one or after an error. The caller holds no
        reference to the memory any more.

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
            self.finish()

    def finish(self) -> None:
        """Mark the read as done, and call the callbacks. A file that changed since its header was read is an error."""
        with self._lock:
            if self._done:
                return
            if self._error is None and not self._cancelled:
                try:
                    for file in {id(read.file): read.file for read in self.reads}.values():
                        file.check()
                except WeightsError as found:
                    self._error = found
            self._target = None
            callbacks, self._callbacks = self._callbacks, []
            self._done = True
            if self._event is not None:
                self._event.set()
        for function in callbacks:
            function(self)
