"""`Replan`: the policy that decides once, by the measured times of the first steps, whether weights cross packed or
raw and whether residents stay packed, and requests that layout once the change would have paid for itself.

A layout assigns each weight to device memory, or to host memory or a file from which it is streamed.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable

from ...plan.profile import TensorTimes
from ..layout import Layout, Outcome, Wanted
from ..layout_manager import LayoutManager
from ..measured_planner import Advice
from .policy import Observation, StepClock

logger = logging.getLogger("carom")
FIRST = 4  # number of measured steps (without a session's first two) after which the layout is reviewed
_AGAIN = 8  # number of steps until the next attempt, if an attempt was not possible


class Replan:
    """Reviews a layout after its first measured steps.

    ``taken``: called when a layout that this policy requested is in effect.
    ``at``: the number of measured steps after which the layout is reviewed, infinite if no review is due.
    """

    def __init__(self, manager: LayoutManager, taken: Callable[[], None] = lambda: None) -> None:
        self._manager, self._taken = manager, taken
        self.at: float = FIRST
        # the request that was in effect when this policy last returned a request
        self._before: Wanted | None = None
        self._learnt: TensorTimes | None = None  # the times by which the layout was chosen

    def begin_anew(self) -> None:
        """Let the next layout be reviewed after its first measured steps."""
        self.at = FIRST

    @property
    def due_now(self) -> bool:
        """Whether a review is due before the next pass."""
        return self._manager.layout.meter.settled >= self.at

    def next_step(self, settled: int) -> float:
        """Return the number of measured steps after which the layout is reviewed."""
        return self.at

    def due(self, clock: StepClock) -> bool:
        """Return whether enough steps were measured for a review."""
        return clock.settled >= self.at

    def decide(self, seen: Observation) -> Wanted | None:
        """Return the request for a layout that is predicted to be faster, if the change would have paid for
        itself within the steps so far.

        Otherwise, or if no layout is faster, returns None.
        """
        clock, layout = seen.clock, seen.layout
        self.at = math.inf
        if self._manager.planner.chooses_packing(layout) and layout.meter.hold_next():
            self.at = clock.settled + 1
            return None
        try:
            advice = self._advise(layout, seen.wanted)
        except Exception as error:  # advice is optional: after an error the session goes on as before
            logger.warning("carom: the steps so far cannot be planned with: %s", str(error))
            return None
        # the latest steps were of another kind (training or inference), so there is no profile
        if advice is None:
            self.at = clock.settled + max(_AGAIN, clock.settled // 4)
        elif not advice.worthwhile:
            self._settle()
        elif clock.steps < advice.steps:
            self.at = clock.settled + advice.steps - clock.steps
        elif seen.unreferenced:
            return self._take(advice)
        else:  # an autograd graph of an earlier forward still needs the layout's units: try again later
            self.at = clock.settled + _AGAIN
        return None

    def fallback(self, failed: Wanted, error: BaseException) -> Wanted | None:
        """Return the previous request, whose layout fitted, or None if that request failed too."""
        before, self._before = self._before, None
        return before

    def took(self, outcome: Outcome) -> None:
        """Record that the layout that this policy requested, or its fallback, is in effect."""
        self._before = None
        manager, learnt, self._learnt = self._manager, self._learnt, None
        if outcome is Outcome.TOOK and learnt is not None and not manager.layout.plan.all_resident:
            seconds = manager.planner.predicted_seconds(manager.layout, learnt)
            manager.note_plan(dataclasses.replace(manager.layout.plan, predicted_seconds=seconds))
        self._taken()

    # -- reviews on request

    def best(self, layout: Layout, wanted: Wanted) -> Wanted | None:
        """Return the request for a layout that is predicted to be faster, or None if there is none.

        The steps so far need not suffice for the change to pay for itself.
        """
        advice = self._advise(layout, wanted)
        if advice is None:
            return None
        if not advice.worthwhile:
            self._settle()
            return None
        return self._take(advice)

    # -- implementation

    def _advise(self, layout: Layout, wanted: Wanted) -> Advice | None:
        """Return the planner's advice for the present budget."""
        manager = self._manager
        advice = manager.planner.advise(layout, wanted, manager.simple)
        if advice is not None:
            manager.note_plan(dataclasses.replace(layout.plan, predicted_seconds=advice.now))
        return advice

    def _take(self, advice: Advice) -> Wanted | None:
        """Return the request for the layout of ``advice``. Returns None if that needs weights unpacked, and host memory
        has no room for them.
        """
        manager, wanted = self._manager, advice.best.wanted
        packing = wanted.packing
        if packing is not None and packing.plain and not manager.unpack_streamed():
            self._settle()
            return None
        logger.info("carom: a step is predicted to be %.3g s faster with another layout", advice.saves)
        self._before, self.at = manager.present(), math.inf
        self._learnt = advice.learnt
        if packing is not None:
            wanted = dataclasses.replace(wanted, packing=dataclasses.replace(packing, auto=False))
        return wanted

    def _settle(self) -> None:
        """Record that weights go on to cross as they do now."""
        manager, packing = self._manager, self._manager.wanted.packing
        if packing is not None and packing.auto:
            settled = dataclasses.replace(packing, auto=False)
            manager.wanted = dataclasses.replace(manager.wanted, packing=settled)
