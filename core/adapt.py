"""What changes a session's layout between its steps: memory that runs short or is left, and (`tune.py`) times that were learnt.

A mixin of `Session`. Nothing here runs within a step, and between steps it costs one comparison unless it is time
to look. Layouts change only while no graph wants today's units.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import time
import traceback
from collections.abc import Hashable

import torch

from . import decide, settings, stepping
from .again import Before, sizes
from .attach import Placement
from .auto import Governor, Memory, wherever
from .errors import BudgetError
from .follow_ram import FollowsRam
from .plan import Plan, resident_cost
from .pooled import Pooled
from .rerun import Reruns
from .shared import mates_on
from .simulated import SimulatedEngine
from .sizes import format_size
from .together import Together
from .tune import OutOfMemory, Tunes
from .units import Carving, Unit

logger = logging.getLogger("carom")
_TUNE_AFTER = 4  # measured steps, the first two of a session apart
_LOOKS = 0.25  # seconds between readings of a device's memory, after the first steps
_SIZES = 64  # of inputs that are remembered
_FIRST = 8  # steps after an attachment that may run again
_SELDOM = 16  # steps between looks at host memory, where nothing else is watched
_OFTEN = 2 * _FIRST  # and after which memory is looked at: enough to settle


class Adapts(Together, Tunes, FollowsRam):
    """Adapts the layout of a `Session` (which see for the fields) to times and memory."""

    _reruns: Reruns | None
    _kept: str | None  # ``training`` where nothing else was asked for and the budget follows the device

    def _decide(self) -> tuple[Carving, Plan]:
        raise NotImplementedError

    def _least_in_pool(self) -> int:
        raise NotImplementedError

    def _watch_pool(self, pooled: Pooled) -> None:
        raise NotImplementedError

    def _move_watermark(self, budget: int, everything: int) -> bool:
        raise NotImplementedError

    def _lay_out(self) -> None:
        raise NotImplementedError

    def _adapts(self, auto: bool) -> None:
        self._learnt = None
        self._mates = None
        self._tune_at = _TUNE_AFTER
        self._recording = False  # the last pass that is not answered for yet recorded for a backward
        self._govern(auto)

    def _govern(self, auto: bool) -> None:
        """Let the budget follow the device's memory, or leave it as it is."""
        self._ungovern()
        memory = self._memory() if auto else None
        if memory is not None:
            engine = self._engine
            place = id(engine.ledger) if isinstance(engine, SimulatedEngine) else engine.name
            self._mates = mates_on(place) if self._shared is None else self._shared.mates
            self._mates.join(self)
            self._kept = stepping.where_trained(self.module)
            stepping.enter(self, engine, place, self._mates.shares)
        self._governor = None if memory is None else Governor(memory.ooms, memory.retries)
        if self._governor is not None:
            self._room = None  # the budget follows the device by itself
        self._looked = 0.0
        self._failed = False  # the last step ran out of memory
        self._asked: set[Hashable] = set()  # sizes of inputs whose passes had what they need
        self._asking: Hashable = ()
        self._new_sizes = False  # the pass that begins has inputs of sizes that were not seen before
        self._least_known: tuple[Placement, int] | None = None
        self._set_look()

    def _ungovern(self) -> None:
        """No longer one of those that share a device."""
        stepping.leave(self)
        self._kept = None
        if self._mates is not None:
            self._mates.leave(self)
            self._mates = None

    def _memory(self) -> Memory | None:
        """What this session may take; None where nothing tells."""
        device = self._engine.memory()
        pooled = self._pooled
        if device is not None and pooled is not None and not isinstance(self._engine, SimulatedEngine):
            # A VBAR's pages are not the allocator's, and so not among what this process has.
            device = dataclasses.replace(device, total=device.total + pooled.held_bytes)
        if device is not None and self._engine.shares_host and self._checkpoint is None:
            device = wherever(device, self._waiting_bytes())
        return device if self._shared is None else self._shared.memory(device, self)

    def _waiting_bytes(self) -> int:
        """Host memory of streamed weights that a device which shares it could have instead; of a file's, none."""
        if not self._engine.shares_host or self._checkpoint is not None:
            return 0
        placement = self.__dict__.get("_placement")
        return (
            settings.waiting_bytes(self.module) if placement is None or self._parked else placement.wire_bytes
        )

    def _note_recording(self) -> None:
        """A pass begins, and what failed before it was looked at: unless that could not be answered yet, it is forgotten."""
        self._recording = torch.is_grad_enabled() or (self._failed and self._recording)

    def _set_look(self) -> None:
        """Measured steps from which `_look` is called between steps."""
        cache = self._follower is not None and self._checkpoint is not None
        watched = self._governor is not None or self._pooled is not None or cache
        self._look_at: float = 0 if watched else self._tune_at
        if self._follower is not None and not watched:
            meter = self.__dict__.get("_meter")
            self._look_at = min(self._tune_at, (0 if meter is None else meter.settled) + _SELDOM)

    def _look(self) -> None:
        """Between steps: see whether memory or what was learnt asks for another layout."""
        if not self._movable():
            self._tune_at = self._look_at = math.inf
            return
        if self._governor is not None and not self._meter.awaiting:
            if self._mates is not None and len(self._mates.sessions) > 1:
                self._count_use()
            self._watch_memory(self._governor)
        if self._pooled is not None:
            with self._lock:
                self._watch_pool(self._pooled)
        if self._follower is not None and not self._meter.awaiting:
            with self._lock:
                self._watch_ram(self._follower)
        if self._meter.settled >= self._tune_at:
            self._tune_once()
        self._set_look()

    def _movable(self) -> bool:
        """Whether weights may move unasked: a trainable one that leaves the device and returns loses what
        DistributedDataParallel hung onto its gradient's accumulator, and gradients would no longer be averaged."""
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        # A module that came on the device would go back there whole on the way to another layout.
        return not (distributed and self._carving.adapters) and not self._placement.came_on_device

    # -- memory

    def _watch_memory(self, governor: Governor) -> None:
        """Follow what the device has left."""
        now = time.monotonic()
        often = self._meter.settled < _OFTEN or isinstance(self._engine, SimulatedEngine) or self._failed
        if not often and now - self._looked < _LOOKS:
            return
        with self._lock, contextlib.ExitStack() as locks:
            if self._failed:
                locks.enter_context(self._growing())
            elif not self._may_grow(locks):
                return  # gigabytes of another session are on their way: this step does not wait for them
            self._looked = now
            memory = self._memory()
            if (
                memory is None
                or not self._streamer.unreferenced
                or (self._meter.steps < 1 and not self._failed)
            ):
                return
            budget = self._wanted(governor, memory)
            if budget is not None:
                if governor.settled and budget > self._vram:
                    self._use_what_was_learnt()
                self._resize(budget)
            self._answered()

    def _answered(self) -> None:
        """What failed, if anything did, was looked at."""
        if self._failed and self._shared is not None:
            self._shared.fall()
        self._failed = False

    def _use_what_was_learnt(self) -> None:
        """A new layout comes anyway: let it be the one that is predicted to be fastest."""
        if self._learnt is not None or self._pooled is not None:
            return
        try:
            self._recode()
            advice = self._advice(0)
        except Exception as error:  # advice is a service
            logger.warning("carom: the steps so far cannot be planned with: %s", str(error))
            return
        # What sampling between training steps taught is not what training wants.
        if advice is not None and advice.understood and self._candidate.train == self._trains:
            self._learnt, self._tune_at = self._candidate, math.inf

    def _wanted(self, governor: Governor, memory: Memory) -> int | None:
        held, least = self._held_bytes(), self._least()
        if self._failed:
            return governor.short(memory, held, least, self._trains and self._recording)
        if self._reruns is not None and self._reruns.gave:
            return governor.yielded(memory, held, least)
        everything = self._everything()
        most = self._most(everything)
        alone = self._mates is None or len(self._mates.sessions) == 1
        budget = governor.read(
            memory, held, least, min(everything, self._most_grown(memory, most, everything)), self._vram,
            training=self._trains, alone=alone, recording=self._recording,
        )  # fmt: skip
        if budget is not None and self._shared is not None:
            self._shared.rise(budget - most)
        return budget

    @property
    def _trains(self) -> bool:
        """Whether anything is trainable."""
        inside = bool(self._carving.adapters) or any(unit.trainable for unit in self._placement.streamed)
        return inside or self._backward

    def _everything(self) -> int:
        """Device bytes of all weights."""
        sizes = [unit.nbytes for unit in self._carving.units]
        return self.plan.fixed_bytes + resident_cost(sizes, self._engine.grain)

    def _least(self) -> int:
        """The smallest budget that works with the present tensors."""
        if self._least_known is None or self._least_known[0] is not self._placement:
            chosen = self._settings()
            if chosen.training is None and self._carving.adapters:
                chosen = dataclasses.replace(chosen, training="resident")
            try:
                decide.decide(self.module, dataclasses.replace(chosen, vram=0), self._engine.grain)
                least = 0
            except BudgetError as error:
                least = error.least_bytes or 0
            self._least_known = self._placement, least
        return max(self._least_known[1], self._least_in_pool())

    def _resize(self, budget: int) -> None:
        """Lay out anew for ``budget``, or for less where even that does not fit by now."""
        logger.info(
            "carom: vram='auto': %s for weights instead of %s", format_size(budget), format_size(self._vram)
        )
        before = self._vram
        with self._taking():
            self._allot(max(budget, self._least()))
            moved = self._move_watermark(self._vram, self._everything())
        if moved:
            self._engine.trim()
            return
        self._among = self._residents() if self._vram < before else None
        self._lay_out()
        self._engine.trim()
        if self._learnt is None:
            self._tune_at = _TUNE_AFTER

    # -- a unit's forward that ran out of memory

    def _make_reruns(self, resident: list[Unit]) -> Reruns | None:
        """Further tries for units' forwards, where the budget follows the device."""
        if self._governor is None or self._pooled is not None or not self._movable():
            return None
        if decide.compiled(self.module):
            return None  # graphs would break at resident units
        whole = decide.cut(self.module, dataclasses.replace(self._settings(), granularity="block"), None)
        units = {id(module) for unit in self._carving.units for module in unit.modules}
        blocks = [module for unit in whole.units if unit.kind == "block" for module in unit.modules]
        between = [module for module in blocks if id(module) not in units]
        return Reruns(self._engine, self._streamer, self._placement, resident, between, self._look_soon)

    def _look_soon(self) -> None:
        """Weights gave way: look at the next occasion."""
        self._look_at, self._looked = 0, 0.0

    def _pass_begins(self, reruns: Reruns, compiling: bool) -> None:
        if compiling:
            reruns.step_aside()
        reruns.pass_begins(not torch.is_grad_enabled(), self._new_sizes)

    def _after_giving(self) -> None:
        """A pass went well because weights gave way: from now on hold what was left then."""
        with self._lock, self._streamer.lock:
            if self._governor is not None and self._streamer.idle and not self._meter.awaiting:
                self._watch_memory(self._governor)

    # -- a forward that ran out of memory

    def _before(self, args: tuple, kwargs: dict) -> Before | None:
        """What a pass finds, where it may have to run again."""
        if self._room is not None:
            return self._before_beyond(args, kwargs)
        if self._governor is None or torch.is_grad_enabled():
            return None
        self._asking = sizes(args, kwargs)
        self._new_sizes = self._asking not in self._asked
        if self._meter.steps > _FIRST and self._asking in self._asked:
            return None
        if self._new_sizes:
            self._governor.unsettle()
        if len(self._asked) >= _SIZES:
            self._asked.clear()
        self._asked.add(self._asking)
        with self._lock:  # another thread may be laying it out anew for its own session's sake
            return Before(self.module, args, kwargs)

    def _gives_way(self, error: BaseException, before: Before | None) -> bool:
        """A forward ran out of memory: hold less from now on; True when the forward may run again."""
        if self._room is not None and isinstance(error, OutOfMemory):
            return self._falls_back(error, before)
        if self._governor is None or not isinstance(error, OutOfMemory):
            return False
        self._failed = True
        self._asked.discard(self._asking)
        self._look_at = 0
        held = format_size(self._held_bytes())
        note = getattr(error, "add_note", lambda text: None)
        note(f"carom held {held} of weights with vram='auto'; it holds less from the next step on, if it can")
        with self._lock, self._streamer.lock, self._growing():
            memory = self._memory()
            if before is None or memory is None or not self._streamer.idle or not self._streamer.unreferenced:
                return False
            budget = self._wanted(self._governor, memory)
            if budget is None or not before.restore():
                return False
            # The failed pass's frames would keep its activations, and weights that are to leave.
            traceback.clear_frames(error.__traceback__)
            self._resize(budget)
            self._answered()
            return True
