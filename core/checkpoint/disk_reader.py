"""A prioritised, cancellable reader of file ranges into the caller's memory, with a pool of worker threads.

A request is cut into chunks of at most ``chunk`` bytes. All workers read the most urgent request before any
starts on the next one, and a cancelled request stops at the next chunk. Chunks are read directly into the
caller's memory if its address and the file offset agree modulo 4096 (as in files that `carom pack` writes,
read into page-aligned buffers). Other chunks, and all chunks where a `ReadPathTuner` finds that faster, pass
through an aligned bounce buffer; the statistics count those bytes.
"""

from __future__ import annotations

import ctypes
import heapq
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ..common import interruptible
from ..common.background import BackgroundThread
from ..common.errors import WeightsError
from .direct_io import ALIGN, RawFile, open_raw
from .file_read import FileRead, ReadTarget
from .header import show
from .index import SourceFile, TensorEntry
from .packed_source import PackedSource
from .read_concurrency import ReadLimit, ReadPermit
from .read_handle import Chunk, SubmittedRead
from .read_path import ReadPathTuner

if TYPE_CHECKING:
    from .decode_on_read import DecodingReader
    from .range_checks import RangeChecks  # it imports torch, which `carom pack` does without


@dataclass(frozen=True)
class ReaderPolicy:
    """The parameters of a `DiskReader`.

    ``workers``: threads. ``chunk``: bytes of one read call. ``retries``: attempts after a failure or after a
    read that returned no bytes, with waits of ``backoff`` seconds, doubled each time. ``direct``: bypass the
    page cache.
    """

    workers: int = 4
    chunk: int = 4 << 20
    retries: int = 4
    backoff: float = 0.02
    direct: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= 256 or self.chunk < ALIGN or self.chunk % ALIGN or self.retries < 0:
            raise ValueError(
                f"ReaderPolicy: workers={self.workers} (1 to 256), chunk={self.chunk} (a multiple of {ALIGN}), "
                f"retries={self.retries} (0 or more)"
            )


class RangesInMemory(Protocol):
    """File ranges whose bytes are in RAM already (`core/host/kept_pieces.py`)."""

    def copy_range(self, file: SourceFile, offset: int, nbytes: int, address: int) -> list[tuple[int, int]]:
        """Copy what is in RAM of a file range to ``address``; return the other ranges, as (start, end)."""
        ...


@dataclass
class ReaderStats:
    """Totals since the reader was made.

    ``bytes``: bytes read for callers. ``direct``: those of them that bypassed the page cache. ``bounced``:
    those that passed through a bounce buffer. ``from_memory``: those that were copied from RAM instead of
    being read from the drive. ``requests``: the number of requests. ``retries``: the number of repeated reads.
    ``busy_seconds``: the sum over all workers of the time spent reading.
    """

    bytes: int = 0
    direct: int = 0
    from_memory: int = 0
    bounced: int = 0
    requests: int = 0
    retries: int = 0
    busy_seconds: float = 0.0


@dataclass
class _Shared:
    """The state that worker threads use.

    Workers hold no reference to the reader itself, so that an abandoned reader is garbage-collected, which
    stops them.
    """

    policy: ReaderPolicy
    opener: Callable[[str, bool], RawFile]
    path_tuner: ReadPathTuner | None
    read_limit: ReadLimit
    memory: RangesInMemory | None = None
    checks: RangeChecks | None = None
    lock: threading.Condition = field(default_factory=threading.Condition)
    heap: list[tuple[float, int, int, SubmittedRead]] = field(default_factory=list)
    files: dict[SourceFile, RawFile] = field(default_factory=dict)
    opening: threading.Lock = field(default_factory=threading.Lock)
    stats: ReaderStats = field(default_factory=ReaderStats)
    stopping: bool = False

    def stop(self) -> None:
        """Make the workers end and cancel all waiting requests."""
        with self.lock:
            self.stopping = True
            waiting, self.heap = self.heap, []
            self.lock.notify_all()
        for *_, handle in waiting:
            handle.cancel()


