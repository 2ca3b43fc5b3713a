"""A callback for the progress of loading a model's weights; user interfaces (such as ComfyUI's) draw a
progress bar from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

ProgressListener = Callable[[int, int], None]  # called with (bytes loaded so far, bytes in total)

_listener: ContextVar[ProgressListener | None] = ContextVar("carom_progress", default=None)


@contextmanager
def progress_listener(listener: ProgressListener) -> Iterator[None]:
    """Call ``listener`` inside this context whenever a part of a model that is loaded on this thread is in
    place.

    ``listener`` receives the bytes loaded so far and the total bytes.
    """
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


class Progress:
    """The progress of loading a model of ``total`` bytes; reports to the listener that was set when the
    object was made.
    """

    def __init__(self, total: int) -> None:
        self._total, self._done, self._listener = total, 0, _listener.get()

    def add(self, nbytes: int) -> None:
        """Add ``nbytes`` to the loaded bytes and call the listener, if there is one."""
        self._done += nbytes
        if self._listener is not None:
            self._listener(self._done, self._total)
