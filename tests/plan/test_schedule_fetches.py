"""The fetches that follow from places: as few as a cache with these places needs, as early as its readers let them."""

from __future__ import annotations

from carom.core.plan.region import ALIGN
from carom.core.plan.schedule import UseOrder
from carom.core.plan.schedule_region import Fetch, Visit, find_visits, in_order_of_need, required_fetches
from hypothesis import given, settings
from hypothesis import strategies as st


def fetches(uses, offsets, sizes):
    visits = find_visits(UseOrder(tuple(uses)), set(uses), ())
    return required_fetches(visits, offsets, sizes, len(uses))


def test_uses_of_one_unit_in_a_row_are_one_visit():
    order = UseOrder((0, 1, 1, 2, 1, 0))
    assert find_visits(order, {0, 1, 2}, ()) == [
        Visit(0, 0, 0), Visit(1, 2, 1), Visit(3, 3, 2), Visit(4, 4, 1), Visit(5, 5, 0),
    ]  # fmt: skip
    # Where 2 stays, no streamed unit is used between the uses of 1.
    assert find_visits(order, {0, 1}, ()) == [Visit(0, 0, 0), Visit(1, 4, 1), Visit(5, 5, 0)]


def test_a_trainable_visit_knows_the_update_before_it():
    order = UseOrder((0, 1, 1, 0), updates=frozenset({2}))
    assert find_visits(order, {0, 1}, {0, 1}) == [
        Visit(0, 0, 0), Visit(1, 1, 1), Visit(2, 2, 1, 2), Visit(3, 3, 0, 2),
    ]  # fmt: skip
    start = UseOrder((0, 1, 0), updates=frozenset({0}))
    assert [visit.update for visit in find_visits(start, {0, 1}, {0, 1})] == [0, 0, None]


def test_two_units_in_one_place_take_turns():
    assert fetches([0, 1], {0: 0, 1: 0}, [ALIGN, ALIGN]) == [Fetch(0, -1, 0), Fetch(1, 1, 1)]
    assert fetches([0, 1], {0: 0, 1: ALIGN}, [ALIGN, ALIGN]) == []


def test_a_fetch_is_issued_behind_the_last_reader_of_what_it_overwrites():
    # 3 lies over 0 and 1; 2 lies apart.
    found = fetches([0, 1, 2, 3], {0: 0, 1: ALIGN, 2: 2 * ALIGN, 3: 0}, [ALIGN, ALIGN, ALIGN, 2 * ALIGN])
    assert found == [Fetch(0, 2 * (3 - 4) + 1, 0), Fetch(1, 2 * (3 - 4) + 1, 1), Fetch(3, 2 * 1 + 1, 3)]


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_the_fetches_are_those_of_a_cache_of_single_blocks(data):
    count = data.draw(st.integers(1, 8))
    sizes = [data.draw(st.integers(1, 6)) * ALIGN for _ in range(count)]
    offsets = {unit: data.draw(st.integers(0, 12)) * ALIGN for unit in range(count)}
    uses = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=24))
    blocks: dict[int, tuple[int, int]] = {}
    expected = []
    for position in range(3 * len(uses)):
        unit = uses[position % len(uses)]
        place = range(offsets[unit] // ALIGN, (offsets[unit] + sizes[unit]) // ALIGN)
        missing = [block for block in place if blocks.get(block, (-1, 0))[0] != unit]
        if missing and position >= 2 * len(uses):
            last = max(blocks[block][1] for block in missing)
            expected.append((position - 2 * len(uses), 2 * (last - 2 * len(uses)) + 1, unit))
        blocks.update(dict.fromkeys(place, (unit, position)))
    assert [tuple(fetch) for fetch in fetches(uses, offsets, sizes)] == expected


def test_fetches_are_issued_in_the_order_in_which_they_are_needed():
    table = in_order_of_need([Fetch(4, 2 * 3 + 1, 0), Fetch(5, 2 * 1 + 1, 1), Fetch(6, 2 * 2 + 1, 2)], 8)
    assert table.after == ((), (), (), (0, 1, 2), (), (), (), ()) and table.before == {}


def test_what_is_issued_for_the_next_cycle_comes_behind_what_is_needed_in_this_one():
    table = in_order_of_need([Fetch(0, -1, 5), Fetch(1, -1, 6), Fetch(3, 3, 7)], 4)
    assert table.after == ((), (7,), (), (5, 6))
    late = in_order_of_need([Fetch(0, 2 * (2 - 4) + 1, 5), Fetch(3, 5, 7)], 4)
    assert late.after == ((), (), (7, 5), ())


def test_a_fetch_that_waits_for_an_update_holds_no_other_back():
    table = in_order_of_need([Fetch(0, 0, 5), Fetch(1, -3, 6)], 4)
    assert table.before == {0: (5,)} and table.after == ((), (), (6,), ())
