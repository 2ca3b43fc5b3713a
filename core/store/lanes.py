"""How many reads of one drive are under way at once, whoever asks, and the small buffers that some of them pass through."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from .rawio import aligned_buffer


class Lane:
    """One read's place; its buffer is made when first needed and grows to what is asked for."""

    def __init__(self) -> None:
        self._buffer: memoryview | None = None

    def buffer(self, nbytes: int) -> memoryview:
        """At least ``nbytes`` of page-aligned memory, the same each time."""
        if self._buffer is None or len(self._buffer) < nbytes:
            self._buffer = aligned_buffer(nbytes)
        return self._buffer


class Lanes:
    """``count`` lanes, shared by the workers of all readers they are given to. The one that was left last is taken next:
    its buffer is the likeliest to be in a CPU's cache."""

    def __init__(self, count: int) -> None:
        self._free = [Lane() for _ in range(count)]
        self._left = threading.Condition()

    @contextmanager
    def one(self) -> Iterator[Lane]:
        """A lane of one's own, waited for."""
        with self._left:
            while not self._free:
                self._left.wait()
            lane = self._free.pop()
        try:
            yield lane
        finally:
            with self._left:
                self._free.append(lane)
                self._left.notify()
