"""PURE. When pieces are used next, by the order in which units are expected and by what was served of them since."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterable, Iterator, Sequence

from .pieces import Piece

NEVER = float("inf")


class Expected:
    """The order of use of ``units`` (as cut by `pieces.cut`), as it was told last."""

    def __init__(self, units: Sequence[Sequence[Piece]]) -> None:
        self._units = units
        self._order: list[int] = []  # units expected, soonest first
        self._distance: dict[int, int] = {}  # unit -> its first place in the order
        self._served: dict[int, int] = {}  # unit -> its pieces that were used since the order was told

    def tell(self, units: Iterable[int]) -> None:
        """``units`` are used next, in this order."""
        self._order = list(units)
        self._distance = {}
        for place, unit in enumerate(self._order):
            self._distance.setdefault(unit, place)
        self._served = {}

    def serving(self, piece: Piece) -> None:
        """The piece is needed now."""
        self._served[piece.unit] = piece.number

    def served(self, piece: Piece) -> None:
        """The piece has been used."""
        self._served[piece.unit] = piece.number + 1

    def when(self, piece: Piece) -> float:
        """Accesses until the piece's turn, a part of one for those within its unit; NEVER if it is not expected."""
        place = self._distance.get(piece.unit)
        if place is None:
            return NEVER
        if piece.number < self._served.get(piece.unit, 0):
            # That use is behind it: its next one is the next place of its unit, or one round later.
            with contextlib.suppress(ValueError):
                return float(self._order.index(piece.unit, place + 1))
            return float(len(self._order) + place)
        return self._at(place, piece)

    def coming(self, here: Container[int], failed: Container[int]) -> Iterator[tuple[float, Piece]]:
        """(when, piece) of what is needed next, soonest first, but for ranks that are ``here`` or have ``failed``."""
        for place, unit in enumerate(self._order):
            first = self._served.get(unit, 0) if place == self._distance[unit] else 0
            for piece in self._units[unit][first:]:
                if piece.rank not in here and piece.rank not in failed:
                    yield self._at(place, piece), piece

    def _at(self, place: int, piece: Piece) -> float:
        return place + piece.number / (len(self._units[piece.unit]) + 1)
