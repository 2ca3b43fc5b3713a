"""The searched plan: within its budget, as good as brute force on small cases, never worse than the rule, in bounded time."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from itertools import combinations

import pytest
from carom.core.common.errors import BudgetError
from carom.core.common.sizes import MIB
from carom.core.plan.predict import Link, Workload, predict
from carom.core.plan.residency import (
    UnitSize,
    Wish,
    least_budget,
    packed_cost,
    plan_residency,
    resident_cost,
    round_up,
)
from carom.core.plan.search import choose
from hypothesis import given, settings
from hypothesis import strategies as st
from tests_pairwise import pairwise

LINK = Link(50e9, 10e-6)
GRAIN = 512


@st.composite
def problems(draw, most):
    count = draw(st.integers(2, most))
    kind = draw(st.sampled_from(["one size", "two sizes", "any"]))
    of = {
        "one size": st.just(64),
        "two sizes": st.sampled_from([32, 96]),
        "any": st.integers(8, 128),
    }[kind]
    sizes = [draw(of) * MIB for _ in range(count)]
    factor = st.floats(0.1, 3)
    forward = tuple(size / LINK.bytes_per_second * draw(factor) for size in sizes)
    mode = draw(st.sampled_from(["infer", "train", "checkpointed", "in groups"]))
    backward = () if mode == "infer" else tuple(2 * seconds for seconds in forward)
    groups = {
        "checkpointed": tuple((unit,) for unit in range(count)),
        "in groups": (tuple(range(count // 2)), tuple(range(count // 2, count))),
    }.get(mode, ())
    units = [UnitSize(str(unit), size) for unit, size in enumerate(sizes)]
    least = least_budget(units, 0, GRAIN)
    budget = least + int((sum(sizes) - least) * draw(st.floats(0, 0.999)))
    return units, budget, Workload(tuple(range(count)), forward, backward, groups)


def region_beside(sizes, resident, available):
    """What the residents leave, as an allocator and whole slots have it; None where it holds no slot."""
    streamed = [size for unit, size in enumerate(sizes) if unit not in resident]
    if not streamed:
        return None
    left = available - resident_cost([sizes[unit] for unit in resident], GRAIN)
    region = min(left // GRAIN * GRAIN, round_up(sum(streamed), GRAIN))
    return region if region >= max(streamed) else None


def brute_force(units, budget, workload):
    sizes = [unit.nbytes for unit in units]
    best = float("inf")
    for count in range(len(units)):
        for resident in combinations(range(len(units)), count):
            region = region_beside(sizes, resident, budget)
            if region is not None:
                best = min(best, predict(sizes, resident, region, workload, LINK).seconds)
    return best


@settings(deadline=None, max_examples=40)
@given(problems(most=8))
def test_small_cases_are_within_one_percent_of_brute_force(problem):
    units, budget, workload = problem
    plan, predicted = choose(units, budget, 0, workload, LINK, grain=GRAIN)
    if not plan.all_resident:
        assert predicted.seconds <= 1.01 * brute_force(units, budget, workload)


def drawn(seed):
    """A case of differing units, where candidates alone are not enough."""
    rng = random.Random(seed)
    count = rng.randint(6, 9)
    sizes = [rng.randint(8, 128) * MIB for _ in range(count)]
    forward = tuple(size / LINK.bytes_per_second * rng.choice([0.1, 0.5, 1, 2]) for size in sizes)
    backward = tuple(2 * seconds for seconds in forward) if seed % 3 else ()
    groups = tuple((unit,) for unit in range(count)) if seed % 3 == 1 else ()
    budget = max(sizes) + int((sum(sizes) - max(sizes)) * rng.random())
    units = [UnitSize(str(unit), size) for unit, size in enumerate(sizes)]
    return units, budget, Workload(tuple(range(count)), forward, backward, groups)


def test_units_that_all_differ_are_within_one_percent_too():
    gaps = []
    for seed in range(24):
        units, budget, workload = drawn(seed)
        _, predicted = choose(units, budget, 0, workload, LINK, grain=GRAIN)
        gaps.append(predicted.seconds / brute_force(units, budget, workload) - 1)
    assert max(gaps) < 0.01, sorted(gaps)[-5:]


def test_cases_too_large_to_search_whole_are_within_four_percent_on_average(monkeypatch):
    monkeypatch.setattr("carom.core.plan.search.WHOLE", 0)
    monkeypatch.setattr("carom.core.plan.search.ALWAYS", 0)
    gaps = []
    for seed in range(24):
        units, budget, workload = drawn(seed)
        _, predicted = choose(units, budget, 0, workload, LINK, grain=GRAIN)
        gaps.append(predicted.seconds / brute_force(units, budget, workload) - 1)
    assert sum(gaps) / len(gaps) < 0.04, sorted(gaps)[-5:]


@settings(deadline=None, max_examples=50)
@given(problems(most=24), st.integers(0, 64 * MIB), st.sampled_from([512, 2 * MIB]))
def test_a_searched_plan_keeps_its_budget_and_is_never_slower_than_the_rule(problem, fixed, grain):
    units, budget, workload = problem
    budget += fixed + 4 * MIB
    sizes = [unit.nbytes for unit in units]
    plan, predicted = choose(units, budget, fixed, workload, LINK, grain=grain, work=3000)
    held = fixed + plan.region_bytes + resident_cost([sizes[unit] for unit in plan.resident], grain)
    assert held <= budget
    streamed = [size for unit, size in enumerate(sizes) if unit not in plan.resident]
    assert plan.region_bytes >= max(streamed, default=0)
    assert predict(sizes, plan.resident, plan.region_bytes, workload, LINK).seconds == pytest.approx(
        predicted.seconds
    )
    rule = plan_residency(units, budget, fixed, Wish(), grain)
    by_rule = predict(sizes, rule.resident, rule.region_bytes, workload, LINK).seconds
    assert predicted.seconds <= by_rule * 1.0011
    assert (plan, predicted) == choose(units, budget, fixed, workload, LINK, grain=grain, work=3000)


@settings(deadline=None, max_examples=40)
@given(problems(most=20), st.sampled_from([512, 2 * MIB]), st.booleans())
def test_a_searched_plan_whose_units_stay_packed_keeps_its_budget(problem, grain, two_slots):
    units, budget, workload = problem
    units = [replace(unit, packed=int(0.7 * unit.nbytes)) for unit in units]
    budget += 4 * MIB
    sizes = [unit.nbytes for unit in units]
    plan, _ = choose(
        units, budget, 0, workload, LINK, grain=grain, work=3000, unpacking=1e12, two_slots=two_slots
    )
    held = resident_cost([sizes[unit] for unit in plan.resident], grain) + plan.packed_bytes
    assert plan.packed_bytes == packed_cost((units[unit].packed for unit in plan.packed), grain)
    assert held + plan.region_bytes <= budget
    assert not plan.packed & plan.resident.keys()
    streamed = [size for unit, size in enumerate(sizes) if unit not in plan.resident]
    assert plan.region_bytes >= max(streamed, default=0)


def model(blocks, parts, factor, mode):
    sizes = [part * MIB for part in parts] * blocks
    count, width = len(sizes), len(parts)
    forward = tuple(size / LINK.bytes_per_second * factor for size in sizes)
    backward = () if mode == "infer" else tuple(2 * seconds for seconds in forward)
    groups = tuple(tuple(range(n, n + width)) for n in range(0, count, width)) if mode == "train" else ()
    return [UnitSize(str(n), size) for n, size in enumerate(sizes)], Workload(
        tuple(range(count)), forward, backward, groups
    )


YARDSTICK = 540  # turns


def cpu_seconds(work):
    begin = time.process_time()
    work()
    return time.process_time() - begin


def yardstick():
    """Plain Python, by which machines are compared: 0.15 s on the slowest lent so far (2026-11-22), where the search takes
    0.18 to 0.22 s; on those before it took less than 0.2."""
    values = {n: float(n) for n in range(1000)}
    for turn in range(YARDSTICK):
        for n in values:
            values[n] = max(values[n] * 0.5, turn)


@pairwise(share=[0.1, 0.5], parts={"even": (300,), "uneven": (20, 100)}, mode=["infer", "train"])
def test_two_hundred_units_take_about_a_fifth_of_a_second(mode, parts, share):
    units, workload = model(200 // len(parts), parts, 0.3, mode)
    budget = int(sum(unit.nbytes for unit in units) * share)
    unit = took = float("inf")
    for _ in range(4):  # the machine may be busy, and slower than another
        unit = min(unit, cpu_seconds(yardstick))
        took = min(took, cpu_seconds(lambda: choose(units, budget, 0, workload, LINK, grain=2 * MIB)))
        if took < 1.9 * unit:
            return
    pytest.fail(f"{took:.3f} s, and plain Python {unit:.3f} s")


def test_a_budget_too_tight_for_the_rules_two_slots_gains_most():
    """Where the rule keeps a unit beside one slot, giving it up makes room for copies to overlap."""
    units, workload = model(8, (60, 40, 80), 1.0, "infer")
    budget = int(sum(unit.nbytes for unit in units) * 0.1)
    rule = plan_residency(units, budget, 0, Wish(), GRAIN)
    sizes = [unit.nbytes for unit in units]
    before = predict(sizes, rule.resident, rule.region_bytes, workload, LINK).seconds
    _, predicted = choose(units, budget, 0, workload, LINK, grain=GRAIN)
    assert predicted.seconds < 0.75 * before


def test_residents_pay_where_the_copies_are_not_hidden():
    """Half of the blocks compute next to nothing for their bytes: it is theirs that stay."""
    sizes = [64 * MIB] * 12
    wire = LINK.seconds(64 * MIB)
    forward = tuple(0.02 * wire if unit < 6 else 2.5 * wire for unit in range(12))
    workload = Workload(tuple(range(12)), forward)
    units = [UnitSize(str(n), size) for n, size in enumerate(sizes)]
    plan, predicted = choose(units, 6 * 64 * MIB, 0, workload, LINK, grain=GRAIN)
    assert len([unit for unit in plan.resident if unit < 6]) > len(
        [unit for unit in plan.resident if unit >= 6]
    )
    rule = plan_residency(units, 6 * 64 * MIB, 0, Wish(), GRAIN)
    assert predicted.seconds < 0.95 * predict(sizes, rule.resident, rule.region_bytes, workload, LINK).seconds


def test_what_is_loose_or_fits_entirely_stays_as_the_rule_says():
    units = [
        UnitSize("table", 3 * MIB, loose=True, block=False),
        *(UnitSize(str(n), 32 * MIB) for n in range(4)),
    ]
    workload = Workload((0, 1, 2, 3, 4), (1e-4,) * 5)
    plan, _ = choose(units, 80 * MIB, 0, workload, LINK, grain=GRAIN)
    assert 0 in plan.resident
    plan, predicted = choose(units, 200 * MIB, 0, workload, LINK, grain=GRAIN)
    assert plan.all_resident and predicted.seconds == pytest.approx(5e-4)


def test_an_impossible_budget_names_the_least_that_works():
    units = [UnitSize("a", 32 * MIB), UnitSize("b", 64 * MIB)]
    with pytest.raises(BudgetError) as refused:
        choose(units, 63 * MIB, 0, Workload((0, 1), (1.0, 1.0)), LINK, grain=GRAIN)
    plan, _ = choose(units, refused.value.least_bytes, 0, Workload((0, 1), (1.0, 1.0)), LINK, grain=GRAIN)
    assert plan.region_bytes == 64 * MIB


def test_what_the_device_waits_for_the_host_at_stays_as_it_is():
    """Of units that are alike, those stay raw whose uses wait for the host; without that it makes no difference."""
    units = [UnitSize(f"u{i}", 64 << 20, packed=44 << 20) for i in range(24)]
    work = Workload(tuple(range(24)), (1e-3,) * 24)
    waits = [4e-4 if i % 2 else 0.0 for i in range(24)]
    link, budget = Link(160e9), 12 * (64 << 20)
    plan, found = choose(units, budget, 0, work, link, unpacking=1.9e12, waits=waits)
    late = {i for i in range(24) if i % 2}
    assert len(late & set(plan.resident)) > 0.8 * len(plan.resident)
    unpacking = (64 << 20) / 1.9e12 * (24 - len(plan.resident))
    assert found.seconds < 1.01 * (24e-3 + unpacking + 2 * 4e-4)  # ten find room
    blind, _ = choose(units, budget, 0, work, link, unpacking=1.9e12)
    assert len(late & set(blind.resident)) < 0.8 * len(blind.resident)


def unequal():
    """A diffusion transformer as Flux is: double blocks whose text parts compute little, single blocks of three parts."""
    parts = []
    for _ in range(8):
        parts += [
            (113, 0.02),
            (76, 1.9),
            (76, 1.0),
            (76, 1.0),
            (113, 0.02),
            (76, 0.15),
            (76, 0.15),
            (76, 0.15),
        ]
    for _ in range(16):
        parts += [(57, 0.02), (132, 2.85), (94, 1.4)]
    whole = sum(share for _, share in parts)
    seconds = tuple(0.075 * share / whole for _, share in parts)
    units = [
        UnitSize(str(n), size * 10**6, packed=int(0.694 * size * 10**6)) for n, (size, _) in enumerate(parts)
    ]
    return units, Workload(tuple(range(len(units))), seconds)


@pytest.mark.parametrize("budget", [4_100_000_000, 1_950_000_000])
def test_many_unequal_units_are_planned_near_what_computing_or_the_link_takes(budget):
    units, work = unequal()
    rate, unpacking = 52.6e9 / 0.694, 1.5e12
    sizes = [unit.nbytes for unit in units]
    _, found = choose(units, budget, 0, work, Link(rate), grain=2 * MIB, unpacking=unpacking)
    room = budget - 3 * max(sizes)  # beside so few slots
    crossing = (sum(sizes) - room / 0.694) / rate
    computing = sum(work.forward) + (sum(sizes) - budget) / unpacking
    assert found.seconds <= 1.05 * max(computing, crossing)
