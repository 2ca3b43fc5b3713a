"""What a session makes of the times that its first steps taught: another layout, where that will pay for itself.

A mixin of `Session`, under `Adapts`, which calls it between steps.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
from typing import Any

import torch

from . import decide, replan
from .checkpoint import Checkpoint
from .follow_room import FollowsRoom
from .learn import Learnt, learn
from .meter import Meter
from .plan import Plan
from .recode import Recodes
from .units import Carving

logger = logging.getLogger("carom")
OutOfMemory: Any = getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError)
_TUNE_LAST = 64  # measured steps after which nothing is thought over that was not worth while
_UNSURE = 8  # steps that a layout waits at most for passes to leave alike
_TUNE_AGAIN = 8  # steps until it is tried again where something was in the way


class Tunes(FollowsRoom, Recodes):
    """Lays the weights of a `Session` (which see for the fields) out by what its steps took."""

    _meter: Meter
    _checkpoint: Checkpoint | None
    _lock: threading.RLock
    _parked: bool
    _learnt: Learnt | None
    _backward: bool  # whether backwards go through the module
    _tune_at: float  # measured steps after which the layout is thought over
    # Of a placement: a layout that has not paid for itself yet.
    _found: tuple[Any, replan.Advice] | None = None
    _waited = 0  # steps that a layout waited for room to be known

    @property
    def _simple(self) -> bool:
        raise NotImplementedError

    @property
    def _trains(self) -> bool:
        raise NotImplementedError

    def _settings(self, known: bool = False) -> decide.Settings:
        raise NotImplementedError

    def _again(self, *, retry: bool = False) -> None:
        raise NotImplementedError

    def _need_open(self) -> None:
        raise NotImplementedError

    def _remember(self, learnt: Learnt, carving: Carving, plan: Plan) -> None:
        raise NotImplementedError

    def _detach_for_parking(self) -> None:
        raise NotImplementedError

    def _tune_once(self) -> None:
        """Enough steps were measured: take a layout predicted to be faster, once the change will pay for itself."""
        with self._lock:
            self._tune_at = math.inf
            before = self._placement
            if self._recode(self._meter.steps) is None:
                self._tune_at = self._meter.settled + max(_TUNE_AGAIN, self._recode_at - self._meter.steps)
                return
            if self._placement is not before:  # laid out plain
                return
            found, self._found = self._found, None
            try:
                # What was found, and had not paid for itself yet, is not searched for again.
                if self._stands(found):
                    assert found is not None
                    advice: replan.Advice | None = found[1]
                else:
                    advice = self._advice(self._meter.steps)
            except Exception as error:  # advice is a service: without it the step goes on as it is
                logger.warning("carom: the steps so far cannot be planned with: %s", str(error))
                return
            if advice is None:  # the latest steps were of another kind
                self._tune_at = self._meter.settled + max(_TUNE_AGAIN, self._meter.settled // 4)
                return
            if advice.reason:
                if not advice.understood:  # steps were disturbed
                    self._tune_at = 2 * self._meter.settled + 2
                elif self._meter.settled < _TUNE_LAST:  # the first steps are the least steady ones
                    self._tune_at = 4 * self._meter.settled
                return
            self._found = (before, advice) if advice.searched else None
            unsure = self._room is not None and self._room.unsure and self._waited < _UNSURE
            if self._meter.steps >= advice.steps and unsure:  # of the room that there is with it
                self._waited += 1
                self._tune_at = self._meter.settled + 1
            elif self._meter.steps < advice.steps:
                self._tune_at = self._meter.settled + advice.steps - self._meter.steps
            elif self._streamer.unreferenced:
                self._relay(advice)
            else:  # a graph of an earlier forward still wants today's units: another time
                self._tune_at = self._meter.settled + _TUNE_AGAIN

    def _stands(self, found: tuple[Any, replan.Advice] | None) -> bool:
        """Whether what was found is still to be had, and no room came since that is worth a search."""
        if found is None or found[0] is not self._placement or self._candidate.train != self._trains:
            return False
        more = self._vram + self.spare - found[1].vram
        return more >= 0 and not self._worth(more)

    def tune(self) -> bool:
        """Lay the weights out by what the steps so far taught, if a step is predicted to be 3 % faster so.

        A session does this by itself, once, when the change has paid for itself in the steps already seen. Call
        between steps. Returns whether anything changed.
        """
        with self._lock:
            self._need_open()
            if self._parked or not self._streamer.idle or not self._streamer.unreferenced:
                return False
            with self._streamer.lock:
                self._meter.finish()
            before = self._placement
            recoded = bool(self._recode())
            if self._placement is not before:
                return True
            advice = self._advice()
            if advice is None or advice.reason:
                return recoded
            self._relay(advice)
            return True

    def _learn(self) -> Learnt | None:
        """What the steps so far teach, None where nothing can be told. The link's rate is of raw bytes."""
        profile = self._meter.profile()
        if self._checkpoint is not None:
            return None  # what the drive gives is not predicted
        if profile is None or self.plan.all_resident or self._engine.blocking:
            return None
        learnt = learn(
            replan.pieces(self._carving), self._streamed(), self._streamer.order.expected(), profile
        )
        if learnt is None or not self._placement.wire_bytes:
            return None
        rate = learnt.link.bytes_per_second * self._placement.streamed_host_bytes / self._placement.wire_bytes
        return dataclasses.replace(learnt, link=dataclasses.replace(learnt.link, bytes_per_second=rate))

    def _streamed(self) -> list[int]:
        """The streamed units as the carving counts them."""
        known = {id(unit): index for index, unit in enumerate(self._carving.units)}
        return [known[id(unit.unit)] for unit in self._placement.streamed]

    def _advice(self, steps: float = math.inf) -> replan.Advice | None:
        """A better layout, None where nothing can be told; ``steps`` as in `replan.advise`."""
        learnt = self._learn()
        if learnt is None:
            return None
        self._backward = self._backward or learnt.train
        chosen = self._settings(known=True)
        if chosen.unpacking and not learnt.host_bound:  # layouts differ in what is unpacked
            units = [unit.unit for unit in self._placement.streamed if unit.decoder is not None]
            names = {entry.name: entry.nbytes for unit in units for entry in unit.entries}
            learnt = learnt.plainly(chosen.unpacking, names, learnt.link)
        learnt = learnt.unhurried()
        chosen = dataclasses.replace(chosen, vram=self._vram + self.spare)
        advice = replan.advise(
            self.module, chosen, self._engine.grain, learnt, self._carving, self.plan, steps, self._simple
        )  # fmt: skip
        self.plan = dataclasses.replace(self.plan, predicted_seconds=advice.now)
        self._candidate = learnt
        return advice

    def _relay(self, advice: replan.Advice) -> None:
        logger.info("carom: a step is predicted to be %.3g s faster with another layout", advice.saves)
        before, self._vram = self._vram, max(self._vram, advice.vram)
        self._remember(self._candidate, advice.carving, advice.plan)  # or it is searched for once more
        self._take(self._candidate, before)
        if self._room is not None:  # what moving about left to the allocator is not what passes need
            self._engine.trim()

    def _take(self, learnt: Learnt, vram: int | None = None) -> None:
        """Lay out anew by what was learnt. ``vram``: the budget so far, where it rises."""
        before, self._learnt, self._tune_at, self._waited = self._learnt, learnt, math.inf, 0
        self._among = None  # who may stay under a budget that fell was for the layout then
        try:
            self._again(retry=True)
        except OutOfMemory:  # what was there before did fit
            self._learnt, self._vram = before, self._vram if vram is None else vram
            self.forget_room()
            try:
                self._again(retry=True)
            except OutOfMemory:
                self._detach_for_parking()
                raise
