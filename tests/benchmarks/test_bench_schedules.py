"""`benchmarks/engines/schedules.py` in small: schedules take no longer than today's plans, within the bounds of the whole."""

from __future__ import annotations

import statistics

import pytest
from carom.benchmarks.engines import schedules
from carom.core.plan.predict import Link, Workload, predict


@pytest.fixture(scope="module")
def rows():
    return [schedules.compare(schedules.make_case(0, index, most=60)) for index in range(60)]


def test_schedules_of_random_cases_are_within_the_bounds_of_todays_plans(rows):
    found = schedules.figures(rows)
    assert {row["kind"] for row in rows} == set(schedules.KINDS)
    assert round(found["median"], 3) <= schedules.MEDIAN
    assert found["nine_of_ten"] <= schedules.NINE_OF_TEN
    assert found["worst"] <= schedules.WORST


def test_no_cycle_is_predicted_below_its_computing(rows):
    assert all(row["seconds"] >= row["computing_seconds"] * (1 - 1e-9) for row in rows)
    assert all(row["today_seconds"] >= row["computing_seconds"] * (1 - 1e-9) for row in rows)


def test_schedules_with_packed_units_are_as_fast_as_the_better_one_of_todays_plans():
    rows = [schedules.compare(schedules.make_case(0, index, 60, True)) for index in range(12)]
    assert statistics.median(row["seconds"] / row["today_seconds"] for row in rows) <= 1.0 + 1e-9


def test_the_base_is_todays_prediction():
    case = schedules.make_case(3, 0, most=30)
    assert case.kind == "inference"
    sizes = case.sizes
    plan = schedules.plan_residency(
        [schedules.UnitSize("", size) for size in sizes], case.capacity, wish=schedules.Wish(case.slots)
    )
    work = Workload(tuple(unit for unit, _ in case.uses), tuple(seconds for _, seconds in sorted(case.uses)))
    found = predict(sizes, plan.resident, plan.region_bytes, work, case.link, steps=2)
    assert schedules.seconds_today(case) == pytest.approx(found.seconds)


def test_figures_are_those_of_the_ratios():
    rows = [{"seconds": ratio, "today_seconds": 1.0} for ratio in (1.0, 0.8, 0.9, 1.1, 0.7)]
    assert schedules.figures(rows) == {"count": 5, "median": 0.9, "nine_of_ten": 1.1, "worst": 1.1}


def test_the_same_seed_gives_the_same_case():
    assert schedules.make_case(1, 5) == schedules.make_case(1, 5) != schedules.make_case(2, 5)
    assert isinstance(schedules.make_case(1, 5).link, Link)
