"""Defines `SharedCache`: the host cache of a session some of whose units are in a `SharedImage`.

The bytes of these units are always in RAM, so they are neither read nor evicted. All other units are served by the
session's own `HostCache`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from .cache_buffer import CacheFigures
from .cache_pieces import CachePiece
from .host_cache import HostCache, PieceBytes
from .shared_image import SharedImage

Inspect = Callable[[CachePiece, torch.Tensor], Any]


class SharedCache:
    """The units of ``pieces`` (by their numbers) are in ``image``; ``cache`` holds the others.

    ``inspect``: a function that is called with each piece of the image and its bytes at the piece's first use; the
    result is kept with the piece. The methods are those of `HostCache`.
    """

    def __init__(
        self, cache: HostCache, image: SharedImage, pieces: Mapping[int, Sequence[CachePiece]], inspect: Inspect | None
    ) -> None:  # fmt: skip
        self._cache, self._image, self._pieces, self._inspect = cache, image, pieces, inspect
        self._found: dict[int, Any] = {}  # results of inspections, by the rank of the piece

    @property
    def complete(self) -> bool:
        """Whether all units are in RAM and stay there."""
        return self._cache.complete

    @property
    def limit_bytes(self) -> int:
        """The largest number of bytes of the session's own buffers."""
        return self._cache.limit_bytes

    def adopt(self, order: Iterable[int]) -> None:
        """Take over kept pieces of units that are not in the image."""
        self._cache.adopt(order)

    def expect(self, units: Iterable[int]) -> None:
        """Read units that are not in the image ahead."""
        self._cache.expect(units)

    def has(self, unit: int) -> bool:
        """Return whether all bytes of the unit are in RAM."""
        return unit in self._pieces or self._cache.has(unit)

    def acquire(self, pieces: Sequence[CachePiece]) -> list[PieceBytes]:
        """Return the bytes of the first of ``pieces``, with the results of their inspection, as `HostCache` does: of all of
        them if their unit is in the image.
        """
        if pieces[0].unit not in self._pieces:
            return self._cache.acquire(pieces)
        return [(self._image.bytes_of(piece), self._inspection(piece)) for piece in pieces]

    def release(self, pieces: Sequence[CachePiece], copies: Sequence[Any]) -> None:
        """Release what `acquire` returned, as `HostCache` does."""
        if pieces[0].unit not in self._pieces:
            self._cache.release(pieces, copies)

    def _inspection(self, piece: CachePiece) -> Any:
        """Return the inspection result of a piece of the image."""
        if self._inspect is not None and piece.rank not in self._found:
            self._found[piece.rank] = self._inspect(piece, self._image.bytes_of(piece))
        return self._found.get(piece.rank)

    def inspections(self, unit: int) -> list[Any] | None:
        """Return the inspection results of the unit's pieces, or None if any piece is not in RAM."""
        if unit not in self._pieces:
            return self._cache.inspections(unit)
        return [self._inspection(piece) for piece in self._pieces[unit]]

    def discard(self, unit: int) -> None:
        """Evict the unit's pieces because their bytes are wrong. Pieces of the image are inspected again."""
        for piece in self._pieces.get(unit, ()):
            self._found.pop(piece.rank, None)
        if unit not in self._pieces:
            self._cache.discard(unit)

    def recover(self) -> None:
        """Bring the session's own buffers into order after an interrupt."""
        self._cache.recover()

    def hold_back(self, nbytes: int) -> None:
        """Leave ``nbytes`` of the session's own buffers unallocated for now."""
        self._cache.hold_back(nbytes)

    def figures(self) -> CacheFigures:
        """Return the figures of the session's own buffers."""
        return self._cache.figures()

    def reads(self) -> list[tuple[str, float, float, int]]:
        """Return the latest reads as (name, start and end in seconds of perf_counter, bytes)."""
        return self._cache.reads()

    def total_read(self) -> int:
        """Return the number of bytes that this session has read so far."""
        return self._cache.total_read()

    def close(self) -> None:
        """Close the session's own cache. The image stays as it is."""
        self._cache.close()
