"""CRC-32 (zlib's) of a large buffer on several threads: the CRCs of its parts are computed in parallel and
combined.

Combining is zlib's crc32_combine, which Python does not offer. Appending n zero bytes to a message is a
linear map of its CRC over GF(2), so crc(a + b) = zeros(len(b))(crc(a)) ^ crc(b). The map for 2 ** p bytes is
32 words, and is the square of the map for 2 ** (p - 1) bytes.
"""

from __future__ import annotations

import functools
import zlib
from concurrent.futures import Executor

PART = 4 << 20  # bytes that one task computes; zlib releases the GIL
_POLYNOMIAL = 0xEDB88320


def crc32(data: memoryview, start: int = 0, pool: Executor | None = None) -> int:
    """Return ``zlib.crc32(data, start)``; with ``pool`` and more than `PART` bytes, the parts are computed on
    its threads.
    """
    if pool is None or len(data) <= PART:
        return zlib.crc32(data, start)
    parts = [data[at : at + PART] for at in range(0, len(data), PART)]
    total = start
    for part, crc in zip(parts, pool.map(zlib.crc32, parts), strict=True):
        total = combine_crc32(total, crc, len(part))
    return total


def combine_crc32(first: int, second: int, count: int) -> int:
    """Return the CRC-32 of a message of two parts from their CRCs ``first`` and ``second``; the second has
    ``count`` bytes.
    """
    for power in range(count.bit_length()):
        if count >> power & 1:
            first = _multiply(_zeros_map(power), first)
    return first ^ second


def _multiply(matrix: tuple[int, ...], vector: int) -> int:
    """Return ``matrix`` (32 columns over GF(2), each a 32-bit word) times the bits of ``vector``."""
    total = 0
    for bit, column in enumerate(matrix):
        if vector >> bit & 1:
            total ^= column
    return total


@functools.cache
def _zeros_map(power: int) -> tuple[int, ...]:
    """Return the linear map that appending 2 ** ``power`` zero bytes applies to a CRC: column b is the image
    of bit b.
    """
    if power:
        step = _zeros_map(power - 1)
        return tuple(_multiply(step, column) for column in step)
    step = (_POLYNOMIAL, *(1 << bit for bit in range(31)))  # the map of one zero bit
    # Each round squares the map; after three rounds it is the map of one zero byte.
    for _ in range(3):
        step = tuple(_multiply(step, column) for column in step)
    return step
