"""``ram="auto"``: what a session holds of host memory gives way when the machine or its container runs short of it.

The rule (`Follower`) is pure; `FollowsRam` is a mixin of `Session`. With weights from files the host cache gives way. Weights that
are in host memory alone have nowhere else to be, so they stay; but copies go (of resident units, kept for the next layout; packed
ones beside plain bytes), and where the system has swap, which takes no pinned memory, weights are no longer pinned: they cross
from pageable memory, more slowly.
"""

from __future__ import annotations

import logging
import time

from . import host
from .attach import Placement
from .checkpoint import Checkpoint
from .disk_streamer import DiskStreamer
from .errors import BudgetError
from .host_copies import HostCopies
from .packing import Packing
from .sizes import format_size
from .store.arena import HostArena
from .streamer import Streamer
from .transfer import Engine

logger = logging.getLogger("carom")
LOW = 0.5  # of what is kept free at first: below it the cache gives way
WORTH = 0.1  # of the first budget that a rise must be: the cache is filled anew for it
QUIET, MOST_QUIET = 8, 1 << 10  # readings before a rise; doubled by every fall
LOOKS = 1.0  # seconds between readings


class Follower:
    """The budget of one cache. Bytes: ``first``: what it began with, and never exceeds; ``keep``: to be left to others."""

    def __init__(self, first: int, keep: int) -> None:
        self.first, self.keep = first, keep
        self._quiet = 0
        self._patience = QUIET

    def read(self, free: int, held: int, budget: int, least: int) -> int | None:
        """A new budget, None to keep ``budget``. Bytes: ``free``: of host memory to this process; ``held`` by the cache;
        ``least``: the smallest budget that works."""
        keep = self.keep
        if free < LOW * keep:
            self._quiet = 0
            self._patience = min(MOST_QUIET, 2 * self._patience)
            target = max(least, held - (keep - free))
            return target if target < budget else None
        target = min(self.first, held + free - keep)
        if target - budget < WORTH * self.first:
            self._quiet = 0
            return None
        self._quiet += 1
        if self._quiet < self._patience:
            return None
        self._quiet = 0
        return target


def swaps(memory: host.HostMemory) -> bool:
    """Whether memory that is not pinned can be taken from this process: there is swap, and no container's limit that counts
    first (what it lets swap is not known)."""
    bound = memory.cgroup_limit is not None and memory.cgroup_limit < memory.total
    return memory.swap_total > memory.swap_used and not bound


class FollowsRam:
    """Lets what a `Session` (which see for the fields) holds of host memory follow what the host has left."""

    _engine: Engine
    _arena: HostArena
    _packing: Packing | None
    _copies: HostCopies
    _checkpoint: Checkpoint | None
    _placement: Placement
    _streamer: Streamer
    _ram: int
    _follower: Follower | None
    _ram_looked: float

    def _lay_out(self) -> None:
        raise NotImplementedError

    def _follow_ram(self, auto: bool) -> None:
        """Begin to follow, or to keep to a budget that was given."""
        self._follower = None
        self._pins: int | None = None  # bytes that may be pinned, where that is less than the budget
        self._ram_looked = time.monotonic()
        if not auto:
            return
        memory = host.host_memory()
        if self._checkpoint is None:
            both = self._packing is not None and self._packing.keep_raw
            if both or self._engine.pinner is not None:
                self._follower = Follower(self._ram, min(memory.keep, memory.free))
        else:
            # Where little is left even at first, no more than that is wanted back.
            self._follower = Follower(self._ram, min(memory.keep, max(0, memory.free - self._ram)))

    def _watch_ram(self, follower: Follower) -> None:
        """Between steps: see what the host has left."""
        now, streamer = time.monotonic(), self._streamer
        if now - self._ram_looked < LOOKS or not streamer.unreferenced:
            return
        self._ram_looked = now
        if not isinstance(streamer, DiskStreamer):
            self._watch_pinned(follower)
            return
        if streamer.residents.waiting:
            return
        held = streamer.account().ram_peak_bytes
        budget = follower.read(host.host_memory().free, held, self._ram, self._least_ram(streamer))
        if budget is None:
            return
        logger.info(
            "carom: ram='auto': %s for the cache instead of %s", format_size(budget), format_size(self._ram)
        )
        before, self._ram = self._ram, budget
        try:
            self._lay_out()
        except BaseException:  # parked: it returns with what did work
            self._ram = before
            raise

    def _least_ram(self, streamer: DiskStreamer) -> int:
        """The smallest budget that works with the present layout."""
        assert self._checkpoint is not None
        try:
            self._checkpoint.require_ram(0, [unit.unit for unit in streamer.units])
        except BudgetError as error:
            return (error.least_bytes or 0) + self._checkpoint.changed_bytes
        return 0

    # -- weights in host memory alone

    def _pin_limit(self) -> int:
        """Bytes that a layout may pin."""
        return host.pin_limit(self._ram if self._pins is None else min(self._pins, self._ram))

    def _watch_pinned(self, follower: Follower) -> None:
        memory = host.host_memory()
        now = self._ram if self._pins is None else self._pins
        limit = follower.read(memory.free, self._arena.pinned_bytes, now, 0)
        if limit is None:
            return
        if limit < now and self._packing is not None and self._packing.keep_raw:
            logger.info(
                "carom: ram='auto': host memory is short: weights wait as they are, not packed besides"
            )
            self._packing = None
            self._lay_out()
        else:
            self._pin(limit, swaps(memory))

    def _pin(self, limit: int, swapped: bool) -> None:
        """Have at most ``limit`` bytes pinned, as many as that allows: first copies of what is resident go, then (where that
        helps anybody: ``swapped``) what is used last is unpinned."""
        arena = self._arena
        before = arena.pinned_bytes
        self._engine.synchronize()  # copies may be under way
        self._copies.spare(before - limit)
        if swapped or limit >= self._ram:
            self._pins = None if limit >= self._ram else limit
            arena.bound(self._pin_limit())
            units = [unit for unit in self._placement.streamed if unit.block.data.numel()]
            for unit in reversed(units):
                if unit.block.pinned and arena.pinned_bytes > limit:
                    unit.block.unpin()
            for unit in units:
                if not unit.block.pinned and arena.pinned_bytes + unit.block.data.numel() < limit:
                    arena.pin(unit.block)
        if arena.pinned_bytes != before:
            logger.info(
                "carom: ram='auto': %s pinned instead of %s",
                format_size(arena.pinned_bytes),
                format_size(before),
            )
