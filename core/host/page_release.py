"""Release of file-backed memory pages that were copied, so that weights are not resident in memory twice
(Linux).

Checkpoint loaders memory-map files. A page that was read counts as the process's memory for as long as any
tensor of the file lives. So the page of a weight that Carom has copied to a block of its own counts until the
last weight of the file was copied. Linux reclaims such pages when it needs memory. Until then they count
against the memory limits of processes and containers, and in reports of the process's size.

A released page is read from the file again if a program reads it after all. Only pages that the file backs are
released, never a page that was written to in a private mapping.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from ..checkpoint.memory_maps import PAGE, is_unwritten, lists_files, mapped_files

_LEAST_BYTES = 1 << 16  # bytes; releasing less is not worth two system calls


class MappedFiles:
    """The address ranges of files that are mapped into this process at the moment; empty on systems other
    than Linux and Windows. Pages are released on Linux only.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for file in mapped_files():
            if self._ends and self._ends[-1] == file.start:
                self._ends[-1] = file.end
            else:
                self._starts.append(file.start)
                self._ends.append(file.end)

    @property
    def supported(self) -> bool:
        """Whether the operating system reports mapped files."""
        return lists_files()

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
        start = -(-address // PAGE) * PAGE
        size = (address + nbytes) // PAGE * PAGE - start
        madvise = _madvise()
        if size <= 0 or madvise is None or not is_unwritten(start, size):
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
