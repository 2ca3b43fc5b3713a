"""Checksums of packed tensors that stay packed in the host cache: of the bytes as they were read, whatever pieces they lie in.

A piece's part of each blob is summed when the piece is read, on a thread of the cache's (`HostCache`). When a unit's pieces
are handed out, the sums of each blob's parts are joined and compared with the checksum in its header, before anything
decodes it.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..codec.crc import join
from ..codec.lossless_format import HEADER_BYTES, Header
from ..codec.packed import corrupt
from ..errors import WeightsError
from .pieces import Piece
from .reader import as_bytes

Sums = tuple[int | None, ...]  # of a piece's parts; None where a header is not the one that was parsed


@dataclass(frozen=True)
class Blob:
    """A packed tensor within its unit: byte ``at`` onwards (a multiple of 4096), under ``header``; from file ``path``."""

    at: int
    header: Header
    name: str
    path: str


@dataclass(frozen=True, slots=True)
class _Part:
    """Bytes ``low`` to ``high`` of a piece belong to the unit's blob number ``blob``; ``first``: they begin it."""

    blob: int
    low: int
    high: int
    first: bool


class BlobChecks:
    """Of units cut into ``pieces`` (as by `pieces.cut`), with their ``blobs``."""

    def __init__(self, pieces: Sequence[Sequence[Piece]], blobs: Sequence[Sequence[Blob]]) -> None:
        self._pieces, self._blobs = pieces, blobs
        self._parts = {
            piece.rank: _parts(piece, mine)
            for unit, mine in zip(pieces, blobs, strict=True)
            for piece in unit
        }
        self._sound: dict[int, Sequence[Sums]] = {}  # by unit: what was last found to be right

    def look(self, piece: Piece, memory: torch.Tensor) -> Sums:
        """The sums of ``piece``, whose bytes were just read to ``memory``. Any thread; zlib lets others run meanwhile."""
        found: list[int | None] = []
        parts = self._parts[piece.rank]
        data = as_bytes(memory).toreadonly() if parts else memoryview(b"")
        for part in parts:
            low, header = part.low, self._blobs[piece.unit][part.blob].header
            if part.first:
                low += HEADER_BYTES
                if data[part.low : low] != header.pack():
                    found.append(None)
                    continue
            found.append(zlib.crc32(data[low : part.high]))
        return tuple(found)

    def judge(self, unit: int, found: Sequence[Sums]) -> None:
        """Raises WeightsError naming the tensor unless ``found``, the sums of all of the unit's pieces, are what its blobs'
        headers say."""
        before = self._sound.get(unit)
        if before is not None and all(a is b for a, b in zip(before, found, strict=True)):
            return
        blobs = self._blobs[unit]
        totals: list[int | None] = [zlib.crc32(blob.header.with_crc(0).pack()) for blob in blobs]
        for piece, sums in zip(self._pieces[unit], found, strict=True):
            for part, crc in zip(self._parts[piece.rank], sums, strict=True):
                total = totals[part.blob]
                nbytes = part.high - part.low - (HEADER_BYTES if part.first else 0)
                totals[part.blob] = None if crc is None or total is None else join(total, crc, nbytes)
        for blob, total in zip(blobs, totals, strict=True):
            if total != blob.header.crc:
                raise WeightsError(f"{blob.path}: {corrupt(blob.name, 'its checksum differs')}")
        self._sound[unit] = found


def _parts(piece: Piece, blobs: Sequence[Blob]) -> tuple[_Part, ...]:
    found = []
    for number, blob in enumerate(blobs):
        low, high = max(blob.at, piece.start), min(blob.at + blob.header.total, piece.start + piece.nbytes)
        if low < high:
            found.append(_Part(number, low - piece.start, high - piece.start, low == blob.at))
    return tuple(found)
