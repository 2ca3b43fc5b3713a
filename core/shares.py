"""PURE. Sessions with ``vram="auto"`` on one device: who gives way to whom, and when that is worth a reload.

A new session comes first: others give way to it at once, the one used least (then the oldest) before others. Later
bytes move only to a session that is short and has been used oftener, since the last move, by as many steps as
make up for loading them, here and perhaps back again. Models that alternate are used alike, so nothing moves:
any fixed split copies the same bytes a round, and every exchange would come on top. Every move doubles the lead
that the next one needs, so that loads which come in bursts settle too.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

LEAD, MOST = 3, 1 << 12  # steps ahead of another session; doubled by every move


class Shares:
    """The sessions of one device, by a number each."""

    def __init__(self) -> None:
        self._uses: dict[int, int] = {}  # since the last move; in the order in which they joined
        self._lead = LEAD

    def join(self, key: int) -> None:
        """A new session; all begin anew."""
        self._uses = dict.fromkeys((*self._uses, key), 0)
        self._lead = LEAD

    def returned(self, key: int) -> None:
        """``key`` was away for a while, and what others did meanwhile is no lead."""
        if key in self._uses:
            self._begin_anew()

    def leave(self, key: int) -> None:
        """A session ended."""
        if key in self._uses:
            self._uses = dict.fromkeys((other for other in tuple(self._uses) if other != key), 0)

    def only(self, keys: Container[int]) -> None:
        """Sessions other than ``keys`` are there no more."""
        self._uses = {key: uses for key, uses in self._uses.items() if key in keys}

    def uses(self, key: int) -> int:
        """Steps of ``key`` since the last move."""
        return self._uses.get(key, 0)

    def before_all(self, key: int) -> list[int]:
        """The others in the order in which they give way to a new session."""
        uses = self._uses  # threads join and leave meanwhile
        return sorted((other for other in uses if other != key), key=lambda other: uses[other])

    def used(self, key: int, short: bool, spare: Mapping[int, int]) -> int | None:
        """A step of ``key`` begins; who gives way to it now, None for nobody.

        ``short``: not all of its weights are resident. ``spare``: bytes that others could give.
        """
        uses = self._uses
        if key not in uses:
            return None
        uses[key] += 1
        if not short:
            return None
        givers = [other for other in uses if other != key and spare.get(other, 0) > 0]
        giver = min(givers, key=lambda other: uses[other], default=None)
        if giver is None or uses[key] - uses[giver] < self._lead:
            return None
        self._lead = min(MOST, 2 * self._lead)
        self._begin_anew()
        return giver

    def _begin_anew(self) -> None:
        self._uses = dict.fromkeys(self._uses, 0)
