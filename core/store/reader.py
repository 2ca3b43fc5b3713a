"""Reads ranges of files into the caller's memory: a pool of workers, soonest needed first, cancellable.

A request is cut into pieces of at most ``chunk`` bytes; all workers help with the most urgent request before any
starts on the next, and a cancelled one stops at the next piece. Pieces go straight into the caller's memory where
its address and the file's offset agree modulo 4096 (as in files written by `carom pack`, read into page-aligned
slots); elsewhere, and where a `Pace` finds that faster, they pass through a worker's own aligned buffer, and the
statistics say how many bytes did.
"""

from __future__ import annotations

import ctypes
import heapq
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import WeightsError
from .handle import ReadHandle, SubmittedRead
from .header import show
from .index import SourceFile, TensorEntry
from .lanes import Lane, Lanes
from .pace import Pace
from .packed_source import PackedSource
from .rawio import ALIGN, RawFile, open_raw

if TYPE_CHECKING:
    from .decoding import Decoding


@dataclass(frozen=True)
class ReaderPolicy:
    """How a `DiskReader` reads. ``chunk``: bytes of one read call; ``retries``: attempts after a first failure or a
    read that brought nothing, with waits of ``backoff`` seconds, doubled each time; ``direct``: past the page cache."""

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


@dataclass
class ReaderStats:
    """Totals since the reader was made: bytes delivered, and of these how many bypassed the page cache (``direct``)
    and how many took the way through a worker's buffer (``bounced``); ``retries`` counts repeated reads."""

    bytes: int = 0
    direct: int = 0
    bounced: int = 0
    requests: int = 0
    retries: int = 0
    busy_seconds: float = 0.0


@dataclass
class _Shared:
    """What workers know; not the reader itself, so that an abandoned reader is collected and stops them."""

    policy: ReaderPolicy
    opener: Callable[[str, bool], RawFile]
    pace: Pace | None
    lanes: Lanes
    lock: threading.Condition = field(default_factory=threading.Condition)
    heap: list[tuple[float, int, int, ReadHandle]] = field(default_factory=list)
    files: dict[SourceFile, RawFile] = field(default_factory=dict)
    opening: threading.Lock = field(default_factory=threading.Lock)
    stats: ReaderStats = field(default_factory=ReaderStats)
    stopping: bool = False

    def stop(self) -> None:
        with self.lock:
            self.stopping = True
            waiting, self.heap = self.heap, []
            self.lock.notify_all()
        for *_, handle in waiting:
            handle.cancel()


