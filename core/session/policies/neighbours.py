"""`Neighbours`: other sessions on the same memory that are used much less give way to this one."""

from __future__ import annotations

import math

from ...budget.ledger import BudgetLedger
from ..layout import Outcome, Wanted
from .policy import Observation, StepClock


class Neighbours:
    """Counts a session's steps beside those of its neighbours, and asks one of them to give way where that pays."""

    def __init__(self, ledger: BudgetLedger) -> None:
        self._ledger = ledger

    def next_step(self, settled: int) -> float:
        """Return 0 while the session shares memory: every step is counted."""
        return math.inf if self._ledger.governor is None else 0

    def due(self, clock: StepClock) -> bool:
        """Return whether there are neighbours."""
        mates = self._ledger.mates
        return mates is not None and len(mates.members) > 1 and not clock.awaiting

    def decide(self, seen: Observation) -> Wanted | None:
        """Let a neighbour give way where this session is short. This session's own layout stays as it is."""
        self._ledger.count_use()
        return None

    def fallback(self, failed: Wanted, error: BaseException) -> Wanted | None:
        """Return None: no layout is ever wanted."""
        return None

    def took(self, outcome: Outcome) -> None:
        """Do nothing: no layout is ever wanted."""
