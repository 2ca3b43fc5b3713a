"""Address arithmetic of the pool, against a list of bytes."""

from __future__ import annotations

from carom.core.device.pool_memory import Extent, extents_over, find_offset, put_slot
from carom.core.plan.region import ALIGN
from hypothesis import given, settings
from hypothesis import strategies as st

CAPACITY = 12
COPIES = st.lists(st.tuples(st.integers(0, CAPACITY - 1), st.integers(1, CAPACITY)), max_size=8)


def make_extents(copies, scale=1):
    """Extents after copies of (offset, bytes), and the owner of each byte."""
    extents, owners = (), [None] * CAPACITY
    for slot, (begin, nbytes) in enumerate(copies):
        end = min(CAPACITY, begin + nbytes)
        extents = put_slot(extents, begin * scale, end * scale, slot)
        owners[begin:end] = [slot] * (end - begin)
    return extents, owners


@given(COPIES)
@settings(max_examples=150, deadline=None)
def test_each_byte_belongs_to_the_last_copy_over_it(copies):
    extents, owners = make_extents(copies)
    found = [None] * CAPACITY
    end = 0
    for extent in extents:
        assert end <= extent.begin < extent.end
        end = extent.end
        found[extent.begin : extent.end] = [extent.slot] * (extent.end - extent.begin)
    assert found == owners


@given(COPIES, st.integers(0, CAPACITY - 1), st.integers(1, CAPACITY))
@settings(max_examples=150, deadline=None)
def test_the_extents_over_a_range_are_those_that_have_bytes_in_it(copies, begin, nbytes):
    extents, _ = make_extents(copies)
    end = begin + nbytes
    want = tuple(extent for extent in extents if extent.begin < end and begin < extent.end)
    assert extents_over(extents, begin, end) == want


@given(
    COPIES,
    st.integers(1, CAPACITY),
    st.lists(st.one_of(st.none(), st.integers(0, 3)), min_size=8, max_size=8),
)
@settings(max_examples=150, deadline=None)
def test_the_offset_found_loses_the_fewest_bytes_of_all_offsets(copies, nbytes, losses):
    extents, owners = make_extents(copies, ALIGN)

    def lost(offset):
        slots = set(owners[offset : offset + nbytes]) - {None}
        each = [losses[slot] for slot in slots]
        return None if None in each else sum(each)

    found = find_offset(extents, CAPACITY * ALIGN, nbytes * ALIGN, lambda slot: losses[slot])
    possible = [cost for offset in range(CAPACITY - nbytes + 1) if (cost := lost(offset)) is not None]
    if found is None:
        assert not possible
    else:
        assert found % ALIGN == 0 and lost(found // ALIGN) == min(possible)


def test_a_unit_whose_size_is_no_multiple_of_the_alignment_begins_on_it():
    extents = (Extent(0, 700, "stays"),)
    assert find_offset(extents, 4 * ALIGN, 900, lambda slot: None) == 2 * ALIGN
    assert find_offset(extents, 3 * ALIGN, 900, lambda slot: None) is None
