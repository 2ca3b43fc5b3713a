"""``ram="auto"`` with weights from files: the host cache gives way when the machine or its container runs short of memory.

The rule (`Follower`) is pure; `FollowsRam` is a mixin of `Session`. Weights that are in host memory alone have nowhere else to be:
there "auto" bounds what is pinned, and follows nothing.
"""

from __future__ import annotations

import logging
import time

from . import host
from .attach import Placement
from .checkpoint import Checkpoint
from .disk_streamer import DiskStreamer
from .errors import BudgetError
from .sizes import format_size
from .streamer import Streamer

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


class FollowsRam:
    """Lets the host cache of a `Session` (which see for the fields) follow the memory that the host has left."""

    _checkpoint: Checkpoint | None
    _placement: Placement
    _streamer: Streamer
    _ram: int
    _follower: Follower | None
    _ram_looked: float

    def _again(self, *, retry: bool = False) -> None:
        raise NotImplementedError

    def _follow_ram(self, auto: bool) -> None:
        """Begin to follow, or to keep to a budget that was given."""
        self._follower = None
        self._ram_looked = time.monotonic()
        if auto and self._checkpoint is not None:
            memory = host.host_memory()
            # Where little is left even at first, no more than that is wanted back.
            self._follower = Follower(self._ram, min(memory.keep, max(0, memory.free - self._ram)))

    def _watch_ram(self, follower: Follower) -> None:
        """Between steps: see what the host has left."""
        now, streamer = time.monotonic(), self._streamer
        if (
            now - self._ram_looked < LOOKS
            or not isinstance(streamer, DiskStreamer)
            or not streamer.unreferenced
        ):
            return
        self._ram_looked = now
        if streamer.residents.waiting:
            return
        held = streamer.account().ram_peak_bytes
        budget = follower.read(host.host_memory().free, held, self._ram, self._least_ram(streamer))
        if budget is None:
            return
        logger.info(
            "carom: ram='auto': %s for the cache instead of %s", format_size(budget), format_size(self._ram)
        )
        self._ram = budget
        self._again(retry=True)

    def _least_ram(self, streamer: DiskStreamer) -> int:
        """The smallest budget that works with the present layout."""
        assert self._checkpoint is not None
        try:
            self._checkpoint.require_ram(0, [unit.unit for unit in streamer.units])
        except BudgetError as error:
            return (error.least_bytes or 0) + self._checkpoint.changed_bytes
        return 0
