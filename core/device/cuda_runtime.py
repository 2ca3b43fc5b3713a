"""`RuntimeEngine`: a `StreamEngine` whose copies and events call the CUDA or HIP runtime through ctypes.

These calls run for every unit (a module whose weights are copied together), and ctypes makes them cheaper for
the host. torch's own way to copy on another stream sets and resets the current stream around a dispatched
operator, and makes an event object for each record. Calls by ctypes also release the GIL. The library is the
one that torch has loaded. If it cannot be found, or a test copy fails, `StreamEngine` is used instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import sys
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch

from ..common.errors import CaromError
from ..host.probe import on_windows
from .engine import Decoder, Engine
from .peer_link import PeerLink
from .runtime_library import runtime_library
from .stream_engine import StreamEngine

logger = logging.getLogger("carom")
_DISABLE_TIMING = 2  # cudaEventDisableTiming
_DEFAULT = 4  # cudaMemcpyDefault: the runtime finds the direction from the addresses
_NOT_READY = 600  # cudaErrorNotReady
_PROOF_BYTES = 4096  # bytes of the test copy, see `RuntimeEngine.prove`


class DeviceError(CaromError, RuntimeError):
    """The error for a failed call of the CUDA or HIP runtime. ``code``: the runtime's error code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class FreeEvents(list[int]):
    """A list of event handles (cudaEvent_t) that are free to be used again; destroying the list destroys the
    events.

    While the interpreter exits no event is destroyed: the driver frees them then, and its library may already
    be unloaded.
    """

    def __init__(self, destroy: Callable[[int], object]) -> None:
        super().__init__()
        self._destroy, self._exiting = destroy, sys.is_finalizing

    def __del__(self) -> None:
        if self._exiting():
            return
        # Events in the same garbage cycle may be finalised after this list: destroy their handles at once.
        self.append = self._destroy  # type: ignore[method-assign,assignment]
        while self:
            self._destroy(self.pop())


class Event:
    """An event of the CUDA or HIP runtime, whose handle returns to the list of free events when the object
    dies.

    Reusing a handle is safe: a stream that waits for an event waits for the last record before the wait was
    issued.
    """

    __slots__ = ("handle", "_free")

    def __init__(self, handle: int, free: list[int]) -> None:
        self.handle, self._free = handle, free

    def __del__(self) -> None:
        self._free.append(self.handle)


class Runtime:
    """The bound functions of one loaded runtime library; each raises DeviceError on failure.

    ``prefix``: "cuda" or "hip". Both runtimes have the same functions, constants and error codes here
    (include/hip/hip_runtime_api.h of https://github.com/ROCm/HIP).
    """

    def __init__(self, library: Any, prefix: str) -> None:
        pointer, size, flags = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint
        self._prefix = prefix

        def bind(name: str, *arguments: Any) -> Callable[..., int]:
            """Return the library's function ``name`` with its argument types set."""
            function = getattr(library, prefix + name)
            function.argtypes, function.restype = arguments, ctypes.c_int
            return function

        self._create = bind("EventCreateWithFlags", ctypes.POINTER(pointer), flags)
        self._copy = bind("MemcpyAsync", pointer, pointer, size, ctypes.c_int, pointer)
        self._record = bind("EventRecord", pointer, pointer)
        self._wait = bind("StreamWaitEvent", pointer, pointer, flags)
        self._query = bind("EventQuery", pointer)
        self._query_stream = getattr(library, prefix + "StreamQuery", None)
        if self._query_stream is not None:
            self._query_stream.argtypes, self._query_stream.restype = (pointer,), ctypes.c_int
        self._synchronize = bind("EventSynchronize", pointer)
        self._last_error = bind("GetLastError")
        self._error_name: Any = getattr(library, prefix + "GetErrorName", None)
        if self._error_name is not None:
            self._error_name.argtypes, self._error_name.restype = (ctypes.c_int,), ctypes.c_char_p
        destroy, forget = bind("EventDestroy", pointer), self._last_error
        # Events hold the list and not the runtime, so the list lives until the last event dies.
        self._free = FreeEvents(lambda handle: destroy(handle) and forget())

    def event(self) -> Event:
        """Return an event without timing, for the current device."""
        try:  # not `if self._free`: another thread may take the last handle in between
            return Event(self._free.pop(), self._free)
        except IndexError:
            return self._new_event()

    def _new_event(self) -> Event:
        """Create an event without timing."""
        handle = ctypes.c_void_p()
        code = self._create(ctypes.byref(handle), _DISABLE_TIMING)
        if code:
            self._failed(code, "EventCreateWithFlags")
        return Event(handle.value or 0, self._free)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy ``nbytes`` between two addresses, asynchronously on ``stream``."""
        code = self._copy(target, source, nbytes, _DEFAULT, stream)
        if code:
            self._failed(code, "MemcpyAsync")

    def record(self, event: Event, stream: int) -> None:
        """Record ``event`` on ``stream``."""
        code = self._record(event.handle, stream)
        if code:
            self._failed(code, "EventRecord")

    def wait(self, stream: int, event: Event) -> None:
        """Let later work on ``stream`` wait for ``event``."""
        code = self._wait(stream, event.handle, 0)
        if code:
            self._failed(code, "StreamWaitEvent")

    def reached(self, event: Event) -> bool:
        """Return whether the work before the event's last record is done."""
        code = self._query(event.handle)
        if code == _NOT_READY:
            self.forget_error()
            return False
        if code:
            self._failed(code, "EventQuery")
        return True

    def flush(self, stream: int) -> None:
        """Let the device begin the work on ``stream`` that the driver still holds back.

        Querying a stream does that. An error that the query reports is found again by the next call.
        """
        if self._query_stream is not None and self._query_stream(stream):
            self.forget_error()

    def synchronize(self, event: Event) -> None:
        """Block the host until ``event`` is reached."""
        code = self._synchronize(event.handle)
        if code:
            self._failed(code, "EventSynchronize")

    def forget_error(self) -> None:
        """Clear the error that the last failed call left on this thread.

        torch would otherwise raise the error after its next kernel launch.
        """
        self._last_error()

    def error_text(self, code: int) -> str:
        """Return "error 2 (hipErrorOutOfMemory)" for code 2; without the name if the library has no names."""
        name = self._error_name(code) if self._error_name is not None else None
        return f"error {code} ({name.decode('ascii', 'replace')})" if name else f"error {code}"

    def _failed(self, code: int, name: str) -> NoReturn:
        """Clear the thread's error and raise DeviceError for the failed call of ``name``."""
        self.forget_error()
        serial = "AMD_SERIALIZE_KERNEL=3" if self._prefix == "hip" else "CUDA_LAUNCH_BLOCKING=1"
        raise DeviceError(
            f"{self._prefix}{name} failed with {self.error_text(code)}. An earlier kernel or copy may be the cause, and "
            f"the device may be unusable in this process: start the process again, with {serial} to find the cause",
            code,
        )


