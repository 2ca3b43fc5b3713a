"""A budget that a host set before it had seen a pass may rise by what passes leave free (the rule: `room.py`).

A mixin of `Session`, under `Tunes`. More is taken only with a layout that is taken anyway, and only where a pass that then
runs out of memory all the same can be run again: it is, with the host's budget.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

from . import replan
from .again import Before, repeats, sizes
from .attach import Placement
from .auto import Governor
from .errors import UnsupportedError
from .meter import Meter
from .room import SIZES, Room
from .simulated import SimulatedEngine
from .sizes import format_size
from .streamer import Streamer
from .transfer import Engine

logger = logging.getLogger("carom")
_LOOKED, _LOOKS = 16, 0.25  # steps after which memory is read, then only every so many seconds
_FIRST = 4  # passes of a layout that may run again

Inputs = tuple[tuple, dict]


class FollowsRoom:
    """The room of a `Session` (which see for the fields)."""

    module: torch.nn.Module
    _engine: Engine
    _lock: threading.RLock
    _meter: Meter
    _placement: Placement
    _streamer: Streamer
    _vram: int
    _parked: bool
    _closed: bool
    _among: frozenset[str] | None
    _tune_at: float
    _look_at: float
    _asked: set
    _learnt: Any
    _governor: Governor | None
    _room: Room | None = None
    _base = 0  # bytes of the host's own budget
    _given: Callable[[tuple, dict], Inputs]
    _room_looked = 0.0
    _thought: Any = None  # the placement that was thought over because of room

    def _lay_out(self) -> None:
        raise NotImplementedError

    def _ready(self) -> bool:
        raise NotImplementedError

    def _least(self) -> int:
        raise NotImplementedError

    def _held_bytes(self) -> int:
        raise NotImplementedError

    def _residents(self) -> frozenset[str]:
        raise NotImplementedError

    def follow_room(
        self,
        base: int | None = None,
        keep: int = 0,
        most: float = math.inf,
        given: Callable[[tuple, dict], Inputs] = lambda args, kwargs: (args, kwargs),
    ) -> None:
        """Let the budget rise by what passes leave free, when a better layout is taken anyway.

        ``base``: the host's budget in bytes, to go back to (default: the present one); ``keep``: bytes of the device to be
        left free at least; ``most``: bytes that the budget never exceeds. ``given``: of a pass's arguments those that it
        reads, without what is called outside of it: room is taken where these are tensors and plain values, so that the
        pass can run again. To be said again whenever the budget was set.

        Raises UnsupportedError where the budget follows the device already (``vram="auto"``, or a `SharedBudget`).
        """
        with self._lock:
            if self._governor is not None:
                raise UnsupportedError(
                    "follow_room() is for a budget in bytes: this one follows the device by itself; call "
                    "set_budget(vram=bytes) first"
                )
            if base is None or base >= self._vram:
                base = self._vram
            else:  # a host may offer less than what works
                base = min(max(base, self._least()), self._vram)
            self._base, self._given = base, given
            if self._room is None or (self._room.keep, self._room.most) != (keep, most):
                self._room = Room(keep, most)

    def expect_anew(self) -> None:
        """A run of passes is about to begin, between which and the last one others had the device's memory."""
        if self._room is not None:
            self._asked.clear()

    @property
    def spare(self) -> int:
        """Bytes that the budget may rise by, as far as passes have shown; 0 unless room is followed."""
        if self._room is None or self._parked:
            return 0
        return self._room.spare(self._vram, self._base, max(0, self._vram - self._held_bytes()))

    @property
    def beyond(self) -> float:
        """Bytes that the budget may exceed the host's by at most: fewer after a pass that ran out of memory."""
        return 0 if self._room is None or self._room.none else self._room.beyond

    @property
    def vram(self) -> int:
        """The present budget in bytes."""
        return self._vram

    def forget_room(self) -> None:
        """There is none for the rest of the session, whatever passes seem to leave."""
        if self._room is not None:
            self._room.none = True

    def _worth(self, spare: int) -> bool:
        """Whether so many bytes more are worth a search."""
        return spare > replan.WORTH * sum(unit.nbytes for unit in self._placement.streamed)

    def _passed(self, room: Room, args: tuple, kwargs: dict) -> None:
        """A pass ended: see what it left, now and then."""
        now = time.monotonic()
        often = self._meter.steps <= _LOOKED or isinstance(self._engine, SimulatedEngine)
        often = often or (room.unsure and self._tune_at < math.inf)  # a layout waits to know
        if room.none or not (often or now - self._room_looked >= _LOOKS):
            return
        self._room_looked = now
        memory, given = self._engine.memory(), self._given(args, kwargs)
        if memory is None:
            return
        if torch.is_grad_enabled() or not repeats(given):
            room.begin_anew()
            return
        room.passed(memory, sizes(*given))
        # Where the layout was thought over without it: once more.
        if self._tune_at == math.inf and self._thought is not self._placement and self._worth(self.spare):
            self._thought = self._placement
            self._tune_at = self._meter.settled
            self._look_at = min(self._look_at, self._tune_at)

    def _before_beyond(self, args: tuple, kwargs: dict) -> Before | None:
        """What a pass beyond the host's budget finds, where it may have to run again: as long as it may be the first one."""
        assert self._room is not None
        grows = self._meter.settled >= self._tune_at and self.spare > 0  # maybe: before this pass
        if self._vram <= self._base and not grows:
            return None
        given = self._given(args, kwargs)
        asking = sizes(*given)
        gradient = torch.is_grad_enabled()
        if asking in self._asked and self._meter.steps > _FIRST and not (grows or gradient):
            return None
        if gradient or not repeats(given):
            self._room.begin_anew()  # nor does the budget rise for it
            self._cannot_repeat()
            return None
        self._ready()  # a new layout could not be told from what a pass changed
        if self._vram <= self._base:
            return None
        before = Before(self.module, args, kwargs, read=given)
        if not before.possible:  # no memory for copies of its inputs
            self._cannot_repeat()
            return None
        if len(self._asked) >= SIZES:
            self._asked.clear()
        self._asked.add(asking)
        return before

    def _cannot_repeat(self) -> None:
        """A pass that could not run again is about to: within the host's budget. Such passes may take turns with others,
        and each change is a layout: what was too much twice is not tried again."""
        assert self._room is not None
        beyond = self._vram - self._base
        if beyond > 0 and self._back("a pass could not be run again"):
            self._room.failed(beyond)

    def _falls_back(self, error: BaseException, before: Before | None) -> bool:
        """A pass ran out of memory: back to the host's budget; True when the pass may run again."""
        assert self._room is not None
        self._asked.clear()
        beyond = self._vram - self._base
        if beyond <= 0:  # the host's own budget was too much
            self._room.none = True
            return False
        self._room.failed(beyond)
        # Where it was a layout that found no room, and the session is parked, nothing ran yet.
        if not self._parked and (before is None or not before.restore()):
            return False
        # The failed pass's frames would keep its activations, and weights that are to leave.
        traceback.clear_frames(error.__traceback__)
        return self._back("a pass ran out of memory")

    def _back(self, why: str) -> bool:
        """Lay out anew for the host's budget; False where that has to wait, or what came since leaves no such layout."""
        with self._lock, self._streamer.lock:
            base = max(self._base, self._least())
            free = self._streamer.idle and self._streamer.unreferenced and not self._closed
            if base >= self._vram or not free:
                return False
            before, after = format_size(self._vram), format_size(base)
            logger.info("carom: %s beside %s of weights: back to %s, the host's budget", why, before, after)
            # Where times are known the layout is searched for by them: what stayed with more room is no measure.
            self._among = self._residents() if self._learnt is None else None
            self._vram = base
            if self._parked:  # the next pass lays it out so
                return True
            self._lay_out()
            self._engine.trim()
            return True
