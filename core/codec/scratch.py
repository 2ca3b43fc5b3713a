"""Memory that a thread uses again and again: fresh pages cost more than the arithmetic done in them.

glibc hands large arrays of a thread back to the system when they are freed, so that every temporary of a chunk would be
faulted in anew: measured, that is two thirds of the time of encoding.
"""

from __future__ import annotations

import threading

import numpy as np

_local = threading.local()


def scratch(name: str, count: int, dtype: type[np.generic]) -> np.ndarray:
    """This thread's array ``name`` of ``count`` elements, contents undefined; valid until it is asked for again."""
    held: dict[tuple[str, type], np.ndarray] = _local.__dict__.setdefault("held", {})
    found = held.get((name, dtype))
    if found is None or len(found) < count:
        found = held[name, dtype] = np.empty(count, dtype)
    return found[:count]


def forget() -> None:
    """Give this thread's arrays back."""
    _local.__dict__.clear()
