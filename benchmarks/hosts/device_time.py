"""The kernel time of some steps in a host program, measured by torch's profiler, beside the time of the steps.

The benchmarks copy this file next to the node and the extension that import it, because Carom may be absent in the
host's process (stock cases).
"""

# mypy: ignore-errors
from __future__ import annotations

import time

import torch

DECODERS = ("_decode", "_dequantize")  # in the names of Carom's kernels that unpack weights
COPIES = ("Memcpy", "Memset", "CopyHostToDevice", "CopyDeviceToHost", "FillBuffer")


class DeviceTime:
    """A profiler that is started before the first of some steps and stopped after the last."""

    def __init__(self) -> None:
        self._profiler, self._began = None, 0.0

    def start(self) -> None:
        """Start the profiler. Nothing happens without a CUDA device."""
        if not torch.cuda.is_available():
            return
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities):
            torch.cuda.synchronize()  # the first use of the profiler in a process takes seconds
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiler.start()
        torch.cuda.synchronize()
        self._began = time.perf_counter()

    def stop(self, steps: int, trace: str = "") -> dict | None:
        """Stop the profiler; return the milliseconds of one of ``steps`` steps, or None without a CUDA device.

        ``step_ms``: wall time under the profiler; ``kernel_ms``: time in which at least one kernel ran, without copies
        and without unpacking; ``decode_ms``: sum of the kernels that unpack Carom's weights; ``copy_ms``: sum of the
        copies between host and device. ``trace``: path for a Chrome trace of the steps.
        """
        if self._profiler is None:
            return None
        torch.cuda.synchronize()
        took = time.perf_counter() - self._began
        self._profiler.stop()
        if trace:
            self._profiler.export_chrome_trace(trace)
        kernels, decode, copies = [], 0, 0
        for event in self._profiler.profiler.kineto_results.events():
            name = event.name()
            if event.device_type() == torch.autograd.DeviceType.CPU:
                continue
            if name.startswith(COPIES):
                copies += event.duration_ns() if "Memcpy" in name or "Copy" in name else 0
            elif name.startswith(DECODERS):
                decode += event.duration_ns()
            else:
                kernels.append((event.start_ns(), event.start_ns() + event.duration_ns()))
        self._profiler = None
        each = 1e-6 / steps
        return {
            "steps": steps, "step_ms": 1e3 * took / steps, "kernel_ms": each * covered(kernels),
            "decode_ms": each * decode, "copy_ms": each * copies,
        }  # fmt: skip


def covered(spans: list[tuple[int, int]]) -> int:
    """Return the length of the union of (start, end) spans."""
    total, reached = 0, 0
    for start, end in sorted(spans):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total
