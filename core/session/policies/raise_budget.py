"""`RaiseBudget`: the policy that raises a budget which a host application set, by the device memory that passes leave
free.

A host application such as ComfyUI sets the budget before it has observed a pass (a forward of the root
module). `budget.budget_raise` computes by how much the budget may rise. The budget rises only before a pass that can be
repeated, and once after the application has set it or has begun another run. If a pass then runs out of memory, it
runs again with the host application's budget.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
import traceback
from collections.abc import Callable, Hashable

import torch

from ...budget.budget_raise import SIZES, BudgetRaise
from ...common.errors import UnsupportedError
from ...common.sizes import format_size
from ...streaming.pass_retry import ModuleState, PassSnapshot, repeats, sizes
from ...streaming.runner import Use
from ..layout import Outcome, Wanted
from ..layout_manager import LayoutManager
from .policy import Observation, StepClock

logger = logging.getLogger("carom")
_OFTEN, _SECONDS = 16, 0.25  # memory is read at each of the first 16 steps, and then every 0.25 seconds
_RETRIED = 4  # number of first steps of a layout whose passes may run again, whatever their input sizes
_WORTH = 0.03  # share of the streamed bytes; for fewer additional bytes the layout does not change

Inputs = tuple[tuple, dict]


class RaiseBudget:
    """Lets the budget of a host application rise by the memory that passes leave free. It does nothing before
    `follow`.

    ``ready``: prepares for a pass, with a new layout if one is due.
    ``raised``: called after a layout was made for a larger budget.
    ``room``: computes the additional bytes, None before `follow`.
    ``base``: bytes of the host application's budget.
    ``least``: bytes to which the budget falls if a pass ran out of memory with `base`; the same as `base` if
    it must not.
    ``asked``: the input sizes of passes that did not run out of memory.
    """

    def __init__(self, manager: LayoutManager, ready: Callable[[], bool], raised: Callable[[], None]) -> None:
        self._manager, self._ready, self._raised = manager, ready, raised
        self.room: BudgetRaise | None = None
        self.base = self.least = 0
        self._given: Callable[[tuple, dict], Inputs] = lambda args, kwargs: (args, kwargs)
        self._looked = -math.inf
        self._due = False  # whether the last reading showed enough additional bytes
        # Whether the budget may rise: it has not risen since the last call of `follow` or `expect_other_passes`.
        self._once = True
        self._watched = False  # whether the pass that is about to begin can run again
        self.asked: set[Hashable] = set()
        self._steady: ModuleState | None = None  # the module as the first pass of the layout has left it
        self._before: Wanted | None = None  # the request in effect when `decide` last returned another one

    def follow(
        self, base: int | None, keep: int, most: float, given: Callable[[tuple, dict], Inputs],
        least: int | None = None,
    ) -> None:  # fmt: skip
        """Let the budget rise by the memory that passes leave free, as `Session.follow_room` describes."""
        manager = self._manager
        ledger = manager.ledger
        if ledger.governor is not None:
            raise UnsupportedError(
                "follow_room() is for a budget in bytes: this one follows the device by itself; call "
                "set_budget(vram=bytes) first"
            )
        if base is None or base >= ledger.vram:
            base = ledger.vram
        else:  # the host application's budget may be smaller than the smallest budget that works
            base = min(max(base, ledger.least_bytes), ledger.vram)
        self.base, self._given = base, given
        self.least = base if least is None else min(least, base)
        self._once = True
        if self.room is None or (self.room.keep, self.room.most) != (keep, most):
            self.room = BudgetRaise(keep, most)

    def stop(self) -> None:
        """Stop raising the budget, because it follows the device's free memory from now on."""
        self.room = None

    def expect_other_passes(self, more: bool = False) -> None:
        """Record that other programs have used the device's memory since the last pass, so that passes may
        have to run again.

        ``more``: passes may need more memory than those before, so the readings of free memory do not count.
        """
        if self.room is not None:
            self._once = True
            self.asked.clear()
            self.room.forget_other_sizes()
            if more:
                self.room.begin_anew()

    def laid_out(self) -> None:
        """Drop the readings of free memory, because a new layout was made."""
        if self.room is not None:
            self.room.begin_anew()

    @property
    def spare_bytes(self) -> int:
        """Bytes by which the budget may rise, according to the passes so far; 0 unless `follow` was called."""
        ledger = self._manager.ledger
        if self.room is None or not self._manager.attached:
            return 0
        held = ledger.held_bytes
        return self.room.spare(ledger.vram, self.base, max(0, ledger.vram - held), held)

    @property
    def beyond_bytes(self) -> float:
        """The most bytes by which the budget may exceed `base`. The number falls whenever a pass runs out of
        memory.
        """
        return 0 if self.room is None or self.room.none else self.room.beyond

    def weights_moved(self) -> None:
        """Return memory that the allocator keeps to the device. Called after weights were moved.

        Passes do not need that memory, and it would be missing in readings of free memory. Does nothing
        before `follow`.
        """
        if self.room is not None:
            self._manager.engine.trim()

    def forget(self) -> None:
        """Let the budget no longer rise above `base` for the rest of the session."""
        if self.room is not None:
            self.room.none = True

    # -- between steps

    @property
    def _worth(self) -> bool:
        """Whether the additional bytes are enough for another layout."""
        spare = self.spare_bytes
        if not spare:
            return False
        streamed = sum(unit.nbytes for unit in self._manager.layout.placement.streamed)
        return streamed > 0 and spare > _WORTH * streamed

    def next_step(self, settled: int) -> float:
        """Return 0 if the budget is to rise before the next pass that can run again, otherwise infinity."""
        return 0 if self._due else math.inf

    def due(self, clock: StepClock) -> bool:
        """Return whether the budget is to rise now."""
        return self._due and self._watched

    def decide(self, seen: Observation) -> Wanted | None:
        """Return a request with a larger budget. Units that are on the device stay there before any others."""
        if not seen.unreferenced:
            return None
        self._due = False
        if not self._worth:
            return None
        budget, present = seen.wanted.vram + self.spare_bytes, seen.layout.plan
        among = seen.layout.resident_names()
        wanted = dataclasses.replace(seen.wanted, vram=budget, residents_among=among)
        plan = self._manager.try_plan(wanted)
        if plan is None or (plan.resident.keys(), plan.packed) == (present.resident.keys(), present.packed):
            return None  # the additional bytes are less than a unit
        logger.info("carom: passes leave memory free: %s for weights", format_size(budget))
        self._before = seen.wanted
        return wanted

    def fallback(self, failed: Wanted, error: BaseException) -> Wanted | None:
        """Return the previous request, once, if the larger budget did not fit. The budget does not rise again."""
        before, self._before = self._before, None
        if before is not None:
            self.forget()
        return before

    def took(self, outcome: Outcome) -> None:
        """Return memory that the allocator keeps to the device, after a layout for a larger budget was made."""
        self._before, self._once = None, False
        self.asked.clear()
        self._manager.engine.trim()
        self._raised()

    # -- passes

    def passed(self, args: tuple, kwargs: dict) -> None:
        """Read the device memory that a pass left free, if a reading is due. ``args``, ``kwargs``: the
        arguments of the pass.
        """
        room, manager = self.room, self._manager
        if room is None or not manager.attached:
            return
        now = time.monotonic()
        often = manager.layout.meter.steps <= _OFTEN or manager.engine.virtual_clock
        if room.none or not (often or now - self._looked >= _SECONDS):
            return
        self._looked = now
        memory, given = manager.engine.memory(), self._given(args, kwargs)
        if memory is None:
            return
        if torch.is_grad_enabled() or not repeats(given):
            room.begin_anew()
            return
        room.passed(memory, sizes(*given), manager.ledger.held_bytes)
        self._due = self._once and self._worth

    def before(self, args: tuple, kwargs: dict) -> PassSnapshot | None:
        """Return a snapshot of the module's state and inputs before a pass that may have to run again,
        otherwise None.

        A pass may have to run again if the budget is above `least`, or is to rise above it before this pass.
        """
        room, ledger = self.room, self._manager.ledger
        assert room is not None
        grows = self._due and self._worth  # before this pass
        if ledger.vram <= self.least and not grows:
            return None
        given = self._given(args, kwargs)
        asking = sizes(*given)
        gradient = torch.is_grad_enabled()
        known = asking in self.asked and self._manager.layout.meter.steps > _RETRIED
        if known and not (grows or gradient):
            return None
        if gradient or not repeats(given):
            room.begin_anew()  # the budget must not rise before passes that cannot be repeated
            self._cannot_repeat(room)
            return None
        with self._manager.lock:  # another thread's pass may be one that cannot run again
            self._watched = True
            try:
                self._ready()  # a layout made after the snapshot would look like a change by the pass
            finally:
                self._watched = False
        if ledger.vram <= self.least:
            return None
        before = PassSnapshot(self._manager.module.root, args, kwargs, read=given, state=self._steady)
        if not before.possible:  # there is not enough memory for copies of the pass's inputs
            self._cannot_repeat(room)
            return None
        if len(self.asked) >= SIZES:
            self.asked.clear()
        self.asked.add(asking)
        return before

    def went_well(self, before: PassSnapshot) -> None:
        """Record that a pass with the snapshot ``before`` has succeeded.

        If the pass left the module's state unchanged, later passes of the layout compare with that state. A record of
        1,000 modules takes 20 ms.
        """
        if before.state is not self._steady:
            self._steady = before.state if before.state.unchanged else None

    def forget_state(self) -> None:
        """Drop the recorded state of the module, because the next layout changes the module."""
        self._steady = None

    def _cannot_repeat(self, room: BudgetRaise) -> None:
        """Lower the budget to `base`, because the next pass cannot run again.

        Such passes may alternate with others, and each change of budget needs a new layout. So this is
        counted as a failure of the additional bytes. After two failures, these bytes are not tried again.
        """
        beyond = self._manager.ledger.vram - self.base
        if beyond > 0 and self._go_back("a pass could not be run again", self.base):
            room.failed(beyond)

    def recover(self, error: BaseException, before: PassSnapshot | None) -> bool:
        """Lower the budget to `base` after a pass ran out of memory. Returns whether the pass may run again."""
        room, manager = self.room, self._manager
        assert room is not None
        self.asked.clear()
        beyond = manager.ledger.vram - self.base
        if beyond > 0:
            room.failed(beyond)
        else:  # the host application's own budget was too large
            room.none = True
            if manager.ledger.vram <= self.least:
                return False
        # If the session is parked because a layout did not fit, the pass has not begun: no state has to be restored.
        if not manager.phase.parked and (before is None or not before.restore()):
            return False
        # The frames of the failed pass would keep its activations alive, and weights that have to leave the
        # device.
        traceback.clear_frames(error.__traceback__)
        return self._go_back("a pass ran out of memory", self.base if beyond > 0 else self.least)

    def _go_back(self, why: str, budget: int) -> bool:
        """Make a layout for a smaller ``budget``. Returns False if the layout cannot change now, or if the
        present budget is not larger.

        ``why``: the reason, for the log.
        """
        manager = self._manager
        ledger, layout = manager.ledger, manager.layout
        with manager.lock, layout.runner.lock:
            budget = max(budget, ledger.least_bytes)
            free = not (layout.runner.in_use(Use.PASS) or layout.runner.in_use(Use.GRAPH))
            whole = manager.attached or manager.phase.parked
            if budget >= ledger.vram or not free or not whole:
                return False
            before, after = format_size(ledger.vram), format_size(budget)
            logger.info("carom: %s beside %s of weights: back to %s", why, before, after)
            ledger.set(budget)
            # Choose the units to keep on the device among those that are there.
            wanted = dataclasses.replace(manager.present(), residents_among=layout.resident_names())
            if manager.phase.parked:  # the session is parked, and the next pass makes this layout
                manager.wanted = wanted
                return True
            manager.change(wanted, manager.shrunk)
            manager.engine.trim()
            return True
