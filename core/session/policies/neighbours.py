"""`Neighbours`: the policy that asks rarely used sessions on the same device or shared budget to give up
memory to this session.
"""

from __future__ import annotations

import math

from ...budget.ledger import BudgetLedger
from ..layout import Outcome, Wanted
from .policy import Observation, StepClock


class Neighbours:
    """Counts the steps of a session and of its neighbours, which are the sessions on the same device or
    shared budget.

    If this session is short of memory, a neighbour that is used much less is asked to give up memory.
    """

    def __init__(self, ledger: BudgetLedger) -> None:
        self._ledger = ledger

    def next_step(self, settled: int) -> float:
        """Return 0 while the budget follows the device, because every step is counted; otherwise infinity."""
        return math.inf if self._ledger.governor is None else 0

    def due(self, clock: StepClock) -> bool:
        """Return whether the session has neighbours, and no backward of the last step is outstanding."""
        mates = self._ledger.mates
        return mates is not None and len(mates.members) > 1 and not clock.awaiting

    def decide(self, seen: Observation) -> Wanted | None:
        """Count a step, and let a neighbour give up memory if this session is short of it. Always returns
        None.
        """
        self._ledger.count_use()
        return None

    def fallback(self, failed: Wanted, error: BaseException) -> Wanted | None:
        """Return None, because this policy never asks for a layout."""
        return None

    def took(self, outcome: Outcome) -> None:
        """Do nothing, because this policy never asks for a layout."""
