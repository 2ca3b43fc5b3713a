"""A program that imports ai-toolkit's packages and then runs `run.py` for one job that it reads from standard input.

Run in the checkout. Standard input is a line of JSON, {"config", "log", "env"}; without a line there is no job. The
processes of a benchmark thus import before any measurement (aitoolkit_ready.py). Nothing here touches a device.

The imported objects are frozen in the garbage collector. ai-toolkit collects garbage about twenty times around a job
(not in its steps), and each collection would search the objects of all modules, which took most of the time of a
short job.
"""

# mypy: ignore-errors
from __future__ import annotations

import gc
import importlib
import json
import os
import pkgutil
import runpy
import sys
import time
import traceback

BEGAN = time.time()


def main() -> int:
    sys.path.insert(0, os.getcwd())
    importlib.import_module("jobs.process")
    for _, name, _ in pkgutil.iter_modules(["extensions_built_in"]):
        importlib.import_module(f"extensions_built_in.{name}")
    gc.collect()
    gc.freeze()
    imported_s = time.time() - BEGAN
    print("carom: imported", flush=True)
    line = sys.stdin.readline()
    if not line.strip():
        return 0
    job = json.loads(line)
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ.update(job["env"], CAROM_BENCH_IMPORTED_S=repr(imported_s))
    sys.argv = ["run.py", job["config"]]
    try:
        runpy.run_path("run.py", run_name="__main__")
    except SystemExit as stop:
        return int(stop.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.exit(code)
