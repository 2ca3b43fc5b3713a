"""The expected next use of each piece of the host cache, from the order in which units are used. Plain Python
without I/O.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from .cache_pieces import CachePiece

NEVER = float("inf")
NOW = -1.0  # the distance of what a thread waits for


class UseOrder:
    """The order in which units (modules streamed as a whole) are expected to be used, and how far they have
    been used.

    ``units``: the pieces that each unit is cut into (by `cache_pieces.cut`).
    ``distances``: by the rank of a piece, the number of pieces that are expected to be used before it, counted from the
    call of `set_order`; NEVER if no use is expected. All of them are computed when the order is set, and a use replaces
    one by another that was computed then. ``waited_for``: the piece that a thread waits for, see `wait_for`.
    """

    def __init__(self, units: Sequence[Sequence[CachePiece]]) -> None:
        self._units = units
        self._never = {piece.rank: NEVER for pieces in units for piece in pieces}
        self.distances: dict[int, float] = dict(self._never)
        self.waited_for: CachePiece | None = None
        self._before_wait = NEVER  # the distance of that piece but for the wait
        self._order: list[CachePiece] = []  # soonest used first
        self._again: dict[int, float] = {}  # the distances of pieces that were used since the order was set
        self._place = 0  # of the first piece of the order that was not used

    def set_order(self, units: Iterable[int]) -> None:
        """Set the order in which ``units`` are used next."""
        order = [piece for unit in units for piece in self._units[unit]]
        first: dict[int, float] = {}
        again: dict[int, float] = {}
        for place in range(len(order) - 1, -1, -1):
            rank = order[place].rank
            # The use after the first one, or the same one in the next round.
            again[rank] = first.get(rank, len(order) + place)
            first[rank] = place
        waited_for, self.waited_for = self.waited_for, None
        self._order, self._again, self._place = order, again, 0
        self.distances.update(self._never)
        self.distances.update(first)
        if waited_for is not None:
            self.wait_for(waited_for)

    def end_uses(self, pieces: Iterable[CachePiece]) -> None:
        """Record that ``pieces`` have been used."""
        for piece in pieces:
            self.distances[piece.rank] = self._again.get(piece.rank, NEVER)
        place, order = self._place, self._order
        while place < len(order) and self.distances[order[place].rank] != place:
            place += 1
        self._place = place

    def wait_for(self, piece: CachePiece | None) -> None:
        """Note that a thread waits for ``piece`` now, or, if None, for none any more.

        The piece is needed before all others, whatever the order says: reads ahead would overwrite it, or take the buffer
        for it, again and again before the thread has seen it.
        """
        if self.waited_for is not None:
            self.distances[self.waited_for.rank] = self._before_wait
        self.waited_for = piece
        if piece is not None:
            self._before_wait, self.distances[piece.rank] = self.distances[piece.rank], NOW

    def missing(
        self, present: Container[int], failed: Container[int], most: int
    ) -> list[tuple[float, CachePiece]]:
        """Return (distance, piece) of at most ``most`` expected pieces, soonest first, except for ranks in ``present`` or
        in ``failed``.
        """
        found: list[tuple[float, CachePiece]] = []
        now = self.waited_for
        if now is not None and now.rank not in present and now.rank not in failed:
            found.append((NOW, now))
        distances = self.distances
        for place in range(self._place, len(self._order)):
            if len(found) >= most:
                break
            piece = self._order[place]
            # Another distance: the piece was used since the order was set, or it is the one that is waited for.
            if piece.rank not in present and piece.rank not in failed and distances[piece.rank] == place:
                found.append((place, piece))
        return found