class DiskReader:
    """Reads byte ranges of indexed files into given memory.

    ``opener`` (path, direct) -> RawFile replaces the operating system's reads in tests; ``pace`` chooses how direct reads
    reach their memory (default: straight, where they can); ``lanes``: what bounds the reads under way together with other
    readers' (default: the workers do). Workers start with the first request. Close it, or use it as a context manager.
    """

    def __init__(
        self,
        policy: ReaderPolicy | None = None,
        *,
        opener: Callable[[str, bool], RawFile] = open_raw,
        pace: Pace | None = None,
        lanes: Lanes | None = None,
    ) -> None:
        self.policy = policy or ReaderPolicy()
        self._shared = _Shared(self.policy, opener, pace, lanes or Lanes(self.policy.workers))
        self._threads: list[threading.Thread] = []
        self._sequence = itertools.count()
        self._decoding: Decoding | None = None
        self._stop = weakref.finalize(self, self._shared.stop)

    def submit(
        self, entry: TensorEntry, into: Any, *, start: int = 0, nbytes: int | None = None, priority: float = 0
    ) -> SubmittedRead:
        """Read ``nbytes`` bytes (default: all) of ``entry`` from its byte ``start`` into the beginning of ``into``.

        ``into``: writable contiguous CPU memory (memoryview, numpy array, torch tensor, bytearray). A lower
        ``priority`` is needed sooner; equals are served in the order they came. Raises ValueError for a range
        outside the tensor or a buffer too small.
        """
        nbytes = entry.nbytes - start if nbytes is None else nbytes
        if start < 0 or nbytes < 0 or start + nbytes > entry.nbytes:
            raise ValueError(
                f"bytes {start} to {start + nbytes} of {show(entry.name)}, which has {entry.nbytes}"
            )
        what = f"tensor {show(entry.name)}"
        return self.submit_range(entry.file, entry.offset + start, nbytes, into, what=what, priority=priority)

    def submit_range(
        self, file: SourceFile, offset: int, nbytes: int, into: Any, *, what: str = "", priority: float = 0
    ) -> SubmittedRead:
        """As `submit`, for ``nbytes`` bytes at ``offset`` of ``file``; ``what`` names them in errors."""
        target = as_bytes(into)
        if offset < 0 or nbytes < 0 or offset + nbytes > file.size:
            raise ValueError(f"bytes {offset} to {offset + nbytes} of {file.path!r}, which has {file.size}")
        if len(target) < nbytes:
            raise ValueError(f"a buffer of {len(target)} bytes for a read of {nbytes}")
        if isinstance(file, PackedSource):
            return self._decodes().submit(file, offset, target[:nbytes], what, priority)
        handle = ReadHandle(file, offset, target[:nbytes], what or f"bytes at {offset}", priority)
        if nbytes == 0:
            handle._finish()
            return handle
        # Cut at multiples of the chunk in the file, so that only the outer ends of a request can be unaligned.
        edges = [
            offset,
            *range(
                offset - offset % self.policy.chunk + self.policy.chunk, offset + nbytes, self.policy.chunk
            ),
        ]
        for start, end in zip(edges, [*edges[1:], offset + nbytes], strict=True):
            handle._waiting[start] = end - start
        self._push(handle, edges)
        return handle

    def reprioritise(self, handle: SubmittedRead, priority: float) -> None:
        """Change the urgency of what no worker has begun of ``handle``."""
        with handle._lock:
            handle.priority = priority
            if not isinstance(handle, ReadHandle):  # packed: the decoder looks when it chooses
                return
            starts = sorted(handle._waiting)
        self._push(handle, starts)

    def stats(self) -> ReaderStats:
        """A copy of the totals so far."""
        with self._shared.lock:
            return ReaderStats(**vars(self._shared.stats))

    def _decodes(self) -> Decoding:
        """What reads packed tensors for this reader."""
        with self._shared.opening:
            if self._decoding is None:
                from .decoding import Decoding  # imports torch; only packed files need it

                self._decoding = Decoding(self)
            return self._decoding

    def close(self) -> None:
        """Cancel what waits, let running reads end, close the files. Idempotent."""
        if self._decoding is not None:
            self._decoding.close()
        self._stop()
        for thread in self._threads:
            thread.join()
        self._threads = []
        with self._shared.opening:
            for file in self._shared.files.values():
                file.close()
            self._shared.files.clear()

    def __enter__(self) -> DiskReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _push(self, handle: ReadHandle, starts: list[int]) -> None:
        shared = self._shared
        with shared.lock:
            if shared.stopping:
                raise RuntimeError("the reader is closed")
            shared.stats.requests += 1
            for start in starts:
                heapq.heappush(shared.heap, (handle.priority, next(self._sequence), start, handle))
            shared.lock.notify(len(starts))
            while len(self._threads) < min(self.policy.workers, len(shared.heap)):
                thread = threading.Thread(target=_work, args=(shared,), name="carom-disk", daemon=True)
                self._threads.append(thread)
                thread.start()


def as_bytes(buffer: Any) -> memoryview:
    """A writable byte view of contiguous CPU memory; ValueError where there is none."""
    if hasattr(buffer, "untyped_storage"):  # a torch tensor
        if buffer.device.type != "cpu" or not buffer.is_contiguous() or buffer.requires_grad:
            raise ValueError(
                f"a read needs a contiguous CPU tensor without gradient, got {buffer.device}, {buffer.stride()}"
            )
        import torch

        buffer = buffer.reshape(-1).view(torch.uint8).numpy() if buffer.numel() else bytearray()
    view = memoryview(buffer)
    if view.readonly or not view.c_contiguous:
        raise ValueError("a read needs writable, contiguous memory")
    return view.cast("B") if view.nbytes else memoryview(bytearray())


def _work(shared: _Shared) -> None:
    while True:
        with shared.lock:
            while not shared.heap and not shared.stopping:
                if shared.pace is not None:
                    shared.pace.idle()
                shared.lock.wait()
            if shared.stopping:
                return
            priority, _, start, handle = heapq.heappop(shared.heap)
        # Under another priority the piece stands in the heap a second time.
        nbytes = handle._take(start) if priority == handle.priority else 0
        if not nbytes:
            del handle
            continue
        error: BaseException | None = None
        piece = None
        with shared.lanes.one() as lane:
            began = time.perf_counter()
            aside = 0 if shared.pace is None else shared.pace.aside
            try:
                piece = _Piece(shared, handle, lane)
                piece.fill(start, nbytes, aside)
            except BaseException as caught:  # noqa: BLE001 - a worker must outlive any failure of one read
                error = caught
        with shared.lock:
            stats = shared.stats
            stats.busy_seconds += time.perf_counter() - began
            if piece is not None:
                stats.retries += piece.retries
                stats.bounced += piece.bounced
                stats.bytes += nbytes if error is None else 0
                stats.direct += nbytes if error is None and piece.raw.direct else 0
                if shared.pace is not None and error is None and piece.either:
                    shared.pace.ended(time.perf_counter(), nbytes, aside)
        handle._piece_done(error)
        # Held while idle they would keep the caller's memory.
        del handle, piece


