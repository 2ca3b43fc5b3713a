"""The estimate: near what the replay says, cheap, and what makes a search among many plans of many units find the good ones."""

from __future__ import annotations

import random

import pytest
from carom.core.estimate import Crossing, estimate
from carom.core.plan import UnitSize
from carom.core.plan_search import choose
from carom.core.predict import Link, Packed, Workload, predict
from carom.core.sizes import MIB
from hypothesis import given, settings
from hypothesis import strategies as st

LINK = Link(50e9, 10e-6)


@st.composite
def problems(draw):
    rng = random.Random(draw(st.integers(0, 1 << 30)))
    count = rng.randint(4, 40)
    sizes = [rng.choice([32, 64, 96, rng.randint(8, 128)]) * MIB for _ in range(count)]
    mode = draw(st.sampled_from(["infer", "train", "checkpointed"]))
    forward = tuple(size / LINK.bytes_per_second * rng.uniform(0.1, 2) for size in sizes)
    backward = () if mode == "infer" else tuple(2 * seconds for seconds in forward)
    groups = tuple((unit,) for unit in range(count)) if mode == "checkpointed" else ()
    resident = {unit for unit in range(1, count) if rng.random() < 0.4}
    streamed = [size for unit, size in enumerate(sizes) if unit not in resident]
    region = min(int(max(sizes) * rng.choice([2, 3, 4, 6])), sum(streamed))
    packed = {
        unit
        for unit in range(count)
        if unit not in resident and rng.random() < draw(st.sampled_from([0, 0.5]))
    }
    return sizes, Workload(tuple(range(count)), forward, backward, groups), resident, region, packed  # fmt: skip


@settings(deadline=None, max_examples=150)
@given(problems())
def test_an_estimate_is_near_what_the_replay_says(problem):
    sizes, work, resident, region, packed = problem
    streamed = [size for unit, size in enumerate(sizes) if unit not in resident]
    region = max(region, max(streamed))
    unpacking = {unit: sizes[unit] / 1e12 for unit in packed}
    there = {unit: Packed(0, seconds) for unit, seconds in unpacking.items()}
    work = work.beside([unpacking.get(unit, 0.0) for unit in range(len(sizes))])
    exact = predict(sizes, resident, region, work, LINK, packed=there).seconds
    crossings = [
        Crossing(0, 0.0) if unit in resident
        else Crossing(size, 0.0, unpacking[unit]) if unit in packed
        else Crossing(size, LINK.seconds(size))
        for unit, size in enumerate(sizes)
    ]  # fmt: skip
    found = estimate([(use.unit, use.seconds) for use in work.uses()], crossings, region, cycles=4)
    # A ring has no gaps between slots, and keeps nothing that was used: of few units either may weigh something.
    assert 0.7 * exact <= found <= 1.25 * exact


def test_estimates_of_many_problems_are_right_on_average():
    ratios = []
    for seed in range(60):
        rng = random.Random(seed)
        sizes = [rng.choice([32, 64, 96]) * MIB for _ in range(30)]
        work = Workload(
            tuple(range(30)), tuple(s / LINK.bytes_per_second * rng.uniform(0.1, 2) for s in sizes)
        )
        region = max(sizes) * rng.randint(3, 6)
        exact = predict(sizes, (), region, work, LINK).seconds
        uses = [(use.unit, use.seconds) for use in work.uses()]
        ratios.append(estimate(uses, [Crossing(s, LINK.seconds(s)) for s in sizes], region, cycles=4) / exact)
    assert 0.97 < sum(ratios) / len(ratios) < 1.01 and min(ratios) > 0.9


def test_what_stays_takes_its_computing_alone():
    assert estimate([(0, 1.0), (1, 2.0)], [Crossing(0, 0.0)] * 2, 0) == 3.0


def test_copies_that_the_host_waits_for_are_added():
    crossings = [Crossing(10, 0.5), Crossing(10, 0.25)]
    assert estimate([(0, 1.0), (1, 2.0)], crossings, 10, blocking=True) == 3.75


def test_what_is_still_in_the_region_does_not_cross_again():
    crossings = [Crossing(10, 5.0), Crossing(10, 5.0)]
    assert estimate([(0, 1.0), (1, 1.0)], crossings, 20) == 2.0
    assert estimate([(0, 1.0), (1, 1.0)], crossings, 10) > 10.0


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
