"""The part of `carom doctor` that concerns Windows with an NVIDIA card: Triton, and the driver's use of host memory."""

from __future__ import annotations

import importlib.util
import platform
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

from .amd import try_triton
from .diagnosis import NOTHING, Finding
from .hardware import Gpu

OFF = "packing is off: weights cross to the card as they are"


def examine(gpu: Gpu | None, trial: Callable[[], tuple[str, bool]] = try_triton) -> list[Finding]:
    """Return the findings, none on another system or without an NVIDIA card. ``trial``: see `amd.try_triton`."""
    if sys.platform != "win32" or gpu is None or gpu.kind != "cuda":
        return []
    return [_triton(trial), _fallback(sys.executable)]


def missing_for_compiling(include: Path | None = None, base: Path | None = None) -> list[str]:
    """Return which of Python's folders "include" and "libs" have not what Triton compiles with.

    An embedded Python, such as that of the portable ComfyUI, has neither. ``include``, ``base``: default this Python's.
    """
    include = include or Path(sysconfig.get_path("include"))
    base = base or Path(sys.base_prefix)
    found = {"include": (include / "Python.h").is_file(), "libs": any((base / "libs").glob("python3*.lib"))}
    return [name for name, there in found.items() if not there]


def _triton(trial: Callable[[], tuple[str, bool]]) -> Finding:
    """Return the finding on Triton, tried in a process of its own."""
    missing = missing_for_compiling()
    data = {"python_lacks": missing}
    copy = (
        f"copy the folders {' and '.join(missing)} of an ordinary Python {platform.python_version()} into "
        f"{sys.base_prefix} (docs/windows.md)"
    )
    if importlib.util.find_spec("triton") is None:
        remedy = (
            "optional: install triton-windows, in the version that goes with your torch (docs/windows.md)"
        )
        return Finding(
            "Triton", f"not installed; {OFF}", "info", f"{remedy}, and {copy}" if missing else remedy, data
        )
    reason, crashed = trial()
    if not reason:
        return Finding("Triton", "decodes packed weights bit for bit", "good", NOTHING, data)
    if crashed:
        return Finding(
            "Triton", f"does not work: {reason}", "poor", "uninstall Triton, or set codec to raw", data
        )
    remedy = copy if missing else "install the triton-windows that goes with your torch (docs/windows.md)"
    lacks = f" (Python has no {' and '.join(missing)})" if missing else ""
    return Finding("Triton", f"does not work{lacks}; {OFF}: {reason}", "fair", remedy, data)


def _fallback(python: str) -> Finding:
    """Return the advice on a card that is full. Whether the user has changed the driver's setting cannot be read.

    Source: https://nvidia.custhelp.com/app/answers/detail/a_id/5490
    """
    return Finding(
        "full card",
        "the driver lends host memory to a program that asks for more than is free: slow steps, and no error",
        "info",
        "to get an error instead: NVIDIA Control Panel, Manage 3D settings, Program Settings, add "
        f"{python}, and set CUDA - Sysmem Fallback Policy to Prefer No Sysmem Fallback",
    )
