"""`StreamEngine`: the engine of any accelerator with torch streams; pinning of host memory by the CUDA or HIP
runtime.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

from ..codec.backends import triton_works
from ..common.background import call_at_exit
from ..common.errors import UnsupportedError
from ..common.memory_snapshot import Memory, shares_host
from ..host.arena import Pinner
from ..host.probe import HostMemory, host_memory, on_windows
from ..plan.residency import GRAIN
from . import wddm
from .engine import Decoder, DefaultEngine, Engine
from .peer_link import PeerLink
from .system_pinner import system_pinner
from .video_memory import integrated_memory, local_memory

_LONGEST_HOLD = 0.25  # seconds; drivers of cards with a display end kernels that run for two seconds
_CYCLES = 2e9  # clock cycles of a second, of fast cards; on slower ones `hold` takes longer


class StreamEngine(DefaultEngine):
    """The engine of CUDA, ROCm (torch's cuda module is HIP there) and other accelerators with streams."""

    blocking = False
    grain = GRAIN
    # Where Triton does not run, torch operations decode k-bit weights: a table look-up, a product and a
    # conversion, which read and write device memory alone (`kbit.dequantize_range`).
    decodes_files = True

    def __init__(self, device: torch.device, module: Any = None) -> None:
        """Create the copy and decode streams; ``module`` replaces torch's device module (torch.cuda)."""
        self._api: Any = torch.get_device_module(device) if module is None else module
        if device.index is None:
            device = torch.device(device.type, self._api.current_device())
        self.device, self.name = device, str(device)
        with self._device_context():
            # High priority, so that a copy that computing waits for runs before the prefetches of other
            # streams.
            self._in = self._api.Stream(device=device, priority=-1)
            self._out = self._api.Stream(device=device)
            self._decode = self._api.Stream(device=device, priority=-1)
        self.pinner = runtime_pinner(device) if device.type == "cuda" else None
        self._countable = device.type == "cuda"
        self.shares_host = self._integrated()
        self._set_stream = getattr(self._api, "set_stream", None)
        # Returns the raw handle of the current stream, at a tenth of the cost of asking for the stream
        # object.
        self._raw_stream = (
            getattr(torch._C, "_cuda_getCurrentRawStream", None) if device.type == "cuda" else None
        )
        self._stream_objects: dict[int, Any] = {}

    @functools.cached_property
    def unpacks(self) -> bool:  # type: ignore[override]
        """Whether Triton decodes on the device, tried when a codec first asks: a broken Triton may end a process."""
        return self.device.type == "cuda" and triton_works()

    @property
    def decodes_lossless_files(self) -> bool:  # type: ignore[override]
        """Whether losslessly packed weights of a file are copied packed: where Triton decodes.

        Torch operations decode them at 6 to 10 GB/s on an H200, a fraction of the rate of its link
        (benchmarks/records/2026-11-22-h200-codec-3.json, "torch").
        """
        return self.unpacks

    def _device_context(self) -> AbstractContextManager:
        """Return a context in which the engine's device is the current device."""
        return self._api.device(self.device)

    def allocate(self, nbytes: int) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def alias(self, buffer: torch.Tensor, offset: int, nbytes: int) -> torch.Tensor:
        piece = buffer[offset : offset + nbytes]
        if not self._countable or nbytes == 0:
            return piece
        return self._tensor_over(piece, piece.data_ptr(), nbytes)

    def at(self, address: int, nbytes: int, owner: Any) -> torch.Tensor:
        with torch.inference_mode(False):
            return self._tensor_over(owner, address, nbytes)

    def _tensor_over(self, owner: Any, address: int, nbytes: int) -> torch.Tensor:
        """Return a uint8 tensor over device memory, whose storage is marked as not the allocator's."""
        tensor = torch.as_tensor(_DeviceArray(owner, address, nbytes), device=self.device)
        setattr(tensor.untyped_storage(), _FOREIGN_MEMORY, True)  # set on the storage, which views share
        return tensor

    def copy_in(
        self, target: torch.Tensor, source: torch.Tensor, after: Iterable[Any], timed: bool
    ) -> tuple[Any, Any]:
        stream = self._in
        for event in after:
            stream.wait_event(event)
        marks = self._start_marks(stream) if timed else None
        self._copy(stream, target, source)
        if marks is not None:
            marks[1].record(stream)
        return self.record(stream), marks

    # -- copies from other devices

    def connect(self, peer: Engine) -> PeerLink:
        if type(peer) is not type(self) or peer.device.type != self.device.type:
            raise UnsupportedError(
                f"peers=: {peer.name} cannot hold weights for {self.name}, as it is a device of another kind; name a "
                f"second device of type {self.device.type!r}"
            )
        return PeerLink(self, peer)

    def reaches(self, peer: StreamEngine) -> bool:
        """Return whether the device reads the memory of ``peer`` without host memory in between (P2P)."""
        check = getattr(self._api, "can_device_access_peer", None)
        return check is not None and bool(check(self.device, peer.device))

    def new_copy_stream(self) -> Any:
        """Return a new stream of the device for copies, with high priority."""
        with self._device_context():
            return self._api.Stream(device=self.device, priority=-1)

    def copy_from_peer(
        self, stream: Any, peer_stream: Any, target: torch.Tensor, source: torch.Tensor, after: Iterable[Any],
        timed: bool,
    ) -> tuple[Any, Any]:  # fmt: skip
        """Copy from the memory of another device on ``stream``, a stream of this device, and ``peer_stream``, one of the
        other device. Arguments and result: as in `PeerLink.copy`.
        """
        self._order(stream, after)
        with self._device_context():
            marks = self._start_marks(stream) if timed else None
            self._copy_between(stream, peer_stream, target, source)
            if marks is not None:
                marks[1].record(stream)
            return self._end_of(stream), marks

    def _order(self, stream: Any, after: Iterable[Any]) -> None:
        """Let later work on ``stream``, an object of torch, wait for the events ``after``."""
        for event in after:
            stream.wait_event(event)

    def _end_of(self, stream: Any) -> Any:
        """Return an event after the work so far on ``stream``, an object of torch."""
        return self.record(stream)

    def _copy_between(
        self, stream: Any, peer_stream: Any, target: torch.Tensor, source: torch.Tensor
    ) -> None:
        """Copy ``source``, on another device, to ``target``. torch orders the copy after both streams, and later work
        on ``stream`` after the copy.
        """
        with self._api.stream(peer_stream), self._api.stream(stream):
            target.copy_(source, True)

    def decode(
        self, decoder: Decoder, wire: torch.Tensor, target: torch.Tensor, after: Iterable[Any], timed: bool
    ) -> tuple[Any, Any]:
        stream = self._decode
        for event in after:
            stream.wait_event(event)
        marks = self._start_marks(stream) if timed else None
        self._on_stream(stream, decoder, wire, target)
        if marks is not None:
            marks[1].record(stream)
        return self.record(stream), marks

    def _start_marks(self, stream: Any) -> tuple[Any, Any]:
        """Return two timing events, the first recorded on ``stream`` now."""
        marks = self._api.Event(enable_timing=True), self._api.Event(enable_timing=True)
        marks[0].record(stream)
        return marks

    def _copy(self, stream: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy ``source`` to ``target`` on ``stream``, without blocking the host."""
        self._on_stream(stream, target.copy_, source, True)

    def _on_stream(self, stream: Any, call: Callable, *args: Any) -> None:
        # set_stream costs a third of the context manager, and this runs for every unit.
        """Call ``call`` with ``stream`` as the current stream."""
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
        self._keep_until_done(source, self._out)
        return self.record(self._out)

    def _keep_until_done(self, tensor: torch.Tensor, stream: Any) -> None:
        """Tell torch's allocator to keep the tensor's memory until ``stream`` is done with it.

        Memory that is not the allocator's needs no such call: a slot stays in use until the copy ends.
        `record_stream` on such memory does nothing with torch's own allocator and fails with cudaMallocAsync.
        """
        if not hasattr(tensor.untyped_storage(), _FOREIGN_MEMORY):
            tensor.record_stream(stream)

    def stream(self) -> Any:
        return self._current()

    def _current(self) -> Any:
        """Return the current stream as torch's object."""
        if self._raw_stream is None:
            return self._api.current_stream(self.device)
        raw = self._raw_stream(self.device.index)
        found = self._stream_objects.get(raw)
        if found is None:
            found = self._stream_objects[raw] = self._api.current_stream(self.device)
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

    def hold(self, seconds: float) -> None:
        sleep = getattr(self._api, "_sleep", None)  # a kernel that counts clock cycles; CUDA and ROCm have it
        if sleep is not None:
            with self._device_context():
                sleep(int(min(seconds, _LONGEST_HOLD) * _CYCLES))

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
        """Return whether the device computes in host memory, as integrated GPUs do."""
        if self.device.type != "cuda":  # only CUDA and ROCm report it
            return False
        properties = self._api.get_device_properties(self.device)
        integrated = bool(getattr(properties, "is_integrated", False))
        return integrated and shares_host(properties.total_memory, host_memory().total)

    def _usable_bytes(self, free: int, of_host: Callable[[HostMemory], int]) -> int:
        """Return ``free``, the bytes that the runtime reports; on a device that shares host memory, the
        host's free bytes. On Windows, no more than Windows leaves to this process.
        """
        if not self.shares_host:
            return wddm.room(free, local_memory(self.device))
        free = wddm.room(free, integrated_memory(self.device))
        # CUDA counts the page cache as used, though the system frees it on demand. HIP may have a limit of
        # its own.
        host = of_host(host_memory())
        return min(free, host) if torch.version.hip else host

    def free_bytes(self) -> int:
        """Return free device memory in bytes, including what torch's allocator has cached."""
        reserved = self._api.memory_reserved(self.device)
        if hasattr(self._api, "mem_get_info"):
            free, _ = self._api.mem_get_info(self.device)
        else:  # without mem_get_info the memory of other programs is unknown
            free = self._api.get_device_properties(self.device).total_memory - reserved
        cached = reserved - self._api.memory_allocated(self.device)
        return self._usable_bytes(free, lambda host: host.free) + cached

    def memory(self) -> Memory | None:
        if not hasattr(self._api, "mem_get_info") or not hasattr(self._api, "memory_stats"):
            return None
        free, total = self._api.mem_get_info(self.device)
        # On a device that shares host memory, do not count the bytes that are kept for the system.
        free = self._usable_bytes(free, lambda host: host.usable)
        stats = self._api.memory_stats(self.device)
        reserved = stats.get("reserved_bytes.all.current", 0)
        # What has to return to the card before anything else may take its memory.
        in_host = 0 if self.shares_host else wddm.in_host_memory(reserved, local_memory(self.device))
        free = max(0, free - in_host)
        cached = reserved - stats.get("allocated_bytes.all.current", 0)
        # Memory that other programs hold is not counted in the total, as this process cannot use it.
        return Memory(
            min(total, free + reserved), free, cached, stats.get("num_ooms", 0),
            retries=stats.get("num_alloc_retries", 0), spills=on_windows(),
            in_host_memory=in_host,
        )  # fmt: skip

    def trim(self) -> None:
        self._api.empty_cache()


class FlushingStreamEngine(StreamEngine):
    """The engine on Windows, where the driver collects work before it hands it to the device (WDDM).

    A prefetch that the driver held back would begin only when its weights are needed. A query of the stream hands over
    each copy and each decoding at once.
    """

    def copy_in(
        self, target: torch.Tensor, source: torch.Tensor, after: Iterable[Any], timed: bool
    ) -> tuple[Any, Any]:
        found = super().copy_in(target, source, after, timed)
        self._in.query()
        return found

    def decode(
        self, decoder: Decoder, wire: torch.Tensor, target: torch.Tensor, after: Iterable[Any], timed: bool
    ) -> tuple[Any, Any]:
        found = super().decode(decoder, wire, target, after, timed)
        self._decode.query()
        return found


_FOREIGN_MEMORY = "_carom_not_the_allocators"


class _DeviceArray:
    """Device memory in the ``__cuda_array_interface__``, which torch.as_tensor wraps without a copy; keeps
    its owner alive.
    """

    def __init__(self, owner: Any, address: int, nbytes: int) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 2,
        }  # fmt: skip


@functools.cache
def _wait_at_exit(device: torch.device) -> None:
    """Wait for ``device`` when Python exits, before pinned memory is unregistered, which copies may still read."""
    call_at_exit(lambda: torch.cuda.synchronize(device))


def runtime_pinner(device: torch.device) -> Pinner:
    """Return a `Pinner` that registers host memory with the CUDA or HIP runtime that torch loaded, for
    ``device``.

    The functions have the same names in both runtimes.
    """
    from .cuda_runtime import error_text, forget_error

    runtime: Any = torch.cuda.cudart()

    def register(address: int, size: int) -> str | None:
        """Pin ``size`` bytes at ``address``; return the reason if that failed, else None."""
        _wait_at_exit(device)
        code = int(runtime.cudaHostRegister(address, size, 0))
        if code == 0:
            return None
        forget_error(device)
        name = "hipHostRegister" if torch.version.hip else "cudaHostRegister"
        return (
            f"{name} of {size} bytes failed with {error_text(code)}; set a smaller ram, or close programs that "
            "pin memory"
        )

    def unregister(address: int) -> None:
        """Unpin the host memory at ``address``."""
        if int(runtime.cudaHostUnregister(address)):
            forget_error(device)

    return system_pinner(Pinner(register, unregister), device, functools.partial(forget_error, device))
