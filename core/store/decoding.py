"""Reads of packed tensors: the blob is read whole, checked once, and the range that was asked for is decoded on the host.

What a `DiskReader` does with a `PackedSource`. Packed bytes cross the drive, decoded ones fill the host's buffers.
Ranges of one tensor that are wanted soon after one another share one read: a blob is kept until others have come.
Few blobs are held at a time, however many reads are asked for ahead.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..codec.host import HostBlob
from ..errors import CaromError, WeightsError
from .handle import SubmittedRead
from .header import show
from .packed_source import PackedSource
from .rawio import aligned_buffer

if TYPE_CHECKING:
    from .reader import DiskReader

AT_ONCE = 2  # blobs being read or decoded
KEPT = 2  # blobs that wait for another range of theirs


class DecodedRead(SubmittedRead):
    """A read of decoded bytes."""

    def __init__(
        self, source: PackedSource, offset: int, target: memoryview, what: str, priority: float
    ) -> None:
        super().__init__(source, offset, len(target), what, priority)
        self._target: np.ndarray | None = np.frombuffer(target, np.uint8) if len(target) else None
        self._taken = False

    def _drop(self) -> bool:
        return not self._taken

    def _release(self) -> None:
        self._target = None

    def _take(self) -> np.ndarray | None:
        """Its target, to be written now and then `_finish`ed; None where it was given up."""
        with self._lock:
            if self._cancelled or self._event.is_set():
                return None
            self._taken = True
            return self._target


@dataclass(eq=False)
class _Job:
    source: PackedSource
    reads: list[DecodedRead] = field(default_factory=list)
    blob: HostBlob | None = None
    busy: bool = False

    @property
    def urgency(self) -> float:
        return min((read.priority for read in self.reads if not read.cancelled()), default=float("inf"))


class Decoding:
    """The packed reads of one `DiskReader`."""

    def __init__(self, reader: DiskReader) -> None:
        self._reader = reader
        self._lock = threading.Lock()
        self._jobs: OrderedDict[PackedSource, _Job] = OrderedDict()
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="carom-decode")
        self._busy = 0
        self._closed = False

    def submit(
        self, source: PackedSource, offset: int, target: memoryview, what: str, priority: float
    ) -> DecodedRead:
        """Decoded bytes ``offset`` to ``offset + len(target)`` of ``source`` into ``target``."""
        read = DecodedRead(source, offset, target, what or f"tensor {show(source.stored.name)}", priority)
        if not len(target):
            read._finish()
            return read
        with self._lock:
            if self._closed:
                raise RuntimeError("the reader is closed")
            job = self._jobs.setdefault(source, _Job(source))
            job.reads.append(read)
            self._start()
        return read

    def close(self) -> None:
        """Give up what waits, let what runs end."""
        with self._lock:
            self._closed = True
            reads = [read for job in self._jobs.values() for read in job.reads]
        for read in reads:
            read.cancel()
        self._pool.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            self._jobs.clear()

    # -- under the lock

    def _start(self) -> None:
        while self._busy < AT_ONCE and not self._closed:
            waiting = [job for job in self._jobs.values() if job.reads and not job.busy]
            if not waiting:
                return
            job = min(waiting, key=lambda job: job.urgency)
            job.busy = True
            self._busy += 1
            self._pool.submit(self._run, job)

    def _forget(self) -> None:
        """Keep few blobs; what nobody asks for goes, oldest first."""
        idle = [job for job in self._jobs.values() if not job.reads and not job.busy]
        for job in idle[: max(0, len(idle) - KEPT)]:
            del self._jobs[job.source]

    # -- on the pool's threads

    def _run(self, job: _Job) -> None:
        error: BaseException | None = None
        with self._lock:
            reads, job.reads = job.reads, []
        try:
            if job.blob is None and any(not read.cancelled() for read in reads):
                job.blob = self._load(job.source, min(read.priority for read in reads))
        except BaseException as caught:  # noqa: BLE001 - whoever waits is told
            error = caught
        for read in reads:
            target = read._take()
            failure = error
            if target is not None and job.blob is not None and error is None:
                try:
                    job.blob.read(read.offset, target)
                except BaseException as caught:  # noqa: BLE001
                    failure = caught
            del target  # held by nobody when the buffer's owner hears of it
            read._finish(failure)
        with self._lock:
            self._busy -= 1
            job.busy = False
            if job.blob is None and not job.reads:
                self._jobs.pop(job.source, None)
            elif job.source in self._jobs:
                self._jobs.move_to_end(job.source)
            self._forget()
            self._start()

    def _load(self, source: PackedSource, priority: float) -> HostBlob:
        entry = source.stored
        try:
            buffer = aligned_buffer(max(entry.nbytes, 1))
        except MemoryError as error:
            raise WeightsError(
                f"{source.path}: no memory for the {entry.nbytes} packed bytes of {show(entry.name)}; free some, or "
                "unpack the file once with carom pack --codec raw"
            ) from error
        self._reader.submit(entry, buffer, priority=priority).result()
        blob = torch.from_numpy(np.frombuffer(buffer, np.uint8)[: entry.nbytes])
        try:
            return HostBlob(source.meta, blob, entry.name)
        except CaromError as error:
            raise type(error)(f"{source.path}: {error}") from error
