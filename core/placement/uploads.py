"""Defines `Uploads`: copies of large tensors from host memory to the device, by several threads through pinned buffers.

Weights of a memory-mapped file are pageable: a copy by the driver reads them with one thread, which takes the page
faults of the mapping, and other calls of the driver wait meanwhile. Here several threads copy the bytes to pinned
buffers, and the device copies from there at the link's full rate.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch

from ..device.engine import Engine
from ..host.arena import Block, HostArena, storage_bytes, workers
from .residents import is_plain

CHUNK = 8 << 20  # bytes that a thread copies at a time, and the bytes of a buffer
THREADS = 8


class Uploads:
    """Copies to the device of ``engine``. The threads and buffers exist within the context of `running`.

    Outside of it, where memory cannot be pinned, and for small tensors, the driver copies.
    """

    def __init__(self, engine: Engine, arena: HostArena) -> None:
        self._engine, self._arena = engine, arena
        # The free buffers, each with the event of the last copy from it.
        self._free: queue.SimpleQueue[tuple[Block, Any]] = queue.SimpleQueue()
        self._pool: ThreadPoolExecutor | None = None

    @contextlib.contextmanager
    def running(self, room: int) -> Iterator[None]:
        """Context in which the threads and the buffers exist, unless ``room``, the bytes that are about to be pinned for
        other uses, and the buffers exceed the limit of pinned memory.
        """
        threads = min(THREADS, workers())
        blocks = []
        if self._engine.device.type != "cpu" and self._arena.has_room(room + threads * CHUNK):
            blocks = [self._arena.allocate(CHUNK) for _ in range(threads)]
        try:
            if blocks and all(self._arena.pin(block, spare=True) for block in blocks):
                self._free = queue.SimpleQueue()
                for block in blocks:
                    self._free.put((block, None))
                with ThreadPoolExecutor(threads, thread_name_prefix="carom-upload") as self._pool:
                    yield
            else:
                yield
        finally:
            self._pool = None
            if blocks:  # an interrupt may leave copies from them in flight
                with contextlib.suppress(Exception):
                    self._engine.synchronize()
            for block in blocks:
                block.unpin()

    def to_device(self, value: torch.Tensor) -> torch.Tensor:
        """Return ``value`` on the device: a copy with the same strides, or ``value`` itself if it is there already."""
        device = self._engine.device
        if value.device.type != "cpu" or not self._divides(value):
            return value.to(device)
        found = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        self._copy(storage_bytes(found), storage_bytes(value))
        return found

    def copy(self, target: torch.Tensor, value: torch.Tensor) -> None:
        """Copy ``value`` to ``target`` on the device, which has the same dtype, shape and strides. Returns when the copy
        has ended.
        """
        if value.device.type == "cpu" and self._divides(value) and target.stride() == value.stride():
            self._copy(storage_bytes(target), storage_bytes(value))
        else:
            target.copy_(value)

    def _divides(self, value: torch.Tensor) -> bool:
        """Return whether several threads copy ``value``."""
        return self._pool is not None and value.nbytes > CHUNK and is_plain(value)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy the bytes ``source`` to ``target`` by the threads, and wait for the last copy."""
        assert self._pool is not None
        engine = self._engine
        # Kernels that read the memory of ``target`` before it was freed.
        before = engine.record(engine.stream())
        jobs: list[Future] = []
        try:
            for start in range(0, source.numel(), CHUNK):
                jobs.append(self._pool.submit(self._copy_chunk, target, source, start, before))
            for job in jobs:
                engine.synchronize(job.result())
        except BaseException:  # nothing may write to ``target`` any more, whose memory is now freed
            for job in jobs:
                job.cancel()
            wait(jobs)
            with contextlib.suppress(Exception):
                engine.synchronize()
            raise

    def _copy_chunk(self, target: torch.Tensor, source: torch.Tensor, start: int, before: Any) -> Any:
        """Copy a chunk from byte ``start`` on, after the event ``before``; return the event of the copy's end."""
        engine, size = self._engine, min(CHUNK, source.numel() - start)
        block, copied = self._free.get()
        try:
            if copied is not None:
                engine.synchronize(copied)
            ctypes.memmove(block.data.data_ptr(), source.data_ptr() + start, size)
            copied, _ = engine.copy_in(target[start : start + size], block.data[:size], (before,), False)
        finally:
            self._free.put((block, copied))
        return copied
