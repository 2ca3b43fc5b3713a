"""CRC-32 (zlib's) of a large buffer on several threads: of its parts, joined.

Joining is zlib's crc32_combine, which Python does not offer: appending n zero bytes to a message is a linear map of its
CRC over GF(2), so crc(a + b) = zeros(len(b))(crc(a)) ^ crc(b). The map of 2 ** p bytes is 32 words, the square of the one before.
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
        total = join(total, crc, len(part))
    return total


def join(first: int, second: int, count: int) -> int:
    """The CRC of a message of two parts: of the first, and of the second, which has ``count`` bytes."""
    for power in range(count.bit_length()):
        if count >> power & 1:
            first = _apply(_zeros(power), first)
    return first ^ second


def _apply(matrix: tuple[int, ...], vector: int) -> int:
    total = 0
    for bit, column in enumerate(matrix):
        if vector >> bit & 1:
            total ^= column
    return total


@functools.cache
def _zeros(power: int) -> tuple[int, ...]:
    """What appending 2 ** ``power`` zero bytes does to a CRC: column b is the image of bit b."""
    if power:
        step = _zeros(power - 1)
        return tuple(_apply(step, column) for column in step)
    step = (_POLYNOMIAL, *(1 << bit for bit in range(31)))  # one zero bit
    for _ in range(3):
        step = tuple(_apply(step, column) for column in step)  # one zero byte
    return step
