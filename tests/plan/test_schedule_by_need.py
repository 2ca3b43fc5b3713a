"""`schedule_maker`: where one place a unit would make the device wait, a unit has another place at each of its fetches."""

from __future__ import annotations

from collections import Counter

import pytest
from carom.core.plan import schedule_maker
from carom.core.plan.predict import Fetches, Link, Workload, predict
from carom.core.plan.region import ALIGN
from carom.core.plan.schedule import Times, UnitCost, UseOrder
from carom.core.plan.schedule_check import check_schedule
from carom.core.plan.schedule_follower import AccessOrder, ScheduleFollower
from carom.core.plan.schedule_maker import schedule_in_region
from carom.core.plan.schedule_seconds import predict_schedule
from hypothesis import given, settings
from hypothesis import strategies as st

SIZE = 8 * ALIGN


def passing(units: int, slots: int, links: int = 1, uses=None):
    """The schedule of ``units`` equal units that pass through a region of ``slots`` of them."""
    order = UseOrder(tuple(range(units)) if uses is None else uses)
    return schedule_in_region(order, [UnitCost(SIZE)] * units, slots * SIZE, ALIGN, links)


def there_and_back(blocks: int) -> tuple[int, ...]:
    """The uses of a training step: two units a block, recomputed before their backward."""
    back = [2 * block + part for block in reversed(range(blocks)) for part in (0, 1, 1, 0)]
    return (*range(2 * blocks), *back)


def leads(schedule):
    """For each fetch, the number of uses between the one after which it is issued and that of its unit."""
    uses, found = schedule.order.uses, []
    for position, units in enumerate(schedule.after):
        for unit in units:
            ahead = [uses[(position + distance) % len(uses)] for distance in range(1, len(uses) + 1)]
            found.append(ahead.index(unit))
    return found


@pytest.mark.parametrize(("units", "slots", "links", "laps"), [(5, 2, 1, 2), (7, 3, 2, 3), (10, 4, 3, 2)])
def test_an_order_whose_end_and_begin_need_one_place_is_laid_out_over_several_cycles(
    units, slots, links, laps
):
    schedule = passing(units, slots, links)
    check_schedule(schedule)
    assert schedule.laps == laps and min(leads(schedule)) == slots - 1
    assert Counter(schedule.unit_of) == dict.fromkeys(range(units), laps)
    assert schedule.transfers == laps * units


@pytest.mark.parametrize("slots", [2, 3])
def test_the_way_back_has_other_places_than_the_way_there(slots):
    uses = there_and_back(8)
    schedule = passing(16, slots, uses=uses)
    check_schedule(schedule)
    one, *_ = (schedule.originals[number] for number in schedule.order.uses)
    assert (
        one == 0
        and [schedule.unit_of[number] for number in schedule.order.uses] == list(uses) * schedule.laps
    )
    # A region of two units has room for the next one while one is used, and a block has two units.
    assert sorted(leads(schedule))[len(leads(schedule)) // 4] >= slots - 1


@pytest.mark.parametrize(("units", "slots", "why"), [
    (6, 2, "nothing waits"), (4, 3, "units stay from one cycle to the next"), (5, 1, "no unit has a lead in any place"),
    (5, 5, "all units stay"), (7, 3, "a lead of one unit suffices on one link"),
])  # fmt: skip
def test_each_unit_has_one_place_where_more_gain_nothing(units, slots, why):
    schedule = passing(units, slots)
    assert schedule.laps == 1 and not schedule.originals, why


def test_units_that_train_have_one_place():
    order = UseOrder((0, 1, 2, 3, 4), updates=frozenset({0}))
    units = [UnitCost(SIZE, trainable=unit == 2) for unit in range(5)]
    schedule = schedule_in_region(order, units, 2 * SIZE, ALIGN)
    check_schedule(schedule)
    assert not schedule.originals


def test_a_region_of_many_units_is_not_replayed(monkeypatch):
    monkeypatch.setattr(schedule_maker, "_replay", lambda *_: pytest.fail("a replay"))
    passing(25, 9, links=20)


def test_a_replay_that_takes_too_much_work_is_given_up(monkeypatch):
    found = passing(5, 2)
    assert found.laps == 2
    monkeypatch.setattr(schedule_maker, "MOST_WORK", 60)
    given_up = passing(5, 2)
    assert given_up.laps == 1 and not given_up.originals
    check_schedule(given_up)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 9), min_size=12, max_size=40), st.integers(0, 20), st.booleans())
