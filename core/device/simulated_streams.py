"""Virtual streams and events with the interface of torch's device modules (`torch.cuda`).

Copies take effect as late, as early or as arbitrarily as the events allow. A vector clock over the streams
tells which work happened before which.
"""

from __future__ import annotations

import contextlib
import random
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch


class _Current(threading.local):
    """The index of the stream that this thread computes on, on every simulated device."""

    index = 0  # the same on every simulated device


CURRENT = _Current()


@dataclass(frozen=True)
class _Work:
    """A piece of work (a copy, a decoding) issued to a stream.

    ``number``: its number on the stream. ``run``: the function that makes the work take effect.
    """

    number: int
    seen: dict[VirtualStream, int]  # by stream: the number of pieces of work that happen before this one
    run: Callable[[], None]


class VirtualStream:
    """A stream that queues work until some other stream or the host waits for the work.

    ``lands``: whether work that this stream waits for takes effect at the wait. If False, the work takes
    effect when another stream or the host waits for this stream. ``clock``: virtual time in seconds.
    ``issued``, ``done``: the number of pieces of work that were issued, and that took effect. ``seen``: the
    vector clock.
    """

    def __init__(self, device: VirtualDevice, lands: bool) -> None:
        self._device, self.lands = device, lands
        self.clock = 0.0
        self.issued = self.done = 0
        self.seen: dict[VirtualStream, int] = {}
        self.queue: deque[_Work] = deque()  # work that was issued and has not taken effect

    def wait_event(self, event: VirtualEvent) -> None:
        """Let later work on this stream happen after ``event``."""
        self.clock = max(self.clock, event.time)
        for stream, count in event.seen.items():
            self.seen[stream] = max(self.seen.get(stream, 0), count)
        if self.lands:
            self._device.land(event.seen)

    def ran(self) -> int:
        """Count a kernel, which ran when it was issued; return its number."""
        self.issued += 1
        self.done = self.issued
        return self.issued

    def issue(self, seconds: float, run: Callable[[], None]) -> None:
        """Queue work that takes ``seconds``; ``run`` is called at the latest when something waits for the work."""
        self.clock += seconds
        self.issued += 1
        self.queue.append(_Work(self.issued, dict(self.seen), run))
        if self._device.at_once():
            self._device.land({self: self.issued})


class VirtualEvent:
    """An event, which stands for all work that its stream had been given when the event was last recorded."""

    def __init__(self, device: VirtualDevice) -> None:
        self._device = device
        self.time = 0.0
        self.seen: dict[VirtualStream, int] = {}

    def record(self, stream: VirtualStream) -> None:
        """Record the event on ``stream``."""
        stream.clock = max(stream.clock, self._device.now)  # the host records the event now
        self.time, self.seen = stream.clock, {**stream.seen, stream: stream.issued}

    def query(self) -> bool:
        """Return whether all work before the event is done."""
        return all(stream.done >= count for stream, count in self.seen.items())

    def synchronize(self) -> None:
        """Let the host wait for the event."""
        self._device.host_waits([self])

    def elapsed_time(self, last: VirtualEvent) -> float:
        """Return the virtual milliseconds from this event to ``last``."""
        return (last.time - self.time) * 1e3


class VirtualDevice:
    """A stand-in for a device module such as torch.cuda, with streams and events.

    ``unwatched``: returns a context in which operators are not watched; queued work takes effect in it. ``mates``:
    other devices of the same host, between which events are waited for. ``now``: the host's virtual time in seconds, if
    the host's work takes time.
    """

    def __init__(self, timing: str, seed: int, unwatched: Callable[[], AbstractContextManager]) -> None:
        self._timing, self._random, self._unwatched = timing, random.Random(seed), unwatched
        self.now = 0.0
        self._lock = threading.RLock()
        self._streams: list[VirtualStream] = []
        self._computing: dict[int, VirtualStream] = {}
        self._host: dict[VirtualStream, int] = {}  # by stream: the work the host has waited for
        self.accesses = Accesses()
        self.mates: set[VirtualDevice] = set()

    def Stream(self, device: Any = None, priority: int = 0) -> VirtualStream:  # noqa: N802 - as torch calls it
        """Return a new stream."""
        stream = VirtualStream(self, lands=True)
        stream.seen.update(self._host)
        self._streams.append(stream)
        return stream

    def Event(self, enable_timing: bool = False) -> VirtualEvent:  # noqa: N802
        """Return a new event."""
        return VirtualEvent(self)

    def device(self, device: Any) -> AbstractContextManager:
        """Return a context that does nothing: there is one device."""
        return contextlib.nullcontext()

    def current_device(self) -> int:
        """Return 0, the index of the only device."""
        return 0

    def current_stream(self, device: Any = None) -> VirtualStream:
        """Return the stream that this thread computes on."""
        return self.computing(CURRENT.index)

    def computing(self, index: int) -> VirtualStream:
        """Return stream number ``index`` of the streams that kernels run on; create it at the first call."""
        found = self._computing.get(index)
        if found is None:
            found = self._computing[index] = self.Stream()
        return found

    def synchronize(self, device: Any = None) -> None:
        """Let the host wait for all work issued so far."""
        events = [self.Event() for _ in self._streams]
        for event, stream in zip(events, self._streams, strict=True):
            event.record(stream)
        self.host_waits(events)
        self.accesses.forget(self._streams)

    def host_waits(self, events: list[VirtualEvent]) -> None:
        """Let the host wait for ``events``, so that all work issued from now on happens after them, on every device."""
        for event in events:
            for device in (self, *self.mates):
                device._happens_after(event)
                device.now = max(device.now, event.time)
            self.land(event.seen)

    @contextlib.contextmanager
    def unwatched(self) -> Iterator[None]:
        """Return a context in which no device of the host watches operators."""
        with contextlib.ExitStack() as watches:
            for device in (self, *self.mates):
                watches.enter_context(device._unwatched())
            yield

    def _happens_after(self, event: VirtualEvent) -> None:
        """Let all work that is issued from now on to this device's streams happen after ``event``."""
        self._host |= {s: max(self._host.get(s, 0), count) for s, count in event.seen.items()}
        for stream in self._streams:
            stream.wait_event(event)

    def at_once(self) -> bool:
        """Return whether work that is issued now takes effect at once under the device's timing."""
        return self._timing == "early" or (self._timing == "random" and self._random.random() < 0.5)

    def some_land(self) -> None:
        """Make some queued work take effect at random; do nothing unless the timing is "random"."""
        if self._timing != "random":
            return
        waiting = [stream for stream in self._streams if stream.queue]
        if waiting and self._random.random() < 0.5:
            stream = waiting[0]
            self.land({stream: stream.done + 1})

    def land(self, seen: dict[VirtualStream, int]) -> None:
        """Make the first ``seen[stream]`` pieces of work of each stream take effect, after all work that
        happens before them.
        """
        if not any(stream.queue for stream in seen):
            return
        with self._lock, self.unwatched():
            for stream, count in seen.items():
                while stream.queue and stream.queue[0].number <= count:
                    self.land(stream.queue[0].seen)
                    work = stream.queue.popleft()
                    try:
                        work.run()
                    finally:
                        stream.done = work.number  # set last, because threads that fill host memory poll it


