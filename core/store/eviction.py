"""PURE. What a bounded host cache keeps: three policies over one interface, so that they can be compared.

*belady* keeps what the learnt order needs soonest (L. A. Belady, "A study of replacement algorithms for a
virtual-storage computer", IBM Systems Journal 5(2), 1966). *fifo* gives up what came first, as a rotating
window does. *priority* keeps the first units of the model for good and streams the others.

A buffer whose piece has been used is either *kept* or free to be overwritten. Belady's rule decides nothing
where pieces are used in a circle (every choice misses as often), so while there is room the kept ones are
spread evenly over the order of use: then the disk never idles for long nor does it fall behind for long.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

EVICTIONS = ("belady", "fifo", "priority")


@dataclass
class Keeper:
    """Chooses for ``room`` kept pieces of ``total``. Pieces are known by their ranks; ``next_use`` gives accesses
    until a rank is expected again (lower: sooner)."""

    eviction: str
    room: int
    total: int
    kept: set[int] = field(default_factory=set)
    _credit: float = 0.0

    def used(self, rank: int, next_use: Callable[[int], float]) -> int | None:
        """``rank`` has been used: the rank that need not be kept any more (perhaps itself), None if all may stay."""
        if self.eviction == "fifo" or self.room <= 0:
            return rank
        if rank in self.kept:
            return None
        if len(self.kept) < self.room:
            if self.eviction == "priority" or self._turn():
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

    def _turn(self) -> bool:
        self._credit += self.room / max(1, self.total)
        if self._credit >= 1 - 1e-9:
            self._credit -= 1
            return True
        return False

    def gone(self, rank: int) -> None:
        """The piece lost its buffer."""
        self.kept.discard(rank)

    def choose(
        self, ranks: Collection[int], next_use: Callable[[int], float], arrival: Callable[[int], int]
    ) -> int:
        """Which of ``ranks``, all of them free to go, is overwritten first."""
        if self.eviction == "fifo":
            return min(ranks, key=arrival)
        return max(ranks, key=lambda rank: (next_use(rank), rank))
