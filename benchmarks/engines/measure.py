"""Measurement of times, memory and fingerprints, the same for every engine, on CUDA, ROCm and CPU."""

from __future__ import annotations

import gc
import hashlib
import statistics
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import psutil
import torch
import torch.nn.attention

from ...core.metrics.kernel_times import record_kernels
from .processes import spread

SAMPLE = 256  # number of values kept of a tensor, so that results of two processes can be compared
FLAT_FROM = 50  # number of the step at which memory use has settled


class HostEvent:
    """A replacement for a device event if the device is the host."""

    def __init__(self) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        """Do nothing, because the host has no pending work."""

    def elapsed_time(self, end: HostEvent) -> float:
        return 1e3 * (end.at - self.at)


def make_event(device: torch.device) -> Any:
    """Return a new timing event of `device`."""
    return torch.cuda.Event(enable_timing=True) if device.type == "cuda" else HostEvent()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Marks:
    """The events that split one step into named phases; each event marks the end of the phase with its name."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.events: list[tuple[str, Any]] = []

    def __call__(self, name: str) -> None:
        event = make_event(self.device)
        event.record()
        self.events.append((name, event))


def time_steps(
    step: Callable[[Marks], None], steps: int, warmup: int, device: torch.device
) -> dict[str, Any]:
    """Run `step` repeatedly without pause; return medians, quartiles and all samples in ms of the last `steps` runs.

    The device time of a step lasts from the end of the previous step to the end of this step, so that work between
    steps is included. The host is at most one step ahead, as in a trainer that logs its last loss. The wall time of a
    step is the time between two completions. `host_ms` is the time that the host spends in the call.
    """
    reserved_early: int | None = None
    previous_end = make_event(device)
    previous_end.record()
    records: list[tuple[Any, list[tuple[str, Any]], float]] = []
    # `walls` has the times at which step i - 1 was complete. On the host, step i is complete when its call returns.
    behind = device.type == "cuda"
    walls: list[float] = [] if behind else [time.perf_counter()]
    for index in range(warmup + steps):
        marks = Marks(device)
        started = time.perf_counter()
        step(marks)
        host = 1e3 * (time.perf_counter() - started)
        end = make_event(device)
        end.record()
        previous_end.synchronize()
        walls.append(time.perf_counter())
        records.append((previous_end, [*marks.events, ("end", end)], host))
        previous_end = end
        if index + 1 == FLAT_FROM:
            reserved_early = memory_held(device)
    synchronize(device)
    if behind:
        walls.append(time.perf_counter())
    device_ms: list[float] = []
    host_ms: list[float] = []
    phases: dict[str, list[float]] = {}
    for start, events, host in records[warmup:]:
        device_ms.append(start.elapsed_time(events[-1][1]))
        host_ms.append(host)
        for name, event in events[:-1]:
            phases.setdefault(name, []).append(start.elapsed_time(event))
            start = event
    wall_ms = [1e3 * (after - before) for before, after in zip(walls, walls[1:], strict=False)][warmup:]
    return {
        "ms_per_step": statistics.median(device_ms),
        **spread(device_ms),
        "wall_ms_per_step": statistics.median(wall_ms),
        "host_ms_per_step": statistics.median(host_ms),
        "phases_ms": {name: statistics.median(values) for name, values in phases.items()},
        "held_at_step_50_bytes": reserved_early,
        "held_at_end_bytes": memory_held(device),
    }


class HostMarks(Marks):
    """Marks that also keep the host's time (`time.time`) at the end of each phase."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.times: list[tuple[str, float]] = []

    def __call__(self, name: str) -> None:
        super().__call__(name)
        self.times.append((name, time.time()))


def kernel_times_of(step: Callable[[Marks], None], device: torch.device) -> dict[str, Any]:
    """Run `step` once under the profiler; return the ms of its kernels by phase, and of unpacking; {} without kernels.

    A kernel belongs to the phase in which the host launched it. Kernels that unpack weights are counted apart.
    """
    marks = HostMarks(device)
    kernels = record_kernels(lambda: step(marks), device)
    if not kernels:
        return {}
    found: dict[str, float] = {}
    since = 0.0
    for name, until in marks.times:
        own = [
            kernel.seconds for kernel in kernels if since <= kernel.launched < until and not kernel.decodes
        ]
        found[name] = found.get(name, 0.0) + 1e3 * sum(own)
        since = until
    return {
        "kernel_ms": found,
        "decode_ms": 1e3 * sum(kernel.seconds for kernel in kernels if kernel.decodes),
        "kernels": len(kernels),
    }


def memory_held(device: torch.device) -> int:
    """Return the bytes that the process holds now: reserved by the device's allocator, or resident memory if the
    device is the host.
    """
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else host_rss()


def reset_peaks(device: torch.device) -> None:
    """Free the allocator's unused blocks and reset the peaks."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def device_memory(device: torch.device) -> dict[str, int | None]:
    """Return the peaks since `reset_peaks`, and the bytes in use on the whole card; all None if the device is not
    CUDA.
    """
    if device.type != "cuda":
        return {"peak_allocated_bytes": None, "peak_reserved_bytes": None, "card_used_bytes": None}
    free, total = torch.cuda.mem_get_info(device)
    return {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(device),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(device),
        "card_used_bytes": total - free,
    }


def host_rss() -> int:
    """Return the resident host memory of this process in bytes."""
    return psutil.Process().memory_info().rss


def host_available() -> int:
    """Return the bytes of available host memory, which fall when any process pins memory."""
    return psutil.virtual_memory().available


def measure_link(nbytes: int, device: torch.device, repeats: int = 12) -> float:
    """Return the rate of copies of `nbytes` pinned bytes from host to device in bytes/s, the median over `repeats`."""
    source = torch.zeros(nbytes, dtype=torch.uint8)
    source.random_(0, 255) if nbytes < 1 << 24 else source.fill_(7)
    if device.type == "cuda":
        source = source.pin_memory()
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)
    rates = []
    for _ in range(repeats + 2):
        start, end = make_event(device), make_event(device)
        start.record()
        target.copy_(source, non_blocking=True)
        end.record()
        synchronize(device)
        rates.append(nbytes / (1e-3 * max(start.elapsed_time(end), 1e-6)))
    return statistics.median(rates[2:])


def fingerprint(tensors: list[torch.Tensor]) -> dict[str, Any]:
    """Return the SHA-256 over the bytes of `tensors` in order, and an even sample of their values (float32)."""
    digest = hashlib.sha256()
    values = []
    share = max(1, SAMPLE // max(1, len(tensors)))
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
        values.append(flat[:: max(1, flat.numel() // share)][:share].float())
    sample = torch.cat(values) if values else torch.empty(0)
    return {"sha256": digest.hexdigest(), "sample": [round(v, 8) for v in sample[:SAMPLE].tolist()]}


@contextmanager
def deterministic():
    """Make torch use deterministic kernels inside the ``with`` block, and restore the setting afterwards.

    Attention runs on the math backend, because the fused backward kernels add in varying order, so that not even two
    passes of the resident run agree (seen on an H200 at 1024 tokens).
    """
    before = torch.are_deterministic_algorithms_enabled()
    warn_before = torch.is_deterministic_algorithms_warn_only_enabled()
    fill_before = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_before)
        torch.utils.deterministic.fill_uninitialized_memory = fill_before  # type: ignore[attr-defined]