class DiskReader:
    """A reader of byte ranges of indexed files into given memory.

    ``opener`` (path, direct) -> RawFile replaces the operating system's reads in tests. ``path_tuner``: a
    tuner that chooses how direct reads reach their memory (default: without a bounce buffer where alignment
    allows). ``read_limit``: a limit on simultaneous reads that is shared with other readers (default: the
    number of workers). ``memory``: file ranges that are copied from RAM instead of being read. ``checks``: the
    CRC-32 of file ranges, with which their bytes are compared when the drive has delivered them. Workers start with
    the first request. Close the reader, or use it as a context manager.
    """

    def __init__(
        self,
        policy: ReaderPolicy | None = None,
        *,
        opener: Callable[[str, bool], RawFile] = open_raw,
        path_tuner: ReadPathTuner | None = None,
        read_limit: ReadLimit | None = None,
        memory: RangesInMemory | None = None,
        checks: RangeChecks | None = None,
    ) -> None:
        self.policy = policy or ReaderPolicy()
        limit = read_limit or ReadLimit(self.policy.workers)
        self._shared = _Shared(self.policy, opener, path_tuner, limit, memory, checks)
        self._threads: list[threading.Thread] = []
        self._sequence = itertools.count()
        self._decoding_reader: DecodingReader | None = None
        self._stop = weakref.finalize(self, self._shared.stop)
        self._stop.atexit = False  # see `BackgroundThread`

    def submit(
        self, entry: TensorEntry, into: Any, *, start: int = 0, nbytes: int | None = None, priority: float = 0
    ) -> SubmittedRead:
        """Submit a read of ``nbytes`` bytes (default: all) of ``entry``, from its byte ``start``, to the
        beginning of ``into``.

        ``into``: writable contiguous CPU memory (memoryview, numpy array, torch tensor, bytearray). Requests
        with a lower ``priority`` are read first, equal ones in the order of submission. Raises ValueError for
        a range outside the tensor or a buffer that is too small.
        """
        nbytes = entry.nbytes - start if nbytes is None else nbytes
        if start < 0 or nbytes < 0 or start + nbytes > entry.nbytes:
            raise ValueError(
                f"bytes {start} to {start + nbytes} of {show(entry.name)}, which has {entry.nbytes}"
            )
        label = f"tensor {show(entry.name)}"
        return self.submit_range(
            entry.file, entry.offset + start, nbytes, into, label=label, priority=priority
        )

    def submit_range(
        self, file: SourceFile, offset: int, nbytes: int, into: Any, *, label: str = "", priority: float = 0
    ) -> SubmittedRead:
        """Submit a read of ``nbytes`` bytes at ``offset`` of ``file``, as `submit` does; ``label`` names the
        bytes in errors.
        """
        read = FileRead(file, offset, nbytes, 0, label or f"bytes at {offset}")
        (handle,) = self.submit_reads((read,), ReadTarget.of(into), priority)
        return handle

    def submit_reads(
        self, reads: Sequence[FileRead], target: ReadTarget, priority: float = 0,
        when_done: Callable[[SubmittedRead], Any] | None = None,
    ) -> list[SubmittedRead]:  # fmt: skip
        """Submit the reads of several ranges into one memory at once. Returns one handle for all ranges that are read as
        they are, and one for each range of a packed tensor.

        Ranges with a lower ``priority`` are read first, equal ones in the order of submission. ``when_done``: called with
        each handle at its end, by the thread that ends it. Raises ValueError for a range outside its file or outside
        ``target``.
        """
        room = len(target.view)
        for read in reads:
            if read.offset < 0 or read.nbytes < 0 or read.offset + read.nbytes > read.file.size:
                end = read.offset + read.nbytes
                raise ValueError(
                    f"bytes {read.offset} to {end} of {read.file.path!r}, which has {read.file.size}"
                )
            if read.at < 0 or read.at + read.nbytes > room:
                raise ValueError(f"a buffer of {room} bytes for a read of {read.nbytes} to byte {read.at}")
        handles: list[SubmittedRead] = []
        plain = [read for read in reads if not isinstance(read.file, PackedSource) or not read.nbytes]
        if len(plain) < len(reads):
            for read in reads:
                if isinstance(read.file, PackedSource) and read.nbytes:
                    decoder = self._get_decoding_reader()
                    handles.append(decoder.submit(read.file, read, target, priority, when_done))
        if plain:
            # A longer range is cut at multiples of the chunk size in the file, so that only its two ends can be unaligned.
            size, chunks = self.policy.chunk, list[Chunk]()
            for read in plain:
                start, end = read.offset, read.offset + read.nbytes
                while start < end:
                    stop = end if read.nbytes <= size else min(start - start % size + size, end)
                    chunks.append((read, start, stop - start))
                    start = stop
            handles.append(handle := SubmittedRead(plain, chunks, target, priority, when_done))
            if chunks:
                self._push(handle, range(len(chunks)))
            else:
                handle.finish()
        return handles

    def reprioritise(self, handle: SubmittedRead, priority: float) -> None:
        """Change the priority of the parts of a request that no worker has begun."""
        handle.priority = priority
        # A packed tensor: `DecodingReader` reads the priority when it chooses its next blob.
        if not isinstance(handle.reads[0].file, PackedSource) and (numbers := handle.waiting()):
            self._push(handle, numbers)

    def compares(self, file: SourceFile) -> bool:
        """Return whether bytes of ``file`` are compared with a CRC-32 when they are read."""
        return self._shared.checks is not None and self._shared.checks.covers(file)

    def stats(self) -> ReaderStats:
        """Return a copy of the totals so far."""
        with self._shared.lock:
            return ReaderStats(**vars(self._shared.stats))

    def _get_decoding_reader(self) -> DecodingReader:
        """Return the reader of packed tensors, which is made at the first use."""
        with self._shared.opening:
            if self._decoding_reader is None:
                # Imported here, because it imports torch and only packed files need it.
                from .decode_on_read import DecodingReader

                self._decoding_reader = DecodingReader(self)
            return self._decoding_reader

    def close(self) -> None:
        """Cancel the waiting requests, wait for the running reads, and close the files. May be called more
        than once.
        """
        if self._decoding_reader is not None:
            self._decoding_reader.close()
        self._stop()
        for thread in self._threads:
            interruptible.join(thread)
        self._threads = []
        with self._shared.opening:
            for file in self._shared.files.values():
                file.close()
            self._shared.files.clear()

    def __enter__(self) -> DiskReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _push(self, handle: SubmittedRead, numbers: Sequence[int]) -> None:
        """Queue the chunks ``numbers`` of a request, and start missing worker threads."""
        shared = self._shared
        with shared.lock:
            if shared.stopping:
                raise RuntimeError("the reader is closed")
            shared.stats.requests += 1
            for number in numbers:
                heapq.heappush(shared.heap, (handle.priority, next(self._sequence), number, handle))
            shared.lock.notify(len(numbers))
            while len(self._threads) < min(self.policy.workers, len(shared.heap)):
                thread = BackgroundThread(_work, "carom-disk", shared.stop, (shared,))
                self._threads.append(thread)
                try:
                    thread.start()
                except BaseException:
                    if thread.ident is None:  # an interrupt came before the thread began
                        self._threads.remove(thread)
                    raise


