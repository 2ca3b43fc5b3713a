"""Schedules: every promise kept for any order, the least transfers, and units that stay where they were."""

from __future__ import annotations

import time

import pytest
from carom.core.common.errors import BudgetError
from carom.core.plan.predict import Link
from carom.core.plan.region import ALIGN
from carom.core.plan.schedule import Times, UnitCost, UseOrder, Way
from carom.core.plan.schedule_check import check_schedule
from carom.core.plan.schedule_maker import make_schedule, schedule_in_region
from carom.core.plan.schedule_seconds import predict_schedule
from carom.core.plan.schedule_ways import bytes_at_once, least_capacity
from hypothesis import given, settings
from hypothesis import strategies as st
from tests_schedule_cases import forward, problems, replay_blocks, there_and_back

SIZE = 4 * ALIGN


def times_of(order, units, factor=1.0, latency=0.0):
    return Times(Link(1e9, latency), [factor * units[unit].nbytes / 1e9 for unit in order.uses])


def equal(order, count, slots, factor=1.0):
    units = [UnitCost(SIZE) for _ in range(count)]
    return make_schedule(order, units, slots * SIZE, times_of(order, units, factor), ALIGN)


@settings(deadline=None, max_examples=60)
@given(problems())
def test_every_schedule_keeps_every_rule(problem):
    schedule = make_schedule(*problem)
    check_schedule(schedule)
    assert sorted(replay_blocks(schedule)) == sorted(schedule.fetched)


@settings(deadline=None, max_examples=60)
@given(problems())
def test_the_same_problem_gives_the_same_schedule(problem):
    assert make_schedule(*problem) == make_schedule(*problem)


@settings(deadline=None, max_examples=60)
@given(problems(), st.floats(0, 1))
def test_a_change_of_capacity_moves_no_unit_that_may_stay(problem, share):
    order, units, capacity, times, grain = problem
    least = least_capacity(order, units, grain)
    other = make_schedule(order, units, least + int(share * max(0, capacity - least)), times, grain)
    schedule = make_schedule(order, units, capacity, times, grain)
    # A unit that stays packed with one capacity may stay unpacked with the other.
    for stays in ({Way.CACHED_RAW, Way.CACHED_PACKED}, {Way.CACHED_RAW}):
        here, there = (
            {unit for unit, way in enumerate(one.ways) if way in stays} for one in (schedule, other)
        )
        assert here <= there or there <= here or Way.CACHED_PACKED in {*schedule.ways, *other.ways} - stays


@settings(deadline=None, max_examples=60)
@given(problems())
def test_the_least_capacity_works_and_one_byte_less_does_not(problem):
    order, units, _, times, grain = problem
    least = least_capacity(order, units, grain)
    check_schedule(make_schedule(order, units, least, times, grain))
    with pytest.raises(BudgetError) as refused:
        make_schedule(order, units, least - 1, times, grain)
    assert refused.value.least_bytes == least


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 24), st.integers(1, 24))
def test_a_loop_of_equal_units_takes_no_fewer_fetches_than_beladys_bound(count, slots):
    """A pass over n units in k slots that ends as it began misses n - k + 1 of them at least."""
    schedule = equal(forward(count), count, slots)
    least = 0 if count <= slots else count - slots + 1
    assert schedule.transfers >= least
    # Where computing takes no time, copies alone count, and the bound is reached.
    assert equal(forward(count), count, slots, factor=0.0).transfers == least


@pytest.mark.parametrize("slots", [2, 3, 5, 8])
def test_training_keeps_what_lies_in_the_region_at_both_turns(slots):
    count = 10
    schedule = equal(there_and_back(count, updates=frozenset()), count, slots, factor=0.0)
    assert schedule.transfers <= 2 * (count - slots)


def test_trainable_units_are_fetched_between_backward_and_forward_though_they_are_there():
    count, order = 10, there_and_back(10)
    frozen = equal(order, count, 4)
    first = next(unit for unit in range(count) if not frozen.stays(unit))
    assert frozen.fetched.count(first) == 1, "it is there from the end of the backward to the next forward"
    units = [UnitCost(SIZE, trainable=True)] * count
    schedule = make_schedule(order, units, 4 * SIZE, times_of(order, units), ALIGN)
    check_schedule(schedule)
    first = next(unit for unit in range(count) if not schedule.stays(unit))
    assert schedule.before[0][0] == first and schedule.fetched.count(first) == 2
    assert not schedule.after[-1]


