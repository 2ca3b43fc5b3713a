"""File pages that a copy has made superfluous: their mapping is dropped, so that weights do not lie in memory twice.

Loaders map checkpoints. A page that was read counts as the process's memory for as long as any tensor of its file
lives, which for a weight that was copied to a block of ours is until the last one was. Linux takes such pages back when
it needs the room; until then they are in the way of limits on a process or container, and of who reads its size.

What is dropped comes back from the file if somebody reads it after all: only pages that are the file's own are
(proc_pid_pagemap(5), bit 61), never one that was written to in a private mapping.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

_PAGE = mmap.PAGESIZE
_ENTRY = 8  # bytes of /proc/self/pagemap a page
_FILE = np.uint64(1 << 61)
_HERE = np.uint64(3 << 62)  # present, or swapped out
_LEAST = 1 << 16  # bytes; less is not worth two system calls


class Mapped:
    """The files that are mapped now. Elsewhere than on Linux, and where it does not tell, none."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        if _madvise() is not None:
            for start, end in _ranges():
                self._starts.append(start)
                self._ends.append(end)

    @property
    def known(self) -> bool:
        """Whether the system tells."""
        return _madvise() is not None

    def holds(self, address: int, nbytes: int) -> bool:
        """Whether the bytes from ``address`` lie in a mapped file, all of them."""
        index = bisect.bisect_right(self._starts, address) - 1
        return index >= 0 and address + nbytes <= self._ends[index]

    def drop(self, address: int, nbytes: int) -> None:
        """Stop counting the whole pages between; where they are no mapped file's, nothing happens."""
        if nbytes < _LEAST or not self.holds(address, nbytes):
            return
        start = -(-address // _PAGE) * _PAGE
        size = (address + nbytes) // _PAGE * _PAGE - start
        madvise = _madvise()
        if size <= 0 or madvise is None or not _of_the_file(start, size):
            return
        madvise(start, size, mmap.MADV_DONTNEED if hasattr(mmap, "MADV_DONTNEED") else 4)


@cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if not sys.platform.startswith("linux") or not Path("/proc/self/pagemap").exists():
        return None
    try:
        found: Any = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    found.argtypes, found.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_int
    return found


def _ranges() -> list[tuple[int, int]]:
    """(start, end) of every mapping of a file, in order; neighbours that are one file's are one."""
    found: list[tuple[int, int]] = []
    try:
        lines = Path("/proc/self/maps").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return []
    for line in lines:
        parts = line.split(maxsplit=5)
        if len(parts) < 6 or parts[4] == "0" or not parts[5].startswith("/") or parts[5].startswith("/dev/"):
            continue
        start, _, end = parts[0].partition("-")
        at, until = int(start, 16), int(end, 16)
        if found and found[-1][1] == at:
            found[-1] = (found[-1][0], until)
        else:
            found.append((at, until))
    return found


def _of_the_file(start: int, size: int) -> bool:
    """Whether no page between, of those that are anywhere, was written to in a private mapping."""
    wanted = size // _PAGE * _ENTRY
    try:
        handle = os.open("/proc/self/pagemap", os.O_RDONLY)
        try:
            told = os.pread(handle, wanted, start // _PAGE * _ENTRY) if hasattr(os, "pread") else b""
        finally:
            os.close(handle)
    except OSError:
        return False
    if len(told) != wanted:
        return False
    pages = np.frombuffer(told, np.uint64)
    return not bool(np.any(((pages & _HERE) != 0) & ((pages & _FILE) == 0)))
