"""Who wants to know how far laying out weights has come: hosts show it as a bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Listener = Callable[[int, int], None]  # bytes that stand already, of how many

_listener: ContextVar[Listener | None] = ContextVar("carom_progress", default=None)


@contextmanager
def told_to(listener: Listener) -> Iterator[None]:
    """While entered, ``listener`` is called whenever a unit of a model that is laid out on this thread stands."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


class Progress:
    """Of one laying out of ``total`` bytes."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._listener = total, 0, _listener.get()

    def add(self, nbytes: int) -> None:
        """So many more bytes stand."""
        self._done += nbytes
        if self._listener is not None:
            self._listener(self._done, self._total)
