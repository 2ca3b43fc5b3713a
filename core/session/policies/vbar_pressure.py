"""`VbarPressure`: what a session does when other memory takes units out of its VBAR, and when these may come back."""

from __future__ import annotations

import logging
import math

from ...budget.device_governor import Regrowth
from ..device_weights import DeviceWeights
from ..layout import Outcome, Wanted
from ..layout_manager import LayoutManager
from .policy import Observation, StepClock

logger = logging.getLogger("carom")
_SECONDS = 0.25  # between readings of a device's memory


class VbarPressure:
    """Follows what comfy-aimdo's pressure took of a session's VBAR; moves the watermark, and never makes a new layout."""

    def __init__(self, manager: LayoutManager, weights: DeviceWeights) -> None:
        self._manager, self._weights = manager, weights
        self._regrowth: Regrowth | None = None  # of a budget that is fixed, after pressure took some of it
        self._looked = -math.inf

    def next_step(self, settled: int) -> float:
        """Return 0 where units have homes in a VBAR."""
        return math.inf if self._weights.vbar is None else 0

    def due(self, clock: StepClock) -> bool:
        """Return whether units have homes in a VBAR."""
        return self._weights.vbar is not None

    def decide(self, seen: Observation) -> Wanted | None:
        """Note what pressure took; let units return once there has been room for a while."""
        pooled, ledger = self._weights.vbar, self._manager.ledger
        if pooled is None:
            return None
        if pooled.losses():
            logger.info("carom: other memory was needed: %d units stream now", len(pooled.away))
            self._weights.follow_vbar(pooled)
            if ledger.governor is not None:  # the budget follows, and rises again by its own rule
                ledger.governor.gave()
                ledger.set(min(ledger.vram, seen.layout.placement.resident_bytes + pooled.now_bytes))
                return None
            self._regrowth = self._regrowth or Regrowth()
            self._regrowth.lost()
        clock = seen.clock
        due = clock.virtual or clock.now - self._looked >= _SECONDS
        if self._regrowth is None or not pooled.reduced or not due or not seen.unreferenced:
            return None
        self._looked = clock.now
        memory = self._manager.engine.memory()
        if memory is None:
            return None
        target = self._regrowth.read(memory, pooled.now_bytes, pooled.most_bytes)
        if target is not None:
            pooled.rise(target)
            self._weights.follow_vbar(pooled)
        return None

    def fallback(self, failed: Wanted, error: BaseException) -> Wanted | None:
        """Return None: no layout is ever wanted."""
        return None

    def took(self, outcome: Outcome) -> None:
        """Do nothing: no layout is ever wanted."""
