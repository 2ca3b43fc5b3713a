"""`DeviceMemory`: ``vram="auto"``: the budget follows what passes leave of the device (the rule: `budget.device_governor`)."""

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
from ...streaming.pass_retry import ModuleState, PassSnapshot, sizes
from ..device_weights import DeviceWeights
from ..layout import Outcome, Wanted
from ..layout_manager import LayoutManager
from .policy import Observation, StepClock

logger = logging.getLogger("carom")
_SECONDS = 0.25  # between readings of a device's memory, after the first steps
_SIZES = 64  # of inputs that are remembered
_LOOKED_OVER = 8  # steps after an attachment in which the module tree is looked over
_OFTEN = 2 * _LOOKED_OVER  # steps after which memory is read at every step: enough to settle


class DeviceMemory:
    """Lets a session's budget follow its device's memory. Does nothing until `begin`.

    ``improve``: returns a wanted layout with what the steps so far taught, for a layout that is made anyway.
    ``resized``: called after another layout was made for another budget.
    """

    def __init__(
        self, manager: LayoutManager, weights: DeviceWeights,
        improve: Callable[[Observation, Wanted], Wanted] = lambda seen, wanted: wanted,
        resized: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._manager, self._weights, self._ledger = manager, weights, manager.ledger
        self._improve, self._resized = improve, resized
        self._looked = -math.inf
        self.failed = False  # the last step ran out of memory
        self._recording = False  # the last pass that was not answered yet recorded for a backward
        self.asked: set[Hashable] = set()  # sizes of inputs whose passes had what they need
        self._asking: Hashable = ()
        self._steady: ModuleState | None = None  # of the module, as a layout's passes found and left it

    @property
    def governor(self) -> Governor | None:
        """The rule of the budget, None where the budget is fixed."""
        return self._ledger.governor

    def begin(self, auto: bool) -> None:
        """Let the budget follow the device's memory (``auto``), or leave the budget as it is."""
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
        """Leave the sessions that share the device or the budget."""
        ledger, manager = self._ledger, self._manager
        optimizer_reserve.leave(ledger)
        manager.wanted = dataclasses.replace(manager.wanted, training=None)
        ledger.governor = None
        if ledger.mates is not None:
            ledger.mates.leave(ledger)
            ledger.mates = None

    def share(self, shared: SharedBudget | None) -> None:
        """Take ``shared`` as the budget that bounds this session with others. `begin` comes next."""
        self._ledger.shared = shared

    # -- between steps

    def next_step(self, settled: int) -> float:
        """Return 0 while the budget follows the device: every step may tell something."""
        return math.inf if self.governor is None else 0

    def due(self, clock: StepClock) -> bool:
        """Return whether to read the device's memory now."""
        if self.governor is None or clock.awaiting:
            return False
        often = clock.settled < _OFTEN or clock.virtual or self.failed
        return often or clock.now - self._looked >= _SECONDS

    @property
    def urgent(self) -> bool:
        """Whether the last step ran out of memory: then wait for other sessions that take or leave memory now."""
        return self.failed

    def decide(self, seen: Observation) -> Wanted | None:
        """Return a layout for another budget, where memory ran short or was left for a while."""
        governor = self.governor
        self._looked = seen.clock.now
        if governor is None or seen.memory is None or not seen.unreferenced:
            return None
        if seen.clock.steps < 1 and not self.failed:
            return None
        budget = self._budget(governor, seen)
        wanted = None
        if budget is not None:
            rises = governor.settled and budget > self._ledger.vram
            wanted = self._resize_to(budget, seen)
            if wanted is not None and rises and wanted.profile is None and self._weights.vbar is None:
                wanted = self._improve(seen, wanted)
        if wanted is None:
            self._answered()
        return wanted

    def fallback(self, failed: Wanted, error: BaseException) -> Wanted | None:
        """Return ``failed`` with a smaller budget, None where there is none."""
        return self._manager.shrunk(failed)

    def took(self, outcome: Outcome) -> None:
        """Give the allocator's unused memory back to the device."""
        self._manager.engine.trim()
        if self._manager.wanted.profile is None:
            self._resized()
        self._answered()

    def resize(self, budget: int) -> None:
        """Lay the weights out again for ``budget`` bytes, or for less where the device has not even that."""
        wanted = self._resize_to(budget, Observation.now(self._manager))
        if wanted is not None:
            self.took(self._manager.change(wanted, self.fallback))

    def _resize_to(self, budget: int, seen: Observation) -> Wanted | None:
        """Set the budget to ``budget`` bytes; return the layout that this needs, None where a VBAR's watermark does."""
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
        # What stays under less is a part of what stayed: nothing has to come for a budget that falls.
        among = seen.layout.resident_names() if ledger.vram < before else None
        return dataclasses.replace(seen.wanted, vram=ledger.vram, residents_among=among)

    def _budget(self, governor: Governor, seen: Observation) -> int | None:
        """Return the budget in bytes that the governor wants now, None to keep the present one."""
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
        """Note that a failed step, if there was one, was answered."""
        if self.failed and self._ledger.shared is not None:
            self._ledger.shared.fall()
        self.failed = False

    # -- passes that run out of memory

    def begins(self) -> None:
        """Note that a pass begins; a failed pass before it is forgotten, unless that could not be answered yet."""
        self._recording = torch.is_grad_enabled() or (self.failed and self._recording)

    def before(self, args: tuple, kwargs: dict) -> PassSnapshot | None:
        """Return what a pass finds, where the pass may have to run again; None where it may not."""
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
                else PassSnapshot(self._manager.module.root, args, kwargs, state=steady)
            )
        if not known:
            governor.unsettle()
        if len(self.asked) >= _SIZES:
            self.asked.clear()
        self.asked.add(self._asking)
        with self._manager.lock:  # another thread may be laying the weights out for its own session's sake
            return PassSnapshot(self._manager.module.root, args, kwargs)

    def went_well(self, before: PassSnapshot) -> None:
        """Note a pass that could have run again and did not have to.

        Where the pass changed nothing of the module, later passes are compared with the state that this one found.
        """
        if self.governor is not None and before.state is not self._steady:
            self._steady = before.state if before.state.unchanged else None

    def forget_state(self) -> None:
        """Forget the module's state: the next layout changes the module."""
        self._steady = None

    def recover(self, error: BaseException, before: PassSnapshot | None) -> bool:
        """Hold less after a pass ran out of memory. Returns whether the pass may run again."""
        governor, manager = self.governor, self._manager
        if governor is None:
            return False
        self.failed = True
        self.asked.discard(self._asking)
        held = format_size(self._ledger.held_bytes)
        note = getattr(error, "add_note", lambda text: None)
        note(f"carom held {held} of weights with vram='auto'; it holds less from the next step on, if it can")
        layout = manager.layout
        with manager.lock, layout.streamer.lock, self._ledger.growing():
            seen = Observation.now(manager)
            if before is None or seen.memory is None or not manager.idle:
                return False
            budget = self._budget(governor, seen)
            if budget is None or not before.restore():
                return False
            # The failed pass's frames would keep its activations, and weights that are to leave.
            traceback.clear_frames(error.__traceback__)
            self.resize(budget)
            self._answered()
            return True