class WeakTensor:
    """A weak reference to a tensor's memory, from which `take` makes the tensor again."""

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._storage = storage._weak_ref()
        self._layout = tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()
        self._strong: torch.Tensor | None = None
        self._taken = False

    def __del__(self) -> None:
        if hasattr(self, "_storage"):  # not if an interrupt came before it was set
            torch.UntypedStorage._free_weak_ref(self._storage)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` has the storage that is referenced."""
        return tensor.untyped_storage()._cdata == self._storage

    def keep(self, tensor: torch.Tensor) -> None:
        """Keep the memory alive until `take`."""
        if not self._taken:
            self._strong = tensor

    def take(self) -> torch.Tensor | None:
        """Return the tensor, None if its memory has been freed."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage)
        self._taken, self._strong = True, None
        if storage is None:
            return None
        dtype, *layout = self._layout
        with torch.inference_mode(False):
            return torch.empty(0, dtype=dtype, device="cpu").set_(storage, *layout)


class Accesses:
    """The last reads and writes of device memory by address range and virtual stream, checked for
    happens-before.
    """

    def __init__(self) -> None:
        self._reads: dict[tuple[int, int, Any], int] = {}
        # Writes sorted by address, without overlap, and the list of their starts. Both are replaced as a
        # whole, because other threads may be reading them.
        self._written: tuple[list[tuple[int, int, Any, int]], list[int]] = [], []

    def read(self, low: int, high: int, stream: Any, ahead: int = 0) -> bool:
        """Note that the latest work of ``stream`` (``ahead=1``: its next work) reads bytes [low, high).

        Returns False if a write to these bytes is not ordered before the read.
        """
        ordered = True
        writes, starts = self._written
        for at in range(max(0, bisect_right(starts, low) - 1), len(writes)):
            start, end, writer, number = writes[at]
            if start >= high:
                break
            if low < end and stream.seen.get(writer, 0) < number and writer is not stream:
                ordered = False
        self._reads[(low, high, stream)] = stream.issued + ahead
        return ordered

    def write(self, low: int, high: int, stream: Any) -> bool:
        """Note that the next work of ``stream`` overwrites bytes [low, high).

        Returns False if an earlier read of these bytes, or write to them, is not ordered before this write.
        """
        ordered = True
        for (start, end, reader), number in list(self._reads.items()):
            if low < end and start < high:
                ordered = ordered and (reader is stream or stream.seen.get(reader, 0) >= number)
                del self._reads[(start, end, reader)]
        left = []
        for write in self._written[0]:
            start, end, writer, number = write
            if start >= high or low >= end:
                left.append(write)
                continue
            ordered = ordered and (writer is stream or stream.seen.get(writer, 0) >= number)
            if start < low:
                left.append((start, low, writer, number))
            if high < end:
                left.append((high, end, writer, number))
        left.append((low, high, stream, stream.issued + 1))
        left.sort(key=itemgetter(0))
        self._written = left, [write[0] for write in left]
        return ordered

    def forget(self, streams: Collection[VirtualStream]) -> None:
        """Forget the accesses by ``streams``: they happened before everything that follows."""
        ended = set(streams)
        self._reads = {access: number for access, number in self._reads.items() if access[2] not in ended}
        left = [write for write in self._written[0] if write[2] not in ended]
        self._written = left, [write[0] for write in left]
