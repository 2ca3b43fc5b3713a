"""A limit on the number of simultaneous reads from a drive, shared by several readers, with a bounce buffer
for each read.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from .direct_io import aligned_buffer
from .file_read import ReadTarget


class ReadPermit:
    """A permit for one read of a drive, with a bounce buffer that grows to the largest read."""

    def __init__(self) -> None:
        self._buffer: ReadTarget | None = None

    def buffer(self, nbytes: int) -> ReadTarget:
        """Return the permit's page-aligned buffer, at least ``nbytes`` long."""
        if self._buffer is None or len(self._buffer.view) < nbytes:
            self._buffer = ReadTarget.of(aligned_buffer(nbytes))
        return self._buffer


class ReadLimit:
    """A semaphore that allows ``count`` simultaneous reads of a drive, for all readers that share the object.

    The permit returned last is issued next, because its bounce buffer is the likeliest to be in a CPU's
    cache.
    """

    def __init__(self, count: int) -> None:
        self._free = [ReadPermit() for _ in range(count)]
        self._returned = threading.Condition()

    @contextmanager
    def permit(self) -> Iterator[ReadPermit]:
        """Wait for a permit and hold it inside this context."""
        with self._returned:
            while not self._free:
                self._returned.wait()
            permit = self._free.pop()
        try:
            yield permit
        finally:
            with self._returned:
                self._free.append(permit)
                self._returned.notify()
