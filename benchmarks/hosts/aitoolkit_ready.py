"""Processes that have imported what ai-toolkit is made of, waiting for their job; and a checkout of its own for them.

All of a benchmark's processes import at the same time, before anything is measured: one after another they took 10 to
20 s each on the machines used, and beside a job that is measured they took its processor and its memory's rate.
"""

# Loaded by its path, beside aitoolkit_gpu.py: nothing of Carom is imported here.
from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections import deque
from pathlib import Path

HERE = Path(__file__).resolve().parent
READY = "carom: imported"  # what aitoolkit_warm.py says when it is
CODE = (
    "extensions_built_in",
    "jobs",
    "toolkit",
)  # what is imported: copied, so that bytecode can lie beside it


def copied(checkout: Path, place: Path) -> None:
    """A checkout in ``place``: its code copied, the rest links, an ``extensions`` folder of its own.

    Bytecode in a folder elsewhere (PYTHONPYCACHEPREFIX) would do without copies, but then no package's own is used.
    """
    place.mkdir()
    for item in checkout.iterdir():
        if item.name in CODE:
            shutil.copytree(item, place / item.name, ignore=shutil.ignore_patterns("__pycache__"))
        elif item.name not in ("extensions", "output", ".git"):
            (place / item.name).symlink_to(item)
    (place / "extensions").mkdir()


class Ready:
    """``count`` processes of ``python`` in ``place`` that import now; one more whenever none is left. Errors of imports go
    to ``errors``."""

    def __init__(self, python: str, place: Path, env: dict[str, str], errors: Path, count: int) -> None:
        self._command = [python, str(HERE / "aitoolkit_warm.py")]
        self._place, self._errors = place, errors
        self._env = {key: value for key, value in env.items() if key != "PYTHONDONTWRITEBYTECODE"}
        self._waiting: deque[subprocess.Popen] = deque(self._begin() for _ in range(count))

    def _begin(self) -> subprocess.Popen:
        with self._errors.open("a") as errors:
            return subprocess.Popen(
                self._command, cwd=self._place, env=self._env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=errors,
            )  # fmt: skip

    def imported(self) -> None:
        """Return when all of them have."""
        for process in self._waiting:
            _until_ready(process)

    def run(self, job: Path, log: Path, env: dict[str, str], timeout_s: float = 600) -> int:
        """run.py for one job; returns its exit code, -1 where it took too long."""
        log.write_text("", "utf-8")
        process = self._waiting.popleft() if self._waiting else self._begin()
        _until_ready(process)
        asked = {**env, "CAROM_BENCH_ASKED": repr(time.time())}
        line = json.dumps({"config": str(job), "log": str(log), "env": asked}) + "\n"
        try:
            process.communicate(line, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return -1
        return process.returncode

    def close(self) -> None:
        """End the processes that no job came for."""
        for process in self._waiting:
            process.kill()
            process.communicate()
        self._waiting.clear()


def _until_ready(process: subprocess.Popen) -> None:
    assert process.stdout is not None
    if getattr(process, "imported", False):
        return
    for line in process.stdout:
        if line.strip() == READY:
            break
    process.imported = True  # type: ignore[attr-defined]


def processes(jobs: int) -> int:
    """How many to have import at once for so many jobs."""
    return max(1, min(jobs, os.cpu_count() or 1, 12))
