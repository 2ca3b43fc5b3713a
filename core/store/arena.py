"""Host memory for streamed units: one exact, page-aligned block a unit, filled in parallel, then pinned.

`torch.Tensor.pin_memory` rounds to powers of two and runs at about 3 GiB/s. Here a block is private
anonymous memory with huge pages where the system has them, its first touch is the copy itself, spread
over threads, and the finished block is registered with the driver (24 to 32 GiB/s measured on an H200
host). Where registering is refused the block stays pageable: slower, never wrong.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from .mapped import Mapped
from .memory import PAGE, fresh

logger = logging.getLogger("carom")

_CHUNK = 4 << 20  # bytes one thread copies at a time: a unit of tens of MiB keeps all of them busy


@dataclass(frozen=True)
class Pinner:
    """How host memory is registered with a driver. Both take an address; errors are returned as text."""

    register: Callable[[int, int], str | None]
    unregister: Callable[[int], None]


@dataclass(eq=False)
class Block:
    """``data``: uint8 host tensor of exactly the bytes asked for; ``pinned``: registered with the driver."""

    data: torch.Tensor
    pinned: bool
    registered_bytes: int
    _unpin: Callable[[], None] | None = None

    def unpin(self) -> None:
        """Give the pinned pages back; the bytes stay readable."""
        if self._unpin is not None:
            self._unpin()
            self._unpin = None
        self.pinned = False


class HostArena:
    """Allocates blocks, counts pinned bytes against ``limit`` (bytes, None: no limit)."""

    def __init__(self, pinner: Pinner | None, limit: int | None) -> None:
        self._pinner = pinner
        self._limit = limit
        self._lock = threading.Lock()
        self.pinned_bytes = 0
        self.pinned_peak_bytes = 0
        self.pageable_bytes = 0
        self.notes: list[str] = []
        # Asked to give up so many pinned bytes of others, where the limit is reached.
        self.spare: Callable[[int], None] = lambda nbytes: None

    @property
    def pins(self) -> bool:
        """Whether there is a driver to register memory with."""
        return self._pinner is not None

    def renew(self, limit: int | None) -> None:
        """Another layout begins, with what is pinned already."""
        with self._lock:
            self._limit, self.pageable_bytes, self.notes = limit, 0, []
            self.pinned_peak_bytes = self.pinned_bytes

    def allocate(self, nbytes: int) -> Block:
        """An unpinned block of ``nbytes`` (not yet touched). Raises MemoryError when the system refuses."""
        return Block(_as_tensor(fresh(nbytes)), False, 0)

    def bound(self, limit: int | None) -> None:
        """From now on pin at most ``limit`` bytes in all; what is pinned stays."""
        with self._lock:
            self._limit = limit

    def pin(self, block: Block) -> bool:
        """Register a filled block; on refusal it stays pageable and a note says so."""
        if self._pinner is None or block.pinned or block.data.numel() == 0:
            return block.pinned
        size = -(-block.data.numel() // PAGE) * PAGE
        if self._limit is not None and (over := self.pinned_bytes + size - self._limit) > 0:
            self.spare(over)
        with self._lock:
            if self._limit is not None and self.pinned_bytes + size > self._limit:
                return self._refused(block, f"the RAM budget of {self._limit} bytes is reached")
            self.pinned_bytes += size
        address = block.data.data_ptr()
        reason = self._pinner.register(address, size)
        if reason is not None:
            with self._lock:
                self.pinned_bytes -= size
                return self._refused(block, reason)
        with self._lock:
            self.pinned_peak_bytes = max(self.pinned_peak_bytes, self.pinned_bytes)
        block.pinned, block.registered_bytes = True, size
        # The memory must outlive its registration: the finalizer runs before the mapping is dropped.
        finalizer = weakref.finalize(block, _unpin, self, self._pinner, address, size)
        block._unpin = finalizer
        return True

    def _refused(self, block: Block, reason: str) -> bool:
        self.pageable_bytes += block.data.numel()
        note = f"pinning was refused ({reason}): copies from pageable memory are slower and block the host"
        if note not in self.notes:
            self.notes.append(note)
            logger.warning("carom: %s", note)
        return False


def _unpin(arena: HostArena, pinner: Pinner, address: int, size: int) -> None:
    pinner.unregister(address)
    with arena._lock:
        arena.pinned_bytes -= size


def _as_tensor(memory: memoryview) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8) if len(memory) else torch.empty(0, dtype=torch.uint8)


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a dense tensor in storage order: uint8, one dimension, no copy."""
    flat = torch.as_strided(tensor.detach(), (tensor.numel(),), (1,), tensor.storage_offset())
    return flat.view(torch.uint8)


def own_view(piece: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """``piece`` (uint8, host) as a tensor of the dtype, shape and strides of ``like``, in a storage of its own: saving it
    saves nothing that lies beside it."""
    own = torch.frombuffer(piece.numpy(), dtype=torch.uint8).view(like.dtype)
    return own.as_strided(like.shape, like.stride())


def host_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a dense tensor in host memory, whatever it wears: a copy only where it is elsewhere."""
    with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        value = tensor.detach()
        return storage_bytes(value if value.device.type == "cpu" else value.cpu())


def workers() -> int:
    """Threads that fill memory: the processors this process may use, at most 16."""
    try:
        return max(1, min(16, len(os.sched_getaffinity(0))))  # type: ignore[attr-defined,unused-ignore]
    except AttributeError:
        return max(1, min(16, os.cpu_count() or 1))


def fill(
    pieces: Iterable[tuple[torch.Tensor, torch.Tensor]],
    pool: ThreadPoolExecutor,
    mapped: Mapped | None = None,
) -> list[Future[Any]]:
    """Start copying (destination, source) pairs of CPU uint8 tensors of equal length, spread over ``pool``.

    ctypes.memmove releases the GIL, so first touch and copy run in parallel. ``mapped``: files whose pages are not to
    count as this process's memory once they were copied.
    """
    return [
        pool.submit(_copy, destination, source, start, mapped)
        for destination, source in pieces
        for start in range(0, destination.numel(), _CHUNK)
    ]


def touch(memory: torch.Tensor, pool: ThreadPoolExecutor) -> list[Future[Any]]:
    """Start giving fresh memory its pages, spread over ``pool``."""
    return [
        pool.submit(ctypes.memset, memory.data_ptr() + start, 0, min(_CHUNK, memory.numel() - start))
        for start in range(0, memory.numel(), _CHUNK)
    ]


def _copy(destination: torch.Tensor, source: torch.Tensor, start: int, mapped: Mapped | None) -> None:
    size = min(_CHUNK, destination.numel() - start)
    ctypes.memmove(destination.data_ptr() + start, source.data_ptr() + start, size)
    if mapped is not None:
        mapped.drop(source.data_ptr() + start, size)


def return_freed_memory() -> None:
    """Let the allocator give freed memory back to the system (glibc keeps what freed weights occupied)."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another C library, or Windows
        return
    trim(0)
