"""The planner's simple rule: within budget, the same every time, more with more, spread evenly."""

from __future__ import annotations

import pytest
from carom.core.common.errors import BudgetError
from carom.core.common.sizes import MIB
from carom.core.plan.residency import (
    GRAIN,
    SMALL_UNIT,
    UnitSize,
    Wish,
    least_budget,
    plan_residency,
    resident_cost,
    round_up,
)
from hypothesis import given, settings
from hypothesis import strategies as st

sizes = st.one_of(st.integers(1, 400).map(lambda n: n * 512), st.integers(1, 60).map(lambda n: n * MIB))
unit_lists = st.lists(
    st.builds(UnitSize, st.just("unit"), sizes, st.booleans(), st.booleans()), min_size=1, max_size=24
)
grains = st.sampled_from([512, GRAIN])
fixed_bytes = st.integers(0, 50 * MIB)


def budget_between(units, fixed: int, grain: int, share: float) -> int:
    least = least_budget(units, fixed, grain)
    most = fixed + resident_cost([u.nbytes for u in units], grain)
    return least + int(max(0, most - least) * share)


def device_bytes(plan, units, grain: int) -> int:
    return (
        plan.fixed_bytes + plan.region_bytes + resident_cost([units[i].nbytes for i in plan.resident], grain)
    )


@settings(deadline=None, max_examples=300)
@given(unit_lists, fixed_bytes, grains, st.floats(0, 1.2))
def test_a_plan_never_exceeds_its_budget(units, fixed, grain, share):
    budget = budget_between(units, fixed, grain, share)
    plan = plan_residency(units, budget, fixed, grain=grain)
    assert device_bytes(plan, units, grain) <= budget
    streamed = [units[i].nbytes for i in range(len(units)) if i not in plan.resident]
    if streamed:
        assert plan.region_bytes >= max(streamed), "the largest streamed unit has no slot"
        assert plan.slots == plan.region_bytes // max(streamed) >= 1
        assert plan.region_bytes % grain == 0
    else:
        assert plan.all_resident and plan.slots == 0


@settings(deadline=None, max_examples=100)
@given(unit_lists, fixed_bytes, grains, st.floats(0, 1.2))
def test_the_same_input_gives_the_same_plan(units, fixed, grain, share):
    budget = budget_between(units, fixed, grain, share)
    assert plan_residency(units, budget, fixed, grain=grain) == plan_residency(
        list(units), budget, fixed, grain=grain
    )


@settings(deadline=None, max_examples=200)
@given(unit_lists, fixed_bytes, grains)
def test_the_least_budget_works_and_one_byte_less_does_not(units, fixed, grain):
    least = min(least_budget(units, fixed, grain), fixed + resident_cost([u.nbytes for u in units], grain))
    plan_residency(units, least, fixed, grain=grain)
    with pytest.raises(BudgetError) as refused:
        plan_residency(units, least - 1, fixed, grain=grain)
    assert refused.value.least_bytes == least
    assert str(least) in str(refused.value)


@settings(deadline=None, max_examples=100)
@given(unit_lists, fixed_bytes, grains)
def test_everything_stays_where_everything_fits(units, fixed, grain):
    plan = plan_residency(units, fixed + resident_cost([u.nbytes for u in units], grain), fixed, grain=grain)
    assert plan.all_resident and set(plan.resident) == set(range(len(units)))


