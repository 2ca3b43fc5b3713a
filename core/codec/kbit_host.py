"""Block-wise codebook quantisation (NF4, NF3, NF2; LOSSY) with NumPy on several CPU threads, in chunks that
fit the cache.

Writes the same bytes as `kbit.quantize_torch`. A value's code is the number of midpoints between codebook
values that are below the value; comparing with each midpoint is ten times faster than a binary search.
"""

from __future__ import annotations

from concurrent.futures import Executor
from typing import TYPE_CHECKING

import numpy as np

from .scratch import scratch

if TYPE_CHECKING:
    from .kbit import Layout

CHUNK = 1 << 17  # elements that a thread quantises at a time; a multiple of every block size
# Multiplying a uint64 by this gathers the lowest bit of each of its 8 bytes in the highest byte.
_GATHER_BITS = np.uint64(0x0102040810204080)
_ONES = np.uint64(0x0101010101010101)


def quantize_host(raw: np.ndarray, layout: Layout, blob: np.ndarray, smallest: float, pool: Executor) -> bool:
    """Write codes and scales of ``raw`` (1-D; bf16 as uint16, float16 or float32) into ``blob`` (zeros), on
    ``pool``'s threads.

    Blocks whose largest magnitude is below ``smallest`` are stored as zeros. Returns False if a value is not
    finite.
    """
    values = np.array(layout.codebook.values, np.float32)
    middles = (values[1:] + values[:-1]) / np.float32(2)
    quantize_chunk = _ChunkQuantizer(raw, layout, blob, np.float32(smallest), middles)
    return all(list(pool.map(quantize_chunk, range(0, len(raw), CHUNK))))


class _ChunkQuantizer:
    """A task that quantises one chunk, the `CHUNK` elements from a given start; returns False if a value is
    not finite.
    """

    def __init__(
        self, raw: np.ndarray, layout: Layout, blob: np.ndarray, smallest: np.float32, middles: np.ndarray
    ) -> None:
        self.raw, self.layout, self.blob, self.smallest, self.middles = raw, layout, blob, smallest, middles
        self.scales = blob[layout.scales_at :].view(np.float32)

    def __call__(self, start: int) -> bool:
        block = self.layout.block
        part = self.raw[start : start + CHUNK]
        padded = -(-len(part) // block) * block
        flat = scratch("values", padded, np.float32)
        if part.dtype == np.uint16:  # A bf16 number is the upper half of a float32.
            bits = flat.view(np.uint32)
            np.copyto(bits[: len(part)], part)
            np.left_shift(bits[: len(part)], np.uint32(16), out=bits[: len(part)])
        else:
            np.copyto(flat[: len(part)], part)
        flat[len(part) :] = 0
        blocks = flat.reshape(-1, block)
        size = scratch("sizes", padded, np.float32)
        np.abs(flat, out=size)
        scale = size.reshape(-1, block).max(1)
        if not np.isfinite(scale).all():
            return False
        scale[scale < self.smallest] = 0
        self.scales[start // block : start // block + len(scale)] = scale
        zero = scale == 0
        if zero.any():
            blocks[zero] = 0
        np.divide(blocks, np.where(zero, np.float32(1), scale)[:, None], out=blocks)
        codes, above = scratch("codes", padded, np.uint8), scratch("above", padded, np.bool_)
        codes[:] = 0
        for middle in self.middles:
            np.greater(flat, middle, out=above)
            np.add(codes, above.view(np.uint8), out=codes)
        self._pack(codes[: -(-len(part) // 8) * 8], start // 8)
        return True

    def _pack(self, codes: np.ndarray, first: int) -> None:
        """Write ``codes`` (uint8) into the blob, starting with group number ``first`` (8 elements each)."""
        bits, groups = self.layout.codebook.bits, len(codes) // 8
        if bits == 4:
            pairs = codes.view("<u2")
            self.blob[first * 4 : (first + groups) * 4] = (pairs << 4 | pairs >> 8).astype(np.uint8)
        elif bits == 2:
            fours = codes.view("<u4")
            joined = fours | fours >> 6 | fours >> 12 | fours >> 18
            self.blob[first * 2 : (first + groups) * 2] = joined.astype(np.uint8)
        else:
            eights = codes.view("<u8")
            for plane in range(3):
                at = plane * self.layout.plane_stride + first
                gathered = (eights >> np.uint64(plane) & _ONES) * _GATHER_BITS >> np.uint64(56)
                self.blob[at : at + groups] = gathered.astype(np.uint8)
