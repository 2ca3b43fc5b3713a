"""`system_pin_limit`: the operating system's limit on the memory that a process may pin for a device."""

from __future__ import annotations

from collections.abc import Callable

import psutil
import torch

from ..host.arena import no_limit
from ..host.pin_limit import PinLimit
from ..host.probe import on_windows
from . import wddm


def system_pin_limit(device: torch.device) -> Callable[[int], PinLimit | None]:
    """Return a function for `Pinner.limit`, for memory that is pinned for ``device``."""
    if not on_windows():
        return no_limit

    def limit(pinned: int) -> PinLimit:
        return wddm.pin_limit(None, pinned, psutil.virtual_memory().total)

    return limit