@pytest.mark.parametrize("count", [2, 7, 20, 40])
@pytest.mark.parametrize("nbytes", [MIB // 2, 3 * MIB, 100 * MIB])
def test_more_budget_never_keeps_less_of_equal_blocks(count, nbytes):
    units = [UnitSize(f"blocks.{i}", nbytes) for i in range(count)]
    kept = []
    for share in range(0, 101, 4):
        plan = plan_residency(units, budget_between(units, 0, GRAIN, share / 100))
        kept.append((len(plan.resident), plan.region_bytes))
    resident = [count for count, _ in kept]
    assert resident == sorted(resident)
    assert resident[0] == 0 or count * nbytes <= GRAIN  # one grain may hold them all


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7])
@pytest.mark.parametrize("count", [12, 20, 57])
def test_residents_are_spread_evenly_over_the_order_of_use(count, share):
    units = [UnitSize(f"blocks.{i}", 100 * MIB) for i in range(count)]
    plan = plan_residency(units, int(count * 100 * MIB * share))
    streamed = [i for i in range(count) if i not in plan.resident]
    held = len(plan.resident)
    # In every prefix the residents are as many as their share of it, within one and what rounding left.
    for end in range(1, count + 1):
        here = sum(1 for i in plan.resident if i < end)
        assert abs(here - held * end / count) <= 2.0
    assert len(streamed) * 100 * MIB + 0 > plan.region_bytes


def test_three_slots_are_wished_for_and_fewer_taken_when_short():
    units = [UnitSize(f"blocks.{i}", 10 * MIB) for i in range(10)]
    assert [plan_residency(units, n * 10 * MIB).slots for n in (1, 2, 3, 4)] == [1, 2, 3, 3]
    assert [len(plan_residency(units, n * 10 * MIB).resident) for n in (1, 2, 3, 4)] == [0, 0, 0, 1]


def test_where_few_may_stay_what_is_left_is_theirs_before_it_is_slots():
    units = [UnitSize(f"blocks.{i}", 10 * MIB, packed=7 * MIB) for i in range(20)]
    among, budget = range(0, 20, 4), 70 * MIB
    plan = plan_residency(units, budget, wish=Wish(2), among=among, packed=True)
    assert set(plan.resident) == set(among) and not plan.packed and plan.slots == 2
    less = plan_residency(units, 66 * MIB, wish=Wish(2), among=among, packed=True)
    assert {*less.resident, *less.packed} == set(among) and less.resident and less.packed and less.slots == 2


def test_loose_and_small_units_stay_before_blocks():
    units = [
        UnitSize("stem", 512, block=False),
        *(UnitSize(f"blocks.{i}", 10 * MIB) for i in range(6)),
        UnitSize("scale", 512, loose=True, block=False),
        UnitSize("head", 9 * MIB, block=False),
    ]
    plan = plan_residency(units, 34 * MIB)
    assert plan.resident == {7: "used outside a module of its own", 0: "small"}
    assert plan.slots == 3


def test_an_error_names_the_largest_unit():
    units = [UnitSize("small", 512), UnitSize("blocks.3", 10 * MIB), UnitSize("blocks.4", 10 * MIB - 1)]
    with pytest.raises(BudgetError, match="'blocks.3'"):
        plan_residency(units, MIB)


def test_no_units_need_no_slots():
    assert plan_residency([], 0).all_resident
    assert plan_residency([], MIB, MIB).all_resident
    with pytest.raises(BudgetError):
        plan_residency([], MIB, MIB + 1)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(1, 1 << 26), max_size=20), grains)
def test_resident_cost_is_what_an_allocator_reserves(nbytes, grain):
    cost = resident_cost(nbytes, grain)
    large = [n for n in nbytes if n >= SMALL_UNIT]
    assert sum(nbytes) <= cost <= sum(nbytes) + grain * (len(large) + 1)
    assert cost % grain == 0
    assert round_up(cost, grain) == cost


@pytest.mark.parametrize("share", [0.45, 0.6, 0.8])
def test_units_that_come_first_all_stay_under_a_larger_budget_with_others_beside_them(share):
    units = [UnitSize(f"blocks.{i}", (8 + i % 3) * 16 * MIB) for i in range(40)]
    total = sum(unit.nbytes for unit in units)
    before = plan_residency(units, int(0.4 * total))
    after = plan_residency(units, int(share * total), among=before.resident)
    assert after.resident.keys() > before.resident.keys()
    assert after.region_bytes <= before.region_bytes + 10 * 16 * MIB, "the memory is used for residents"
    less = plan_residency(units, int(0.3 * total), among=before.resident)
    assert less.resident.keys() < before.resident.keys()
