"""Encoding of one chunk of elements into byte planes, bit planes and escapes, with few passes of NumPy.

The cost of a pass is the number of bytes that it touches. So bits are moved eight bytes at a time, in uint64
words. A ufunc with a narrower output dtype converts its result in blocks that stay in the L1 cache, which
saves a separate pass. NumPy releases the GIL within each pass. Handing the GIL from thread to thread between
passes limits the speedup by threads, so the passes are few and long.

The terms tile, lane, byte plane, bit plane and rest bits are defined in core/codec/lossless_format.py.
"""

from __future__ import annotations

import numpy as np

from .lossless_escapes import count_escapes, elements_of, empty_mask
from .lossless_format import HEADER_BYTES, MOST_SHIFT, WIDE_BIT, Header, Kind
from .lossless_second_codes import encode_escapes, second_codes_of
from .scratch import scratch

_U64 = np.uint64
_BYTES = 0x0101010101010101
_EVEN = _U64(0x55 * _BYTES)  # every second bit of each byte
# The lower two and the upper two bits of every half byte.
_LOW, _HIGH = _U64(0x33 * _BYTES), _U64(0xCC * _BYTES)


def exponents_of(kind: Kind, x: np.ndarray) -> np.ndarray:
    """Return the exponent fields (uint8) of ``x``, elements viewed as unsigned integers."""
    exponents = np.empty(len(x), np.uint8)
    np.right_shift(x, kind.mantissa_bits, out=exponents, dtype=x.dtype, casting="unsafe")
    return np.bitwise_and(exponents, np.uint8((1 << kind.exponent_bits) - 1), out=exponents)


