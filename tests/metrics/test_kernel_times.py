"""The split of a step: kernels by phase, waiting for weights, waiting for the host, and what unpacking adds."""

from __future__ import annotations

import carom
import pytest
import torch
from carom.core.codec import DECODE_KERNELS
from carom.core.metrics.kernel_times import Kernel, StepSplit, kernel_times, record_kernels
from carom.core.metrics.meter import Meter
from carom.core.plan.roofline import PhaseWork, roofline_seconds
from hypothesis import given
from hypothesis import strategies as st
from torch import nn


def kernel(name: str, start: float, seconds: float, launched: float | None = None) -> Kernel:
    return Kernel(name, start, start + seconds, start if launched is None else launched)


DECODE = min(DECODE_KERNELS)


def test_a_kernel_belongs_to_the_phase_in_which_the_host_launched_it():
    ran = [
        kernel("before", 0.0, 1.0),
        kernel("forward", 12.0, 2.0, launched=10.5),  # runs when the host is in the backward already
        kernel("backward", 14.0, 3.0, launched=11.5),
        kernel("optimizer", 17.0, 5.0, launched=13.0),
    ]
    times = kernel_times(ran, begin=10.0, turn=11.0, end=12.0)
    assert times.kernels == (2.0, 3.0)


def test_gaps_are_not_busy_and_what_overlaps_is_busy_once():
    ran = [kernel("a", 0.0, 2.0), kernel("b", 1.0, 2.0), kernel("c", 5.0, 1.0)]
    times = kernel_times(ran, begin=0.0, turn=9.0, end=9.0)
    assert times.busy == 4.0 and sum(times.kernels) == 5.0


def test_a_gap_is_the_host_s_up_to_the_launch_of_the_next_kernel():
    ran = [
        kernel("a", 1.0, 2.0, launched=0.5),
        kernel("b", 8.0, 1.0, launched=7.0),
        kernel("c", 10.0, 1.0, launched=7.5),
    ]
    times = kernel_times(ran, begin=0.0, turn=99.0, end=99.0)
    assert times.late == 0.5 + 4.0  # before a, and from the end of a (3.0) to the launch of b
    split = StepSplit.from_kernels(times, train=False, seconds=11.0, stall_seconds=0.25)
    assert split.gap_seconds == 11.0 - 4.0 - 4.5 - 0.25


def test_unpacking_is_no_kernel_of_the_model_and_what_it_adds_to_them_is_told():
    block = ["norm", "product", "gelu", "product", "add"]
    ran, at = [], 0.0
    for number in range(3):
        for place, name in enumerate(block):
            seconds = 4.0 if (name, place) == ("product", 3) else 1.0  # two sizes, one name
            if number == 1 and place == 3:
                ran.append(kernel(DECODE, at, 0.5))
                seconds += 0.25
            ran.append(kernel(name, at, seconds))
            at += seconds
    times = kernel_times(ran, begin=0.0, turn=100.0, end=100.0)
    assert times.decode == 0.5
    assert times.contention == (0.25, 0.0)
    assert times.kernels == (3 * 8 + 0.25, 0.0)


@given(
    st.lists(st.tuples(st.floats(0, 100), st.floats(0, 5), st.sampled_from(["a", "b", DECODE])), max_size=30),
    st.floats(0, 100),
)
def test_contention_and_busy_time_never_exceed_the_kernels(spans, turn):
    ran = [kernel(name, start, seconds) for start, seconds, name in spans]
    times = kernel_times(ran, begin=0.0, turn=turn, end=100.0)
    assert 0 <= times.busy <= sum(times.kernels) + 1e-9 and times.late >= 0
    assert all(
        0 <= added <= whole + 1e-9 for added, whole in zip(times.contention, times.kernels, strict=True)
    )


def test_the_parts_add_up_to_the_step():
    times = kernel_times([kernel("a", 0.0, 3.0), kernel("b", 5.0, 2.0)], begin=0.0, turn=4.0, end=9.0)
    split = StepSplit.from_kernels(times, train=True, seconds=9.0, stall_seconds=1.0)
    assert split.kernel_seconds == (3.0, 2.0)
    assert (
        sum(split.kernel_seconds) + split.stall_seconds + split.host_late_seconds + split.gap_seconds == 9.0
    )


