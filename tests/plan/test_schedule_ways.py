"""Which way units are held: packed where the link binds, raw where computing does, and never more than fits."""

from __future__ import annotations

import pytest
from carom.core.plan.predict import Link
from carom.core.plan.region import ALIGN
from carom.core.plan.schedule import Times, UnitCost, Way
from carom.core.plan.schedule_check import check_schedule
from carom.core.plan.schedule_maker import make_schedule
from carom.core.plan.schedule_seconds import predict_schedule
from carom.core.plan.schedule_ways import Split, way_costs
from hypothesis import given, settings
from tests_schedule_cases import forward, problems, there_and_back

SIZE, PACKED = 20 * ALIGN, 14 * ALIGN
COPY = SIZE / 1e9  # seconds
COUNT = 20


def times(factor, decoder=20e9, order=None, host=0.0):
    order = order or forward(COUNT)
    return Times(Link(1e9, 0.0), [factor * COPY] * len(order.uses), decoder, host)


def schedule(factor, slots, decoder=20e9, units=None):
    units = units or [UnitCost(SIZE, PACKED)] * COUNT
    made = make_schedule(forward(COUNT), units, int(slots * SIZE), times(factor, decoder), ALIGN)
    check_schedule(made)
    return made


def ways(made):
    return {way: made.ways.count(way) for way in Way if way in made.ways}


def test_where_the_link_binds_units_are_packed():
    made = schedule(0.1, 6)
    assert made.ways.count(Way.STREAMED_PACKED) > COUNT // 2 and Way.STREAMED_RAW not in made.ways
    raw = make_schedule(forward(COUNT), [UnitCost(SIZE)] * COUNT, 6 * SIZE, times(0.1), ALIGN)
    assert predict_schedule(made, times(0.1)).seconds < 0.75 * predict_schedule(raw, times(0.1)).seconds


def test_packed_units_stream_through_one_decoded_unit_and_two_staging_buffers_where_the_link_binds():
    made = schedule(0.05, 6)
    assert made.staging_bytes == 2 * PACKED and made.region_bytes < 2 * SIZE


def test_where_computing_binds_units_are_raw():
    assert ways(schedule(3.0, 6)).keys() <= {Way.CACHED_RAW, Way.STREAMED_RAW}


@pytest.mark.parametrize("decoder", [None, 0.5e9])
def test_a_decoder_that_is_missing_or_slower_than_the_link_packs_nothing(decoder):
    assert ways(schedule(0.1, 6, decoder)).keys() <= {Way.CACHED_RAW, Way.STREAMED_RAW}


def test_what_fits_packed_stays_packed_and_crosses_no_link():
    made = schedule(0.001, 0.85 * COUNT, decoder=400e9)
    assert made.transfers == 0
    assert made.ways.count(Way.CACHED_PACKED) > 0 and made.ways.count(Way.CACHED_RAW) > 0


def test_trainable_units_are_held_raw():
    units = [UnitCost(SIZE, 0, True) if unit % 2 else UnitCost(SIZE, PACKED) for unit in range(COUNT)]
    made = schedule(0.1, 6, units=units)
    assert any(way.packed for way in made.ways[::2]) and not any(way.packed for way in made.ways[1::2])


def costs(factor=0.5, host=0.0, order=None, units=None):
    order, units = order or forward(COUNT), units or [UnitCost(SIZE, PACKED)] * COUNT
    return way_costs(order, units, times(factor, order=order, host=host), ALIGN)


@pytest.mark.parametrize(
    "split, link, decoded",
    [
        (Split(5, 5, False), 15, 0),
        (Split(5, 5, True), 15 * 0.7, 15),
        (Split(5, 15, False), 5, 10),
        (Split(5, 15, True), 5 * 0.7, 15),
        (Split(20, 20, False), 0, 0),
    ],
)
def test_the_formula_takes_what_is_busy_longest(split, link, decoded):
    assert costs(0.0).seconds(split) == pytest.approx(max(link, decoded / 20) * COPY)
    assert costs(9.0).seconds(split) == pytest.approx((9 * COUNT + decoded / 20) * COPY)
    slow_host = costs(0.0, host=9 * COPY)
    assert slow_host.seconds(split) == pytest.approx(max(link * COPY, (20 - split.raw) * 9 * COPY))


def test_each_visit_of_a_cycle_costs():
    order = there_and_back(COUNT)
    twice = costs(0.0, order=order)
    # The unit at the turn is used twice in a row, which is one visit.
    assert twice.seconds(Split(0, 0, False)) == pytest.approx((2 * COUNT - 1) * COPY)


def test_a_unit_that_is_not_used_takes_no_room_of_the_region():
    units = [UnitCost(SIZE, PACKED)] * COUNT + [UnitCost(8 * SIZE, 8 * PACKED)]
    with_unused, without = costs(units=units), costs()
    for multiple in (1.0, 2.0):
        assert with_unused.raw_split(9 * SIZE, multiple) == without.raw_split(9 * SIZE, multiple)
        packed = (9 * SIZE, multiple, True)
        assert with_unused.packed_split(*packed) == without.packed_split(*packed)


@settings(deadline=None, max_examples=60)
@given(problems())
def test_every_split_leaves_the_region_that_it_was_asked_for(problem):
    order, units, capacity, times, grain = problem
    found = way_costs(order, units, times, grain)
    for multiple, packs in ((1.0, True), (2.0, True), (3.0, False)):
        split = found.packed_split(capacity, multiple, packs)
        if split is not None:
            assert 0 <= split.raw <= split.kept <= len(units)
            assert found.leaves_region(split, capacity, multiple)
            assert all(not found.leaves_region(Split(split.raw, kept, split.packs), capacity, multiple)
                       for kept in range(split.kept + 1, len(units) + 1))  # fmt: skip
        raw = found.raw_split(capacity, multiple)
        assert raw.raw == 0 or found.leaves_region(raw, capacity, multiple)