class ChunkEncoder:
    """An encoder for chunks of a tensor: writes byte planes and bit planes into ``blob`` and returns the
    escapes.

    Escapes are the exponents that have no code. ``flat``: all elements of the tensor viewed as unsigned
    integers. ``max_tiles``: the largest number of tiles (groups of 32 * lanes elements) in a call. Several
    threads may call the object at the same time.
    """

    def __init__(self, header: Header, flat: np.ndarray, blob: np.ndarray, max_tiles: int) -> None:
        self.header, self.flat, self.blob, self.max_tiles = header, flat, blob, max_tiles
        self.nibble_of = np.full(256, 255, np.uint8)
        self.nibble_of[np.frombuffer(header.escape_table, np.uint8)] = np.arange(16, dtype=np.uint8)
        self.second_codes = second_codes_of(header)
        # NumPy's minimum with a scalar takes ten times as long as with an array.
        self.highest = np.full(header.tile, (1 << header.k) - 1, np.uint8)
        bits = blob[header.bits_at : header.tiles_at].view(np.uint32)
        self.bits = bits.reshape(header.tiles, header.planes, header.lanes)

    def __call__(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Encode ``count`` tiles from tile ``first``; return (escape bytes, bytes of each tile's escapes,
        flags of each tile).

        The flags are the upper bits of the tile's 64-bit entry in the tile table, above the offset.
        """
        header = self.header
        tiles = min(count, header.tiles - first)
        start, end = first * header.tile, min((first + tiles) * header.tile, header.words * 4)
        targets = []
        for i in range(header.kind.byte_planes):
            at = HEADER_BYTES + i * header.byte_plane_stride
            targets.append(self.blob[at + start : at + end])
            if end == header.words * 4:
                self.blob[at + end : at + header.byte_plane_stride] = 0
        exponents = scratch("exponents", (self.max_tiles + 1) * header.tile, np.uint8)
        # The entries of one more tile pad a tile's escapes. Their exponent is the first of the escape table, so
        # they are encoded as zero.
        exponents[-header.tile :] = header.escape_table[0]
        exponent = exponents[: end - start]
        rest = self._split(self.flat[start:end], targets, exponent)
        whole = scratch("combined", tiles * header.tile, np.uint8)
        combined = whole[: end - start]
        np.subtract(exponent, np.uint8(header.base), out=combined)
        by_tile = whole.reshape(tiles, header.tile)
        np.minimum(by_tile, self.highest, out=by_tile)
        if rest is not None:
            np.multiply(rest, np.uint8(1 << header.k), out=rest)
            np.bitwise_or(combined, rest, out=combined)
        whole[end - start :] = 0  # elements that pad the last tile have code 0
        mask = self._bit_planes(whole.view(np.uint64).reshape(tiles, 4, header.lanes), first)
        if header.kind.two_level:
            return encode_escapes(mask, exponents, self.second_codes, header.tile, self.max_tiles)
        return self._escapes(mask, exponents)

    def _split(self, x: np.ndarray, targets: list[np.ndarray], exponent: np.ndarray) -> np.ndarray | None:
        """Write the byte planes of elements ``x`` to ``targets`` and their exponents to ``exponent``; return
        the rest bits.

        The rest bits (uint8) are the sign and mantissa bits that go into bit planes; None if the dtype has
        none.
        """
        kind = self.header.kind
        if kind.rest_bits:
            high = x
            if kind.itemsize == 2:
                np.copyto(targets[0], x, casting="unsafe")
                high = scratch("high bytes", len(x), np.uint8)
                np.right_shift(x, 8, out=high, dtype=np.uint16, casting="unsafe")
            # Eight bytes at a time: the sign moves down next to the mantissa, the exponent to the lowest
            # bits.
            words, mantissa = high.view(np.uint64), kind.rest_bits - 1
            sign_bit, mantissa_bits = _BYTES << mantissa, ((1 << mantissa) - 1) * _BYTES
            field = exponent.view(np.uint64)
            np.right_shift(words, _U64(mantissa), out=field)
            np.bitwise_and(field, _U64(((1 << kind.exponent_bits) - 1) * _BYTES), out=field)
            rest = scratch("rest", len(x), np.uint8)
            rest_words, low = rest.view(np.uint64), scratch("mantissas", len(words), np.uint64)
            np.right_shift(words, _U64(7 - mantissa), out=rest_words)
            np.bitwise_and(rest_words, _U64(sign_bit), out=rest_words)
            np.bitwise_and(words, _U64(mantissa_bits), out=low)
            np.bitwise_or(rest_words, low, out=rest_words)
            return rest
        half = x
        if kind.itemsize == 4:
            np.copyto(targets[0], x, casting="unsafe")
            np.right_shift(x, 8, out=targets[1], dtype=np.uint32, casting="unsafe")
            half = scratch("halves", len(x), np.uint16)
            np.right_shift(x, 16, out=half, dtype=np.uint32, casting="unsafe")
        np.right_shift(half, 7, out=exponent, dtype=np.uint16, casting="unsafe")
        joined = scratch("joined", len(x), np.uint16)
        np.bitwise_and(half, np.uint16(0x807F), out=joined)
        # Now the sign and the mantissa are in the upper byte.
        np.multiply(joined, np.uint16(0x0101), out=joined)
        np.right_shift(joined, 8, out=targets[-1], dtype=np.uint16, casting="unsafe")
        return None

    def _bit_planes(self, words: np.ndarray, first: int) -> np.ndarray:
        """Write all bit planes of the tiles from number ``first`` on.

        ``words`` (uint64 [tiles, 4, lanes]): the bits of these tiles' elements, 8 elements a word and one a
        byte. Returns a bit mask of the escapes, in the layout of `empty_mask`. In the comments below, row r
        is ``words[:, r]``.
        """
        header = self.header
        tiles, _, lanes = words.shape
        rows = scratch("rows", 2 * tiles * lanes, np.uint64).reshape(2, tiles, lanes)
        even, odd = rows
        pairs, bits, upper, escapes = (
            scratch(name, tiles * lanes, np.uint64).reshape(tiles, lanes)
            for name in ("pairs", "bits", "upper", "escapes")
        )
        for nibble in range(0, header.planes, 4):
            part = words if header.planes <= 4 else words >> _U64(nibble) & _U64(0x0F * _BYTES)
            # Join rows 0 and 2, and rows 1 and 3: each byte then has four bits of each of its two rows.
            np.left_shift(part[:, 2:], _U64(4), out=rows.swapaxes(0, 1))
            np.bitwise_or(rows, part[:, :2].swapaxes(0, 1), out=rows)
            for j in range(nibble, min(nibble + 4, header.planes)):
                # Join all four rows: each byte then has two bits of each row. Then select one bit of each
                # row, at the even bits.
                if j == nibble:
                    np.bitwise_and(even, _LOW, out=pairs)
                    np.bitwise_and(odd, _LOW, out=bits)
                    np.left_shift(bits, _U64(2), out=bits)
                    np.bitwise_or(pairs, bits, out=pairs)
                elif j == nibble + 2:
                    np.right_shift(even, _U64(2), out=pairs)
                    np.bitwise_and(pairs, _LOW, out=pairs)
                    np.bitwise_and(odd, _HIGH, out=bits)
                    np.bitwise_or(pairs, bits, out=pairs)
                else:
                    np.right_shift(pairs, _U64(1), out=pairs)
                np.bitwise_and(pairs, _EVEN, out=bits)
                # The bits of the upper four elements go to the odd bits: bit 32 + b moves to bit b + 1.
                np.right_shift(bits, _U64(31), out=upper)
                target = upper if j else escapes
                np.bitwise_or(upper, bits, out=target)
                np.copyto(self.bits[first : first + tiles, j], target, casting="unsafe")
                if 0 < j < header.k:
                    np.bitwise_and(escapes, upper, out=escapes)
        mask = empty_mask(tiles, lanes)
        np.copyto(mask.view(np.uint32)[:, :lanes], escapes, casting="unsafe")
        return mask

    def _escapes(self, mask: np.ndarray, exponents: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (escape bytes, bytes of each tile's escapes, flags of each tile) for the escapes set in
        ``mask``.

        ``exponents``: the exponents of all elements of the chunk.
        """
        counts, fullest = count_escapes(mask)
        flags = fullest.astype(np.int64) << MOST_SHIFT
        element = elements_of(mask, self.max_tiles)
        values = exponents.take(element)
        nibbles = self.nibble_of.take(values)
        sizes = (counts + 1) >> 1
        pairs = nibbles.view(np.uint16)
        stream = (pairs | pairs >> 4).astype(np.uint8)
        if len(nibbles) and nibbles.max() == 255:
            tiles = np.unique(element[nibbles == 255] // self.header.tile)
            stream = _widen_escapes(stream, values, counts, sizes, tiles)
            flags[tiles] |= 1 << WIDE_BIT
        return stream, sizes, flags


def _widen_escapes(
    stream: np.ndarray, values: np.ndarray, counts: np.ndarray, sizes: np.ndarray, tiles: np.ndarray
) -> np.ndarray:
    """Return the escape bytes ``stream`` with a whole byte instead of 4 bits for each escape of ``tiles``.

    ``tiles``: the tiles with exponents that are not in the table of 16 exponents. ``values``: the escaped
    exponents, two for each byte of ``stream``. ``counts``: escapes of each tile. ``sizes`` (bytes of each
    tile's escapes) is updated in place.
    """
    ends = np.cumsum(sizes)
    begins, parts, at = ends - sizes, [], 0
    for tile in tiles.tolist():
        parts.append(stream[at : begins[tile]])
        parts.append(values[2 * begins[tile] : 2 * begins[tile] + counts[tile]])
        at = ends[tile]
    sizes[tiles] = counts[tiles]
    return np.concatenate([*parts, stream[at:]])
