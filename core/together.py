"""Several sessions on one device, or under one budget: a new one finds room, and so does one that returns.

A mixin of `Session`. The rules are `shares.py`'s.
"""

from __future__ import annotations

import threading
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

_ROUNDING = 1.03  # of a model's bytes, for what allocators round up


class Together:
    """What a `Session` (which see for the fields) gives to others, and asks of them."""

    module: nn.Module
    _engine: Any
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
    _passing = (
        0  # bytes: the most that the allocator was seen to keep for passes, when this session was parked
    )

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

    def _make_room(self, budget: int) -> bool:
        """A new session has ``budget`` bytes for its weights: where that is short, let others give way first."""
        everything = sum(
            round_up(tensor.numel() * tensor.element_size(), 512)
            for tensor in (*self.module.parameters(), *self.module.buffers())
        )
        most = int(everything * _ROUNDING)
        if self._shared is not None:
            most = self._shared.part_of(self, most)
        return self._ask(most - budget)

    def _ask(self, missing: int) -> bool:
        """Let others give ``missing`` bytes, as far as they can; whether any did."""
        given = False
        if self._mates is not None and missing > 0:
            for key in self._mates.shares.before_all(id(self)):
                other = self._mates.sessions.get(key)
                if other is not None and missing > 0:
                    got = other._yield(missing)
                    missing -= got
                    given = given or got > 0
        return given

    def _yield(self, nbytes: int) -> int:
        """Give up to ``nbytes`` of resident weights to another session; returns how many it was."""
        if not self._lock.acquire(blocking=False):
            return 0  # it is in a step of another thread
        try:
            streamer = self._streamer
            if self._closed or self._parked or self._governor is None or not self._movable():
                return 0
            if not streamer.idle or not streamer.unreferenced or self._meter.awaiting:
                return 0
            bounded = self._shared is not None
            has = self._promised_bytes if bounded else self._held_bytes
            before = has()
            budget = max(self._least(), before - nbytes)
            if budget >= before:
                return 0
            self._governor.gave()
            if bounded and budget >= self._held_bytes():
                self._vram = budget  # the rest was not held
                self._account()
            else:
                self._resize(budget)
            return max(0, before - has())
        finally:
            self._lock.release()

    def _count_use(self) -> None:
        """A step begins: a session that is used much less gives way where this one is short."""
        assert self._mates is not None
        short = bool(self._away())
        spare = {}
        if short:
            for key, other in list(self._mates.sessions.items()):
                if other is not self and not other._closed and not other._parked:
                    spare[key] = other._held_bytes() - other._least()
        giver = self._mates.shares.used(id(self), short, spare)
        if giver is not None:
            found = self._mates.sessions.get(giver)
            if found is not None:
                found._yield(sum(unit.nbytes for unit in self._away()))

    # -- of a shared budget

    def _promised_bytes(self) -> int:
        """Device bytes of weights that are held, or may be under a shared budget without asking again."""
        if self._closed or self._parked:
            return 0
        pooled = self._pooled
        if pooled is not None:
            return self._placement.resident_bytes + pooled.most_bytes
        held = self._held_bytes()
        return held if self._shared is None else max(held, min(self._vram, self._everything()))

    def _unused_bytes(self) -> int:
        """Of what is promised, what is not held."""
        none = self._closed or self._parked or self._pooled is not None
        return 0 if none else self._promised_bytes() - self._held_bytes()

    # -- parked meanwhile

    def _kept_bytes(self) -> int:
        """Bytes of a shared budget that nobody else gets: what this session needs to return."""
        return self._least() if self._parked else 0

    def _leaves_for_a_while(self) -> None:
        """About to be parked: others may take what it holds."""
        memory = self._memory() if self._governor is not None else None
        self._passing = 0 if memory is None else max(self._passing, memory.cached)

    def _returns(self) -> None:
        """About to return from being parked: what it held then may be others' by now, who give way first.

        Raises BudgetError where they cannot, and its least is not there.
        """
        memory = self._memory()
        if self._governor is None or memory is None:
            return
        if self._mates is not None:
            self._mates.shares.returned(id(self))
        passing = max(self._passing, memory.cached)  # what passes want of what is free

        def room(memory: Memory) -> int:
            return memory.free if memory.weights_only else memory.free + memory.cached - passing

        headroom = Governor.headroom(memory)
        if room(memory) - int(LOW * headroom) >= self._vram:
            return
        wanted = self._vram if self._shared is None else self._shared.part_of(self, self._vram)
        if self._ask(wanted + headroom - room(memory)):
            memory = self._memory() or memory
        least = self._least()
        self._vram = max(least, min(self._vram, room(memory) - headroom))
        if memory.weights_only and memory.free < least:
            raise BudgetError(
                f"{format_size(memory.free)} of {self._shared} are left for {type(self.module).__name__}, whose least is "
                f"{least} bytes ({format_size(least)}): others hold the rest, and cannot give way now (they are in a step, or "
                "a graph still wants their weights); end their step, or give them less with set_budget(vram=...)",
                least,
            )
        self._governor.gave()
