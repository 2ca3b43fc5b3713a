"""Pinned host memory for weights: one page-aligned block of exact size for each unit, filled in parallel,
then pinned.

A unit is a module whose weights are copied to the device together. `torch.Tensor.pin_memory` rounds sizes up to
powers of two and runs at about 3 GiB/s. Here a block is private anonymous memory, on huge pages where the
system has them. The threads that copy the weights are the first to touch the pages, so page faults are handled
in parallel too. The finished block is then registered with the driver (24 to 32 GiB/s measured on an H200
host). A block whose registration is refused stays pageable, which is slower but correct.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from ..common.huge_pages import PAGE, allocate_pages
from .page_release import MappedFiles
from .pin_limit import ALL_PINNED, PinLimit

logger = logging.getLogger("carom")

# Bytes that a thread copies at a time: small enough that a unit of tens of MiB keeps all threads busy.
_CHUNK = 4 << 20
# Copies of at most so many bytes take less time than handing them to another thread.
_SMALL = 16 << 10
_REFUSED = "pinning was refused"


def no_limit(pinned: int) -> PinLimit | None:
    """Return None: the system sets no limit on pinned memory."""
    return None


@dataclass(frozen=True)
class Pinner:
    """The functions that pin (register) host memory with a device driver and unpin it.

    Both take an address; ``register`` also takes the bytes, and returns an error message or None.
    ``limit``: returns the system's limit on the pinned bytes of this process, None if there is none. Its argument is
    the number of bytes that the process has pinned.
    ``allocate``: returns new page-aligned memory of a kind that the driver pins; raises MemoryError.
    ``allocates_pinned``: whether that memory is pinned from its allocation to its end.
    """

    register: Callable[[int, int], str | None]
    unregister: Callable[[int], None]
    limit: Callable[[int], PinLimit | None] = no_limit
    allocate: Callable[[int], memoryview] = allocate_pages
    allocates_pinned: bool = False


@dataclass(eq=False)
class Block:
    """A block of host memory that may be pinned.

    ``data``: uint8 CPU tensor of exactly the requested bytes. ``pinned``: whether the block is registered
    with the driver. ``registered_bytes``: the pinned bytes, which are whole pages.
    ``from_driver``: whether the memory was allocated pinned, and stays so as long as it exists.
    """

    data: torch.Tensor
    pinned: bool
    registered_bytes: int
    from_driver: bool = False
    _finalizer: Callable[[], None] | None = None

    def unpin(self) -> None:
        """Unpin the memory; the bytes stay readable. Memory from the driver stays pinned, and is counted, until its last
        reference goes.
        """
        if self._finalizer is not None:
            self._finalizer()
            self._finalizer = None
        self.pinned = False


class HostArena:
    """An allocator of host memory blocks that pins at most ``limit`` bytes in total (None: no limit) and
    counts them. All arenas of the process together pin no more than the system allows (`Pinner.limit`).
    """

    def __init__(self, pinner: Pinner | None, limit: int | None) -> None:
        self._pinner = pinner
        self._limit = limit
        self._limit_name = "the RAM budget"
        self._lock = threading.Lock()
        self._counted_bytes = 0  # bytes of pinned blocks, those in `_unpinned` included
        # Bytes of blocks that were unpinned and are still counted. A finalizer adds to this. The garbage collector may
        # run a finalizer on a thread that holds the lock, so the finalizer must not take the lock.
        self._unpinned: deque[int] = deque()
        self.pinned_peak_bytes = 0
        self.pageable_bytes = 0
        self.made = 0  # number of blocks that were allocated
        self.notes: list[str] = []
        # Called with a number of bytes when pinning would exceed the limit. The function, which the owner of
        # the arena sets, should unpin that many bytes of other blocks.
        self.reclaim: Callable[[int], None] = lambda nbytes: None

    @property
    def can_pin(self) -> bool:
        """Whether there is a driver to pin memory with."""
        return self._pinner is not None

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the pinned blocks."""
        with self._lock:
            return self._count()

    def has_room(self, nbytes: int) -> bool:
        """Return whether a block of ``nbytes`` can be pinned within the limit, and no other block is unpinned for it."""
        return self.can_pin and self._excess(-(-nbytes // PAGE) * PAGE, self._system_limit()) <= 0

    def _system_limit(self) -> PinLimit | None:
        """Return the system's limit on the pinned bytes of all arenas, as it is now."""
        return None if self._pinner is None else self._pinner.limit(ALL_PINNED.nbytes)

    def _excess(self, size: int, system: PinLimit | None) -> int:
        """Return by how many bytes the limits are exceeded if ``size`` bytes more are pinned; not positive if they fit."""
        own = 0 if self._limit is None else self.pinned_bytes + size - self._limit
        return own if system is None else max(own, ALL_PINNED.nbytes + size - system.nbytes)

    def _take(self, size: int, system: PinLimit | None) -> str | None:
        """Count ``size`` more pinned bytes; return the limit that does not allow them, else None."""
        with self._lock:
            if self._limit is not None and self._count() + size > self._limit:
                return f"{self._limit_name} of {self._limit} bytes is reached"
            if not ALL_PINNED.take(size, system):
                assert system is not None
                return system.reason
            self._counted_bytes += size
        return None

    def _count(self) -> int:
        """Return the bytes of the pinned blocks. Called with the lock held."""
        while self._unpinned:
            self._counted_bytes -= self._unpinned.popleft()
        return self._counted_bytes

    def begin_layout(self, limit: int | None, name: str = "the RAM budget") -> None:
        """Set the pin limit in bytes, and what notes call it, before a model's weights are laid out anew.

        Clears the notes (reasons why blocks were not pinned) and the statistics. Pinned blocks stay pinned.
        """
        with self._lock:
            self._limit, self._limit_name = limit, name
            self.pageable_bytes, self.notes = 0, []
            self.pinned_peak_bytes = self._count()

    def allocate(self, nbytes: int) -> Block:
        """Return an unpinned block of ``nbytes`` whose pages are not touched yet. Raises MemoryError if the
        system refuses.
        """
        self.made += 1
        pinner = self._pinner
        if pinner is None:
            return Block(_as_tensor(allocate_pages(nbytes)), False, 0)
        if pinner.allocates_pinned:
            return self._allocate_pinned(pinner, nbytes) or Block(
                _as_tensor(allocate_pages(nbytes)), False, 0
            )
        return Block(_as_tensor(pinner.allocate(nbytes)), False, 0)

    def _allocate_pinned(self, pinner: Pinner, nbytes: int) -> Block | None:
        """Return a block of memory that the driver allocates pinned; None if a limit or the driver refuses it."""
        size = -(-nbytes // PAGE) * PAGE
        if nbytes == 0 or self._take(size, self._system_limit()) is not None:
            return None
        try:
            memory = pinner.allocate(nbytes)
            weakref.finalize(memory.obj, _subtract, self._unpinned, size)
        except BaseException as error:
            _subtract(self._unpinned, size)
            if isinstance(error, MemoryError):
                return None
            raise
        return Block(_as_tensor(memory), False, size, from_driver=True)

    def pin(self, block: Block, spare: bool = False) -> bool:
        """Pin a filled block; return whether the block is pinned. A refused block stays pageable, and a note
        tells why. Without a driver to pin with, the block stays pageable and no note is made.
        ``spare``: pin only what fits, without unpinning other blocks, and without a note: no weight is in the block.
        """
        if block.pinned or block.data.numel() == 0:
            return block.pinned
        if self._pinner is None:
            with self._lock:
                self.pageable_bytes += block.data.numel()
            return False
        size = -(-block.data.numel() // PAGE) * PAGE
        if block.from_driver:
            block.pinned = True
            with self._lock:
                self.pinned_peak_bytes = max(self.pinned_peak_bytes, self._count())
            return True
        system = self._system_limit()
        if not spare and (excess := self._excess(size, system)) > 0:
            self.reclaim(excess)
            system = self._system_limit()
        if (full := self._take(size, system)) is not None:
            with self._lock:
                return not spare and self._refused(block, full)
        address = block.data.data_ptr()
        # The driver must unregister the memory before the memory is unmapped; this finalizer runs first. It is made
        # before the memory is registered, so that an interrupt between the two leaves nothing registered.
        finalizer = weakref.finalize(block, _unregister, self._unpinned, self._pinner, address, size)
        try:
            reason = self._pinner.register(address, size)
            if reason is None:
                block.pinned, block.registered_bytes, block._finalizer = True, size, finalizer
        except BaseException:
            finalizer()
            raise
        with self._lock:
            if reason is not None:
                finalizer.detach()
                self._counted_bytes -= size
                ALL_PINNED.release(size)
                return not spare and self._refused(block, reason)
            self.pinned_peak_bytes = max(self.pinned_peak_bytes, self._count())
        return True

    def pin_anew(self, blocks: Iterable[Block]) -> None:
        """Pin those of ``blocks`` for which there was no room before, after others were unpinned. The blocks of the
        layout that are not among ``blocks`` no longer count as pageable.
        """
        with self._lock:
            self.pageable_bytes = 0
            self.notes = [note for note in self.notes if not note.startswith(_REFUSED)]
        for block in blocks:
            self.pin(block)

    def _refused(self, block: Block, reason: str) -> bool:
        """Record that pinning was refused for ``reason``; return False."""
        self.pageable_bytes += block.data.numel()
        note = f"{_REFUSED} ({reason}): copies from pageable memory are slower and block the host"
        if note not in self.notes:
            self.notes.append(note)
        return False

    def log_refusals(self) -> None:
        """Log the notes on blocks that could not be pinned. Called once a layout is complete."""
        for note in self.notes:
            if note.startswith(_REFUSED):
                logger.warning("carom: %s", note)


def _unregister(unpinned: deque[int], pinner: Pinner, address: int, size: int) -> None:
    """Unregister pinned memory, and let its bytes be subtracted. Takes no lock (see `HostArena._unpinned`)."""
    _subtract(unpinned, size)
    pinner.unregister(address)


def _subtract(unpinned: deque[int], size: int) -> None:
    """Let ``size`` pinned bytes be subtracted from the counts. Takes no lock."""
    unpinned.append(size)
    ALL_PINNED.release(size)


def _as_tensor(memory: memoryview) -> torch.Tensor:
    """Return ``memory`` as a uint8 tensor without a copy."""
    return torch.frombuffer(memory, dtype=torch.uint8) if len(memory) else torch.empty(0, dtype=torch.uint8)


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a dense tensor in storage order: 1-D uint8, without a copy."""
    flat = torch.as_strided(tensor.detach(), (tensor.numel(),), (1,), tensor.storage_offset())
    return flat.view(torch.uint8)


def typed_view(raw: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the bytes ``raw`` (uint8, host) as a tensor of the dtype, shape and strides of ``like``, with a
    storage of its own.

    `torch.save` of the result saves only these bytes, not the block of memory around them.
    """
    typed = torch.frombuffer(raw.numpy(), dtype=torch.uint8).view(like.dtype)
    return typed.as_strided(like.shape, like.stride())


def host_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a dense tensor in host memory; copies only if the tensor is on another device.

    Bypasses `__torch_function__` of tensor subclasses.
    """
    with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        value = tensor.detach()
        return storage_bytes(value if value.device.type == "cpu" else value.cpu())


def workers() -> int:
    """Return the number of threads that fill memory: the CPUs that this process may use, at most 16."""
    try:
        return max(1, min(16, len(os.sched_getaffinity(0))))  # type: ignore[attr-defined,unused-ignore]
    except AttributeError:
        return max(1, min(16, os.cpu_count() or 1))


def fill(
    pairs: Iterable[tuple[torch.Tensor, torch.Tensor]],
    pool: ThreadPoolExecutor,
    mapped: MappedFiles | None = None,
) -> list[Future[Any]]:
    """Start copying (destination, source) pairs of CPU uint8 tensors of equal length on ``pool``; return the
    futures. Pairs of a few bytes are copied before the function returns.

    ctypes.memmove releases the GIL, so page faults and copies run in parallel. ``mapped``: memory-mapped
    files whose pages are released after they were copied, so that they no longer count as this process's
    memory.
    """
    jobs = []
    for destination, source in pairs:
        if destination.numel() <= _SMALL:
            _copy(destination, source, 0, mapped)
            continue
        for start in range(0, destination.numel(), _CHUNK):
            jobs.append(pool.submit(_copy, destination, source, start, mapped))
    return jobs


def prefault(memory: torch.Tensor, pool: ThreadPoolExecutor) -> list[Future[Any]]:
    """Start faulting in the pages of new memory on ``pool`` by writing zeros; return the futures."""
    return [
        pool.submit(ctypes.memset, memory.data_ptr() + start, 0, min(_CHUNK, memory.numel() - start))
        for start in range(0, memory.numel(), _CHUNK)
    ]


def _copy(destination: torch.Tensor, source: torch.Tensor, start: int, mapped: MappedFiles | None) -> None:
    """Copy a chunk from byte ``start`` on, and release the source's pages if they belong to a mapped file."""
    size = min(_CHUNK, destination.numel() - start)
    ctypes.memmove(destination.data_ptr() + start, source.data_ptr() + start, size)
    if mapped is not None:
        mapped.release(source.data_ptr() + start, size)


def return_freed_memory() -> None:
    """Make the C allocator return freed memory to the operating system (glibc keeps memory that freed weights
    occupied).
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # a C library without malloc_trim, such as on Windows
        return
    trim(0)
