"""Defines `MappedViews`: finds the file and offset of tensors that are views of a memory-mapped file (Linux).

Loaders of safetensors files (safetensors itself, transformers, diffusers, ComfyUI) map the file into memory, and
the tensors are views of the mapping. Their bytes are then in the file, at a known offset, and can be read from
there past the page cache. proc_pid_maps(5) lists the mappings. A page of a private mapping that the process wrote
to is no longer the file's; proc_pid_pagemap(5), bit 61, tells these pages apart.
"""

from __future__ import annotations

import bisect
import contextlib
import mmap
import os
import sys
from dataclasses import dataclass

import numpy as np
import torch

from .index import SourceFile

_PAGE = mmap.PAGESIZE
_ENTRY_BYTES = 8  # bytes in /proc/self/pagemap for each page
_FILE_BACKED = np.uint64(1 << 61)
_HAS_MEMORY = np.uint64(3 << 62)  # the page is present, or swapped out
_SAMPLE = 64  # bytes at each end of a tensor that are compared with the file


@dataclass(frozen=True)
class FileRange:
    """``nbytes`` bytes of ``file`` from byte ``offset``."""

    file: SourceFile
    offset: int
    nbytes: int


@dataclass(frozen=True)
class _Mapping:
    """The addresses ``start`` to ``end`` hold the bytes of the file ``path`` from byte ``offset``."""

    start: int
    end: int
    offset: int
    inode: int
    path: str


class MappedViews:
    """The files that are mapped into this process at the time of the call; none on systems other than Linux."""

    def __init__(self) -> None:
        self._mappings = _mappings()
        self._starts = [mapping.start for mapping in self._mappings]
        self._files: dict[str, SourceFile | None] = {}

    def find(self, tensor: torch.Tensor) -> FileRange | None:
        """Return the range of a file that holds exactly the bytes of ``tensor``, or None.

        ``tensor``: on the CPU, with elements that fill a range of memory without gaps. None is returned if the
        memory is not that of a regular file, if the file was replaced since, or if a page of the range was
        written to.
        """
        nbytes = tensor.numel() * tensor.element_size()
        address = tensor.data_ptr() if nbytes else 0
        index = bisect.bisect_right(self._starts, address) - 1
        if not nbytes or index < 0:
            return None
        mapping = self._mappings[index]
        file = self._file(mapping)
        offset = mapping.offset + address - mapping.start
        if address + nbytes > mapping.end or file is None or offset + nbytes > file.size:
            return None
        if not _unwritten(address, nbytes) or not _same_bytes(tensor, file, offset):
            return None
        return FileRange(file, offset, nbytes)

    def _file(self, mapping: _Mapping) -> SourceFile | None:
        """Return the identity of the mapped file, or None if its path leads to another file now."""
        if mapping.path not in self._files:
            found = None
            with contextlib.suppress(OSError):
                status = os.stat(mapping.path)
                if status.st_ino == mapping.inode:
                    found = SourceFile(
                        mapping.path, status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev
                    )
            self._files[mapping.path] = found
        return self._files[mapping.path]


def _mappings() -> list[_Mapping]:
    """Return all mapped regular files in order of addresses. Mappings that continue each other are joined."""
    found: list[_Mapping] = []
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
            found[-1] = _Mapping(last.start, end, last.offset, inode, path)
        else:
            found.append(_Mapping(start, end, offset, inode, path))
    return found


def _unwritten(address: int, nbytes: int) -> bool:
    """Return whether no page of the range is a private copy that was made by a write."""
    first, last = address // _PAGE, -(-(address + nbytes) // _PAGE)
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


def _same_bytes(tensor: torch.Tensor, file: SourceFile, offset: int) -> bool:
    """Return whether the first and last bytes of ``tensor`` are those of the file at ``offset``."""
    flat = memory_of(tensor).numpy()
    size = min(_SAMPLE, len(flat))
    try:
        with open(file.path, "rb", buffering=0) as opened:
            file.check(os.fstat(opened.fileno()))
            for at in (0, len(flat) - size):
                opened.seek(offset + at)
                if opened.read(size) != flat[at : at + size].tobytes():
                    return False
    except Exception:
        return False
    return True


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a dense CPU tensor as a flat uint8 view, in the order of addresses."""
    with torch.no_grad():
        plain = tensor.detach()
        flat = torch.as_strided(plain, (plain.numel(),), (1,), plain.storage_offset())
        return flat.view(torch.uint8)
