"""Defines `RangeChecks`: compares file ranges with the CRC-32 that they had when they were written.

Carom writes weights to spill files and reads them back in parts: in the order of use, in any thread, and not always
in the same parts. The CRC-32 of each part is computed when the drive has delivered it for the first time. When all
parts of a range have come, their CRCs are combined and compared. The last part is then refused if they differ, so
no weight is used whole before it was compared. After a range was found correct, reads of it cost nothing.
"""

from __future__ import annotations

import bisect
import threading
import zlib
from dataclasses import dataclass, field

from ..codec.crc import combine_crc32
from ..common.errors import WeightsError
from .index import SourceFile


@dataclass(eq=False)
class _Range:
    """The bytes ``start`` to ``end`` of a file, which hold the tensor ``name`` and had the CRC-32 ``crc``.

    ``parts``: (start, end, CRC-32) of the parts that were read, sorted and without overlaps. ``correct``: None until
    all parts were read.
    """

    start: int
    end: int
    crc: int
    name: str
    parts: list[tuple[int, int, int]] = field(default_factory=list)
    correct: bool | None = None

    def missing(self, start: int, end: int) -> list[tuple[int, int]]:
        """Return what lies between ``start`` and ``end`` in the range and was not read yet, as (start, end)."""
        found, at, end = [], max(start, self.start), min(end, self.end)
        for low, high, _ in self.parts:
            if low >= end:
                break
            if low > at:
                found.append((at, low))
            at = max(at, high)
        return [*found, (at, end)] if at < end else found

    def compare(self) -> None:
        """Set ``correct`` if all parts were read."""
        if self.correct is not None or self.missing(self.start, self.end):
            return
        total = 0
        for low, high, crc in self.parts:
            total = combine_crc32(total, crc, high - low)
        self.correct = total == self.crc
        self.parts.clear()


class RangeChecks:
    """The file ranges of one session whose CRC-32 is known. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # {file: its ranges, by their start}. Ranges of a file do not overlap.
        self._ranges: dict[SourceFile, list[_Range]] = {}

    def add(self, file: SourceFile, start: int, nbytes: int, crc: int, name: str) -> None:
        """Expect the CRC-32 ``crc`` of the ``nbytes`` bytes from ``start`` of ``file``, which are the tensor ``name``.
        A range that was added before is left as it is.
        """
        with self._lock:
            ranges = self._ranges.setdefault(file, [])
            place = bisect.bisect_left(ranges, start, key=_start)
            if place == len(ranges) or ranges[place].start != start:
                ranges.insert(place, _Range(start, start + nbytes, crc, name))

    def covers(self, file: SourceFile) -> bool:
        """Return whether any range of ``file`` is to be compared."""
        return file in self._ranges

    def compare(self, file: SourceFile, offset: int, data: memoryview) -> None:
        """Record that ``data`` was read from byte ``offset`` of ``file``, and compare the ranges that are complete now.

        Raises WeightsError that names the tensor and the file if a range in ``data`` differs from what was written,
        also if that was found earlier.
        """
        if not self._ranges:
            return
        end = offset + len(data)
        for found in self._overlapping(file, offset, end):
            while found.correct is None:
                with self._lock:
                    missing = found.missing(offset, end)
                    if not missing:
                        found.compare()
                        break
                # Without the lock, so that several threads compute at once: zlib releases the GIL.
                parts = [(low, high, zlib.crc32(data[low - offset : high - offset])) for low, high in missing]
                with self._lock:
                    # Another thread may have read some of these bytes meanwhile. What it left is found in the next turn.
                    for part in parts:
                        if found.missing(*part[:2]) == [part[:2]]:
                            bisect.insort(found.parts, part)
            if found.correct is False:
                raise _damaged(file, found.name)

    def _overlapping(self, file: SourceFile, start: int, end: int) -> list[_Range]:
        """Return the ranges of ``file`` that have bytes between ``start`` and ``end``."""
        with self._lock:
            ranges = self._ranges.get(file, [])
            first = max(0, bisect.bisect_right(ranges, start, key=_start) - 1)
            last = bisect.bisect_left(ranges, end, key=_start)
            return [found for found in ranges[first:last] if found.end > start]


def _start(found: _Range) -> int:
    return found.start


def _damaged(file: SourceFile, name: str) -> WeightsError:
    return WeightsError(
        f"{file.path}: the bytes of {name} are not those that were written (their CRC-32 differs). The drive or another "
        "program damaged this spill file. Close the session, do not save the module, and load it again; check the "
        "drive (the system's log names the device), or name a folder on another drive as disk="
    )
