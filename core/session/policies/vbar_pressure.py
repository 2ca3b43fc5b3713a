"""`VbarPressure`: the policy for a session whose VBAR loses units to other memory. It gets the units back
later.

A VBAR is a range of device addresses of comfy-aimdo. Only pages below an address, the watermark, may get
memory. A unit is a group of weights that are copied to the device together.
"""

from __future__ import annotations

import logging
import math

from ...budget.device_governor import Regrowth
from ..device_weights import DeviceWeights
from ..layout import Outcome, Wanted
from ..layout_manager import LayoutManager
from .policy import Observation, StepClock

logger = logging.getLogger("carom")
_SECONDS = 0.25  # seconds between two readings of the device's memory


class VbarPressure:
    """Reacts to memory pressure on a session's VBAR: comfy-aimdo takes pages from the VBAR when other memory
    is needed.

    The policy moves the VBAR's watermark and never requests a new layout.
    """

    def __init__(self, manager: LayoutManager, weights: DeviceWeights) -> None:
        self._manager, self._weights = manager, weights
        # For a fixed budget, decides when lost units get their memory back. None before the first loss.
        self._regrowth: Regrowth | None = None
        self._looked = -math.inf

    def next_step(self, settled: int) -> float:
        """Return 0 if units are in a VBAR, so that `due` is called at every step; otherwise infinity."""
        return math.inf if self._weights.vbar is None else 0

    def due(self, clock: StepClock) -> bool:
        """Return whether units are in a VBAR."""
        return self._weights.vbar is not None

    def decide(self, seen: Observation) -> Wanted | None:
        """Record the units that the VBAR lost, and raise the watermark once memory has been free for a while.

        Always returns None.
        """
        pooled, ledger = self._weights.vbar, self._manager.ledger
        if pooled is None:
            return None
        if pooled.losses():
            logger.info("carom: other memory was needed: %d units stream now", len(pooled.away))
            self._weights.follow_vbar(pooled)
            # lower the budget; the governor (vram="auto") raises it again later
            if ledger.governor is not None:
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
        """Return None, because this policy never requests a layout."""
        return None

    def took(self, outcome: Outcome) -> None:
        """Do nothing, because this policy never requests a layout."""
