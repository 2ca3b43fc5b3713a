"""Is a lossless blob safe to decode? What a checksum cannot say of a file that was made on purpose."""

from __future__ import annotations

import numpy as np

from .lossless_format import MOST_SHIFT, OFFSET_BITS, WIDE_BIT, Header
from .packed import corrupt


def check_tiles(blob: np.ndarray, header: Header, name: str) -> None:
    """Raises WeightsError unless every tile's escapes lie where a decoder will look, so that no decoder leaves the blob.

    A checksum cannot tell this of a file that was made on purpose. Costs one pass over the bit planes.
    """
    # bit_count of a uint32 needs NumPy 2; a table of bytes works everywhere.
    ones = np.array([bin(i).count("1") for i in range(256)], np.uint8)
    table = blob[header.tiles_at : header.tiles_at + 8 * header.tiles].copy().view("<u8")
    offsets = (table & np.uint64((1 << OFFSET_BITS) - 1)).astype(np.int64)
    wide = (table >> np.uint64(WIDE_BIT) & np.uint64(1)).astype(np.int64)
    most = (table >> np.uint64(MOST_SHIFT)).astype(np.int64)
    known = offsets | wide << WIDE_BIT | most << MOST_SHIFT
    bits = blob[header.bits_at : header.tiles_at].reshape(header.tiles, header.planes, header.lanes * 4)
    end = 0
    step = max(1, (1 << 22) // header.tile)
    for first in range(0, header.tiles, step):
        part = slice(first, first + step)
        mask = np.bitwise_and.reduce(bits[part, : header.k], axis=1)
        by_lane = ones[mask].reshape(len(mask), header.lanes, 4).sum(2, dtype=np.int64)
        sizes = ((by_lane.sum(1) << wide[part]) + 1) >> 1
        ends = end + np.cumsum(sizes)
        if (offsets[part] != ends - sizes).any() or (most[part] != by_lane.max(1)).any():
            raise corrupt(name, "its tile table does not fit its escapes")
        end = int(ends[-1])
    if (
        end != header.escape_bytes
        or (known != table.astype(np.int64)).any()
        or int(most.max()) != header.most_escapes
    ):
        raise corrupt(name, "its tile table does not fit its escapes")
