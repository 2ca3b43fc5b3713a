"""Defines `MappedViews`: finds the file and offset of tensors that are views of a memory-mapped file (Linux,
Windows).

Loaders of safetensors files (safetensors itself, transformers, diffusers, ComfyUI) map the file into memory, and
the tensors are views of the mapping. Their bytes are then in the file, at a known offset, and can be read from
there past the page cache.
"""

from __future__ import annotations

import bisect
import contextlib
import os
from dataclasses import dataclass

import torch

from .direct_io import open_raw
from .index import SourceFile
from .memory_maps import MappedFile, mapped_files

_SAMPLE = 64  # bytes at each end of a tensor that are compared with the file


@dataclass(frozen=True)
class FileRange:
    """``nbytes`` bytes of ``file`` from byte ``offset``."""

    file: SourceFile
    offset: int
    nbytes: int


class MappedViews:
    """The files that are mapped into this process at the time of the call; none on systems other than Linux
    and Windows."""

    def __init__(self) -> None:
        self._mappings = mapped_files()
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
        if address + nbytes > mapping.end or file is None or mapping.offset is None:
            return None
        offset = mapping.offset + address - mapping.start
        if offset + nbytes > file.size:
            return None
        if not mapping.is_unwritten(address, nbytes) or not _same_bytes(tensor, file, offset):
            return None
        return FileRange(file, offset, nbytes)

    def _file(self, mapping: MappedFile) -> SourceFile | None:
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


def _same_bytes(tensor: torch.Tensor, file: SourceFile, offset: int) -> bool:
    """Return whether the first and last bytes of ``tensor`` are those of the file at ``offset``."""
    flat = memory_of(tensor).numpy()
    size = min(_SAMPLE, len(flat))
    try:
        # Not by `open`: on Windows it fails for a spill file, which is opened with the right to delete it.
        with contextlib.closing(open_raw(file.path, direct=False)) as opened:
            file.check(opened.stat())
            read = memoryview(bytearray(size))
            for at in (0, len(flat) - size):
                if opened.read_into(read, offset + at) != size or read != flat[at : at + size].data:
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
