"""The memory of the Windows-shaped machine: physical memory, the commit limit, and what this process takes of both.

On Windows each private byte of a process is charged to the commit limit (RAM and paging files together) when it is
allocated, not when it is first touched (Microsoft, "Virtual Address Space and Physical Storage"; MapViewOfFile:
FILE_MAP_COPY views are charged whole). An allocation beyond the limit fails with ERROR_COMMITMENT_LIMIT (1455).
Only mappings that code in the shape makes through `mmap` are charged here, and what `calls.py` allocates.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from dataclasses import dataclass
from typing import Any

from . import files
from .errors import windows_error

MIB = 1 << 20
ERROR_COMMITMENT_LIMIT = 1455

_lock = threading.Lock()
_charged = 0  # bytes
_machine: Machine
_at_start = 0  # resident bytes of this process when it began


@dataclass(frozen=True)
class Machine:
    """Bytes. ``commit_available``: what the limit leaves when the process begins."""

    total: int
    available: int
    commit_limit: int
    commit_available: int


@dataclass(frozen=True)
class Status:
    """What GlobalMemoryStatusEx would say now, in bytes."""

    total: int
    available: int
    commit_limit: int
    commit_available: int


def install() -> None:
    global _machine, _at_start
    asked = os.environ.get("CAROM_WINDOWS_SHAPE_MEMORY", "")
    _machine = Machine(*(int(part) * MIB for part in asked.split(","))) if asked else _this_machine()
    _at_start = _resident()


def _this_machine() -> Machine:
    with open("/proc/meminfo", encoding="ascii") as file:
        fields = {
            name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in file)
        }
    total, available = fields["MemTotal"], fields["MemAvailable"]
    return Machine(total, available, total + fields["SwapTotal"], available + fields["SwapFree"])


def _resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


def peak_resident() -> int:
    """Return the most resident bytes of this process so far."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))


def status() -> Status:
    """Return the memory now: what was there at the start, less what this process has taken since."""
    taken = max(0, _resident() - _at_start)
    return Status(
        _machine.total,
        max(0, _machine.available - taken),
        _machine.commit_limit,
        max(0, _machine.commit_available - max(taken, _charged)),
    )


def charge(nbytes: int) -> None:
    """Charge private memory to the commit limit. Raises OSError with winerror 1455 where the limit leaves too little."""
    global _charged
    with _lock:
        if _charged + nbytes > _machine.commit_available:
            raise windows_error(ERROR_COMMITMENT_LIMIT)
        _charged += nbytes


def uncharge(nbytes: int) -> None:
    global _charged
    # No lock: a finalizer may run this on a thread that holds it. A lost update only makes the limit tighter.
    _charged -= nbytes


def charged() -> int:
    """Return the bytes that are charged now."""
    return _charged


class Mapping(mmap.mmap):
    """`mmap.mmap` as on Windows: no flags, no protection and no madvise; private memory is charged."""

    def __new__(
        cls, fileno: int, length: int, tagname: str | None = None, access: int = mmap.ACCESS_DEFAULT, offset: int = 0
    ) -> Any:  # fmt: skip
        size = length
        if fileno != -1 and not length:
            size = os.fstat(fileno).st_size - offset
        cost = size if fileno == -1 or access == mmap.ACCESS_COPY else 0
        charge(cost)
        try:
            if fileno == -1:
                # Windows' memory is private to the process unless it has a name.
                made = super().__new__(cls, -1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            else:
                made = super().__new__(cls, fileno, length, access=access, offset=offset)
        except BaseException:
            uncharge(cost)
            raise
        made._cost = cost
        return made

    @property
    def madvise(self) -> Any:
        raise AttributeError("mmap has no madvise on Windows")

    def close(self) -> None:
        super().close()
        cost, self._cost = getattr(self, "_cost", 0), 0
        uncharge(cost)
        files.delete_closed()

    def __del__(self) -> None:
        with contextlib.suppress(BufferError, ValueError):
            self.close()