def test_the_roofline_is_by_phase_and_disk_bounds_the_whole_step():
    phases = [PhaseWork(2.0, 10), PhaseWork(5.0, 30)]
    assert roofline_seconds(phases, 10.0) == 2.0 + 5.0
    assert roofline_seconds(phases, 5.0) == 2.0 + 6.0
    assert roofline_seconds(phases, None) == 7.0
    assert roofline_seconds(phases, 5.0, disk_seconds=20.0) == 20.0


class LateHost:
    """An engine whose device reaches a mark as soon as it is made: it always waits for the host."""

    blocking = virtual_clock = False
    host_on_clock = True

    def hold(self, seconds: float) -> None:
        pass

    def __init__(self) -> None:
        self.now = 0.0

    def mark(self) -> float:
        return self.now

    def done(self, mark: float) -> bool:
        return True

    def synchronize(self, event: float | None = None) -> None:
        pass

    def elapsed(self, first: float, last: float) -> float:
        return last - first


def forward(meter: Meter, engine: LateHost) -> None:
    """Two units of 3 s; the host takes 2 s between them, and weights are late by 1 s."""
    meter.forward_begins(False)
    for name in ("first", "second"):
        came = engine.mark()
        engine.now += 1.0 if name == "second" else 0.0
        meter.waited(came, engine.mark(), name, False)
        if meter.profiling:
            meter.unit_begins(name, came, engine.mark())
        engine.now += 3.0
        if meter.profiling:
            meter.unit_ends(name, engine.mark())
        engine.now += 2.0 if name == "first" else 0.0
    meter.forward_ends()


def test_without_a_profiler_gaps_between_units_are_the_host_s():
    engine = LateHost()
    meter = Meter(engine)  # type: ignore[arg-type]
    for _ in range(6):
        forward(meter, engine)
    found = meter.medians()
    assert found.seconds == 9.0 and found.compute_seconds == 8.0
    split = found.split
    assert split is not None and split.source == "events"
    assert (split.kernel_seconds, split.stall_seconds, split.host_late_seconds) == ((6.0, 0.0), 1.0, 2.0)
    assert found.roofline_seconds == 6.0, "the roofline has kernels in it, and no gap"


def test_kernels_of_the_last_step_replace_what_events_told():
    engine = LateHost()
    meter = Meter(engine)  # type: ignore[arg-type]
    for _ in range(6):
        forward(meter, engine)
    meter.profile_next()
    import time

    clock = time.time() - time.perf_counter()
    meter.forward_begins(False)
    launched = time.time()
    engine.now += 9.0
    meter.forward_ends()
    meter.kernels_ran([kernel("a", launched + 1, 4.0, launched), kernel("other", 0.0, 50.0)], clock)
    split = meter.medians().split
    assert split is not None and split.source == "profiler"
    assert split.kernel_seconds == (4.0, 0.0)
    assert split.host_late_seconds + split.gap_seconds == pytest.approx(5.0)
    assert meter.medians().roofline_seconds == 4.0


def test_on_the_simulated_device_the_clock_tells_the_kernels():
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    with carom.stream(model, device=carom.SimulatedDevice(seed=0), vram=2 * 64 * 65 * 4) as session:
        with torch.no_grad():
            for _ in range(5):
                model(torch.ones(2, 64))
        ran = []
        with torch.no_grad():
            report = session.profile_step(lambda: ran.append(model(torch.ones(2, 64))))
    assert len(ran) == 1
    assert report.kernel_source == "clock" and report.host_late_seconds == 0.0
    assert report.kernel_seconds + report.stall_seconds == pytest.approx(report.step_seconds)
    assert {"kernel_seconds", "host_late_seconds", "decode_contention_seconds"} <= set(report.to_dict())


def test_an_error_of_the_profiled_step_is_raised():
    with pytest.raises(ZeroDivisionError):
        record_kernels(lambda: 1 // 0, torch.device("cpu"))


def test_the_kernels_that_unpack_have_the_names_by_which_they_are_told_apart():
    pytest.importorskip("triton")
    from carom.core.codec import kbit_triton, lossless_triton

    assert {lossless_triton._decode.fn.__name__, kbit_triton._dequantize.fn.__name__} == DECODE_KERNELS
