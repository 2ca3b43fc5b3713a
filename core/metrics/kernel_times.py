"""The parts of a step: seconds of kernels, of waiting for weights, and of waiting for the host.

`record_kernels` runs a function under torch's profiler and returns the device's kernels. `kernel_times` sums them up
by phase. `StepSplit` is the result for one step. Only `record_kernels` uses torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from ..codec import DECODE_KERNELS


class Kernel(NamedTuple):
    """A kernel that ran on the device. Times are seconds since the epoch (the clock of `time.time`).

    ``launched``: when the host launched the kernel; the start of the kernel where that is unknown.
    """

    name: str
    start: float
    end: float
    launched: float

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def decodes(self) -> bool:
        """Whether the kernel unpacks weights."""
        return self.name in DECODE_KERNELS


@dataclass(frozen=True)
class KernelTimes:
    """The kernels of one step, in seconds; pairs are (forward, backward).

    ``kernels``: sum of the durations of the model's kernels, that is, of all kernels that do not unpack weights.
    ``contention``: the part of ``kernels`` by which kernels took longer because weights were unpacked beside them.
    ``busy``: time in which at least one of the model's kernels ran.
    ``late``: time in which no kernel of the model ran, because the host had not launched the next one.
    ``decode``: sum of the durations of the kernels that unpack weights.
    """

    kernels: tuple[float, float]
    contention: tuple[float, float]
    busy: float
    late: float
    decode: float


@dataclass(frozen=True)
class StepSplit:
    """The parts of a step, in seconds. If no two kernels run at the same time, the step takes the sum of kernels,
    stall, host-late time and gaps.

    ``train``: whether the step had a backward.
    ``kernel_seconds``: the model's kernels in (forward, backward).
    ``stall_seconds``: the device waited for weights.
    ``host_late_seconds``: the device had nothing to do, because the host had not launched the next kernel.
    ``gap_seconds``: what remains of the step, mostly the device's gaps between a kernel and the next one, which was
    launched in time.
    ``contention_seconds``: the part of ``kernel_seconds`` that is due to unpacking beside them; None if unknown.
    ``source``: "profiler"; "clock" on a device whose clock gives kernel times exactly (the CPU, the simulated device);
    or "events": events around the units. Between events the device's gaps within a unit, and all gaps in the backward,
    count as kernel time, so kernel times are upper bounds and gaps are unknown (0).
    """

    train: bool
    kernel_seconds: tuple[float, float]
    stall_seconds: float
    host_late_seconds: float
    source: str
    gap_seconds: float = 0.0
    contention_seconds: tuple[float, float] | None = None

    @classmethod
    def from_kernels(
        cls, times: KernelTimes, *, train: bool, seconds: float, stall_seconds: float
    ) -> StepSplit:
        """Return the parts of a step of ``seconds`` whose kernels were recorded."""
        gaps = max(0.0, seconds - stall_seconds - times.busy - times.late)
        return cls(train, times.kernels, stall_seconds, times.late, "profiler", gaps, times.contention)

    @property
    def undisturbed_seconds(self) -> tuple[float, float]:
        """The kernel seconds of (forward, backward) without contention."""
        forward, backward = self.contention_seconds or (0.0, 0.0)
        return self.kernel_seconds[0] - forward, self.kernel_seconds[1] - backward


def kernel_times(kernels: Iterable[Kernel], *, begin: float, turn: float, end: float) -> KernelTimes:
    """Return the kernel times of the step that the host began at ``begin`` and finished issuing at ``end``.

    ``turn``: when the host began the backward (infinite if it did not). All times are seconds since the epoch. A
    kernel belongs to the phase in which the host launched it.
    """
    own = [kernel for kernel in kernels if begin <= kernel.launched <= end]
    decodes = [kernel for kernel in own if kernel.decodes]
    model = [kernel for kernel in own if not kernel.decodes]
    phases = [kernel.launched >= turn for kernel in model]
    extra = _contention(model, decodes)
    busy, late = _busy_and_late(model, begin)
    pair = lambda seconds: (  # noqa: E731
        sum(value for value, backward in zip(seconds, phases, strict=True) if not backward),
        sum(value for value, backward in zip(seconds, phases, strict=True) if backward),
    )
    return KernelTimes(
        kernels=pair([kernel.seconds for kernel in model]),
        contention=pair(extra),
        busy=busy,
        late=late,
        decode=sum(kernel.seconds for kernel in decodes),
    )


def _busy_and_late(kernels: list[Kernel], begin: float) -> tuple[float, float]:
    """Return the seconds in which at least one of ``kernels`` ran, and those in which none ran because the next one
    was not launched yet.
    """
    busy = late = 0.0
    reached = begin  # the time up to which the device's work is accounted for
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        late += max(0.0, min(kernel.start, kernel.launched) - reached)
        busy += max(0.0, kernel.end - max(reached, kernel.start))
        reached = max(reached, kernel.end)
    return busy, late


def _contention(model: list[Kernel], decodes: list[Kernel]) -> list[float]:
    """Return, for each kernel of ``model``, the seconds that unpacking beside it has added.

    A kernel that overlaps a kernel of ``decodes`` is compared with the median of the kernels that do not, of the same
    name between kernels of the same names. (Matrix products of several sizes can have one name; in a model of
    repeated blocks their neighbours tell them apart.) Where there is no such kernel, nothing is counted.
    """
    if not decodes:
        return [0.0] * len(model)
    names = ["", *(kernel.name for kernel in model), ""]
    places = list(zip(names, names[1:], names[2:], strict=False))
    spans = [(kernel.start, kernel.end) for kernel in decodes]
    disturbed = [_overlaps(kernel, spans) for kernel in model]
    alone: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for place, kernel, touched in zip(places, model, disturbed, strict=True):
        if not touched:
            alone[place].append(kernel.seconds)
    usual = {place: median(seconds) for place, seconds in alone.items()}
    return [
        max(0.0, kernel.seconds - usual.get(place, kernel.seconds)) if touched else 0.0
        for place, kernel, touched in zip(places, model, disturbed, strict=True)
    ]


def _overlaps(kernel: Kernel, spans: list[tuple[float, float]]) -> bool:
    return any(start < kernel.end and kernel.start < end for start, end in spans)


def record_kernels(run: Callable[[], object], device: torch.device) -> list[Kernel]:
    """Call ``run`` under torch's profiler, wait for ``device``, and return the kernels that ran meanwhile.

    Copies and fills are no kernels. The list is empty on a device other than CUDA (or ROCm).
    """
    if device.type != "cuda":
        run()
        return []
    with profile(activities=[ProfilerActivity.CUDA]):
        torch.cuda.synchronize(device)  # the first use of the profiler in a process takes long to set up
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize(device)
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    return _kernels(events)


def _kernels(events: Iterable[Any]) -> list[Kernel]:
    """Return the kernels among the profiler's ``events``, in the order of their start."""
    launched: dict[int, float] = {}
    ran = []
    for event in events:
        if event.device_type() == DeviceType.CPU:
            if "aunch" in event.name():  # cudaLaunchKernel, cuLaunchKernelEx, hipModuleLaunchKernel, ...
                launched[event.correlation_id()] = event.start_ns() * 1e-9
        elif not event.name().startswith(
            ("Memcpy", "Memset", "CopyHostToDevice", "CopyDeviceToHost", "FillBuffer")
        ):
            ran.append(event)
    kernels = []
    for event in ran:
        start = event.start_ns() * 1e-9
        seconds = event.duration_ns() * 1e-9
        kernels.append(
            Kernel(event.name(), start, start + seconds, launched.get(event.correlation_id(), start))
        )
    return sorted(kernels, key=lambda kernel: kernel.start)