def _work(shared: _Shared) -> None:
    """Read chunks, most urgent first, until the reader stops; the main function of a worker thread."""
    while True:
        with shared.lock:
            while not shared.heap and not shared.stopping:
                if shared.path_tuner is not None:
                    shared.path_tuner.idle()
                shared.lock.wait()
            if shared.stopping:
                return
            priority, _, number, handle = heapq.heappop(shared.heap)
        # A chunk whose priority was changed is in the heap a second time, under the new priority; skip the
        # old entry.
        claimed = handle.claim_chunk(number) if priority == handle.priority else None
        if claimed is None:
            del handle
            continue
        (read, start, nbytes), target = claimed
        error: BaseException | None = None
        chunk = None
        with shared.read_limit.permit() as permit:
            began = time.perf_counter()
            bounce_bytes = 0 if shared.path_tuner is None else shared.path_tuner.bounce_bytes
            try:
                chunk = _ChunkRead(shared, read, target, permit)
                chunk.fill(start, nbytes, bounce_bytes)
            except BaseException as caught:  # noqa: BLE001 - a worker must survive any failure of one read
                error = caught
        if chunk is not None and error is None and shared.checks is not None:
            try:  # after the permit, so that another thread reads meanwhile
                shared.checks.compare(read.file, start, chunk._place(start, start + nbytes))
            except WeightsError as caught:
                error = caught
        with shared.lock:
            stats = shared.stats
            stats.busy_seconds += time.perf_counter() - began
            if chunk is not None:
                stats.retries += chunk.retries
                stats.bounced += chunk.bounced
                stats.bytes += nbytes if error is None else 0
                stats.direct += nbytes - chunk.from_memory if error is None and chunk.raw.direct else 0
                stats.from_memory += chunk.from_memory
                if shared.path_tuner is not None and error is None and chunk.both_paths:
                    shared.path_tuner.ended(time.perf_counter(), nbytes, bounce_bytes)
        from_memory = 0 if chunk is None else chunk.from_memory
        # A worker's references would keep the caller's memory alive.
        del claimed, target, chunk
        handle.end_chunk(error, from_memory)
        del handle


