"""The native pool: comfy-aimdo's VBARs, found by their features, started at most once and never for a host that has its own.

A VBAR is a range of device addresses whose pages have memory only while they are faulted in; when torch's allocator
needs the memory, pages that nobody has pinned give way instead of the allocation failing. comfy-aimdo (GPL-3.0,
https://github.com/Comfy-Org/comfy-aimdo) is an optional extra; nothing of it is imported before `find` is called.
What its calls are known to do, and not to do (they take no locks), is written in docs/planning.md.
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

from .errors import CaromError
from .sizes import MIB

PAGE = 32 * MIB  # bytes; what comfy-aimdo maps and gives up as one
_PACKAGE = "comfy_aimdo"
_TORCH = (2, 8)  # the oldest torch that comfy-aimdo 0.6 names
# What is used of it, so that another release is judged by what it has and not by its number.
_CONTROL = ("init", "init_devices", "get_devctx")
_VBAR = (
    "alloc", "fault", "unpin", "prioritize", "set_watermark", "get_watermark", "get_nr_pages", "loaded_size", "close",
)  # fmt: skip
_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


class NativeError(CaromError):
    """The native pool failed; sessions go on with torch's allocator."""


@dataclass
class _State:
    """What this process knows of comfy-aimdo: the control module we started, its device, why it was refused."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    control: Any = None
    index: int | None = None
    refused: str = ""
    locks: dict[int, threading.RLock] = field(default_factory=dict)  # one a device: VBAR calls take none


_state = _State()


def expandable_segments(environment: Mapping[str, str] = os.environ) -> str:
    """The variable that turns expandable segments on, whose allocations comfy-aimdo cannot see; "" where none does."""
    for name in _SETTINGS:
        if "expandable_segments:true" in environment.get(name, "").lower().replace(" ", ""):
            return name
    return ""


def installed() -> bool:
    """Whether comfy-aimdo can be imported; nothing of it is."""
    try:
        return importlib.util.find_spec(_PACKAGE) is not None
    except (ImportError, ValueError):
        return False


def version() -> str:
    """The installed release."""
    try:
        return importlib.metadata.version("comfy-aimdo")
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def hindrance(environment: Mapping[str, str] = os.environ) -> str:
    """Why comfy-aimdo cannot be used here, as far as can be told without trying it; "" where nothing is known.

    `carom doctor` and sessions judge by the same words.
    """
    if not installed():
        return "comfy-aimdo is not installed"
    if name := expandable_segments(environment):
        return f"{name} turns expandable_segments on, and comfy-aimdo cannot see such allocations: unset it"
    return ""


def device_index(engine: Any) -> int | None:
    """The number of the engine's device where it is CUDA's or ROCm's, None elsewhere."""
    device = engine.device
    return device.index if device.type == "cuda" else None


@dataclass(frozen=True)
class Native:
    """comfy-aimdo, started for device ``index``; ``theirs``: by the host program."""

    index: int
    lock: threading.RLock
    make: Any  # the ModelVBAR class
    theirs: bool = False

    def bar(self, nbytes: int) -> Bar:
        """A VBAR of at least ``nbytes``; it takes addresses, no memory. Raises NativeError."""
        return Bar(self, nbytes)


