"""Reads of packed tensors: the whole blob (the packed bytes of a tensor) is read and verified once, and the
requested byte range is decoded on the CPU.

A `DiskReader` uses a `DecodingReader` for every read from a `PackedSource`, which stands for the decoded bytes
of a packed tensor. Packed bytes are read from the drive; decoded bytes fill the caller's buffers. Requests for
several ranges of one tensor that come soon after one another share one read, because a blob is kept until other
blobs have been read. Only a few blobs are in memory at a time, however many reads are requested ahead.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..codec.host_decode import HostBlob
from ..common.commit_memory import with_advice
from ..common.errors import CaromError, WeightsError
from .direct_io import aligned_buffer
from .file_read import FileRead, ReadTarget
from .header import show
from .packed_source import PackedSource
from .read_handle import SubmittedRead

if TYPE_CHECKING:
    from .disk_reader import DiskReader

MAX_RUNNING = 2  # blobs that are read or decoded at the same time
MAX_IDLE_BLOBS = 2  # blobs without requests that are kept in memory for further ranges


@dataclass(eq=False)
class _BlobJob:
    """A blob that is to be read, with the reads that wait for its decoded bytes."""

    source: PackedSource
    reads: list[SubmittedRead] = field(default_factory=list)
    blob: HostBlob | None = None
    run: Future[None] | None = None  # while a thread of the pool runs the job, or will

    @property
    def urgency(self) -> float:
        """The lowest (most urgent) priority among the reads that were not cancelled."""
        return min((read.priority for read in self.reads if not read.cancelled()), default=float("inf"))


class DecodingReader:
    """The part of a `DiskReader` that reads packed tensors and decodes them on a thread pool."""

    def __init__(self, reader: DiskReader) -> None:
        self._reader = reader
        self._lock = threading.Lock()
        self._jobs: OrderedDict[PackedSource, _BlobJob] = OrderedDict()
        self._pool = ThreadPoolExecutor(MAX_RUNNING, thread_name_prefix="carom-decode")
        self._closed = False

    def submit(
        self, source: PackedSource, wanted: FileRead, target: ReadTarget, priority: float,
        when_done: Callable[[SubmittedRead], Any] | None = None,
    ) -> SubmittedRead:  # fmt: skip
        """Submit the read ``wanted``, a range of the decoded bytes of ``source``, into ``target``."""
        chunk = wanted, wanted.offset, wanted.nbytes
        read = SubmittedRead((wanted,), (chunk,), target, priority, when_done)
        with self._lock:
            if self._closed:
                raise RuntimeError("the reader is closed")
            job = self._jobs.setdefault(source, _BlobJob(source))
            job.reads.append(read)
            self._submit_jobs()
        return read

    def close(self) -> None:
        """Cancel the waiting reads and wait for the running ones."""
        with self._lock:
            self._closed = True
            reads = [read for job in self._jobs.values() for read in job.reads]
        for read in reads:
            read.cancel()
        self._pool.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            self._jobs.clear()

    # -- called with the lock held

    def _submit_jobs(self) -> None:
        """Submit the most urgent blobs to the pool, up to `MAX_RUNNING` at a time."""
        while not self._closed and sum(job.run is not None for job in self._jobs.values()) < MAX_RUNNING:
            waiting = [job for job in self._jobs.values() if job.reads and job.run is None]
            if not waiting:
                return
            job = min(waiting, key=lambda job: job.urgency)
            # The only record of the run, so that an interrupt cannot leave a job that is marked and not run.
            job.run = self._pool.submit(self._run, job)

    def _drop_idle_blobs(self) -> None:
        """Drop blobs that no read waits for, oldest first, down to `MAX_IDLE_BLOBS`."""
        idle = [job for job in self._jobs.values() if not job.reads and job.run is None]
        for job in idle[: max(0, len(idle) - MAX_IDLE_BLOBS)]:
            del self._jobs[job.source]

    # -- on the pool's threads

    def _run(self, job: _BlobJob) -> None:
        """Read the job's blob if need be, decode the ranges of the job's reads, and finish the reads."""
        error: BaseException | None = None
        with self._lock:
            reads, job.reads = job.reads, []
        try:
            if job.blob is None and any(not read.cancelled() for read in reads):
                job.blob = self._load(job.source, min(read.priority for read in reads))
        except BaseException as caught:  # noqa: BLE001 - the reads' callers receive the error
            error = caught
        for read in reads:
            claimed = read.claim_chunk(0)
            if claimed is None:  # it was cancelled
                continue
            failure = error
            if job.blob is not None and error is None:
                (wanted, offset, nbytes), target = claimed
                try:
                    job.blob.read(
                        offset, np.frombuffer(target.view, np.uint8)[wanted.at : wanted.at + nbytes]
                    )
                except BaseException as caught:  # noqa: BLE001
                    failure = caught
                del target  # no reference to the target may be left when the buffer's owner is notified
            del claimed
            read.end_chunk(failure)
        with self._lock:
            job.run = None
            if job.blob is None and not job.reads:
                self._jobs.pop(job.source, None)
            elif job.source in self._jobs:
                self._jobs.move_to_end(job.source)
            self._drop_idle_blobs()
            self._submit_jobs()

    def _load(self, source: PackedSource, priority: float) -> HostBlob:
        """Read and verify the blob of ``source``; raise WeightsError if it is damaged or memory is short."""
        entry = source.stored
        try:
            buffer = aligned_buffer(max(entry.nbytes, 1))
        except MemoryError as error:
            message = (
                f"{source.path}: no memory for the {entry.nbytes} packed bytes of {show(entry.name)}; free some, or "
                "unpack the file once with carom pack --codec raw"
            )
            raise WeightsError(with_advice(message, error)) from error
        self._reader.submit(entry, buffer, priority=priority).result()
        blob = torch.from_numpy(np.frombuffer(buffer, np.uint8)[: entry.nbytes])
        try:
            return HostBlob(source.meta, blob, entry.name)
        except CaromError as error:
            raise type(error)(f"{source.path}: {error}") from error
