"""The places of streamed units: inside the region, with the lead that a ring gives, and room for the next unit."""

from __future__ import annotations

import pytest
from carom.core.plan.region import ALIGN
from carom.core.plan.schedule_region import next_uses, place_units
from hypothesis import given, settings
from hypothesis import strategies as st

sizes_lists = st.lists(st.integers(1, 12).map(lambda blocks: blocks * ALIGN), min_size=1, max_size=20)


def overlap(offsets, sizes, first, second):
    return (
        offsets[first] < offsets[second] + sizes[second] and offsets[second] < offsets[first] + sizes[first]
    )


@settings(deadline=None, max_examples=60)
@given(sizes_lists, st.data())
def test_every_unit_gets_one_aligned_place_inside_the_region(sizes, data):
    sequence = data.draw(st.lists(st.sampled_from(range(len(sizes))), min_size=1, max_size=40))
    low = data.draw(st.integers(0, 4)) * ALIGN
    high = low + max(sizes[unit] for unit in sequence) + data.draw(st.integers(0, 30)) * ALIGN
    offsets = place_units(sequence, sizes, (low, high))
    assert offsets.keys() == set(sequence)
    assert all(low <= offset and offset + sizes[unit] <= high for unit, offset in offsets.items())
    assert all(offset % ALIGN == 0 for offset in offsets.values())


@settings(deadline=None, max_examples=60)
@given(sizes_lists)
def test_a_unit_fits_beside_the_one_before_it_unless_the_cycle_ends_soon(sizes):
    longer = sizes * 5
    offsets = place_units(range(len(longer)), longer, (0, 2 * max(sizes)))
    for unit in range(3 * len(sizes)):
        assert not overlap(offsets, longer, unit, unit + 1)


@pytest.mark.parametrize("slots", [2, 3, 4])
@pytest.mark.parametrize("rounds", [2, 5])
def test_units_of_one_size_go_round_as_in_a_ring(slots, rounds):
    count, size = slots * rounds, 4 * ALIGN
    offsets = place_units(range(count), [size] * count, (0, slots * size))
    # Each unit overwrites the one that was used longest ago, across the end of the cycle too.
    for unit in range(count):
        assert offsets[unit] == offsets[(unit + slots) % count]
        assert len({offsets[(unit + ahead) % count] for ahead in range(slots)}) == slots


def test_a_unit_is_placed_where_bytes_were_read_longest_ago():
    sizes = [blocks * ALIGN for blocks in (2, 1, 1, 2, 1, 1, 2, 1, 1)]
    offsets = place_units(range(9), sizes, (0, 4 * ALIGN))
    assert [offsets[unit] // ALIGN for unit in range(6)] == [0, 2, 3, 0, 2, 3]


def test_the_end_of_the_cycle_lies_over_what_is_needed_latest_in_the_next_one():
    # 0, 1 and 2 fill the region, 3 is the last one. The next cycle begins with 0, so 3 lies over 1 or 2, and 2 was just read.
    offsets = place_units(range(4), [ALIGN] * 4, (0, 3 * ALIGN))
    assert offsets[3] == offsets[1]


def test_what_is_used_again_soon_is_not_overlapped():
    """In an order of there and back the last units before the turn lie apart, so none of them is fetched again."""
    size, sequence = 4 * ALIGN, [0, 1, 2, 3, 4, 5, 4, 3, 2, 1]
    offsets = place_units(sequence, [size] * 6, (0, 3 * size))
    assert len({offsets[unit] for unit in (3, 4, 5)}) == 3


@given(st.lists(st.integers(0, 5), min_size=1, max_size=20))
def test_the_next_use_is_the_next_one_in_the_endless_order(sequence):
    endless = sequence * 3
    for index, found in enumerate(next_uses(sequence)):
        assert found == endless.index(sequence[index], index + 1)
