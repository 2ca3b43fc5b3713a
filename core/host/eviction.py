"""The eviction policies of a bounded RAM cache: Belady, FIFO and priority, behind one interface. Plain Python
without I/O.

*belady* keeps the pieces that the learnt order of use needs soonest (L. A. Belady, "A study of replacement
algorithms for a virtual-storage computer", IBM Systems Journal 5(2), 1966). *fifo* evicts the piece that was
read first, as a rotating window does. *priority* keeps the first units of the model for good and streams the
others.

A piece is a range of a unit's weights, read and evicted as a whole; the order of all pieces gives each a
rank. A buffer whose piece has been used is either *kept* or free to be overwritten. If all pieces are used in
turn, round after round, every choice of kept pieces leads to the same number of reads, so Belady's rule
decides nothing. So while there is room, the kept pieces are spread evenly over the order of use. Then the
disk neither idles for long nor falls behind for long.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

EVICTIONS = ("belady", "fifo", "priority")


@dataclass
class EvictionPolicy:
    """A policy that chooses which pieces a cache keeps after their use: at most ``room`` of ``total`` pieces.

    Pieces are identified by their ranks. The functions called ``next_use`` return the number of accesses
    until a rank is expected to be used again (lower: sooner).
    """

    eviction: str
    room: int
    total: int
    kept: set[int] = field(default_factory=set)
    _credit: float = 0.0
    # pieces that were adopted and that a former cache did not keep, in the order of adoption
    _others: list[int] = field(default_factory=list)

    def record_use(self, rank: int, next_use: Callable[[int], float]) -> int | None:
        """Record that the piece ``rank`` was used, and return the rank of a piece that may be evicted now.

        The returned rank may be the same piece; None means that all kept pieces stay.
        """
        if self.eviction == "fifo" or self.room <= 0:
            return rank
        if rank in self.kept:
            return None
        if len(self.kept) < self.room:
            if self.eviction == "priority" or self._keep_next():
                self.kept.add(rank)
                return None
            return rank
        score: Callable[[int], float] = next_use if self.eviction == "belady" else float
        worst = max(self.kept, key=score)
        if score(rank) >= score(worst):
            return rank
        self.kept.remove(worst)
        self.kept.add(rank)
        return worst

    def adopt(self, rank: int, favoured: bool) -> None:
        """Record that the piece ``rank`` is in the cache from the start, and keep it if there is room.

        ``favoured``: whether a former cache kept it. Such a piece takes the place of one that is kept and was not.
        """
        if self.eviction == "fifo":
            return
        if favoured and len(self.kept) >= self.room and self._others:
            self.kept.discard(self._others.pop())
        if len(self.kept) < self.room:
            self.kept.add(rank)
            if not favoured:
                self._others.append(rank)

    def _keep_next(self) -> bool:
        """Return whether to keep the piece that was just used, so that the kept ``room`` of ``total`` pieces
        are evenly spread.
        """
        self._credit += self.room / max(1, self.total)
        if self._credit >= 1 - 1e-9:
            self._credit -= 1
            return True
        return False

    def remove(self, rank: int) -> None:
        """Record that the piece ``rank`` is not in the cache any more."""
        self.kept.discard(rank)

    def choose_victim(
        self, ranks: Collection[int], next_use: Callable[[int], float], arrival: Callable[[int], int]
    ) -> int:
        """Return which of ``ranks``, all of which may be evicted, is overwritten first.

        ``arrival``: returns the sequence number of a rank's read.
        """
        if self.eviction == "fifo":
            return min(ranks, key=arrival)
        return max(ranks, key=lambda rank: (next_use(rank), rank))
