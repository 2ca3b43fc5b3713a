"""Copy engines: how bytes reach the device, and what "after" means there.

An engine owns the copy streams and makes events; it knows nothing of units. `StreamEngine` serves
any accelerator with torch streams; on CUDA and ROCm runtime.py makes its calls cheaper. plain_engine.py
serves the CPU and accelerators without streams; the simulated device is in simulated.py.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from .auto import Memory, shares_host
from .codec.backends import triton_works
from .errors import UnsupportedError
from .host import HostMemory, host_memory, on_windows
from .plan import GRAIN
from .store.arena import Pinner


class Decoder(Protocol):
    """Unpacks on the device: `codec.unit.UnitDecoder`."""

    as_it_is: Sequence[tuple[int, int, int]]  # bytes, from where in the wire, to where: what is not packed

    def __call__(self, wire: torch.Tensor, target: torch.Tensor, /) -> None:
        """Both uint8 on the device, on the current stream."""

    def again(self, wire: torch.Tensor, target: torch.Tensor, /) -> Sequence[Callable[..., Any]] | None:
        """Launches that unpack between buffers unpacked between before, each on a raw ``stream``; None before."""


class Engine(Protocol):
    """What the streamer asks of a device. Events are opaque outside the engine that made them."""

    device: torch.device
    name: str
    pinner: Pinner | None
    blocking: bool  # copies are done when the call returns: the host waits for each
    grain: int  # bytes the device's allocator rounds large buffers up to
    unpacks: bool  # whether packed weights are decoded faster than plain ones would cross
    shares_host: bool  # whether the device computes in the host's memory: what it holds is gone for the host
    virtual_clock: bool  # whether its times are no real ones

    @property
    def location(self) -> torch.device:
        """What `locate` says of a tensor on the device."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """uint8 device memory, contents undefined."""

    def alias(self, buffer: torch.Tensor, offset: int, nbytes: int) -> torch.Tensor:
        """``buffer[offset:offset+nbytes]``, where possible as a storage of its own (so that its uses can be counted)."""

    def at(self, address: int, nbytes: int, owner: Any) -> torch.Tensor:
        """uint8 device memory that is not the allocator's; ``owner`` is kept alive with every tensor over it."""

    def mapped(self, data: torch.Tensor, pinned: bool) -> torch.Tensor | None:
        """The host bytes ``data`` (uint8) as a tensor that operators on the device can read; None where they cannot."""

    def locate(self, tensor: torch.Tensor) -> torch.device:
        """Where a tensor lives (on the simulated device not what torch says)."""

    def move(self, tensor: torch.Tensor, to: torch.device) -> torch.Tensor:
        """The tensor's values where `locate` says ``to``; the tensor itself where it is there."""

    def copy_in(
        self, target: torch.Tensor, source: torch.Tensor, after: Iterable[Any], timed: bool
    ) -> tuple[Any, Any]:
        """Host to device on the copy stream, once ``after`` is reached: the done event, and (if ``timed``) two marks."""

    def decode(
        self, decoder: Decoder, wire: torch.Tensor, target: torch.Tensor, after: Iterable[Any], timed: bool
    ) -> tuple[Any, Any]:
        """Unpack ``wire`` into ``target`` (both on the device) on a stream of its own; returns as `copy_in` does."""

    def copy_out(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        """Device to host after what the current stream has been given; returns the done event."""

    def stream(self) -> Any:
        """The stream the current thread computes on (hashable)."""

    def record(self, stream: Any, event: Any = None) -> Any:
        """An event after everything ``stream`` has been given; ``event``, if given, is recorded anew."""

    def mark(self) -> Any:
        """A time on the current stream, for `elapsed` once it is `done`."""

    def wait(self, event: Any) -> None:
        """The current stream goes on only after ``event``; the host does not wait."""

    def done(self, mark: Any) -> bool:
        """Whether a mark has been reached."""

    def landed(self, copied: Any) -> bool:
        """Whether a copy's done event has been reached: its host memory may be written. Any thread may ask."""

    def synchronize(self, event: Any = None) -> None:
        """The host waits for ``event``, or for everything."""

    def elapsed(self, first: Any, last: Any) -> float:
        """Seconds between two reached marks."""

    def freed(self, memory: torch.Tensor, start: int, end: int) -> None:
        """Bytes ``start`` to ``end`` were given up (the simulated device poisons them)."""

    def read(self, target: torch.Tensor) -> None:
        """The current stream is about to read a slot (the simulated device checks that it may)."""

    def step(self) -> AbstractContextManager:
        """Held while a step computes (the simulated device watches the operators)."""

    def free_bytes(self) -> int:
        """Device memory that could be had now."""

    def memory(self) -> Memory | None:
        """What the device has left; None where that is the host's business."""

    def trim(self) -> None:
        """Give back to the device what the allocator keeps unused."""


class Unwatched:
    """A real device: nobody looks on."""

    unpacks = False
    shares_host = False
    virtual_clock = False
    device: torch.device

    def mapped(self, data: torch.Tensor, pinned: bool) -> torch.Tensor | None:
        return None

    @property
    def location(self) -> torch.device:
        return self.device

    def locate(self, tensor: torch.Tensor) -> torch.device:
        return tensor.device

    def move(self, tensor: torch.Tensor, to: torch.device) -> torch.Tensor:
        return tensor.to(to)

    def freed(self, memory: torch.Tensor, start: int, end: int) -> None:
        pass

    def read(self, target: torch.Tensor) -> None:
        pass

    def step(self) -> AbstractContextManager:
        return contextlib.nullcontext()


class StreamEngine(Unwatched):
    """CUDA, ROCm (torch's cuda module is HIP there) and other accelerators with streams."""

    blocking = False
    grain = GRAIN

    def __init__(self, device: torch.device, module: Any = None) -> None:
        """``module``: its device module, where that is not torch's."""
        self._api: Any = torch.get_device_module(device) if module is None else module
        if device.index is None:
            device = torch.device(device.type, self._api.current_device())
        self.device, self.name = device, str(device)
        with self._on():
            # High priority: a copy that is waited for goes before one that is only foreseen elsewhere.
            self._in = self._api.Stream(device=device, priority=-1)
            self._out = self._api.Stream(device=device)
            self._decode = self._api.Stream(device=device, priority=-1)
        self.unpacks = device.type == "cuda" and triton_works()
        self.pinner = runtime_pinner(device) if device.type == "cuda" else None
        self._countable = device.type == "cuda"
        self.shares_host = self._integrated()
        self._set_stream = getattr(self._api, "set_stream", None)
        # The current stream by its handle: a tenth of the price of asking for the object each time.
        self._raw_stream = (
            getattr(torch._C, "_cuda_getCurrentRawStream", None) if device.type == "cuda" else None
        )
        self._known: dict[int, Any] = {}

    def _on(self) -> AbstractContextManager:
        return self._api.device(self.device)

    def allocate(self, nbytes: int) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def alias(self, buffer: torch.Tensor, offset: int, nbytes: int) -> torch.Tensor:
        piece = buffer[offset : offset + nbytes]
        if not self._countable or nbytes == 0:
            return piece
        return self._over(piece, piece.data_ptr(), nbytes)

    def at(self, address: int, nbytes: int, owner: Any) -> torch.Tensor:
        with torch.inference_mode(False):
            return self._over(owner, address, nbytes)

    def _over(self, owner: Any, address: int, nbytes: int) -> torch.Tensor:
        tensor = torch.as_tensor(_DeviceArray(owner, address, nbytes), device=self.device)
        setattr(
            tensor.untyped_storage(), _NOT_THE_ALLOCATORS, True
        )  # the storage's, so that views have it too
        return tensor

    def copy_in(
        self, target: torch.Tensor, source: torch.Tensor, after: Iterable[Any], timed: bool
    ) -> tuple[Any, Any]:
        stream = self._in
        for event in after:
            stream.wait_event(event)
        marks = self._marked(stream) if timed else None
        self._copy(stream, target, source)
        if marks is not None:
            marks[1].record(stream)
        return self.record(stream), marks

    def decode(
        self, decoder: Decoder, wire: torch.Tensor, target: torch.Tensor, after: Iterable[Any], timed: bool
    ) -> tuple[Any, Any]:
        stream = self._decode
        for event in after:
            stream.wait_event(event)
        marks = self._marked(stream) if timed else None
        self._on_stream(stream, decoder, wire, target)
        if marks is not None:
            marks[1].record(stream)
        return self.record(stream), marks

    def _marked(self, stream: Any) -> tuple[Any, Any]:
        """Two marks on ``stream``, the first reached now."""
        marks = self._api.Event(enable_timing=True), self._api.Event(enable_timing=True)
        marks[0].record(stream)
        return marks

    def _copy(self, stream: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        self._on_stream(stream, target.copy_, source, True)

    def _on_stream(self, stream: Any, call: Callable, *args: Any) -> None:
        # set_stream instead of the context manager: it costs a third, and this runs for every unit.
        before = self._current()
        if self._set_stream is None or self._api.current_device() != self.device.index:
            with self._api.stream(stream):
                call(*args)
            return
        self._set_stream(stream)
        try:
            call(*args)
        finally:
            self._set_stream(before)

    def copy_out(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        self._out.wait_event(self.record(self.stream()))
        self._copy(self._out, target, source)
        self._stays_for(source, self._out)
        return self.record(self._out)

    def _stays_for(self, tensor: torch.Tensor, stream: Any) -> None:
        """The allocator keeps the tensor's memory until ``stream`` is through with it.

        Memory that is not the allocator's outlives the copy: a slot is in use until it ends. `record_stream` of it does
        nothing with torch's own allocator and fails with cudaMallocAsync.
        """
        if not hasattr(tensor.untyped_storage(), _NOT_THE_ALLOCATORS):
            tensor.record_stream(stream)

    def stream(self) -> Any:
        return self._current()

    def _current(self) -> Any:
        """The current stream as torch's object."""
        if self._raw_stream is None:
            return self._api.current_stream(self.device)
        raw = self._raw_stream(self.device.index)
        found = self._known.get(raw)
        if found is None:
            found = self._known[raw] = self._api.current_stream(self.device)
        return found

    def record(self, stream: Any, event: Any = None) -> Any:
        if event is None:
            event = self._api.Event()
        event.record(stream)
        return event

    def mark(self) -> Any:
        mark = self._api.Event(enable_timing=True)
        mark.record(self.stream())
        return mark

    def wait(self, event: Any) -> None:
        self.stream().wait_event(event)

    def done(self, mark: Any) -> bool:
        return mark.query()

    def landed(self, copied: Any) -> bool:
        return copied.query()

    def synchronize(self, event: Any = None) -> None:
        if event is None:
            self._api.synchronize(self.device)
        else:
            event.synchronize()

    def elapsed(self, first: Any, last: Any) -> float:
        return first.elapsed_time(last) / 1e3

    def _integrated(self) -> bool:
        if self.device.type != "cuda":  # CUDA and ROCm tell
            return False
        properties = self._api.get_device_properties(self.device)
        integrated = bool(getattr(properties, "is_integrated", False))
        return integrated and shares_host(properties.total_memory, host_memory().total)

    def _free_here(self, free: int, of_host: Callable[[HostMemory], int]) -> int:
        """``free``, as the runtime counts it; of a memory that is the host's too, what the host has of it."""
        if not self.shares_host:
            return free
        # CUDA counts as used what the system keeps of files and gives up at once; HIP may have a bound of its own.
        host = of_host(host_memory())
        return min(free, host) if torch.version.hip else host

    def free_bytes(self) -> int:
        reserved = self._api.memory_reserved(self.device)
        if hasattr(self._api, "mem_get_info"):
            free, _ = self._api.mem_get_info(self.device)
        else:  # what other programs hold is not known
            free = self._api.get_device_properties(self.device).total_memory - reserved
        cached = reserved - self._api.memory_allocated(self.device)
        return self._free_here(free, lambda host: host.free) + cached

    def memory(self) -> Memory | None:
        if not hasattr(self._api, "mem_get_info") or not hasattr(self._api, "memory_stats"):
            return None
        free, total = self._api.mem_get_info(self.device)
        free = self._free_here(free, lambda host: host.usable)  # the system's part is nobody's
        stats = self._api.memory_stats(self.device)
        reserved = stats.get("reserved_bytes.all.current", 0)
        cached = reserved - stats.get("allocated_bytes.all.current", 0)
        # What other programs hold is no part of the device that this one can plan with.
        return Memory(
            min(total, free + reserved), free, cached, stats.get("num_ooms", 0),
            retries=stats.get("num_alloc_retries", 0), spills=on_windows(),
        )  # fmt: skip

    def trim(self) -> None:
        self._api.empty_cache()


_NOT_THE_ALLOCATORS = "_carom_not_the_allocators"


class _DeviceArray:
    """A piece of device memory in the interface torch.as_tensor reads without copying; keeps its owner alive."""

    def __init__(self, owner: Any, address: int, nbytes: int) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 2,
        }  # fmt: skip


_use_count: Any = getattr(torch._C, "_storage_Use_Count", None)


def storage_uses(tensor: torch.Tensor) -> int | None:
    """References to ``tensor``'s storage, from tensors and from Python, None where torch cannot tell. To be compared with an
    earlier count."""
    if _use_count is None:
        return None
    storage = tensor.untyped_storage()
    return _use_count(storage._cdata) + sys.getrefcount(storage)


def runtime_pinner(device: torch.device) -> Pinner:
    """Registers memory with the CUDA or HIP runtime that torch loaded (the same names on both), for work on ``device``."""
    from .runtime import forget_error

    runtime: Any = torch.cuda.cudart()

    def register(address: int, size: int) -> str | None:
        code = int(runtime.cudaHostRegister(address, size, 0))
        if code == 0:
            return None
        forget_error(device)
        return f"cudaHostRegister of {size} bytes failed with error {code}"

    def unregister(address: int) -> None:
        if int(runtime.cudaHostUnregister(address)):
            forget_error(device)

    return Pinner(register, unregister)


def make_engine(device: Any) -> Engine:
    """The engine for a device, a device name, a `SimulatedDevice`, or None (the current accelerator, else the CPU).

    Raises UnsupportedError for a device that does not exist here.
    """
    from .plain_engine import PlainEngine
    from .simulated import SimulatedDevice, SimulatedEngine

    if isinstance(device, SimulatedDevice):
        return SimulatedEngine(device)
    if device is None:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        device = accelerator or "cpu"
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UnsupportedError(f"device={device!r} is not a device torch knows: {error}") from error
    if wanted.type == "cpu":
        return PlainEngine(torch.device("cpu"))
    if wanted.type == "meta":
        raise UnsupportedError("device='meta' cannot compute; name an accelerator or 'cpu'")
    try:
        torch.empty(1, device=wanted)
    except Exception as error:
        count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
        raise UnsupportedError(
            f"device={str(wanted)!r} is not there ({count} accelerators found): {type(error).__name__}: {error}"
        ) from error
    api = torch.get_device_module(wanted)
    if hasattr(api, "Stream") and hasattr(api, "Event") and wanted.type != "mps":
        from .runtime import runtime_engine

        return runtime_engine(wanted) or StreamEngine(wanted)
    return PlainEngine(wanted)
