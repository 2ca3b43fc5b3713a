"""Defines `ResidentLoader`: loads the weights of a file that stay on the device (residents), on first use,
with disk read-ahead.

A session can run at once, whatever the model's size. Until its bytes are loaded, a resident tensor has a
class of `model.arriving_tensor`, which loads the bytes on first use. All code here runs under the streamer's
lock, except the reader's threads, which take no lock. A load is a group of tensors that are loaded together.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..checkpoint.direct_io import ALIGN as PAGE
from ..checkpoint.disk_reader import DiskReader
from ..checkpoint.file_read import ReadTarget
from ..checkpoint.read_handle import SubmittedRead
from ..common.errors import CaromError
from ..common.sizes import MIB
from ..device.engine import Engine
from ..device.staging import Staging
from ..host.arena import Block, HostArena
from ..host.cache_pieces import CachePiece
from ..metrics.meter import Meter
from ..model import managed_tensor
from ..model.arriving_tensor import clear_pending, mark_pending
from ..model.compiling import quiet, untraced
from ..model.interpose import Wrapped
from ..plan.residency import round_up
from .resident_loads import Load, PackedLoad

logger = logging.getLogger("carom")
OutOfMemory: Any = getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError)
_STAGING = 16 * MIB  # bytes of each pinned staging buffer between disk and device
_BUFFERS = 4
# Bytes of one read call. The value is small, because the reader of the host cache has buffers of its own at
# the same time.
_CHUNK = 4 * MIB
_SPANS = 4096  # number of latest reads that are kept for the timeline


@dataclass(eq=False)
class _Staged:
    """A pinned staging buffer in host memory.

    ``item``, ``piece``: the load and its piece that is being read into the buffer.
    ``handles``: the reads of the piece.
    ``copied``: the event of the last copy from the buffer to the device.
    """

    block: Block
    item: Load | None = None
    piece: CachePiece | None = None
    handles: list[SubmittedRead] = field(default_factory=list)
    copied: Any = None


class ResidentLoader:
    """The queued loads of one layout's residents, in the order in which their units are expected to be used.

    ``staging_bytes``: host memory of the staging buffers.
    ``temporary_bytes``: device memory that is allocated until everything is loaded, because packed loads are
    decoded and the streamer has no staging memory.
    ``read_bytes``: bytes read from disk.
    ``late_seconds``: time that host threads waited.
    ``spans``: recent reads as (label, start, end, bytes).
    """

    def __init__(self, engine: Engine, arena: HostArena) -> None:
        self._engine, self._arena = engine, arena
        # Both are replaced by the streamer's in `attach_streamer`.
        self._lock, self._meter = threading.RLock(), Meter(engine)
        self._queue: deque[Load] = deque()
        self._pending: dict[int, Load] = {}
        self._free: deque[_Staged] = deque()
        self._submitted: deque[_Staged] = deque()
        self._reader: DiskReader | None = None
        self._wrapped = Wrapped()
        self._on_finished: Callable[[], None] = lambda: None
        self._passes_begun = 0  # number of root forwards so far
        self._closed = False
        self.staging_bytes = 0
        self.read_bytes = 0
        self.late_seconds = 0.0  # time that host threads waited for loads
        self.spans: deque[tuple[str, float, float, int]] = deque(maxlen=_SPANS)
        self._staging: Staging | None = None
        self._sizes = (0, 0)  # bytes of each staging buffer, and their number
        self.temporary_bytes = 0

    @property
    def wanted(self) -> bool:
        """Whether any load has to be read from disk."""
        return any(item.fresh for item in self._pending.values())

    @property
    def packs(self) -> bool:
        """Whether any load could be copied to the device packed and decoded there, which needs staging memory."""
        return any(item.wire is not None and not item.stays_packed for item in self._pending.values())

    @property
    def waiting(self) -> bool:
        """Whether any load is not complete on the device yet."""
        return bool(self._pending)

    def add(self, item: Load) -> None:
        """Queue a load. Nothing is read before `start`."""
        self._pending[id(item)] = item
        if item.modules:
            self._queue.append(item)
        else:
            self._queue.appendleft(item)
        for tensor in item.tensors:
            mark_pending(tensor, functools.partial(self.load, item))

    def choose_buffers(self, budget: int, share: int, least: int = 0) -> tuple[int, int]:
        """Return (bytes, count) of the staging buffers to allocate.

        Each buffer takes at most ``budget // share`` bytes, but at least ``least``. Returns (0, 0) if that is
        less than one page.
        """
        largest = max((item.nbytes for item in self._pending.values()), default=0)
        size = max(least, min(_STAGING, round_up(largest, PAGE), budget // share // PAGE * PAGE))
        return (size, min(_BUFFERS, budget // size)) if 0 < size <= budget else (0, 0)

    def attach_streamer(self, lock: threading.RLock, meter: Meter) -> None:
        """Use the streamer's lock and meter from now on."""
        self._lock, self._meter = lock, meter

    def start(
        self,
        reader: Callable[[int], DiskReader],
        size: int,
        count: int,
        on_finished: Callable[[], None],
        staging: Staging | None = None,
    ) -> None:
        """Begin to read through ``count`` staging buffers of ``size`` bytes.

        ``reader``: makes a disk reader.
        ``on_finished``: called when everything is loaded and the buffers are released.
        ``staging``: device memory from which packed bytes are decoded, None if nothing is decoded on the
        device.
        """
        if staging is None and self.temporary_bytes and self.packs:
            with contextlib.suppress(OutOfMemory):  # without staging memory, the host decodes
                staging = Staging(self._engine, self.temporary_bytes)
                self._engine.synchronize()  # other streams may still use memory that the allocator reused
        self.temporary_bytes = 0 if staging is None else self.temporary_bytes
        self._on_finished, self._staging = on_finished, staging
        for item in list(self._queue):
            if item.fresh:
                item.cut(size, 0 if staging is None else staging.nbytes)
            if not item.pieces_left:
                self._mark_loaded(item)
        count = min(count, sum(item.pieces_left for item in self._queue))
        self._allocate(size, count)
        if count:
            self._reader = reader(min(size, _CHUNK))
            self._submit_reads()
        if not self._pending:
            self._finish()

    def _allocate(self, size: int, count: int) -> None:
        """Allocate and pin ``count`` staging buffers of ``size`` bytes, in place of those that there are."""
        for staged in (*self._free, *self._submitted):
            staged.block.unpin()
        self._submitted.clear()
        self._free = deque(_Staged(self._arena.allocate(size)) for _ in range(count))
        self._sizes, self.staging_bytes = (size, count), count * size
        for staged in self._free:
            self._arena.pin(staged.block)

    def recover(self) -> None:
        """Begin the loads that are not complete anew, after an interrupt. Called while the device is idle.

        The interrupt may have come between any two steps of a read, so no read and no buffer is used further.
        """
        if self._closed or not self.staging_bytes:
            return
        for handle in [handle for staged in self._submitted for handle in staged.handles]:
            handle.cancel()
        if self._staging is not None:
            self._staging.clear()
        self._pending = {key: item for key, item in self._pending.items() if not item.loaded}
        if not self._pending:
            self._finish()
            return
        self._queue = deque(sorted(self._pending.values(), key=lambda item: bool(item.modules)))
        for item in self._queue:
            item.restart()
        self._allocate(*self._sizes)

    def wrap_forwards(self) -> None:
        """Wrap the forwards of modules whose weights are not loaded yet. The wrapper loads a unit when one of
        its modules runs.
        """
        for item in self._pending.values():
            for module in item.modules:
                self._wrapped.forward(module, resident_forward(self, item))

    def begin_pass(self, everything: bool) -> None:
        """Load the residents that do not belong to a single unit. Called at the start of a root forward.

        Everything is loaded from the second forward on, or if ``everything``.
        """
        self._passes_begun += 1
        for item in list(self._pending.values()):
            if everything or self._passes_begun > 1 or not item.modules:
                self.load(item)

    # -- loading

    def load(self, item: Load) -> None:
        """Wait until ``item`` is on the device. Raises WeightsError if reading fails; a later call tries
        again.
        """
        if item.loaded:
            return
        # Disable dispatch modes (fake tensors, operator counters, the simulated device), which must not see
        # Carom's copies.
        if torch._C._len_torch_dispatch_stack():
            with _disable_current_modes():
                self._load_locked(item)
        else:
            self._load_locked(item)

    def _load_locked(self, item: Load) -> None:
        """Load ``item`` under the lock, and record the waiting time. Raises CaromError if the session was
        closed.
        """
        with self._lock, torch.inference_mode(False), torch.no_grad():
            if item.loaded:
                return
            if self._closed or self._reader is None:
                raise CaromError(f"{item.name!r} is needed, but its session was closed before it was read")
            before, began = (self._engine.mark() if self._meter.timing else None), time.perf_counter()
            self._withdraw_failed()
            self._move_to_front(item)
            self._withdraw_earlier_packed(item)
            if item.packed is None:
                while item.pieces_left:
                    self._submit_reads()
                    self._copy_next_piece()
            else:
                self._load_packed(item, item.packed)
            self.late_seconds += time.perf_counter() - began
            if before is not None:
                self._meter.waited(before, self._engine.mark(), item.name, managed_tensor.in_backward())
            if self._pending:
                self._submit_reads()  # read the next load ahead
            else:
                self._finish()

    def _load_packed(self, item: Load, packed: PackedLoad) -> None:
        """Load a packed item as a whole: copy its pieces to staging memory, and decode them. The pieces of an
        item that stays packed are copied to its buffer.

        Staging memory is reserved only during this call. So after a failure the load starts again from its
        first piece.
        """
        if packed.decoder is None:
            packed.landing, packed.after = item.buffer, []
        else:
            assert self._staging is not None
            packed.landing, packed.after = self._staging.take(packed.nbytes)
        try:
            while item.pieces_left:
                self._submit_reads()
                self._copy_next_piece()
        except BaseException:
            for submitted in reversed(list(self._submitted)):
                self._withdraw(submitted)
            item.restart()
            self._move_to_front(item)
            raise
        finally:
            packed.landing = None

    def _withdraw_earlier_packed(self, item: Load) -> None:
        """Withdraw submitted pieces of other packed loads that would be copied before the last piece of
        ``item``.

        All pieces of a packed load have to be copied within one call of `load`. The withdrawn pieces are
        submitted again later.
        """
        submitted = list(self._submitted)
        mine = [place for place, staged in enumerate(submitted) if staged.item is item]
        before = submitted if item.pieces else submitted[: max(mine, default=0)]
        for other in reversed(before):
            if other.item is not item and other.item is not None and other.item.packed is not None:
                self._withdraw(other)
        self._move_to_front(item)

    def _unpack(self, item: Load, packed: PackedLoad, copied: Any) -> Any:
        """Verify the checksums of a load whose pieces are all on the device, and decode the pieces unless they
        stay packed. Returns the event at the end of the work.

        ``copied``: the event of the copy of the last piece.
        """
        assert packed.landing is not None
        if self._staging is not None and packed.decoder is not None:
            self._staging.release_after(copied)
        packed.checks.verify(0, [packed.found[piece.rank] for piece in packed.pieces])
        if packed.decoder is None:
            return copied
        assert self._staging is not None
        event, _ = self._engine.decode(packed.decoder, packed.landing, item.buffer, (copied,), False)
        self._staging.release_after(event)
        return event

    def _move_to_front(self, item: Load) -> None:
        """Make ``item`` the first load of the queue."""
        if self._queue and self._queue[0] is item:
            return
        if item in self._queue:
            self._queue.remove(item)
        self._queue.appendleft(item)

    def _submit_reads(self) -> None:
        """Submit disk reads for every free staging buffer."""
        assert self._reader is not None
        while self._free:
            while self._queue and not self._queue[0].pieces:
                self._queue.popleft()
            if not self._queue:
                return
            staged, item = self._free[0], self._queue[0]
            if staged.copied is not None:
                self._engine.synchronize(staged.copied)
                staged.copied = None
            piece = item.pieces[0]
            staged.item, staged.piece = item, piece
            staged.handles = self._reader.submit_reads(piece.reads, ReadTarget.of(staged.block.data))
            item.pieces.popleft()
            self._submitted.append(self._free.popleft())
            record_span = self._span_recorder(time.perf_counter())
            for handle in staged.handles:
                handle.add_done_callback(record_span)

    def _withdraw_failed(self) -> None:
        """Withdraw submitted pieces whose read-ahead failed, so that they are read again.

        No local variable may keep a reference to a buffer after the call.
        """
        for submitted in reversed(list(self._submitted)):
            if any(handle.done() and handle.exception() is not None for handle in submitted.handles):
                self._withdraw(submitted)

    def _withdraw(self, staged: _Staged) -> None:
        """Cancel the reads of a submitted piece, and put the piece back at the front of its load."""
        for handle in staged.handles:
            handle.cancel()
        for handle in staged.handles:
            handle.wait()
        item, piece = staged.item, staged.piece
        assert item is not None and piece is not None
        item.pieces.appendleft(piece)
        self._move_to_front(item)
        self._submitted.remove(staged)
        self._free.append(staged)

    def _span_recorder(self, began: float) -> Callable[[SubmittedRead], None]:
        """Return a callback that records a finished read for the timeline. ``began``: when the read began
        (perf_counter, seconds).
        """
        return lambda handle: self.spans.append(
            (handle.label, began, time.perf_counter(), handle.nbytes - handle.from_memory)
        )

    def _copy_next_piece(self) -> None:
        """Wait for the reads of the piece that was submitted first, and copy that piece to the device."""
        staged = self._submitted[0]
        item, piece = staged.item, staged.piece
        assert item is not None and piece is not None
        try:
            for handle in staged.handles:
                handle.result()
            source, to, after = staged.block.data[: piece.nbytes], item.buffer, list[Any]()
            if item.packed is not None:
                assert item.packed.landing is not None
                item.packed.found[piece.rank] = item.packed.checks.checksum(piece, source)
                to, after, item.packed.after = item.packed.landing, item.packed.after, []
            staged.copied, _ = (item.engine or self._engine).copy_in(
                to[piece.start : piece.start + piece.nbytes], source, after, False
            )
        except BaseException:
            # Other submitted reads may fail in the same way. Withdraw all of them, so that the next call
            # starts with new reads.
            for submitted in reversed(list(self._submitted)):
                self._withdraw(submitted)
            self._move_to_front(item)
            raise
        self._free.append(self._submitted.popleft())
        self.read_bytes += sum(read.disk_bytes for read in piece.reads)
        self.read_bytes -= sum(handle.from_memory for handle in staged.handles)
        item.pieces_left -= 1
        if not item.pieces_left:
            event = staged.copied
            if item.packed is not None:
                event = self._unpack(item, item.packed, event)
            # Let the host wait for the copy. Kernels on any stream may then read the tensors without waiting
            # for an event.
            self._engine.synchronize(event)
            self._mark_loaded(item)

    def _mark_loaded(self, item: Load) -> None:
        """Set the class of the tensors of ``item`` back to their own, now that their bytes are on the device."""
        with torch.inference_mode(False), torch.no_grad():
            for tensor in item.tensors:
                clear_pending(tensor)
            item.arrived()
        item.loaded = True
        del self._pending[id(item)]

    # -- the end of a pass, and closing

    def end_pass(self) -> None:
        """Remove the forward wrappers if everything is loaded. Called after a root forward has succeeded.

        Wrappers are not removed during a pass, because a pass that runs out of memory may run again.
        """
        if not self._pending:
            self._wrapped.undo()

    def _finish(self) -> None:
        """Release the buffers and report that everything is loaded."""
        self._release_buffers()
        self._on_finished()
        self.staging_bytes = 0

    def _release_buffers(self) -> None:
        """Close the readers, and unpin the staging buffers after their copies have ended."""
        self._staging, self.temporary_bytes = None, 0
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        for staged in (*self._free, *self._submitted):
            if staged.copied is not None:
                self._engine.synchronize(staged.copied)
            staged.block.unpin()
        self._free.clear()
        self._submitted.clear()

    def close(self) -> None:
        """Abandon loads that are not complete, and release all memory. Idempotent."""
        with self._lock:
            self._closed = True
            self._wrapped.undo()
            self._release_buffers()
            for item in self._pending.values():
                for tensor in item.tensors:
                    clear_pending(tensor)
            # Release the loads now: code that still refers to the session must not keep their device memory.
            self._pending.clear()
            self._queue.clear()


def resident_forward(residents: ResidentLoader, item: Load) -> Callable[[Callable], Callable]:
    """Return a wrapper for a module's forward that loads ``item`` first if its bytes are not on the device."""
    load_now = quiet(residents.load)

    def make(inner: Callable) -> Callable:
        @untraced
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not item.loaded:
                load_now(item)
            return inner(*args, **kwargs)

        return forward

    return make
