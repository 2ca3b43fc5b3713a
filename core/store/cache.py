"""The host cache: a bounded number of buffers between the disk and the device, filled in the order of use.

Memory comes one buffer at a time, when first needed, and is pinned once its first bytes are there; buffers
together never exceed the bound, because a buffer is only ever reused. A buffer is overwritten only when
no copy to the device still reads it. Nothing here knows devices: what tells whether a copy is over is given.

Threads: the streamer's (under its lock) call `expect`, `need`, `used`; readers' threads finish reads and start
the next. Everything is under one condition of its own, and no reader's thread ever takes another lock.
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

from ..errors import CaromError
from .arena import HostArena
from .eviction import Keeper
from .expected import NEVER, Expected
from .handle import SubmittedRead
from .held import Buffer, CacheFigures, Totals
from .inspecting import Inspectors
from .pieces import LEAST_BUFFERS, Buffers, Piece
from .reader import DiskReader, as_bytes

_POLL = 0.0005  # seconds between looks at copies that are under way
_NAP = 0.1


class HostCache:
    """Holds pieces of ``units`` (as cut by `pieces.cut`) in ``buffers``.

    ``landed`` tells whether a copy's event has been reached, ``settle`` makes the host wait for it. ``inspect`` is
    called with each piece and its bytes once they are read, on a thread of its own; what it finds is kept with them.
    """

    def __init__(
        self,
        units: Sequence[Sequence[Piece]],
        buffers: Buffers,
        arena: HostArena,
        reader: DiskReader,
        landed: Callable[[Any], bool],
        settle: Callable[[Any], None],
        eviction: str = "belady",
        inspect: Callable[[Piece, torch.Tensor], Any] | None = None,
    ) -> None:
        self._units, self.buffers, self._arena, self._reader = units, buffers, arena, reader
        self._landed, self._settle = landed, settle
        self._total = sum(len(pieces) for pieces in units)
        self._keeper = Keeper(eviction, buffers.count - buffers.rotating, self._total)
        self._cond = threading.Condition(threading.RLock())
        self._buffers: list[Buffer] = []
        self._where: dict[int, Buffer] = {}  # rank -> where its piece is, or is being read to
        self._failed: dict[int, BaseException] = {}
        self._expected = Expected(units)
        self._arrivals = 0
        self._inspectors = None if inspect is None else Inspectors(inspect)
        self._looking = 0  # buffers that were read and are being inspected
        self.complete = False  # everything is here and stays: nothing is to be expected or read any more
        self._closed = False
        self._limit = buffers.count
        self._back = 0  # of these, not to be made yet
        self._broken: BaseException | None = None
        self._totals = Totals()

    # -- what the streamer calls

    def expect(self, units: Iterable[int]) -> None:
        """``units`` are used next, in this order: read what of them is not here, as far as buffers allow."""
        with self._cond:
            self._expected.tell(units)
            self._pump()

    def has(self, unit: int) -> bool:
        """Whether all of the unit's bytes are here."""
        if self.complete:
            return True
        with self._cond:
            return all(
                (buffer := self._where.get(piece.rank)) is not None and buffer.ready
                for piece in self._units[unit]
            )

    def need(self, piece: Piece) -> torch.Tensor:
        """The piece's bytes (uint8, ``piece.nbytes`` of them), read first if need be; `used` ends their use.

        Raises WeightsError when they cannot be read; a later call tries again.
        """
        with self._cond:
            # Of a read ahead, and of one that fails while it is waited for: what is needed now is tried once more.
            self._failed.pop(piece.rank, None)
            ahead = self._where.get(piece.rank)
            self._expected.serving(piece)
            waiting: float | None = None
            try:
                while True:
                    buffer = self._where.get(piece.rank)
                    if ahead is not None and buffer is not ahead:
                        self._failed.pop(piece.rank, None)
                        ahead = None
                    if buffer is not None and buffer.ready:
                        buffer.busy = True
                        return buffer.block.data[: piece.nbytes]
                    waiting = waiting or time.perf_counter()
                    self._step(piece, buffer)
            finally:
                if waiting is not None:
                    self._totals.late_seconds += time.perf_counter() - waiting

    def used(self, piece: Piece, copied: Any) -> None:
        """Everything that reads the piece has been issued; ``copied`` is reached when it is over (None: nothing was)."""
        with self._cond:
            buffer = self._where[piece.rank]
            buffer.busy = False
            buffer.fresh = False
            buffer.copied = buffer.copied if copied is None else copied
            if self.complete:
                return
            self._expected.served(piece)
            if not self.buffers.whole:
                self._keeper.used(piece.rank, self._next_use)
            self._pump()

    def found(self, piece: Piece) -> Any:
        """What inspecting the bytes that `need` has handed out gave; call it before `used`."""
        with self._cond:
            return self._where[piece.rank].found

    def finds(self, unit: int) -> list[Any] | None:
        """What inspecting the unit's pieces gave, None where not all of them are here."""
        with self._cond:
            buffers = [self._where.get(piece.rank) for piece in self._units[unit]]
            here = [buffer for buffer in buffers if buffer is not None and buffer.ready]
            return [buffer.found for buffer in here] if len(here) == len(buffers) else None

    def distrust(self, unit: int) -> None:
        """What is here of the unit is not what it should be: when it is needed again, it is read again."""
        with self._cond:
            for piece in self._units[unit]:
                buffer = self._where.get(piece.rank)
                if buffer is not None and buffer.ready and not buffer.busy:
                    self._give_up(buffer)
                    self.complete = False

    def forget(self, piece: Piece) -> None:
        """The piece was handed out and not used after all."""
        with self._cond:
            buffer = self._where.get(piece.rank)
            if buffer is not None:
                buffer.busy = False

    def hold_back(self, nbytes: int) -> None:
        """Leave ``nbytes`` of the bound to others for now; not where each piece has a buffer of its own."""
        with self._cond:
            self._back = -(-nbytes // self.buffers.nbytes)
            self._pump()

    def shrink(self, nbytes: int) -> None:
        """Lower the bound by ``nbytes``, rounded up to whole buffers, and free the buffers above it; at least two remain.

        Waits for copies to the device that read a buffer before it is freed. Does nothing where every piece has a
        buffer of its own (``buffers.whole``).
        """
        with self._cond:
            if self.buffers.whole:
                return
            count = max(LEAST_BUFFERS, self.buffers.count - -(-nbytes // self.buffers.nbytes))
            self._limit = min(self._limit, count)
            self.buffers = replace(self.buffers, count=count)
            self._keeper.room = max(0, count - self.buffers.rotating)
            while len(self._buffers) > self._limit and not self._closed:
                idle = [
                    b for b in self._buffers if (b.ready or b.piece is None) and not b.busy and not b.left
                ]
                if not idle:
                    self._cond.wait(_NAP)
                    continue
                last = max(idle, key=lambda b: NEVER if b.piece is None else self._next_use(b.piece.rank))
                if last.copied is not None:
                    self._settle(last.copied)
                if last.piece is not None:
                    self._give_up(last)
                self._buffers.remove(last)
                self._totals.held_bytes -= self.buffers.nbytes
                last.block.unpin()

    def figures(self) -> CacheFigures:
        with self._cond:
            return self._totals.figures()

    def reads(self) -> list[tuple[str, float, float, int]]:
        """The latest reads: what, start and end on the host's clock (perf_counter), bytes."""
        with self._cond:
            return list(self._totals.spans)

    def total_read(self) -> int:
        """Bytes read so far."""
        return self._totals.read_bytes

    @property
    def limit_bytes(self) -> int:
        """What the buffers may come to hold."""
        if self.buffers.whole:
            return sum(piece.nbytes for pieces in self._units for piece in pieces)
        return self.buffers.count * self.buffers.nbytes

    def close(self) -> None:
        """Cancel reads and give the memory back. The device has finished with it before this is called."""
        with self._cond:
            self._closed = True
            self._cond.notify_all()
        self._reader.close()
        if self._inspectors is not None:
            self._inspectors.close()
        with self._cond:
            for buffer in self._buffers:
                buffer.block.unpin()
                # What was cancelled knows its buffer: its memory must not wait for the garbage collector.
                buffer.error, buffer.handles = None, []
            self._buffers.clear()
            self._where.clear()
            self._totals.held_bytes = 0

    # -- one step of a wait, under the condition

    def _step(self, piece: Piece, buffer: Buffer | None) -> None:
        if self._closed:
            raise CaromError("the session was closed while a weight was read from disk")
        error = self._failed.pop(piece.rank, None) or self._broken
        if error is not None:
            # Another object each time: a traceback on one that is kept would keep the model's frames.
            raise type(error)(*error.args) from error
        if buffer is None:
            found = self._room_for(piece, -1.0, demanded=True)
            if found is not None:
                self._read(piece, found, priority=-1.0)
                return
            kept = [b for b in self._buffers if (b.ready or b.piece is None) and not b.busy]
            copying = [b for b in kept if b.copied is not None]
            if copying and not self._totals.reading and not self._looking:
                oldest = min(copying, key=lambda b: b.arrival)
                self._settle(oldest.copied)
                oldest.copied = None
                return
            self._withdraw()
        elif buffer.handles and buffer.handles[0].priority > -1.0:
            for handle in buffer.handles:
                self._reader.reprioritise(handle, -1.0)
        self._pump()
        under_way = any(b.copied is not None for b in self._buffers)
        self._cond.wait(_POLL if under_way else _NAP)

    def _withdraw(self) -> None:
        """All buffers are being read into, and none for what is needed now: the order was a surprise."""
        reading = [b for b in self._buffers if b.piece is not None and not b.ready]
        if len(reading) == len(self._buffers):
            last = max(reading, key=lambda b: self._next_use(b.piece.rank if b.piece else 0))
            for handle in last.handles:
                handle.cancel()

    # -- choosing

    def _next_use(self, rank: int) -> float:
        """As `Expected.when`, of the piece ``rank`` where it is here."""
        buffer = self._where.get(rank)
        piece = buffer.piece if buffer is not None else None
        return NEVER if piece is None else self._expected.when(piece)

    def _pump(self) -> None:
        """Start reads, soonest needed first, while there is room that is needed later."""
        if self._closed or len(self._where) >= self._total:
            return
        for when, piece in self._expected.coming(self._where, self._failed):
            buffer = self._room_for(piece, when)
            if buffer is None:
                return
            self._read(piece, buffer, when)

    def _room_for(self, piece: Piece, when: float, demanded: bool = False) -> Buffer | None:
        """A buffer that may be overwritten for ``piece``, needed at ``when``; None when there is none yet."""
        lacking = demanded and all(b.block.data.numel() < piece.nbytes for b in self._buffers)
        if len(self._buffers) < self._limit - self._back or lacking:
            try:
                return self._new_buffer(piece)
            except MemoryError:
                if lacking:
                    raise
                self._limit = len(self._buffers)  # the system has no more: go on with what there is
        free: dict[int, Buffer] = {}
        taken: dict[int, Buffer] = {}  # only for what is needed at once
        for buffer in self._buffers:
            if buffer.block.data.numel() < piece.nbytes:
                continue
            if buffer.piece is None:
                if buffer.left == 0 and not buffer.busy and self._idle(buffer):
                    return buffer
                continue
            if not buffer.ready or buffer.busy:
                continue
            rank = buffer.piece.rank
            kept = rank in self._keeper.kept or (buffer.fresh and self._keeper.eviction == "fifo")
            if kept and not demanded:  # first: with much RAM that is most of them
                continue
            if self._next_use(rank) <= when or not self._idle(buffer):
                continue
            (taken if kept else free)[rank] = buffer
        if not free and demanded:
            free = taken
        if not free:
            return None
        rank = self._keeper.choose(free, self._next_use, lambda r: free[r].arrival)
        buffer = free[rank]
        self._give_up(buffer)
        return buffer

    def _idle(self, buffer: Buffer) -> bool:
        """Whether no copy to the device reads the buffer any more."""
        if buffer.copied is not None and self._landed(buffer.copied):
            buffer.copied = None
        return buffer.copied is None

    def _give_up(self, buffer: Buffer) -> None:
        assert buffer.piece is not None
        del self._where[buffer.piece.rank]
        self._keeper.gone(buffer.piece.rank)
        buffer.piece, buffer.ready = None, False

    def _new_buffer(self, piece: Piece) -> Buffer:
        nbytes = piece.nbytes if self.buffers.whole else self.buffers.nbytes
        buffer = Buffer(self._arena.allocate(nbytes), self._arrivals)
        self._buffers.append(buffer)
        self._totals.held_bytes += nbytes
        return buffer

    # -- reading

    def _read(self, piece: Piece, buffer: Buffer, priority: float) -> None:
        self._arrivals += 1
        buffer.piece, buffer.ready, buffer.fresh, buffer.error, buffer.found = piece, False, True, None, None
        buffer.arrival, buffer.left, buffer.handles = self._arrivals, max(1, len(piece.reads)), []
        buffer.began = time.perf_counter()
        self._where[piece.rank] = buffer
        self._totals.begins(buffer.began)
        if not piece.reads:  # padding only
            self._read_done(buffer, None)
            return
        memory = as_bytes(buffer.block.data)
        for read in piece.reads:
            handle = self._reader.submit_range(
                read.file, read.offset, read.nbytes, memory[read.at : read.at + read.nbytes],
                what=read.what, priority=priority,
            )  # fmt: skip
            buffer.handles.append(handle)
        for handle in list(buffer.handles):
            handle.add_done_callback(functools.partial(self._read_done, buffer))

    def _read_done(self, buffer: Buffer, handle: SubmittedRead | None) -> None:
        """One of the buffer's reads is over (on a reader's thread, or at once on ours)."""
        error = _error_of(handle)
        with self._cond:
            if error is not None and buffer.error is None:
                buffer.error = error
                for other in buffer.handles:
                    other.cancel()
            buffer.left -= 1
            if buffer.left:
                return
            first, buffer.pinned = not buffer.pinned, True
        if first and not self._closed:
            try:
                self._arena.pin(buffer.block)  # takes milliseconds: not under the lock
            except Exception as failure:  # a reader's thread must live on; who needs the bytes is told
                error = failure.with_traceback(None)
        with self._cond:
            buffer.error = buffer.error or error
            piece, now = buffer.piece, time.perf_counter()
            assert piece is not None
            self._totals.ends(now)
            if buffer.error is None:
                self._totals.came(piece, buffer.began, now)
                if self._inspectors is not None and not self._closed:
                    try:
                        self._inspectors.look(buffer, self._looked)
                    except RuntimeError as failure:  # the interpreter ends
                        buffer.error = failure
                    else:
                        self._looking, buffer.handles = self._looking + 1, []
                        return
            self._arrived(buffer)

    def _looked(self, buffer: Buffer) -> None:
        """The buffer's bytes were inspected (on an inspector's thread)."""
        with self._cond:
            self._looking -= 1
            self._arrived(buffer)

    def _arrived(self, buffer: Buffer) -> None:
        """Under the condition: the buffer's piece is there, or could not be had."""
        piece = buffer.piece
        assert piece is not None
        if buffer.error is not None:
            self._give_up(buffer)
            if not isinstance(buffer.error, CancelledError):
                self._failed[piece.rank] = buffer.error
        else:
            buffer.ready = True
        buffer.handles = []
        busy = self._totals.reading or self._looking
        if self.buffers.whole and not busy and len(self._where) == self._total:
            self.complete = True
        try:
            self._pump()
        except BaseException as failure:  # noqa: BLE001 - a reader's thread must live on; who needs bytes is told
            self._broken = failure
        self._cond.notify_all()


def _error_of(handle: SubmittedRead | None) -> BaseException | None:
    try:
        return None if handle is None else handle.exception(0)
    except (CancelledError, TimeoutError) as error:
        return error.with_traceback(None)  # its frames would keep the buffer
