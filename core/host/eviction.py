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

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

EVICTIONS = ("belady", "fifo", "priority")


@dataclass
class EvictionPolicy:
    """A policy that chooses which pieces a cache keeps after their use: at most ``room`` of ``total`` pieces.

    ``by_arrival``: whether the piece that was read first is evicted first, after its use.
    Pieces are identified by their ranks. The functions called ``next_use`` return the number of accesses
    until a rank is expected to be used again (lower: sooner).
    """

    eviction: str
    room: int
    total: int
    kept: set[int] = field(default_factory=set)
    by_arrival: bool = False
    _credit: float = 0.0
    # pieces that were adopted and that a former cache did not keep, in the order of adoption
    _others: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.by_arrival = self.eviction == "fifo"

    def record_uses(self, ranks: Iterable[int], next_use: Callable[[int], float]) -> None:
        """Record that the pieces ``ranks`` were used, in this order, and choose anew which pieces are kept."""
        if self.by_arrival or self.room <= 0:
            return
        score: Callable[[int], float] = next_use if self.eviction == "belady" else float
        for rank in ranks:
            if rank in self.kept:
                continue
            if len(self.kept) < self.room:
                if self.eviction == "priority" or self._keep_next():
                    self.kept.add(rank)
                continue
            worst = max(self.kept, key=score)
            if score(rank) < score(worst):
                self.kept.remove(worst)
                self.kept.add(rank)

    def adopt(self, rank: int, favoured: bool) -> None:
        """Record that the piece ``rank`` is in the cache from the start, and keep it if there is room.

        ``favoured``: whether a former cache kept it. Such a piece takes the place of one that is kept and was not.
        """
        if self.by_arrival:
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
