"""PURE: units cut into pieces that a host buffer holds, and the few reads that fill each of them.

A piece is what is read from disk, kept, given up and copied to the device as one. Where everything fits into RAM
each piece has a buffer of its own size; where it does not, all buffers are of one size, so that any piece fits into
any of them and the bound holds to the byte without fragments.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..errors import BudgetError
from ..sizes import MIB, format_size
from .header import show
from .index import SourceFile, TensorEntry
from .mapping import Segment
from .memory import HUGE
from .packed_source import PackedSource
from .rawio import ALIGN

WHOLE_PIECE = 64 * MIB  # bytes; large enough for full link and disk rate, small enough to start copying early
STREAMED_PIECE = 32 * MIB
AHEAD = 64 * MIB  # bytes that reads ahead may occupy beyond the four buffers there always are
ROTATING = 4  # buffers that always rotate where not everything fits
LEAST_BUFFERS = 2


@dataclass(frozen=True, slots=True)
class Read:
    """``nbytes`` bytes at ``offset`` of ``file`` go to byte ``at`` of the piece. ``what`` names them in errors."""

    file: SourceFile
    offset: int
    nbytes: int
    at: int
    what: str

    @property
    def disk_bytes(self) -> int:
        """What the drive reads for it: of a packed tensor its share of the blob."""
        if isinstance(self.file, PackedSource):
            return -(-self.nbytes * self.file.stored.nbytes // max(1, self.file.size))
        return self.nbytes


@dataclass(frozen=True, eq=False)
class Piece:
    """Bytes ``start`` to ``start + nbytes`` of unit ``unit``; ``rank``: its place in the order of all pieces."""

    unit: int
    number: int
    rank: int
    start: int
    nbytes: int
    reads: tuple[Read, ...]

    def within(self, spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """The parts of the unit's ``spans`` (start, end) that lie in the piece, from its start."""
        parts = ((max(low - self.start, 0), min(high - self.start, self.nbytes)) for low, high in spans)
        return [(start, end) for start, end in parts if start < end]


@dataclass(frozen=True)
class Placed:
    """A tensor's bytes within its unit: byte ``at`` onwards, from ``segments`` of the checkpoint."""

    at: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class Buffers:
    """``count`` host buffers of at most ``nbytes`` bytes; ``rotating`` of them are for reading ahead.

    ``whole``: everything fits, each piece has a buffer of its own size and nothing is ever given up.
    """

    count: int
    nbytes: int
    rotating: int
    whole: bool


def choose_buffers(sizes: Sequence[int], ram: int) -> Buffers:
    """How ``ram`` bytes are divided for units of ``sizes`` bytes. Raises BudgetError below two pieces of a page each."""
    total = sum(_pages(size) for size in sizes)
    if total <= ram:
        count = sum(-(-size // WHOLE_PIECE) for size in sizes)
        return Buffers(count, min(WHOLE_PIECE, _pages(max(sizes, default=0))), 0, True)
    least = LEAST_BUFFERS * ALIGN
    if ram < least:
        raise BudgetError(
            f"ram={format_size(ram)} is too small to stream from disk: two pieces of {ALIGN} bytes must fit; the "
            f"least budget that works is {least} bytes",
            least,
        )
    # An eighth of the budget, so that half of the buffers can keep what they hold; less only where that is under a page.
    upper = next(u for u in (min(STREAMED_PIECE, ram // share // ALIGN * ALIGN) for share in (8, 4, 2)) if u)
    nbytes = _least_waste(sizes, upper)
    count = min(ram // nbytes, sum(-(-size // nbytes) for size in sizes))
    rotating = min(count, max(ROTATING, min(count // 2, -(-AHEAD // nbytes))))
    return Buffers(count, nbytes, rotating, False)


def _least_waste(sizes: Sequence[int], upper: int) -> int:
    """The buffer size of ``upper`` / 2 to ``upper`` in which the units leave the least unused; the largest of equals.
    Large ones are whole huge pages: drives read faster into those (`memory`)."""
    grain = HUGE if upper >= 8 * HUGE else ALIGN
    candidates = {upper // grain * grain}
    for size in sorted(set(sizes), reverse=True)[:64]:
        count = -(-size // upper)
        while count and size // count >= upper // 2 and len(candidates) < 512:
            candidates.add(min(upper // grain * grain, -(-size // count // grain) * grain))
            count += 1
    return min(candidates, key=lambda c: (sum(-(-size // c) for size in sizes) * c, -c))


def _pages(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def cut(units: Sequence[tuple[int, Sequence[Placed]]], nbytes: int) -> list[list[Piece]]:
    """Pieces of at most ``nbytes`` bytes (whole pages) of units given as (bytes, their tensors)."""
    pieces: list[list[Piece]] = []
    rank = 0
    for unit, (size, tensors) in enumerate(units):
        reads = _reads(tensors)
        count = max(1, -(-size // nbytes))
        # Even pieces: with the last one short, its buffer would be half empty.
        each = max(ALIGN, _pages(-(-size // count)))
        mine: list[Piece] = []
        for number, start in enumerate(range(0, max(size, 1), each)):
            end = min(size, start + each)
            mine.append(Piece(unit, number, rank, start, end - start, _within(reads, start, end)))
            rank += 1
        pieces.append(mine)
    return pieces


def _reads(tensors: Iterable[Placed]) -> list[Read]:
    """Reads for a whole unit, in order of their bytes; ranges that follow one another in file and memory are one."""
    reads: list[Read] = []
    for tensor in sorted(tensors, key=lambda t: t.at):
        for segment in tensor.segments:
            entry: TensorEntry = segment.entry
            if segment.nbytes == 0:
                continue
            at = tensor.at + segment.at
            name = show(entry.name)
            read = Read(entry.file, entry.offset + segment.start, segment.nbytes, at, name)
            last = reads[-1] if reads else None
            # A packed file has the same padding between tensors as the unit: it is read along.
            if (
                last is not None
                and last.file == read.file
                and 0 <= read.offset - (last.offset + last.nbytes) < ALIGN
                and read.offset - last.offset == read.at - last.at
            ):
                length = read.offset + read.nbytes - last.offset
                first = last.what.split(" to ")[0]
                reads[-1] = Read(last.file, last.offset, length, last.at, f"{first} to {name}")
            else:
                reads.append(read)
    return reads


def _within(reads: Sequence[Read], start: int, end: int) -> tuple[Read, ...]:
    """The parts of ``reads`` between bytes ``start`` and ``end`` of the unit, placed from ``start``."""
    found = []
    for read in reads:
        first, last = max(read.at, start), min(read.at + read.nbytes, end)
        if first < last:
            offset = read.offset + first - read.at
            found.append(Read(read.file, offset, last - first, first - start, read.what))
    return tuple(found)
