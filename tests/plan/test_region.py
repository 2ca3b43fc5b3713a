"""The slot region: extents never overlap, a place is found whenever there is one, Belady chooses."""

from __future__ import annotations

import random

import pytest
from carom.core.plan.region import ALIGN, Region, Slot
from hypothesis import given, settings
from hypothesis import strategies as st

blocks = st.integers(1, 12).map(lambda n: n * ALIGN)


def put(region: Region, nbytes: int, next_use=lambda slot: 1.0) -> Slot | None:
    place = region.place(nbytes, [next_use(slot) for slot in region.slots])
    if place is None:
        return None
    offset, victims = place
    for victim in victims:
        region.remove(victim)
    slot = Slot(object(), offset, nbytes)
    region.add(slot)
    return slot


def consistent(region: Region) -> None:
    end = 0
    for slot in region.slots:
        assert slot.offset % ALIGN == 0
        assert slot.offset >= end, "slots overlap, or are out of order"
        end = slot.end
    assert end <= region.nbytes


@settings(deadline=None, max_examples=200)
@given(st.lists(blocks, min_size=1, max_size=40), st.integers(1, 40), st.integers(0, 10**6))
def test_slots_never_overlap_and_stay_inside(sizes, room, seed):
    chance = random.Random(seed)
    region = Region(max(max(sizes), room * ALIGN), max(sizes))
    for nbytes in sizes:
        use = {id(slot): chance.choice([None, chance.random()]) for slot in region.slots}
        must = [slot for slot in region.slots if use[id(slot)] is None]
        put(region, nbytes, lambda slot, use=use: use[id(slot)])
        consistent(region)
        assert all(slot in region.slots for slot in must), "a slot that must stay was given away"


@settings(deadline=None, max_examples=200)
@given(st.lists(blocks, min_size=1, max_size=12), blocks, st.integers(0, 60), st.integers(0, 10**6))
def test_a_place_is_found_whenever_a_gap_is_wide_enough(sizes, nbytes, extra, seed):
    """In regions of three of the largest and more every gap between slots in use is considered."""
    chance = random.Random(seed)
    largest = max(*sizes, nbytes)
    region = Region(3 * largest + extra * ALIGN, largest)
    for size in sizes:
        put(region, size)
    kept = {id(slot): chance.choice([None, 1.0]) for slot in region.slots}
    fixed = [slot for slot in region.slots if kept[id(slot)] is None]
    edges = [0, *(edge for slot in fixed for edge in (slot.offset, slot.end)), region.nbytes]
    gaps = [end - start for start, end in zip(edges[::2], edges[1::2], strict=True)]
    place = region.place(nbytes, [kept[id(slot)] for slot in region.slots])
    # The last gap counts in whole alignments: a slot starts on one.
    gaps[-1] = (region.nbytes - nbytes) // ALIGN * ALIGN + nbytes - edges[-2]
    assert (place is not None) == any(gap >= nbytes for gap in gaps)


@settings(deadline=None, max_examples=300)
@given(st.lists(blocks, min_size=1, max_size=60), st.integers(0, 30), st.integers(0, 10**6))
def test_with_one_slot_in_use_another_of_the_largest_fits(sizes, extra, seed):
    """The promise of a region of twice the largest unit, after any history of placements."""
    chance = random.Random(seed)
    largest = max(sizes)
    region = Region(2 * largest + extra * ALIGN, largest)
    for nbytes in sizes:
        use = {id(slot): chance.random() for slot in region.slots}
        slot = put(region, nbytes, lambda s, use=use: use[id(s)])
        assert slot is not None
    for used in list(region.slots):
        place = region.place(largest, [None if slot is used else 1.0 for slot in region.slots])
        assert place is not None, "a slot in use leaves no room for the largest unit"


def test_what_is_needed_last_gives_way():
    region = Region(4 * ALIGN, ALIGN)
    slots = [put(region, ALIGN) for _ in range(4)]
    uses = {id(slot): use for slot, use in zip(slots, (3, 9, 1, 5), strict=True)}
    offset, victims = region.place(ALIGN, [uses[id(slot)] for slot in region.slots])
    assert victims == [slots[1]] and offset == slots[1].offset


def test_a_free_stretch_is_taken_before_anything_gives_way():
    region = Region(4 * ALIGN, ALIGN)
    slots = [put(region, ALIGN) for _ in range(4)]
    region.remove(slots[2])
    offset, victims = region.place(ALIGN, [10.0**9] * len(region.slots))
    assert (offset, victims) == (slots[2].offset, [])


def test_what_is_larger_than_the_region_has_no_place():
    assert Region(ALIGN, ALIGN).place(ALIGN + 1, []) is None


def test_a_slot_that_must_stay_is_never_a_victim():
    region = Region(2 * ALIGN, ALIGN)
    first, second = put(region, ALIGN), put(region, ALIGN)
    offset, victims = region.place(ALIGN, [None if slot is first else 1.0 for slot in region.slots])
    assert victims == [second] and offset == second.offset
    assert region.place(ALIGN, [None] * len(region.slots)) is None


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_equal_units_fill_the_region_wholly(count):
    region = Region(count * 3 * ALIGN, 3 * ALIGN)
    for _ in range(4 * count):
        put(region, 3 * ALIGN)
    assert len(region.slots) == count


@settings(deadline=None, max_examples=200)
@given(st.integers(2, 9), st.integers(2, 20), st.integers(0, 12), st.integers(0, 10**6))
def test_one_large_unit_leaves_small_ones_their_room(small, times, extra, seed):
    """A model's embedding is larger than the parts of its blocks: a region of little more than two of it holds many parts."""
    chance = random.Random(seed)
    largest, part = small * times * ALIGN, small * ALIGN
    region = Region(2 * largest + extra * ALIGN, largest)
    for _ in range(3 * times):
        use = {id(slot): chance.random() for slot in region.slots}
        put(region, part, lambda slot, use=use: use[id(slot)])
    assert len(region.slots) >= 2 * ((largest - part) // part), "all but what would leave the largest no room"
    for used in list(region.slots):
        assert region.place(largest, [None if slot is used else 1.0 for slot in region.slots]) is not None
