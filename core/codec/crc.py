"""CRC-32 (zlib's) of a large buffer on several threads: of its parts, joined.

Joining is zlib's crc32_combine, which Python does not offer: appending n zero bytes to a message is a linear map of its
CRC over GF(2), so crc(a + b) = zeros(len(b))(crc(a)) ^ crc(b). The map is 32 words and found by repeated squaring.
"""

from __future__ import annotations

import functools
import zlib
from concurrent.futures import Executor

PART = 4 << 20  # bytes; zlib releases the GIL
_POLYNOMIAL = 0xEDB88320


def crc32(data: memoryview, start: int = 0, pool: Executor | None = None) -> int:
    """As ``zlib.crc32(data, start)``; parts of `PART` bytes are computed on ``pool`` where there is more than one."""
    if pool is None or len(data) <= PART:
        return zlib.crc32(data, start)
    parts = [data[at : at + PART] for at in range(0, len(data), PART)]
    total = start
    for part, crc in zip(parts, pool.map(zlib.crc32, parts), strict=True):
        total = _apply(_zeros(len(part)), total) ^ crc
    return total


def _apply(matrix: tuple[int, ...], vector: int) -> int:
    total = 0
    for bit, column in enumerate(matrix):
        if vector >> bit & 1:
            total ^= column
    return total


@functools.lru_cache(maxsize=64)
def _zeros(count: int) -> tuple[int, ...]:
    """What appending ``count`` zero bytes does to a CRC: column b is the image of bit b."""
    step = (_POLYNOMIAL, *(1 << bit for bit in range(31)))  # one zero bit
    for _ in range(3):
        step = tuple(_apply(step, column) for column in step)  # one zero byte
    result = tuple(1 << bit for bit in range(32))
    while count:
        if count & 1:
            result = tuple(_apply(step, column) for column in result)
        step = tuple(_apply(step, column) for column in step)
        count >>= 1
    return result