def test_frozen_units_do_not_wait_for_an_update():
    """The begin of the next forward is fetched at the end of the backward, apart from what the optimizer changes."""
    order = UseOrder(tuple(range(6)), updates=frozenset({0}))
    units = [UnitCost(SIZE, trainable=unit == 0) for unit in range(6)]
    schedule = make_schedule(order, units, 2 * SIZE, times_of(order, units, 5.0), ALIGN)
    check_schedule(schedule)
    if not schedule.stays(0):
        assert schedule.before == {0: (0,)}
    assert schedule.after[-1] or schedule.after[-2]


def test_everything_stays_where_everything_fits():
    schedule = equal(there_and_back(8), 8, 8)
    assert schedule.residents == frozenset(range(8))
    assert schedule.transfers == schedule.region_bytes == 0 and not any(schedule.after)


def test_orders_without_uses_and_units_that_are_not_used_have_schedules():
    nothing = make_schedule(UseOrder(()), [], 0, Times(Link(1e9), ()), ALIGN)
    check_schedule(nothing)
    units = [UnitCost(SIZE)] * 3
    unused = make_schedule(UseOrder((1, 1)), units, SIZE, Times(Link(1e9), (1.0, 1.0)), ALIGN)
    check_schedule(unused)
    assert unused.transfers == 0 and unused.offsets.count(-1) >= 2


def test_units_that_are_in_use_at_once_have_no_common_bytes():
    # A block's own weights are in use while its three layers are, one after the other.
    uses, ends = [], []
    for block in range(4):
        begin = 4 * block
        uses += range(begin, begin + 4)
        ends += [begin + 3, begin + 1, begin + 2, begin + 3]
    order, units = UseOrder(tuple(uses), tuple(ends)), [UnitCost(SIZE) for _ in range(16)]
    least = least_capacity(order, units, ALIGN)
    assert least == 2 * SIZE
    for slots in range(2, 17):
        schedule = make_schedule(order, units, slots * SIZE, times_of(order, units), ALIGN)
        check_schedule(schedule)
        replay_blocks(schedule)


@settings(deadline=None, max_examples=60)
@given(problems(), st.integers(0, 40 * ALIGN), st.sampled_from([1, ALIGN]))
def test_all_units_pass_through_a_region_that_is_given(problem, more, grain):
    order, units, *_ = problem
    least = bytes_at_once(order, units, grain)
    schedule = schedule_in_region(order, units, least + more, grain)
    check_schedule(schedule)
    assert not schedule.residents and schedule.region_bytes <= least + more
    with pytest.raises(BudgetError) as refused:
        schedule_in_region(order, units, least - 1, grain)
    assert refused.value.least_bytes == least


def test_times_that_do_not_fit_the_order_are_refused():
    with pytest.raises(ValueError, match="3 times"):
        make_schedule(forward(2), [UnitCost(SIZE)] * 2, SIZE, Times(Link(1e9), [1.0] * 3), ALIGN)


@pytest.mark.parametrize("make", [
    lambda: UnitCost(0), lambda: UnitCost(10, 5, True), lambda: UseOrder((0, 1), (0,)),
    lambda: UseOrder((0, 1), (0, 0)), lambda: UseOrder((0, 1, 2), (1, 2, 2)), lambda: UseOrder((0, 1), phases=(1,)),
    lambda: UseOrder((0, 1), phases=(0, 2)), lambda: UseOrder((0, 1), updates=frozenset({2})),
])  # fmt: skip
def test_what_is_no_order_and_no_unit_is_refused(make):
    with pytest.raises(ValueError):
        make()


def test_errors_of_half_in_the_times_change_little():
    order, units = there_and_back(40), [UnitCost((1 + unit % 5) * SIZE) for unit in range(40)]
    capacity, true = sum(unit.nbytes for unit in units) // 2, times_of(order, units, 0.7)
    wrong = Times(true.link, [s * (0.5 if index % 3 else 1.5) for index, s in enumerate(true.compute)])
    best = predict_schedule(make_schedule(order, units, capacity, true, ALIGN), true).seconds
    misled = predict_schedule(make_schedule(order, units, capacity, wrong, ALIGN), true).seconds
    assert misled <= 1.1 * best


@pytest.mark.parametrize("count, order", [(1000, forward), (1000, there_and_back), (10000, forward)])
def test_a_table_of_many_units_is_made_in_time(count, order):
    """Loose bounds for machines that do other work; benchmarks/engines/schedule_figures.py has the real ones."""
    units = [UnitCost((1 + unit * 7919 % 40) * SIZE) for unit in range(count)]
    uses = order(count)
    capacity, times = sum(unit.nbytes for unit in units) // 3, times_of(uses, units, 0.5)
    begin = time.process_time()
    make_schedule(uses, units, capacity, times, ALIGN)
    assert time.process_time() - begin < 3e-4 * count