class _ChunkRead:
    """A read of one chunk of the range ``read`` into its place in the caller's memory."""

    def __init__(self, shared: _Shared, read: FileRead, target: ReadTarget, permit: ReadPermit) -> None:
        self.policy, self.read, self.target, self.permit = shared.policy, read, target.view, permit
        # Byte n of the file goes to byte n + `_shift` of the target, which begins at address `_base - _shift`.
        self._shift = read.at - read.offset
        self._base = target.address + self._shift
        self.retries = self.bounced = self.from_memory = 0
        self._memory = shared.memory
        self.both_paths = False  # whether alignment allows both paths, directly and through the bounce buffer
        self.raw = self._open(shared)

    def _open(self, shared: _Shared) -> RawFile:
        """Return the request's open file, after checking that the file is the one that was indexed."""
        file = self.read.file
        with shared.opening:
            raw = shared.files.get(file)
            if raw is None:
                raw = self._retried(lambda: shared.opener(file.path, shared.policy.direct))
                try:
                    file.check(raw.stat())
                except BaseException:
                    raw.close()
                    raise
                shared.files[file] = raw
            return raw

    def fill(self, offset: int, nbytes: int, bounce_bytes: int = 0) -> None:
        """Read file bytes [offset, offset + nbytes) into their place in the target, those that are in RAM from
        there.

        ``bounce_bytes``: where both paths are possible, 0 reads directly, and another number reads through
        the bounce buffer, that many bytes at a time.
        """
        end = offset + nbytes
        if self._memory is None:
            self._fill_from_disk(offset, end, bounce_bytes)
            return
        missing = self._memory.copy_range(self.read.file, offset, nbytes, self._base + offset)
        self.from_memory = nbytes - sum(high - low for low, high in missing)
        for low, high in missing:
            self._fill_from_disk(low, high, bounce_bytes)
        self.both_paths = self.both_paths and not self.from_memory

    def _fill_from_disk(self, offset: int, end: int, bounce_bytes: int) -> None:
        """Read file bytes [offset, end) from the drive into their place in the target; ``bounce_bytes`` as in
        `fill`.
        """
        self.both_paths = self.raw.direct and self._base % ALIGN == 0
        if self.both_paths and not bounce_bytes:
            body = min(offset + -offset % ALIGN, end)
            body_end = max(body, end - end % ALIGN)
            self._read_bounced(offset, body)
            self._read_directly(body, body_end)
            self._read_bounced(body_end, end)
        elif self.raw.direct:
            step = bounce_bytes if self.both_paths else self.policy.chunk + ALIGN
            for start in range(offset - offset % ALIGN, end, step):
                self._read_bounced(max(start, offset), min(start + step, end))
        else:
            self._read_directly(offset, end)

    def _place(self, offset: int, end: int) -> memoryview:
        """Return the part of the target for file bytes [offset, end)."""
        return self.target[offset + self._shift : end + self._shift]

    def _read_directly(self, offset: int, end: int) -> None:
        """Read file bytes [offset, end) directly into the target."""
        if offset < end:
            self._read(self._place(offset, end), offset, end - offset)

    def _read_bounced(self, offset: int, end: int) -> None:
        """Read the whole pages around file bytes [offset, end) into the bounce buffer, and copy the requested
        bytes from there.
        """
        if offset >= end:
            return
        first = offset - offset % ALIGN
        pages = end + -end % ALIGN - first
        scratch = self.permit.buffer(self.policy.chunk + ALIGN)
        self._read(scratch.view[:pages], first, end - first)
        # Copying by ctypes releases the GIL; a memoryview assignment would hold the GIL.
        ctypes.memmove(self._base + offset, scratch.address + offset - first, end - offset)
        self.bounced += end - offset

    def _read(self, buffer: memoryview, offset: int, need: int) -> None:
        """Read until ``need`` bytes are in ``buffer``: continue after short reads, and retry failures a
        bounded number of times.
        """
        done = idle = 0
        while done < need:
            try:
                got = self.raw.read_into(buffer[done:], offset + done)
            except OSError as error:
                if idle >= self.policy.retries:
                    raise self._failed(error) from error
                got = -1
            if done + max(got, 0) >= need:
                return
            if self.raw.direct and got > 0:
                got -= got % ALIGN  # the next direct read must begin at an aligned offset
            if got > 0:
                done, idle = done + got, 0
                continue
            if got == 0:
                self.read.file.check(self.raw.stat())
            if idle >= self.policy.retries:
                raise self._failed(OSError(0, "reads end before the file does"))
            self._pause(idle)
            idle += 1

    def _retried(self, action: Callable[[], RawFile]) -> RawFile:
        """Call ``action``, which opens the file, and retry failures that may be temporary."""
        for attempt in itertools.count():
            try:
                return action()
            except OSError as error:
                # Waiting does not bring back a missing file or a permission.
                if attempt >= self.policy.retries or isinstance(error, (FileNotFoundError, PermissionError)):
                    raise self._failed(error) from error
                self._pause(attempt)
        raise AssertionError("unreachable")

    def _pause(self, attempt: int) -> None:
        """Count a retry and wait before it; the wait doubles with each attempt."""
        self.retries += 1
        time.sleep(self.policy.backoff * 2**attempt)

    def _failed(self, error: OSError) -> WeightsError:
        """Return the WeightsError that names the file and the tensor of a failed read."""
        text = error.strerror or os.strerror(error.errno or 0)
        return WeightsError(
            f"{self.read.file.path}: {self.read.label} could not be read after {self.retries + 1} attempts: {text}. "
            "Check the drive and the connection (the system's log names the device), or copy the file elsewhere."
        )
