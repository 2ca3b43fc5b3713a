"""Encoding of escapes as second codes and literals, for version 2 of the lossless format (NumPy).

The format, with the terms second code and literal, is described in core/codec/lossless_format.py. The decoder is
core/codec/lossless_two_level.py.
"""

from __future__ import annotations

import numpy as np

from .lossless_escapes import count_escapes, elements_of
from .lossless_format import LITERAL_SHIFT, SECOND_SHIFT, Header

GROUP = 32  # second codes or literals whose bit planes are stored together
SECOND_ESCAPE = 3  # the second code that a literal follows


def second_codes_of(header: Header) -> np.ndarray:
    """Return uint8 [256]: the second code of each exponent."""
    codes = np.full(256, SECOND_ESCAPE, np.uint8)
    codes[list(header.escape_table[:SECOND_ESCAPE])] = range(SECOND_ESCAPE)
    return codes


def encode_escapes(
    mask: np.ndarray, exponents: np.ndarray, second_codes: np.ndarray, tile: int, max_tiles: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (escape bytes, bytes of each tile's escapes, table entry of each tile without its offset).

    ``mask``: the positions of escapes, as `empty_mask` describes. ``exponents``: those of all elements of the
    chunk, then ``tile`` entries that have second code 0. ``tile``: elements of a tile. ``max_tiles``: tiles for
    which ``exponents`` has room.
    """
    counts, _ = count_escapes(mask, GROUP)
    elements = elements_of(mask, max_tiles)
    values = exponents.take(elements)
    codes = second_codes.take(values)
    seconds = -(-counts // GROUP)
    second_words = _planes(codes, 2)
    literal = np.flatnonzero(codes == SECOND_ESCAPE)
    tile_of = elements[literal] // tile
    of_tile = np.bincount(tile_of, minlength=len(counts))
    literals = -(-of_tile // GROUP)
    padded = np.zeros(GROUP * int(literals.sum()), np.uint8)
    moved = GROUP * (np.cumsum(literals) - literals) - (np.cumsum(of_tile) - of_tile)
    padded[np.arange(len(literal)) + moved[tile_of]] = values[literal]
    literal_words = _planes(padded, 4)
    # A tile's second codes, then its literals; a group of second codes takes one 64-bit word, one of literals two.
    sizes = seconds + 2 * literals
    starts = np.cumsum(sizes) - sizes
    stream = np.empty(int(sizes.sum()), np.uint64)
    stream[_consecutive(starts, seconds)] = second_words
    stream[_consecutive(starts + seconds, 2 * literals)] = literal_words
    return stream.view(np.uint8), 8 * sizes, seconds << SECOND_SHIFT | literals << LITERAL_SHIFT


def _planes(values: np.ndarray, bits: int) -> np.ndarray:
    """Return the bit planes (uint64) of ``values``, whose number is a multiple of 32: a group's planes together."""
    words = np.empty((len(values) // GROUP, bits), np.uint32)
    for j in range(bits):
        words[:, j] = np.packbits(values >> j & 1, bitorder="little").view(np.uint32)
    return words.view(np.uint64).reshape(-1)


def _consecutive(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return ``counts[0]`` numbers from ``starts[0]`` on, then ``counts[1]`` from ``starts[1]`` on, and so on."""
    return np.arange(int(counts.sum())) + np.repeat(starts - (np.cumsum(counts) - counts), counts)
