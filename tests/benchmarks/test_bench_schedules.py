"""`benchmarks/engines/schedules.py` in small: schedules take no longer than a prefetcher, within the bounds of the whole."""

from __future__ import annotations

import statistics

import pytest
from carom.benchmarks.engines import schedules
from carom.benchmarks.engines.prefetcher import prefetcher_seconds
from carom.core.plan.predict import Link, Workload
from carom.core.plan.schedule import Times, UnitCost, UseOrder
from carom.core.plan.schedule_maker import make_schedule
from carom.core.plan.schedule_seconds import predict_schedule


@pytest.fixture(scope="module")
def rows():
    return [schedules.compare(schedules.make_case(0, index, most=60)) for index in range(60)]


def test_schedules_of_random_cases_are_within_the_bounds_beside_a_prefetcher(rows):
    found = schedules.figures(rows)
    assert {row["kind"] for row in rows} == set(schedules.KINDS)
    assert round(found["median"], 3) <= schedules.MEDIAN
    assert found["nine_of_ten"] <= schedules.NINE_OF_TEN
    assert found["worst"] <= schedules.WORST


def test_no_cycle_is_predicted_below_its_computing(rows):
    assert all(row["seconds"] >= row["computing_seconds"] * (1 - 1e-9) for row in rows)
    assert all(row["base_seconds"] >= row["computing_seconds"] * (1 - 1e-9) for row in rows)


def test_schedules_with_packed_units_are_as_fast_as_the_better_one_of_the_prefetchers_plans():
    rows = [schedules.compare(schedules.make_case(0, index, 60, True)) for index in range(12)]
    assert statistics.median(row["seconds"] / row["base_seconds"] for row in rows) <= 1.0 + 1e-9


def test_tables_of_sessions_are_within_the_bounds_beside_a_prefetcher():
    found = schedules.figures(
        schedules.compare_session(schedules.make_case(0, index, 60)) for index in range(60)
    )
    assert round(found["median"], 3) <= schedules.MEDIAN
    assert found["nine_of_ten"] <= schedules.NINE_OF_TEN
    assert found["worst"] <= schedules.WORST


@pytest.mark.parametrize("factor", [0.2, 0.8, 1.5])
@pytest.mark.parametrize("slots", [2, 3])
def test_a_ring_is_predicted_as_with_a_prefetcher(factor, slots):
    """Both machines are the same, and for equal units in a ring so are the decisions, but for what a cycle keeps."""
    count, size, link = 12, 1 << 20, Link(1e9, 0.0)
    compute = (factor * size / 1e9,) * count
    order, units, times = UseOrder(tuple(range(count))), [UnitCost(size)] * count, Times(link, compute)
    schedule = make_schedule(order, units, slots * size, times, schedules.ALIGN)
    cycle = Workload(tuple(range(count)), compute).uses()
    found = prefetcher_seconds([size] * count, (), slots * size, cycle, link)
    assert predict_schedule(schedule, times).seconds == pytest.approx(found, rel=0.1)


def test_figures_are_those_of_the_ratios():
    rows = [{"seconds": ratio, "base_seconds": 1.0} for ratio in (1.0, 0.8, 0.9, 1.1, 0.7)]
    assert schedules.figures(rows) == {"count": 5, "median": 0.9, "nine_of_ten": 1.1, "worst": 1.1}


def test_the_same_seed_gives_the_same_case():
    assert schedules.make_case(1, 5) == schedules.make_case(1, 5) != schedules.make_case(2, 5)
    assert isinstance(schedules.make_case(1, 5).link, Link)
