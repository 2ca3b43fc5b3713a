"""`ctypes` as on Windows: `WinDLL` gives the fakes of `calls.py`, and `long` has 32 bits."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

from .errors import TEXTS, windows_error

_state = threading.local()
# {library: {function: C function}}; `calls.py` fills it.
LIBRARIES: dict[str, dict[str, Any]] = {}


def last_error() -> int:
    return getattr(_state, "code", 0)


def set_last_error(code: int) -> int:
    """Set the thread's last error and return the one before. One value serves GetLastError and ctypes' copy."""
    before, _state.code = last_error(), code
    return before


def fake(library: str, restype: Any, *argtypes: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as a call of ``library``.

    It is called through a C function of these types, so a caller that states others passes what it would pass to
    Windows: a handle that was cut to 32 bits stays cut. Pointers arrive as addresses. An exception is an
    error of the fake: it is printed, and the call returns 0.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        LIBRARIES.setdefault(library, {})[function.__name__] = (
            ctypes.CFUNCTYPE(restype, *argtypes)(function),
            restype,
            argtypes,
        )
        return function

    return register


class Library:
    """A loaded library. Functions are found by attribute, as those of `ctypes.WinDLL` are."""

    def __init__(self, name: str, functions: dict[str, Any]) -> None:
        self._name, self._functions = name, functions

    def __getattr__(self, name: str) -> Any:
        found = self.__dict__.get("_functions", {}).get(name)
        if found is None:
            raise AttributeError(f"function {name!r} not found")
        address = ctypes.cast(found[0], ctypes.c_void_p).value
        # Like a function of a DLL: it returns an int and takes anything until the caller states its types.
        made = ctypes.CFUNCTYPE(ctypes.c_int)(address)
        made.argtypes = None
        self.__dict__[name] = made
        return made

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


def load(name: str | None = None, *_: Any, **options: Any) -> Any:
    """`ctypes.WinDLL` (and `CDLL`): a fake library, or the file where ``name`` is a path of one."""
    if name is None:
        raise TypeError("bad argument type for built-in operation")
    from . import calls

    calls.register()
    stem = str(name).replace("\\", "/").rpartition("/")[2].lower()
    stem = stem[:-4] if stem.endswith(".dll") else stem
    if stem in LIBRARIES:
        return Library(stem, LIBRARIES[stem])
    if "/" in str(name):
        return ctypes.CDLL(str(name), **{key: value for key, value in options.items() if key != "winmode"})
    raise FileNotFoundError(
        f"Could not find module {name!r} (or one of its dependencies). Try using the full path with constructor syntax."
    )


class _Loader:
    """`ctypes.windll`: libraries by attribute."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = load(name)
        setattr(self, name, found)
        return found

    LoadLibrary = staticmethod(load)


def _format(code: int | None = None) -> str:
    code = last_error() if code is None else code
    return TEXTS.get(code, (0, "<no description>"))[1] + ("." if code in TEXTS else "")


def _error(code: int | None = None, descr: str | None = None) -> OSError:
    return windows_error(last_error() if code is None else code)


def names() -> dict[str, Any]:
    """Return what Windows' `ctypes` has instead of Linux's names, and beside them."""
    return {
        "WinDLL": load, "OleDLL": load, "CDLL": load, "windll": _Loader(), "oledll": _Loader(), "cdll": _Loader(),
        "WINFUNCTYPE": ctypes.CFUNCTYPE, "HRESULT": ctypes.c_int32,
        "GetLastError": last_error, "get_last_error": last_error, "set_last_error": set_last_error,
        "FormatError": _format, "WinError": _error,
        "c_long": ctypes.c_int32, "c_ulong": ctypes.c_uint32,
        "wintypes": _wintypes_view(),
    }  # fmt: skip


def _wintypes_view() -> Any:
    import sys
    import types
    from ctypes import wintypes as real

    made = types.ModuleType("ctypes.wintypes")
    vars(made).update({**vars(real), **wintypes()})
    assert sys.modules["ctypes.wintypes"] is real
    return made


def wintypes() -> dict[str, Any]:
    """Return the types of `ctypes.wintypes` that have another size where `long` has 64 bits."""
    unsigned, signed = ctypes.c_uint32, ctypes.c_int32
    return {
        "DWORD": unsigned, "ULONG": unsigned, "LONG": signed, "COLORREF": unsigned, "LCID": unsigned, "LCTYPE": unsigned,
        "LPDWORD": ctypes.POINTER(unsigned), "PDWORD": ctypes.POINTER(unsigned), "PULONG": ctypes.POINTER(unsigned),
        "LPLONG": ctypes.POINTER(signed), "PLONG": ctypes.POINTER(signed),
    }  # fmt: skip
