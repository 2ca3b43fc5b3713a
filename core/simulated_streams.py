"""Virtual streams and events, in the interface of torch's device modules (`torch.cuda`): copies take effect as late, as
early or as arbitrarily as the events allow, and a vector clock over the streams tells what happened before what.
"""

from __future__ import annotations

import contextlib
import random
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch


class _Current(threading.local):
    index = 0  # of the stream that this thread computes on, on every simulated device


CURRENT = _Current()


@dataclass(frozen=True)
class _Work:
    number: int
    seen: dict[VirtualStream, int]  # how much of each stream happens before it
    run: Callable[[], None]


class VirtualStream:
    """``lands``: what it waits for takes effect when it waits; else when somebody waits for the stream itself."""

    def __init__(self, device: VirtualDevice, lands: bool) -> None:
        self._device, self.lands = device, lands
        self.clock = 0.0
        self.issued = self.done = 0
        self.seen: dict[VirtualStream, int] = {}
        self.queue: deque[_Work] = deque()  # issued, and not done

    def wait_event(self, event: VirtualEvent) -> None:
        self.clock = max(self.clock, event.time)
        for stream, count in event.seen.items():
            self.seen[stream] = max(self.seen.get(stream, 0), count)
        if self.lands:
            self._device.land(event.seen)

    def ran(self) -> int:
        """A kernel ran, at once: those that compute do. Returns its number."""
        self.issued += 1
        self.done = self.issued
        return self.issued

    def issue(self, seconds: float, run: Callable[[], None]) -> None:
        """Work of the stream, which takes effect between now and the time that somebody waits for it."""
        self.clock += seconds
        self.issued += 1
        self.queue.append(_Work(self.issued, dict(self.seen), run))
        if self._device.at_once():
            self._device.land({self: self.issued})


class VirtualEvent:
    """What a stream had been given when the event was recorded last."""

    def __init__(self, device: VirtualDevice) -> None:
        self._device = device
        self.time = 0.0
        self.seen: dict[VirtualStream, int] = {}

    def record(self, stream: VirtualStream) -> None:
        self.time, self.seen = stream.clock, {**stream.seen, stream: stream.issued}

    def query(self) -> bool:
        return all(stream.done >= count for stream, count in self.seen.items())

    def synchronize(self) -> None:
        self._device.host_waits([self])

    def elapsed_time(self, last: VirtualEvent) -> float:
        return (last.time - self.time) * 1e3


class VirtualDevice:
    """A device module with streams and events. ``quiet``: the context in which work takes effect."""

    def __init__(self, timing: str, seed: int, quiet: Callable[[], AbstractContextManager]) -> None:
        self._timing, self._random, self._quiet = timing, random.Random(seed), quiet
        self._lock = threading.RLock()
        self._streams: list[VirtualStream] = []
        self._computing: dict[int, VirtualStream] = {}
        self._host: dict[VirtualStream, int] = {}  # what the host has waited for
        self.accesses = Accesses()

    def Stream(self, device: Any = None, priority: int = 0) -> VirtualStream:  # noqa: N802 - as torch calls it
        stream = VirtualStream(self, lands=True)
        stream.seen.update(self._host)
        self._streams.append(stream)
        return stream

    def Event(self, enable_timing: bool = False) -> VirtualEvent:  # noqa: N802
        return VirtualEvent(self)

    def device(self, device: Any) -> AbstractContextManager:
        return contextlib.nullcontext()

    def current_device(self) -> int:
        return 0

    def current_stream(self, device: Any = None) -> VirtualStream:
        return self.computing(CURRENT.index)

    def computing(self, index: int) -> VirtualStream:
        """One of the streams that kernels run on."""
        found = self._computing.get(index)
        if found is None:
            found = self._computing[index] = self.Stream()
        return found

    def synchronize(self, device: Any = None) -> None:
        events = [self.Event() for _ in self._streams]
        for event, stream in zip(events, self._streams, strict=True):
            event.record(stream)
        self.host_waits(events)
        self.accesses.forget()

    def host_waits(self, events: list[VirtualEvent]) -> None:
        """All that is issued from here on comes after ``events``."""
        for event in events:
            self._host |= {s: max(self._host.get(s, 0), count) for s, count in event.seen.items()}
            for stream in self._streams:
                stream.wait_event(event)
            self.land(event.seen)

    def at_once(self) -> bool:
        """Whether what was issued now takes effect now, as far as timing is concerned."""
        return self._timing == "early" or (self._timing == "random" and self._random.random() < 0.5)

    def some_land(self) -> None:
        """Time passes: something may take effect."""
        if self._timing != "random":
            return
        waiting = [stream for stream in self._streams if stream.queue]
        if waiting and self._random.random() < 0.5:
            stream = waiting[0]
            self.land({stream: stream.done + 1})

    def land(self, seen: dict[VirtualStream, int]) -> None:
        """What ``seen`` counts takes effect, and before it what it waited for."""
        if not any(stream.queue for stream in seen):
            return
        with self._lock, self._quiet():
            for stream, count in seen.items():
                while stream.queue and stream.queue[0].number <= count:
                    self.land(stream.queue[0].seen)
                    work = stream.queue.popleft()
                    try:
                        work.run()
                    finally:
                        stream.done = work.number  # last: threads that fill host memory ask for it


