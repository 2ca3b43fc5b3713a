"""Is a lossless blob one that an encoder can have written? What a checksum cannot say of a file that was made on purpose.

The tile table must say of every tile what its bit planes hold. Looked at run by run, as the bytes come.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from .lossless_escapes import ones_of
from .lossless_format import MOST_SHIFT, OFFSET_BITS, WIDE_BIT, Header
from .packed import corrupt

_AT_ONCE = 1 << 22  # elements whose bit planes are looked at together


@dataclass(slots=True)
class Tiles:
    """What a run of a blob's bytes shows: ``counts`` of escapes and the ``most`` of any lane of the tiles from ``first``
    on, that lie in it whole; ``edges``: (place in the bit planes, bytes) of others; and its part of the tile table."""

    first: int
    counts: np.ndarray  # int64 [tiles]
    most: np.ndarray  # uint8 [tiles]
    edges: list[tuple[int, np.ndarray]] = field(default_factory=list)
    table: bytes = b""


def look(header: Header, data: np.ndarray, begin: int) -> Tiles:
    """Of ``data`` (uint8), the blob's bytes from ``begin`` on. Costs one pass over its bit planes; keeps none of it."""
    size, end = _tile_bytes(header), begin + len(data)
    low, high = max(begin, header.bits_at), min(end, header.tiles_at)
    first, last = -(-(low - header.bits_at) // size), (high - header.bits_at) // size
    whole = first < last and low < high
    if not whole:
        first = last = 0
    at = header.bits_at - begin
    counts, most = _count(header, data[at + first * size : at + last * size] if whole else data[:0])
    edges = (
        [(low, header.bits_at + first * size), (header.bits_at + last * size, high)]
        if whole
        else [(low, high)]
    )
    rest = slice(max(header.tiles_at - begin, 0), max(header.tiles_at + 8 * header.tiles - begin, 0))
    return Tiles(
        first, counts, most,
        [(a - header.bits_at, data[a - begin : b - begin].copy()) for a, b in edges if a < b],
        data[rest].tobytes(),
    )  # fmt: skip


def compare(header: Header, found: Iterable[Tiles], name: str) -> None:
    """Raises WeightsError naming ``name`` unless the runs ``found``, which in their order are the whole blob, show that every
    tile's escapes lie where a decoder will look."""
    size = _tile_bytes(header)
    counts, most = np.zeros(header.tiles, np.int64), np.zeros(header.tiles, np.uint8)
    table, cut = bytearray(), dict[int, np.ndarray]()
    for run in found:
        mine = slice(run.first, run.first + len(run.counts))
        counts[mine], most[mine] = run.counts, run.most
        table += run.table
        for at, data in run.edges:
            while len(data):
                tile, within = divmod(at, size)
                part = data[: size - within]
                cut.setdefault(tile, np.zeros(size, np.uint8))[within : within + len(part)] = part
                at, data = at + len(part), data[len(part) :]
    for tile, data in cut.items():
        (counts[tile],), (most[tile],) = _count(header, data)
    _compare(header, counts, most, np.frombuffer(bytes(table), "<u8"), name)


def check_tiles(blob: np.ndarray, header: Header, name: str) -> None:
    """`compare` of a blob (uint8) that is there whole."""
    compare(header, [look(header, blob, 0)], name)


def _tile_bytes(header: Header) -> int:
    """Of a tile's bit planes."""
    return header.planes * header.lanes * 4


def _count(header: Header, data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(escapes, int64; the most of any lane, uint8) of each of the tiles whose bit planes are ``data``."""
    bits = data.view(np.uint32).reshape(-1, header.planes, header.lanes)
    counts, most = np.empty(len(bits), np.int64), np.empty(len(bits), np.uint8)
    step = max(1, _AT_ONCE // header.tile)
    for first in range(0, len(bits), step):
        part = slice(first, first + step)
        by_lane = ones_of(np.bitwise_and.reduce(bits[part, : header.k], axis=1))
        counts[part], most[part] = by_lane.sum(1, dtype=np.int64), by_lane.max(1)
    return counts, most


def _compare(header: Header, counts: np.ndarray, most: np.ndarray, table: np.ndarray, name: str) -> None:
    wide = (table >> np.uint64(WIDE_BIT) & np.uint64(1)).astype(np.int64)
    sizes = ((counts << wide) + 1) >> 1
    ends = np.cumsum(sizes)
    # Bits that mean nothing are to be zero.
    right = (ends - sizes) | wide << WIDE_BIT | most.astype(np.int64) << MOST_SHIFT
    if (
        int(ends[-1]) != header.escape_bytes
        or int(ends[-1]) >> OFFSET_BITS
        or (right != table.astype(np.int64)).any()
        or int(most.max()) != header.most_escapes
    ):
        raise corrupt(name, "its tile table does not fit its escapes")
