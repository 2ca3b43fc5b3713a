"""Modules that only Windows' Python has (`msvcrt`, `_winapi`), and psutil's figures of memory there."""

from __future__ import annotations

import os
from typing import Any

from . import files, handles, memory
from .errors import windows_error


def make_msvcrt() -> dict[str, Any]:
    """Return the names of `msvcrt`: locks of byte ranges, and the handles of descriptors."""

    def locking(fd: int, mode: int, nbytes: int) -> None:
        import fcntl

        operation = fcntl.LOCK_UN if mode == 0 else fcntl.LOCK_EX | fcntl.LOCK_NB
        # _locking: a region may be locked beyond the end of the file. Locks belong to the open file, as
        # those of flock do, so a second open file of this process is refused too.
        try:
            fcntl.flock(fd, operation)
        except BlockingIOError as error:
            raise PermissionError(13, "Permission denied") from error

    return {
        "LK_UNLCK": 0, "LK_LOCK": 1, "LK_NBLCK": 2, "LK_RLCK": 3, "LK_NBRLCK": 4,
        "locking": locking,
        "get_osfhandle": handles.of_descriptor,
        "open_osfhandle": lambda handle, flags: handles.descriptor(handle),
        "setmode": lambda fd, flags: 0x8000,
        "kbhit": lambda: False,
    }  # fmt: skip


def make__winapi() -> dict[str, Any]:
    """Return the names of `_winapi` that Carom may use."""

    def create_junction(src: str, dst: str) -> None:
        """Like `mklink /J`: needs no privilege. A junction holds an absolute path of a folder."""
        if not os.path.isdir(src):
            raise windows_error(3, src)
        if os.path.lexists(dst):
            raise windows_error(183, dst)
        files._symlink(os.path.abspath(src) + files.JUNCTION, dst, True)

    return {"CreateJunction": create_junction, "CloseHandle": handles.close}


def make_psutil() -> dict[str, Any]:
    """Return psutil's functions of memory with Windows' figures (psutil takes them from GlobalMemoryStatusEx)."""
    import collections

    import psutil

    Virtual = collections.namedtuple("svmem", "total available percent used free")
    Swap = collections.namedtuple("sswap", "total used free percent sin sout")

    def virtual_memory() -> Any:
        now = memory.status()
        used = now.total - now.available
        return Virtual(now.total, now.available, round(100 * used / now.total, 1), used, now.available)

    def swap_memory() -> Any:
        now = memory.status()
        total = max(0, now.commit_limit - now.total)
        free = min(total, max(0, now.commit_available - now.available))
        return Swap(total, total - free, free, 0.0, 0, 0)

    Memory = collections.namedtuple(
        "pmem",
        "rss vms num_page_faults peak_wset wset peak_paged_pool paged_pool peak_nonpaged_pool nonpaged_pool pagefile "
        "peak_pagefile private",
    )

    class Process(psutil.Process):
        """Windows counts a working set (rss) and private bytes."""

        def memory_info(self) -> Any:
            found = super().memory_info()
            own = self.pid == os.getpid()
            peak = memory.peak_resident() if own else found.rss
            private = max(0, found.rss - found.shared)
            return Memory(found.rss, private, 0, peak, found.rss, 0, 0, 0, 0, private, private, private)

    return {"virtual_memory": virtual_memory, "swap_memory": swap_memory, "Process": Process}
