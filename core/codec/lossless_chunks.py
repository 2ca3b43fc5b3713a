"""What the CPU encoder does to one chunk: elements to byte planes, bit planes and escapes, with few passes of NumPy.

What a pass costs is counted in bytes that it touches: so uint64 words wherever bits are moved, and dtypes narrowed by the
ufunc that computes, in blocks that stay in the first cache. NumPy releases the GIL in each pass; what threads hand to
each other between two is what keeps many from being as many times faster, so there are few passes, and long ones.
"""

from __future__ import annotations

import numpy as np

from .lossless_escapes import count_escapes, elements_of, empty_mask
from .lossless_format import HEADER_BYTES, MOST_SHIFT, WIDE_BIT, Header, Kind
from .scratch import scratch

_U64 = np.uint64
_BYTES = 0x0101010101010101
_EVEN = _U64(0x55 * _BYTES)  # every second bit
_LOW, _HIGH = _U64(0x33 * _BYTES), _U64(0xCC * _BYTES)  # the lower and the upper two bits of every half byte


def exponents_of(kind: Kind, x: np.ndarray) -> np.ndarray:
    """uint8: the exponent fields of elements as unsigned integers."""
    exponents = np.empty(len(x), np.uint8)
    np.right_shift(x, kind.mantissa_bits, out=exponents, dtype=x.dtype, casting="unsafe")
    return np.bitwise_and(exponents, np.uint8((1 << kind.exponent_bits) - 1), out=exponents)


class Chunks:
    """Encodes runs of at most ``most`` tiles into the fixed sections of ``blob``; escapes are handed back.

    ``flat``: the elements as unsigned integers. Any thread may call it.
    """

    def __init__(self, header: Header, flat: np.ndarray, blob: np.ndarray, most: int) -> None:
        self.header, self.flat, self.blob, self.most = header, flat, blob, most
        self.nibble_of = np.full(256, 255, np.uint8)
        self.nibble_of[np.frombuffer(header.escape_table, np.uint8)] = np.arange(16, dtype=np.uint8)
        # NumPy's minimum with a number takes ten times as long as with an array.
        self.highest = np.full(header.tile, (1 << header.k) - 1, np.uint8)
        bits = blob[header.bits_at : header.tiles_at].view(np.uint32)
        self.bits = bits.reshape(header.tiles, header.planes, header.lanes)

    def __call__(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tiles first .. first + count: (escape bytes, bytes of each tile, flag bits of each tile's table entry)."""
        header = self.header
        tiles = min(count, header.tiles - first)
        start, end = first * header.tile, min((first + tiles) * header.tile, header.words * 4)
        targets = []
        for i in range(header.kind.byte_planes):
            at = HEADER_BYTES + i * header.byte_plane_stride
            targets.append(self.blob[at + start : at + end])
            if end == header.words * 4:
                self.blob[at + end : at + header.byte_plane_stride] = 0
        exponents = scratch("exponents", self.most * header.tile + 1, np.uint8)
        exponents[-1] = header.escape_table[0]  # of no element: the half byte 0
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
        whole[end - start :] = 0  # code 0 where the last tile has no elements
        mask = self._bit_planes(whole.view(np.uint64).reshape(tiles, 4, header.lanes), first)
        return self._escapes(mask, exponents)

    def _split(self, x: np.ndarray, targets: list[np.ndarray], exponent: np.ndarray) -> np.ndarray | None:
        """Writes the byte planes of elements ``x`` to ``targets`` and their exponents; returns the rest bits, uint8."""
        kind = self.header.kind
        if kind.rest_bits:
            high = x
            if kind.itemsize == 2:
                np.copyto(targets[0], x, casting="unsafe")
                high = scratch("high bytes", len(x), np.uint8)
                np.right_shift(x, 8, out=high, dtype=np.uint16, casting="unsafe")
            # Eight bytes at a time: the sign goes down to the mantissa's upper end, the exponent to the bottom.
            words, mantissa = high.view(np.uint64), kind.rest_bits - 1
            of_sign, of_mantissa = _BYTES << mantissa, ((1 << mantissa) - 1) * _BYTES
            field = exponent.view(np.uint64)
            np.right_shift(words, _U64(mantissa), out=field)
            np.bitwise_and(field, _U64(((1 << kind.exponent_bits) - 1) * _BYTES), out=field)
            rest = scratch("rest", len(x), np.uint8)
            both, low = rest.view(np.uint64), scratch("mantissas", len(words), np.uint64)
            np.right_shift(words, _U64(7 - mantissa), out=both)
            np.bitwise_and(both, _U64(of_sign), out=both)
            np.bitwise_and(words, _U64(of_mantissa), out=low)
            np.bitwise_or(both, low, out=both)
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
        np.multiply(joined, np.uint16(0x0101), out=joined)  # sign and mantissa in the upper byte
        np.right_shift(joined, 8, out=targets[-1], dtype=np.uint16, casting="unsafe")
        return None

    def _bit_planes(self, words: np.ndarray, first: int) -> np.ndarray:
        """Writes all bit planes of uint64 ``words`` [tiles, 4, lanes] (8 elements each).

        Returns the escape mask, as `empty_mask` lays it out.
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
            # Two rows a byte, 0 and 2, and 1 and 3: four bits of each.
            np.left_shift(part[:, 2:], _U64(4), out=rows.swapaxes(0, 1))
            np.bitwise_or(rows, part[:, :2].swapaxes(0, 1), out=rows)
            for j in range(nibble, min(nibble + 4, header.planes)):
                # Four rows a byte, two bits of each; then one bit of each, at the even bits.
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
                # The upper four elements go to the odd bits: bit 32 + b to bit b + 1.
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
        counts, fullest = count_escapes(mask)
        flags = fullest.astype(np.int64) << MOST_SHIFT
        element = elements_of(mask, self.most)
        values = exponents.take(element)
        nibbles = self.nibble_of.take(values)
        sizes = (counts + 1) >> 1
        pairs = nibbles.view(np.uint16)
        stream = (pairs | pairs >> 4).astype(np.uint8)
        if len(nibbles) and nibbles.max() == 255:
            tiles = np.unique(element[nibbles == 255] // self.header.tile)
            stream = _widen(stream, values, counts, sizes, tiles)
            flags[tiles] |= 1 << WIDE_BIT
        return stream, sizes, flags


def _widen(
    stream: np.ndarray, values: np.ndarray, counts: np.ndarray, sizes: np.ndarray, tiles: np.ndarray
) -> np.ndarray:
    """``stream`` with the escapes of ``tiles``, which have exponents that are not in the table, one byte each.

    ``values``: two for each byte of the stream; ``sizes`` (bytes of each tile) is brought up to date.
    """
    ends = np.cumsum(sizes)
    begins, parts, at = ends - sizes, [], 0
    for tile in tiles.tolist():
        parts.append(stream[at : begins[tile]])
        parts.append(values[2 * begins[tile] : 2 * begins[tile] + counts[tile]])
        at = ends[tile]
    sizes[tiles] = counts[tiles]
    return np.concatenate([*parts, stream[at:]])