class Kept:
    """A tensor whose memory is somebody else's to keep, until it is taken again."""

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._storage = storage._weak_ref()
        self._layout = tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()
        self._strong: torch.Tensor | None = None
        self._taken = False

    def __del__(self) -> None:
        torch.UntypedStorage._free_weak_ref(self._storage)

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata == self._storage

    def keep(self, tensor: torch.Tensor) -> None:
        """The memory stays until it is taken."""
        if not self._taken:
            self._strong = tensor

    def take(self) -> torch.Tensor | None:
        """The tensor, None where its memory is gone."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage)
        self._taken, self._strong = True, None
        if storage is None:
            return None
        dtype, *layout = self._layout
        with torch.inference_mode(False):
            return torch.empty(0, dtype=dtype, device="cpu").set_(storage, *layout)


class Accesses:
    """Who read and wrote device memory last, on which virtual streams: checked against what happened before."""

    def __init__(self) -> None:
        self._reads: dict[tuple[int, int, Any], int] = {}
        # By address, never overlapping, and where each begins. Replaced whole: other threads read meanwhile.
        self._written: tuple[list[tuple[int, int, Any, int]], list[int]] = [], []

    def read(self, low: int, high: int, stream: Any, ahead: int = 0) -> bool:
        """``stream``'s newest work (``ahead=1``: its next) reads these bytes; False where a write to them did not happen
        before."""
        found = True
        writes, starts = self._written
        for at in range(max(0, bisect_right(starts, low) - 1), len(writes)):
            start, end, writer, number = writes[at]
            if start >= high:
                break
            if low < end and stream.seen.get(writer, 0) < number and writer is not stream:
                found = False
        self._reads[(low, high, stream)] = stream.issued + ahead
        return found

    def write(self, low: int, high: int, stream: Any) -> bool:
        """``stream``'s next work overwrites these bytes; False where a read of them or a write did not happen before."""
        found = True
        for (start, end, reader), number in list(self._reads.items()):
            if low < end and start < high:
                found = found and (reader is stream or stream.seen.get(reader, 0) >= number)
                del self._reads[(start, end, reader)]
        left = []
        for write in self._written[0]:
            start, end, writer, number = write
            if start >= high or low >= end:
                left.append(write)
                continue
            found = found and (writer is stream or stream.seen.get(writer, 0) >= number)
            if start < low:
                left.append((start, low, writer, number))
            if high < end:
                left.append((high, end, writer, number))
        left.append((low, high, stream, stream.issued + 1))
        left.sort(key=itemgetter(0))
        self._written = left, [write[0] for write in left]
        return found

    def forget(self) -> None:
        """Everything so far happened before everything that follows."""
        self._reads.clear()
        self._written = [], []
