"""Division of units' bytes into pieces that fit the host cache's buffers, and the file reads that fill each
piece.

A unit is a module whose weights are copied to the device together. A piece is read from disk, kept, evicted
and copied to the device as a whole. If everything fits into RAM, each piece has a buffer of its own size.
Otherwise all buffers have the same size, so that any piece fits into any buffer, and the bound on RAM is
exact to the byte, without fragmentation. This file is plain Python without I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..checkpoint.direct_io import ALIGN
from ..checkpoint.file_read import FileRead
from ..checkpoint.header import show
from ..checkpoint.index import TensorEntry
from ..checkpoint.segments import Segment
from ..common.errors import BudgetError
from ..common.huge_pages import HUGE
from ..common.sizes import MIB, format_size

# Bytes; large enough for the full rate of disk and link, small enough that copies begin early.
WHOLE_PIECE = 64 * MIB
STREAMED_PIECE = 32 * MIB
# The buffers for reading ahead: as many as hold `READ_AHEAD_BYTES`, or `ROTATING`, whichever is more.
READ_AHEAD_BYTES = 64 * MIB
ROTATING = 4
# The most of them, as a share of the pieces that are read in every pass. A buffer for reading ahead keeps nothing
# from one pass to the next, so this is also how far the reads exceed the least possible number of reads.
READ_AHEAD_SHARE = 0.05
LEAST_BUFFERS = 2
# Buffers into which a budget is divided: first choice, and for budgets of fewer pages.
_SHARES = (40, 8, 4, 2)


@dataclass(frozen=True, eq=False)
class CachePiece:
    """A piece of a unit's weights: bytes ``start`` to ``start + nbytes`` of unit number ``unit``.

    ``number``: the position in the unit. ``rank``: the position in the order of all pieces. ``reads``: the
    file reads that fill the piece.
    """

    unit: int
    number: int
    rank: int
    start: int
    nbytes: int
    reads: tuple[FileRead, ...]

    def within(self, spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the parts of the unit's ``spans`` (start, end) that lie in the piece, relative to the
        piece's start.
        """
        parts = ((max(low - self.start, 0), min(high - self.start, self.nbytes)) for low, high in spans)
        return [(start, end) for start, end in parts if start < end]


@dataclass(frozen=True)
class PlacedTensor:
    """A tensor's position in its unit's bytes: byte ``at`` onwards, filled from ``segments`` of the
    checkpoint's files.
    """

    at: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class BufferPlan:
    """The division of a RAM budget into ``count`` buffers of at most ``nbytes`` bytes.

    ``rotating``: the number of buffers that are used for reading ahead. ``whole``: everything fits, so each
    piece has a buffer of its own size and nothing is ever evicted.
    """

    count: int
    nbytes: int
    rotating: int
    whole: bool


