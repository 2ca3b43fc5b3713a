"""The ways to get pinned host memory on Windows, in the order in which they are tried.

Which memory a driver registers there depends on its version. Each way is tried once in a process, with a small block,
when it is first needed, and the first one that works is used. If none works, host memory stays pageable.
"""

from __future__ import annotations

import ctypes
import logging
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..common.huge_pages import PAGE, allocate_pages
from ..common.sizes import MIB
from ..host.arena import Pinner

logger = logging.getLogger("carom")
TRIAL_BYTES = 16 * MIB


@dataclass(frozen=True)
class PinWay:
    """A way to get pinned memory; ``name`` describes it."""

    name: str
    pinner: Pinner


@dataclass(frozen=True)
class PinTrial:
    """The result of a trial. ``refusal``: why the way does not work, None if it does. ``rate``: bytes that are pinned in
    a second.
    """

    name: str
    refusal: str | None
    rate: float


class PinWays:
    """The ways in their order, and the results of those that were tried."""

    def __init__(self, ways: Sequence[PinWay]) -> None:
        self._ways = ways
        self._trials: dict[str, PinTrial] = {}

    def trials(self) -> list[PinTrial]:
        """Return the results for all ways. Those that were not tried yet are tried now."""
        return [self._trial(way) for way in self._ways]

    def pinner(self) -> Pinner:
        """Return the pinner of the first way that works. If none does, return one that refuses, with the reasons."""
        for way in self._ways:
            if self._trial(way).refusal is None:
                return way.pinner
        reasons = "; ".join(f"{trial.name}: {trial.refusal}" for trial in self.trials())
        logger.warning("carom: no host memory can be pinned (%s)", reasons)
        return Pinner(lambda address, size: reasons, lambda address: None)

    def _trial(self, way: PinWay) -> PinTrial:
        if way.name not in self._trials:
            self._trials[way.name] = _try(way)
        return self._trials[way.name]


def ways(registering: Pinner, driver: Pinner | None) -> list[PinWay]:
    """Return the ways. ``registering``: pins memory in use; ``driver``: allocates pinned memory, None if it cannot."""
    found = [
        PinWay("registration of heap memory", replace(registering, allocate=allocate_heap)),
        PinWay("registration of a section", replace(registering, allocate=allocate_pages)),
    ]
    if driver is not None:
        found.append(PinWay("allocation by the driver", driver))
    return found


def allocate_heap(nbytes: int) -> memoryview:
    """Return ``nbytes`` zeroed bytes of private memory that begin at a page boundary. Raises MemoryError."""
    size = -(-nbytes // PAGE) * PAGE
    memory = np.zeros(size + PAGE, np.uint8)
    start = -memory.ctypes.data % PAGE
    return memory.data[start : start + nbytes]


def driver_pinner(library: Any, prefix: str, forget_error: Callable[[], None]) -> Pinner | None:
    """Return a `Pinner` whose memory the runtime ``library`` allocates pinned (cudaHostAlloc, hipHostMalloc); None if
    the library lacks these functions. ``forget_error``: clears the error that a failed call leaves.
    """
    try:
        allocate = getattr(library, "hipHostMalloc" if prefix == "hip" else "cudaHostAlloc")
        free = getattr(library, "hipHostFree" if prefix == "hip" else "cudaFreeHost")
    except AttributeError:
        return None
    allocate.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
    free.argtypes = [ctypes.c_void_p]
    allocate.restype = free.restype = ctypes.c_int

    def release(address: int) -> None:
        if free(address):
            forget_error()

    def new(nbytes: int) -> memoryview:
        address = ctypes.c_void_p()
        code = allocate(ctypes.addressof(address), nbytes, 0)
        if code or not address.value:
            forget_error()
            raise MemoryError(f"the driver refused {nbytes} bytes of pinned memory: error {code}")
        memory = (ctypes.c_ubyte * nbytes).from_address(address.value)
        # The end of the process frees it. Until then, functions that run at exit may still use the memory.
        weakref.finalize(memory, release, address.value).atexit = False
        ctypes.memset(address.value, 0, nbytes)
        return memoryview(memory).cast("B")

    refusal = "the driver allocates no more pinned memory"
    return Pinner(lambda address, size: refusal, lambda address: None, allocate=new, allocates_pinned=True)


def _try(way: PinWay) -> PinTrial:
    """Pin a small block by ``way`` and unpin it."""
    pinner, refusal = way.pinner, None
    try:
        if pinner.allocates_pinned:
            began = time.perf_counter()
            pinner.allocate(TRIAL_BYTES)
        else:
            memory = np.frombuffer(pinner.allocate(TRIAL_BYTES), np.uint8)
            memory.fill(0)  # the pages must exist: weights are copied before they are pinned
            began = time.perf_counter()
            refusal = pinner.register(memory.ctypes.data, TRIAL_BYTES)
            if refusal is None:
                pinner.unregister(memory.ctypes.data)
    except (MemoryError, OSError) as error:
        return PinTrial(way.name, str(error) or type(error).__name__, 0.0)
    seconds = time.perf_counter() - began
    return PinTrial(way.name, refusal, 0.0 if refusal else TRIAL_BYTES / max(seconds, 1e-9))
