"""Release of file-backed memory pages that were copied, so that weights are not resident in memory twice
(Linux).

Checkpoint loaders memory-map files. A page that was read counts as the process's memory for as long as any
tensor of the file lives. So the page of a weight that Carom has copied to a block of its own counts until the
last weight of the file was copied. Linux reclaims such pages when it needs memory. Until then they count
against the memory limits of processes and containers, and in reports of the process's size.

A released page is read from the file again if a program reads it after all. Only pages that the file backs are
released (proc_pid_pagemap(5), bit 61), never a page that was written to in a private mapping.
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
_ENTRY_BYTES = 8  # bytes in /proc/self/pagemap for each page
_FILE_BACKED = np.uint64(1 << 61)
_HAS_MEMORY = np.uint64(3 << 62)  # the page is present, or swapped out
_LEAST_BYTES = 1 << 16  # bytes; releasing less is not worth two system calls


class MappedFiles:
    """The address ranges of files that are mapped into this process at the moment; empty on systems other
    than Linux.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        if _madvise() is not None:
            for start, end in _mapped_ranges():
                self._starts.append(start)
                self._ends.append(end)

    @property
    def supported(self) -> bool:
        """Whether the operating system reports mapped files and allows their release."""
        return _madvise() is not None

    def contains(self, address: int, nbytes: int) -> bool:
        """Return whether all ``nbytes`` bytes from ``address`` lie in a mapped file."""
        index = bisect.bisect_right(self._starts, address) - 1
        return index >= 0 and address + nbytes <= self._ends[index]

    def release(self, address: int, nbytes: int) -> None:
        """Release the memory of the whole pages in the range; do nothing if they do not belong to a mapped
        file.
        """
        if nbytes < _LEAST_BYTES or not self.contains(address, nbytes):
            return
        start = -(-address // _PAGE) * _PAGE
        size = (address + nbytes) // _PAGE * _PAGE - start
        madvise = _madvise()
        if size <= 0 or madvise is None or not _is_file_backed(start, size):
            return
        madvise(start, size, mmap.MADV_DONTNEED if hasattr(mmap, "MADV_DONTNEED") else 4)


@cache
def _madvise() -> Callable[[int, int, int], int] | None:
    """Return the C library's madvise, or None where it or /proc/self/pagemap is not available."""
    if not sys.platform.startswith("linux") or not Path("/proc/self/pagemap").exists():
        return None
    try:
        found: Any = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    found.argtypes, found.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_int
    return found


def _mapped_ranges() -> list[tuple[int, int]]:
    """Return (start, end) of every mapped file in order of addresses; adjacent mappings are joined."""
    found: list[tuple[int, int]] = []
    try:
        lines = Path("/proc/self/maps").read_text("utf-8", errors="replace").split("\n")
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


def _is_file_backed(start: int, size: int) -> bool:
    """Return whether every page in the range that has memory is backed by the file, not a private copy after
    a write.
    """
    expected = size // _PAGE * _ENTRY_BYTES
    try:
        handle = os.open("/proc/self/pagemap", os.O_RDONLY)
        try:
            entries = (
                os.pread(handle, expected, start // _PAGE * _ENTRY_BYTES) if hasattr(os, "pread") else b""
            )
        finally:
            os.close(handle)
    except OSError:
        return False
    if len(entries) != expected:
        return False
    pages = np.frombuffer(entries, np.uint64)
    return not bool(np.any(((pages & _HAS_MEMORY) != 0) & ((pages & _FILE_BACKED) == 0)))
