"""An extension for the benchmark's copy of ai-toolkit (folder ``extensions``) that records each step's time, loss and
memory, and the time of each sample and save.

When the process of the job ends, in any way, the records are written as JSON to the file that CAROM_BENCH_OUT names.
Between steps the probe reads a clock and, rarely, counters. It changes nothing, and waits only where the trainer
waits, but for the last two steps of a job that is long enough: those run under torch's profiler, and their times are
not counted. device_time.py lies beside this file.

If CAROM_BENCH_PROFILE is set, samples, saves and some steps run under cProfile, which makes them slower. What it finds is
written beside the records, as KIND.STEPS.prof.
"""

# mypy: ignore-errors
from __future__ import annotations

import contextlib
import cProfile
import functools
import json
import os
import time
import traceback

import torch

from .device_time import DeviceTime

PROFILED = 2  # steps at the end of a job
WARM = 5  # number of steps before the figures begin
LAST = 14  # number of stack frames kept of a failed step
HOST_PROFILED = range(WARM + 2, WARM + 4)  # steps of which CAROM_BENCH_PROFILE profiles the host


def memory() -> dict:
    """Return bytes: of the device's allocator, of host memory that torch pinned, and of the process as the system
    counts them.
    """
    found = {}
    if torch.cuda.is_available():
        found["reserved_bytes"] = torch.cuda.memory_reserved()
        found["peak_reserved_bytes"] = torch.cuda.max_memory_reserved()
        found["peak_allocated_bytes"] = torch.cuda.max_memory_allocated()
        free, total = torch.cuda.mem_get_info()
        found["card_used_bytes"] = total - free
        stats = getattr(torch.cuda, "host_memory_stats", dict)()
        found["torch_pinned_bytes"] = stats.get("allocated_bytes.peak", stats.get("allocated_bytes.current"))
    names = {
        "VmRSS": "rss_bytes",
        "RssAnon": "anonymous_bytes",
        "VmHWM": "peak_rss_bytes",
        "RssShmem": "shared_bytes",
    }
    try:
        with open("/proc/self/status", encoding="utf-8") as status:
            for line in status:
                key, _, value = line.partition(":")
                if key in names:
                    found[names[key]] = int(value.split()[0]) * 1024
    except OSError:
        import psutil

        found["rss_bytes"] = psutil.Process().memory_info().rss
    return found


def failure(index: int, error: Exception) -> dict:
    """Return the record of a failed step: the number of successful steps before it, and the place of the error.

    ai-toolkit skips steps that run out of memory.
    """
    frames = traceback.extract_tb(error.__traceback__)[-LAST:]
    where = [f"{os.path.basename(frame.filename)}:{frame.lineno} {frame.name}" for frame in frames]
    return {"after": index, "error": str(error)[:1000], "where": where, "memory": memory()}


def watch(process) -> dict:
    # Times of the clock that all processes share: the job was requested, and its process began.
    told = {
        "steps": [], "failed_steps": [], "memory": {}, "asked": float(os.environ["CAROM_BENCH_ASKED"]),
        "imported_s": float(os.environ.get("CAROM_BENCH_IMPORTED_S", "nan")), "began": time.time(),
        "pauses": [], "profiling_s": 0.0,
    }  # fmt: skip
    plain = process.hook_train_loop
    total, device_time = process.train_config.steps, DeviceTime()
    profiled_from = total - PROFILED if torch.cuda.is_available() and total >= 2 * WARM else None

    def hook_train_loop(*args, **kwargs):
        index = len(told["steps"])
        if index == WARM:
            told["memory"]["before"] = memory()
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
        if index == profiled_from and "counted_steps" not in told:
            told["counted_steps"] = index
            with profiling(told):
                device_time.start()
        told.setdefault("first_step", time.time())
        begin = time.perf_counter()
        try:
            with host_profile("step", index, index in HOST_PROFILED):
                losses = plain(*args, **kwargs)
        except Exception as error:
            told["failed_steps"].append(failure(index, error))
            raise
        end = time.perf_counter()
        told["last_step"] = time.time()
        told.setdefault("first_step_end", told["last_step"])
        told["steps"].append([begin, end, None if losses is None else float(losses["loss"])])
        if profiled_from is not None and index + 1 == total:
            with profiling(told):
                told["profile"] = device_time.stop(PROFILED)
        if index + 1 in (50, 100, 200, 300):
            told["memory"][str(index + 1)] = memory()
        return losses

    process.hook_train_loop = hook_train_loop
    for kind in ("sample", "save"):
        setattr(process, kind, paused(told, kind, getattr(process, kind)))
    return told


@contextlib.contextmanager
def profiling(told: dict):
    """Note the seconds that the profiler itself takes. A failure costs the figure of the profiler, not the job."""
    begin = time.perf_counter()
    try:
        yield
    except Exception as error:
        told["profile_failed"] = str(error)[:500]
    told["profiling_s"] += time.perf_counter() - begin


@contextlib.contextmanager
def host_profile(kind: str, index: int, wanted: bool = True):
    """Run the block under cProfile, if that was asked for and ``wanted``."""
    if not (wanted and os.environ.get("CAROM_BENCH_PROFILE")):
        yield
        return
    profile = cProfile.Profile()
    with profile:
        yield
    profile.dump_stats(f"{os.environ['CAROM_BENCH_OUT']}.{kind}.{index}.prof")


def paused(told: dict, kind: str, plain):
    """Return ``plain``, a method of the process that runs between steps, so that each call is noted in ``told``."""

    @functools.wraps(plain)
    def call(*args, **kwargs):
        begin = time.perf_counter()
        try:
            with host_profile(kind, len(told["steps"])):
                return plain(*args, **kwargs)
        finally:
            # [kind, number of steps before the call, begin, end]
            told["pauses"].append([kind, len(told["steps"]), begin, time.perf_counter()])

    return call


def wrap(owner) -> None:
    run = owner.run

    @functools.wraps(run)
    def watched(self, *args, **kwargs):
        told = watch(self)
        try:
            return run(self, *args, **kwargs)
        finally:
            told["memory"]["end"] = memory()
            told["ended"] = time.time()
            with open(os.environ["CAROM_BENCH_OUT"], "w", encoding="utf-8") as out:
                json.dump(told, out)

    owner.run = watched


if os.environ.get("CAROM_BENCH_OUT"):
    from jobs.process.BaseSDTrainProcess import BaseSDTrainProcess

    wrap(BaseSDTrainProcess)
