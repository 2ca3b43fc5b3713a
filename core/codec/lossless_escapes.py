"""Where the escapes of a run of tiles are, in their order: what the CPU's encoder and its decoder share.

NumPy finds few places in many by branches that the processor guesses wrong, and many by arithmetic, which is three
times faster here: so the bytes of the mask that have any escape are found first, and bits among those bytes then.
"""

from __future__ import annotations

import functools

import numpy as np

from .scratch import scratch

GAP = 8  # bytes after each tile's mask: the first says whether its number of escapes is odd
_ONES_OF_BYTE = np.array([bin(byte).count("1") for byte in range(256)], np.uint8)


def ones_of(mask: np.ndarray) -> np.ndarray:
    """Set bits of each uint32."""
    if hasattr(np, "bitwise_count"):  # NumPy 2
        return np.bitwise_count(mask)
    by_byte = _ONES_OF_BYTE.take(np.ascontiguousarray(mask).view(np.uint8)).view(np.uint32)
    return by_byte.reshape(mask.shape) * np.uint32(0x01010101) >> 24


def empty_mask(tiles: int, lanes: int) -> np.ndarray:
    """uint8 [tiles, 4 lanes + `GAP`] of this thread's scratch, undefined: a tile's escape bits, one uint32 a lane."""
    return scratch("mask", tiles * (4 * lanes + GAP), np.uint8).reshape(tiles, 4 * lanes + GAP)


def count_escapes(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(escapes of each tile, int64; the most of any of its lanes, uint8); fills in the gap of ``mask``."""
    lanes = (mask.shape[1] - GAP) // 4
    by_lane = ones_of(mask.view(np.uint32)[:, :lanes])
    counts = by_lane.sum(1, dtype=np.int64)
    mask[:, 4 * lanes :] = 0
    mask[:, 4 * lanes] = counts & 1
    return counts, by_lane.max(1)


def elements_of(mask: np.ndarray, most: int) -> np.ndarray:
    """int64: the element of each escape in order, from the first tile's first, for a mask of at most ``most`` tiles.

    Two for each byte of escapes that are not wide: a tile's odd last half byte is of element ``most * tile``.
    """
    lanes = (mask.shape[1] - GAP) // 4
    flat = mask.reshape(-1)
    has_any = scratch("bytes with escapes", mask.size, np.bool_)
    np.not_equal(flat, 0, out=has_any)
    where = np.flatnonzero(has_any)
    bits = np.flatnonzero(np.unpackbits(flat.take(where), bitorder="little").view(np.bool_))
    first_of_byte, of_bit = _elements(lanes, most)
    elements = first_of_byte.take(where).take(bits >> 3)
    elements += of_bit.take(bits & 7)
    return elements


@functools.lru_cache(maxsize=4)
def _elements(lanes: int, tiles: int) -> tuple[np.ndarray, np.ndarray]:
    """int64: the first element of each byte of a mask of ``tiles`` tiles, and what each bit of a byte adds."""
    byte, bit = np.arange(4 * lanes), np.arange(8)
    first = np.full((tiles, 4 * lanes + GAP), tiles * 32 * lanes)  # in the gap: of none
    first[:, : 4 * lanes] = np.arange(tiles)[:, None] * (32 * lanes) + (byte >> 2) * 8 + (byte & 3)
    first_of_byte = first.reshape(-1).astype(np.int64)
    of_bit = ((bit >> 1) * (8 * lanes) + (bit & 1) * 4).astype(np.int64)
    first_of_byte.flags.writeable = of_bit.flags.writeable = False
    return first_of_byte, of_bit
