"""The expected next use of each piece of the host cache, from the order in which units are used. Plain Python
without I/O.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterable, Iterator, Sequence

from .cache_pieces import CachePiece

NEVER = float("inf")


class UseOrder:
    """The order in which units (modules streamed as a whole) are expected to be used, and how far they have
    been used.

    ``units``: the pieces that each unit is cut into (by `cache_pieces.cut`).
    """

    def __init__(self, units: Sequence[Sequence[CachePiece]]) -> None:
        self._units = units
        self._order: list[int] = []  # unit indices, soonest used first
        self._first_place: dict[int, int] = {}  # {unit: its first position in the order}
        self._used_pieces: dict[int, int] = {}  # {unit: number of its pieces used since the order was set}

    def set_order(self, units: Iterable[int]) -> None:
        """Set the order in which ``units`` are used next."""
        self._order = list(units)
        self._first_place = {}
        for position, unit in enumerate(self._order):
            self._first_place.setdefault(unit, position)
        self._used_pieces = {}

    def begin_use(self, piece: CachePiece) -> None:
        """Record that the piece is being used now."""
        self._used_pieces[piece.unit] = piece.number

    def end_use(self, piece: CachePiece) -> None:
        """Record that the piece has been used."""
        self._used_pieces[piece.unit] = piece.number + 1

    def distance(self, piece: CachePiece) -> float:
        """Return the number of units used before the piece, plus a fraction for the pieces before it in its
        unit.

        Returns NEVER if no use is expected.
        """
        position = self._first_place.get(piece.unit)
        if position is None:
            return NEVER
        if piece.number < self._used_pieces.get(piece.unit, 0):
            # The piece was used already since the order was set. Its next use is the next occurrence of its
            # unit, or one round later.
            with contextlib.suppress(ValueError):
                return float(self._order.index(piece.unit, position + 1))
            return float(len(self._order) + position)
        return self._distance_at(position, piece)

    def missing(self, present: Container[int], failed: Container[int]) -> Iterator[tuple[float, CachePiece]]:
        """Yield (distance, piece) of expected pieces, soonest first, except for ranks in ``present`` or in
        ``failed``.
        """
        for position, unit in enumerate(self._order):
            first = self._used_pieces.get(unit, 0) if position == self._first_place[unit] else 0
            for piece in self._units[unit][first:]:
                if piece.rank not in present and piece.rank not in failed:
                    yield self._distance_at(position, piece), piece

    def _distance_at(self, position: int, piece: CachePiece) -> float:
        """Return the number of units used before ``position`` in the order, plus a fraction for the earlier
        pieces of the unit.
        """
        return position + piece.number / (len(self._units[piece.unit]) + 1)
