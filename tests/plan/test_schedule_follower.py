"""`KnownPasses` and `ScheduleFollower`: which cycle a pass is in, and what is fetched where the order changes."""

from __future__ import annotations

import pytest
from carom.core.plan.learnt_order import KnownSchedules
from carom.core.plan.region import ALIGN
from carom.core.plan.schedule import UnitCost, UseOrder
from carom.core.plan.schedule_follower import KNOWN, TURNS, AccessOrder, KnownPasses, ScheduleFollower
from carom.core.plan.schedule_maker import schedule_in_region

COUNT = 7
ALL, FEWER, BACK = tuple(range(COUNT)), (0, 1, 3, 4, 6), tuple(reversed(range(COUNT)))


class Following:
    """A follower of units of one size in a region of two, with the tables it has made."""

    def __init__(self, known: KnownPasses | None = None, trainable: bool = False) -> None:
        self.made: list[UseOrder] = []
        self.unit = UnitCost(ALIGN, trainable=trainable)
        self.follower = ScheduleFollower(AccessOrder(range(COUNT)), self._make, known)

    def _make(self, order: UseOrder):
        self.made.append(order)
        return schedule_in_region(order, [self.unit] * COUNT, 2 * ALIGN, ALIGN)

    def use(self, unit: int, backward: bool = False) -> list[int] | None:
        """Use ``unit``. Return the units whose fetches are due then, None where no schedule is known."""
        follower = self.follower
        follower.begin_use(unit, backward, False)
        follower.end_use(unit)
        if follower.schedule is None:
            return None
        due = [follower.schedule.unit_of[number] for number in follower.due]
        follower.due.clear()
        return due

    def run(self, uses) -> list[list[int] | None]:
        self.follower.expect_pass()
        return [self.use(unit) for unit in uses]


def test_a_new_order_is_followed_from_its_second_pass_on():
    one = Following()
    one.run(ALL)
    assert one.run(FEWER)[2:] == [None] * 3
    assert all(one.run(FEWER))
    assert [order.uses for order in one.made] == [ALL, FEWER]


def test_a_pass_that_goes_over_to_a_known_order_is_fetched_by_its_table():
    one = Following()
    for order in (ALL, ALL, FEWER, FEWER):
        one.run(order)
    found = one.run(ALL)
    assert found[2] is not None and set(found[2]) <= {3, 4} and 3 in found[2]
    assert one.follower.schedule is not None and one.follower.position % COUNT == COUNT - 1
    assert all(
        due == [(unit + 1) % COUNT] or (unit + 2) % COUNT in due for unit, due in enumerate(found) if unit > 2
    )


def test_fetches_of_the_order_that_a_pass_leaves_are_not_due_any_more():
    def begin_other_pass(one: Following, issued: bool) -> list[int]:
        for order in (ALL, ALL, FEWER, FEWER, ALL):
            one.run(order)
        one.follower.expect_pass()
        for unit in FEWER[:3]:
            one.follower.begin_use(unit, False, False)
            assert one.follower.schedule is not None
            if issued and unit != FEWER[2]:
                one.follower.due.clear()
        return [one.follower.schedule.unit_of[number] for number in one.follower.due]

    late, in_time = begin_other_pass(Following(), False), begin_other_pass(Following(), True)
    assert late == in_time and set(late) <= set(FEWER)


@pytest.mark.parametrize("trainable", [False, True])
def test_the_first_forward_after_a_backward_fetches_what_an_update_changed(trainable):
    one = Following(trainable=trainable)
    for _ in range(4):
        found = one.run(ALL)
        for unit in BACK:
            one.use(unit, backward=True)
    assert found[0] == ([1, 2] if trainable else [2])


def test_a_new_order_is_looked_for_once(monkeypatch):
    one, asked = Following(), []
    find = KnownPasses.cycle_of
    monkeypatch.setattr(KnownPasses, "cycle_of", lambda *a: (asked.append(a[1]), find(*a))[1])
    one.run(ALL)
    one.run(FEWER)
    assert asked == [(0,), (0, 3, 9)], "when the first pass begins, and where the second one leaves it"


def test_an_order_with_another_begin_is_known_at_once():
    one = Following()
    for order in (ALL, BACK, ALL, BACK):
        one.run(order)
    assert one.follower.schedule is not None
    assert all(one.run(FEWER)[:2]), "it begins as the pass before the last did"


def test_the_cycle_of_passes_is_short_however_long_the_module_runs():
    one = Following()
    for _ in range(3):
        for order in (ALL, FEWER, BACK):
            for _ in range(20):
                one.run(order)
    assert max(len(order.uses) for order in one.made) == COUNT


def test_after_an_interrupt_the_pass_does_not_count():
    one = Following()
    one.run(ALL)
    one.run((0, 5))
    one.follower.forget_position()
    one.run(ALL)
    assert all(one.run(ALL))
    assert {order.uses for order in one.made} == {ALL}


def test_the_fewest_passes_that_came_twice_are_the_cycle():
    known = KnownPasses()
    for name in "aabaab":
        known.note((0, ord(name)))
    a, b = (0, ord("a")), (0, ord("b"))
    assert known.cycle_of((0,)) == (*a, *a, *b)
    known.note(a), known.note(a)
    assert known.cycle_of((0,)) == a
    assert known.cycle_of(b) == b and known.cycle_of((0, 7)) is None


def test_turns_of_too_many_passes_are_single_passes():
    known = KnownPasses()
    for _ in range(3):
        for number in range(TURNS + 1):
            known.note((0, number))
    assert known.cycle_of((0,)) == (0, TURNS)


def test_the_passes_used_last_are_known():
    known = KnownPasses()
    for number in range(KNOWN + 1):
        known.note((number,))
        known.note((0,))
    assert known.cycle_of((0,)) and known.cycle_of((2,)) and known.cycle_of((1,)) is None
    known.note(())
    assert known.cycle_of((KNOWN,)) == (KNOWN,)


@pytest.mark.parametrize("count, made", [(16, 16), (17, 34)])
def test_a_bounded_number_of_schedules_is_kept(count, made):
    schedules, makings = KnownSchedules(), []

    def make(number: int):
        makings.append(number)
        return schedule_in_region(UseOrder((0,)), [UnitCost(ALIGN)], ALIGN, ALIGN)

    for _ in range(2):
        for number in range(count):
            schedules.find(number, lambda number=number: make(number))
    assert len(makings) == made
