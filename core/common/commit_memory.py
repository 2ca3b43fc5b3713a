"""`read_commit`: the physical memory that is available on Windows, and what the commit limit leaves.

Windows counts each writable private page that a program allocates, used or not, and refuses what exceeds the commit
limit: the physical memory and the page files together. So an allocation can fail although physical memory is
available. Allocations of device memory count too.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Commit:
    """Sizes in bytes. ``limit``: the commit limit of this process; ``left``: how much of it the process can still
    allocate; ``available_physical``: physical memory that can be used without writing other memory to the page file.
    """

    limit: int
    left: int
    available_physical: int


class _MemoryStatus(ctypes.Structure):
    """MEMORYSTATUSEX of Microsoft's sysinfoapi.h."""

    _fields_ = [
        ("dwLength", ctypes.c_uint32),
        ("dwMemoryLoad", ctypes.c_uint32),
        ("ullTotalPhys", ctypes.c_uint64),
        ("ullAvailPhys", ctypes.c_uint64),
        ("ullTotalPageFile", ctypes.c_uint64),
        ("ullAvailPageFile", ctypes.c_uint64),
        ("ullTotalVirtual", ctypes.c_uint64),
        ("ullAvailVirtual", ctypes.c_uint64),
        ("ullAvailExtendedVirtual", ctypes.c_uint64),
    ]


def read_commit() -> Commit | None:
    """Return what GlobalMemoryStatusEx reports, None if the call fails or on systems other than Windows."""
    status = _MemoryStatus(dwLength=ctypes.sizeof(_MemoryStatus))
    try:
        kernel: Any = ctypes.WinDLL("kernel32")  # type: ignore[attr-defined,unused-ignore]
        if not kernel.GlobalMemoryStatusEx(ctypes.byref(status)):
            return None
    except (AttributeError, OSError):
        return None
    return Commit(status.ullTotalPageFile, status.ullAvailPageFile, status.ullAvailPhys)
