"""Decoding of version 2 of the lossless format (fp8 e4m3) on 32-bit words, for NumPy arrays and torch tensors.

In version 2 every exponent has up to three codes: a first code of k bits; a second code of 2 bits where the
first one is an escape; and a literal of 4 bits where the second one is an escape too. All codes are bit planes.
Those of first codes have a bit for every element. Those of second codes and literals have a bit only for the
elements that have such a code, lane after lane, so a lane's bits begin at any bit of a word.

The decoder computes with whole bit planes, 32 elements of a lane at a time, and has no loop over elements or
escapes. For each lane it reads the 32 bits from the lane's first bit on, and moves them to the elements that
they belong to (`Expansion`; "expand" in H. S. Warren, Hacker's Delight, 2nd edition, section 7-5). Exponents are
four bit planes until the end, where a transposition of 8 x 8 bits makes bytes of them (`transpose`).
core/codec/lossless_two_level_triton.py does the same steps in Triton.

All functions take and return int32 arrays of either library. They use only operators and methods that both have.
The terms tile, lane and bit plane are defined in core/codec/lossless_format.py.
"""

from __future__ import annotations

from typing import Any

from .lossless_format import SECOND_SHIFT, UNIT_BITS, Header

Words = Any  # an int32 array of NumPy or torch, with one word for each lane
SECOND_PLANES, LITERAL_PLANES = 2, 4
_ONES = 0x01010101


def byte_counts(words: Words) -> Words:
    """Return the number of set bits of each byte, in that byte."""
    count = words - ((words >> 1) & 0x55555555)
    count = (count & 0x33333333) + ((count >> 2) & 0x33333333)
    return (count + (count >> 4)) & 0x0F0F0F0F


class Expansion:
    """Moves the lowest bits of a word to the positions of the set bits of ``mask``, in their order.

    ``counts``: the number of set bits of each word of ``mask``.
    """

    def __init__(self, mask: Words) -> None:
        ones = byte_counts(mask)
        self.mask, self.counts = mask, (ones * _ONES) >> 24
        # A byte's bits first move to the byte: up by the number of zeros in all lower bytes.
        zeros = (0x08080808 - ones) * _ONES
        self._to_byte = [zeros & 0xFF, (zeros >> 8) & 0xFF, (zeros >> 16) & 0xFF]
        # Then they move within the byte, each by the number of zeros below its position: by 4, 2 and 1. These
        # are the masks of the positions that bits arrive at, found in the reverse order.
        self._moves: list[tuple[int, Words]] = []
        to_count, left = (~mask << 1) & -0x01010102, mask
        for shift, below in ((1, 0x7F7F7F7F), (2, 0x3F3F3F3F), (4, 0x0F0F0F0F)):
            parity = to_count ^ ((to_count << 1) & -0x01010102)
            parity = parity ^ ((parity << 2) & -0x03030304)
            parity = parity ^ ((parity << 4) & -0x0F0F0F10)
            arriving = parity & left
            self._moves.insert(0, (shift, arriving))
            left = (left ^ arriving) | ((arriving >> shift) & below)
            to_count = to_count & ~parity

    def __call__(self, words: Words) -> Words:
        """Return ``words`` with their lowest bits moved; all other bits are zero."""
        first, second, third = self._to_byte
        moved = (
            (words & 0xFF)
            | ((words << first) & 0xFF00)
            | ((words << second) & 0xFF0000)
            | ((words << third) & -0x1000000)
        )
        for shift, arriving in self._moves:
            moved = moved ^ ((moved ^ (moved << shift)) & arriving)
        return moved & self.mask


def transpose(planes: list[Words]) -> list[Words]:
    """Transpose 8 x 8 bits, in each of the four bytes: bit j of result r is bit r of ``planes[j]``."""
    rows = list(planes)
    for shift, mask in ((4, 0x0F0F0F0F), (2, 0x33333333), (1, 0x55555555)):
        for low in range(8):
            if low & shift:
                continue
            swapped = ((rows[low] >> shift) ^ rows[low + shift]) & mask
            rows[low + shift] = rows[low + shift] ^ swapped
            rows[low] = rows[low] ^ (swapped << shift)
    return rows


