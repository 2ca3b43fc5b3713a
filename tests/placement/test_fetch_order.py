"""Ranks that gather weights compare which units they have fetched."""

from __future__ import annotations

import carom
import pytest
from carom.core.placement.fetch_order import FetchOrder
from hypothesis import given
from hypothesis import strategies as st

FORWARD, INFERENCE, BACKWARD = "a forward with gradients", "a forward without gradients", "a backward"


def compare(*ranks: tuple[list[str], str]) -> list[str]:
    """Let each rank fetch its units and compare at the end of its pass; return the errors, "" for none."""
    rows: list[list[int]] = []

    def collect(numbers, what):
        rows.append(list(numbers))
        raise StopIteration

    for fetched, passed in ranks:
        order = FetchOrder(collect, 0)
        for name in fetched:
            order.add(name)
        with pytest.raises(StopIteration):
            order.compare(passed)
    errors = []
    for rank, (fetched, passed) in enumerate(ranks):
        order = FetchOrder(lambda numbers, what: rows, rank)
        for name in fetched:
            order.add(name)
        try:
            order.compare(passed)
            errors.append("")
        except carom.GroupError as error:
            errors.append(str(error))
    return errors


names = st.lists(st.sampled_from(["blocks.0", "blocks.1", "blocks.2"]), max_size=80)


@given(names, st.lists(st.integers(0, 31), min_size=2, max_size=4))
def test_a_rank_may_be_ahead_by_some_fetches_of_the_same_order(fetched, ahead):
    ranks = [(fetched[: max(0, len(fetched) - behind)], FORWARD) for behind in ahead]
    assert compare(*ranks) == [""] * len(ranks)


@given(names, names, names)
def test_an_order_that_differs_before_the_last_common_fetch_is_an_error_on_all_ranks(before, one, other):
    least = min(len(one), len(other))
    errors = compare((before + one, BACKWARD), (before + other, BACKWARD))
    wrong = one[:least] != other[:least] or abs(len(one) - len(other)) >= 32
    assert all(("different units" in error) == wrong for error in errors)


def test_one_fetch_more_early_on_is_an_error_in_every_later_pass():
    """The two fetched equally many units since."""
    for later in range(3):
        first = ["a", "b", "c"] + ["a", "b", "c"] * later + ["a"]
        second = ["a", "a", "b", "c"] + ["a", "b", "c"] * later
        assert all("CAROM_GATHER=0" in error for error in compare((first, FORWARD), (second, FORWARD)))


@pytest.mark.parametrize("other", [FORWARD, BACKWARD])
def test_different_passes_are_an_error_that_says_what_each_rank_did(other):
    first, second = compare((["a"], INFERENCE), (["a"], other))
    assert f"rank 0 has run {INFERENCE}, and rank 1 {other}" in first
    assert f"rank 1 has run {other}, and rank 0 {INFERENCE}" in second
    assert "validation on all ranks" in first
