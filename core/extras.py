"""Optional backends: whether comfy-aimdo's pool and GPUDirect Storage can be used here, or why not."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from . import aimdo


@dataclass(frozen=True)
class Extra:
    """An optional backend: usable, or the reason why not."""

    name: str
    usable: bool
    reason: str


# Sessions' own detection, and one page brought and given back.
AIMDO_PROBE = """
import importlib, importlib.util, json, os, sys
root = sys.argv[1]
spec = importlib.util.spec_from_file_location(
    "carom", os.path.join(root, "__init__.py"), submodule_search_locations=[root])
sys.modules["carom"] = package = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
aimdo = importlib.import_module("carom.core.aimdo")
make_engine = importlib.import_module("carom.core.transfer").make_engine
found = aimdo.find(make_engine("cuda:0"), asked=True)
if not isinstance(found, str):
    try:
        bar = found.bar(aimdo.PAGE)
        signature = bar.fault(0, 1)
        if signature is not None:
            bar.unpin(0, 1)
        found = "" if signature is not None else "a VBAR gave no memory for one page"
    except aimdo.NativeError as error:
        found = str(error)
print(json.dumps({"reason": found}))
"""


def probe_aimdo(kind: str | None, seconds: float = 30.0) -> Extra:
    """Whether comfy-aimdo's pool can be used, with a GPU of ``kind`` ("cuda", "rocm", None: there is none).

    Tried in a child process, because its hooks can take a process down.
    """
    name = "comfy-aimdo"
    if not aimdo.installed():
        return Extra(name, False, "not installed")
    version = aimdo.version()
    if kind is None:
        return Extra(name, False, f"{version} installed, but there is no GPU for it")
    if reason := aimdo.hindrance():
        return Extra(name, False, f"{version} installed, but {reason}")
    root = str(Path(__file__).resolve().parent.parent)
    try:
        done = subprocess.run(
            [sys.executable, "-c", AIMDO_PROBE, root],
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        answer = json.loads(done.stdout.strip().splitlines()[-1]) if done.returncode == 0 else None
    except subprocess.TimeoutExpired:
        return Extra(name, False, f"{version} did not answer within {seconds:g} s")
    except (OSError, ValueError, IndexError) as error:
        return Extra(name, False, f"{version}: the probe gave no answer ({type(error).__name__})")
    if answer is None:
        return Extra(name, False, f"{version} ended the probe with exit code {done.returncode}")
    if answer["reason"]:
        return Extra(name, False, f"{version}: {answer['reason']}")
    return Extra(name, True, f"{version} works here")


def probe_kvikio(kind: str | None, nvidia_fs: str = "/proc/driver/nvidia-fs/stats") -> Extra:
    """Whether kvikio can read from the drive to the device directly (GPUDirect Storage); ``kind`` as above.

    Carom's use of it was tested with a stand-in for kvikio only (tests/test_gds.py), which a usable one says too.
    """
    name = "kvikio (GPUDirect Storage)"
    if sys.platform != "linux":
        return Extra(name, False, "exists for Linux only")
    if importlib.util.find_spec("kvikio") is None:
        return Extra(name, False, "not installed")
    version = _version("kvikio")
    if kind != "cuda":
        return Extra(name, False, f"{version} installed, but there is no NVIDIA GPU for it")
    if not os.path.exists(nvidia_fs):
        return Extra(
            name,
            False,
            f"{version} installed, but the nvidia-fs kernel module is not loaded: reads pass through RAM",
        )
    return Extra(
        name,
        True,
        f"{version} installed and nvidia-fs is loaded; tried against the way through RAM on each file system, never yet "
        "proven on hardware that has it",
    )


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "unknown version"
