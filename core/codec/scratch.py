"""Scratch arrays that each thread keeps and reuses, because faulting in fresh pages costs more than the
arithmetic on them.

glibc returns a thread's large arrays to the system when they are freed, so without reuse every temporary
array of a chunk would be faulted in anew, page by page.
"""

from __future__ import annotations

import threading

import numpy as np

_local = threading.local()


def scratch(name: str, count: int, dtype: type[np.generic]) -> np.ndarray:
    """Return this thread's array called ``name`` with ``count`` elements of ``dtype``, contents undefined.

    The array is valid until the same thread asks for the same name and dtype again.
    """
    arrays: dict[tuple[str, type], np.ndarray] = _local.__dict__.setdefault("arrays", {})
    array = arrays.get((name, dtype))
    if array is None or len(array) < count:
        array = arrays[name, dtype] = np.empty(count, dtype)
    return array[:count]
