"""The probe of an optional backend: whether comfy-aimdo's memory pool can be used on this machine."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from ...core.device import vbar


@dataclass(frozen=True)
class OptionalBackend:
    """The result of probing an optional backend. ``reason``: why the backend is not usable, else its version."""

    name: str
    usable: bool
    reason: str


# A program for a child process: detects the backend as a session does, then allocates one page and releases
# the page again.
AIMDO_PROBE = """
import importlib, importlib.util, json, os, sys
root = sys.argv[1]
spec = importlib.util.spec_from_file_location(
    "carom", os.path.join(root, "__init__.py"), submodule_search_locations=[root])
sys.modules["carom"] = package = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
aimdo = importlib.import_module("carom.core.device.vbar")
make_engine = importlib.import_module("carom.core.device.make_engine").make_engine
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


def probe_aimdo(kind: str | None, seconds: float = 30.0) -> OptionalBackend:
    """Return whether comfy-aimdo's memory pool can be used with a GPU of ``kind`` ("cuda", "rocm", None: no
    GPU).

    The pool is tried in a child process, because comfy-aimdo's hooks can crash a process. ``seconds``: limit
    for the child.
    """
    name = "comfy-aimdo"
    if not vbar.installed():
        return OptionalBackend(name, False, "not installed")
    version = vbar.version()
    if kind is None:
        return OptionalBackend(name, False, f"{version} installed, but there is no GPU for it")
    if reason := vbar.hindrance():
        return OptionalBackend(name, False, f"{version} installed, but {reason}")
    root = str(Path(__file__).resolve().parents[2])
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
        return OptionalBackend(name, False, f"{version} did not answer within {seconds:g} s")
    except (OSError, ValueError, IndexError) as error:
        return OptionalBackend(name, False, f"{version}: the probe gave no answer ({type(error).__name__})")
    if answer is None:
        return OptionalBackend(name, False, f"{version} ended the probe with exit code {done.returncode}")
    if answer["reason"]:
        return OptionalBackend(name, False, f"{version}: {answer['reason']}")
    return OptionalBackend(name, True, f"{version} works here")


def _version(distribution: str) -> str:
    """Return the version of an installed package."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "unknown version"