def find(engine: Any, asked: bool) -> Native | str:
    """comfy-aimdo for the engine's device, or the reason why not.

    ``asked``: by name, so that a host's comfy-aimdo is used as it is; without, what a host has is left to it.
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
        except Exception as error:  # a package that is damaged or quite different: fall back, say why
            _state.refused = f"comfy-aimdo {version()} failed: {type(error).__name__}: {error}"
        return _state.refused


def _too_old() -> str:
    import torch

    numbers = torch.__version__.split("+")[0].split(".")[:2]
    with contextlib.suppress(ValueError):
        if tuple(int(number) for number in numbers) < _TORCH:
            return f"torch {torch.__version__} is older than {'.'.join(map(str, _TORCH))}, which comfy-aimdo needs"
    return ""


def _start(index: int) -> Native | str:
    """Start comfy-aimdo for a device, or join in where that was done. Raises NativeError where it never will be."""
    control = importlib.import_module(f"{_PACKAGE}.control")
    if missing := [name for name in _CONTROL if not hasattr(control, name)]:
        raise NativeError(f"comfy-aimdo {version()} has no {', '.join(missing)}; 0.6 has")
    if control is not _state.control:
        if getattr(control, "lib", None) is not None and getattr(control, "devctxs", None):
            return _join(control, index, theirs=True)
        with _Said() as said:
            if not control.init():
                raise NativeError(f"comfy-aimdo {version()} did not load: {said.why}")
            _quiet(control)
            # All devices are named at once and once for all: only the one that a session is for.
            if not control.init_devices([index]):
                raise NativeError(f"comfy-aimdo {version()} refused the device: {said.why}")
        _state.control, _state.index = control, index
    if index != _state.index:
        return f"comfy-aimdo was started for device {_state.index}, and takes its devices once for all"
    return _join(control, index, theirs=False)


def _join(control: Any, index: int, theirs: bool) -> Native | str:
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
    return Native(index, _state.locks.setdefault(index, threading.RLock()), make, theirs)


def _quiet(control: Any) -> None:
    """It logs to the root logger from native code, which would set one up that prints: only what is critical."""
    with contextlib.suppress(Exception):
        control.set_log_critical()


class _Said(logging.Handler):
    """Keeps what comfy-aimdo logs while it starts, at any level: its reasons are logged as information only.

    It stands in front of the root logger's handlers, which are given what they would have been given without it; and
    as there is one, logging sets none up that prints.
    """

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self._lines: list[str] = []
        self._level, self._handlers = logging.WARNING, list[logging.Handler]()

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage().strip())
        if record.levelno >= self._level:
            for handler in self._handlers:
                if record.levelno >= handler.level:
                    handler.handle(record)

    @property
    def why(self) -> str:
        failures = [line for line in self._lines if "fail" in line.lower()]
        return (failures or self._lines or ["it gave no reason"])[-1]

    def __enter__(self) -> _Said:
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
    """One VBAR. Offsets and sizes are in bytes; every call is made under the device's one lock.

    Tensors over it must keep it alive: its addresses are given back with the last reference.
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
        """Give [start, end) memory and pin it: its signature, which changes when anything was lost since; None where
        it has to be streamed. Pairs with `unpin`. Raises NativeError."""
        with self._lock:
            try:
                signature = self._bar.fault(self.address + start, end - start)
            except RuntimeError as error:
                raise NativeError(f"comfy-aimdo: {error}") from error
        return None if signature is None else tuple(signature)

    def unpin(self, start: int, end: int) -> None:
        """One for every `fault` that gave a signature; no tensor over [start, end) may be used after it."""
        with self._lock:
            try:
                self._bar.unpin(self.address + start, end - start)
            except RuntimeError as error:
                raise NativeError(f"comfy-aimdo: {error}") from error

    def prioritize(self) -> None:
        """Above all other VBARs, and all of it is wanted again."""
        with self._lock:
            self._bar.prioritize()

    def set_watermark(self, nbytes: int) -> None:
        """Pages from ``nbytes`` (a multiple of PAGE) on are not to be there. Raises NativeError."""
        with self._lock:
            try:
                self._bar.set_watermark(nbytes)
            except RuntimeError as error:
                raise NativeError(f"comfy-aimdo: {error}") from error

    @property
    def watermark(self) -> int:
        """Bytes below it may be there; pressure lowers it."""
        with self._lock:
            pages: int = self._bar.get_watermark()
        return pages * PAGE

    @property
    def loaded_bytes(self) -> int:
        """Bytes that have memory now."""
        with self._lock:
            return int(self._bar.loaded_size())

    def __del__(self) -> None:
        bar, self._bar = self.__dict__.get("_bar"), None
        if bar is not None:
            with self._lock, contextlib.suppress(Exception):
                bar.close()
