"""How Carom's models in one ComfyUI process share RAM."""

from __future__ import annotations

import pytest
from carom.nodes.host_share import Holder, divide, least_share
from hypothesis import given
from hypothesis import strategies as st

GIB = 1 << 30
holders = st.lists(st.builds(Holder, st.integers(0, 40 * GIB), st.booleans(), st.booleans()), max_size=5)


@pytest.mark.parametrize(
    "need, streams, many_passes, others, expected",
    [
        # Everything fits: nobody gives up anything, and the model may grow into what is free.
        (4, 4, True, [Holder(6 * GIB, True, False)], (10, True, (6,))),
        # A diffusion model takes what it needs from a model that waits, whole where that cannot be divided.
        (12, 12, True, [Holder(6 * GIB, True, True)], (12, False, (4,))),
        (12, 12, True, [Holder(6 * GIB, True, False)], (12, False, (0,))),
        # It takes less where a part of it stays on the device, but all that is free.
        (12, 8, True, [Holder(12 * GIB, True, True)], (8, False, (8,))),
        (12, 8, True, [Holder(6 * GIB, True, True)], (10, False, (6,))),
        # A model that runs keeps its RAM.
        (12, 12, True, [Holder(6 * GIB, False, True)], (10, False, (6,))),
        # A text encoder takes what is free.
        (12, 12, False, [Holder(6 * GIB, True, True)], (10, False, (6,))),
        # The longest unused model gives first.
        (10, 10, True, [Holder(4 * GIB, True, True), Holder(4 * GIB, True, True)], (10, False, (2, 4))),
    ],
)
def test_who_gets_what_of_16_gib(need, streams, many_passes, others, expected):
    share = divide(16 * GIB, need * GIB, streams * GIB, many_passes, others)
    found = (share.nbytes // GIB, share.whole, tuple(kept // GIB for kept in share.keeps))
    assert found == expected


@given(st.integers(0, 64 * GIB), st.integers(0, 64 * GIB), st.floats(0, 1), st.booleans(), holders)
def test_the_sum_stays_within_the_limit(limit, need, part, many_passes, others):
    share = divide(limit, need, int(part * need), many_passes, others)
    assert len(share.keeps) == len(others)
    assert all(0 <= kept <= other.nbytes for kept, other in zip(share.keeps, others, strict=True))
    assert all(
        kept == other.nbytes for kept, other in zip(share.keeps, others, strict=True) if not other.waits
    )
    # Only models that cannot give way, and the least share of this one, may exceed the limit.
    fixed = sum(share.keeps)
    assert share.nbytes + fixed <= limit or share.nbytes <= least_share(limit)
    assert not share.whole or share.nbytes >= need
