"""Processes that have imported ai-toolkit's packages and wait for a job, and a copy of the checkout for them.

All processes of a benchmark import at the same time, before any measurement. Imports one after another took 10 to 20
s each on the machines used. Imports during a measured job took its processor time and memory bandwidth.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections import deque
from pathlib import Path

HERE = Path(__file__).resolve().parent
READY = "carom: imported"  # aitoolkit_warm.py prints this after its imports
CODE = (
    "extensions_built_in",
    "jobs",
    "toolkit",
)  # the imported folders, which are copied so that bytecode can be written in them


def copied(checkout: Path, place: Path) -> None:
    """Make a copy of the checkout in ``place``: its code is copied, other items are links, and ``extensions`` is a
    new folder.

    With bytecode in another folder (PYTHONPYCACHEPREFIX) no copies would be needed, but then Python would not use the
    bytecode of installed packages.
    """
    place.mkdir()
    for item in checkout.iterdir():
        if item.name in CODE:
            shutil.copytree(item, place / item.name, ignore=shutil.ignore_patterns("__pycache__"))
        elif item.name not in ("extensions", "output", ".git"):
            (place / item.name).symlink_to(item)
    (place / "extensions").mkdir()


class Ready:
    """A pool of ``count`` processes of ``python`` in folder ``place`` that import in advance.

    If no process is left for a job, another is started. Errors of imports are written to the file ``errors``.
    """

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
        """Wait until all processes have imported."""
        for process in self._waiting:
            _until_ready(process)

    def run(self, job: Path, log: Path, env: dict[str, str], timeout_s: float = 600) -> int:
        """Run run.py for one job; return its exit code, or -1 after ``timeout_s`` seconds."""
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
        """Kill the processes that got no job."""
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
    """Return the number of processes that import at once for ``jobs`` jobs."""
    return max(1, min(jobs, os.cpu_count() or 1, 12))
