"""Which files are mapped into this process, and which pages are still the file's (Linux, Windows).

On Linux, proc_pid_maps(5) lists the mappings. A page of a private mapping that the process wrote to is no longer the
file's; proc_pid_pagemap(5), bit 61, tells these pages apart. `memory_maps_windows` has the calls for Windows.
"""

from __future__ import annotations

import itertools
import mmap
import os
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

PAGE = mmap.PAGESIZE
_MAPS = "/proc/self/maps"
_ENTRY_BYTES = 8  # bytes in /proc/self/pagemap for each page
_FILE_BACKED = np.uint64(1 << 61)
_HAS_MEMORY = np.uint64(3 << 62)  # the page is present, or swapped out


@dataclass(frozen=True)
class MappedFile:
    """The addresses ``start`` to ``end`` hold the bytes of the file ``path`` from byte ``offset``.

    ``offset``: None where the system does not tell it. ``read_only``: address ranges that the process must not write to.
    ``copied``: address ranges of pages that are private copies, because the process wrote to them. It is None on Linux,
    where `is_unwritten` asks the system each time.
    """

    start: int
    end: int
    offset: int | None
    inode: int
    path: str
    read_only: tuple[tuple[int, int], ...] = ()
    copied: tuple[tuple[int, int], ...] | None = None

    def is_unwritten(self, address: int, nbytes: int) -> bool:
        """Return whether no page of the ``nbytes`` bytes from ``address`` is a private copy that was made by a write."""
        if self.copied is None:
            return is_unwritten(address, nbytes)
        return not any(start < address + nbytes and address < end for start, end in self.copied)


def lists_files() -> bool:
    """Return whether the system tells which files are mapped."""
    return sys.platform == "win32" or os.path.exists(_MAPS)


def mapped_files() -> list[MappedFile]:
    """Return all mapped regular files in order of addresses, none on systems other than Linux and Windows. Mappings of a
    file that continue each other are joined.
    """
    if sys.platform == "win32":
        from . import memory_maps_windows

        return windows_files(memory_maps_windows.load_kernel32())
    return _linux_files()


def _linux_files() -> list[MappedFile]:
    found: list[MappedFile] = []
    try:
        with open(_MAPS, encoding="utf-8", errors="surrogateescape") as maps:
            lines = maps.read().split("\n")  # `splitlines` would also split at form feeds in paths
    except OSError:
        return found
    for line in lines:
        parts = line.split(maxsplit=5)
        if len(parts) < 6 or parts[4] == "0" or not parts[5].startswith("/") or parts[5].startswith("/dev/"):
            continue
        start, end = (int(part, 16) for part in parts[0].split("-"))
        offset, inode, path = int(parts[2], 16), int(parts[4]), parts[5]
        read_only = () if "w" in parts[1] else ((start, end),)
        last = found[-1] if found else None
        continues = last and (last.end, last.inode, last.path) == (start, inode, path)
        if last and continues and last.offset is not None and last.offset + last.end - last.start == offset:
            found[-1] = MappedFile(last.start, end, last.offset, inode, path, (*last.read_only, *read_only))
        else:
            found.append(MappedFile(start, end, offset, inode, path, read_only))
    return found


def windows_files(kernel32: Any) -> list[MappedFile]:
    """Return the mapped files that Windows lists. ``kernel32``: what `memory_maps_windows.load_kernel32` returns.

    Windows does not tell at which byte of its file a view begins. A view of as many pages as the file has begins at
    byte 0; loaders of weights map the whole file. The offset of another view is None.
    """
    from .memory_maps_windows import drive_letters, file_at, mapped_regions

    found = []
    drives = drive_letters(kernel32)
    for view, group in itertools.groupby(mapped_regions(kernel32), lambda region: region.view):
        regions = list(group)
        start, end = regions[0].start, regions[-1].end
        path = file_at(kernel32, view, drives)
        if path is None:
            continue
        try:
            status = os.stat(path)
        except OSError:
            continue
        offset = 0 if end - start == -(-status.st_size // PAGE) * PAGE else None
        copied = tuple((region.start, region.end) for region in regions if region.copied)
        read_only = tuple((region.start, region.end) for region in regions if not region.writable)
        found.append(MappedFile(start, end, offset, status.st_ino, path, read_only, copied))
    return found


def is_unwritten(address: int, nbytes: int) -> bool:
    """Return whether no page of the ``nbytes`` bytes from ``address``, all in mapped files, is a private copy that was
    made by a write. False if the system does not tell.
    """
    first, last = address // PAGE, -(-(address + nbytes) // PAGE)
    expected = (last - first) * _ENTRY_BYTES
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
            pagemap.seek(first * _ENTRY_BYTES)
            entries = pagemap.read(expected)
    except OSError:
        return False
    if len(entries) != expected:
        return False
    pages = np.frombuffer(entries, np.uint64)
    return not bool(np.any(((pages & _HAS_MEMORY) != 0) & ((pages & _FILE_BACKED) == 0)))