def decode_words(
    header: Header, planes: Words, table: Words, stream: Words, literals: bool = True
) -> list[Words]:
    """Return the decoded elements of a run of tiles: 8 arrays [tiles, lanes] of four bytes a word.

    ``planes``: [tiles, header.planes, lanes]. ``table``: the int64 entries of these tiles in the tile table.
    ``stream``: the escapes section as int32. Word r of a lane holds the elements of bits r, 8 + r, 16 + r and
    24 + r of the lane's plane words. Indices that lead out of ``stream`` are limited to it. ``literals``: whether
    any element of these tiles may have a literal.
    """
    k = header.k
    codes = [planes[:, j] for j in range(k)]
    rest = [planes[:, k + j] for j in range(4)]
    exponent = _add(codes, header.base)
    mask = codes[0]
    for code in codes[1:]:
        mask = mask & code
    if len(stream):
        _patch(exponent, mask, header, table.reshape(-1, 1), stream, literals)
    return transpose([*rest[:3], *exponent, rest[3]])


def _add(codes: list[Words], base: int) -> list[Words]:
    """Return the four bit planes of ``base`` plus the codes in the bit planes ``codes``, modulo 16."""
    total: list[Words] = []
    carry: Words = 0
    for j in range(4):
        code, bit = codes[j] if j < len(codes) else 0, -(base >> j & 1)
        total.append(code ^ carry ^ bit)
        carry = (code & bit) | (carry & (code ^ bit))
    return total


def _patch(
    exponent: list[Words], mask: Words, header: Header, table: Words, stream: Words, literals: bool
) -> None:
    """Replace the exponents of the escapes, which ``mask`` has set, in the four bit planes ``exponent``.

    An exponent is changed by XOR with masks, as bits of the second codes say. What the elements with the fourth
    second code become by that is changed again by their literals.
    """
    unit, seconds, words = table & ((1 << UNIT_BITS) - 1), (table >> SECOND_SHIFT) & 0xFFFF, len(stream)
    expand = Expansion(mask)
    low, high = (expand(word) for word in _windows(stream, 2 * unit, expand.counts, SECOND_PLANES, words))
    first, second, third = header.escape_table[:3]
    before = header.base + (1 << header.k) - 1
    for j in range(4):
        for change, where in ((before ^ first, mask), (first ^ second, low), (first ^ third, high)):
            if change >> j & 1:
                exponent[j] = exponent[j] ^ where
    if not literals:
        return
    before = first ^ second ^ third
    expand = Expansion(low & high)
    found = _windows(stream, 2 * (unit + seconds), expand.counts, LITERAL_PLANES, words)
    for j, word in enumerate(found):
        change = expand(word)
        if before >> j & 1:
            change = change ^ expand.mask
        exponent[j] = exponent[j] ^ change


def _windows(stream: Words, start: Words, counts: Words, planes: int, words: int) -> list[Words]:
    """Return for each lane the next 32 bits of each of ``planes`` bit planes.

    ``start`` ([tiles, 1]): the word of ``stream`` at which a tile's planes begin. They are stored in groups of a
    word of each. ``counts`` ([tiles, lanes]): the bits that each lane takes.
    """
    position = counts.cumsum(1, dtype=counts.dtype) - counts
    shift = position & 31
    keep, up = ~(-2 << (31 - shift)), 31 - shift  # an int32 is shifted right with its sign
    index = start + planes * (position >> 5)
    found = []
    for j in range(planes):
        here = stream[(index + j).clip(max=words - 1)]
        after = stream[(index + (planes + j)).clip(max=words - 1)]
        found.append(((here >> shift) & keep) | ((after << 1) << up))
    return found
