"""The host cache of streamed weights: a bounded number of RAM buffers, filled from disk in the order of use.

A buffer is allocated when it is first needed and pinned after its first read. All buffers together never
exceed the bound, because new reads reuse buffers. A buffer is overwritten only when no copy to the device
reads it any more. This file does not use device APIs: the caller passes functions that test an event and wait
for it.

What is in the buffers at the end can stay in RAM for the cache of the next layout (`kept_pieces.py`).

Threads: the threads that copy weights to the device (holding the lock of the streamer, core/streaming) call
`expect`, `acquire` and `release`; the reader's threads finish reads and start the next ones. One condition of
the cache protects all state; the only other lock that a reader's thread takes is that of the kept pieces.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError
from dataclasses import replace
from typing import Any

import torch

from ..checkpoint.disk_reader import DiskReader, as_bytes
from ..checkpoint.read_handle import SubmittedRead
from ..common.errors import CaromError
from .arena import HostArena
from .cache_buffer import Buffer, CacheFigures, Totals
from .cache_pieces import LEAST_BUFFERS, BufferPlan, CachePiece
from .eviction import EvictionPolicy
from .kept_pieces import KeptPiece, KeptPieces
from .next_use import NEVER, UseOrder
from .piece_checks import InspectionPool

_POLL = 0.0005  # seconds between tests of copies to the device that are under way
_NAP = 0.1  # seconds after which a waiting thread tests its condition without being notified


class HostCache:
    """A RAM cache of weights that are read from disk: ``units``, cut into pieces, in the buffers that
    ``buffers`` plans.

    A unit is a module whose weights are copied to the device together; a piece is a range of its bytes.
    ``copy_is_done``: tells whether a copy's event has completed. ``wait_for_copy``: makes the host wait for
    the event. ``eviction``: the policy, see `eviction.py`. ``inspect``: a function that is called on a
    separate thread with each piece and its bytes after they were read; the result is kept with the piece.
    ``kept``: pieces of the session's former cache, which `adopt` takes over and `close` adds to.
    """

    def __init__(
        self,
        units: Sequence[Sequence[CachePiece]],
        buffers: BufferPlan,
        arena: HostArena,
        reader: DiskReader,
        copy_is_done: Callable[[Any], bool],
        wait_for_copy: Callable[[Any], None],
        eviction: str = "belady",
        inspect: Callable[[CachePiece, torch.Tensor], Any] | None = None,
        kept: KeptPieces | None = None,
    ) -> None:
        self._kept = kept or KeptPieces()
        self._units, self.buffers, self._arena, self._reader = units, buffers, arena, reader
        self._copy_is_done, self._wait_for_copy = copy_is_done, wait_for_copy
        self._total = sum(len(pieces) for pieces in units)
        self._eviction = EvictionPolicy(eviction, buffers.count - buffers.rotating, self._total)
        self._cond = threading.Condition(threading.RLock())
        self._buffers: list[Buffer] = []
        # {rank of a piece: the buffer that holds it or that it is being read into}.
        self._buffer_of: dict[int, Buffer] = {}
        self._failed: dict[int, BaseException] = {}
        self._use_order = UseOrder(units)
        self._arrivals = 0
        self._inspection_pool = None if inspect is None else InspectionPool(inspect)
        self._inspecting = 0  # the number of buffers that were read and are being inspected
        # True once all pieces are in RAM for good, so that nothing has to be expected or read any more.
        self.complete = False
        self._closed = False
        self._limit = buffers.count
        self._held_back = 0  # buffers that the limit allows but that must not be allocated yet
        self._broken: BaseException | None = None
        self._totals = Totals()

    # -- methods that the streamer calls

    def adopt(self, order: Iterable[int]) -> None:
        """Take over the kept pieces that this cache would read into buffers of the same size.

        ``order``: the units in the order of use; with fewer buffers than pieces, those used first are taken over.
        Call this before `expect`, after `hold_back`.
        """
        with self._cond:
            units = dict.fromkeys([*order, *range(len(self._units))])
            for piece in (piece for unit in units for piece in self._units[unit]):
                if not self.buffers.whole and len(self._buffers) >= self._limit - self._held_back:
                    break
                kept = self._kept.take(piece, self._buffer_bytes(piece))
                if kept is not None:
                    self._adopt(piece, kept)
            self._note_complete()

    def _adopt(self, piece: CachePiece, kept: KeptPiece) -> None:
        """Use the memory of a kept piece as a buffer that holds ``piece``, inspected anew if pieces are
        inspected at all.
        """
        self._arrivals += 1
        buffer = Buffer(kept.block, self._arrivals, piece, pinned=True)
        self._buffers.append(buffer)
        self._buffer_of[piece.rank] = buffer
        self._totals.held_bytes += kept.block.data.numel()
        if not self.buffers.whole:
            self._eviction.adopt(piece.rank, kept.favoured)
        if self._inspection_pool is None:
            buffer.ready = True
        else:
            self._inspecting += 1
            self._inspection_pool.submit(buffer, self._inspected)

    def expect(self, units: Iterable[int]) -> None:
        """Set the order of use, ``units`` first to last, and start reads of their missing bytes as far as
        there are buffers.
        """
        with self._cond:
            self._use_order.set_order(units)
            self._start_reads()

    def has(self, unit: int) -> bool:
        """Return whether all bytes of the unit are in RAM."""
        if self.complete:
            return True
        with self._cond:
            return all(
                (buffer := self._buffer_of.get(piece.rank)) is not None and buffer.ready
                for piece in self._units[unit]
            )

    def acquire(self, piece: CachePiece) -> torch.Tensor:
        """Return the bytes of a piece (uint8 of ``piece.nbytes``), reading them first if necessary; `release`
        must follow.

        Raises WeightsError if they cannot be read; a later call tries again.
        """
        with self._cond:
            # An error of an earlier read-ahead is dropped, also if the read-ahead fails while this call waits
            # for it: bytes that are needed now are read once more.
            self._failed.pop(piece.rank, None)
            read_ahead = self._buffer_of.get(piece.rank)
            self._use_order.begin_use(piece)
            wait_began: float | None = None
            try:
                while True:
                    buffer = self._buffer_of.get(piece.rank)
                    if read_ahead is not None and buffer is not read_ahead:
                        self._failed.pop(piece.rank, None)
                        read_ahead = None
                    if buffer is not None and buffer.ready:
                        buffer.in_use = True
                        return buffer.block.data[: piece.nbytes]
                    wait_began = wait_began or time.perf_counter()
                    self._wait_step(piece, buffer)
            finally:
                if wait_began is not None:
                    self._totals.late_seconds += time.perf_counter() - wait_began

    def release(self, piece: CachePiece, copy_event: Any) -> None:
        """Release a piece that `acquire` returned, after all copies of it to the device were issued.

        ``copy_event``: completes with the last of these copies (None: nothing was copied).
        """
        with self._cond:
            buffer = self._buffer_of[piece.rank]
            buffer.in_use = False
            buffer.unused = False
            buffer.copy_event = buffer.copy_event if copy_event is None else copy_event
            if self.complete:
                return
            self._use_order.end_use(piece)
            if not self.buffers.whole:
                self._eviction.record_use(piece.rank, self._next_use)
            self._start_reads()

    def inspection(self, piece: CachePiece) -> Any:
        """Return the inspection result of a piece; call this between `acquire` and `release`."""
        with self._cond:
            return self._buffer_of[piece.rank].inspection

    def inspections(self, unit: int) -> list[Any] | None:
        """Return the inspection results of the unit's pieces, or None if any piece is not in RAM."""
        with self._cond:
            buffers = [self._buffer_of.get(piece.rank) for piece in self._units[unit]]
            ready = [buffer for buffer in buffers if buffer is not None and buffer.ready]
            return [buffer.inspection for buffer in ready] if len(ready) == len(buffers) else None

    def discard(self, unit: int) -> None:
        """Evict the unit's pieces, because their bytes are wrong, so that the next use reads them again."""
        with self._cond:
            for piece in self._units[unit]:
                buffer = self._buffer_of.get(piece.rank)
                if buffer is not None and buffer.ready and not buffer.in_use:
                    self._evict(buffer)
                    self.complete = False

    def release_unused(self, piece: CachePiece) -> None:
        """Release a piece that `acquire` returned and that was not used; its position in the order of use
        stays.
        """
        with self._cond:
            buffer = self._buffer_of.get(piece.rank)
            if buffer is not None:
                buffer.in_use = False

    def hold_back(self, nbytes: int) -> None:
        """Leave ``nbytes`` of the bound unallocated for now.

        Not for a cache in which every piece has a buffer of its own (``buffers.whole``).
        """
        with self._cond:
            self._held_back = -(-nbytes // self.buffers.nbytes)
            self._start_reads()

    def shrink(self, nbytes: int) -> None:
        """Lower the bound by ``nbytes``, rounded up to whole buffers, and free the buffers above it; at least
        two remain.

        Waits for copies to the device that read a buffer before freeing it. Does nothing if every piece has a
        buffer of its own (``buffers.whole``).
        """
        with self._cond:
            if self.buffers.whole:
                return
            count = max(LEAST_BUFFERS, self.buffers.count - -(-nbytes // self.buffers.nbytes))
            self._limit = min(self._limit, count)
            self.buffers = replace(self.buffers, count=count)
            self._eviction.room = max(0, count - self.buffers.rotating)
            while len(self._buffers) > self._limit and not self._closed:
                idle = [
                    b
                    for b in self._buffers
                    if (b.ready or b.piece is None) and not b.in_use and not b.pending_reads
                ]
                if not idle:
                    self._cond.wait(_NAP)
                    continue
                last = max(idle, key=lambda b: NEVER if b.piece is None else self._next_use(b.piece.rank))
                if last.copy_event is not None:
                    self._wait_for_copy(last.copy_event)
                if last.piece is not None:
                    self._evict(last)
                self._buffers.remove(last)
                self._totals.held_bytes -= self.buffers.nbytes
                self._kept.unreserve(self.buffers.nbytes)
                last.block.unpin()

    def figures(self) -> CacheFigures:
        """Return the cache's totals: bytes read, seconds of reading and waiting, bytes of memory."""
        with self._cond:
            return self._totals.figures()

    def reads(self) -> list[tuple[str, float, float, int]]:
        """Return the latest reads as (name, start and end in seconds of perf_counter, bytes)."""
        with self._cond:
            return list(self._totals.spans)

    def total_read(self) -> int:
        """Return the number of bytes read so far."""
        return self._totals.read_bytes

    @property
    def limit_bytes(self) -> int:
        """The largest number of bytes that the buffers may take together."""
        if self.buffers.whole:
            return sum(piece.nbytes for pieces in self._units for piece in pieces)
        return self.buffers.count * self.buffers.nbytes

    def close(self) -> None:
        """Cancel reads, and pass the pieces that are in RAM to ``kept``; all copies to the device must be over."""
        with self._cond:
            self._closed = True
            self._cond.notify_all()
        self._reader.close()
        if self._inspection_pool is not None:
            self._inspection_pool.close()
        with self._cond:
            # The pieces that are used last are the first that the next layout releases if memory is short. A complete
            # cache does not follow the order of use; a layout ends between passes, so the model's order is the next.
            self._buffers.sort(
                key=lambda b: (
                    NEVER if b.piece is None
                    else b.piece.rank if self.complete
                    else self._next_use(b.piece.rank)
                )
            )  # fmt: skip
            for buffer in self._buffers:
                if buffer.piece is not None and buffer.ready:
                    favoured = buffer.piece.rank in self._eviction.kept
                    self._kept.keep(KeptPiece(buffer.piece, buffer.block, favoured))
                else:
                    self._kept.unreserve(buffer.block.data.numel())
                    buffer.block.unpin()
                # Handles of cancelled reads refer to the buffer. Drop them, so that the memory is freed
                # without the garbage collector.
                buffer.error, buffer.handles = None, []
            self._buffers.clear()
            self._buffer_of.clear()
            self._totals.held_bytes = 0

    # -- steps of a waiting `acquire`, called with the condition held

    def _wait_step(self, piece: CachePiece, buffer: Buffer | None) -> None:
        """Do one step towards having the piece in ``buffer``: start a read, wait for a copy, or wait to be
        notified.

        Raises the piece's error if its read failed.
        """
        if self._closed:
            raise CaromError("the session was closed while a weight was read from disk")
        error = self._failed.pop(piece.rank, None) or self._broken
        if error is not None:
            # Raise a new exception object each time: the stored one would collect tracebacks, which keep the
            # model's frames alive.
            raise type(error)(*error.args) from error
        if buffer is None:
            free_buffer = self._find_buffer(piece, -1.0, demanded=True)
            if free_buffer is not None:
                self._read(piece, free_buffer, priority=-1.0)
                return
            readable = [b for b in self._buffers if (b.ready or b.piece is None) and not b.in_use]
            copying = [b for b in readable if b.copy_event is not None]
            if copying and not self._totals.reading and not self._inspecting:
                oldest = min(copying, key=lambda b: b.arrival)
                self._wait_for_copy(oldest.copy_event)
                oldest.copy_event = None
                return
            self._cancel_latest_read()
        elif buffer.handles and buffer.handles[0].priority > -1.0:
            for handle in buffer.handles:
                self._reader.reprioritise(handle, -1.0)
        self._start_reads()
        copies_under_way = any(b.copy_event is not None for b in self._buffers)
        self._cond.wait(_POLL if copies_under_way else _NAP)

    def _cancel_latest_read(self) -> None:
        """Cancel the read of the piece that is needed last, if every buffer is being read into and none
        receives the piece needed now.

        Such a state arises if the real order of use differs from the expected order.
        """
        reading = [b for b in self._buffers if b.piece is not None and not b.ready]
        if len(reading) == len(self._buffers):
            last = max(reading, key=lambda b: self._next_use(b.piece.rank if b.piece else 0))
            for handle in last.handles:
                handle.cancel()

    # -- choice of buffers

    def _next_use(self, rank: int) -> float:
        """Return the number of accesses until the piece with rank ``rank`` is used next, NEVER if it is not
        in RAM.
        """
        buffer = self._buffer_of.get(rank)
        piece = buffer.piece if buffer is not None else None
        return NEVER if piece is None else self._use_order.distance(piece)

    def _start_reads(self) -> None:
        """Start reads of expected pieces, soonest needed first, while there are buffers whose contents are
        needed later.
        """
        if self._closed or len(self._buffer_of) >= self._total:
            return
        for when, piece in self._use_order.missing(self._buffer_of, self._failed):
            buffer = self._find_buffer(piece, when)
            if buffer is None:
                return
            self._read(piece, buffer, when)

    def _find_buffer(self, piece: CachePiece, when: float, demanded: bool = False) -> Buffer | None:
        """Return a buffer that may be overwritten for ``piece``, which is needed in ``when`` accesses; None
        if there is none yet.

        ``demanded``: the piece is needed now, so kept pieces may be evicted as well.
        """
        none_fits = demanded and all(b.block.data.numel() < piece.nbytes for b in self._buffers)
        # Reads that are under way may copy from the kept pieces, so these are released only after the reads.
        release_kept = none_fits or not self._totals.reading
        if len(self._buffers) < self._limit - self._held_back or none_fits:
            if self._kept.reserve(self._buffer_bytes(piece), release_kept):
                try:
                    return self._new_buffer(piece)
                except MemoryError:
                    self._kept.unreserve(self._buffer_bytes(piece))
                    if none_fits:
                        raise
                    # The system has no more memory: continue with the buffers that exist.
                    self._limit = len(self._buffers)
            elif self.buffers.whole or not demanded:
                # The kept pieces give way as soon as the reads end. To evict a piece now would cause a read more.
                return None
        evictable: dict[int, Buffer] = {}
        kept_buffers: dict[int, Buffer] = {}  # buffers of kept pieces, which only a demanded piece may take
        for buffer in self._buffers:
            if buffer.block.data.numel() < piece.nbytes:
                continue
            if buffer.piece is None:
                if buffer.pending_reads == 0 and not buffer.in_use and self._idle(buffer):
                    return buffer
                continue
            if not buffer.ready or buffer.in_use:
                continue
            rank = buffer.piece.rank
            kept = rank in self._eviction.kept or (buffer.unused and self._eviction.eviction == "fifo")
            if kept and not demanded:  # tested first, because with much RAM it excludes most buffers
                continue
            if self._next_use(rank) <= when or not self._idle(buffer):
                continue
            (kept_buffers if kept else evictable)[rank] = buffer
        if not evictable and demanded:
            evictable = kept_buffers
        if not evictable:
            return None
        rank = self._eviction.choose_victim(evictable, self._next_use, lambda r: evictable[r].arrival)
        buffer = evictable[rank]
        self._evict(buffer)
        return buffer

    def _idle(self, buffer: Buffer) -> bool:
        """Return whether no copy to the device reads the buffer any more."""
        if buffer.copy_event is not None and self._copy_is_done(buffer.copy_event):
            buffer.copy_event = None
        return buffer.copy_event is None

    def _evict(self, buffer: Buffer) -> None:
        """Evict the buffer's piece."""
        assert buffer.piece is not None
        del self._buffer_of[buffer.piece.rank]
        self._eviction.remove(buffer.piece.rank)
        buffer.piece, buffer.ready = None, False

    def _new_buffer(self, piece: CachePiece) -> Buffer:
        """Allocate a buffer that is large enough for ``piece``."""
        buffer = Buffer(self._arena.allocate(self._buffer_bytes(piece)), self._arrivals)
        self._buffers.append(buffer)
        self._totals.held_bytes += self._buffer_bytes(piece)
        return buffer

    def _buffer_bytes(self, piece: CachePiece) -> int:
        """Return the bytes of a new buffer for ``piece``."""
        return piece.nbytes if self.buffers.whole else self.buffers.nbytes

    # -- reading

    def _read(self, piece: CachePiece, buffer: Buffer, priority: float) -> None:
        """Start the reads of ``piece`` into ``buffer``."""
        self._arrivals += 1
        buffer.piece, buffer.ready, buffer.unused, buffer.error, buffer.inspection = (
            piece,
            False,
            True,
            None,
            None,
        )
        buffer.arrival, buffer.pending_reads, buffer.handles = self._arrivals, max(1, len(piece.reads)), []
        buffer.read_began = time.perf_counter()
        self._buffer_of[piece.rank] = buffer
        self._totals.read_begins(buffer.read_began)
        if not piece.reads:  # the piece consists of padding only
            self._read_done(buffer, None)
            return
        memory = as_bytes(buffer.block.data)
        for read in piece.reads:
            handle = self._reader.submit_range(
                read.file, read.offset, read.nbytes, memory[read.at : read.at + read.nbytes],
                label=read.label, priority=priority,
            )  # fmt: skip
            buffer.handles.append(handle)
        for handle in list(buffer.handles):
            handle.add_done_callback(functools.partial(self._read_done, buffer))

    def _read_done(self, buffer: Buffer, handle: SubmittedRead | None) -> None:
        """Handle the end of one of the buffer's reads (on a reader's thread, or at once on the calling
        thread).

        After the last read: pin a new buffer, then have the bytes inspected or finish the piece.
        """
        error = _read_error(handle)
        with self._cond:
            if error is not None and buffer.error is None:
                buffer.error = error
                for other in buffer.handles:
                    other.cancel()
            buffer.pending_reads -= 1
            if buffer.pending_reads:
                return
            first, buffer.pinned = not buffer.pinned, True
        if first and not self._closed:
            try:
                self._arena.pin(buffer.block)  # not with the lock held: pinning takes milliseconds
            except Exception as failure:  # a reader's thread must survive; `acquire` raises the error
                error = failure.with_traceback(None)
        with self._cond:
            buffer.error = buffer.error or error
            piece, now = buffer.piece, time.perf_counter()
            assert piece is not None
            self._totals.read_ends(now)
            if buffer.error is None:
                from_memory = sum(handle.from_memory for handle in buffer.handles)
                self._totals.record_read(piece, buffer.read_began, now, from_memory)
                if self._inspection_pool is not None and not self._closed:
                    try:
                        self._inspection_pool.submit(buffer, self._inspected)
                    except RuntimeError as failure:  # the interpreter is shutting down
                        buffer.error = failure
                    else:
                        self._inspecting, buffer.handles = self._inspecting + 1, []
                        return
            self._finish(buffer)

    def _inspected(self, buffer: Buffer) -> None:
        """Handle the end of the inspection of the buffer's bytes (on an inspection thread)."""
        with self._cond:
            self._inspecting -= 1
            self._finish(buffer)

    def _finish(self, buffer: Buffer) -> None:
        """Mark the buffer's piece as ready or failed, and start the next reads. Called with the condition
        held.
        """
        piece = buffer.piece
        assert piece is not None
        if buffer.error is not None:
            self._evict(buffer)
            if not isinstance(buffer.error, CancelledError):
                self._failed[piece.rank] = buffer.error
        else:
            buffer.ready = True
        buffer.handles = []
        self._note_complete()
        try:
            self._start_reads()
        except BaseException as failure:  # noqa: BLE001 - a reader's thread must survive; `acquire` raises it
            self._broken = failure
        self._cond.notify_all()

    def _note_complete(self) -> None:
        """Set `complete` if every piece has a buffer of its own and all bytes are there."""
        busy = self._totals.reading or self._inspecting
        if self.buffers.whole and not busy and len(self._buffer_of) == self._total:
            self.complete = True


def _read_error(handle: SubmittedRead | None) -> BaseException | None:
    """Return the error of a finished read, or None."""
    try:
        return None if handle is None else handle.exception(0)
    except (CancelledError, TimeoutError) as error:
        return error.with_traceback(None)  # the traceback's frames would keep the buffer alive
