"""`PriorityOrder`: which of the sessions on one memory gives way to which other, and when that is worth the copies. Pure.

Sessions of lower priority give way first; among equals the one used least, then the oldest. A new session comes first among
equals: others give way to it at once. Later, bytes move at once from a session of lower priority to one that is short. Among
equals they move only to a session that is short and has been used oftener, since the last move, by as many steps as make up for
loading the weights, here and perhaps back again. Models that alternate are used alike, so nothing moves: any fixed split copies
the same bytes a round, and every exchange would come on top. Every move doubles the lead that the next one needs, so that loads
which come in bursts settle too.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

LEAD, MOST = 3, 1 << 12  # steps ahead of another session; doubled by every move


class PriorityOrder:
    """The sessions of one memory, by a number each."""

    def __init__(self) -> None:
        self._uses: dict[int, int] = {}  # steps since the last move; in the order in which sessions joined
        self._priorities: dict[int, int] = {}
        self._lead = LEAD

    def join(self, key: int, priority: int = 0) -> None:
        """Add the new session ``key``; all sessions' uses are counted anew."""
        self._uses = dict.fromkeys((*self._uses, key), 0)
        self._priorities = {**self._priorities, key: priority}
        self._lead = LEAD

    def returned(self, key: int) -> None:
        """Count all sessions' uses anew for ``key``, which was parked: the steps of others meanwhile are no lead."""
        if key in self._uses:
            self._count_anew()

    def leave(self, key: int) -> None:
        """Remove the session ``key``."""
        if key in self._uses:
            self._uses = dict.fromkeys((other for other in tuple(self._uses) if other != key), 0)
            self._priorities = {other: rank for other, rank in self._priorities.items() if other != key}

    def only(self, keys: Container[int]) -> None:
        """Remove all sessions but ``keys``."""
        self._uses = {key: uses for key, uses in self._uses.items() if key in keys}
        self._priorities = {key: rank for key, rank in self._priorities.items() if key in keys}

    def uses(self, key: int) -> int:
        """Return the steps of ``key`` since the last move."""
        return self._uses.get(key, 0)

    def highest(self, key: int) -> int:
        """Return a priority above that of every session but ``key``."""
        return 1 + max((rank for other, rank in self._priorities.items() if other != key), default=0)

    def lowest(self, key: int) -> int:
        """Return a priority below that of every session but ``key``."""
        return min((rank for other, rank in self._priorities.items() if other != key), default=0) - 1

    def set_priority(self, key: int, priority: int) -> None:
        """Set the priority of ``key``."""
        if key in self._uses:
            self._priorities = {**self._priorities, key: priority}

    def givers(self, key: int, all_of_them: bool = False) -> list[int]:
        """Return the sessions that give way to the new session ``key``, in their order.

        Sessions of higher priority are left out, unless ``all_of_them`` are wanted: for the least that ``key`` needs.
        """
        uses, ranks = self._uses, self._priorities  # threads join and leave meanwhile
        mine = ranks.get(key, 0)
        found = [other for other in uses if other != key and (all_of_them or ranks.get(other, 0) <= mine)]
        return sorted(found, key=lambda other: (ranks.get(other, 0), uses[other]))

    def used(self, key: int, short: bool, spare: Mapping[int, int]) -> int | None:
        """Count a step of ``key`` that begins; return the session that gives way to ``key`` now, None for none.

        ``short``: not all of the weights of ``key`` are resident. ``spare``: bytes that other sessions could give.
        """
        uses, ranks = self._uses, self._priorities
        if key not in uses:
            return None
        uses[key] += 1
        if not short:
            return None
        givers = [other for other in self.givers(key) if spare.get(other, 0) > 0]
        giver = givers[0] if givers else None
        if giver is None:
            return None
        if ranks.get(giver, 0) < ranks.get(key, 0):
            return giver
        if uses[key] - uses[giver] < self._lead:
            return None
        self._lead = min(MOST, 2 * self._lead)
        self._count_anew()
        return giver

    def _count_anew(self) -> None:
        self._uses = dict.fromkeys(self._uses, 0)
