"""`DeviceMemory`: the policy for ``vram="auto"``: the VRAM budget follows the device memory that passes leave
free.

The governor in `budget.device_governor` computes the budget. A pass is one forward of the root module. A
layout assigns each weight to device memory, or to host memory or a file from which it is streamed.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import traceback
from collections.abc import Callable, Hashable

import torch

from ...budget import optimizer_reserve
from ...budget.device_governor import Governor
from ...budget.shared_budget import SharedBudget, mates_on
from ...common.sizes import format_size
from ...streaming.pass_retry import STEADY_LIMIT, ModuleState, PassSnapshot, sizes
from ...streaming.runner import Use
from ..device_weights import DeviceWeights
from ..layout import Outcome, Wanted
from ..layout_manager import LayoutManager
from .policy import Observation, StepClock

logger = logging.getLogger("carom")
_SECONDS = 0.25  # seconds between two readings of the device's memory, after the first steps
_SIZES = 64  # most input sizes that are remembered
_LOOKED_OVER = 8  # number of first steps of a layout in which each pass records the module's state
# number of first steps in which memory is read at every step, enough for the budget to settle
_OFTEN = 2 * _LOOKED_OVER


class DeviceMemory:
    """The policy that lets a session's VRAM budget follow the device's memory. It does nothing until `begin`
    is called.

    ``resized``: called after a layout was made for another budget.
    ``asked``: the input sizes of passes that did not run out of memory.
    """

    def __init__(
        self, manager: LayoutManager, weights: DeviceWeights,
        resized: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._manager, self._weights, self._ledger = manager, weights, manager.ledger
        self._resized = resized
        self._looked = -math.inf
        self.failed = False  # whether the last step ran out of memory
        # Whether the last pass recorded gradients. After a pass that ran out of memory, the value is kept
        # until the budget has been lowered.
        self._recording = False
        self.asked: set[Hashable] = set()
        self._asking: Hashable = ()
        # the recorded state of the module, which the layout's passes do not change
        self._steady: ModuleState | None = None

    @property
    def governor(self) -> Governor | None:
        """The object that computes the budget, None if the budget is fixed."""
        return self._ledger.governor

    def begin(self, auto: bool) -> None:
        """Let the budget follow the device's memory if ``auto`` is true. Otherwise leave the budget fixed."""
        self.end()
        manager, ledger = self._manager, self._ledger
        memory = ledger.memory() if auto else None
        if memory is not None:
            place = manager.engine.place
            ledger.mates = mates_on(place) if ledger.shared is None else ledger.shared.mates
            ledger.mates.join(ledger)
            manager.wanted = dataclasses.replace(
                manager.wanted, training=optimizer_reserve.where_trained(manager.module.root)
            )
            optimizer_reserve.enter(ledger, manager.engine, place, ledger.mates.order)
            ledger.governor = Governor(memory.ooms, memory.retries)
        self._looked = -math.inf
        self.failed = False
        self.asked.clear()

    def end(self) -> None:
        """Fix the budget, and leave the group of sessions that share the device or the budget."""
        ledger, manager = self._ledger, self._manager
        optimizer_reserve.leave(ledger)
        manager.wanted = dataclasses.replace(manager.wanted, training=None)
        ledger.governor = None
        if ledger.mates is not None:
            ledger.mates.leave(ledger)
            ledger.mates = None

    def share(self, shared: SharedBudget | None) -> None:
        """Set the shared budget that limits this session and others, None for none. `begin` must be called
        afterwards.
        """
        self._ledger.shared = shared

    # -- between steps

    def next_step(self, settled: int) -> float:
        """Return 0 while the budget follows the device, so that `due` is called at every step; otherwise
        infinity.
        """
        return math.inf if self.governor is None else 0

    def due(self, clock: StepClock) -> bool:
        """Return whether to read the device's memory now."""
        if self.governor is None or clock.awaiting:
            return False
        often = clock.settled < _OFTEN or clock.virtual or self.failed
        return often or clock.now - self._looked >= _SECONDS

    @property
    def urgent(self) -> bool:
        """Whether the last step ran out of memory. This step then waits for other sessions that are changing
        their layouts.
        """
        return self.failed

    def decide(self, seen: Observation) -> Wanted | None:
        """Return a request with another budget if memory ran short, or was unused for a while; otherwise
        None.
        """
        governor = self.governor
        self._looked = seen.clock.now
        if governor is None or seen.memory is None or not seen.unreferenced:
            return None
        if seen.clock.steps < 1 and not self.failed:
            return None
        budget = self._budget(governor, seen)
        wanted = None
        if budget is not None:
            wanted = self._resize_to(budget, seen)
        if wanted is None:
            self._answered()
        return wanted

    def fallback(self, failed: Wanted, error: BaseException) -> Wanted | None:
        """Return ``failed`` with a smaller budget, or None if no smaller budget works."""
        return self._manager.shrunk(failed, error)

    def took(self, outcome: Outcome) -> None:
        """Return unused memory of the allocator to the device, after a layout for another budget was made."""
        self._manager.engine.trim()
        self._resized()
        self._answered()

    def resize(self, budget: int) -> None:
        """Make a layout for ``budget`` bytes, or for fewer bytes if the device's memory does not suffice."""
        wanted = self._resize_to(budget, Observation.now(self._manager))
        if wanted is not None:
            self.took(self._manager.change(wanted, self.fallback))

    def _resize_to(self, budget: int, seen: Observation) -> Wanted | None:
        """Set the budget to ``budget`` bytes, and return the request for a layout with that budget.

        Returns None if it is enough to move the VBAR's watermark, the limit below which pages of a VBAR may
        get memory.
        """
        ledger = self._ledger
        before = ledger.vram
        logger.info(
            "carom: vram='auto': %s for weights instead of %s", format_size(budget), format_size(before)
        )
        with ledger.taking():
            ledger.allot(max(budget, seen.least_bytes))
            moved = self._weights.move_watermark(ledger.vram)
        if moved:
            self._manager.engine.trim()
            return None
        # Under a smaller budget, units that are on the device stay before any others, so that no unit has to be
        # loaded.
        among = seen.layout.resident_names() if ledger.vram < before else None
        return dataclasses.replace(seen.wanted, vram=ledger.vram, residents_among=among)

    def _budget(self, governor: Governor, seen: Observation) -> int | None:
        """Return the budget in bytes that the governor requests now, or None to keep the present budget."""
        ledger, memory = self._ledger, seen.memory
        assert memory is not None
        held, least = seen.held_bytes, seen.least_bytes
        trains = seen.layout.trains or self._manager.planner.backward
        if self.failed:
            return governor.short(memory, held, least, trains and self._recording)
        everything = seen.everything_bytes
        most = ledger.most(everything)
        alone = ledger.mates is None or len(ledger.mates.members) == 1
        budget = governor.read(
            memory, held, least, min(everything, ledger.most_grown(memory, most, everything)), ledger.vram,
            training=trains, alone=alone, recording=self._recording,
        )  # fmt: skip
        if budget is not None and ledger.shared is not None:
            ledger.shared.rise(budget - most)
        return budget

    def _answered(self) -> None:
        """Record that the budget has been lowered after a step that ran out of memory, if there was such a
        step.
        """
        if self.failed and self._ledger.shared is not None:
            self._ledger.shared.fall()
        self.failed = False

    # -- passes that run out of memory

    def begins(self) -> None:
        """Record whether the pass that begins records gradients.

        If an earlier pass ran out of memory and the budget has not been lowered yet, the record of that pass
        is kept.
        """
        self._recording = torch.is_grad_enabled() or (self.failed and self._recording)

    def before(self, args: tuple, kwargs: dict) -> PassSnapshot | None:
        """Return a snapshot of the module's state and inputs before a pass, or None if the pass will not run
        again.
        """
        governor = self.governor
        if governor is None or torch.is_grad_enabled():
            return None
        self._asking = sizes(args, kwargs)
        known = self._asking in self.asked
        if self._manager.layout.meter.steps > _LOOKED_OVER and known:
            steady = self._steady
            return (
                None
                if steady is None
                else PassSnapshot(self._manager.module.root, args, kwargs, state=steady, limit=STEADY_LIMIT)
            )
        if not known:
            governor.unsettle()
        if len(self.asked) >= _SIZES:
            self.asked.clear()
        self.asked.add(self._asking)
        # another thread may be changing this session's layout to give memory to its own session
        with self._manager.lock:
            # While another pass runs, the module holds views of slots, which the snapshot would keep in use.
            if self._manager.layout.runner.in_use(Use.PASS):
                return None
            return PassSnapshot(self._manager.module.root, args, kwargs)

    def went_well(self, before: PassSnapshot) -> None:
        """Record that a pass with the snapshot ``before`` has succeeded.

        If the pass left the module's state unchanged, later passes compare with that state and do not record
        it again.
        """
        if self.governor is not None and before.state is not self._steady:
            self._steady = before.state if before.state.unchanged else None

    def forget_state(self) -> None:
        """Drop the recorded state of the module, because the next layout changes the module."""
        self._steady = None

    def recover(self, error: BaseException, before: PassSnapshot | None) -> bool:
        """Lower the budget after a pass ran out of memory. Returns whether the pass may run again."""
        governor, manager = self.governor, self._manager
        if governor is None:
            return False
        self.failed = True
        self.asked.discard(self._asking)
        held = format_size(self._ledger.held_bytes)
        note = getattr(error, "add_note", lambda text: None)
        note(f"carom held {held} of weights with vram='auto'; it holds less from the next step on, if it can")
        layout = manager.layout
        with manager.lock, layout.runner.lock, self._ledger.growing():
            seen = Observation.now(manager)
            if before is None or seen.memory is None or not manager.gate.idle:
                return False
            budget = self._budget(governor, seen)
            if budget is None or not before.restore():
                return False
            # The frames of the failed pass would keep its activations alive, and weights that have to leave
            # the device.
            traceback.clear_frames(error.__traceback__)
            self.resize(budget)
            self._answered()
            return True
