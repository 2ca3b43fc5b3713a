"""`Replan`: the policy that requests a layout planned by measured times, if the time that the change takes
will be saved again.

A layout assigns each weight to device memory, or to host memory or a file from which it is streamed. To
review a layout is to search for a faster one.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable

from ...placement.placement import Placement
from ...plan.profile import TensorTimes
from ..codec_choice import CodecChoice, Later
from ..layout import Layout, Outcome, Wanted
from ..layout_manager import LayoutManager
from ..measured_planner import Advice
from .policy import Observation, StepClock

logger = logging.getLogger("carom")
FIRST = 4  # number of measured steps (without a session's first two) after which the layout is reviewed
_LAST = 64  # after this number of measured steps, a layout that was kept at a review is not reviewed again
_UNSURE = 8  # most steps to wait until readings of free memory agree
_AGAIN = 8  # number of steps until the next attempt, if an attempt was not possible


class Replan:
    """Reviews a layout after its first measured steps: searches for a faster layout.

    ``spare_bytes``: returns the additional bytes, by which the budget may rise.
    ``unsure``: returns whether the additional bytes are not known yet.
    ``worth``: returns whether a number of additional bytes makes a search worthwhile.
    ``forget_spare``: called if a layout with the additional bytes did not fit.
    ``taken``: called when a layout that this policy requested is in effect.
    ``at``: the number of measured steps after which the layout is reviewed, infinite if no review is due.
    """

    def __init__(
        self, manager: LayoutManager, codec: CodecChoice,
        spare_bytes: Callable[[], int] = lambda: 0, unsure: Callable[[], bool] = lambda: False,
        worth: Callable[[int], bool] = lambda nbytes: False, forget_spare: Callable[[], None] = lambda: None,
        taken: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._manager, self._codec = manager, codec
        self._spare_bytes, self._unsure, self._worth = spare_bytes, unsure, worth
        self._forget_spare, self._taken = forget_spare, taken
        self.at: float = FIRST
        # The result of a search: the placement of the layout that was in effect, the advice, and the profile
        # (measured times) on which it is based. Kept until the change would have paid for itself.
        self._found: tuple[Placement, Advice, TensorTimes] | None = None
        self._waited = 0  # number of steps for which a change has waited for the additional bytes to be known
        # the request that was in effect when this policy last returned a request
        self._before: Wanted | None = None

    def begin_anew(self) -> None:
        """Let the next layout be reviewed after its first measured steps."""
        self.at = FIRST

    def reconsider(self) -> None:
        """Let the layout be reviewed at the next step."""
        self.at = self._manager.layout.meter.settled

    @property
    def thought_over(self) -> bool:
        """Whether the present layout has been reviewed and is kept, so that no further review is due."""
        return self.at == math.inf

    @property
    def grows_now(self) -> bool:
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
        manager, clock, layout = self._manager, seen.clock, seen.layout
        self.at = math.inf
        chosen = self._codec.choose(layout, seen.wanted, clock.steps)
        if isinstance(chosen, Later):
            self.at = clock.settled + max(_AGAIN, chosen.steps - clock.steps)
            return None
        if chosen is not None:
            return self._take(chosen)
        found, self._found = self._found, None
        if found is None or not self._stands(found):
            found = None
            try:
                advised = self._advise(layout, manager.present(), clock.steps)
            except Exception as error:  # advice is optional: after an error the session goes on as before
                logger.warning("carom: the steps so far cannot be planned with: %s", str(error))
                return None
            # the latest steps were of another kind (training or inference), so there is no profile
            if advised is None:
                self.at = clock.settled + max(_AGAIN, clock.settled // 4)
                return None
            found = (layout.placement, *advised)
        advice = found[1]
        if advice.reason:
            # the prediction is wrong for the present layout, probably because other work disturbed the steps
            if not advice.understood:
                self.at = 2 * clock.settled + 2
            # the times of the first steps vary most, so review the layout again later
            elif clock.settled < _LAST:
                self.at = 4 * clock.settled
            return None
        self._found = found if advice.searched else None
        if clock.steps >= advice.steps and self._unsure() and self._waited < _UNSURE:
            self._waited += 1  # free memory is not known yet, and the layout could get additional bytes
            self.at = clock.settled + 1
        elif clock.steps < advice.steps:
            self.at = clock.settled + advice.steps - clock.steps
        elif seen.unreferenced:
            return self._take_advice(advice, found[2], manager.present())
        else:  # an autograd graph of an earlier forward still needs the layout's units: try again later
            self.at = clock.settled + _AGAIN
        return None

    def fallback(self, failed: Wanted, error: BaseException) -> Wanted | None:
        """Return the previous request, whose layout fitted, or None if that request failed too."""
        before, self._before = self._before, None
        if before is not None:
            self._forget_spare()
        return before

    def took(self, outcome: Outcome) -> None:
        """Record that the layout that this policy requested, or its fallback, is in effect."""
        self._before = None
        self._taken()

    # -- reviews on request

    def best(self, layout: Layout, wanted: Wanted) -> Wanted | None:
        """Return the request for a layout that is predicted to be at least 3 % faster, or None if there is
        none.

        The steps so far need not suffice for the change to pay for itself.
        """
        chosen = self._codec.choose(layout, wanted)
        if isinstance(chosen, Wanted):
            return self._take(chosen)
        advised = self._advise(layout, self._manager.present(), math.inf)
        if advised is None or advised[0].reason:
            return None
        return self._take_advice(*advised, self._manager.present())

    def improve(self, seen: Observation, wanted: Wanted) -> Wanted:
        """Return ``wanted`` with the profile (measured times) of the steps so far, for a layout that is made
        in any case.

        Returns ``wanted`` unchanged if the profile cannot be relied on.
        """
        manager = self._manager
        profile = manager.planner.understood_profile(seen.layout, wanted, manager.simple)
        if profile is None:
            return wanted
        self.at = math.inf
        return dataclasses.replace(wanted, profile=profile)

    # -- implementation

    def _advise(self, layout: Layout, wanted: Wanted, steps: float) -> tuple[Advice, TensorTimes] | None:
        """Return the planner's advice and the profile on which it is based, for the present budget plus the
        additional bytes.
        """
        manager = self._manager
        more = dataclasses.replace(wanted, vram=wanted.vram + self._spare_bytes())
        advised = manager.planner.advise(layout, more, manager.simple, steps)
        if advised is not None:
            plan = dataclasses.replace(manager.layout.plan, predicted_seconds=advised[0].now)
            manager.note_plan(plan)
        return advised

    def _stands(self, found: tuple[Placement, Advice, TensorTimes]) -> bool:
        """Return whether the result ``found`` of an earlier search still applies.

        It applies to the same layout and kind of step, unless more free memory has made a new search
        worthwhile.
        """
        placement, advice, learnt = found
        layout = self._manager.layout
        trains = layout.trains or self._manager.planner.backward
        if placement is not layout.placement or learnt.train != trains:
            return False
        more = self._manager.ledger.vram + self._spare_bytes() - advice.vram
        return more >= 0 and not self._worth(more)

    def _take_advice(self, advice: Advice, learnt: TensorTimes, wanted: Wanted) -> Wanted:
        logger.info("carom: a step is predicted to be %.3g s faster with another layout", advice.saves)
        vram = max(wanted.vram, advice.vram)
        # The restriction to units that were on the device was meant for the layout after the budget fell.
        # Drop it here.
        following = dataclasses.replace(wanted, vram=vram, profile=learnt, residents_among=None)
        self._manager.planner.remember(
            following, advice.carving, advice.plan
        )  # remembered so that planning this request does not repeat the search
        return self._take(following)

    def _take(self, wanted: Wanted) -> Wanted:
        self._before, self.at, self._waited = self._manager.present(), math.inf, 0
        return wanted
