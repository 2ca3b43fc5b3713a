"""`Leftover`: a budget that a host set before it had seen a pass may rise by what passes leave free (`budget.leftover`).

More is taken only with a layout that is made anyway, and only where a pass that then runs out of memory all the same can be run
again: the pass is, with the host's budget.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
import traceback
from collections.abc import Callable, Hashable

import torch

from ...budget.leftover import SIZES, Room
from ...common.errors import UnsupportedError
from ...common.sizes import format_size
from ...placement.placement import Placement
from ...streaming.pass_retry import PassSnapshot, repeats, sizes
from ..layout_manager import LayoutManager

logger = logging.getLogger("carom")
_OFTEN, _SECONDS = 16, 0.25  # steps after which memory is read, then only every so many seconds
_RETRIED = 4  # passes of a layout that may run again
_WORTH = 0.03  # of the streamed bytes: fewer bytes of room are not worth a search

Inputs = tuple[tuple, dict]


class Leftover:
    """What passes leave of the device beside a host's own budget. Does nothing until `follow`.

    ``ready``: does what is due before a pass. ``reconsider``: asks for the layout to be thought over at the next step;
    ``thought_over``: returns whether that was done already.
    """

    def __init__(
        self, manager: LayoutManager, ready: Callable[[], bool], thought_over: Callable[[], bool],
        reconsider: Callable[[], None], grows_now: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._manager, self._ready = manager, ready
        self._thought_over, self._reconsider, self._grows_now = thought_over, reconsider, grows_now
        self.room: Room | None = None
        self.base = 0  # bytes of the host's own budget
        self._given: Callable[[tuple, dict], Inputs] = lambda args, kwargs: (args, kwargs)
        self._looked = -math.inf
        self.asked: set[Hashable] = set()  # sizes of inputs whose passes had what they need
        self._reconsidered: Placement | None = None  # the placement that was thought over because of room

    def follow(
        self, base: int | None, keep: int, most: float, given: Callable[[tuple, dict], Inputs]
    ) -> None:
        """Begin to follow, as `Session.follow_room` says."""
        manager = self._manager
        ledger = manager.ledger
        if ledger.governor is not None:
            raise UnsupportedError(
                "follow_room() is for a budget in bytes: this one follows the device by itself; call "
                "set_budget(vram=bytes) first"
            )
        if base is None or base >= ledger.vram:
            base = ledger.vram
        else:  # a host may offer less than what works
            base = min(max(base, ledger.least_bytes), ledger.vram)
        self.base, self._given = base, given
        if self.room is None or (self.room.keep, self.room.most) != (keep, most):
            self.room = Room(keep, most)

    def stop(self) -> None:
        """Follow no more: the budget follows the device by itself."""
        self.room = None

    def expect_other_passes(self) -> None:
        """Note that other programs had the device's memory since the last pass."""
        if self.room is not None:
            self.asked.clear()

    def laid_out(self) -> None:
        """Note that the weights were laid out again: readings begin anew."""
        if self.room is not None:
            self.room.begin_anew()

    @property
    def spare_bytes(self) -> int:
        """Bytes that the budget may rise by, as far as passes have shown; 0 unless `follow` was called."""
        ledger = self._manager.ledger
        if self.room is None or not self._manager.attached:
            return 0
        return self.room.spare(ledger.vram, self.base, max(0, ledger.vram - ledger.held_bytes))

    @property
    def beyond_bytes(self) -> float:
        """Bytes that the budget may exceed the host's by at most: fewer after a pass that ran out of memory."""
        return 0 if self.room is None or self.room.none else self.room.beyond

    @property
    def unsure(self) -> bool:
        """Whether passes ran whose readings do not agree yet."""
        return self.room is not None and self.room.unsure

    def weights_moved(self) -> None:
        """Give back what moving weights left to the allocator, while readings of free memory count: passes do not need it."""
        if self.room is not None:
            self._manager.engine.trim()

    def forget(self) -> None:
        """Take no more room for the rest of the session, whatever passes seem to leave."""
        if self.room is not None:
            self.room.none = True

    def worth(self, spare: int) -> bool:
        """Return whether ``spare`` bytes more are worth a search."""
        return spare > _WORTH * sum(unit.nbytes for unit in self._manager.layout.placement.streamed)

    # -- passes

    def passed(self, args: tuple, kwargs: dict) -> None:
        """Note what a pass that ended left free, now and then."""
        room, manager = self.room, self._manager
        if room is None or not manager.attached:
            return
        now, layout = time.monotonic(), manager.layout
        often = layout.meter.steps <= _OFTEN or manager.engine.virtual_clock
        often = often or (room.unsure and not self._thought_over())  # a layout waits to know
        if room.none or not (often or now - self._looked >= _SECONDS):
            return
        self._looked = now
        memory, given = manager.engine.memory(), self._given(args, kwargs)
        if memory is None:
            return
        if torch.is_grad_enabled() or not repeats(given):
            room.begin_anew()
            return
        room.passed(memory, sizes(*given))
        # Where the layout was thought over without the room: once more.
        placement = layout.placement
        if self._thought_over() and self._reconsidered is not placement and self.worth(self.spare_bytes):
            self._reconsidered = placement
            self._reconsider()

    def before(self, args: tuple, kwargs: dict) -> PassSnapshot | None:
        """Return what a pass beyond the host's budget finds, where the pass may have to run again."""
        room, ledger = self.room, self._manager.ledger
        assert room is not None
        grows = self._grows_now() and self.spare_bytes > 0  # maybe: before this pass
        if ledger.vram <= self.base and not grows:
            return None
        given = self._given(args, kwargs)
        asking = sizes(*given)
        gradient = torch.is_grad_enabled()
        known = asking in self.asked and self._manager.layout.meter.steps > _RETRIED
        if known and not (grows or gradient):
            return None
        if gradient or not repeats(given):
            room.begin_anew()  # nor does the budget rise for such a pass
            self._cannot_repeat(room)
            return None
        self._ready()  # a new layout could not be told from what a pass changed
        if ledger.vram <= self.base:
            return None
        before = PassSnapshot(self._manager.module.root, args, kwargs, read=given)
        if not before.possible:  # no memory for copies of the pass's inputs
            self._cannot_repeat(room)
            return None
        if len(self.asked) >= SIZES:
            self.asked.clear()
        self.asked.add(asking)
        return before

    def _cannot_repeat(self, room: Room) -> None:
        """Go back to the host's budget for a pass that cannot run again.

        Such passes may take turns with others, and each change is a layout: what was too much twice is not tried again.
        """
        beyond = self._manager.ledger.vram - self.base
        if beyond > 0 and self._go_back("a pass could not be run again"):
            room.failed(beyond)

    def recover(self, error: BaseException, before: PassSnapshot | None) -> bool:
        """Go back to the host's budget after a pass ran out of memory. Returns whether the pass may run again."""
        room, manager = self.room, self._manager
        assert room is not None
        self.asked.clear()
        beyond = manager.ledger.vram - self.base
        if beyond <= 0:  # the host's own budget was too much
            room.none = True
            return False
        room.failed(beyond)
        # Where a layout found no room, and the session is parked, nothing ran yet.
        if not manager.phase.parked and (before is None or not before.restore()):
            return False
        # The failed pass's frames would keep its activations, and weights that are to leave.
        traceback.clear_frames(error.__traceback__)
        return self._go_back("a pass ran out of memory")

    def _go_back(self, why: str) -> bool:
        """Lay the weights out for the host's budget; return False where that has to wait, or no such layout is possible."""
        manager = self._manager
        ledger, layout = manager.ledger, manager.layout
        with manager.lock, layout.streamer.lock:
            base = max(self.base, ledger.least_bytes)
            free = layout.streamer.idle and layout.streamer.unreferenced
            whole = manager.attached or manager.phase.parked
            if base >= ledger.vram or not free or not whole:
                return False
            before, after = format_size(ledger.vram), format_size(base)
            logger.info("carom: %s beside %s of weights: back to %s, the host's budget", why, before, after)
            # Where times are known the layout is searched for by them: what stayed with more room is no measure.
            among = layout.resident_names() if manager.wanted.profile is None else None
            ledger.set(base)
            wanted = dataclasses.replace(manager.present(), residents_among=among)
            if manager.phase.parked:  # the next pass lays it out so
                manager.wanted = wanted
                return True
            manager.change(wanted, lambda failed, error: manager.shrunk(failed))
            manager.engine.trim()
            return True
