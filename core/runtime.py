"""The engine's calls that run for every unit, made of the CUDA or HIP runtime directly, to spare the host time.

torch's own way to copy on another stream sets and resets the current stream around a dispatched operator, and makes
an event object for each record. The same library that torch has loaded is called through ctypes instead, which also lets go of the
interpreter's lock meanwhile. Where it cannot be found, or does not answer as it should, `StreamEngine` serves as it is.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

import torch

from .transfer import Decoder, StreamEngine

logger = logging.getLogger("carom")
_DISABLE_TIMING = 2
_DEFAULT = 4  # cudaMemcpyDefault: the direction follows from the addresses
_NOT_READY = 600
_PROOF = 4096  # bytes


class Handles(list[int]):
    """Handles of events that nobody has any more: used again, and destroyed with this list.

    Not while the interpreter exits: the driver gives back everything then, and its library may be unloaded already.
    """

    def __init__(self, destroy: Callable[[int], object]) -> None:
        super().__init__()
        self._destroy, self._exiting = destroy, sys.is_finalizing

    def __del__(self) -> None:
        if self._exiting():
            return
        # Events that die in the same cycle may be finalized later than this list.
        self.append = self._destroy  # type: ignore[method-assign,assignment]
        while self:
            self._destroy(self.pop())


class Event:
    """An event of the runtime; its handle is used again when nobody has it any more (who waits, waits for the record
    that was the last when the wait was issued)."""

    __slots__ = ("handle", "_free")

    def __init__(self, handle: int, free: list[int]) -> None:
        self.handle, self._free = handle, free

    def __del__(self) -> None:
        self._free.append(self.handle)


class Runtime:
    """Calls of one loaded runtime library. Each raises RuntimeError with the runtime's code where it fails."""

    def __init__(self, library: Any, prefix: str) -> None:
        pointer, size, flags = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint

        def bind(name: str, *arguments: Any) -> Callable[..., int]:
            function = getattr(library, prefix + name)
            function.argtypes, function.restype = arguments, ctypes.c_int
            return function

        self._create = bind("EventCreateWithFlags", ctypes.POINTER(pointer), flags)
        self._copy = bind("MemcpyAsync", pointer, pointer, size, ctypes.c_int, pointer)
        self._record = bind("EventRecord", pointer, pointer)
        self._wait = bind("StreamWaitEvent", pointer, pointer, flags)
        self._query = bind("EventQuery", pointer)
        self._synchronize = bind("EventSynchronize", pointer)
        self._last_error = bind("GetLastError")
        self._device_pointer = bind("HostGetDevicePointer", ctypes.POINTER(pointer), pointer, flags)
        destroy, forget = bind("EventDestroy", pointer), self._last_error
        # Events keep the list and not the runtime, so the list goes with the last of them.
        self._free = Handles(lambda handle: destroy(handle) and forget())

    def event(self) -> Event:
        """An event without timing, of the current device."""
        try:  # not `if self._free`: another thread may take the last one meanwhile
            return Event(self._free.pop(), self._free)
        except IndexError:
            return self._new_event()

    def _new_event(self) -> Event:
        handle = ctypes.c_void_p()
        code = self._create(ctypes.byref(handle), _DISABLE_TIMING)
        if code:
            self._failed(code, "EventCreate")
        return Event(handle.value or 0, self._free)

    def device_pointer(self, address: int) -> int | None:
        """Where the device addresses registered host memory; None where it does not."""
        found = ctypes.c_void_p()
        if self._device_pointer(ctypes.byref(found), address, 0):
            self._last_error()
            return None
        return found.value

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """``nbytes`` between two addresses, on ``stream``."""
        code = self._copy(target, source, nbytes, _DEFAULT, stream)
        if code:
            self._failed(code, "MemcpyAsync")

    def record(self, event: Event, stream: int) -> None:
        code = self._record(event.handle, stream)
        if code:
            self._failed(code, "EventRecord")

    def wait(self, stream: int, event: Event) -> None:
        code = self._wait(stream, event.handle, 0)
        if code:
            self._failed(code, "StreamWaitEvent")

    def reached(self, event: Event) -> bool:
        code = self._query(event.handle)
        if code == _NOT_READY:
            self.forget_error()
            return False
        if code:
            self._failed(code, "EventQuery")
        return True

    def synchronize(self, event: Event) -> None:
        code = self._synchronize(event.handle)
        if code:
            self._failed(code, "EventSynchronize")

    def forget_error(self) -> None:
        """Clear the error that the last failed call left on this thread: torch would raise it from its next launch."""
        self._last_error()

    def _failed(self, code: int, name: str) -> NoReturn:
        self.forget_error()
        raise RuntimeError(
            f"{name} failed with error {code} of the device's runtime; the device may be in no state to go on"
        )


def find() -> Runtime | None:
    """The runtime library that torch calls in this process; None where there is none to be found."""
    prefix, stem = ("hip", "amdhip64") if torch.version.hip else ("cuda", "cudart")
    try:
        library = _loaded_windows(stem) if sys.platform == "win32" else _of_torch(prefix) or _loaded(stem)
        return None if library is None else Runtime(library, prefix)
    except (OSError, AttributeError) as error:
        logger.debug("carom: the device's runtime is called through torch: %s", error)
        return None


def forget_error(device: torch.device) -> None:
    """Clear the error that a failed call of the runtime left on this thread.

    The runtime keeps it until somebody asks for it. torch asks after its next launch on the thread, and would raise it from
    an operator that has nothing to do with it. torch has no call that clears it.
    """
    runtime = find()
    if runtime is not None:
        runtime.forget_error()
        return
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)  # raises the error, which clears it


def _of_torch(prefix: str) -> Any:
    """torch's own library of the device, through which names of the runtime are found that it is linked with: other packages
    load other copies of the runtime, and each copy has an error of its own for each thread. None where it is not linked."""
    path = Path(torch.__file__).parent / "lib" / f"libc10_{prefix}.so"
    if not path.exists():
        return None
    library = ctypes.CDLL(str(path))
    return library if hasattr(library, f"{prefix}GetLastError") else None


def _loaded(stem: str) -> Any:
    """A library of this process whose file's name begins with lib``stem``."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:  # a system without it
        return None
    for line in maps.splitlines():
        path = line.split(maxsplit=5)[-1]
        if path.startswith("/") and path.rsplit("/", 1)[-1].startswith(f"lib{stem}."):
            return ctypes.CDLL(path)
    return None


def _loaded_windows(stem: str) -> Any:
    major = (torch.version.cuda or "").split(".")[0]
    names = (
        [f"{stem}.dll", f"{stem}_7.dll", f"{stem}_6.dll"] if torch.version.hip else [f"{stem}64_{major}.dll"]
    )
    kernel: Any = ctypes.WinDLL("kernel32")  # type: ignore[attr-defined,unused-ignore]
    kernel.GetModuleHandleW.restype = ctypes.c_void_p
    for name in names:
        handle = kernel.GetModuleHandleW(ctypes.c_wchar_p(name))
        if handle:
            return ctypes.CDLL(name, handle=handle)
    return None


class RuntimeEngine(StreamEngine):
    """`StreamEngine` whose events are the runtime's, and whose streams are handles. Marks stay torch's events."""

    def __init__(self, device: torch.device, runtime: Runtime) -> None:
        super().__init__(device)
        assert self._raw_stream is not None
        self._runtime = runtime
        self._here: Callable[[], int] = torch._C._cuda_getDevice
        self._in_raw, self._out_raw = self._in.cuda_stream, self._out.cuda_stream
        self._decode_raw = self._decode.cuda_stream

    def prove(self) -> None:
        """Copy a little and back. Raises where what arrives is not what was sent."""
        source = torch.arange(_PROOF, dtype=torch.int64).to(torch.uint8)
        with torch.inference_mode(False):
            target = torch.zeros(_PROOF, dtype=torch.uint8, device=self.device)
            before = self.record(self.stream())
            copied, _ = self.copy_in(target, source, (before,), False)
            self.wait(copied)
            after = self.record(self.stream())
            self.synchronize(after)
            if not (self.landed(copied) and torch.equal(target.cpu(), source)):
                raise RuntimeError("what a copy of the runtime brought is not what was sent")

    def mapped(self, data: torch.Tensor, pinned: bool) -> torch.Tensor | None:
        if not pinned:
            return None
        with self._on():
            address = self._runtime.device_pointer(data.data_ptr())
            if address is None:
                return None
            try:
                found = self.at(address, data.numel(), data)
            except RuntimeError:  # torch does not take it for memory of the device
                return None
        return found if found.device == self.device and found.data_ptr() == address else None

    def stream(self) -> int:
        return self._raw_stream(self.device.index)  # type: ignore[misc]

    def record(self, stream: Any, event: Any = None) -> Event:
        if self._here() != self.device.index:
            with self._on():
                return self._record(stream, event)
        return self._record(stream, event)

    def _record(self, stream: int, event: Event | None) -> Event:
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
        if not timed and self._here() == self.device.index:
            runtime.copy(target.data_ptr(), source.data_ptr(), source.numel(), stream)
            return self._record(stream, None), None
        with self._on():
            marks = self._marked(self._in) if timed else None
            runtime.copy(target.data_ptr(), source.data_ptr(), source.numel(), stream)
            if marks is not None:
                marks[1].record(self._in)
            return self._record(stream, None), marks

    def decode(
        self, decoder: Decoder, wire: torch.Tensor, target: torch.Tensor, after: Iterable[Any], timed: bool
    ) -> tuple[Any, Any]:
        runtime, stream = self._runtime, self._decode_raw
        for event in after:
            runtime.wait(stream, event)
        if self._here() == self.device.index:
            marks = self._marked(self._decode) if timed else None
            self._decoded(decoder, wire, target)
            if marks is not None:
                marks[1].record(self._decode)
            return self._record(stream, None), marks
        with self._on():
            return self.decode(decoder, wire, target, (), timed)

    def _decoded(self, decoder: Decoder, wire: torch.Tensor, target: torch.Tensor) -> None:
        launches = decoder.again(wire, target)
        if launches is None:
            self._on_stream(self._decode, decoder, wire, target)
            return
        source, out = wire.data_ptr(), target.data_ptr()
        for nbytes, wire_at, out_at in decoder.as_it_is:
            self._runtime.copy(out + out_at, source + wire_at, nbytes, self._decode_raw)
        for launch in launches:
            launch(source, out, stream=self._decode_raw)

    def copy_out(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        self._runtime.wait(self._out_raw, self.record(self.stream()))
        self._copy(self._out, target, source)
        self._stays_for(source, self._out)
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


def runtime_engine(device: torch.device) -> RuntimeEngine | None:
    """The engine for a CUDA or HIP device; None where its runtime cannot be called directly, and torch is to do it."""
    if device.type != "cuda" or not hasattr(torch._C, "_cuda_getCurrentRawStream"):
        return None
    runtime = find()
    if runtime is None:
        return None
    try:
        engine = RuntimeEngine(device, runtime)
        engine.prove()
        return engine
    except Exception as error:
        logger.warning("carom: the device's runtime is called through torch: %s", error)
        return None
