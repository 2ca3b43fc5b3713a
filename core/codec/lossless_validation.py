"""Validation that a lossless blob's tile table agrees with its bit planes.

The tile table says for every tile where its escapes lie and how many there are, and decoders rely on the
table. A checksum proves nothing about a hostile file, because its author can write a matching checksum. Blobs
are examined run by run, as their bytes are read, so that a blob need not be in memory as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from .blob_metadata import corrupt
from .lossless_escapes import popcount_uint32
from .lossless_format import LITERAL_SHIFT, MOST_SHIFT, OFFSET_BITS, SECOND_SHIFT, UNIT_BITS, WIDE_BIT, Header
from .lossless_second_codes import GROUP

_STEP_ELEMENTS = 1 << 22  # elements whose bit planes are examined at a time


@dataclass(slots=True)
class RunSummary:
    """The escape counts found in a run of a blob's bytes, together with the run's part of the blob's tile
    table.

    An escape is an element whose exponent has no code and is stored separately. A tile is a group of 32 *
    lanes elements; each of its lanes has 32 of them. ``counts`` and ``most``: for each tile that lies in the
    run as a whole, from tile ``first`` on, the number of escapes and the largest number in any lane.
    ``edges``: (byte offset in the bit planes, bytes) of tiles that the run contains in part. ``table``: the
    run's bytes of the tile table. ``escapes``: the run's bytes of the escapes, which are examined in version 2
    of the format only (empty otherwise).
    """

    first: int
    counts: np.ndarray  # int64 [tiles]
    most: np.ndarray  # uint8 [tiles]
    edges: list[tuple[int, np.ndarray]] = field(default_factory=list)
    table: bytes = b""
    escapes: bytes = b""


def summarize_run(header: Header, data: np.ndarray, begin: int) -> RunSummary:
    """Return the escape counts of a run of bytes of a blob: ``data`` (uint8) are the bytes from byte
    ``begin`` on.

    Passes once over the bit planes in the run; the result keeps no reference to ``data``.
    """
    size, end = _tile_bytes(header), begin + len(data)
    planes_begin, planes_end = max(begin, header.bits_at), min(end, header.tiles_at)
    first, last = -(-(planes_begin - header.bits_at) // size), (planes_end - header.bits_at) // size
    whole = first < last and planes_begin < planes_end
    if not whole:
        first = last = 0
    at = header.bits_at - begin
    counts, most = _count(header, data[at + first * size : at + last * size] if whole else data[:0])
    edges = (
        [(planes_begin, header.bits_at + first * size), (header.bits_at + last * size, planes_end)]
        if whole
        else [(planes_begin, planes_end)]
    )
    table = slice(max(header.tiles_at - begin, 0), max(header.tiles_at + 8 * header.tiles - begin, 0))
    escape_bytes = header.escape_bytes if header.kind.two_level else 0
    escapes = slice(max(header.escapes_at - begin, 0), max(header.escapes_at + escape_bytes - begin, 0))
    return RunSummary(
        first, counts, most,
        [(start - header.bits_at, data[start - begin : stop - begin].copy()) for start, stop in edges if start < stop],
        data[table].tobytes(), data[escapes].tobytes(),
    )  # fmt: skip


def check_runs(header: Header, runs: Iterable[RunSummary], name: str) -> None:
    """Raise WeightsError naming ``name`` unless the blob's tile table agrees with the escapes in its bit
    planes.

    ``runs``: the results of `summarize_run` for all parts of the blob, in their order. Decoders find a tile's
    escapes by the table.
    """
    size = _tile_bytes(header)
    counts, most = np.zeros(header.tiles, np.int64), np.zeros(header.tiles, np.uint8)
    table, escapes, divided = bytearray(), bytearray(), dict[int, np.ndarray]()
    for run in runs:
        tiles = slice(run.first, run.first + len(run.counts))
        counts[tiles], most[tiles] = run.counts, run.most
        table += run.table
        escapes += run.escapes
        for at, data in run.edges:
            while len(data):
                tile, within = divmod(at, size)
                part = data[: size - within]
                divided.setdefault(tile, np.zeros(size, np.uint8))[within : within + len(part)] = part
                at, data = at + len(part), data[len(part) :]
    for tile, data in divided.items():
        (counts[tile],), (most[tile],) = _count(header, data)
    entries = np.frombuffer(bytes(table), "<u8")
    if header.kind.two_level:
        fits = _fits_two_level(header, counts, entries.astype(np.int64), np.frombuffer(bytes(escapes), "<u4"))
    else:
        fits = _fits(header, counts, most, entries)
    if not fits:
        raise corrupt(name, "its tile table does not fit its escapes")


def check_tiles(blob: np.ndarray, header: Header, name: str) -> None:
    """Raise WeightsError naming ``name`` unless the tile table of ``blob`` (uint8, whole) agrees with its bit
    planes.
    """
    check_runs(header, [summarize_run(header, blob, 0)], name)


def _tile_bytes(header: Header) -> int:
    """Return the number of bytes that a tile's bit planes take."""
    return header.planes * header.lanes * 4


