"""Pauses Python's garbage collection: while many objects are made, and while stacks of other threads are read.

A collection looks at all objects of the program. Laying out a model of ten thousand tensors makes some hundred thousand
objects, which are all kept, and would begin many collections that free nothing.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

_strict = threading.RLock()  # held while no thread may begin a collection


class _Paused:
    """Disables automatic collections. They are enabled again by `end`, or by the end of the object: an interrupt at any
    line leaves them as they were.
    """

    _enabled = False

    def __init__(self) -> None:
        self._enabled = gc.isenabled()
        gc.disable()

    def end(self) -> None:
        """Enable collections again if they were enabled."""
        if self._enabled:
            with _strict:
                gc.enable()
            self._enabled = False

    __del__ = end


@contextlib.contextmanager
def fewer_collections() -> Iterator[None]:
    """Begin no garbage collection by itself in this context, unless another thread enables collections meanwhile."""
    paused = _Paused()
    try:
        yield
    finally:
        paused.end()


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Let no garbage collection begin by itself in any thread. For short pieces of code: one thread at a time."""
    with _strict, fewer_collections():
        yield
