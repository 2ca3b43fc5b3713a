"""The record of a benchmark run: the arguments, the machine, versions, and the unedited result of every case."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from .case import Case

SCHEMA = 1
ROOT = Path(__file__).resolve().parents[2]
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
)


def new_record(tool: str, argv: list[str]) -> dict[str, Any]:
    """Return a record without results."""
    return {
        "schema": SCHEMA,
        "tool": tool,
        "arguments": argv,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
        "interrupted": False,
        "cases": [],
    }


def add_result(record: dict[str, Any], key: str, case: Case, result: dict[str, Any]) -> None:
    """Append a case and its unedited result to ``record``."""
    record["cases"].append({"key": key, "case": case.to_dict(), "result": result})


def write_record(record: dict[str, Any], path: Path) -> None:
    """Write `record` as JSON to `path`: to a temporary name first, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    os.replace(temporary, path)


def read_record(path: Path) -> dict[str, Any]:
    """Return the record at `path`. Raises ValueError if the file is not a record that this version can read."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"{path} cannot be read ({why}); a record is what a run of the bench kept") from None
    try:
        record = json.loads(text)
        if record["schema"] != SCHEMA:
            raise ValueError(f"{path}: schema {record['schema']!r}; this version reads {SCHEMA}")
        for entry in record["cases"]:
            Case(**entry["case"])
            entry["key"], entry["result"]["status"]
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no record of the bench ({type(error).__name__}: {error})") from None
    return record


def commit() -> str | None:
    """Return the checkout's commit, with "+changes" if files differ from it.

    Without git, return the environment variable CAROM_COMMIT, or None.
    """
    given = os.environ.get("CAROM_COMMIT")
    if given:
        return given

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=20, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def machine() -> dict[str, Any]:
    """Return the processor, memory and accelerator of this machine, without names or addresses of the host."""
    import torch

    found: dict[str, Any] = {
        "system": f"{platform.system()} {platform.release()}",
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "accelerator": None,
    }
    if torch.cuda.is_available():
        # A child process reads the properties, because this process must not hold a context on the measured device.
        code = (
            "import json, torch; p = torch.cuda.get_device_properties(0);"
            "print(json.dumps({'name': p.name, 'memory_bytes': p.total_memory}))"
        )
        try:
            out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
            found["accelerator"] = json.loads(out.stdout.strip().splitlines()[-1])
        except (OSError, subprocess.SubprocessError, ValueError, IndexError):
            found["accelerator"] = {"name": "unknown", "memory_bytes": None}
        found["cuda"], found["hip"] = torch.version.cuda, torch.version.hip
    return found


def versions() -> dict[str, str]:
    """Return the versions of Python and of the relevant installed packages."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
