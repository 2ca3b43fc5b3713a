"""Decoder of the lossless format on the CPU (NumPy): decodes any run of tiles in chunks that stay in the
cache.

Used for files that are loaded, or streamed from disk; the torch operations (core/codec/lossless_torch.py)
take eight times as long on a CPU. NumPy releases the GIL in all passes, so several threads may decode at the
same time.

The terms tile, lane, byte plane, bit plane and rest bits are defined in core/codec/lossless_format.py.
"""

from __future__ import annotations

import numpy as np

from .lossless_escapes import count_escapes, elements_of, empty_mask
from .lossless_format import HEADER_BYTES, LITERAL_SHIFT, OFFSET_BITS, TAIL_AT, WIDE_BIT, Header, Kind
from .lossless_two_level import decode_words
from .scratch import scratch

# Elements decoded at a time, times the version of the format: version 2 makes more, shorter passes over 32-bit words.
CHUNK = 1 << 18
_U64 = np.uint64
_EVEN = _U64(0x5555555555555555)  # every second bit of each byte
_BYTES = 0x0101010101010101
_PAIR = _U64(0x0303030303030303)  # the two lowest bits of each byte


def decode_bytes(blob: np.ndarray, header: Header, begin: int, out: np.ndarray) -> None:
    """Decode bytes ``begin`` to ``begin + len(out)`` of the tensor into ``out`` (contiguous uint8).

    ``blob``: uint8, whole and verified (`LosslessCodec.verify`). ``header``: the parsed header of ``blob``.
    """
    size, coded = header.kind.itemsize, header.words * 4
    end = begin + len(out)
    step = max(1, CHUNK * header.kind.version // header.tile) * header.tile
    first, last = begin // size, min(-(-end // size), coded)
    # Where first >= last, the range lies in the tail, which is stored raw in the header.
    start = first // header.tile * header.tile if first < last else last
    while start < last:
        stop = min((start // step + 1) * step, -(-last // header.tile) * header.tile)
        count = min(stop, coded) - start
        chunk_is_inside = begin <= start * size and (start + count) * size <= end
        if chunk_is_inside:
            _decode(blob, header, start, count, out[start * size - begin :][: count * size])
        else:
            raw = scratch("edge", count * size, np.uint8)
            _decode(blob, header, start, count, raw)
            low, high = max(begin, start * size), min(end, (start + count) * size)
            out[low - begin : high - begin] = raw[low - start * size : high - start * size]
        start = stop
    low = max(begin, coded * size)
    if low < end:
        at = TAIL_AT + low - coded * size
        out[low - begin :] = blob[at : at + end - low]


def _decode(blob: np.ndarray, header: Header, start: int, count: int, out: np.ndarray) -> None:
    """Decode ``count`` elements from ``start`` (the first of a tile), within one chunk, as bytes into
    ``out``.
    """
    kind, tile = header.kind, header.tile
    first, tiles = start // tile, -(-count // tile)
    shape = (header.tiles, header.planes, header.lanes)
    bits = blob[header.bits_at : header.tiles_at].view(np.uint32).reshape(shape)[first : first + tiles]
    if kind.two_level:
        _decode_two_level(blob, header, bits, first, out)
        return
    most = max(1, CHUNK // tile)
    # One byte more than the elements: for a tile with an odd number of escapes, `_patch` writes the padding
    # value there.
    padded = scratch("exponent", most * tile + 1, np.uint8)
    exponent = padded[: tiles * tile]
    _spread(bits[:, : header.k], exponent)
    np.add(exponent, np.uint8(header.base), out=exponent)
    if header.most_escapes:
        _patch(blob, header, first, bits[:, : header.k], padded, most)
    exponent = exponent[:count]
    planes = []
    for plane in range(kind.byte_planes):
        at = HEADER_BYTES + plane * header.byte_plane_stride + start
        planes.append(blob[at : at + count])
    rest = None
    if kind.rest_bits:
        rest = scratch("rest", tiles * tile, np.uint8)
        _spread(bits[:, header.k :], rest)
        rest = rest[:count]
    _join(kind, planes, rest, exponent, out)


def _decode_two_level(
    blob: np.ndarray, header: Header, bits: np.ndarray, first: int, out: np.ndarray
) -> None:
    """Decode the tiles from number ``first`` on, which have the bit planes ``bits``, into ``out`` (version 2)."""
    tiles = len(bits)
    table = blob[header.tiles_at + 8 * first : header.tiles_at + 8 * (first + tiles)].view(np.int64)
    stream = blob[header.escapes_at : header.escapes_at + header.escape_bytes].view(np.int32)
    literals = bool((table >> LITERAL_SHIFT).any())
    words = decode_words(header, bits.view(np.int32), table, stream, literals)
    whole = len(out) == tiles * header.tile
    target = out if whole and out.ctypes.data % 4 == 0 else scratch("elements", tiles * header.tile, np.uint8)
    elements = target.view(np.int32).reshape(tiles, 4, header.lanes, 2)
    for r, word in enumerate(words):
        elements[:, r // 2, :, r % 2] = word
    if target is not out:
        out[:] = target[: len(out)]


def _spread(planes: np.ndarray, out: np.ndarray) -> None:
    """Expand bit planes (uint32 [tiles, p, lanes]) to one uint8 for each element, whose lowest p bits are the
    element's.
    """
    tiles, count, lanes = planes.shape
    n = tiles * lanes
    pairs = []
    for j in range(0, count, 2):
        pair = scratch(f"pair{j}", n, np.uint64)
        _widen(planes[:, j], pair)
        if j + 1 < count:
            other = scratch("odd plane", n, np.uint64)
            _widen(planes[:, j + 1], other)
            np.left_shift(other, _U64(1), out=other)
            np.bitwise_or(pair, other, out=pair)
        pairs.append(pair)
    words = out.view(np.uint64).reshape(tiles, 4, lanes)
    row = scratch("row", n, np.uint64)
    for v in range(4):
        fields = scratch("fields", n, np.uint64)
        for at, pair in enumerate(pairs):
            target = row if at else fields
            np.right_shift(pair, _U64(2 * v), out=target)
            np.bitwise_and(target, _PAIR, out=target)
            if at:
                np.left_shift(row, _U64(2 * at), out=row)
                np.bitwise_or(fields, row, out=fields)
        words[:, v] = fields.reshape(tiles, lanes)


def _widen(plane: np.ndarray, out: np.ndarray) -> None:
    """Copy uint32 words to uint64 so that bit 2v + u of each byte moves to bit 2v, in the upper half if u is
    1.
    """
    np.copyto(out.reshape(plane.shape), plane)
    high = scratch("high", len(out), np.uint64)
    np.left_shift(out, _U64(31), out=high)
    np.bitwise_or(out, high, out=out)
    np.bitwise_and(out, _EVEN, out=out)


def _patch(
    blob: np.ndarray, header: Header, first: int, codes: np.ndarray, exponent: np.ndarray, most: int
) -> None:
    """Overwrite the exponents of escapes (elements whose code is all ones) by those in the blob's escapes
    section.
    """
    tiles, k, lanes = codes.shape
    mask = empty_mask(tiles, lanes)
    escapes = mask.view(np.uint32)[:, :lanes]
    np.copyto(escapes, codes[:, 0])
    for j in range(1, k):
        np.bitwise_and(escapes, codes[:, j], out=escapes)
    counts, _ = count_escapes(mask)
    elements = elements_of(mask, most)
    if not len(elements):
        return
    table = blob[header.tiles_at + 8 * first : header.tiles_at + 8 * (first + tiles)].view(np.int64)
    offsets, wide = table & ((1 << OFFSET_BITS) - 1), table >> WIDE_BIT & 1
    begin, end = int(offsets[0]), int(offsets[-1]) + ((int(counts[-1]) << int(wide[-1])) + 1 >> 1)
    stream = blob[header.escapes_at + begin : header.escapes_at + end]
    known = np.frombuffer(header.escape_table, np.uint8)
    parts, at = [], 0
    for tile in np.flatnonzero(wide).tolist():
        here, count = int(offsets[tile]) - begin, int(counts[tile])
        parts.append(known.take(_halves(stream[at:here])))
        at = here + count
        parts.append(stream[here:at])
        # An entry for the padding: `elements_of` counts an even number of escapes for each tile.
        parts.append(known[: count & 1])
    parts.append(known.take(_halves(stream[at:])))
    exponent[elements] = parts[0] if len(parts) == 1 else np.concatenate(parts)


def _halves(stream: np.ndarray) -> np.ndarray:
    """Return the half bytes of ``stream`` in their order, one uint8 each."""
    both = stream.astype("<u2")
    both |= both << 4
    both &= 0x0F0F
    return both.view(np.uint8)


def _join(
    kind: Kind, planes: list[np.ndarray], rest: np.ndarray | None, exponent: np.ndarray, out: np.ndarray
) -> None:
    """Join exponents, rest bits and byte planes to elements; write their bytes, lowest first, to ``out``
    (uint8).
    """
    n = len(exponent)
    if rest is not None:
        high = out if kind.itemsize == 1 else scratch("high bytes", n, np.uint8)
        _join_high(kind, rest, exponent, high)
        if kind.itemsize == 2:
            half = scratch("half", n, np.uint16)
            np.left_shift(high, np.uint16(8), out=half, dtype=np.uint16)
            np.bitwise_or(half, planes[0], out=out.view(np.uint16))
        return
    # A bf16 is a sign, 8 exponent bits and 7 mantissa bits; the upper half of an fp32 is a bf16.
    half, field = scratch("half", n, np.uint16), scratch("field", n, np.uint16)
    np.multiply(planes[-1], np.uint16(0x0101), out=half, dtype=np.uint16)
    np.bitwise_and(half, np.uint16(0x807F), out=half)
    np.left_shift(exponent, np.uint16(7), out=field, dtype=np.uint16)
    if kind.itemsize == 2:
        np.bitwise_or(half, field, out=out.view(np.uint16))
        return
    np.bitwise_or(half, field, out=half)
    np.left_shift(planes[1], np.uint16(8), out=field, dtype=np.uint16)
    np.bitwise_or(field, planes[0], out=field)
    whole = scratch("whole", n, np.uint32)
    np.left_shift(half, np.uint32(16), out=whole, dtype=np.uint32)
    np.bitwise_or(whole, field, out=out.view(np.uint32))


def _join_high(kind: Kind, rest: np.ndarray, exponent: np.ndarray, out: np.ndarray) -> None:
    """Join the sign, the exponent and the upper mantissa bits to one byte for each element, eight elements at
    a time.
    """
    mantissa, words = kind.rest_bits - 1, len(rest) // 8
    sign, low = scratch("signs", words, np.uint64), scratch("mantissas", words, np.uint64)
    np.left_shift(rest.view(np.uint64), _U64(7 - mantissa), out=sign)
    np.bitwise_and(sign, _U64(0x80 * _BYTES), out=sign)
    np.bitwise_and(rest.view(np.uint64), _U64(((1 << mantissa) - 1) * _BYTES), out=low)
    np.bitwise_or(sign, low, out=sign)
    np.left_shift(exponent.view(np.uint64), _U64(mantissa), out=low)
    np.bitwise_and(low, _U64((0xFF << mantissa & 0xFF) * _BYTES), out=low)
    np.bitwise_or(sign, low, out=out.view(np.uint64))
