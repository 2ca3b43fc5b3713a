"""Defines `ResidentLoader`: loads the weights of a file that stay on the device (residents), on first use,
with disk read-ahead.

A session can run at once, whatever the model's size. Until its bytes are loaded, a resident tensor has a
class of `model.arriving_tensor`, which loads the bytes on first use. The bytes are read through a host cache
of their own (`host.host_cache`), in the order in which the loads are expected to be used. While a unit computes, those of
the next ones are copied. All code here runs under the streamer's lock. A load is a group of tensors that are loaded together.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..checkpoint.disk_reader import DiskReader
from ..common.errors import CaromError, WeightsError
from ..device.engine import Engine
from ..device.staging import Staging
from ..host.arena import HostArena
from ..host.cache_buffer import CacheFigures
from ..host.cache_pieces import BufferPlan
from ..host.kept_pieces import KeptPieces
from ..metrics.meter import Meter
from ..model import managed_tensor
from ..model.arriving_tensor import clear_pending, mark_pending
from ..model.compiling import quiet, untraced
from ..model.interpose import Wrapped
from .resident_cache import ResidentCache
from .resident_loads import Load

OutOfMemory: Any = getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError)
_AHEAD = 2  # loads that are copied before they are needed


class ResidentLoader:
    """The queued loads of one layout's residents, in the order in which their units are expected to be used.

    ``temporary_bytes``: device memory that is allocated until everything is loaded, because packed loads are
    decoded and the streamer has no staging memory.
    ``late_seconds``: time that host threads waited.
    ``note_peak``: called before the buffers are released.
    """

    def __init__(self, engine: Engine, arena: HostArena) -> None:
        self._engine, self._arena = engine, arena
        # Both are replaced by the streamer's in `attach_streamer`.
        self._lock, self._meter = threading.RLock(), Meter(engine)
        self._pending: dict[Load, None] = {}  # in the order of expected use
        self._cache: ResidentCache | None = None
        self._loads: list[Load] = []  # all of them, until they are on the device
        self._wrapped = Wrapped()
        self._on_finished: Callable[[], None] = lambda: None
        self.note_peak: Callable[[], None] = lambda: None
        self._passes_begun = 0  # number of root forwards so far
        self._closed = False
        self.late_seconds = 0.0
        # What the cache has read, once it was closed.
        self._read_bytes = 0
        self._spans: list[tuple[str, float, float, int]] = []
        self._staging: Staging | None = None
        self.temporary_bytes = 0

    @property
    def wanted(self) -> bool:
        """Whether any load has to be read from disk."""
        return any(item.fresh for item in self._pending)

    @property
    def packs(self) -> bool:
        """Whether any load could be copied to the device packed and decoded there, which needs staging memory."""
        return any(item.decodes for item in self._pending)

    @property
    def pending(self) -> list[Load]:
        """The loads that are not complete on the device yet, in the order of expected use."""
        return list(self._pending)

    @property
    def waiting(self) -> bool:
        """Whether any load is not complete on the device yet."""
        return bool(self._pending)

    @property
    def limit_bytes(self) -> int:
        """The most bytes of host memory that the buffers between disk and device take now."""
        return 0 if self._cache is None else self._cache.limit_bytes

    @property
    def sizes(self) -> list[int]:
        """The bytes that the loads read, each."""
        return [item.read[0] for item in self._pending]

    def add(self, item: Load) -> None:
        """Queue a load. Nothing is read before `start`."""
        if item.modules:
            self._pending[item] = None
        else:  # any forward may need it, so the first one does
            self._pending = {item: None, **self._pending}
        for tensor in item.tensors:
            mark_pending(tensor, functools.partial(self.load_for_all, item))

    def attach_streamer(self, lock: threading.RLock, meter: Meter) -> None:
        """Use the streamer's lock and meter from now on."""
        self._lock, self._meter = lock, meter

    def start(
        self,
        reader: Callable[[int], DiskReader],
        buffers: BufferPlan | None,
        on_finished: Callable[[], None],
        staging: Staging | None,
        kept: KeptPieces,
        keeps: bool,
    ) -> None:
        """Begin to read through ``buffers``, None if nothing has to be read.

        ``reader``: makes a disk reader.
        ``on_finished``: called when everything is loaded and the buffers are released.
        ``staging``: device memory from which packed bytes are decoded, None if nothing is decoded on the
        device.
        ``kept``, ``keeps``: as in `ResidentCache`.
        """
        if staging is None and self.temporary_bytes and self.packs:
            with contextlib.suppress(OutOfMemory):  # without staging memory, the host decodes
                staging = Staging(self._engine, self.temporary_bytes)
                self._engine.synchronize()  # other streams may still use memory that the allocator reused
        self.temporary_bytes = 0 if staging is None else self.temporary_bytes
        self._on_finished, self._staging = on_finished, staging
        for item in list(self._pending):
            item.fit(0 if staging is None else staging.nbytes)
            if not item.read[0]:
                self._mark_loaded(item)
        if self._pending and buffers is not None:
            self._loads = list(self._pending)
            self._cache = ResidentCache(
                self._engine, self._loads, reader(buffers.nbytes), buffers, self._arena, kept, keeps
            )
        if not self._pending:
            self._finish()

    def recover(self) -> None:
        """Begin the loads that are not complete anew, after an interrupt. Called while the device is idle."""
        if self._closed or self._cache is None:
            return
        if self._staging is not None:
            self._staging.clear()
        for item in self._pending:
            if item.engine is not None:
                item.engine.synchronize()
            item.issued, item.copied = False, None
        self._cache.recover()
        self._pending = {item: None for item in self._pending if not item.loaded}
        if not self._pending:
            self._finish()
            return
        self._cache.expect(self._pending)

    def wrap_forwards(self) -> None:
        """Wrap the forwards of modules whose weights are not loaded yet. The wrapper loads a unit when one of
        its modules runs.
        """
        for item in self._pending:
            for module in item.modules:
                self._wrapped.forward(module, resident_forward(self, item))

    def begin_pass(self, everything: bool) -> None:
        """Load the residents that do not belong to a single unit. Called at the start of a root forward.

        Everything is loaded from the second forward on, or if ``everything``.
        """
        self._passes_begun += 1
        loads = list(self._pending)
        try:
            for item in loads:
                if everything or self._passes_begun > 1 or not item.modules:
                    self.load(item)
        finally:
            self._wait_for(loads)

    def _wait_for(self, loads: Iterable[Load]) -> None:
        """Let the host wait for the copies of ``loads`` that were issued. All streams may read the tensors then."""
        for item in loads:
            if item.copied is not None:
                self._engine.synchronize(item.copied)
                item.copied = None

    # -- loading

    def load_for_all(self, item: Load) -> None:
        """Load ``item``, and let the host wait until its bytes are on the device. Any stream may read its tensors then."""
        self.load(item)
        with self._lock:
            self._wait_for((item,))

    def load(self, item: Load) -> None:
        """Let the current stream wait until ``item`` is on the device. Raises WeightsError if reading fails; a later call
        tries again.
        """
        if item.loaded and item.copied is None:
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
                self._follow(item)
                return
            cache = self._cache
            if self._closed or cache is None:
                raise CaromError(f"{item.name!r} is needed, but its session was closed before it was read")
            before, began = (self._engine.mark() if self._meter.timing else None), time.perf_counter()
            if not item.issued:
                needed = [other for other in self._pending if not other.issued]
                if needed[0] is not item:
                    # Read it first, whatever was expected: reads of other loads would take its buffers again and again.
                    cache.expect(dict.fromkeys([item, *needed]))
                self._issue(item, cache)
            self._follow(item)
            self._mark_loaded(item)
            self.late_seconds += time.perf_counter() - began
            if before is not None:
                self._meter.waited(before, self._engine.mark(), item.name, managed_tensor.in_backward())
            self._copy_ahead(cache)
            if not self._pending:
                self._finish()

    def _follow(self, item: Load) -> None:
        """Let the current stream wait for the copies of ``item``, unless they are known to be over."""
        if item.copied is not None:
            (item.engine or self._engine).wait(item.copied)

    def _copy_ahead(self, cache: ResidentCache) -> None:
        """Issue the copies of the next loads whose bytes are in RAM."""
        if self._engine.blocking:
            return
        for item in list(self._pending)[:_AHEAD]:
            if not item.issued:
                if not cache.has(item):
                    return
                try:
                    self._issue(item, cache)
                except WeightsError:  # raised again where the weights are needed
                    return

    def _issue(self, item: Load, cache: ResidentCache) -> None:
        """Issue the copies of ``item``."""
        item.copied = cache.copy(item, self._staging)
        item.issued = True

    def _mark_loaded(self, item: Load) -> None:
        """Set the class of the tensors of ``item`` back to their own, now that their bytes are on the device."""
        with torch.inference_mode(False), torch.no_grad():
            for tensor in item.tensors:
                clear_pending(tensor)
            item.arrived()
        item.loaded = True
        self._pending.pop(item, None)

    # -- the end of a pass, and closing

    def end_pass(self) -> None:
        """Remove the forward wrappers if everything is loaded. Called after a root forward has succeeded.

        Wrappers are not removed during a pass, because a pass that runs out of memory may run again.
        """
        if not self._pending:
            self._wrapped.undo()
            with self._lock:
                self._wait_for(self._loads)
                self._loads = []

    def _finish(self) -> None:
        """Release the buffers and report that everything is loaded."""
        self.note_peak()
        self._release_buffers()
        self._on_finished()

    def _release_buffers(self) -> None:
        """Close the host cache."""
        self._staging, self.temporary_bytes = None, 0
        cache, self._cache = self._cache, None
        if cache is not None:
            try:
                self._wait_for(self._loads)
            finally:
                self._read_bytes, self._spans = cache.figures().read_bytes, cache.reads()
                cache.close()

    def close(self) -> None:
        """Abandon loads that are not complete, and release all memory. Idempotent. Must not be called while work is
        pending on the device.
        """
        with self._lock:
            self._closed = True
            self._wrapped.undo()
            try:
                self._release_buffers()
            finally:
                for item in self._pending:
                    for tensor in item.tensors:
                        clear_pending(tensor)
                # Release the loads now: code that still refers to the session must not keep their device memory.
                self._pending.clear()
                self._loads = []

    # -- figures

    def figures(self) -> CacheFigures:
        """Return the bytes read from disk, and the host memory of the buffers."""
        cache = CacheFigures() if self._cache is None else self._cache.figures()
        return CacheFigures(self.total_read(), self.late_seconds, cache.held_bytes)

    def total_read(self) -> int:
        """Return the bytes read from disk so far."""
        return self._read_bytes if self._cache is None else self._cache.figures().read_bytes

    def reads(self) -> list[tuple[str, float, float, int]]:
        """Return recent reads as (label, start, end, bytes)."""
        return self._spans if self._cache is None else self._cache.reads()


def resident_forward(residents: ResidentLoader, item: Load) -> Callable[[Callable], Callable]:
    """Return a wrapper for a module's forward that loads ``item`` first if its bytes are not on the device."""
    load_now = quiet(residents.load)

    def make(inner: Callable) -> Callable:
        @untraced
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not item.loaded or item.copied is not None:
                load_now(item)
            return inner(*args, **kwargs)

        return forward

    return make
