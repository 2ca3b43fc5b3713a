"""Predicted seconds of a schedule: floors that no machine goes below, and cases that are counted by hand."""

from __future__ import annotations

import dataclasses

import pytest
from carom.core.plan.predict import Link
from carom.core.plan.region import ALIGN
from carom.core.plan.schedule import Schedule, Times, UnitCost, Way
from carom.core.plan.schedule_maker import make_schedule
from carom.core.plan.schedule_seconds import predict_schedule
from hypothesis import given, settings
from tests_schedule_cases import forward, problems

SIZE = 10 * ALIGN
COPY = SIZE / 1e9  # seconds
LINK = Link(1e9, 0.0)


def turns(ways=(Way.STREAMED_RAW,) * 2, offsets=(0, SIZE), after=((), ()), packed=0, staging=0) -> Schedule:
    units = (UnitCost(SIZE, packed),) * 2
    return Schedule(forward(2), units, 10 * SIZE, ALIGN, ways, 2 * SIZE, staging, offsets, after, {})


def seconds(schedule, compute, link=LINK, **more):
    return predict_schedule(schedule, Times(link, [compute] * len(schedule.order.uses), **more)).seconds


@settings(deadline=None, max_examples=60)
@given(problems())
def test_a_cycle_takes_no_less_than_its_computing_its_copies_and_its_host(problem):
    order, units, capacity, times, grain = problem
    times = dataclasses.replace(times, host_seconds=1e-5)
    schedule = make_schedule(order, units, capacity, times, grain)
    found = predict_schedule(schedule, times)
    copies = found.wire_bytes / times.link.bytes_per_second + found.transfers * times.link.latency
    least = max(sum(times.compute), copies, len(schedule.fetched) * 1e-5)
    # The cycles that count end with what the first one left to do.
    assert found.seconds >= least * (1 - 1e-6) - (copies + len(schedule.fetched) * 1e-5) / 2
    assert found.seconds >= sum(times.compute) * (1 - 1e-6)
    assert (found.wire_bytes, found.transfers) == (schedule.wire_bytes, schedule.transfers)
    assert found.host_seconds == pytest.approx(len(schedule.fetched) * 1e-5)


def test_units_that_are_never_fetched_cost_their_computing():
    assert seconds(turns(), 1.0) == pytest.approx(2.0)


def test_one_place_for_two_units_hides_no_copy():
    schedule = turns(offsets=(0, 0), after=((1,), (0,)))
    assert seconds(schedule, 3 * COPY) == pytest.approx(2 * (3 + 1) * COPY)
    assert seconds(schedule, 3 * COPY, Link(1e9, COPY)) == pytest.approx(2 * (3 + 2) * COPY)


def test_a_pause_hides_the_first_copy():
    schedule = turns(offsets=(0, 0), after=((1,), (0,)))
    assert seconds(schedule, 3 * COPY, pause=9 * COPY) == pytest.approx((3 + 1 + 3) * COPY)


def test_a_link_that_blocks_adds_its_copies_to_the_computing():
    units = [UnitCost(SIZE)] * 4
    link = Link(1e9, 0.0, blocking=True)
    schedule = make_schedule(forward(4), units, 2 * SIZE, Times(link, [COPY] * 4), ALIGN)
    assert seconds(schedule, COPY, link) == pytest.approx((4 + schedule.transfers) * COPY)


def test_packed_bytes_cross_while_the_place_is_in_use_and_are_decoded_behind_it():
    ways = (Way.STREAMED_PACKED,) * 2
    schedule = turns(ways, (0, 0), ((1,), (0,)), packed=SIZE // 2, staging=SIZE)
    # A copy of half the bytes is hidden behind the computing, the decoding is not.
    found = seconds(schedule, 3 * COPY, decode_bytes_per_second=10e9)
    assert found == pytest.approx(2 * (3 + 0.1) * COPY)
    # Where the link binds it copies without a gap.
    assert seconds(schedule, 0.1 * COPY, decode_bytes_per_second=10e9) == pytest.approx(COPY)


def test_packed_bytes_on_the_device_cross_no_link():
    schedule = turns((Way.CACHED_PACKED,) * 2, (0, 0), ((1,), (0,)), packed=SIZE // 2)
    assert schedule.transfers == schedule.wire_bytes == 0
    assert seconds(schedule, COPY, decode_bytes_per_second=10e9) == pytest.approx(2 * 1.1 * COPY)


def test_a_host_that_issues_crossings_slowly_binds_the_cycle():
    schedule = turns(offsets=(0, 0), after=((1,), (0,)))
    assert seconds(schedule, COPY, host_seconds=50 * COPY) == pytest.approx(100 * COPY, rel=0.05)
