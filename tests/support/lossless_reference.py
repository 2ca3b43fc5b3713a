"""The lossless format in plain NumPy, one tile at a time: the reference for tests of the fast encoder and decoders.

It was written from docs/codec.md and not from the fast code. It works in element order where the fast code works on
words.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from carom.core.codec.lossless_format import ALIGN, HEADER_BYTES, Header, checksum


def elements_of_bits(lanes: int) -> np.ndarray:
    """Return int64 [lanes, 32]: the element of a tile to which the bit of each lane's plane word belongs."""
    lane, bit = np.arange(lanes)[:, None], np.arange(32)[None, :]
    byte, v, u = bit // 8, bit % 8 // 2, bit % 2
    return 8 * (v * lanes + lane) + 4 * u + byte


def decode_reference(blob: np.ndarray, header: Header) -> np.ndarray:
    """Return the raw bytes (uint8 [raw_nbytes]) that ``blob`` (uint8, with a validated header) encodes."""
    kind, coded = header.kind, header.words * 4
    where = elements_of_bits(header.lanes)
    fields = np.zeros((header.planes, header.tiles * header.tile), np.uint32)
    exponent = np.zeros(header.tiles * header.tile, np.uint32)
    bits = (
        blob[header.bits_at : header.tiles_at].view("<u4").reshape(header.tiles, header.planes, header.lanes)
    )
    table = blob[header.tiles_at : header.tiles_at + 8 * header.tiles].view("<i8")
    stream = blob[header.escapes_at : header.escapes_at + header.escape_bytes]
    for tile in range(header.tiles):
        begin = tile * header.tile
        for plane in range(header.planes):
            fields[plane, begin + where] = (bits[tile, plane][:, None] >> np.arange(32, dtype=np.uint32)) & 1
        code = np.zeros(header.tile, np.uint32)
        for j in range(header.k):
            code |= fields[j, begin : begin + header.tile] << j
        exponent[begin : begin + header.tile] = header.base + code
        escaped = where[(code == (1 << header.k) - 1)[where]]  # row by row: lane, then bit
        entry = int(table[tile])
        if kind.version == 2:
            exponent[begin + escaped] = second_exponents(header, entry, stream, len(escaped))
            continue
        offset, wide = entry & ((1 << 40) - 1), entry >> 40 & 1
        for rank, element in enumerate(escaped):
            if wide:
                value = stream[offset + rank]
            else:
                value = header.escape_table[stream[offset + rank // 2] >> 4 * (rank % 2) & 15]
            exponent[begin + element] = value
    # Sign and mantissa: the bit planes are the upper bits (fp8, fp16), the byte planes the lower ones.
    rest = np.zeros_like(exponent)
    for j in range(kind.rest_bits):
        rest |= fields[header.k + j] << (8 * kind.byte_planes + j)
    for plane in range(kind.byte_planes):
        at = HEADER_BYTES + plane * header.byte_plane_stride
        rest[:coded] |= blob[at : at + coded].astype(np.uint32) << (8 * plane)
    m = kind.mantissa_bits
    sign, mantissa = rest >> m, rest & ((1 << m) - 1)
    value = (sign << (m + kind.exponent_bits) | exponent << m | mantissa)[:coded].astype("<u4")
    raw = value.view(np.uint8).reshape(-1, 4)[:, : kind.itemsize].reshape(-1)
    tail = np.frombuffer(header.tail, np.uint8)[: header.tail_count * kind.itemsize]
    return np.concatenate([raw, tail])


def second_exponents(header: Header, entry: int, stream: np.ndarray, count: int) -> list[int]:
    """Return the exponents of a tile's escapes in version 2 of the format."""
    at, groups = 8 * (entry & 0xFFFFFFFF), entry >> 32 & 0xFFFF
    codes = planes_to_values(stream[at : at + 8 * groups], 2)[:count]
    assert groups == -(-count // 32)
    at += 8 * groups
    literals = iter(planes_to_values(stream[at : at + 16 * (entry >> 48)], 4))
    return [next(literals) if code == 3 else header.escape_table[code] for code in codes]


def planes_to_values(data: np.ndarray, bits: int) -> list[int]:
    """Return the values whose bit planes ``data`` has: 32 values in ``bits`` words."""
    groups = data.view("<u4").reshape(-1, bits).tolist()
    return [sum((words[j] >> i & 1) << j for j in range(bits)) for words in groups for i in range(32)]


def values_to_planes(values: list[int], bits: int) -> bytes:
    """Return the bit planes of ``values``, whose last group of 32 is filled up with zeros."""
    words = [
        sum((value >> j & 1) << i for i, value in enumerate(values[begin : begin + 32]))
        for begin in range(0, len(values), 32)
        for j in range(bits)
    ]
    return np.array(words, "<u4").tobytes()


def encode_reference(raw: np.ndarray, header: Header) -> np.ndarray:
    """Return the blob (uint8) of ``raw`` bytes with the settings of ``header`` (kind, k, lanes, base, escape table)."""
    kind, coded = header.kind, header.words * 4
    values = np.zeros((header.tiles * header.tile, 4), np.uint8)
    values[:coded, : kind.itemsize] = raw[: coded * kind.itemsize].reshape(coded, kind.itemsize)
    value = values.view("<u4")[:, 0].astype(np.int64)
    m, window = kind.mantissa_bits, (1 << header.k) - 1
    exponent = value >> m & (1 << kind.exponent_bits) - 1
    rest = value >> (m + kind.exponent_bits) << m | value & (1 << m) - 1
    code = np.where(
        (exponent >= header.base) & (exponent < header.base + window), exponent - header.base, window
    )
    code[coded:] = 0
    fields = [code >> j & 1 for j in range(header.k)]
    fields += [rest >> (8 * kind.byte_planes + j) & 1 for j in range(kind.rest_bits)]
    where = elements_of_bits(header.lanes)
    words, table, stream, most = [], [], bytearray(), 0
    for begin in range(0, len(code), header.tile):
        words += [(field[begin + where] << np.arange(32)).sum(1).astype("<u4") for field in fields]
        is_escape = (code[begin : begin + header.tile] == window)[where]
        escaped = [int(e) for e in exponent[begin + where[is_escape]]]
        if kind.version == 2:
            three = list(header.escape_table[:3])
            codes = [three.index(e) if e in three else 3 for e in escaped]
            seconds = values_to_planes(codes, 2)
            literals = values_to_planes([e for e in escaped if e not in three], 4)
            table.append(len(stream) // 8 | len(seconds) // 8 << 32 | len(literals) // 16 << 48)
            stream += seconds + literals
            continue
        wide = any(e not in header.escape_table for e in escaped)
        fullest = int(is_escape.sum(1).max())
        table.append(len(stream) | wide << 40 | fullest << 48)
        most = max(most, fullest)
        if wide:
            stream += bytes(escaped)
        else:
            nibbles = [header.escape_table.index(e) for e in escaped] + [0] * (len(escaped) % 2)
            stream += bytes(low | high << 4 for low, high in zip(nibbles[::2], nibbles[1::2], strict=True))
    planes = [
        (rest[:coded] >> 8 * plane & 255).astype(np.uint8).tobytes() for plane in range(kind.byte_planes)
    ]
    sections = [*planes, np.stack(words).tobytes(), np.array(table, "<i8").tobytes(), bytes(stream)]
    body = b"".join(section + b"\0" * (-len(section) % ALIGN) for section in sections)
    header = replace(header, escape_bytes=len(stream), most_escapes=most)
    header = header.with_crc(checksum(header, memoryview(body)))
    return np.frombuffer(header.pack() + body, np.uint8)