def _count(header: Header, data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (number of escapes, int64; largest number in a lane of 32 elements, uint8) for each tile.

    ``data``: the bit planes of whole tiles.
    """
    bits = data.view(np.uint32).reshape(-1, header.planes, header.lanes)
    counts, most = np.empty(len(bits), np.int64), np.empty(len(bits), np.uint8)
    step = max(1, _STEP_ELEMENTS // header.tile)
    for first in range(0, len(bits), step):
        part = slice(first, first + step)
        by_lane = popcount_uint32(np.bitwise_and.reduce(bits[part, : header.k], axis=1))
        counts[part], most[part] = by_lane.sum(1, dtype=np.int64), by_lane.max(1)
    return counts, most


def _fits(header: Header, counts: np.ndarray, most: np.ndarray, table: np.ndarray) -> bool:
    """Return whether ``table`` (uint64, one entry a tile) has exactly the entries that ``counts`` and ``most``
    imply.
    """
    wide = (table >> np.uint64(WIDE_BIT) & np.uint64(1)).astype(np.int64)
    sizes = ((counts << wide) + 1) >> 1
    ends = np.cumsum(sizes)
    # This compares whole entries, so unused bits must be zero.
    expected = (ends - sizes) | wide << WIDE_BIT | most.astype(np.int64) << MOST_SHIFT
    return (
        int(ends[-1]) == header.escape_bytes
        and not int(ends[-1]) >> OFFSET_BITS
        and not (expected != table.astype(np.int64)).any()
        and int(most.max()) == header.most_escapes
    )


def _fits_two_level(header: Header, counts: np.ndarray, table: np.ndarray, escapes: np.ndarray) -> bool:
    """Return whether ``table`` (int64, one entry a tile) has exactly the entries that ``counts`` and the second
    codes imply (version 2).

    ``escapes``: the escapes section as uint32.
    """
    seconds, literals = -(-counts // GROUP), table >> LITERAL_SHIFT
    ends = np.cumsum(seconds + 2 * literals)
    starts = ends - seconds - 2 * literals
    expected = starts | seconds << SECOND_SHIFT | literals << LITERAL_SHIFT
    if (literals < 0).any() or 8 * int(ends[-1]) != header.escape_bytes or int(ends[-1]) >> UNIT_BITS:
        return False
    if (expected != table).any():
        return False
    # The second codes of a tile whose bits are both set are the literals: count them by a prefix sum.
    low, high = escapes[0::2], escapes[1::2]
    before = np.zeros(len(low) + 1, np.int64)
    np.cumsum(popcount_uint32(low & high), dtype=np.int64, out=before[1:])
    found = before[starts + seconds] - before[starts]
    return not (-(-found // GROUP) != literals).any()