def choose_buffers(sizes: Sequence[int], ram: int) -> BufferPlan:
    """Return how to divide ``ram`` bytes into read buffers for units (modules streamed as a whole) of
    ``sizes`` bytes.

    Raises BudgetError if ``ram`` is less than two pieces of a page each.
    """
    total = sum(_pages(size) for size in sizes)
    if total <= ram:
        count = sum(-(-size // WHOLE_PIECE) for size in sizes)
        return BufferPlan(count, max(ALIGN, min(WHOLE_PIECE, _pages(max(sizes, default=0)))), 0, True)
    least = LEAST_BUFFERS * ALIGN
    if ram < least:
        raise BudgetError(
            f"ram={format_size(ram)} is too small to stream from disk: two pieces of {ALIGN} bytes must fit; the "
            f"least budget that works is {least} bytes",
            least,
        )
    # With many buffers, those for reading ahead are a small part; use fewer only if they were less than a page.
    upper = next(u for u in (min(STREAMED_PIECE, ram // share // ALIGN * ALIGN) for share in _SHARES) if u)
    nbytes = _least_waste(sizes, upper)
    pieces = sum(-(-size // nbytes) for size in sizes)
    count = min(ram // nbytes, pieces)
    most = max(ROTATING, -(-READ_AHEAD_BYTES // nbytes))
    rotating = min(count, max(LEAST_BUFFERS, min(most, int(READ_AHEAD_SHARE * (pieces - count)))))
    return BufferPlan(count, nbytes, rotating, False)


def _least_waste(sizes: Sequence[int], upper: int) -> int:
    """Return the buffer size, from ``upper`` / 2 to ``upper`` bytes, that leaves the least bytes of the last
    buffers unused.

    Each of the units, of ``sizes`` bytes, is divided into buffers of that size. Of equally good sizes,
    returns the largest. Large sizes are multiples of a huge page, because drives read faster into huge pages
    (see `common/huge_pages.py`).
    """
    grain = HUGE if upper >= 8 * HUGE else ALIGN
    candidates = {upper // grain * grain}
    for size in sorted(set(sizes), reverse=True)[:64]:
        count = -(-size // upper)
        while count and size // count >= upper // 2 and len(candidates) < 512:
            candidates.add(min(upper // grain * grain, -(-size // count // grain) * grain))
            count += 1
    return min(candidates, key=lambda c: (sum(-(-size // c) for size in sizes) * c, -c))


def _pages(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to whole pages."""
    return -(-nbytes // ALIGN) * ALIGN


def cut(units: Sequence[tuple[int, Sequence[PlacedTensor]]], nbytes: int) -> list[list[CachePiece]]:
    """Cut units, given as (bytes, their tensors), into pieces of at most ``nbytes`` bytes (whole pages); one
    list a unit, empty for a unit of 0 bytes.
    """
    pieces: list[list[CachePiece]] = []
    rank = 0
    for unit, (size, tensors) in enumerate(units):
        if not size:
            pieces.append([])
            continue
        reads = file_reads(tensors)
        count = -(-size // nbytes)
        # Make the pieces equally long: a short last piece would leave its buffer half empty.
        piece_bytes = max(ALIGN, _pages(-(-size // count)))
        pieces_of_unit: list[CachePiece] = []
        for number, start in enumerate(range(0, size, piece_bytes)):
            end = min(size, start + piece_bytes)
            pieces_of_unit.append(
                CachePiece(unit, number, rank, start, end - start, _within(reads, start, end))
            )
            rank += 1
        pieces.append(pieces_of_unit)
    return pieces


def file_reads(tensors: Iterable[PlacedTensor]) -> list[FileRead]:
    """Return the reads that fill a whole unit, in order of their bytes; ranges that are adjacent in file and
    unit are joined.
    """
    reads: list[FileRead] = []
    for tensor in sorted(tensors, key=lambda t: t.at):
        for segment in tensor.segments:
            entry: TensorEntry = segment.entry
            if segment.nbytes == 0:
                continue
            at = tensor.at + segment.at
            name = show(entry.name)
            read = FileRead(entry.file, entry.offset + segment.start, segment.nbytes, at, name)
            last = reads[-1] if reads else None
            # A file that `carom pack` wrote has the same padding between tensors as the unit, so the padding
            # is read along.
            if (
                last is not None
                and last.file == read.file
                and 0 <= read.offset - (last.offset + last.nbytes) < ALIGN
                and read.offset - last.offset == read.at - last.at
            ):
                length = read.offset + read.nbytes - last.offset
                first = last.label.split(" to ")[0]
                reads[-1] = FileRead(last.file, last.offset, length, last.at, f"{first} to {name}")
            else:
                reads.append(read)
    return reads


def _within(reads: Sequence[FileRead], start: int, end: int) -> tuple[FileRead, ...]:
    """Return the parts of ``reads`` between bytes ``start`` and ``end`` of the unit, with positions relative
    to ``start``.
    """
    parts = []
    for read in reads:
        first, last = max(read.at, start), min(read.at + read.nbytes, end)
        if first < last:
            offset = read.offset + first - read.at
            parts.append(FileRead(read.file, offset, last - first, first - start, read.label))
    return tuple(parts)
