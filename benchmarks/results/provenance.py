"""Where a benchmark record comes from: the commit, the date, the versions, and the fingerprint of the host.

Every benchmark that keeps a record calls `provenance`, so that no record is made without them.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from ...core.common.errors import CaromError

ROOT = Path(__file__).resolve().parents[2]
COMMIT = re.compile(r"[0-9a-f]{7,40}(\+changes)?")
LOOP = 1_000_000  # iterations of the timed loop
_PACKAGES = (
    "torch",
    "numpy",
    "safetensors",
    "triton",
    "ramtorch",
    "diffusers",
    "accelerate",
    "transformers",
    "peft",
    "optimum-quanto",
    "torchao",
    "bitsandbytes",
    "comfy-aimdo",
)

# A child process asks the accelerator, because this process must not hold a context on the measured device.
# It copies 256 MiB of pinned memory to the device eight times; the first two copies are not counted.
_DEVICE = """
import json, statistics, torch
p = torch.cuda.get_device_properties(0)
found = {"name": p.name, "memory_bytes": p.total_memory, "link_bytes_per_second": None}
try:
    source = torch.zeros(256 << 20, dtype=torch.uint8).pin_memory()
    target = torch.empty_like(source, device="cuda")
    rates = []
    for _ in range(8):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(); target.copy_(source, non_blocking=True); end.record(); end.synchronize()
        rates.append(source.numel() / (1e-3 * start.elapsed_time(end)))
    found["link_bytes_per_second"] = statistics.median(rates[2:])
except RuntimeError as error:
    found["link_error"] = str(error)[:200]
print(json.dumps(found))
"""


class ProvenanceError(CaromError):
    """A record cannot be made, because it would not say which commit it measured."""


def provenance(*, peers: Mapping[str, str] | None = None, kept: bool = True) -> dict[str, Any]:
    """Return the keys `date`, `commit`, `machine` and `versions` of a new record.

    `peers`: versions or commits of host programs and peers that run from a checkout (ComfyUI, ai-toolkit, musubi),
    by name; they are added to the versions of the installed packages.
    `kept`: whether the record is written to a file. A result that is only printed has `commit` None where the commit
    is not known, as in a package that was installed from a wheel.

    Raises ProvenanceError if the commit of a kept record is not known, or CAROM_COMMIT is no commit.
    """
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(required=kept),
        "machine": machine(),
        "versions": {**versions(), **(peers or {})},
    }


def commit(*, required: bool = True) -> str | None:
    """Return the hash of the checkout's commit, with "+changes" if files differ from it.

    The environment variable CAROM_COMMIT has precedence over git. Raises ProvenanceError if CAROM_COMMIT is no commit.
    If neither gives a hash, raises ProvenanceError where the commit is ``required``, else returns None.
    """
    given = os.environ.get("CAROM_COMMIT")
    if given is not None:
        if not COMMIT.fullmatch(given):
            raise ProvenanceError(
                f"CAROM_COMMIT={given!r} is no commit: a record must say what it measured. Set it to the output of "
                "`git rev-parse HEAD`, followed by +changes if files differ from that commit"
            )
        return given

    found = checkout_commit(ROOT)
    if found is None and required:
        raise ProvenanceError(
            f"The commit of {ROOT} is not known (it is no git checkout, or git is not installed), and a record must say "
            "what it measured. Set CAROM_COMMIT to the output of `git rev-parse HEAD` in the checkout it was copied from"
        )
    return found


def checkout_commit(root: Path) -> str | None:
    """Return the hash of the commit of the git checkout `root`, with "+changes" if files differ from it.

    Return None if `root` is not the top folder of a git checkout, or if git is not installed.
    """

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=20, check=True
        ).stdout.strip()

    try:
        # A folder without git may lie inside another repository, whose commit says nothing about it.
        if Path(git("rev-parse", "--show-toplevel")).resolve() != root.resolve():
            return None
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def machine() -> dict[str, Any]:
    """Return the fingerprint of this host. It contains no name and no address of the host.

    `memory_bytes`: host memory; `accelerator`: name and memory in bytes of the first accelerator, or None;
    `link_bytes_per_second`: median rate of six copies of 256 MiB of pinned host memory to it, or None;
    `python_loop_seconds`: see `python_loop_seconds`.
    """
    import torch

    found: dict[str, Any] = {
        "system": f"{platform.system()} {platform.release()}",
        "processor": platform.machine(),
        "cpu_model": cpu_model(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "python_loop_seconds": python_loop_seconds(),
        "accelerator": None,
        "link_bytes_per_second": None,
    }
    if torch.cuda.is_available():
        found |= {"cuda": torch.version.cuda, "hip": torch.version.hip}
        found["accelerator"] = {"name": "unknown", "memory_bytes": None}
        try:
            out = subprocess.run([sys.executable, "-c", _DEVICE], capture_output=True, text=True, timeout=180)
            device = json.loads(out.stdout.strip().splitlines()[-1])
            found["link_bytes_per_second"] = device.pop("link_bytes_per_second")
            found["accelerator"] = device
        except (OSError, subprocess.SubprocessError, ValueError, IndexError):
            pass  # the benchmark itself fails where the device does not work
    return found


def cpu_model() -> str:
    """Return the name of the processor, from /proc/cpuinfo on Linux, else from `platform`."""
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8", errors="replace")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def python_loop_seconds() -> float:
    """Return the speed of Python itself on this host: the seconds of a loop of one million iterations that adds
    ``i & 7`` to an integer, the median of five. No library takes part.
    """

    def loop() -> float:
        began, total = time.perf_counter(), 0
        for i in range(LOOP):
            total += i & 7
        return time.perf_counter() - began

    return statistics.median(loop() for _ in range(5))


def versions() -> dict[str, str]:
    """Return the versions of Python and of the relevant installed packages."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
