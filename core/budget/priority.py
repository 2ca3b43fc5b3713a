"""`PriorityOrder`: decide which session gives way to another, and when moving bytes between them is worth it.

The sessions share one memory. A session gives way when it gives up device bytes of weights for another
session. Sessions of lower priority give way first; of equal priorities the least used session, then the
oldest. To a new session, all others of the same or lower priority give way at once.

A session is short of memory if some of its weights are not resident on the device. Once the new session runs,
bytes move at once from a session of lower priority to a session that is short of memory. Between equal
priorities, bytes move only to a session that is short of memory and has run more steps since the last move. The
difference (the lead) must make up for the cost of loading the weights, and perhaps of moving them back. Models
that alternate run equally many steps, so no bytes move between them. That is intended: any fixed split copies
the same bytes in each round, and each move would add copies. Every move doubles the lead that the next move
needs, so sessions that are used in bursts settle too. The module imports no torch and has no side effects.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

LEAD, MOST = 3, 1 << 12  # the lead in steps that a move needs, at first and at most; doubled by every move


class PriorityOrder:
    """The priorities and the step counts of the sessions that share one memory.

    Each session is identified by an integer key.
    """

    def __init__(self) -> None:
        self._uses: dict[int, int] = {}  # key -> steps since the last move, in the order of joining
        self._priorities: dict[int, int] = {}
        self._lead = LEAD

    def join(self, key: int, priority: int = 0) -> None:
        """Add the new session ``key`` and set the step counts of all sessions to 0."""
        self._uses = dict.fromkeys((*self._uses, key), 0)
        self._priorities = {**self._priorities, key: priority}
        self._lead = LEAD

    def returned(self, key: int) -> None:
        """Set all step counts to 0, because session ``key`` was parked (off the device) and returned.

        Otherwise the steps that other sessions ran meanwhile would count as a lead.
        """
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
        """Return the number of steps of ``key`` since the last move."""
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
        """Return the sessions that give way to the session ``key``, the first to give way first.

        Sessions of higher priority are left out unless ``all_of_them`` is set, which is for bytes that
        ``key`` cannot run without.
        """
        uses, ranks = self._uses, self._priorities  # other threads may replace these dicts meanwhile
        mine = ranks.get(key, 0)
        found = [other for other in uses if other != key and (all_of_them or ranks.get(other, 0) <= mine)]
        return sorted(found, key=lambda other: (ranks.get(other, 0), uses[other]))

    def used(self, key: int, short: bool, spare: Mapping[int, int]) -> int | None:
        """Count a step of ``key`` that begins, and return the session that gives way to ``key`` now, or None.

        ``short``: whether some of the weights of ``key`` are not resident. ``spare``: key of another
        session -> bytes that the session could give.
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
