"""CRC-32 checks of packed tensors (blobs) that stay packed in the host cache.

The cache reads the weights of a unit (a module whose weights are copied to the device together) in pieces,
which are byte ranges of the unit. A blob may extend over several pieces.

When a piece is read, a thread of the cache computes the CRC of the piece's part of each blob. Before a unit's
blobs are decoded, the CRCs of each blob's parts are combined and compared with the checksum in the blob's
header (lossless) or in the file's metadata (quantised). The author of a hostile file can write matching
checksums, so when a losslessly packed blob is read for the first time, its tile table is also compared with its
bit planes. After that, an equal checksum means equal bytes. No bytes of a quantised blob can lead a decoder
outside the blob: their places follow from the metadata, and every code is a valid index of its codebook.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..checkpoint.file_read import as_bytes
from ..codec import lossless_validation
from ..codec.blob_format import BlobFormat
from ..codec.blob_metadata import corrupt
from ..codec.crc import combine_crc32
from ..common.errors import WeightsError
from .cache_pieces import CachePiece


@dataclass(slots=True)
class PartChecksum:
    """The check results of the bytes of a packed tensor (blob) that lie in one piece of the host cache.

    ``crc``: the CRC-32 of those after the blob's head, or None if the head is not the one that was parsed
    earlier. ``tiles``: escape counts for comparison with the blob's tile table, or None if the table is known
    to be correct or the blob has none.
    """

    crc: int | None
    tiles: lossless_validation.RunSummary | None = None


PieceChecksums = tuple[PartChecksum, ...]  # one for each blob that the piece contains a part of


@dataclass(frozen=True)
class Blob:
    """A packed tensor at byte ``at`` (a multiple of 4096) of its unit's packed bytes, read from file
    ``path``.
    """

    at: int
    format: BlobFormat
    name: str
    path: str


@dataclass(frozen=True, slots=True)
class _Part:
    """The bytes ``low`` to ``high`` of a piece, which belong to the unit's blob number ``blob``.

    ``first``: whether they are the beginning of the blob.
    """

    blob: int
    low: int
    high: int
    first: bool


class BlobChecks:
    """The integrity checks of packed tensors that are read piece by piece.

    ``pieces`` and ``blobs``: for each unit (a module whose weights are copied together), the pieces it is cut
    into, and its packed tensors.
    """

    def __init__(self, pieces: Sequence[Sequence[CachePiece]], blobs: Sequence[Sequence[Blob]]) -> None:
        self._pieces, self._blobs = pieces, blobs
        self._parts = {
            piece.rank: _parts(piece, mine)
            for unit, mine in zip(pieces, blobs, strict=True)
            for piece in unit
        }
        # {unit: its last check results that were correct}
        self._correct: dict[int, Sequence[PieceChecksums]] = {}
        self._tables_checked: set[int] = set()  # units whose tile tables were compared with their bit planes

    def checksum(self, piece: CachePiece, memory: torch.Tensor) -> PieceChecksums:
        """Return the check results for the bytes of ``piece``, which were just read into ``memory``.

        Any thread may call this; zlib releases the GIL.
        """
        results: list[PartChecksum] = []
        parts, fits = self._parts[piece.rank], piece.unit in self._tables_checked
        data = as_bytes(memory).toreadonly() if parts else memoryview(b"")
        for part in parts:
            blob = self._blobs[piece.unit][part.blob]
            low, header = part.low, blob.format.header
            if part.first:
                low += len(blob.format.head)
                if data[part.low : low] != blob.format.head:
                    results.append(PartChecksum(None))
                    continue
            part_bytes = data[low : part.high]
            at = piece.start + low - blob.at
            tiles = (
                None
                if fits or header is None
                else lossless_validation.summarize_run(header, np.frombuffer(part_bytes, np.uint8), at)
            )
            results.append(PartChecksum(zlib.crc32(part_bytes), tiles))
        return tuple(results)

    def verify(self, unit: int, results: Sequence[PieceChecksums]) -> None:
        """Raise WeightsError naming the tensor unless ``results``, those of all pieces of the unit, match the
        blobs' checksums.
        """
        last_correct = self._correct.get(unit)
        if last_correct is not None and all(
            old is new for old, new in zip(last_correct, results, strict=True)
        ):
            return
        blobs = self._blobs[unit]
        totals: list[int | None] = [blob.format.crc_start for blob in blobs]
        tiles: list[list[lossless_validation.RunSummary]] = [[] for _ in blobs]
        for piece, sums in zip(self._pieces[unit], results, strict=True):
            for part, checksum in zip(self._parts[piece.rank], sums, strict=True):
                total = totals[part.blob]
                nbytes = part.high - part.low - (len(blobs[part.blob].format.head) if part.first else 0)
                totals[part.blob] = (
                    None
                    if checksum.crc is None or total is None
                    else combine_crc32(total, checksum.crc, nbytes)
                )
                if checksum.tiles is not None:
                    tiles[part.blob].append(checksum.tiles)
        for blob, total, tile_runs in zip(blobs, totals, tiles, strict=True):
            try:
                if total != blob.format.crc:
                    raise corrupt(blob.name, "its checksum differs")
                if unit not in self._tables_checked and blob.format.header is not None:
                    lossless_validation.check_runs(blob.format.header, tile_runs, blob.name)
            except WeightsError as error:
                raise WeightsError(f"{blob.path}: {error}") from None
        self._tables_checked.add(unit)
        for checksum in (checksum for sums in results for checksum in sums):
            checksum.tiles = None  # the comparison is done, so free the memory
        self._correct[unit] = results


def _parts(piece: CachePiece, blobs: Sequence[Blob]) -> tuple[_Part, ...]:
    """Return the parts of the unit's ``blobs`` that ``piece`` contains."""
    found = []
    for number, blob in enumerate(blobs):
        low, high = max(blob.at, piece.start), min(blob.at + blob.format.nbytes, piece.start + piece.nbytes)
        if low < high:
            found.append(_Part(number, low - piece.start, high - piece.start, low == blob.at))
    return tuple(found)
