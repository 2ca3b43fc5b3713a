"""Resident weights of a file on their way to the device: read ahead from the start, brought when they are first used.

A session is ready at once, whatever the model's size. Until its bytes are there a resident tensor is what `pending` makes it.
Everything here runs under the streamer's lock, but for the reader's threads, which take none.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from . import ops
from .disk_direct import DirectLoads, try_direct
from .errors import CaromError, WeightsError
from .hooks import Wrapped, resident_forward
from .loads import Load, PackedLoad
from .meter import Meter
from .pending import unwear, wear
from .plan import round_up
from .sizes import MIB
from .staging import Staging
from .store.arena import Block, HostArena
from .store.handle import SubmittedRead
from .store.pieces import Piece
from .store.rawio import ALIGN as PAGE
from .store.reader import DiskReader
from .transfer import Engine

logger = logging.getLogger("carom")
_STAGING = 16 * MIB  # bytes of one of the buffers that residents pass through
_BUFFERS = 4
_CHUNK = 4 * MIB  # bytes of one read call: workers of two readers have buffers of their own meanwhile
_SPANS = 4096  # reads remembered for the timeline


@dataclass(eq=False)
class _Staged:
    block: Block
    load: Load | None = None
    piece: Piece | None = None
    handles: list[SubmittedRead] = field(default_factory=list)
    copied: Any = None  # its last copy to the device is over


class Residents:
    """The loads of one attachment, in the order in which their units are expected."""

    def __init__(self, engine: Engine, arena: HostArena) -> None:
        self._engine, self._arena = engine, arena
        self._lock, self._meter = threading.RLock(), Meter(engine)  # the streamer's, once there is one
        self._queue: deque[Load] = deque()
        self._pending: dict[int, Load] = {}
        self._free: deque[_Staged] = deque()
        self._asked: deque[_Staged] = deque()
        self._reader: DiskReader | None = None
        self._wrapped = Wrapped()
        self._over: Callable[[], None] = lambda: None
        self._begun = 0  # root forwards
        self._closed = False
        self.staging_bytes = 0
        self.read_bytes = 0
        self.late_seconds = 0.0  # while a host thread waited
        self.spans: deque[tuple[str, float, float, int]] = deque(maxlen=_SPANS)
        self._direct: DirectLoads | None = None
        self._staging: Staging | None = None
        self.notes: list[str] = []

    @property
    def wanted(self) -> bool:
        """Whether anything is to be read."""
        return any(load.fresh for load in self._pending.values())

    @property
    def packs(self) -> bool:
        """Whether anything could cross packed."""
        return any(load.wire is not None for load in self._pending.values())

    @property
    def waiting(self) -> bool:
        """Whether something is not on the device yet."""
        return bool(self._pending)

    def add(self, load: Load) -> None:
        """Take a load; nothing is read before `start`."""
        self._pending[id(load)] = load
        if load.modules:
            self._queue.append(load)
        else:
            self._queue.appendleft(load)
        for tensor in load.tensors:
            wear(tensor, self, load)

    def size_for(self, budget: int, share: int, least: int = 0) -> tuple[int, int]:
        """(bytes, count) of staging buffers, each a ``share``-th of ``budget`` bytes or less, but not less than ``least``;
        (0, 0) where that is no page."""
        largest = max((load.nbytes for load in self._pending.values()), default=0)
        size = max(least, min(_STAGING, round_up(largest, PAGE), budget // share // PAGE * PAGE))
        return (size, min(_BUFFERS, budget // size)) if 0 < size <= budget else (0, 0)

    def join(self, lock: threading.RLock, meter: Meter) -> None:
        """The streamer is there: its lock is taken from here on, and its meter told of waits."""
        self._lock, self._meter = lock, meter

    def start(
        self,
        reader: Callable[[int], DiskReader],
        size: int,
        count: int,
        over: Callable[[], None],
        staging: Staging | None = None,
    ) -> None:
        """Begin to read through ``count`` buffers of ``size`` bytes; ``over`` is called when their memory is free again.
        ``staging``: device memory from which packed bytes are decoded."""
        self._over, self._staging = over, staging
        for load in list(self._queue):
            if load.fresh:
                load.cut(size, 0 if staging is None else staging.nbytes)
            if not load.left:
                self._arrive(load)
        count = min(count, sum(load.left for load in self._queue))
        self._free.extend(_Staged(self._arena.allocate(size)) for _ in range(count))
        self.staging_bytes = count * size
        if count:
            self._reader = reader(min(size, _CHUNK))
            for staged in self._free:
                self._arena.pin(staged.block)
            blocks = [staged.block.data for staged in self._free]
            if not any(load.packed for load in self._queue):
                self._direct = try_direct(self._engine, self._reader, self._queue, blocks)
            if self._direct is not None:
                self.notes.append("resident weights are read past host memory (GPUDirect Storage)")
            self._ask()
        if not self._pending:
            self._end()

    def stand_in_front(self) -> None:
        """Bring each unit's bytes when one of its modules runs, until all are there."""
        for load in self._pending.values():
            for module in load.modules:
                self._wrapped.forward(module, resident_forward(self, load))

    def begins(self, everything: bool) -> None:
        """A root forward begins: what it may need anywhere is brought, from the second on all that is left."""
        self._begun += 1
        for load in list(self._pending.values()):
            if everything or self._begun > 1 or not load.modules:
                self.bring(load)

    # -- bringing

    def bring(self, load: Load) -> None:
        """Wait until the load is on the device. Raises WeightsError when it cannot be read; a later call tries again."""
        if load.here:
            return
        # Fake tensors, counters, the simulated device's watch: our copies are none of their business.
        if torch._C._len_torch_dispatch_stack():
            with _disable_current_modes():
                self._bring(load)
        else:
            self._bring(load)

    def _bring(self, load: Load) -> None:
        with self._lock, torch.inference_mode(False), torch.no_grad():
            if load.here:
                return
            if self._closed or self._reader is None:
                raise CaromError(f"{load.name!r} is needed, but its session was closed before it was read")
            before, began = (self._engine.mark() if self._meter.timing else None), time.perf_counter()
            self._withdraw_failed()
            self._first(load)
            self._clear_the_way(load)
            if self._direct is not None:
                self._bring_directly(load)
            if load.packed is None:
                while load.left:
                    self._ask()
                    self._land()
            else:
                self._bring_packed(load, load.packed)
            self.late_seconds += time.perf_counter() - began
            if before is not None:
                self._meter.waited(before, self._engine.mark(), load.name, ops.in_backward())
            if self._pending:
                self._ask()  # what comes next is read meanwhile
            else:
                self._end()

    def _bring_packed(self, load: Load, packed: PackedLoad) -> None:
        """Nothing else lands packed meanwhile, and where it fails, it begins again: the memory is lent for this call."""
        assert self._staging is not None
        packed.landing, packed.after = self._staging.take(packed.nbytes)
        try:
            while load.left:
                self._ask()
                self._land()
        except BaseException:
            for asked in reversed(list(self._asked)):
                self._withdraw(asked)
            load.pieces, load.left = deque(packed.pieces), len(packed.pieces)
            self._first(load)
            raise
        finally:
            packed.landing = None

    def _clear_the_way(self, load: Load) -> None:
        """Packed pieces of other loads that would land before the last of this one's are asked for again when their turn
        comes: those of a load land in one go."""
        asked = list(self._asked)
        mine = [place for place, staged in enumerate(asked) if staged.load is load]
        before = asked if load.pieces else asked[: max(mine, default=0)]
        for other in reversed(before):
            if other.load is not load and other.load is not None and other.load.packed is not None:
                self._withdraw(other)
        self._first(load)

    def _unpack(self, load: Load, packed: PackedLoad, copied: Any) -> Any:
        """All of the load's pieces have been copied to the device, the last one by ``copied``: the event that ends it."""
        assert self._staging is not None and packed.landing is not None
        self._staging.given(copied)
        packed.checks.judge(0, [packed.found[piece.rank] for piece in packed.pieces])
        event, _ = self._engine.decode(packed.decoder, packed.landing, load.buffer, (copied,), False)
        self._staging.given(event)
        return event

    def _first(self, load: Load) -> None:
        if self._queue and self._queue[0] is load:
            return
        if load in self._queue:
            self._queue.remove(load)
        self._queue.appendleft(load)

    def _ask(self) -> None:
        """Start reads into every buffer that is free."""
        assert self._reader is not None
        if self._direct is not None:
            return
        while self._free:
            while self._queue and not self._queue[0].pieces:
                self._queue.popleft()
            if not self._queue:
                return
            staged, load = self._free[0], self._queue[0]
            if staged.copied is not None:
                self._engine.synchronize(staged.copied)
                staged.copied = None
            piece = load.pieces[0]
            staged.load, staged.piece = load, piece
            staged.handles = [
                self._reader.submit_range(
                    read.file, read.offset, read.nbytes, staged.block.data[read.at : read.at + read.nbytes],
                    what=read.what,
                )
                for read in piece.reads
            ]  # fmt: skip
            load.pieces.popleft()
            self._asked.append(self._free.popleft())
            noted = self._noted(time.perf_counter())
            for handle in staged.handles:
                handle.add_done_callback(noted)

    def _withdraw_failed(self) -> None:
        """What failed before anybody needed it is tried anew. (No name outlives this that would hold a buffer.)"""
        for asked in reversed(list(self._asked)):
            if any(handle.done() and handle.exception() is not None for handle in asked.handles):
                self._withdraw(asked)

    def _withdraw(self, staged: _Staged) -> None:
        """Take back what was asked for: its piece is to be asked for again."""
        for handle in staged.handles:
            handle.cancel()
        for handle in staged.handles:
            handle.wait()
        load, piece = staged.load, staged.piece
        assert load is not None and piece is not None
        load.pieces.appendleft(piece)
        self._first(load)
        self._asked.remove(staged)
        self._free.append(staged)

    def _noted(self, began: float) -> Callable[[SubmittedRead], None]:
        return lambda handle: self.spans.append((handle.what, began, time.perf_counter(), handle.nbytes))

    def _land(self) -> None:
        """Copy the piece that was asked for first to the device, once it is read."""
        staged = self._asked[0]
        load, piece = staged.load, staged.piece
        assert load is not None and piece is not None
        try:
            for handle in staged.handles:
                handle.result()
            source, to, after = staged.block.data[: piece.nbytes], load.buffer, list[Any]()
            if load.packed is not None:
                assert load.packed.landing is not None
                load.packed.found[piece.rank] = load.packed.checks.look(piece, source)
                to, after, load.packed.after = load.packed.landing, load.packed.after, []
            staged.copied, _ = self._engine.copy_in(
                to[piece.start : piece.start + piece.nbytes], source, after, False
            )
        except BaseException:
            for asked in reversed(
                list(self._asked)
            ):  # nothing that fails as well may be left for the next who asks
                self._withdraw(asked)
            self._first(load)
            raise
        self._free.append(self._asked.popleft())
        self.read_bytes += sum(read.disk_bytes for read in piece.reads)
        load.left -= 1
        if not load.left:
            event = staged.copied
            if load.packed is not None:
                event = self._unpack(load, load.packed, event)
            # The host waits for the copy alone, which no kernel holds up: any stream may read from here on.
            self._engine.synchronize(event)
            self._arrive(load)

    def _bring_directly(self, load: Load) -> None:
        """This load past host memory, with the next one on its way; where that fails the staging buffers take over."""
        assert self._direct is not None
        ahead = [other for other in self._queue if other is not load and other.pieces]
        try:
            began = self._direct.bring([load, *ahead[:1]])
        except WeightsError:
            raise
        except Exception as error:
            logger.warning("carom: GPUDirect Storage failed and is not used any more: %s", str(error))
            self._direct.close()
            self._direct = None
            return
        nbytes = sum(read.nbytes for piece in load.pieces for read in piece.reads)
        self.spans.append((load.name, began, time.perf_counter(), nbytes))
        self.read_bytes += nbytes
        load.pieces.clear()
        load.left = 0
        self._arrive(load)

    def _arrive(self, load: Load) -> None:
        with torch.inference_mode(False), torch.no_grad():
            for tensor in load.tensors:
                unwear(tensor)
            load.arrived()
        load.here = True
        del self._pending[id(load)]

    # -- end

    def pass_ended(self) -> None:
        """A root forward ended well: hooks that are not needed any more go. Not in a pass, which may have to run again."""
        if not self._pending:
            self._wrapped.undo()

    def _end(self) -> None:
        self._give_back()
        self._over()
        self.staging_bytes = 0

    def _give_back(self) -> None:
        self._staging = None
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        if self._direct is not None:
            self._direct.close()
            self._direct = None
        for staged in (*self._free, *self._asked):
            if staged.copied is not None:
                self._engine.synchronize(staged.copied)
            staged.block.unpin()
        self._free.clear()
        self._asked.clear()

    def close(self) -> None:
        """Give up what is not there yet, and the memory. Idempotent."""
        with self._lock:
            self._closed = True
            self._wrapped.undo()
            self._give_back()
            for load in self._pending.values():
                for tensor in load.tensors:
                    unwear(tensor)
            # Whoever still refers to the session must not keep their device memory.
            self._pending.clear()
            self._queue.clear()
