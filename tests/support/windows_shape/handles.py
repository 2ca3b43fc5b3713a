"""Windows' handles: those of files are computed from their descriptors, so that `msvcrt` and the calls agree."""

from __future__ import annotations

import itertools
import os
import threading
from typing import Any

INVALID = (1 << 64) - 1
_BASE, _FILES = 0x10000, 4 * (1 << 20)  # handles are multiples of 4
_lock = threading.Lock()
_numbers = itertools.count(_BASE + _FILES + 4, 4)
_objects: dict[int, Any] = {}


def of_descriptor(fd: int) -> int:
    os.fstat(fd)  # raises OSError (EBADF)
    return _BASE + 4 * fd


def descriptor(handle: int) -> int:
    """Return the descriptor of a file handle; -1 if it is none."""
    at = handle - _BASE
    return at // 4 if 0 <= at < _FILES and at % 4 == 0 else -1


def add(value: Any) -> int:
    """Return a new handle of an object that is no file (an event, a mapping)."""
    with _lock:
        handle = next(_numbers)
        _objects[handle] = value
        return handle


def get(handle: int) -> Any:
    return _objects.get(handle)


def close(handle: int) -> bool:
    """Close a handle; return False if it is not open."""
    fd = descriptor(handle)
    if fd >= 0:
        try:
            os.close(fd)
        except OSError:
            return False
        return True
    value = _objects.pop(handle, None)
    if hasattr(value, "close"):
        value.close()
    return value is not None


def open_handles() -> list[int]:
    """Return the handles that are no files' and are open."""
    return list(_objects)
