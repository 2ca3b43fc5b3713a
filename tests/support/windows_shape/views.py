"""Views of modules for code that sees Windows: what Windows lacks is hidden, what only Windows has is there.

`builtins.__import__` gives a view instead of the module where the importing module is in the shape. A name that a view
does not hide or replace is that of the real module, read and written; a hidden or replaced one that is set
(by a test) is kept in the view.
"""

from __future__ import annotations

import builtins
import sys
import types
from collections.abc import Mapping
from typing import Any

from . import files, lacking

_DELETED = object()
VERSION = (10, 0, 26100)  # Windows 11, 24H2


class View(types.ModuleType):
    """``module`` without the names in ``hidden`` and with those of ``replaced``."""

    def __init__(self, module: types.ModuleType, hidden: frozenset[str], replaced: Mapping[str, Any]) -> None:
        object.__setattr__(self, "_view", (module, hidden, dict(replaced), {}))

    def __getattribute__(self, name: str) -> Any:
        module, hidden, replaced, given = object.__getattribute__(self, "_view")
        if name in given and given[name] is not _DELETED:
            return given[name]
        if name in given:
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
        if name in replaced:
            return replaced[name]
        if name in hidden:
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r} on Windows")
        if name == "__class__":
            return types.ModuleType
        if name == "__dict__":
            shown = {key: value for key, value in vars(module).items() if key not in hidden}
            return {
                key: value for key, value in {**shown, **replaced, **given}.items() if value is not _DELETED
            }
        return getattr(module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        module, hidden, replaced, given = object.__getattribute__(self, "_view")
        if name in hidden or name in replaced:
            given[name] = value
        else:
            setattr(module, name, value)

    def __delattr__(self, name: str) -> None:
        module, hidden, replaced, given = object.__getattribute__(self, "_view")
        if name in hidden or name in replaced:
            given[name] = _DELETED
        else:
            delattr(module, name)

    def __dir__(self) -> list[str]:
        return sorted(self.__dict__)

    def __repr__(self) -> str:
        return f"<Windows' view of {object.__getattribute__(self, '_view')[0]!r}>"


_views: dict[str, View] = {}
_import = builtins.__import__


def _view(name: str) -> View | None:
    """Return the view of a module, made at its first import; None for modules that are the same everywhere."""
    if name not in _REPLACED and name not in lacking.POSIX_ONLY:
        return None
    if name not in _views:
        hidden = lacking.POSIX_ONLY.get(name, frozenset())
        replaced = _REPLACED.get(name, dict)()
        _views[name] = View(sys.modules[name], hidden, replaced)
    return _views[name]


def _import_view(
    name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
) -> Any:
    if level or not files.sees_windows(globals):
        return _import(name, globals, locals, fromlist, level)
    top = name.partition(".")[0]
    if top in lacking.POSIX_MODULES:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    if top in lacking.WINDOWS_MODULES and top not in sys.modules:
        from . import windows_modules

        if not hasattr(windows_modules, f"make_{top}"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        if name not in _views:
            made = types.ModuleType(name)
            vars(made).update(getattr(windows_modules, f"make_{top}")())
            _views[name] = made  # type: ignore[assignment]
        return _views[name]
    found = _import(name, globals, locals, fromlist, level)
    if isinstance(found, types.ModuleType):
        return _view(getattr(found, "__name__", "")) or found
    return found


def _os() -> dict[str, Any]:
    import contextlib

    return {
        "name": "nt",
        "devnull": "/dev/null",
        "add_dll_directory": lambda path: contextlib.nullcontext(),
        "startfile": lambda *_: None,
        **files.O_FLAGS,
    }


def _sys() -> dict[str, Any]:
    version = types.SimpleNamespace(
        major=VERSION[0], minor=VERSION[1], build=VERSION[2], platform=2, service_pack="", platform_version=VERSION
    )  # fmt: skip
    return {
        "platform": "win32",
        "winver": f"{sys.version_info[0]}.{sys.version_info[1]}",
        "getwindowsversion": lambda: version,
    }


def _platform() -> dict[str, Any]:
    import platform

    number = ".".join(str(part) for part in VERSION)
    node = platform.node()
    # platform.uname_result computes the processor by itself.
    return {
        "system": lambda: "Windows",
        "release": lambda: "11",
        "version": lambda: number,
        "machine": lambda: "AMD64",
        "platform": lambda *_, **__: f"Windows-11-{number}-SP0",
        "uname": lambda: platform.uname_result("Windows", node, "11", number, "AMD64"),
        "win32_ver": lambda *_, **__: ("11", number, "SP0", "Multiprocessor Free"),
        "win32_edition": lambda: "Professional",
        "libc_ver": lambda *_, **__: ("", ""),
    }


def _signal() -> dict[str, Any]:
    return {"CTRL_C_EVENT": 0, "CTRL_BREAK_EVENT": 1, "SIGBREAK": 21}


def _mmap() -> dict[str, Any]:
    from .memory import Mapping as Mapped

    return {"mmap": Mapped, "ALLOCATIONGRANULARITY": 65536}


def _locale() -> dict[str, Any]:
    def name(*_: Any) -> str:
        return "utf-8" if files._utf8() else files.CODE_PAGE

    return {"getpreferredencoding": name, "getencoding": name, "getdefaultlocale": lambda: ("en_US", name())}


def _subprocess() -> dict[str, Any]:
    return {
        "CREATE_NEW_PROCESS_GROUP": 0x200, "CREATE_NEW_CONSOLE": 0x10, "CREATE_NO_WINDOW": 0x8000000, "DETACHED_PROCESS": 0x8,
        "STARTUPINFO": types.SimpleNamespace, "STARTF_USESHOWWINDOW": 1, "SW_HIDE": 0,
    }  # fmt: skip


def _ctypes() -> dict[str, Any]:
    from . import libraries

    return libraries.names()


def _wintypes() -> dict[str, Any]:
    from . import libraries

    return libraries.wintypes()


def _psutil() -> dict[str, Any]:
    from . import windows_modules

    return windows_modules.make_psutil()


def _multiprocessing() -> dict[str, Any]:
    import multiprocessing

    def get_context(method: str | None = None) -> Any:
        if method in ("fork", "forkserver"):
            raise ValueError(f"cannot find context for {method!r}")
        return multiprocessing.get_context("spawn")

    return {"get_context": get_context, "get_all_start_methods": lambda: ["spawn"]}


_REPLACED = {
    "os": _os, "sys": _sys, "platform": _platform, "signal": _signal, "mmap": _mmap, "locale": _locale,
    "subprocess": _subprocess, "ctypes": _ctypes, "ctypes.wintypes": _wintypes, "psutil": _psutil,
    "multiprocessing": _multiprocessing,
}  # fmt: skip


def install() -> None:
    builtins.__import__ = _import_view
