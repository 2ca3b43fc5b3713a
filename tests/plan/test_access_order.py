"""The learnt order: verified against a reference that knows the period, and against the past itself."""

from __future__ import annotations

import pytest
from carom.core.plan.schedule_follower import AccessOrder
from hypothesis import given, settings
from hypothesis import strategies as st

units = st.integers(0, 7)
accesses = st.lists(st.tuples(units, st.booleans()), max_size=120)


def feed(order: AccessOrder, sequence) -> list[bool]:
    return [order.access(unit, backward) for unit, backward in sequence]


def test_registration_order_is_expected_before_anything_is_known():
    order = AccessOrder([3, 1, 2])
    assert list(order.upcoming()) == [3, 1, 2]
    assert feed(order, [(3, False), (1, False), (2, False)]) == [True] * 3
    assert order.surprises == 0


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(units, st.booleans()), min_size=1, max_size=20), st.integers(3, 6))
def test_a_periodic_sequence_is_learnt_within_two_periods(period, repeats):
    """From the third period on every access is expected, whatever the period contains."""
    order = AccessOrder(range(8))
    feed(order, period * 2)
    for _ in range(repeats):
        assert all(feed(order, period))


@settings(deadline=None, max_examples=150)
@given(st.lists(units, min_size=1, max_size=12), st.data())
def test_what_is_upcoming_is_what_comes(period, data):
    """Reference predictor on a periodic sequence: the rest of this period, then the period again."""
    order = AccessOrder(range(8))
    feed(order, [(unit, False) for unit in period] * 3)
    done = data.draw(st.integers(0, len(period) - 1))
    feed(order, [(unit, False) for unit in period[:done]])
    expected = (period[done:] + period * 8)[: len(period)]
    assert list(order.upcoming())[: len(period)] == expected[: len(list(order.upcoming()))]
    assert len(list(order.upcoming())) >= 1


@settings(deadline=None, max_examples=150)
@given(accesses)
def test_every_surprise_is_counted_and_nothing_else(sequence):
    order = AccessOrder(range(4))
    surprises = 0
    for unit, backward in sequence:
        ahead = next(iter(order.upcoming()), None)
        expected = order.access(unit, backward)
        surprises += not expected
        assert not expected or ahead == unit
    assert order.surprises == surprises


@settings(deadline=None, max_examples=60)
@given(accesses)
def test_the_same_accesses_give_the_same_predictions(sequence):
    first, second = AccessOrder(range(8)), AccessOrder(range(8))
    assert feed(first, sequence) == feed(second, sequence)
    assert list(first.upcoming()) == list(second.upcoming())


FORWARD = [(unit, False) for unit in range(6)]
TURN = FORWARD + [step for unit in reversed(range(6)) for step in ((unit, False), (unit, True))]


@pytest.mark.parametrize(
    "period",
    [
        FORWARD,
        TURN,
        FORWARD * 2 + TURN,
        TURN + FORWARD * 3,
        FORWARD * 2 + TURN[6:] * 2,
        [(0, False)] * 3 + FORWARD,
    ],
    ids=[
        "inference",
        "training",
        "cond and uncond, then training",
        "sampling between",
        "two forwards",
        "thrice",
    ],
)
def test_the_patterns_of_training_and_sampling_are_learnt(period):
    order = AccessOrder(range(6))
    feed(order, period * 3)
    surprises = order.surprises
    feed(order, period * 5)
    assert order.surprises == surprises


def test_an_old_order_is_remembered_after_another():
    order = AccessOrder(range(6))
    skipping = [(0, False), (2, False), (4, False)]
    feed(order, FORWARD * 3 + skipping * 3 + FORWARD * 6)
    surprises = order.surprises
    feed(order, FORWARD * 4)
    assert order.surprises == surprises
    feed(order, skipping * 4)
    assert order.surprises - surprises <= 2, "one surprise where it leaves, one where it comes round, at most"


def test_after_an_unknown_unit_nothing_is_expected():
    order = AccessOrder([0, 1])
    order.access(5)
    assert list(order.upcoming()) == []


def test_the_memory_is_bounded_and_the_order_survives_forgetting():
    order = AccessOrder(range(6), limit=64)
    feed(order, TURN * 60)
    surprises = order.surprises
    assert len(order._history) <= 2 * 64
    for _ in range(30):
        feed(order, TURN)
        assert len(order._history) <= 2 * 64
        assert len(list(order.upcoming())) >= len(TURN) - 1
    assert order.surprises == surprises


def test_uses_that_were_seen_are_known_after_the_guessed_ones_were_forgotten():
    order = AccessOrder(range(3), limit=8)
    for unit in (2, 0, 1) * 9:
        order.access(unit)
    assert [unit for unit, _ in order.uses()] == [2, 0, 1]


def test_of_a_pass_that_is_longer_than_the_memory_the_latest_uses_are_known():
    order = AccessOrder((), limit=4)
    for unit in range(9):
        order.access(unit)
    assert [unit for unit, _ in order.pass_uses()] == [5, 6, 7, 8]


def test_an_access_costs_the_same_however_long_the_run():
    import time

    order = AccessOrder(range(60), limit=1 << 12)
    period = [(unit, False) for unit in range(60)]
    feed(order, period * 10)

    def seconds(periods: int) -> float:
        started = time.perf_counter()
        for unit, backward in period * periods:
            order.access(unit, backward)
            next(order.upcoming())
        return (time.perf_counter() - started) / periods

    early = min(seconds(20) for _ in range(3))
    feed(order, period * 300)
    assert min(seconds(20) for _ in range(3)) < 10 * early


def test_a_first_recomputation_is_not_taken_for_the_forward_again():
    """What came next in the forward is what a backward needs last: it is not to be fetched while the way is unknown."""
    order = AccessOrder(range(6))
    for unit in range(6):
        order.access(unit)
    for unit in (5, 4, 3):
        assert not order.access(unit, recomputed=True)
        assert list(order.upcoming()) == []
        order.access(unit, backward=True)
    for unit in (2, 1, 0):
        order.access(unit, recomputed=True)
        order.access(unit, backward=True)
    for unit in range(6):
        order.access(unit)
    assert (
        order.access(5, recomputed=True)
        and order.access(5, backward=True)
        and order.access(4, recomputed=True)
    )
