"""Decoder of the lossless format on the CPU: any run of tiles, chunk by chunk in memory that stays in the cache.

For files that are loaded or streamed from disk: plain torch operations (core/codec/lossless_torch.py) take eight times as
long on a CPU. NumPy releases the GIL in all of it, so several threads may decode at once.
"""

from __future__ import annotations

import numpy as np

from .lossless_format import HEADER_BYTES, OFFSET_BITS, TAIL_AT, WIDE_BIT, Header
from .scratch import scratch

CHUNK = 1 << 18  # elements decoded at once
_U64 = np.uint64
_EVEN = _U64(0x5555555555555555)  # every second bit
_PAIR = _U64(0x0303030303030303)  # the two lowest bits of each byte


def decode_bytes(blob: np.ndarray, header: Header, begin: int, out: np.ndarray) -> None:
    """Writes the raw bytes ``begin`` to ``begin + len(out)`` of the tensor into ``out`` (uint8, contiguous).

    ``blob``: uint8, whole and verified (`LosslessCodec.verify`); ``header`` of the same bytes.
    """
    size, coded = header.kind.itemsize, header.words * 4
    end = begin + len(out)
    step = max(1, CHUNK // header.tile) * header.tile
    first, last = begin // size, min(-(-end // size), coded)
    start = first // header.tile * header.tile if first < last else last  # else: the tail only
    while start < last:
        stop = min((start // step + 1) * step, -(-last // header.tile) * header.tile)
        count = min(stop, coded) - start
        whole = begin <= start * size and (start + count) * size <= end
        if whole:
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
    """Elements ``start`` (a tile's first) to ``start + count``, within one chunk, as bytes into ``out``."""
    kind, tile = header.kind, header.tile
    first, tiles = start // tile, -(-count // tile)
    shape = (header.tiles, header.planes, header.lanes)
    bits = blob[header.bits_at : header.tiles_at].view(np.uint32).reshape(shape)[first : first + tiles]
    exponent = scratch("exponent", tiles * tile, np.uint8)
    _spread(bits[:, : header.k], exponent)
    exponent += np.uint8(header.base)
    if header.most_escapes:
        _patch(blob, header, first, bits[:, : header.k], exponent)
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
    _join(kind.name, planes, rest, exponent, out.reshape(count, kind.itemsize))


def _spread(planes: np.ndarray, out: np.ndarray) -> None:
    """uint32 bit planes [tiles, p, lanes] -> their p-bit fields, uint8 in element order."""
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
    """A plane's words to 64 bits, bit 2v + u of each byte to bit 2v, of the upper half where u is 1."""
    np.copyto(out.reshape(plane.shape), plane)
    high = scratch("high", len(out), np.uint64)
    np.left_shift(out, _U64(31), out=high)
    np.bitwise_or(out, high, out=out)
    np.bitwise_and(out, _EVEN, out=out)


def _patch(blob: np.ndarray, header: Header, first: int, codes: np.ndarray, exponent: np.ndarray) -> None:
    """Gives escapes, whose codes are all ones, their exponents."""
    tiles, k, lanes = codes.shape
    tile = header.tile
    mask = scratch("mask", tiles * lanes, np.uint32).reshape(tiles, lanes)
    np.copyto(mask, codes[:, 0])
    for j in range(1, k):
        np.bitwise_and(mask, codes[:, j], out=mask)
    found = np.flatnonzero(np.unpackbits(mask.reshape(-1).view(np.uint8), bitorder="little").view(np.bool_))
    if not len(found):
        return
    table = blob[header.tiles_at + 8 * first : header.tiles_at + 8 * (first + tiles)].view(np.int64)
    offset, wide = table & ((1 << OFFSET_BITS) - 1), table >> WIDE_BIT & 1
    counts = np.diff(np.searchsorted(found, np.arange(tiles + 1) * tile))
    # Place of an escape in the stream in half bytes: its tile's start and its rank there.
    base = 2 * offset - ((np.cumsum(counts) - counts) << wide)
    at = np.repeat(base, counts)
    if wide.any():
        widths = np.repeat(wide, counts)
        at += np.arange(len(found)) << widths
    else:
        widths = None
        at += np.arange(len(found))
    stream = blob[header.escapes_at : header.escapes_at + header.escape_bytes]
    byte = stream.take(at >> 1)
    nibble = (byte >> ((at & 1) << 2).astype(np.uint8)) & np.uint8(15)
    value = np.frombuffer(header.escape_table, np.uint8).take(nibble)
    if widths is not None:
        value = np.where(widths == 1, byte, value)
    bit = np.arange(32)
    element = 8 * ((bit >> 1 & 3) * lanes + np.arange(lanes)[:, None]) + (bit & 1) * 4 + (bit >> 3)
    exponent[(found & -tile) + element.reshape(-1).take(found & (tile - 1))] = value


def _join(
    name: str, planes: list[np.ndarray], rest: np.ndarray | None, exponent: np.ndarray, out: np.ndarray
) -> None:
    """The bytes of each element, lowest first, to ``out`` [n, itemsize]."""
    n = len(exponent)
    if rest is None:  # sign, 8 exponent bits, 7 mantissa bits: the upper half of fp32 is a bf16
        half = scratch("half", n, np.uint16)
        np.copyto(half, planes[-1])
        sign = scratch("sign", n, np.uint16)
        np.bitwise_and(half, np.uint16(0x80), out=sign)
        np.left_shift(sign, np.uint16(8), out=sign)
        np.bitwise_and(half, np.uint16(0x7F), out=half)
        np.bitwise_or(half, sign, out=half)
        np.copyto(sign, exponent)
        np.left_shift(sign, np.uint16(7), out=sign)
        np.bitwise_or(half, sign, out=half)
        if name == "bf16":
            out.reshape(-1).view(np.uint8)[:] = half.view(np.uint8)
        else:
            out[:, 0], out[:, 1] = planes[0], planes[1]
            out[:, 2:] = half.view(np.uint8).reshape(n, 2)
        return
    if name == "e4m3":
        out[:, 0] = (rest & 8) * np.uint8(16) | exponent * np.uint8(8) | (rest & 7)
        return
    if planes:
        out[:, 0] = planes[0]
    out[:, -1] = (rest & 4) * np.uint8(32) | exponent * np.uint8(4) | (rest & 3)
