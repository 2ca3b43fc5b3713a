"""Which units are chosen to stay, and what they take."""

from __future__ import annotations

import pytest
from carom.core.common.sizes import MIB
from carom.core.plan.region import ALIGN
from carom.core.plan.residency import GRAIN, resident_cost
from carom.core.plan.schedule import UnitCost, UseOrder
from carom.core.plan.schedule_ways import bit_reversed, enclosing_zone, prefix_costs, resident_order
from hypothesis import given
from hypothesis import strategies as st


@given(st.integers(0, 300))
def test_every_prefix_is_spread_evenly(count):
    found = bit_reversed(count)
    assert sorted(found) == list(range(count))
    for length in range(1, count):
        chosen = sorted(found[:length])
        gaps = [after - before for before, after in zip([-1, *chosen], [*chosen, count], strict=True)]
        assert max(gaps) <= 4 * (count / length) + 1


def test_units_around_others_come_first_then_small_ones_and_unused_ones_last():
    order = UseOrder((3, 1, 0, 4, 6, 7), (2, 1, 2, 3, 4, 5))
    units = [UnitCost(16 * ALIGN if unit != 4 else ALIGN - 1) for unit in range(8)]
    assert resident_order(order, units) == [3, 4, 1, 6, 0, 7, 2, 5]


@given(st.lists(st.integers(1, 40 * MIB), max_size=20), st.sampled_from([512, GRAIN]))
def test_a_prefix_takes_what_an_allocator_reserves_for_it(sizes, grain):
    costs = prefix_costs(range(len(sizes)), [UnitCost(size) for size in sizes], grain)
    assert costs == [resident_cost(sizes[:length], grain) for length in range(len(sizes) + 1)]


def zone(uses, ends, streamed, blocks=(2, 3, 4, 5)):
    units = [UnitCost(count * ALIGN) for count in blocks]
    return enclosing_zone(UseOrder(uses, ends), streamed, units)


def test_only_streamed_units_around_others_lie_apart():
    assert zone((0, 1, 2), (2, 1, 2), [0, 1, 2]).offsets == {0: 0}
    assert zone((0, 1, 2), (2, 1, 2), [1, 2]).nbytes == 0
    assert zone((0, 1, 2), (), [0, 1, 2]).nbytes == 0


def test_units_around_others_share_bytes_unless_one_contains_the_other():
    after_another = zone((0, 3, 1, 3), (1, 1, 3, 3), [0, 1, 3])
    assert after_another.offsets == {0: 0, 1: 0} and after_another.nbytes == 3 * ALIGN
    inside = zone((0, 1, 3), (2, 2, 2), [0, 1, 3])
    assert inside.offsets == {0: 0, 1: 2 * ALIGN} and inside.nbytes == 5 * ALIGN


@pytest.mark.parametrize("ends", [(2, 2, 2, 5, 5, 5)])
def test_units_that_contain_each_other_in_turns_have_places_of_their_own(ends):
    found = zone((0, 1, 3, 1, 0, 3), ends, [0, 1, 3])
    assert found.offsets == {0: 0, 1: 2 * ALIGN} and found.nbytes == 5 * ALIGN
