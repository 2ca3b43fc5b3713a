"""A step's figures: read when the device has reached their marks, each byte counted in one step."""

from __future__ import annotations

import pytest
from carom.core.metrics.meter import Meter
from carom.core.metrics.report import Report


class Engine:
    """Marks are times of its own; none is reached before somebody waits for the device."""

    device, blocking, virtual_clock, host_on_clock = None, False, True, False

    blocking = virtual_clock = False

    def __init__(self) -> None:
        self.now, self.reached = 0.0, 0.0

    def mark(self) -> float:
        self.now += 1.0
        return self.now

    def done(self, mark: float) -> bool:
        return mark <= self.reached

    def synchronize(self, event: float | None = None) -> None:
        self.reached = self.now

    def elapsed(self, first: float, last: float) -> float:
        assert max(first, last) <= self.reached, "a time is read that is not there yet"
        return last - first


@pytest.fixture
def meter() -> Meter:
    return Meter(Engine())


def step(meter: Meter, engine: Engine, wire: int = 10, raw: int = 30) -> None:
    meter.forward_begins(False)
    began, ended = engine.mark(), engine.mark()
    meter.copied("unit", (began, ended), wire, raw, False)
    meter.copied("unit", (engine.mark(), engine.mark()), wire, 0, False, 0)  # its second piece
    meter.decoded((engine.mark(), engine.mark()))
    meter.waited(engine.mark(), engine.mark(), "unit", False)
    meter.forward_ends()


def test_a_report_waits_for_the_device_and_counts_each_step_once(meter):
    engine = meter._engine
    for _ in range(5):
        step(meter, engine)
    assert meter.medians().steps == 0, "nothing was reached yet"
    meter.finish()
    found = meter.medians()
    assert (found.steps, found.wire_bytes, found.raw_bytes, found.transfers) == (3, 20, 30, 1)
    assert found.stall_seconds == found.decode_seconds == 1.0


def test_a_step_that_failed_is_none(meter):
    engine = meter._engine
    for _ in range(3):
        step(meter, engine)
    meter.forward_begins(False)
    meter.copied("unit", None, 1000, 1000, False)
    meter.abandon()
    meter.finish()
    assert meter.medians().wire_bytes == 20 and meter.steps == 4


def test_what_was_read_from_disk_is_counted_in_the_step_in_which_it_came(meter):
    engine, read = meter._engine, [0]
    meter.disk_bytes = lambda: read[0]
    for nbytes in (700, 100, 100, 100, 100):
        read[0] += nbytes
        step(meter, engine)
    meter.finish()
    assert meter.medians().disk_bytes == 100


def test_weights_that_stay_packed_count_by_what_they_unpack_to():
    packed = {"resident_packed_bytes": 70, "resident_packed_raw_bytes": 100, "resident_packed_units": 1}
    assert Report(resident_bytes=270, streamed_bytes=400, **packed).weight_bytes == 200 + 100 + 400
    assert Report(resident_bytes=200, streamed_bytes=400).weight_bytes == 600


def microbatches(meter: Meter, count: int, wire: int = 10) -> None:
    """A step of a GPipe schedule: ``count`` forwards, then ``count`` backwards, each with one copy."""
    for _ in range(count):
        meter.forward_begins(True)
        meter.copied("unit", None, wire, wire, False)
        meter.forward_ends()
    for _ in range(count):
        meter.backward_begins()
        meter.copied("unit", None, wire, wire, True)
        meter.backward_ends()


@pytest.mark.parametrize("reached", [False, True])
@pytest.mark.parametrize("count", [1, 4, 20])
def test_all_backwards_before_the_next_forward_belong_to_the_step_of_the_forwards(meter, count, reached):
    """Whether the device has reached the step's end by the next backward or not."""
    engine = meter._engine
    if reached:
        engine.done = lambda mark: True
        engine.synchronize()
        engine.reached = float("inf")
    for _ in range(5):
        microbatches(meter, count)
    meter.finish()
    found = meter.medians()
    assert found.train and found.transfers == 2 * count and found.wire_bytes == 20 * count
    assert found.steps == 3, "without the two first"


def test_bytes_from_disk_in_a_later_backward_are_counted_in_its_step(meter):
    read = [0]
    meter.disk_bytes = lambda: read[0]
    for _ in range(5):
        meter.forward_begins(True)
        read[0] += 100
        meter.forward_ends()
        for _ in range(2):
            meter.backward_begins()
            read[0] += 10
            meter.backward_ends()
    meter.finish()
    assert meter.medians().disk_bytes == 120


def test_a_backward_after_an_inference_pass_does_not_change_that_passs_figures(meter):
    for _ in range(3):
        step(meter, meter._engine)
    meter.backward_begins()
    meter.copied("unit", None, 1000, 1000, True)
    meter.backward_ends()
    meter.finish()
    found = meter.medians()
    assert not found.train and found.wire_bytes == 20
