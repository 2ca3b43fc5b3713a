"""Checks of packed tensors that stay packed in the host cache: of the bytes as they were read, whatever pieces they lie in.

A piece's part of each blob is summed when the piece is read, on a thread of the cache's (`HostCache`). When a unit's pieces
are handed out, the sums of each blob's parts are joined and compared with the checksum in its header, before anything
decodes it. Whoever makes a file also writes its checksums: so the first time that a blob is read, its tile table is compared
with its bit planes besides. Bytes of the same checksum are then the same bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..codec import lossless_check
from ..codec.crc import join
from ..codec.lossless_format import HEADER_BYTES, Header
from ..codec.packed import corrupt
from ..errors import WeightsError
from .pieces import Piece
from .reader import as_bytes


@dataclass(slots=True)
class Sum:
    """Of a piece's part of a blob. ``crc``: None where the header is not the one that was parsed; ``tiles``: None where the
    blob is known to be one that an encoder wrote."""

    crc: int | None
    tiles: lossless_check.Tiles | None = None


Sums = tuple[Sum, ...]  # of a piece's parts


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
        self._fits: set[int] = set()  # units whose blobs' tile tables fit

    def look(self, piece: Piece, memory: torch.Tensor) -> Sums:
        """The sums of ``piece``, whose bytes were just read to ``memory``. Any thread; zlib lets others run meanwhile."""
        found: list[Sum] = []
        parts, fits = self._parts[piece.rank], piece.unit in self._fits
        data = as_bytes(memory).toreadonly() if parts else memoryview(b"")
        for part in parts:
            blob = self._blobs[piece.unit][part.blob]
            low, header = part.low, blob.header
            if part.first:
                low += HEADER_BYTES
                if data[part.low : low] != header.pack():
                    found.append(Sum(None))
                    continue
            mine = data[low : part.high]
            at = piece.start + low - blob.at
            tiles = None if fits else lossless_check.look(header, np.frombuffer(mine, np.uint8), at)
            found.append(Sum(zlib.crc32(mine), tiles))
        return tuple(found)

    def judge(self, unit: int, found: Sequence[Sums]) -> None:
        """Raises WeightsError naming the tensor unless ``found``, the sums of all of the unit's pieces, are what its blobs'
        headers say."""
        before = self._sound.get(unit)
        if before is not None and all(a is b for a, b in zip(before, found, strict=True)):
            return
        blobs = self._blobs[unit]
        totals: list[int | None] = [zlib.crc32(blob.header.with_crc(0).pack()) for blob in blobs]
        tiles: list[list[lossless_check.Tiles]] = [[] for _ in blobs]
        for piece, sums in zip(self._pieces[unit], found, strict=True):
            for part, mine in zip(self._parts[piece.rank], sums, strict=True):
                total = totals[part.blob]
                nbytes = part.high - part.low - (HEADER_BYTES if part.first else 0)
                totals[part.blob] = (
                    None if mine.crc is None or total is None else join(total, mine.crc, nbytes)
                )
                if mine.tiles is not None:
                    tiles[part.blob].append(mine.tiles)
        for blob, total, looked in zip(blobs, totals, tiles, strict=True):
            try:
                if total != blob.header.crc:
                    raise corrupt(blob.name, "its checksum differs")
                if unit not in self._fits:
                    lossless_check.compare(blob.header, looked, blob.name)
            except WeightsError as error:
                raise WeightsError(f"{blob.path}: {error}") from None
        self._fits.add(unit)
        for one in (one for sums in found for one in sums):
            one.tiles = None  # they have said what they had to
        self._sound[unit] = found


def _parts(piece: Piece, blobs: Sequence[Blob]) -> tuple[_Part, ...]:
    found = []
    for number, blob in enumerate(blobs):
        low, high = max(blob.at, piece.start), min(blob.at + blob.header.total, piece.start + piece.nbytes)
        if low < high:
            found.append(_Part(number, low - piece.start, high - piece.start, low == blob.at))
    return tuple(found)
