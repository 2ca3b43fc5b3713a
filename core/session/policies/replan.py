"""`Replan`: another layout by the times that a session's first steps took, where the change will pay for itself."""

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
FIRST = 4  # measured steps, the first two of a session apart, after which the layout is thought over
_LAST = 64  # measured steps after which nothing is thought over that was not worth while
_UNSURE = 8  # steps that a layout waits at most for passes to leave alike
_AGAIN = 8  # steps until it is tried again where something was in the way


class Replan:
    """Thinks a layout over after its first measured steps.

    ``spare_bytes``: returns by how many bytes the budget may rise; ``unsure``: whether that is not known yet; ``worth``:
    whether so many bytes are worth a search; ``forget_spare``: called where a layout with them did not fit; ``taken``: called
    when a layout that was asked for is in effect.
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
        self.at: float = FIRST  # measured steps after which the layout is thought over
        # For a placement: a layout that has not paid for itself yet, with the profile behind it.
        self._found: tuple[Placement, Advice, TensorTimes] | None = None
        self._waited = 0  # steps that a layout waited for room to be known
        self._before: Wanted | None = None  # what was wanted before the layout that was asked for

    def begin_anew(self) -> None:
        """Think the layout over again after its first measured steps."""
        self.at = FIRST

    def reconsider(self) -> None:
        """Think the layout over at the next step."""
        self.at = self._manager.layout.meter.settled

    @property
    def thought_over(self) -> bool:
        """Whether the present layout was thought over, and is kept."""
        return self.at == math.inf

    @property
    def grows_now(self) -> bool:
        """Whether the layout is to be thought over before the next pass."""
        return self._manager.layout.meter.settled >= self.at

    def next_step(self, settled: int) -> float:
        """Return the measured steps after which the layout is thought over."""
        return self.at

    def due(self, clock: StepClock) -> bool:
        """Return whether enough steps were measured."""
        return clock.settled >= self.at

    def decide(self, seen: Observation) -> Wanted | None:
        """Return a layout that is predicted to be faster, once the change will have paid for itself."""
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
            except Exception as error:  # advice is a service: without it the session goes on as it is
                logger.warning("carom: the steps so far cannot be planned with: %s", str(error))
                return None
            if advised is None:  # the latest steps were of another kind
                self.at = clock.settled + max(_AGAIN, clock.settled // 4)
                return None
            found = (layout.placement, *advised)
        advice = found[1]
        if advice.reason:
            if not advice.understood:  # steps were disturbed
                self.at = 2 * clock.settled + 2
            elif clock.settled < _LAST:  # the first steps are the least steady ones
                self.at = 4 * clock.settled
            return None
        self._found = found if advice.searched else None
        if clock.steps >= advice.steps and self._unsure() and self._waited < _UNSURE:
            self._waited += 1  # of the room that there is with it
            self.at = clock.settled + 1
        elif clock.steps < advice.steps:
            self.at = clock.settled + advice.steps - clock.steps
        elif seen.unreferenced:
            return self._take_advice(advice, found[2], manager.present())
        else:  # a graph of an earlier forward still needs the layout's units: another time
            self.at = clock.settled + _AGAIN
        return None

    def fallback(self, failed: Wanted, error: BaseException) -> Wanted | None:
        """Return the layout before, which did fit; None where that failed too."""
        before, self._before = self._before, None
        if before is not None:
            self._forget_spare()
        return before

    def took(self, outcome: Outcome) -> None:
        """Note that the layout is in effect."""
        self._before = None
        self._taken()

    # -- asked for by name

    def best(self, layout: Layout, wanted: Wanted) -> Wanted | None:
        """Return a layout that is predicted to be 3 % faster, whether or not the change has paid for itself; None for none."""
        chosen = self._codec.choose(layout, wanted)
        if isinstance(chosen, Wanted):
            return self._take(chosen)
        advised = self._advise(layout, self._manager.present(), math.inf)
        if advised is None or advised[0].reason:
            return None
        return self._take_advice(*advised, self._manager.present())

    def improve(self, seen: Observation, wanted: Wanted) -> Wanted:
        """Return ``wanted`` with what the steps so far taught, for a layout that is made anyway."""
        manager = self._manager
        profile = manager.planner.understood_profile(seen.layout, wanted, manager.simple)
        if profile is None:
            return wanted
        self.at = math.inf
        return dataclasses.replace(wanted, profile=profile)

    # -- how

    def _advise(self, layout: Layout, wanted: Wanted, steps: float) -> tuple[Advice, TensorTimes] | None:
        """Return the planner's advice for the budget and what may be added to it."""
        manager = self._manager
        more = dataclasses.replace(wanted, vram=wanted.vram + self._spare_bytes())
        advised = manager.planner.advise(layout, more, manager.simple, steps)
        if advised is not None:
            plan = dataclasses.replace(manager.layout.plan, predicted_seconds=advised[0].now)
            manager.note_plan(plan)
        return advised

    def _stands(self, found: tuple[Placement, Advice, TensorTimes]) -> bool:
        """Return whether a found layout is still to be had, and no room came since that is worth a search."""
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
        # Which units may stay under a budget that fell was for the layout then.
        following = dataclasses.replace(wanted, vram=vram, profile=learnt, residents_among=None)
        self._manager.planner.remember(
            following, advice.carving, advice.plan
        )  # or it is searched for once more
        return self._take(following)

    def _take(self, wanted: Wanted) -> Wanted:
        self._before, self.at, self._waited = self._manager.present(), math.inf, 0
        return wanted
