"""`system_pinner`: what the operating system adds to the pinning of host memory: a limit, and on Windows the kind of
memory that the driver pins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import psutil
import torch

from ..host.arena import Pinner
from ..host.pin_limit import ALL_PINNED, PinLimit
from ..host.probe import host_memory, is_wsl, on_windows
from . import wddm
from .pin_ways import PinTrial, PinWays, driver_pinner, ways
from .runtime_library import runtime_library
from .video_memory import shared_memory
from .wsl_pins import find_pin_limit


def system_pinner(registering: Pinner, device: torch.device, forget_error: Callable[[], None]) -> Pinner:
    """Return the pinner for ``device``. ``registering``: registers memory with the runtime; ``forget_error``: clears the
    error that a failed call of the runtime leaves.
    """
    if on_windows():
        pinner = pin_ways(registering, device, forget_error).pinner()
        return replace(pinner, limit=lambda pinned: windows_limit(device, pinned))
    if is_wsl():
        if device not in _wsl_limits:
            _wsl_limits[device] = find_pin_limit(registering, host_memory().usable)
        found = _wsl_limits[device]
        return replace(registering, limit=lambda pinned: found)
    return registering


def windows_limit(device: torch.device, pinned: int) -> PinLimit:
    """Return Windows' limit of pinned memory for ``device`` now. ``pinned``: the bytes that are pinned."""
    return wddm.pin_limit(shared_memory(device), pinned, psutil.virtual_memory().total)


# What was found in this process.
_ways: dict[torch.device, PinWays] = {}
_wsl_limits: dict[torch.device, PinLimit | None] = {}


def pins_left(device: torch.device) -> int | None:
    """Return how many bytes more this process may pin for ``device``; None if no limit is known."""
    pinned = ALL_PINNED.nbytes
    limit = windows_limit(device, pinned) if on_windows() else _wsl_limits.get(device)
    return None if limit is None else max(0, limit.nbytes - pinned)


def tried_ways(device: torch.device) -> tuple[PinTrial, ...]:
    """Return the results of all ways to get pinned memory for ``device``; empty where there is only one way, as on
    systems other than Windows, or no pinner was made for the device.
    """
    return tuple(_ways[device].trials()) if device in _ways else ()


def pin_ways(registering: Pinner, device: torch.device, forget_error: Callable[[], None]) -> PinWays:
    """Return the ways to get pinned memory for ``device`` on Windows, and what their trials in this process showed."""
    if device not in _ways:
        try:
            found = runtime_library()
        except OSError:
            found = None
        driver = None if found is None else driver_pinner(*found, forget_error)
        _ways[device] = PinWays(ways(registering, driver))
    return _ways[device]
