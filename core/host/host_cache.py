"""The host cache of streamed weights: a bounded number of RAM buffers, filled from disk in the order of use.

The buffers and the choice among them are in `buffer_pool.py`. A buffer is pinned after its first read. This file does
not use device APIs: the caller passes functions that test an event and wait for it.

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
from typing import Any

import torch

from ..checkpoint.disk_reader import DiskReader
from ..checkpoint.read_handle import SubmittedRead
from ..common.errors import CaromError
from .arena import HostArena
from .buffer_pool import BufferPool
from .cache_buffer import Buffer, CacheFigures, Totals
from .cache_pieces import BufferPlan, CachePiece
from .kept_pieces import KeptPieces
from .next_use import NOW, UseOrder
from .piece_checks import InspectionPool

PieceBytes = tuple[torch.Tensor, Any]  # the bytes of a piece, and the result of their inspection
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
        self._units, self._arena, self._reader = units, arena, reader
        self._whole_bytes = sum(piece.nbytes for pieces in units for piece in pieces)
        self._wait_for_copy = wait_for_copy
        self._total = sum(len(pieces) for pieces in units)
        self._cond = threading.Condition(threading.RLock())
        self._use_order = UseOrder(units)
        self._totals = Totals()
        self.pool = BufferPool(
            buffers, self._total, arena, self._use_order, copy_is_done, eviction, kept or KeptPieces(), self._totals
        )  # fmt: skip
        self._failed: dict[int, BaseException] = {}
        self._inspection_pool = None if inspect is None else InspectionPool(inspect)
        self._inspecting = 0  # the number of buffers that were read and are being inspected
        # True once all pieces are in RAM for good, so that nothing has to be expected or read any more.
        self.complete = False
        self._closed = False
        self._broken: BaseException | None = None

    @property
    def buffers(self) -> BufferPlan:
        """How the RAM budget is divided into buffers."""
        return self.pool.plan

    # -- methods that the streamer calls

    def adopt(self, order: Iterable[int]) -> None:
        """Take over the kept pieces that this cache would read into buffers of the same size. They are inspected anew.

        ``order``: the units in the order of use; with fewer buffers than pieces, those used first are taken over.
        Call this before `expect`, after `hold_back`.
        """
        with self._cond:
            units = dict.fromkeys([*order, *range(len(self._units))])
            for piece in (piece for unit in units for piece in self._units[unit]):
                if not self.buffers.whole and len(self.pool.buffers) >= self.pool.most:
                    break
                buffer = self.pool.adopt(piece)
                if buffer is None:
                    continue
                buffer.data = buffer.block.data[: piece.nbytes]
                if self._inspection_pool is None:
                    buffer.ready = True
                else:
                    self._inspecting += 1
                    self._inspection_pool.submit(buffer, self._inspected)
            self._note_complete()

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
            holding = self.pool.holding
            for piece in self._units[unit]:
                buffer = holding.get(piece.rank)
                if buffer is None or not buffer.ready:
                    return False
        return True

    def acquire(self, pieces: Sequence[CachePiece]) -> list[PieceBytes]:
        """Return the bytes (uint8) of ``pieces`` of one unit, up to the first that is not in RAM, and with each the result
        of its inspection. If none is, the first one is read first, so at least one is returned. `release` must follow.

        Raises WeightsError if bytes cannot be read; a later call tries again.
        """
        with self._cond:
            first = pieces[0]
            # An error of an earlier read-ahead is dropped, also if the read-ahead fails while this call waits
            # for it: bytes that are needed now are read once more.
            self._failed.pop(first.rank, None)
            buffer = self.pool.holding.get(first.rank)
            if buffer is None or not buffer.ready:
                self._wait_for(first, buffer)
            holding, found = self.pool.holding, list[PieceBytes]()
            for piece in pieces:
                buffer = holding.get(piece.rank)
                if buffer is None or not buffer.ready:
                    break
                buffer.in_use = True
                found.append((buffer.data, buffer.inspection))
            return found

    def _wait_for(self, piece: CachePiece, read_ahead: Buffer | None) -> None:
        """Wait until a piece is read. ``read_ahead``: the buffer into which it is being read."""
        wait_began = time.perf_counter()
        self._use_order.wait_for(piece)
        try:
            self._start_reads()  # the reads for which the pieces that were used before made room
            while True:
                buffer = self.pool.holding.get(piece.rank)
                if read_ahead is not None and buffer is not read_ahead:
                    self._failed.pop(piece.rank, None)
                    read_ahead = None
                if buffer is not None and buffer.ready:
                    return
                self._wait_step(piece, buffer)
        finally:
            self._use_order.wait_for(None)
            self._totals.late_seconds += time.perf_counter() - wait_began

    def release(self, pieces: Sequence[CachePiece], copies: Sequence[Any]) -> None:
        """Release ``pieces``, those that `acquire` returned, after all copies of them to the device were issued.

        ``copies``: for each piece that was used, an event that completes with the last of its copies, None if nothing was
        copied. The pieces beyond were not used, and their positions in the order of use stay.
        """
        used = pieces[: len(copies)]
        with self._cond:
            holding = self.pool.holding
            for piece, copy_event in zip(used, copies, strict=True):
                buffer = holding[piece.rank]
                buffer.in_use = buffer.unused = False
                if copy_event is not None:
                    buffer.copy_event = copy_event
            for piece in pieces[len(copies) :]:
                holding[piece.rank].in_use = False
            if self.complete or not used:
                return
            self._use_order.end_uses(used)
            if not self.pool.plan.whole:
                self.pool.eviction.record_uses([piece.rank for piece in used], self.pool.next_use)
            # `acquire` waits for the unit's other pieces, and starts reads then.
            if used[-1].number + 1 == len(self._units[used[-1].unit]):
                self._start_reads()

    def inspections(self, unit: int) -> list[Any] | None:
        """Return the inspection results of the unit's pieces, or None if any piece is not in RAM."""
        with self._cond:
            buffers = [self.pool.holding.get(piece.rank) for piece in self._units[unit]]
            ready = [buffer for buffer in buffers if buffer is not None and buffer.ready]
            return [buffer.inspection for buffer in ready] if len(ready) == len(buffers) else None

    def discard(self, unit: int) -> None:
        """Evict the unit's pieces, because their bytes are wrong, so that the next use reads them again."""
        with self._cond:
            for piece in self._units[unit]:
                buffer = self.pool.holding.get(piece.rank)
                if buffer is not None and buffer.ready and not buffer.in_use:
                    self.pool.evict(buffer)
                    self.complete = False

    def recover(self) -> None:
        """Drop what is being read, and count anew, after an interrupt.

        The interrupt may have come between any two steps of a read, which would then never end. Called while nothing is
        acquired and all copies to the device are over.
        """
        with self._cond:
            dropped = self.pool.recover()
            self._inspecting = 0
            self._failed.clear()
            self._broken = None
            self._use_order.set_order(())
            self.complete = self.complete and not dropped
            self._note_complete()
            self._cond.notify_all()
        for handle in [handle for buffer in dropped for handle in buffer.handles]:
            handle.cancel()

    def hold_back(self, nbytes: int) -> None:
        """Leave ``nbytes`` of the bound unallocated for now.

        Not for a cache in which every piece has a buffer of its own (``buffers.whole``).
        """
        with self._cond:
            self.pool.hold_back(nbytes)
            self._start_reads()

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
            return self._whole_bytes
        return self.buffers.count * self.buffers.nbytes

    def close(self, keep: bool = True) -> None:
        """Cancel reads, and pass the pieces that are in RAM to ``kept``, if ``keep``; all copies to the device must be over."""
        with self._cond:
            self._closed = True
            self._cond.notify_all()
        self._reader.close()
        if self._inspection_pool is not None:
            self._inspection_pool.close()
        with self._cond:
            # A complete cache does not follow the order of use; a layout ends between passes, so the model's order is next.
            self.pool.close(in_model_order=self.complete, keep=keep)

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
            free_buffer = self.pool.take(piece, NOW, self.pool.spare(demanded=True), demanded=True)
            if free_buffer is not None:
                self._read(piece, free_buffer, priority=NOW)
                return
            readable = [b for b in self.pool.buffers if (b.ready or b.piece is None) and not b.in_use]
            copying = [b for b in readable if b.copy_event is not None]
            if copying and not self._totals.reading and not self._inspecting:
                oldest = min(copying, key=lambda b: b.arrival)
                self._wait_for_copy(oldest.copy_event)
                oldest.copy_event = None
                return
            if len(self.pool.buffers) >= self.pool.most:
                self._cancel_latest_read()
        elif buffer.handles and buffer.handles[0].priority > NOW:
            for handle in buffer.handles:
                self._reader.reprioritise(handle, NOW)
        copies_under_way = any(b.copy_event is not None for b in self.pool.buffers)
        if copies_under_way:  # nobody tells when they are over
            self._start_reads()
        self._cond.wait(_POLL if copies_under_way else _NAP)

    def _cancel_latest_read(self) -> None:
        """Cancel the read of the piece that is needed last, if every buffer is being read into and none
        receives the piece needed now.

        Such a state arises if the real order of use differs from the expected order.
        """
        reading = [b for b in self.pool.buffers if b.piece is not None and not b.ready]
        if len(reading) == len(self.pool.buffers):
            last = max(reading, key=lambda b: self.pool.next_use(b.piece.rank if b.piece else 0))
            for handle in last.handles:
                handle.cancel()

    # -- reading

    def _start_reads(self) -> None:
        """Start reads of expected pieces, soonest needed first, while there are buffers whose contents are
        needed later.
        """
        pool = self.pool
        if self._closed or len(pool.holding) >= self._total:
            return
        spare = pool.spare()
        room = len(spare) + max(0, pool.most - len(pool.buffers))
        for when, piece in self._use_order.missing(pool.holding, self._failed, room):
            # A piece that needs no read ends at once, and this method is called again within `_read`.
            if piece.rank not in pool.holding:
                buffer = pool.take(piece, when, spare)
                if buffer is None:
                    return
                self._read(piece, buffer, when)

    def _read(self, piece: CachePiece, buffer: Buffer, priority: float) -> None:
        """Start the reads of ``piece`` into ``buffer``, which holds it already."""
        buffer.read_began = time.perf_counter()
        self._totals.reading += 1
        if not piece.reads:  # the piece consists of padding only
            self._read_done(buffer, None)
            return
        # Reads that end meanwhile wait for the lock, so they are counted before the first of them is handled.
        handles = self._reader.submit_reads(
            piece.reads, buffer.target, priority, functools.partial(self._read_done, buffer)
        )
        buffer.handles, buffer.pending_reads = handles, len(handles)

    def _read_done(self, buffer: Buffer, handle: SubmittedRead | None) -> None:
        """Handle the end of one of the buffer's reads (on a reader's thread, or at once on the calling
        thread).

        After the last read: pin a new buffer, then have the bytes inspected or finish the piece.
        """
        error = _read_error(handle)
        with self._cond:
            if buffer.dropped:
                return
            if error is not None and buffer.error is None:
                buffer.error = error
                for other in buffer.handles:
                    other.cancel()
            buffer.pending_reads -= 1
            if buffer.pending_reads:
                return
            if buffer.pinned:
                self._all_read(buffer)
                return
            buffer.pinned = True
        if not self._closed:
            try:
                self._arena.pin(buffer.block)  # not with the lock held: pinning takes milliseconds
            except Exception as failure:  # a reader's thread must survive; `acquire` raises the error
                error = failure.with_traceback(None)
        with self._cond:
            if not buffer.dropped:
                buffer.error = buffer.error or error
                self._all_read(buffer)

    def _all_read(self, buffer: Buffer) -> None:
        """Have the bytes of a buffer whose reads have ended inspected, or finish its piece. Called with the condition
        held.
        """
        piece = buffer.piece
        assert piece is not None
        self._totals.reading -= 1
        if buffer.error is None:
            from_memory = sum(handle.from_memory for handle in buffer.handles)
            self._totals.record_read(piece, buffer.read_began, time.perf_counter(), from_memory)
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
            if buffer.dropped:
                return
            self._inspecting -= 1
            self._finish(buffer)

    def _finish(self, buffer: Buffer) -> None:
        """Mark the buffer's piece as ready or failed, and start the next reads. Called with the condition
        held.
        """
        piece = buffer.piece
        assert piece is not None
        if buffer.error is not None:
            self.pool.evict(buffer)
            if not isinstance(buffer.error, CancelledError):
                self._failed[piece.rank] = buffer.error
        else:
            buffer.data, buffer.ready = buffer.block.data[: piece.nbytes], True
        buffer.handles = []
        self._note_complete()
        try:
            self._start_reads()
        except BaseException as failure:  # noqa: BLE001 - a reader's thread must survive; `acquire` raises it
            self._broken = failure
        waited_for = self._use_order.waited_for
        if (
            waited_for is None
            or waited_for is piece
            or waited_for.rank not in self.pool.holding
            or self._broken
        ):
            self._cond.notify_all()  # not a thread that waits for the end of another read

    def _note_complete(self) -> None:
        """Set `complete` if every piece has a buffer of its own and all bytes are there."""
        busy = self._totals.reading or self._inspecting
        if self.buffers.whole and not busy and len(self.pool.holding) == self._total:
            self.complete = True


def _read_error(handle: SubmittedRead | None) -> BaseException | None:
    """Return the error of a finished read, or None."""
    try:
        return None if handle is None else handle.exception(0)
    except (CancelledError, TimeoutError) as error:
        return error.with_traceback(None)  # the traceback's frames would keep the buffer alive
