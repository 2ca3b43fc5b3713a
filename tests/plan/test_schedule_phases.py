"""Orders with phases: a model stays while it is used again and again, and only then."""

from __future__ import annotations

from carom.core.plan.predict import Link
from carom.core.plan.region import ALIGN
from carom.core.plan.schedule import Times, UnitCost, UseOrder, Way
from carom.core.plan.schedule_check import check_schedule
from carom.core.plan.schedule_maker import make_schedule
from carom.core.plan.schedule_phases import place_by_phase
from carom.core.plan.schedule_region import find_visits
from carom.core.plan.schedule_seconds import predict_schedule
from hypothesis import given, settings
from hypothesis import strategies as st
from tests_schedule_cases import replay_blocks

SIZE = 4 * ALIGN
COPY = SIZE / 1e9


def prompt(*parts):
    """An order of phases, each given as (units, passes)."""
    uses, phases, first = [], [], 0
    for count, passes in parts:
        phases.append(len(uses))
        uses += list(range(first, first + count)) * passes
        first += count
    return UseOrder(tuple(uses), phases=tuple(phases)), [UnitCost(SIZE)] * first


def made(order, units, slots, factor=0.2):
    times = Times(Link(1e9, 0.0), [factor * COPY] * len(order.uses))
    schedule = make_schedule(order, units, slots * SIZE, times, ALIGN)
    check_schedule(schedule)
    return schedule, predict_schedule(schedule, times).seconds / COPY


def test_two_models_that_fit_one_after_the_other_are_fetched_once_a_prompt():
    order, units = prompt((8, 5), (8, 5))
    schedule, _ = made(order, units, 8)
    assert schedule.transfers <= 16


def test_what_the_phases_do_not_share_stays_over_all_of_them():
    order, units = prompt((6, 5), (6, 5))
    schedule, _ = made(order, units, 10)
    assert schedule.transfers <= 4, "only the two slots that overlap are fetched again, by each model"


def test_a_prompt_takes_fewer_fetches_than_with_units_that_stay_always():
    order, units = prompt((6, 1), (12, 10), (12, 10), (2, 1))
    schedule, _ = made(order, units, 10)
    # Eight units of one model that stay always, beside two slots, save 80 of its 120 fetches, and none of the other's.
    assert schedule.transfers < 0.7 * (6 + 40 + 120 + 2)


def test_a_model_larger_than_the_region_keeps_a_part_of_it_through_its_phase():
    order, units = prompt((12, 10), (2, 1))
    schedule, _ = made(order, units, 8, factor=0.0)
    # Each pass misses what does not stay beside a window; Belady's bound for a pass is 12 - 8 + 1.
    assert 9 * 5 <= schedule.transfers <= 10 * 6 + 2 + 8


def test_what_streams_within_a_phase_is_packed_where_the_link_binds():
    order, _ = prompt((6, 1), (12, 10), (12, 10), (2, 1))
    size = 20 * ALIGN
    times = Times(Link(1e9, 0.0), [0.1 * size / 1e9] * len(order.uses), 20e9)
    raw, packed = (
        make_schedule(order, [UnitCost(size, nbytes)] * 32, 8 * size, times, ALIGN)
        for nbytes in (0, 14 * ALIGN)
    )
    check_schedule(packed)
    assert set(packed.ways) == {Way.STREAMED_PACKED} and packed.transfers < 0.75 * len(order.uses)
    assert predict_schedule(packed, times).seconds < 0.9 * predict_schedule(raw, times).seconds


def test_a_phase_takes_no_bytes_in_front_of_its_room():
    order, _ = prompt((6, 3))
    visits = find_visits(order, set(range(6)), ())
    places = place_by_phase(order, visits, dict.fromkeys(range(6), SIZE), (2 * SIZE, 7 * SIZE))
    # Three units stay beside a window of two.
    assert sorted(places.values())[:3] == [2 * SIZE, 3 * SIZE, 4 * SIZE] and min(places.values()) == 2 * SIZE
    assert len([offset for offset in places.values() if offset >= 5 * SIZE]) == 3


def test_every_second_phase_begins_at_the_other_end_of_the_region():
    order, units = prompt((2, 2), (3, 2), (2, 2))
    visits = find_visits(order, set(range(7)), ())
    places = place_by_phase(order, visits, dict.fromkeys(range(7), SIZE), (0, 6 * SIZE))
    assert {unit: places[unit] // SIZE for unit in range(7)} == {0: 0, 1: 1, 2: 5, 3: 4, 4: 3, 5: 0, 6: 1}


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_phases_keep_every_rule(data):
    """Phases may share units, and cut the order anywhere."""
    count = data.draw(st.integers(2, 10))
    sizes = [data.draw(st.integers(1, 9)) * ALIGN for _ in range(count)]
    uses, phases = [], []
    for _ in range(data.draw(st.integers(1, 4))):
        phases.append(len(uses))
        uses += data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=6)) * data.draw(
            st.integers(1, 3)
        )
    order = UseOrder(tuple(uses), phases=tuple(phases))
    capacity = data.draw(st.integers(max(sizes), sum(sizes))) // ALIGN * ALIGN
    decoder = data.draw(st.sampled_from([None, 20e9]))
    times = Times(Link(1e9, 1e-7), [sizes[unit] / 1e9 * 0.3 for unit in uses], decoder)
    units = [UnitCost(size, size * 7 // 10) for size in sizes]
    schedule = make_schedule(order, units, capacity, times, ALIGN)
    check_schedule(schedule)
    assert sorted(replay_blocks(schedule)) == sorted(schedule.fetched)
    low = data.draw(st.integers(0, 3)) * ALIGN
    room = (low, low + max(sum(sizes) // 2 // ALIGN * ALIGN, max(sizes)))
    visits = find_visits(order, set(uses), ())
    places = place_by_phase(order, visits, dict(enumerate(sizes)), room)
    assert places.keys() == set(uses)
    assert all(offset >= 0 and offset + sizes[unit] <= room[1] for unit, offset in places.items())
    assert all(offset % ALIGN == 0 for offset in places.values())


def test_phases_are_laid_out_raw_where_packed_units_would_leave_no_region():
    """The other schedules keep the large units, so they need less staging memory and a smaller region."""
    mebibyte, phases = 1 << 20, ((0, 1) * 3, (2, 3, 4, 5) * 3)
    order = UseOrder(sum(phases, ()), phases=(0, 6))
    sizes = ((1, 0.5), (1, 0.5), (16, 0), (4, 2), (16, 11.04), (4, 2.76))
    units = [UnitCost(raw * mebibyte, int(packed * mebibyte)) for raw, packed in sizes]
    compute = tuple(0.001 * int(busy) for busy in "110101010101101011")
    times = Times(Link(1e9), compute, decode_bytes_per_second=1e11)
    schedule = make_schedule(order, units, 38 * mebibyte, times, mebibyte)
    check_schedule(schedule)
    assert set(schedule.ways) == {Way.STREAMED_RAW}
