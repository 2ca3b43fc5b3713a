"""`adapter_of`: the DXGI adapter that is a device of torch, None except on Windows."""

from __future__ import annotations

import ctypes
import functools
import logging
from typing import Any

import torch

from ..host.probe import on_windows
from . import dxgi, wddm
from .wddm import Segment

logger = logging.getLogger("carom")


def local_memory(device: torch.device) -> Segment | None:
    """Return what this process may use and uses of the memory of ``device`` now, as DXGI says; None if it does not."""
    adapter = adapter_of(device)
    return None if adapter is None else adapter.local()


def shared_memory(device: torch.device) -> Segment | None:
    """Return what this process may use and uses of host memory for ``device`` now, as DXGI says; None if it does not."""
    adapter = adapter_of(device)
    return None if adapter is None else adapter.shared()


def integrated_memory(device: torch.device) -> Segment | None:
    """Return what this process may use and uses of the memory of ``device``, an integrated GPU, as DXGI says."""
    return wddm.together(local_memory(device), shared_memory(device))


def adapter_of(device: torch.device) -> dxgi.Adapter | None:
    """Return the adapter of a device of type "cuda" on Windows; None if there is none, and on other systems."""
    if not on_windows() or device.type != "cuda":
        return None
    return _find(device.index if device.index is not None else torch.cuda.current_device())


@functools.cache
def _find(index: int) -> dxgi.Adapter | None:
    try:
        name = torch.cuda.get_device_properties(index).name
        return dxgi.matching(dxgi.adapters(), name, None if torch.version.hip else _luid(index))
    except (AssertionError, RuntimeError, OSError) as error:
        logger.debug("carom: DXGI does not tell the memory of device %d: %s", index, error)
        return None


def _luid(index: int) -> bytes | None:
    """Return the LUID of an NVIDIA device, by which DXGI names it too; None if the driver does not tell."""
    try:
        driver: Any = ctypes.WinDLL("nvcuda")  # type: ignore[attr-defined,unused-ignore]
        device, luid, mask = ctypes.c_int(), (ctypes.c_ubyte * 8)(), ctypes.c_uint()
        if driver.cuDeviceGet(ctypes.byref(device), index):
            return None
        failed = driver.cuDeviceGetLuid(ctypes.byref(luid), ctypes.byref(mask), device)
    except (AttributeError, OSError):
        return None
    return None if failed else bytes(luid)