def find() -> Runtime | None:
    """Return the runtime library that torch uses in this process, None if it cannot be found or lacks a
    function.
    """
    try:
        found = runtime_library()
        return None if found is None else Runtime(*found)
    except (OSError, AttributeError) as error:
        logger.debug("carom: the device's runtime is called through torch: %s", error)
        return None


def error_text(code: int) -> str:
    """Return the runtime's error ``code`` with its name, where the runtime library is found."""
    runtime = find()
    return f"error {code}" if runtime is None else runtime.error_text(code)


def forget_error(device: torch.device) -> None:
    """Clear the error that a failed call of the runtime left on this thread.

    The runtime keeps the error until a caller asks for it. torch asks after its next kernel launch on the
    thread, and would raise the error from an operator that has nothing to do with it. torch has no call that
    clears the error.
    """
    runtime = find()
    if runtime is not None:
        runtime.forget_error()
        return
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)  # torch raises the error here, which clears it


class RuntimeEngine(StreamEngine):
    """A `StreamEngine` that records events and copies by calls of the runtime, with raw stream handles.

    Marks, which measure time, remain events of torch.
    """

    def __init__(self, device: torch.device, runtime: Runtime) -> None:
        super().__init__(device)
        assert self._raw_stream is not None
        self._runtime = runtime
        self._current_device: Callable[[], int] = torch._C._cuda_getDevice
        self._in_raw, self._out_raw = self._in.cuda_stream, self._out.cuda_stream
        self._decode_raw = self._decode.cuda_stream
        self._direct_peers: set[int] = set()  # indices of the devices whose memory this device reads directly

    def prove(self) -> None:
        """Copy 4096 bytes to the device and back; raise RuntimeError if other bytes arrive."""
        source = torch.arange(_PROOF_BYTES, dtype=torch.int64).to(torch.uint8)
        with torch.inference_mode(False):
            target = torch.zeros(_PROOF_BYTES, dtype=torch.uint8, device=self.device)
            before = self.record(self.stream())
            copied, _ = self.copy_in(target, source, (before,), False)
            self.wait(copied)
            after = self.record(self.stream())
            self.synchronize(after)
            if not (self.landed(copied) and torch.equal(target.cpu(), source)):
                raise RuntimeError("a test copy by the runtime delivered other bytes than were sent")

    def stream(self) -> int:
        return self._raw_stream(self.device.index)  # type: ignore[misc]

    def record(self, stream: Any, event: Any = None) -> Event:
        """Record ``event``, or a new one, on ``stream`` with the engine's device as the current device;
        return the event.
        """
        if self._current_device() != self.device.index:
            with self._device_context():
                return self._record(stream, event)
        return self._record(stream, event)

    def _record(self, stream: int, event: Event | None) -> Event:
        """Record ``event``, or a new one, on ``stream``; the engine's device must be the current device."""
        if event is None:
            event = self._runtime.event()
        self._runtime.record(event, stream)
        return event

    def wait(self, event: Any) -> None:
        self._runtime.wait(self._raw_stream(self.device.index), event)  # type: ignore[misc]

    def copy_in(
        self, target: torch.Tensor, source: torch.Tensor, after: Iterable[Any], timed: bool
    ) -> tuple[Any, Any]:
        runtime, stream = self._runtime, self._in_raw
        for event in after:
            runtime.wait(stream, event)
        if not timed and self._current_device() == self.device.index:
            runtime.copy(target.data_ptr(), source.data_ptr(), source.numel(), stream)
            return self._record(stream, None), None
        with self._device_context():
            marks = self._start_marks(self._in) if timed else None
            runtime.copy(target.data_ptr(), source.data_ptr(), source.numel(), stream)
            if marks is not None:
                marks[1].record(self._in)
            return self._record(stream, None), marks

    def _order(self, stream: Any, after: Iterable[Any]) -> None:
        for event in after:
            self._runtime.wait(stream.cuda_stream, event)

    def _end_of(self, stream: Any) -> Event:
        return self.record(stream.cuda_stream)

    def connect(self, peer: Engine) -> PeerLink:
        link = super().connect(peer)
        if link.direct:
            # torch enables the access of one device to the memory of another at its first copy between them.
            with torch.inference_mode(False):
                torch.zeros(1, dtype=torch.uint8, device=peer.device).to(self.device).to(peer.device)
            self._direct_peers.add(peer.device.index)
        return link

    def _copy_between(
        self, stream: Any, peer_stream: Any, target: torch.Tensor, source: torch.Tensor
    ) -> None:
        """Copy ``source``, on another device, to ``target``, by a copy on ``stream`` where the devices have P2P.

        Without P2P torch copies, because cudaMemcpyAsync does not accept memory of torch's expandable segments then.
        """
        if source.get_device() in self._direct_peers:
            self._runtime.copy(target.data_ptr(), source.data_ptr(), source.numel(), stream.cuda_stream)
        else:
            super()._copy_between(stream, peer_stream, target, source)

    def decode(
        self, decoder: Decoder, wire: torch.Tensor, target: torch.Tensor, after: Iterable[Any], timed: bool
    ) -> tuple[Any, Any]:
        runtime, stream = self._runtime, self._decode_raw
        for event in after:
            runtime.wait(stream, event)
        if self._current_device() == self.device.index:
            marks = self._start_marks(self._decode) if timed else None
            self._decode_on_stream(decoder, wire, target)
            if marks is not None:
                marks[1].record(self._decode)
            return self._record(stream, None), marks
        with self._device_context():
            return self.decode(decoder, wire, target, (), timed)

    def _decode_on_stream(self, decoder: Decoder, wire: torch.Tensor, target: torch.Tensor) -> None:
        """Decode ``wire`` into ``target`` on the decode stream, by cached kernel launches where possible."""
        launches = decoder.cached_launches(wire, target)
        if launches is None:
            self._on_stream(self._decode, decoder, wire, target)
            return
        source, out = wire.data_ptr(), target.data_ptr()
        for nbytes, wire_at, out_at in decoder.raw_copies:
            self._runtime.copy(out + out_at, source + wire_at, nbytes, self._decode_raw)
        for launch in launches:
            launch(source, out, stream=self._decode_raw)

    def copy_out(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        self._runtime.wait(self._out_raw, self.record(self.stream()))
        self._copy(self._out, target, source)
        self._keep_until_done(source, self._out)
        return self.record(self._out_raw)

    def mark(self) -> Any:
        mark = self._api.Event(enable_timing=True)
        mark.record(self._current())
        return mark

    def landed(self, copied: Any) -> bool:
        return self._runtime.reached(copied)

    def synchronize(self, event: Any = None) -> None:
        if event is None:
            super().synchronize()
        else:
            self._runtime.synchronize(event)


class FlushingEngine(RuntimeEngine):
    """The engine on Windows, which hands each copy and each decoding to the device at once, for the reason that
    `FlushingStreamEngine` states.
    """

    def copy_in(
        self, target: torch.Tensor, source: torch.Tensor, after: Iterable[Any], timed: bool
    ) -> tuple[Any, Any]:
        found = super().copy_in(target, source, after, timed)
        self._runtime.flush(self._in_raw)
        return found

    def decode(
        self, decoder: Decoder, wire: torch.Tensor, target: torch.Tensor, after: Iterable[Any], timed: bool
    ) -> tuple[Any, Any]:
        found = super().decode(decoder, wire, target, after, timed)
        self._runtime.flush(self._decode_raw)
        return found


def runtime_engine(device: torch.device) -> RuntimeEngine | None:
    """Return the engine for a CUDA or HIP device, None if its runtime cannot be called directly.

    The caller then uses `StreamEngine`, which calls the runtime through torch.
    """
    if device.type != "cuda" or not hasattr(torch._C, "_cuda_getCurrentRawStream"):
        return None
    runtime = find()
    if runtime is None:
        return None
    try:
        engine = (FlushingEngine if on_windows() else RuntimeEngine)(device, runtime)
        engine.prove()
        return engine
    except Exception as error:
        logger.warning("carom: the device's runtime is called through torch: %s", error)
        return None
