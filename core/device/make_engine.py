"""`make_engine`: the choice of an engine for a device that a user names."""

from __future__ import annotations

from typing import Any

import torch

from ..common.errors import UnsupportedError
from ..host.probe import on_windows
from .cpu_engine import PlainEngine
from .cuda_runtime import runtime_engine
from .engine import Engine
from .simulated import SimulatedDevice, SimulatedEngine
from .stream_engine import FlushingStreamEngine, StreamEngine


def make_engine(device: Any) -> Engine:
    """Return the engine for a device, a device name, a `SimulatedDevice`, or None (the current accelerator,
    else the CPU).

    Raises UnsupportedError for a device that does not exist here, and for the meta device.
    """
    if isinstance(device, SimulatedDevice):
        return SimulatedEngine(device)
    if device is None:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        device = accelerator or "cpu"
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UnsupportedError(f"device={device!r} is not a device torch knows: {error}") from error
    if wanted.type == "cpu":
        return PlainEngine(torch.device("cpu"))
    if wanted.type == "meta":
        raise UnsupportedError("device='meta' cannot compute; name an accelerator or 'cpu'")
    try:
        torch.empty(1, device=wanted)
    except Exception as error:
        count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
        raise UnsupportedError(
            f"device={str(wanted)!r} is not there ({count} accelerators found): {type(error).__name__}: {error}"
        ) from error
    api = torch.get_device_module(wanted)
    if hasattr(api, "Stream") and hasattr(api, "Event") and wanted.type != "mps":
        return runtime_engine(wanted) or (FlushingStreamEngine if on_windows() else StreamEngine)(wanted)
    return PlainEngine(wanted)
