"""Several sessions on one device, or under one budget: a new one finds room, and so does one that returns.

A mixin of `Session`. The rules are `shares.py`'s.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import Any

from torch import nn

from .attach import Placement
from .auto import LOW, Governor, Memory
from .errors import BudgetError
from .meter import Meter
from .plan import round_up
from .pooled import Pooled
from .shared import Mates, SharedBudget
from .sizes import format_size
from .streamed import Streamed
from .streamer import Streamer
from .transfer import Engine

logger = logging.getLogger("carom")
_ROUNDING = 1.03  # of a model's bytes, for what allocators round up


def given_by(session: Together, nbytes: int, of_device: bool = False) -> int:
    """Bytes that ``session`` gave of ``nbytes``, as in `_yield`. Where it fails at that it is parked, and its next forward tries
    again: its trouble is not raised in the forward of who asked."""
    before = session._promised_bytes()
    try:
        return session._yield(nbytes, of_device)
    except Exception as error:
        # As text: who keeps the record would keep the error's frames.
        name = type(session.module).__name__
        logger.warning("carom: %s could not give memory to another model: %s", name, str(error))
        return max(0, before - session._promised_bytes())


class Together:
    """What a `Session` (which see for the fields) gives to others, and asks of them."""

    module: nn.Module
    _engine: Engine
    _placement: Placement
    _streamer: Streamer
    _meter: Meter
    _lock: threading.RLock
    _closed: bool
    _parked: bool
    _vram: int
    _governor: Governor | None
    _shared: SharedBudget | None
    _mates: Mates | None
    _least_known: Any
    # Bytes: the most that the allocator was seen to keep for passes, when this session was parked; what a layout that is
    # under way may take; what is kept for the return of a session that is parked.
    _passing = _laying = _keeps = 0

    def _memory(self) -> Memory | None:
        raise NotImplementedError

    def _held_bytes(self) -> int:
        raise NotImplementedError

    def _everything(self) -> int:
        raise NotImplementedError

    @property
    def _pooled(self) -> Pooled | None:
        raise NotImplementedError

    def _account(self) -> None:
        raise NotImplementedError

    def _least(self) -> int:
        raise NotImplementedError

    def _resize(self, budget: int) -> None:
        raise NotImplementedError

    def _movable(self) -> bool:
        raise NotImplementedError

    def _away(self) -> list[Streamed]:
        raise NotImplementedError

    def _make_room(self, budget: int, among: SharedBudget | None = None) -> bool:
        """A new session has ``budget`` bytes for its weights: where that is short, let others give way first. ``among``: those
        that it is about to join, with other than its present ones."""
        everything = sum(
            round_up(tensor.numel() * tensor.element_size(), 512)
            for tensor in (*self.module.parameters(), *self.module.buffers())
        )
        most = int(everything * _ROUNDING)
        shared = among or self._shared
        if shared is None:
            return self._ask(most - budget)
        grown, least = shared.grown, 0 if among is None else self._least()
        most = max(least, shared.part_of(self, most, shared.nbytes - grown))
        given = self._ask(most - budget + grown, mates=shared.mates)
        shared.fall_back(least)
        return given or grown != 0

    def _ask(self, missing: int, of_device: bool = False, mates: Mates | None = None) -> bool:
        """Let others give ``missing`` bytes, as far as they can; whether any did. ``of_device``: as in `_yield`."""
        given = False
        mates = mates or self._mates
        if mates is not None and missing > 0:
            for key in mates.shares.before_all(id(self)):
                other = mates.sessions.get(key)
                if other is not None and missing > 0:
                    got = given_by(other, missing, of_device)
                    missing -= got
                    given = given or got > 0
        return given

    def _yield(self, nbytes: int, of_device: bool = False) -> int:
        """Give up to ``nbytes`` of resident weights to another session; returns how many it was. ``of_device``: memory is
        wanted, and what of a shared budget is not held is none."""
        with contextlib.ExitStack() as locks:
            if not self._still(locks) or self._governor is None or not self._movable():
                return 0
            if not self._streamer.unreferenced or self._meter.awaiting:
                return 0
            bounded = self._shared is not None and not of_device
            has = self._promised_bytes if bounded else self._held_bytes
            before = has()
            budget = max(self._least(), before - nbytes)
            if budget >= before:
                return 0
            self._governor.gave()
            if bounded and self._pooled is None and budget >= self._held_bytes():
                self._vram = budget  # the rest was not held
                self._account()
            else:
                self._resize(budget)
            return max(0, before - has())

    def _still(self, locks: contextlib.ExitStack) -> bool:
        """Whether it is on the device, and in no step, for as long as ``locks`` are held; waits for no other thread."""
        if not self._lock.acquire(blocking=False):
            return False
        locks.callback(self._lock.release)
        if self._closed or self._parked or not self._streamer.lock.acquire(blocking=False):
            return False
        locks.callback(self._streamer.lock.release)
        return bool(self._streamer.idle)

    def _spare(self) -> int:
        """Bytes that it could give to another session now."""
        with contextlib.ExitStack() as locks:
            return max(0, self._promised_bytes() - self._least()) if self._still(locks) else 0

    def _count_use(self) -> None:
        """A step begins: a session that is used much less gives way where this one is short."""
        assert self._mates is not None
        short = bool(self._away())
        spare = {}
        if short:
            for key, other in list(self._mates.sessions.items()):
                if other is not self:
                    spare[key] = other._spare()
        giver = self._mates.shares.used(id(self), short, spare)
        if giver is not None:
            found = self._mates.sessions.get(giver)
            if found is not None:
                given_by(found, sum(unit.nbytes for unit in self._away()))

    # -- of a shared budget

    @staticmethod
    def _coming(shared: SharedBudget | None) -> contextlib.AbstractContextManager[Any]:
        """Who comes to ``shared`` is laid out before the next one comes."""
        return contextlib.nullcontext() if shared is None else shared.mates.coming

    def _taking(self) -> contextlib.AbstractContextManager[Any]:
        """Between reading what is left of a shared budget and saying what of it is taken, nobody else takes any."""
        return contextlib.nullcontext() if self._shared is None else self._shared.mates.lock

    def _allot(self, budget: int) -> None:
        """``budget`` is this session's from now on; of a shared one no more than there is."""
        with self._taking():
            self._vram = min(budget, self._most(budget))

    def _most(self, otherwise: int) -> int:
        """The largest budget that a shared one leaves this session; ``otherwise``: where it has its own."""
        if self._shared is None:
            return otherwise
        return self._promised_bytes() - self._unused_bytes() + self._shared.free_for(self)

    def _most_grown(self, memory: Memory, most: int, everything: int) -> int:
        """``most``, or more where a shared budget can rise by what ``memory`` leaves."""
        shared = self._shared
        if shared is None or self._pooled is not None:
            return most
        total = shared.could_be(memory, self)
        return max(most, min(most + total - shared.nbytes, shared.part_of(self, everything, total)))

    def _growing(self) -> contextlib.AbstractContextManager[Any]:
        """Between reading what the device leaves and taking of it, nobody else of a budget that grows takes or leaves any."""
        return self._taking() if self._shared is not None and self._shared.grows else contextlib.nullcontext()

    def _may_grow(self, locks: contextlib.ExitStack) -> bool:
        """As `_growing`, for as long as ``locks`` are held; False at once where somebody else takes or leaves some now."""
        if self._shared is None or not self._shared.grows:
            return True
        lock = self._shared.mates.lock
        if not lock.acquire(blocking=False):
            return False
        locks.callback(lock.release)
        return True

    def _claims(self, budget: int) -> bool:
        """A layout under way needs ``budget`` bytes, rather than those it began with; False where they are not there."""
        with self._taking():
            more = budget - (self._laying or self._vram)
            if self._shared is not None and more > 0:
                if more > self._shared.free_for(self):
                    return False
                self._laying += more
            self._vram = max(self._vram, budget)
            return True

    @contextlib.contextmanager
    def _laying_out(self) -> Iterator[None]:
        """What is promised now is so until the layout is done, whatever is held meanwhile; none of it looks free on the device
        to others of a budget that grows."""
        with self._growing():
            before = self._laying
            self._laying = before or self._promised_bytes()
            try:
                yield
            finally:
                self._laying = before

    def _promised_bytes(self) -> int:
        """Device bytes of weights that are held, or may be under a shared budget without asking again."""
        if self._laying:
            return self._laying
        if self._closed or self._parked:
            return 0
        pooled = self._pooled
        if pooled is not None:
            return self._placement.resident_bytes + pooled.most_bytes
        held = self._held_bytes()
        return held if self._shared is None else max(held, min(self._vram, self._everything()))

    def _unused_bytes(self) -> int:
        """Of what is promised, what is not held."""
        none = self._laying or self._closed or self._parked or self._pooled is not None
        return 0 if none else self._promised_bytes() - self._held_bytes()

    def _unheld_bytes(self) -> int:
        """Of what is promised, what may not be on the device as yet: of a layout that is about to begin, all of it."""
        return self._laying or (
            0 if self._closed or self._parked else max(0, self._promised_bytes() - self._held_bytes())
        )

    # -- parked meanwhile

    def _kept_bytes(self) -> int:
        """Bytes of a shared budget that nobody else gets: what this session needs to return."""
        return self._keeps if self._parked and not self._laying else 0

    def _leaves_for_a_while(self) -> None:
        """About to be parked: others may take what it holds."""
        memory = self._memory() if self._governor is not None else None
        self._passing = 0 if memory is None else max(self._passing, memory.cached)

    def _returns(self) -> None:
        """About to return from being parked: what it held then may be others' by now, who give way first.

        Raises BudgetError where they cannot, and its least is not there.
        """
        self._least_known = None  # what came to the module meanwhile counts
        memory = self._memory()
        if self._governor is None or memory is None:
            return
        if self._mates is not None:
            self._mates.shares.returned(id(self))
        passing = max(self._passing, memory.cached)  # what passes want of what is free

        def room(memory: Memory) -> int:
            return memory.free if memory.weights_only else memory.free + memory.cached - passing

        headroom = Governor.headroom(memory)
        budget, asked = self._vram, False
        if not memory.weights_only and room(memory) - int(LOW * headroom) < budget:
            asked = True
            if self._ask(budget + headroom - room(memory), of_device=True):
                memory = self._memory() or memory
            budget = min(budget, room(memory) - Governor.headroom(memory))
        if self._shared is not None:
            part = self._shared.part_of(self, self._everything())
            short = max(self._least(), min(self._vram, part)) - self._shared.free_for(self)
            asked = asked or short > 0
            self._ask(short)
        self._comes_back(max(self._least(), budget))
        if asked or self._vram < budget:
            self._governor.gave()

    def _too_little(self, left: int, least: int) -> BudgetError:
        """What is ``left`` of the shared budget is below the ``least`` that works."""
        return BudgetError(
            f"{format_size(left)} of {self._shared} are left for {type(self.module).__name__}, whose least is {least} bytes "
            f"({format_size(least)}): others hold the rest, and cannot give way now (they are in a step, or a graph still "
            "wants their weights); end their step, or give them less with set_budget(vram=...)",
            least,
        )

    def _comes_back(self, budget: int) -> None:
        """``budget`` is this session's, which is parked no more. Raises BudgetError."""
        with self._taking():
            least = self._least()
            if self._shared is not None:
                left = self._shared.free_for(self)
                if left < least:
                    raise self._too_little(left, least)
                budget = min(budget, left)
            self._vram = self._laying = budget
