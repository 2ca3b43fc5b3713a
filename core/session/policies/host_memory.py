"""`HostMemory`: the policy for ``ram="auto"``: frees host memory if the machine or its container runs short
of it.

What parked sessions keep of weights from files is released first. If weights come from files, the RAM cache
shrinks; what it holds within the smaller budget stays, and is not read again. Weights that exist only in host memory stay there. Two
kinds of host memory are freed: host copies of units that stay on the device (kept for the next layout), and
packed copies of weights that are also kept unpacked.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time

from ...budget.host_governor import HostGovernor, least_cache
from ...common.errors import BudgetError, CaromError
from ...common.sizes import format_size
from ...host import probe
from ...host.arena import PAGE
from ...host.cache_pieces import LEAST_BUFFERS
from ...host.kept_pieces import release_idle
from ..layout import Layout, Outcome, Wanted
from ..layout_manager import LayoutManager
from .policy import Observation, StepClock

logger = logging.getLogger("carom")
_SECONDS = 1.0  # seconds between two readings of the host's memory
_STEPS = 16  # steps between two checks of host memory if no weights come from files


class HostMemory:
    """The policy that lets a session's RAM budget follow the host's free memory. It does nothing until
    `begin` is called.

    ``governor``: the object that computes the RAM budget, None if the budget is fixed.
    """

    def __init__(self, manager: LayoutManager) -> None:
        self._manager = manager
        self.governor: HostGovernor | None = None
        self._looked = -math.inf
        # the RAM budget in bytes before weights were to move to disk, None if they were not
        self._before: int | None = None
        # number of measured steps after which `due` has to be called, if no weights come from files
        self._step = 0

    def begin(self, auto: bool) -> None:
        """Let the RAM budget follow the host's memory if ``auto`` is true. Otherwise leave the budget fixed."""
        manager, wanted = self._manager, self._manager.wanted
        self.governor = None
        self._looked = time.monotonic()
        if not auto:
            return
        memory = probe.host_memory()
        if manager.module.checkpoint is None:
            both = wanted.packing is not None and wanted.packing.keep_raw
            if both or manager.engine.pinner is not None or manager.module.disk is not None:
                self.governor = HostGovernor(wanted.ram, min(memory.keep, memory.free))
        else:
            # If little memory is free at the beginning, do not require more free memory later.
            self.governor = HostGovernor(wanted.ram, min(memory.keep, max(0, memory.free - wanted.ram)))

    def next_step(self, settled: int) -> float:
        """Return the measured step from which `due` has to be called: every step for the cache of a file,
        otherwise every 16 steps.
        """
        if self.governor is None:
            return math.inf
        if self._manager.module.checkpoint is not None:
            return 0
        self._step = min(self._step, settled + _STEPS)  # a new layout counts its steps from 0
        return self._step

    def due(self, clock: StepClock) -> bool:
        """Return whether to read the host's memory now."""
        self._step = clock.settled + _STEPS
        return self.governor is not None and not clock.awaiting and clock.now - self._looked >= _SECONDS

    def decide(self, seen: Observation) -> Wanted | None:
        """Return a request with another RAM budget, or without packed copies, where host memory requires that."""
        governor = self.governor
        if governor is None or not seen.unreferenced:
            return None
        self._looked = seen.clock.now
        if governor.short(seen.host_memory.free):
            # What nobody uses at the moment goes first; the next reading shows whether that suffices.
            released = release_idle(governor.keep - seen.host_memory.free)
            if released:
                logger.info("carom: ram='auto': %s of parked weights released", format_size(released))
                return None
        tier = seen.layout.placement.tier
        read = tier.figures().read
        if read is None:
            return self._in_memory(governor, seen)
        if tier.arriving:
            return None
        least = self._least_ram(seen.layout)
        budget = governor.read(seen.host_memory.free, read.ram_peak_bytes, seen.wanted.ram, least)
        if budget is None:
            return None
        logger.info(
            "carom: ram='auto': %s for the cache instead of %s",
            format_size(budget),
            format_size(seen.wanted.ram),
        )
        return dataclasses.replace(seen.wanted, ram=budget)

    def fallback(self, failed: Wanted, error: BaseException) -> Wanted | None:
        """Return ``failed`` with a smaller VRAM budget, or None if no smaller budget works.

        If weights could not move to disk, returns ``failed`` with the RAM budget of before, once: they stay in
        host memory, whose budget is fixed from then on.
        """
        before, self._before = self._before, None
        if before is None or not isinstance(error, CaromError):
            return self._manager.shrunk(failed, error)
        logger.warning("carom: ram='auto': host memory is short, but weights cannot move to disk: %s", error)
        self.governor = None
        return dataclasses.replace(failed, ram=before)

    def took(self, outcome: Outcome) -> None:
        """Do nothing, because `decide` does everything that is needed."""

    def _least_ram(self, layout: Layout) -> int:
        """Return the smallest RAM budget in bytes with which ``layout`` works well."""
        checkpoint = self._manager.module.checkpoint
        assert checkpoint is not None
        units = layout.placement.streamed
        try:
            checkpoint.require_ram(0, [unit.unit for unit in units])
        except BudgetError as error:
            worth = least_cache(sum(unit.wire_bytes for unit in units))
            return max(error.least_bytes or 0, worth) + checkpoint.changed_bytes
        return 0

    def _in_memory(self, governor: HostGovernor, seen: Observation) -> Wanted | None:
        """Free host memory if it is short, for weights that do not come from files.

        If weights may move to disk, returns a request with a smaller RAM budget. If weights are kept both packed and unpacked, returns a request for a layout without the packed
        copies. Otherwise host copies of units on the device are unpinned at once, and None is returned.
        """
        arena, wanted = self._manager.host.arena, seen.wanted
        if self._manager.module.disk is not None:
            waiting = seen.layout.placement.tier.figures().waiting_bytes
            least = max(LEAST_BUFFERS * PAGE, least_cache(waiting))
            budget = governor.read(seen.host_memory.free, waiting, wanted.ram, least)
            if budget is None or budget >= waiting:
                return None
            logger.info("carom: ram='auto': host memory is short: weights move to disk")
            self._before = wanted.ram
            return dataclasses.replace(wanted, ram=budget)
        limit = governor.read(seen.host_memory.free, arena.pinned_bytes, wanted.ram, 0)
        if limit is None or limit >= wanted.ram:
            return None
        if wanted.packing is not None and wanted.packing.keep_raw:
            logger.info(
                "carom: ram='auto': host memory is short: weights wait as they are, not packed besides"
            )
            return dataclasses.replace(wanted, packing=None)
        before = arena.pinned_bytes
        self._manager.engine.synchronize()  # copies from these blocks may still be running
        self._manager.host.copies.unpin_resident_copies(before - limit)
        if arena.pinned_bytes != before:
            logger.info(
                "carom: ram='auto': %s pinned instead of %s",
                format_size(arena.pinned_bytes),
                format_size(before),
            )
        return None
