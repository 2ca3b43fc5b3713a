"""`read_commit`: the physical memory that is available on Windows, and what the commit limit leaves. `with_advice`: words
for an error by which Windows says that this limit is reached.

Windows counts each writable private page that a program allocates, used or not, and refuses what exceeds the commit
limit: the physical memory and the page files together. So an allocation can fail although physical memory is
available. Allocations of device memory count too.
"""

from __future__ import annotations

import ctypes
import re
import sys
from dataclasses import dataclass
from typing import Any

# ERROR_COMMITMENT_LIMIT, as Python ("[WinError 1455]"), Rust libraries such as safetensors ("(os error 1455)") and torch
# ("error code: <1455>") write it. torch's allocator writes the last text, on Windows only.
_REFUSED = re.compile(
    r"(WinError |os error |error code: ?<?)1455\b|DefaultCPUAllocator: not enough memory", re.IGNORECASE
)
PAGEFILE_ADVICE = (
    "Windows has reached its commit limit (RAM and page file together): enlarge the page file (System > About > Advanced "
    "system settings > Performance > Advanced > Virtual memory: a system managed size, on a drive with room), or close "
    "programs that hold memory"
)


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


def is_commit_limit(error: BaseException | None) -> bool:
    """Return whether ``error``, or one that caused it, says that Windows' commit limit is reached (error 1455).

    A MemoryError of Python or numpy has no number. On Windows it means the same: 64-bit addresses do not run out.
    """
    while error is not None:
        if getattr(error, "winerror", None) == 1455 or _REFUSED.search(str(error)):
            return True
        if sys.platform == "win32" and isinstance(error, MemoryError):
            return True
        error = error.__cause__
    return False


def with_advice(message: str, error: BaseException) -> str:
    """Return ``message``, followed by `PAGEFILE_ADVICE` if `is_commit_limit` is true of ``error``."""
    told = PAGEFILE_ADVICE in message or not is_commit_limit(error)
    return message if told else f"{message}. {PAGEFILE_ADVICE}"