def test_a_replay_finds_the_same_wherever_it_looks_whether_it_repeats_itself(sizes, more, back):
    units, uses = [UnitCost(ALIGN * size) for size in sizes], tuple(range(len(sizes)))
    order = UseOrder((*uses, *reversed(uses)) if back else uses)
    found = []
    for look in (1, 7, 1000):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(schedule_maker, "LOOK", look)
            patch.setattr(schedule_maker, "SAVES", -10.0)
            found.append(schedule_in_region(order, units, ALIGN * (max(sizes) + more), ALIGN))
    assert found[0] == found[1] == found[2]


@settings(deadline=None, max_examples=80)
@given(
    st.lists(st.integers(1, 6), min_size=3, max_size=12), st.integers(0, 12), st.integers(1, 3), st.booleans()
)
def test_a_replayed_order_keeps_the_promises_of_a_schedule(sizes, more, links, back):
    units, uses = [UnitCost(ALIGN * size) for size in sizes], tuple(range(len(sizes)))
    order = UseOrder((*uses, *reversed(uses)) if back else uses)
    schedule = schedule_in_region(order, units, ALIGN * (max(sizes) + more), ALIGN, links)
    check_schedule(schedule)
    assert [schedule.unit_of[number] for number in schedule.order.uses] == list(order.uses) * schedule.laps
    assert schedule.region_bytes <= ALIGN * (max(sizes) + more)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 6), min_size=3, max_size=9), st.integers(0, 9), st.booleans())
def test_a_step_by_a_schedule_is_predicted_with_its_fetches(sizes, more, train):
    count, seconds = len(sizes), tuple(map(float, sizes))
    work = Workload(tuple(range(count)), seconds, seconds if train else ())
    uses = tuple(use.unit for use in work.uses())
    units, nbytes = [UnitCost(ALIGN * size) for size in sizes], ALIGN * (max(sizes) + more)
    schedule = schedule_in_region(UseOrder(uses), units, nbytes, ALIGN)
    fetches = Fetches(schedule.order.uses, schedule.after, schedule.before, schedule.unit_of, schedule.laps)
    link, laps = Link(ALIGN, 0.0), schedule.laps
    sizes = [cost.nbytes for cost in units]
    found = predict(sizes, (), nbytes, work, link, fetches, steps=2)
    assert found.wire_bytes == round(schedule.wire_bytes / laps)
    times = Times(link, [seconds[unit] for unit in uses] * laps)
    assert found.seconds * laps == pytest.approx(predict_schedule(schedule, times).seconds)


def test_a_follower_goes_on_from_lap_to_lap():
    order = AccessOrder(range(5))
    follower = ScheduleFollower(
        order, lambda uses: schedule_in_region(uses, [UnitCost(SIZE)] * 5, 2 * SIZE, ALIGN)
    )
    offsets = []
    for _ in range(3):
        follower.expect_pass()
        for unit in range(5):
            follower.begin_use(unit, False, False)
            offsets.append(follower.offset_now())
            follower.end_use(unit)
            due = [follower.schedule.unit_of[number] for number in follower.due]
            assert due and due == [(unit + 1) % 5, (unit + 2) % 5][-len(due) :]
            upcoming = list(follower.upcoming())
            assert upcoming[: len(due)] == due and set(upcoming) == set(range(5))
            follower.due.clear()
    assert (
        offsets[:10] == offsets[:5] + [SIZE - offset for offset in offsets[:5]]
        and offsets[10:] == offsets[:5]
    )
