"""Imports what ai-toolkit is made of, then is `run.py` for the one job named on standard input.

Run in the checkout. Standard input: a line of JSON, {"config", "log", "env"}; none: there is no job. So that a benchmark's
processes import before anything is measured (aitoolkit_ready.py); nothing here touches a device.

What was imported is put beyond the garbage collector: ai-toolkit calls it some twenty times around a job (not in its
steps), and each time it looked through all modules' objects, most of the time that a short job took.
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
import traceback


def main() -> int:
    sys.path.insert(0, os.getcwd())
    importlib.import_module("jobs.process")
    for _, name, _ in pkgutil.iter_modules(["extensions_built_in"]):
        importlib.import_module(f"extensions_built_in.{name}")
    gc.collect()
    gc.freeze()
    print("carom: imported", flush=True)
    line = sys.stdin.readline()
    if not line.strip():
        return 0
    job = json.loads(line)
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


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.exit(code)
