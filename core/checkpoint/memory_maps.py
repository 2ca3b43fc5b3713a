"""Which files are mapped into this process, and which pages are still the file's (Linux).

proc_pid_maps(5) lists the mappings. A page of a private mapping that the process wrote to is no longer the file's;
proc_pid_pagemap(5), bit 61, tells these pages apart.
"""

from __future__ import annotations

import mmap
import sys
from dataclasses import dataclass

import numpy as np

PAGE = mmap.PAGESIZE
_ENTRY_BYTES = 8  # bytes in /proc/self/pagemap for each page
_FILE_BACKED = np.uint64(1 << 61)
_HAS_MEMORY = np.uint64(3 << 62)  # the page is present, or swapped out


@dataclass(frozen=True)
class MappedFile:
    """The addresses ``start`` to ``end`` hold the bytes of the file ``path`` from byte ``offset``."""

    start: int
    end: int
    offset: int
    inode: int
    path: str


def mapped_files() -> list[MappedFile]:
    """Return all mapped regular files in order of addresses, none on systems other than Linux. Mappings of a file that
    continue each other are joined.
    """
    found: list[MappedFile] = []
    if not sys.platform.startswith("linux"):
        return found
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
            lines = maps.read().split("\n")  # `splitlines` would also split at form feeds in paths
    except OSError:
        return found
    for line in lines:
        parts = line.split(maxsplit=5)
        if len(parts) < 6 or parts[4] == "0" or not parts[5].startswith("/") or parts[5].startswith("/dev/"):
            continue
        start, end = (int(part, 16) for part in parts[0].split("-"))
        offset, inode, path = int(parts[2], 16), int(parts[4]), parts[5]
        last = found[-1] if found else None
        continues = last and (last.end, last.inode, last.path) == (start, inode, path)
        if last and continues and last.offset + last.end - last.start == offset:
            found[-1] = MappedFile(last.start, end, last.offset, inode, path)
        else:
            found.append(MappedFile(start, end, offset, inode, path))
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
