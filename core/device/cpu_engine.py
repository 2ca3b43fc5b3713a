"""`PlainEngine`, the engine of the CPU and of accelerators without streams; host memory as tensors with
storages of their own.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable
from typing import Any

import torch

from ..common.memory_snapshot import Memory
from ..host.arena import Pinner
from ..plan.region import ALIGN
from .engine import Decoder, DefaultEngine


class PlainEngine(DefaultEngine):
    """The engine of the CPU and of accelerators without streams; copies are finished when calls return."""

    pinner: Pinner | None = None
    blocking = True
    grain = ALIGN

    def __init__(self, device: torch.device) -> None:
        self.device, self.name = device, str(device)
        self.shares_host = device.type == "mps"

    def allocate(self, nbytes: int) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def alias(self, buffer: torch.Tensor, offset: int, nbytes: int) -> torch.Tensor:
        return (
            host_alias(buffer, offset, nbytes)
            if self.device.type == "cpu"
            else buffer[offset : offset + nbytes]
        )

    def at(self, address: int, nbytes: int, owner: Any) -> torch.Tensor:
        return host_memory_at(address, nbytes, owner)

    def copy_in(
        self, target: torch.Tensor, source: torch.Tensor, after: Iterable[Any], timed: bool
    ) -> tuple[Any, Any]:
        """Copy ``source`` to ``target`` at once.

        Returns None for the event, and if ``timed`` the start and end times in seconds.
        """
        started = time.perf_counter()
        target.copy_(source)
        return None, (started, time.perf_counter()) if timed else None

    def decode(
        self, decoder: Decoder, wire: torch.Tensor, target: torch.Tensor, after: Iterable[Any], timed: bool
    ) -> tuple[Any, Any]:
        """Decode ``wire`` into ``target`` at once.

        Returns None for the event, and if ``timed`` the start and end times in seconds.
        """
        started = time.perf_counter()
        decoder(wire, target)
        return None, (started, time.perf_counter()) if timed else None

    def copy_out(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def stream(self) -> str:
        return self.name

    def record(self, stream: Any, event: Any = None) -> None:
        return None

    def mark(self) -> float:
        return time.perf_counter()

    def wait(self, event: Any) -> None:
        pass

    def done(self, mark: Any) -> bool:
        return True

    def landed(self, copied: Any) -> bool:
        return True

    def synchronize(self, event: Any = None) -> None:
        pass

    def elapsed(self, first: float, last: float) -> float:
        return last - first

    def free_bytes(self) -> int:
        """Return the host memory in bytes that the system says is available."""
        import psutil

        return psutil.virtual_memory().available

    def memory(self) -> Memory | None:
        return None

    def trim(self) -> None:
        pass


def host_alias(buffer: torch.Tensor, offset: int, nbytes: int) -> torch.Tensor:
    """Return ``nbytes`` of host memory from ``offset`` as a uint8 tensor with a storage of its own.

    The storage keeps ``buffer`` alive.
    """
    if nbytes == 0:
        return buffer[offset:offset]
    return host_memory_at(buffer.data_ptr() + offset, nbytes, buffer)


def host_memory_at(address: int, nbytes: int, owner: Any) -> torch.Tensor:
    """Return a uint8 tensor over ``nbytes`` of host memory at ``address`` that keeps ``owner`` alive."""
    memory = (ctypes.c_char * nbytes).from_address(address)
    # The tensor's storage holds the ctypes instance, which holds the owner.
    memory._owner = owner  # type: ignore[attr-defined]
    return torch.frombuffer(memory, dtype=torch.uint8)
