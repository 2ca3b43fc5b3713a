"""Runs real ai-toolkit jobs: everything heavy is imported once, then each job is `run.py` in a forked child.

`python aitoolkit_zygote.py JOBS.json` in the checkout: JOBS is a list of {"config", "log", "env"}. Each child's exit
code goes to standard output as `index code`. The file LOG.peak gets the most anonymous memory of the child in bytes
(pinned memory included, mapped files not), and that of this process before the child, on Linux. Without os.fork each job is a process of its own.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import runpy
import subprocess
import sys
import time
import traceback
import weakref
from pathlib import Path


def child(job: dict) -> int:
    """Run `run.py CONFIG` with output to the log; return its exit code."""
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ.update(job["env"])
    sys.argv = ["run.py", job["config"]]
    try:
        runpy.run_path("run.py", run_name="__main__")
    except SystemExit as stop:
        return int(stop.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def memory(pid: int | str) -> int:
    """Return the anonymous and shared memory of a process in bytes, 0 where the system does not tell."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def wait(pid: int) -> tuple[int, int]:
    """Wait for the child ``pid``; return its exit code, and the most memory that it had in bytes."""
    most = 0
    while True:
        most = max(most, memory(pid))
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status), most
        time.sleep(0.02)


def main() -> None:
    jobs = json.loads(Path(sys.argv[1]).read_text())
    sys.path.insert(0, os.getcwd())
    fork = getattr(os, "fork", None)
    if fork is not None:
        importlib.import_module("jobs.process")
        for _, name, _ in pkgutil.iter_modules(["extensions_built_in"]):
            importlib.import_module(f"extensions_built_in.{name}")
    for index, job in enumerate(jobs):
        if fork is None:
            with open(job["log"], "w") as log:
                command = [sys.executable, "run.py", job["config"]]
                code = subprocess.run(
                    command, stdout=log, stderr=log, env={**os.environ, **job["env"]}
                ).returncode
        else:
            before = memory("self")
            pid = fork()
            if pid == 0:
                code = 1
                try:
                    code = child(job)
                finally:
                    sys.stdout.flush()
                    weakref.finalize._exitfunc()  # as at the end of run.py
                    os._exit(code)
            code, most = wait(pid)
            Path(job["log"] + ".peak").write_text(f"{most} {before}")
        print("CODE", index, code, flush=True)


if __name__ == "__main__":
    main()
