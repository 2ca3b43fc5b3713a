"""Positions of the escapes (exponents without a code) in a run of tiles, in order; used by the encoder and
the decoder on the CPU. A tile is a group of 32 * lanes elements, and a lane holds 32 of them.

NumPy finds set positions either by branches, which the processor mispredicts if few are set, or by
arithmetic, which is three times faster here. So the bytes of the mask that contain any escape are found
first, and then the bits among those bytes.
"""

from __future__ import annotations

import functools

import numpy as np

from .scratch import scratch

GAP = 8  # bytes after each tile's mask; their bits make the tile's number of set bits a multiple of 2 or 32
_ONES_OF_BYTE = np.array([bin(byte).count("1") for byte in range(256)], np.uint8)


def popcount_uint32(mask: np.ndarray) -> np.ndarray:
    """Return the number of set bits of each uint32."""
    if hasattr(np, "bitwise_count"):  # NumPy 2 and later
        return np.bitwise_count(mask)
    by_byte = _ONES_OF_BYTE.take(np.ascontiguousarray(mask).view(np.uint8)).view(np.uint32)
    return by_byte.reshape(mask.shape) * np.uint32(0x01010101) >> 24


def empty_mask(tiles: int, lanes: int) -> np.ndarray:
    """Return an uninitialised escape mask, uint8 [tiles, 4 lanes + `GAP`], from this thread's scratch memory.

    A row belongs to a tile: a uint32 for each lane, with a bit for each of its 32 elements, and then the gap.
    """
    return scratch("mask", tiles * (4 * lanes + GAP), np.uint8).reshape(tiles, 4 * lanes + GAP)


def count_escapes(mask: np.ndarray, multiple: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """Return (escapes of each tile, int64; largest number in a lane of 32 elements, uint8), and fill in the
    gap of ``mask``.

    ``multiple``: the gap gets as many set bits as make the number of a tile's set bits a multiple of this (at
    most 32).
    """
    lanes = (mask.shape[1] - GAP) // 4
    by_lane = popcount_uint32(mask.view(np.uint32)[:, :lanes])
    counts = by_lane.sum(1, dtype=np.int64)
    mask.view(np.int64)[:, lanes // 2] = (1 << (-counts % multiple)) - 1
    return counts, by_lane.max(1)


def elements_of(mask: np.ndarray, max_tiles: int) -> np.ndarray:
    """Return int64: the element number of each escape set in ``mask``, in order, counted from the mask's
    first element.

    ``max_tiles``: the largest number of tiles that any mask has. Bits in a tile's gap give entries as well, from
    ``max_tiles`` times the elements of a tile on, and by less than a tile's elements above that. They make the
    number of a tile's entries even, because two 4-bit escapes share a byte, or a multiple of 32 (`count_escapes`).
    """
    lanes = (mask.shape[1] - GAP) // 4
    flat = mask.reshape(-1)
    has_any = scratch("bytes with escapes", mask.size, np.bool_)
    np.not_equal(flat, 0, out=has_any)
    where = np.flatnonzero(has_any)
    bits = np.flatnonzero(np.unpackbits(flat.take(where), bitorder="little").view(np.bool_))
    first_of_byte, of_bit = _element_tables(lanes, max_tiles)
    elements = first_of_byte.take(where).take(bits >> 3)
    elements += of_bit.take(bits & 7)
    return elements


@functools.lru_cache(maxsize=4)
def _element_tables(lanes: int, tiles: int) -> tuple[np.ndarray, np.ndarray]:
    """Return, for a mask of ``tiles`` tiles, the first element of each byte and the offset of each bit in a
    byte (int64).
    """
    byte, bit = np.arange(4 * lanes), np.arange(8)
    first = np.full((tiles, 4 * lanes + GAP), tiles * 32 * lanes)  # bytes of the gap belong to no element
    first[:, : 4 * lanes] = np.arange(tiles)[:, None] * (32 * lanes) + (byte >> 2) * 8 + (byte & 3)
    first_of_byte = first.reshape(-1).astype(np.int64)
    of_bit = ((bit >> 1) * (8 * lanes) + (bit & 1) * 4).astype(np.int64)
    first_of_byte.flags.writeable = of_bit.flags.writeable = False
    return first_of_byte, of_bit
