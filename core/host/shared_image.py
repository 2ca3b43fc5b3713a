"""Defines `SharedImage`: bytes of weights files that the ranks of a machine hold in one shared copy in RAM.

For each file there is shared memory of the file's length, of which only the held ranges take RAM. A byte of the
file has the same offset in the shared memory, so the image does not depend on how a rank divides its model into
units. Each rank pins the held ranges for its own device; pinning copies nothing.
"""

from __future__ import annotations

import bisect
import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from ..checkpoint.direct_io import ALIGN
from ..checkpoint.file_read import FileRead
from ..checkpoint.index import SourceFile
from .arena import Block, HostArena
from .cache_pieces import CachePiece, PlacedTensor, file_reads
from .shared_memory import SharedMemory


@dataclass(eq=False)
class _Held:
    """The shared memory of one file. ``starts`` and ``ends``: the held ranges in order, without overlaps.

    ``blocks``: the pinned memory of the ranges.
    """

    memory: SharedMemory
    starts: list[int]
    ends: list[int]
    blocks: list[Block] = field(default_factory=list)

    def holds(self, offset: int, nbytes: int) -> bool:
        """Return whether one held range contains the bytes."""
        at = bisect.bisect_right(self.starts, offset) - 1
        return at >= 0 and offset + nbytes <= self.ends[at]


class SharedImage:
    """The file ranges that are in shared memory. Nothing is added once units stream from it.

    ``nbytes``: bytes of the held ranges. ``complete``: whether all weights of the model that are in files are held.
    """

    def __init__(self) -> None:
        self.complete = True
        self._files: dict[SourceFile, _Held] = {}
        self.nbytes = 0

    def add(self, file: SourceFile, memory: SharedMemory, ranges: Iterable[tuple[int, int]]) -> None:
        """Hold the byte ranges (start, end) of ``file``, which ``memory`` contains, and own ``memory``."""
        merged = merge_ranges(ranges)
        self._files[file] = _Held(memory, [start for start, _ in merged], [end for _, end in merged])
        self.nbytes += sum(end - start for start, end in merged)

    def pin(self, arena: HostArena) -> None:
        """Pin the held ranges for this process, as far as the arena allows. Idempotent."""
        for held in self._files.values():
            if not held.blocks:
                for start, end in zip(held.starts, held.ends, strict=True):
                    first = start // ALIGN * ALIGN
                    held.blocks.append(Block(held.memory.data[first:end], False, 0))
            for block in held.blocks:
                arena.pin(block)

    def view(self, file: SourceFile, offset: int, nbytes: int) -> torch.Tensor | None:
        """Return the bytes of ``file`` as uint8 host memory, or None if the image does not hold all of them."""
        held = self._files.get(file)
        if held is None or not held.holds(offset, nbytes):
            return None
        return held.memory.data[offset : offset + nbytes]

    def sample(self, nbytes: int) -> torch.Tensor:
        """Return the first ``nbytes`` bytes, or fewer, of the longest held range."""
        found = [
            held.memory.data[start:end]
            for held in self._files.values()
            for start, end in zip(held.starts, held.ends, strict=True)
        ]
        return max(found, key=len)[:nbytes]

    def copy_range(self, file: SourceFile, offset: int, nbytes: int, address: int) -> list[tuple[int, int]]:
        """Copy the bytes of ``file`` at ``offset`` to ``address`` if the image holds all of them. Return the file
        ranges that it does not hold, as (start, end).
        """
        found = self.view(file, offset, nbytes)
        if found is None:
            return [(offset, offset + nbytes)]
        ctypes.memmove(address, found.data_ptr(), nbytes)
        return []

    def cut(self, unit: int, placed: Sequence[PlacedTensor], rank: int) -> list[CachePiece] | None:
        """Return the pieces of unit number ``unit``, one for each range of a file, or None if the image does not
        hold all of its bytes.

        ``placed``: the unit's tensors. ``rank``: that of the first piece.
        """
        pieces = []
        for number, read in enumerate(file_reads(placed)):
            if self.view(read.file, read.offset, read.nbytes) is None:
                return None
            whole = FileRead(read.file, read.offset, read.nbytes, 0, read.label)
            pieces.append(CachePiece(unit, number, rank + number, read.at, read.nbytes, (whole,)))
        return pieces

    def bytes_of(self, piece: CachePiece) -> torch.Tensor:
        """Return the bytes of a piece that `cut` made."""
        (read,) = piece.reads
        found = self.view(read.file, read.offset, read.nbytes)
        assert found is not None
        return found

    def close(self) -> None:
        """Unpin the memory and let go of it. All copies to the device must be over."""
        for held in self._files.values():
            for block in held.blocks:
                block.unpin()
            held.memory.close()
        self._files.clear()
        self.nbytes = 0


def merge_ranges(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the ranges (start, end) in order, joined where the gap between two is less than a page."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if merged and start - merged[-1][1] < ALIGN:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged
