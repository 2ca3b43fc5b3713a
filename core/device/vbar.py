"""Access to comfy-aimdo's VBARs: device address ranges whose pages give way when torch's allocator needs
memory.

A page of a VBAR has memory only while it is faulted in. When torch's allocator runs out of memory, comfy-aimdo
takes away pages that are not pinned, and the allocation succeeds. comfy-aimdo (GPL-3.0,
https://github.com/Comfy-Org/comfy-aimdo) is an optional extra, and none of its modules is imported before
`find` is called. A release is accepted if it has the functions that Carom calls, whatever its version. This
process starts comfy-aimdo at most once, and never if the host program (such as ComfyUI) has started it.
docs/planning.md describes the known behaviour of comfy-aimdo's calls, which take no locks.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import logging
import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..common.errors import CaromError
from ..common.sizes import MIB

PAGE = 32 * MIB  # bytes; comfy-aimdo maps and takes away memory by pages of this size
_PACKAGE = "comfy_aimdo"
_TORCH = (2, 8)  # the oldest torch that comfy-aimdo 0.6 names
# The functions that Carom uses. Another release is judged by whether it has them, not by its version.
_CONTROL = ("init", "init_devices", "get_devctx")
_VBAR = (
    "alloc", "fault", "unpin", "prioritize", "set_watermark", "get_watermark", "get_nr_pages", "loaded_size", "close",
)  # fmt: skip
_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


class NativeError(CaromError):
    """An error of comfy-aimdo. A session that gets this error uses torch's allocator instead."""


@dataclass
class _State:
    """The state of comfy-aimdo in this process.

    ``control``: the control module that this process started. ``index``: the device that it was started for.
    ``refused``: why comfy-aimdo cannot be used, or "". ``locks``: one lock for each device.
    """

    lock: threading.RLock = field(default_factory=threading.RLock)
    control: Any = None
    index: int | None = None
    refused: str = ""
    # One lock for each device index, because comfy-aimdo itself takes no locks.
    locks: dict[int, threading.RLock] = field(default_factory=dict)


_state = _State()


def expandable_segments(environment: Mapping[str, str] = os.environ) -> str:
    """Return the environment variable that turns expandable_segments on, "" if none does.

    comfy-aimdo cannot see allocations of expandable segments.
    """
    for name in _SETTINGS:
        if "expandable_segments:true" in environment.get(name, "").lower().replace(" ", ""):
            return name
    return ""


def installed() -> bool:
    """Return whether comfy-aimdo can be imported, without importing it."""
    try:
        return importlib.util.find_spec(_PACKAGE) is not None
    except (ImportError, ValueError):
        return False


def version() -> str:
    """Return the version of the installed comfy-aimdo."""
    try:
        return importlib.metadata.version("comfy-aimdo")
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def hindrance(environment: Mapping[str, str] = os.environ) -> str:
    """Return why comfy-aimdo cannot be used here, as far as can be told without starting it; "" if no reason
    is known.

    `carom doctor` and sessions both use this text.
    """
    if not installed():
        return "comfy-aimdo is not installed"
    if name := expandable_segments(environment):
        return f"{name} turns expandable_segments on, and comfy-aimdo cannot see such allocations: unset it"
    return ""


def device_index(engine: Any) -> int | None:
    """Return the index of the engine's device if it is CUDA or ROCm, else None."""
    device = engine.device
    return device.index if device.type == "cuda" else None


@dataclass(frozen=True)
class Native:
    """comfy-aimdo, started for device ``index``. ``started_by_host``: whether the host program started it."""

    index: int
    lock: threading.RLock
    make: Any  # the ModelVBAR class
    started_by_host: bool = False

    def bar(self, nbytes: int) -> Bar:
        """Return a VBAR of at least ``nbytes``, which takes addresses and no memory yet.

        Raises NativeError.
        """
        return Bar(self, nbytes)


def find(engine: Any, asked: bool) -> Native | str:
    """Return comfy-aimdo for the engine's device, or the reason why it cannot be used.

    ``asked``: whether the user asked for comfy-aimdo by name. If the host program has imported comfy-aimdo,
    it is used only in that case.
    """
    index = device_index(engine)
    if index is None:
        return f"{engine.name} is neither a CUDA nor a ROCm device"
    with _state.lock:
        if reason := _state.refused or hindrance() or _too_old():
            return reason
        loaded = sys.modules.get(f"{_PACKAGE}.control")
        if loaded is not None and loaded is not _state.control and not asked:
            return "another part of this program (a host such as ComfyUI) has comfy-aimdo already"
        try:
            return _start(index)
        except NativeError as error:
            _state.refused = str(error)
        except Exception as error:  # a damaged or quite different package: fall back, and say why
            _state.refused = f"comfy-aimdo {version()} failed: {type(error).__name__}: {error}"
        return _state.refused


def _too_old() -> str:
    """Return the reason if this torch is older than comfy-aimdo needs, else ""."""
    import torch

    numbers = torch.__version__.split("+")[0].split(".")[:2]
    with contextlib.suppress(ValueError):
        if tuple(int(number) for number in numbers) < _TORCH:
            return f"torch {torch.__version__} is older than {'.'.join(map(str, _TORCH))}, which comfy-aimdo needs"
    return ""


def _start(index: int) -> Native | str:
    """Return comfy-aimdo for device ``index``, started now unless it is started already; return the reason if
    it is started for other devices only.

    Raises NativeError if this process can never use comfy-aimdo.
    """
    control = importlib.import_module(f"{_PACKAGE}.control")
    if missing := [name for name in _CONTROL if not hasattr(control, name)]:
        raise NativeError(f"comfy-aimdo {version()} has no {', '.join(missing)}; 0.6 has")
    if control is not _state.control:
        if getattr(control, "lib", None) is not None and getattr(control, "devctxs", None):
            return _join(control, index, started_by_host=True)
        with _LogCapture() as logs:
            if not control.init():
                raise NativeError(f"comfy-aimdo {version()} did not load: {logs.reason}")
            _silence_logs(control)
            # init_devices can be called only once, so it names the one device that this session is for.
            if not control.init_devices([index]):
                raise NativeError(f"comfy-aimdo {version()} refused the device: {logs.reason}")
        _state.control, _state.index = control, index
    if index != _state.index:
        return f"comfy-aimdo was started for device {_state.index}, and takes its devices once for all"
    return _join(control, index, started_by_host=False)


def _join(control: Any, index: int, started_by_host: bool) -> Native | str:
    """Return comfy-aimdo, which is started already, or the reason if it is not started for device ``index``.

    Raises NativeError if comfy-aimdo lacks a function that Carom calls.
    """
    try:
        control.get_devctx(index)
    except RuntimeError as error:
        return f"comfy-aimdo is not started for this device: {error}"
    module = importlib.import_module(f"{_PACKAGE}.model_vbar")
    if getattr(module, "lib", None) is None:
        raise NativeError(
            "comfy-aimdo's VBARs were imported before its library was loaded, so they have none"
        )
    make = getattr(module, "ModelVBAR", None)
    if missing := [name for name in _VBAR if not hasattr(make, name)]:
        raise NativeError(f"comfy-aimdo {version()}: ModelVBAR has no {', '.join(missing)}; 0.6 has")
    device_lock = threading.RLock()
    return Native(index, _state.locks.setdefault(index, device_lock), make, started_by_host)


def _silence_logs(control: Any) -> None:
    """Let comfy-aimdo log critical messages only.

    Its native code logs to the root logger, and the first message would install a handler that prints.
    """
    with contextlib.suppress(Exception):
        control.set_log_critical()


class _LogCapture(logging.Handler):
    """A logging handler that keeps what comfy-aimdo logs while it starts, at any level, to find the reason of
    a failure.

    comfy-aimdo logs its reasons at level INFO. The handler replaces the root logger's handlers and passes on
    the records that these would have got. While it is installed, logging does not install a default handler
    that prints.
    """

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self._lines: list[str] = []
        self._level, self._handlers = logging.WARNING, list[logging.Handler]()

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the message, and pass the record to the root logger's former handlers as far as their levels
        allow.
        """
        self._lines.append(record.getMessage().strip())
        if record.levelno >= self._level:
            for handler in self._handlers:
                if record.levelno >= handler.level:
                    handler.handle(record)

    @property
    def reason(self) -> str:
        """The last message that tells of a failure, else the last message."""
        failures = [line for line in self._lines if "fail" in line.lower()]
        return (failures or self._lines or ["it gave no reason"])[-1]

    def __enter__(self) -> _LogCapture:
        root = logging.getLogger()
        self._level, self._handlers = root.level, root.handlers
        root.handlers = [self]
        root.setLevel(logging.DEBUG)
        return self

    def __exit__(self, *exception: Any) -> None:
        root = logging.getLogger()
        root.handlers = self._handlers
        root.setLevel(self._level)


class Bar:
    """One VBAR. Offsets and sizes are in bytes. Every call holds the device's lock.

    Tensors over the VBAR must keep this object alive: its addresses are freed with the last reference.
    """

    def __init__(self, native: Native, nbytes: int) -> None:
        self.nbytes = -(-nbytes // PAGE) * PAGE
        self._lock = native.lock
        self._bar: Any = None
        with self._lock:
            try:
                self._bar = native.make(self.nbytes, native.index)
                self.address: int = self._bar.alloc(self.nbytes)[1]
                pages = self._bar.get_nr_pages()
            except (MemoryError, RuntimeError) as error:
                raise NativeError(f"no VBAR of {self.nbytes} bytes: {error}") from error
            if pages * PAGE != self.nbytes:
                raise NativeError(f"comfy-aimdo {version()} has pages of another size than {PAGE} bytes")

    def fault(self, start: int, end: int) -> tuple[int, ...] | None:
        """Give bytes [start, end) memory and pin them; return their signature, None if there is no memory for
        them.

        The signature changes if contents were lost since the last fault. If there is no memory, the caller
        has to stream the unit (the weights) at these bytes. Call `unpin` once for each returned signature.
        Raises NativeError.
        """
        with self._lock:
            try:
                signature = self._bar.fault(self.address + start, end - start)
            except RuntimeError as error:
                raise NativeError(f"comfy-aimdo: {error}") from error
        return None if signature is None else tuple(signature)

    def unpin(self, start: int, end: int) -> None:
        """Unpin bytes [start, end), once for every `fault` that returned a signature.

        No tensor over these bytes may be used afterwards. Raises NativeError.
        """
        with self._lock:
            try:
                self._bar.unpin(self.address + start, end - start)
            except RuntimeError as error:
                raise NativeError(f"comfy-aimdo: {error}") from error

    def prioritize(self) -> None:
        """Make this VBAR the last one to give way, and raise its `watermark` to its end."""
        with self._lock:
            self._bar.prioritize()

    def deprioritize(self) -> None:
        """Let this VBAR give way before all others, if the installed comfy-aimdo can do that."""
        with self._lock:
            getattr(self._bar, "deprioritize", lambda: None)()

    def set_watermark(self, nbytes: int) -> None:
        """Take away the pages from ``nbytes`` (a multiple of PAGE) on, and give them no memory from now on.

        Raises NativeError.
        """
        with self._lock:
            try:
                self._bar.set_watermark(nbytes)
            except RuntimeError as error:
                raise NativeError(f"comfy-aimdo: {error}") from error

    @property
    def watermark(self) -> int:
        """The number of bytes, from the beginning, that may have memory; memory pressure lowers the number."""
        with self._lock:
            pages: int = self._bar.get_watermark()
        return pages * PAGE

    @property
    def loaded_bytes(self) -> int:
        """The number of bytes that have memory now."""
        with self._lock:
            return int(self._bar.loaded_size())

    def __del__(self) -> None:
        bar, self._bar = self.__dict__.get("_bar"), None
        if bar is not None:
            with self._lock, contextlib.suppress(Exception):
                bar.close()