class _Piece:
    """Fills one piece of a request."""

    def __init__(self, shared: _Shared, handle: ReadHandle, lane: Lane) -> None:
        assert handle._target is not None
        self.policy, self.handle, self.target, self.lane = shared.policy, handle, handle._target, lane
        self.retries = self.bounced = 0
        self.either = False  # whether both ways were open to it
        self.raw = self._open(shared)

    def _open(self, shared: _Shared) -> RawFile:
        file = self.handle.file
        with shared.opening:
            if file not in shared.files:
                raw = self._retried(lambda: shared.opener(file.path, shared.policy.direct))
                try:
                    file.check(raw.stat())
                except BaseException:
                    raw.close()
                    raise
                shared.files[file] = raw
            return shared.files[file]

    def fill(self, offset: int, nbytes: int, aside: int = 0) -> None:
        """Bring file bytes [offset, offset + nbytes) to their place in the target; ``aside``: where a choice is, through a
        worker's buffer, that many bytes at a time."""
        end = offset + nbytes
        self.either = self.raw.direct and (self.handle._address - self.handle.offset) % ALIGN == 0
        if self.either and not aside:
            body = min(offset + -offset % ALIGN, end)
            body_end = max(body, end - end % ALIGN)
            self._bounce(offset, body)
            self._straight(body, body_end)
            self._bounce(body_end, end)
        elif self.raw.direct:
            step = aside if self.either else self.policy.chunk + ALIGN
            for start in range(offset - offset % ALIGN, end, step):
                self._bounce(max(start, offset), min(start + step, end))
        else:
            self._straight(offset, end)

    def _place(self, offset: int, end: int) -> memoryview:
        return self.target[offset - self.handle.offset : end - self.handle.offset]

    def _straight(self, offset: int, end: int) -> None:
        if offset < end:
            self._read(self._place(offset, end), offset, end - offset)

    def _bounce(self, offset: int, end: int) -> None:
        """Read the whole pages around [offset, end) aside and copy what was asked for."""
        if offset >= end:
            return
        first = offset - offset % ALIGN
        pages = end + -end % ALIGN - first
        scratch = self.lane.buffer(self.policy.chunk + ALIGN)
        self._read(scratch[:pages], first, end - first)
        # ctypes releases the GIL; a memoryview assignment would hold it for the whole copy.
        source = np.frombuffer(scratch, np.uint8).ctypes.data + offset - first
        ctypes.memmove(self.handle._address + offset - self.handle.offset, source, end - offset)
        self.bounced += end - offset

    def _read(self, buffer: memoryview, offset: int, need: int) -> None:
        """Read until ``need`` bytes are in ``buffer``, going on after short reads and retrying failures, boundedly."""
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
                got -= got % ALIGN  # the next direct read must begin on a boundary again
            if got > 0:
                done, idle = done + got, 0
                continue
            if got == 0:
                self.handle.file.check(self.raw.stat())
            if idle >= self.policy.retries:
                raise self._failed(OSError(0, "reads end before the file does"))
            self._pause(idle)
            idle += 1

    def _retried(self, action: Callable[[], RawFile]) -> RawFile:
        for attempt in itertools.count():
            try:
                return action()
            except OSError as error:
                # A missing file or permission does not come back by waiting.
                if attempt >= self.policy.retries or isinstance(error, (FileNotFoundError, PermissionError)):
                    raise self._failed(error) from error
                self._pause(attempt)
        raise AssertionError("unreachable")

    def _pause(self, attempt: int) -> None:
        self.retries += 1
        time.sleep(self.policy.backoff * 2**attempt)

    def _failed(self, error: OSError) -> WeightsError:
        text = error.strerror or os.strerror(error.errno or 0)
        return WeightsError(
            f"{self.handle.file.path}: {self.handle.what} could not be read after {self.retries + 1} attempts: {text}. "
            "Check the drive and the connection (the system's log names the device), or copy the file elsewhere."
        )
