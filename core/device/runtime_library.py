"""`runtime_library`: the CUDA or HIP runtime library that torch uses in this process.

The library is found among those that are loaded, never by a name alone: several versions may be installed, and
each loaded copy has its own state.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

_MOST_MODULES = 4096  # the modules of a process that are looked through on Windows


def runtime_library() -> tuple[Any, str] | None:
    """Return the library for ctypes and the prefix of its functions ("cuda" or "hip"); None if no such library
    is loaded. Raises OSError if a loaded library cannot be opened by its path.
    """
    prefix, stem, version = ("hip", "amdhip64", torch.version.hip) if torch.version.hip else ("cuda", "cudart", torch.version.cuda)  # fmt: skip
    library = None if sys.platform == "win32" else _torch_library(prefix)
    if library is None:
        path = choose(loaded_libraries(), stem, version or "")
        # Opening a loaded library by its full path returns the loaded copy.
        library = None if path is None else ctypes.CDLL(path)
    return None if library is None else (library, prefix)


def choose(paths: Iterable[str], stem: str, version: str) -> str | None:
    """Return the path whose file name is that of the runtime ``stem`` ("amdhip64" or "cudart").

    ``version``: the runtime's version as torch states it, such as "7.2.1". If several files fit, the first one of
    the same major version is returned, else the first one. Examples of file names: libamdhip64.so,
    libamdhip64.so.7, amdhip64.dll (before HIP 6), amdhip64_7.dll, libcudart-9335f6a2.so.12, cudart64_110.dll.
    """
    name = re.compile(
        rf"lib{stem}(?:-[0-9a-f]+)?\.so(?:\.(?P<so>\d+)[.\d]*)?|{stem}(?:64)?(?:_(?P<dll>\d+))?\.dll",
        re.IGNORECASE,
    )
    found = [(path, match) for path in paths if (match := name.fullmatch(re.split(r"[/\\]", path)[-1]))]
    major = version.split(".")[0]
    for path, match in found:
        number = match["so"] or match["dll"] or ""
        if major and (number == major or (stem == "cudart" and number.startswith(major))):
            return path
    return found[0][0] if found else None


def loaded_libraries() -> list[str]:
    """Return the full paths of the libraries that are loaded in this process, in no particular order; [] where
    the system does not tell.
    """
    if sys.platform == "win32":
        return _windows_modules()
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:  # a system without /proc
        return []
    fields = (line.split(maxsplit=5) for line in maps.splitlines())
    return list(dict.fromkeys(parts[5] for parts in fields if len(parts) == 6 and parts[5].startswith("/")))


def _torch_library(prefix: str) -> Any:
    """Return torch's own device library (libc10_cuda or libc10_hip), None if runtime functions cannot be
    found through it.

    Looking names up there finds the runtime that torch is linked with. Other packages may load other copies
    of the runtime, and each copy has its own error for each thread.
    """
    path = Path(torch.__file__).parent / "lib" / f"libc10_{prefix}.so"
    if not path.exists():
        return None
    library = ctypes.CDLL(str(path))
    return library if hasattr(library, f"{prefix}GetLastError") else None


def _windows_modules() -> list[str]:
    """Return the full paths of the modules of this process."""
    kernel: Any = ctypes.WinDLL("kernel32")  # type: ignore[attr-defined,unused-ignore]
    kernel.GetCurrentProcess.restype = ctypes.c_void_p
    kernel.K32EnumProcessModules.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_uint32,
        ctypes.c_void_p,
    ]
    kernel.GetModuleFileNameW.argtypes = [ctypes.c_void_p, ctypes.c_wchar_p, ctypes.c_uint32]
    handles, needed = (ctypes.c_void_p * _MOST_MODULES)(), ctypes.c_uint32()
    if not kernel.K32EnumProcessModules(
        kernel.GetCurrentProcess(), handles, ctypes.sizeof(handles), ctypes.byref(needed)
    ):
        return []
    count = min(_MOST_MODULES, needed.value // ctypes.sizeof(ctypes.c_void_p))
    buffer = ctypes.create_unicode_buffer(32768)  # the longest path of Windows, in characters
    return [
        buffer.value for handle in handles[:count] if kernel.GetModuleFileNameW(handle, buffer, len(buffer))
    ]
