"""The pool, as dialogues of public calls over the simulated device; `Pool.check` runs after each of them."""

from __future__ import annotations

import re
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import CodeType, FunctionType

import pytest
import torch
from carom.core.common.errors import BrokenRuleError, BudgetError, CaromError
from carom.core.device import pool, pool_memory, pool_room
from carom.core.device import slot as slot_file
from carom.core.device.cpu_engine import PlainEngine
from carom.core.device.simulated import SimulatedEngine, SimulatedRaceError
from carom.core.device.slot import NEXT, Issue, SlotState, User
from carom.core.plan.region import ALIGN
from carom.core.plan.residency import resident_cost
from tests_pool_bench import TIMINGS, Bench, in_threads

pytestmark = pytest.mark.timeout(30)
UNIT = ALIGN  # bytes of most units here
PATIENCE = 5.0  # seconds in which a thread that is told has to go on
on_every_timing = pytest.mark.parametrize("timing", TIMINGS)


def make_bench(slots: int, **settings) -> Bench:
    """A bench whose region holds ``slots`` units."""
    return Bench(slots * UNIT, **settings)


def make_streamed(bench: Bench, *offsets: int):
    """A unit and its slot for each of these offsets (in units), of which none is fetched yet."""
    return [bench.make_slot(bench.make_unit(UNIT), offset * UNIT) for offset in offsets]


# -- a unit comes, is used, and gives way


@on_every_timing
def test_a_unit_is_fetched_once_and_found_until_its_place_is_taken(timing):
    bench = make_bench(1, timing=timing)
    a, b = make_streamed(bench, 0, 0)
    assert not bench.use(a.unit)
    assert bench.fetch(a) and bench.states() == {"u0": "CACHED 0"}
    assert bench.use(a.unit) and bench.use(a.unit)
    assert not bench.fetch(a), "it is there already"
    assert bench.fetch(b) and bench.states() == {"u0": "FREE 0", "u1": "CACHED 0"}
    assert bench.use(b.unit) and not bench.use(a.unit)
    assert bench.copies == 2


@on_every_timing
def test_what_overlaps_in_part_gives_way_and_what_does_not_stays(timing):
    bench = make_bench(4, timing=timing)
    a, b, c = make_streamed(bench, 0, 1, 3)
    wide = bench.make_slot(bench.make_unit(2 * UNIT), UNIT)
    for slot in (a, b, c, wide):
        assert bench.fetch(slot)
    assert bench.states() == {
        "u0": "CACHED 0",
        "u1": f"FREE {UNIT}",
        "u2": f"CACHED {3 * UNIT}",
        "u3": f"CACHED {UNIT}",
    }
    assert all(bench.use(slot.unit) for slot in (a, c, wide))


@on_every_timing
def test_a_place_that_is_in_use_is_refused_and_taken_afterwards(timing):
    bench = make_bench(1, timing=timing)
    a, b = make_streamed(bench, 0, 0)
    bench.fetch(a)
    with bench.using(a.unit) as slot:
        assert not bench.fetch(b)
        bench.read(slot)
        assert bench.states() == {"u0": "IN_USE 0"}
    assert bench.fetch(b) and bench.use(b.unit)


def test_a_refused_place_keeps_what_could_have_been_given_up():
    bench = make_bench(2)
    a, b = make_streamed(bench, 0, 1)
    wide = bench.make_slot(bench.make_unit(2 * UNIT), 0)
    bench.fetch(a), bench.fetch(b)
    user = bench.make_user()
    bench.pool.enter(a.unit, 1, user)
    bench.pool.leave(a, user, held=True)
    with bench.using(b.unit):
        assert not bench.fetch(wide)
        assert bench.states() == {"u0": "CACHED 0", "u1": f"IN_USE {UNIT}"}


@on_every_timing
def test_a_place_is_overwritten_after_its_readers_on_every_stream(timing):
    bench = make_bench(1, timing=timing)
    a, b = make_streamed(bench, 0, 0)
    for slot in (a, b, a):
        assert bench.fetch(slot)
        for stream in (0, 1, 0, 2):
            assert bench.use(slot.unit, stream)


@on_every_timing
def test_two_users_on_two_streams_end_one_after_the_other(timing):
    bench = make_bench(1, timing=timing)
    a, b = make_streamed(bench, 0, 0)
    bench.fetch(a)
    with bench.using(a.unit, stream=1):
        with bench.using(a.unit, stream=2):
            assert not bench.fetch(b)
        assert not bench.fetch(b), "one of them is left"
    assert bench.fetch(b) and bench.use(b.unit, stream=2)


@on_every_timing
def test_what_is_left_of_a_place_still_waits_for_its_readers(timing):
    """The first half of a place is overwritten, then another unit lies over the second half."""
    bench = make_bench(3, timing=timing)
    wide = bench.make_slot(bench.make_unit(2 * UNIT), 0)
    a, b = make_streamed(bench, 0, 1)
    bench.fetch(wide)
    bench.use(wide.unit, stream=1)
    assert bench.fetch(a)
    # A decoder runs on another stream than the copy before, which has waited for these readers.
    assert bench.fetch(b, decoded=True) and bench.use(b.unit)


@on_every_timing
def test_a_decoder_waits_for_a_copy_that_nobody_read(timing):
    bench = make_bench(1, timing=timing)
    a, b = make_streamed(bench, 0, 0)
    bench.fetch(a)
    assert bench.fetch(b, decoded=True) and bench.use(b.unit)
    assert bench.fetch(a) and bench.use(a.unit)


def test_a_unit_that_is_fetched_to_another_place_is_given_up_at_the_first():
    bench = make_bench(2)
    (a,) = make_streamed(bench, 0)
    bench.fetch(a)
    a.unit.version = 2
    assert bench.fetch(bench.make_slot(a.unit, UNIT)) and bench.use(a.unit)
    assert bench.states() == {"u0": f"CACHED {UNIT}"} and a.state is SlotState.FREE


# -- versions


def test_another_version_is_fetched_again_at_the_same_place():
    bench = make_bench(1)
    (a,) = make_streamed(bench, 0)
    bench.fetch(a)
    a.unit.version = 2
    assert not bench.use(a.unit)
    assert bench.fetch(a) and bench.use(a.unit) and bench.copies == 2


def test_a_use_of_another_version_shares_what_other_users_read():
    bench = make_bench(2)
    (a,) = make_streamed(bench, 0)
    bench.fetch(a)
    with bench.using(a.unit) as slot:
        a.unit.version = 2
        assert not bench.fetch(a)
        user = bench.make_user()
        assert bench.pool.enter(a.unit, 2, user) is slot
        bench.read(slot, version=1)
        bench.pool.leave(slot, user)
    assert not bench.use(a.unit), "nobody reads the old version any more"
    assert bench.fetch(a) and bench.use(a.unit)


def test_what_the_program_wrote_in_a_slot_and_home_needs_no_fetch():
    bench = make_bench(1)
    (a,) = make_streamed(bench, 0)
    bench.fetch(a)
    with bench.using(a.unit) as slot:
        a.unit.version = 2
        slot.base.copy_(a.unit.bytes(2))
        bench.pool.keep_version(slot, 2)
    assert bench.use(a.unit) and bench.copies == 1


# -- views that the program keeps


@on_every_timing
def test_a_kept_view_keeps_its_place_and_what_reads_it_is_waited_for(timing):
    bench = make_bench(1, timing=timing)
    a, b = make_streamed(bench, 0, 0)
    bench.fetch(a)
    user = bench.make_user()
    bench.pool.enter(a.unit, 1, user)
    a.views.kept = True
    bench.pool.leave(a, user, held=True)
    assert bench.states() == {"u0": "HELD 0"} and not bench.fetch(b)
    assert bench.use(a.unit), "it may be used meanwhile"
    bench.read(a)  # by the view, after the last user has left
    a.views.kept = False
    assert bench.fetch(b) and bench.use(b.unit)


@on_every_timing
def test_a_view_kept_by_the_first_of_two_users_is_not_forgotten_by_the_second(timing):
    bench = make_bench(1, timing=timing)
    a, b = make_streamed(bench, 0, 0)
    bench.fetch(a)
    with bench.using(a.unit, stream=2), bench.device.stream(1):
        user = bench.make_user(1)
        bench.pool.enter(a.unit, 1, user)
        bench.pool.leave(a, user, held=True)
        bench.read(a)  # by the view, which is dropped then
    assert bench.states() == {"u0": "HELD 0"}
    assert bench.fetch(b) and bench.use(b.unit)


def test_a_kept_view_of_an_old_version_stays_while_the_unit_is_fetched_elsewhere():
    bench = make_bench(2)
    a, b = make_streamed(bench, 0, 0)
    bench.fetch(a)
    with bench.using(a.unit):
        a.views.kept = True
    user = bench.make_user()
    bench.pool.enter(a.unit, 1, user)
    bench.pool.leave(a, user, held=True)
    a.unit.version = 2
    assert not bench.fetch(a), "its own place is held"
    (slot,), user = bench.fault(a.unit)
    assert bench.states() == {"u0": f"IN_USE {UNIT}"}
    bench.read(slot), bench.read(a, version=1)
    bench.pool.leave(slot, user)
    a.views.kept = False
    bench.fault(a.unit, user=user)
    assert a.state is SlotState.FREE, "the old version is given up with its view"
    assert a.base.eq(255).all(), "and the engine is told"
    bench.pool.leave(slot, user)
    assert bench.fetch(b) and bench.use(a.unit)


# -- memory


@pytest.fixture
def small_chunks(monkeypatch):
    """Units of two units' bytes and more get chunks of their own."""
    monkeypatch.setattr(pool_memory, "OWN_CHUNK", 2 * UNIT)


def test_large_cached_units_have_memory_of_their_own_and_small_ones_share(small_chunks):
    bench = make_bench(1)
    first, large, second = bench.make_cached(UNIT, 3 * UNIT, UNIT)
    assert bench.memory.nbytes == 6 * UNIT == bench.engine.allocated
    assert bench.pool.drop_units([first.unit]) == 0, "its neighbour lies beside it"
    assert bench.pool.drop_units([large.unit]) == 3 * UNIT
    assert bench.engine.allocated == bench.engine.reserve.bytes == bench.memory.nbytes == 3 * UNIT
    assert not bench.use(large.unit) and bench.use(second.unit)
    assert not bench.fetch(large), "its memory was given back"
    assert large.views is None and large.base.numel() == 0, "nothing keeps the memory"
    assert bench.pool.drop_units([second.unit]) == 2 * UNIT


@pytest.mark.parametrize("grain", [ALIGN, 4 * ALIGN])
def test_cached_units_take_the_bytes_that_plans_count(monkeypatch, grain):
    """Plans count a buffer for each unit of `SMALL_UNIT` and more, and one for all smaller ones."""
    monkeypatch.setattr(SimulatedEngine, "grain", grain)
    bench = make_bench(0)
    sizes = [5 * ALIGN, 12 << 20, 7 * ALIGN, (10 << 20) + ALIGN, ALIGN]
    bench.make_cached(*sizes)
    assert bench.memory.nbytes == resident_cost(sizes, grain)


def test_units_of_ten_mebibytes_are_large():
    bench = make_bench(1)
    slots = bench.memory.reserve(
        [bench.make_unit(10 << 20), bench.make_unit((10 << 20) - 1), bench.make_unit(512)]
    )
    assert [slot.chunk is slots[1].chunk for slot in slots] == [False, True, True]


def test_units_in_use_or_held_are_not_dropped(small_chunks):
    bench = make_bench(1)
    a, b = bench.make_cached(2 * UNIT, 2 * UNIT)
    with bench.using(a.unit) as slot:
        assert bench.pool.drop_units([a.unit, b.unit]) == 2 * UNIT
        bench.read(slot)
    a.views.kept = True
    user = bench.make_user()
    bench.pool.enter(a.unit, 1, user)
    bench.pool.leave(a, user, held=True)
    assert bench.pool.drop_units([a.unit]) == 0
    a.views.kept = False
    assert bench.pool.drop_units([a.unit]) == 2 * UNIT


def test_memory_for_all_cached_units_is_allocated_or_none(small_chunks):
    bench = make_bench(1, memory_bytes=5 * UNIT)
    with pytest.raises(torch.OutOfMemoryError):
        bench.memory.reserve([bench.make_unit(2 * UNIT) for _ in range(3)])
    assert bench.memory.nbytes == UNIT == bench.engine.allocated
    bench.pool.check()


def test_the_device_is_idle_between_an_allocation_and_the_first_copy_and_before_memory_goes(monkeypatch):
    calls: list[str] = []

    def told(name, function):
        def call(*args):
            calls.append(name)
            return function(*args)

        return call

    for name in ("allocate", "synchronize", "copy_in"):
        monkeypatch.setattr(SimulatedEngine, name, told(name, getattr(SimulatedEngine, name)))
    bench = make_bench(1)
    (a,) = make_streamed(bench, 0)
    bench.fetch(a)
    bench.make_cached(UNIT)
    for place in (i for i, name in enumerate(calls) if name == "allocate"):
        assert calls[place + 1] == "synchronize"
    calls.clear()
    bench.pool.drop_units(bench.units)
    assert calls == ["synchronize"]


def test_a_place_that_is_not_within_the_region_is_refused():
    """A schedule writes -1 for the offset of a unit that it does not place."""
    bench = make_bench(2)
    for offset in (-1, bench.memory.region.nbytes - UNIT + ALIGN):
        slot = bench.make_slot(bench.make_unit(UNIT), offset)
        assert bench.pool.issue(slot, 1) is Issue.REFUSED


def test_a_new_region_has_none_of_the_old_slots():
    bench = make_bench(1)
    (a,) = make_streamed(bench, 0)
    bench.fetch(a)
    with bench.using(a.unit), pytest.raises(BrokenRuleError, match="rule P7 .* 'u0'.*IN_USE"):
        bench.pool.set_region(2 * UNIT)
    bench.pool.set_region(2 * UNIT)
    assert not bench.use(a.unit) and not bench.fetch(a)
    assert bench.engine.allocated == bench.memory.nbytes == bench.engine.reserve.peak == 2 * UNIT
    again = bench.make_slot(a.unit, UNIT)
    assert bench.fetch(again) and bench.use(a.unit)


def test_a_new_region_leaves_cached_units_where_they_are():
    bench = make_bench(1)
    (cached,) = bench.make_cached(UNIT)
    bench.pool.set_region(2 * UNIT)
    assert bench.use(cached.unit) and bench.memory.nbytes == 3 * UNIT


def test_a_view_kept_in_a_region_outlives_it():
    bench = make_bench(1)
    (a,) = make_streamed(bench, 0)
    bench.fetch(a)
    user = bench.make_user()
    bench.pool.enter(a.unit, 1, user)
    view, a.views.kept = a.base[:3], True
    bench.pool.leave(a, user, held=True)
    bench.pool.set_region(UNIT)
    (b,) = make_streamed(bench, 0)
    bench.fetch(b)
    assert bench.use(b.unit) and torch.equal(view, a.unit.bytes(1)[:3])


def test_without_memory_for_a_region_nothing_can_be_fetched_until_there_is_some():
    bench = make_bench(1, memory_bytes=4 * UNIT)
    (a,) = make_streamed(bench, 0)
    with pytest.raises(torch.OutOfMemoryError):
        bench.pool.set_region(5 * UNIT)
    assert bench.memory.nbytes == 0 and not bench.fetch(a)
    bench.pool.set_region(4 * UNIT)
    again = bench.make_slot(a.unit, 0)
    assert bench.fetch(again) and bench.use(a.unit)


def test_a_closed_pool_has_no_memory_and_nothing_in_it():
    bench = make_bench(1)
    (a,) = make_streamed(bench, 0)
    bench.fetch(a)
    (b,) = bench.make_cached(UNIT)
    with bench.using(b.unit):
        bench.pool.close()
    assert bench.memory.nbytes == bench.engine.allocated == 0
    assert not bench.use(a.unit) and not bench.fetch(b)
    with pytest.raises(CaromError, match="closed"):
        bench.fault(a.unit)


def test_an_address_leads_to_the_slot_over_it():
    bench = make_bench(2)
    a, b = make_streamed(bench, 0, 1)
    bench.fetch(a)
    (c,) = bench.make_cached(UNIT)
    low = bench.memory.region.memory.data_ptr()
    at = bench.memory.slot_at
    assert [at(low - 1), at(low), at(low + UNIT - 1), at(low + UNIT)] == [None, a, a, None]
    bench.fetch(b)
    assert at(low + UNIT) is b and at(c.base.data_ptr() + 5) is c
    bench.pool.close()
    assert at(low) is None


@pytest.mark.parametrize("how", ["dropped", "failed", "lost"])
def test_the_engine_is_told_of_bytes_that_are_given_up(how):
    """The simulated device fills them with 255, so that a use that goes on is seen."""
    bench = make_bench(1, timing="early")
    (a,) = make_streamed(bench, 0)
    if how == "failed":
        bench.pool.issue(a, 1)
        bench.copy(a, 1)
        bench.pool.cancel_copies(threading.get_ident())
    else:
        bench.fetch(a)
        bench.engine.synchronize()
        bench.pool.drop_units([a.unit]) if how == "dropped" else bench.pool.lose_slot(a)
    assert a.base.eq(255).all()


# -- a VBAR takes pages


def test_a_lost_slot_is_taken_by_nobody_until_it_is_fetched_again():
    bench = make_bench(1)
    (a,) = bench.make_cached(UNIT)
    with bench.using(a.unit), pytest.raises(BrokenRuleError, match="P12"):
        bench.pool.lose_slot(a)
    bench.engine.synchronize()  # as comfy-aimdo does before it takes pages
    bench.pool.lose_slot(a)
    assert bench.states() == {"u0": "LOST own"} and not bench.use(a.unit)
    assert not bench.fetch(bench.memory.make_slot(bench.make_unit(UNIT), a.chunk, 0))
    with pytest.raises(BudgetError):  # only the region has room
        bench.fault(bench.make_unit(UNIT), bench.make_unit(UNIT))
    assert bench.fetch(a) and bench.use(a.unit)
    bench.pool.lose_slot(a)
    assert bench.pool.drop_units([a.unit]) == UNIT


def test_what_lies_over_a_lost_place_is_lost_with_it():
    bench = make_bench(1)
    (a,) = bench.make_cached(2 * UNIT)
    over = bench.memory.make_slot(bench.make_unit(UNIT), a.chunk, UNIT)
    assert bench.fetch(over) and bench.use(over.unit)
    bench.engine.synchronize()
    bench.pool.lose_slot(a)
    assert bench.states() == {"u0": "LOST own", "u1": "FREE own"} and not bench.use(over.unit)


def test_no_fault_takes_a_place_whose_pages_may_be_taken():
    """In the memory of a VBAR, whatever the state of what lies there: nobody has given the place memory."""
    bench = make_bench(1)
    lossy = bench.memory.set_ranges(bench.engine.allocate(UNIT), bench.engine.allocate(3 * UNIT))
    homes = [bench.memory.make_slot(bench.make_unit(UNIT), lossy, place * UNIT) for place in range(2)]
    assert bench.fetch(homes[0]) and bench.fetch(homes[1])
    bench.pool.drop_units([homes[0].unit])
    assert lossy in bench.memory.chunks, "it is not torch's to be given back"
    (slot,), user = bench.fault(homes[0].unit)
    assert slot.chunk is bench.memory.region
    bench.pool.leave(slot, user)
    with pytest.raises(BudgetError):
        bench.fault(bench.make_unit(UNIT), bench.make_unit(UNIT))
    homes[0].unit.version += 1
    assert bench.use(homes[1].unit) and bench.fetch(homes[0])


def test_a_place_that_lost_its_memory_waits_for_its_readers_when_it_gets_memory_again():
    """It may share a page with a place that keeps its memory. Then no page was taken, and the device was not idle."""
    bench = make_bench(1, timing="late")
    (a,) = bench.make_cached(UNIT)
    assert bench.use(a.unit)
    bench.pool.lose_slot(a)
    a.unit.version += 1
    assert bench.fetch(a) and bench.use(a.unit)


# -- faults


@on_every_timing
def test_a_fault_takes_several_units_at_once_beside_what_is_in_use(timing):
    bench = make_bench(4, timing=timing)
    a, b, c = make_streamed(bench, 0, 1, 1)
    for slot in (a, b):
        bench.fetch(slot)
    with bench.using(a.unit):
        slots, user = bench.fault(b.unit, c.unit, bench.make_unit(UNIT))
        assert bench.states() == {
            "u0": "IN_USE 0", "u1": f"IN_USE {UNIT}", "u2": f"IN_USE {2 * UNIT}", "u3": f"IN_USE {3 * UNIT}"
        }  # fmt: skip
        for slot in slots:
            bench.read(slot)
            bench.pool.leave(slot, user)
    assert bench.copies == 4 and bench.use(c.unit)


def test_a_fault_prefers_the_place_that_its_unit_had():
    bench = make_bench(3)
    a, b = make_streamed(bench, 1, 1)
    bench.fetch(a), bench.fetch(b)
    (slot,), user = bench.fault(a.unit)
    assert slot is a
    bench.pool.leave(a, user)
    with bench.using(a.unit):
        (slot,), user = bench.fault(b.unit)
        assert bench.states() == {"u0": f"IN_USE {UNIT}", "u1": "IN_USE 0"}
        bench.pool.leave(slot, user)


def test_a_fault_does_not_overwrite_units_of_its_own():
    bench = make_bench(2)
    a, b = make_streamed(bench, 0, 1)
    bench.fetch(a), bench.fetch(b)
    slots, user = bench.fault(a.unit, bench.make_unit(UNIT))
    for slot in slots:
        bench.read(slot)
        bench.pool.leave(slot, user)
    assert slots[0] is a and bench.copies == 3


def test_a_fault_moves_units_together_where_their_last_places_leave_gaps():
    bench = Bench(4 * UNIT)
    a, b = (bench.make_slot(bench.make_unit(2 * UNIT), UNIT) for _ in range(2))
    bench.fetch(a), bench.fetch(b)
    slots, user = bench.fault(a.unit, bench.make_unit(2 * UNIT))
    for slot in slots:
        bench.read(slot)
        bench.pool.leave(slot, user)
    assert {slot.offset for slot in slots} == {0, 2 * UNIT}


def test_a_fault_gives_up_a_cached_unit_where_the_region_is_in_use(small_chunks):
    bench = make_bench(1)
    first, last = bench.make_cached(2 * UNIT, 2 * UNIT)
    a, b = make_streamed(bench, 0, 0)
    bench.fetch(a)
    before = bench.engine.allocated
    with bench.using(a.unit):
        (slot,), user = bench.fault(b.unit)
        bench.read(slot)
        assert slot.chunk is last.chunk, "the unit that was reserved last is given up first"
        bench.pool.leave(slot, user)
    assert bench.use(first.unit) and not bench.use(last.unit) and bench.engine.allocated == before
    assert bench.fetch(last) and bench.use(last.unit)


def test_memory_of_a_dropped_unit_is_given_back_though_a_fault_put_another_unit_there(small_chunks):
    bench = make_bench(1)
    first, last = bench.make_cached(2 * UNIT, 2 * UNIT)
    a, b = make_streamed(bench, 0, 0)
    bench.fetch(a)
    with bench.using(a.unit):
        (found,), user = bench.fault(b.unit)
        assert found.chunk is last.chunk
        assert bench.pool.drop_units([last.unit]) == 0, "it is in use"
        bench.pool.leave(found, user)
    assert bench.pool.drop_units([first.unit]) == 2 * UNIT
    assert bench.use(b.unit)
    assert bench.pool.drop_units([last.unit]) == 2 * UNIT
    assert not bench.use(b.unit) and bench.fetch(b) and bench.use(b.unit)


def test_memory_that_is_reserved_and_not_filled_yet_stays_with_its_unit(small_chunks):
    bench = make_bench(1)
    (a,) = bench.memory.reserve([bench.make_unit(2 * UNIT)])
    (b,) = bench.make_cached(2 * UNIT)
    assert bench.pool.drop_units([b.unit]) == 2 * UNIT
    assert bench.fetch(a) and bench.use(a.unit)


def test_a_fault_gives_up_several_cached_units_for_one_that_is_larger(small_chunks):
    bench = make_bench(1)
    cached = bench.make_cached(2 * UNIT, 2 * UNIT, 2 * UNIT)
    wide = bench.make_unit(4 * UNIT - 100)
    before = bench.engine.allocated
    with bench.using(cached[1].unit):
        (slot,), user = bench.fault(wide)
        bench.read(slot)
        bench.pool.leave(slot, user)
    assert bench.engine.allocated <= before and bench.engine.reserve.peak <= before, "never more than before"
    assert [bench.use(slot.unit) for slot in cached] == [False, True, False]
    assert not bench.fetch(cached[0]), "its memory was given back"
    assert bench.use(wide) and bench.pool.drop_units([]) == 4 * UNIT, "nothing was reserved for it"
    assert not bench.use(wide)


@on_every_timing
def test_a_fault_moves_units_of_its_own_that_lie_in_the_way_of_the_others(timing):
    bench = make_bench(3, timing=timing)
    middle = bench.make_slot(bench.make_unit(UNIT), UNIT)
    bench.fetch(middle)
    wide = bench.make_unit(2 * UNIT)
    slots, user = bench.fault(middle.unit, wide)
    assert bench.states() == {"u0": f"IN_USE {2 * UNIT}", "u1": "IN_USE 0"}
    for slot in slots:
        bench.read(slot)
        bench.pool.leave(slot, user)
    with bench.using(middle.unit), pytest.raises(BudgetError):
        bench.fault(middle.unit, bench.make_unit(3 * UNIT))


def test_a_fault_without_room_names_what_is_in_use_and_takes_nothing():
    bench = make_bench(2)
    a, b = make_streamed(bench, 0, 1)
    for slot in (a, b):
        bench.fetch(slot)
    with bench.using(a.unit):
        user = bench.make_user()
        bench.pool.enter(b.unit, 1, user)
        b.views.kept = True
        bench.pool.leave(b, user, held=True)
        with pytest.raises(BudgetError) as refused:
            bench.fault(a.unit, bench.make_unit(UNIT), bench.make_unit(100))
        assert bench.states() == {"u0": "IN_USE 0", "u1": f"HELD {UNIT}"}
    assert str(refused.value) == (
        f"no room on the device for 'u2', 'u3' ({UNIT + 100} bytes): of {2 * UNIT} bytes for weights, 'u0' in use at the "
        f"same time; 'u1' kept by the program beyond their run"
    )
    assert bench.use(a.unit), "it is in use no longer"
    assert bench.fetch(bench.make_slot(bench.units[2], 0))


def make_waiting(bench: Bench, *units, using=None):
    """Start a thread that faults ``units`` within a use of the unit ``using``, and return it when it waits."""
    found = []

    def fault():
        with bench.lock, nullcontext() if using is None else bench.using(using):
            slots, user = bench.fault(*units)
            for slot in slots:
                bench.read(slot)
            found.extend(slots)
            for slot in slots:
                bench.pool.leave(slot, user)

    threads, errors = in_threads(fault)
    limit = time.monotonic() + 10
    while not bench.waiters.asleep and threads[0].is_alive() and time.monotonic() < limit:
        time.sleep(0.001)
    return threads[0], errors, found


def test_a_thread_waits_for_a_slot_of_another_and_goes_on_when_it_is_left():
    bench = make_bench(1)
    a, b = make_streamed(bench, 0, 0)
    bench.fetch(a)
    with bench.lock:
        user = bench.make_user()
        bench.pool.enter(a.unit, 1, user)
    thread, errors, found = make_waiting(bench, b.unit)
    assert thread.is_alive()
    with bench.lock:
        bench.pool.leave(a, user)
    thread.join(PATIENCE)
    assert not thread.is_alive() and not errors and found == [bench.raw._last[b.unit]]


def test_a_thread_that_waits_for_the_other_user_of_its_own_slot_learns_that_waiting_is_in_vain():
    bench = make_bench(1)
    (a,) = make_streamed(bench, 0)
    bench.fetch(a)
    user = bench.make_user()
    bench.pool.enter(a.unit, 1, user)

    thread, errors, _ = make_waiting(bench, bench.make_unit(UNIT), using=a.unit)
    with bench.lock:
        bench.pool.leave(a, user)
    thread.join(PATIENCE)
    assert not thread.is_alive() and [type(error) for error in errors] == [BudgetError]


def test_a_unit_that_another_thread_fetches_meanwhile_is_not_fetched_twice():
    bench = make_bench(1)
    (a,) = make_streamed(bench, 0)
    with bench.lock:
        assert bench.pool.issue(a, 1) is Issue.TAKEN
    thread, errors, found = make_waiting(bench, a.unit)
    assert thread.is_alive()
    with bench.lock:
        bench.pool.complete(a, bench.copy(a, 1))
    thread.join(PATIENCE)
    assert not thread.is_alive() and not errors and found == [a] and bench.copies == 1


def test_threads_that_wait_do_not_wait_for_each_other():
    """Both have one slot, and want another: the second is told at once that there is no room, and the first goes on."""
    bench = make_bench(2)
    a, b = make_streamed(bench, 0, 1)
    for slot in (a, b):
        bench.fetch(slot)
    mine = bench.make_user()
    bench.pool.enter(a.unit, 1, mine)

    thread, errors, _ = make_waiting(bench, bench.make_unit(UNIT), using=b.unit)
    began = time.monotonic()
    with bench.lock, pytest.raises(BudgetError):
        bench.fault(bench.make_unit(UNIT))
    assert time.monotonic() - began < PATIENCE
    with bench.lock:
        bench.pool.leave(a, mine)
    thread.join(PATIENCE)
    assert not thread.is_alive() and not errors


def test_a_thread_that_waits_is_told_of_the_close():
    bench = make_bench(1)
    a, b = make_streamed(bench, 0, 0)
    bench.fetch(a)
    bench.pool.enter(a.unit, 1, bench.make_user())
    thread, errors, _ = make_waiting(bench, b.unit)
    with bench.lock:
        bench.pool.close()
    thread.join(PATIENCE)
    assert not thread.is_alive() and [type(error) for error in errors] == [CaromError]


def test_a_thread_that_waits_goes_on_when_another_is_abandoned():
    bench = make_bench(1)
    a, b = make_streamed(bench, 0, 0)
    bench.fetch(a)
    bench.pool.enter(a.unit, 1, bench.make_user())
    thread, errors, found = make_waiting(bench, b.unit)
    with bench.lock:
        bench.pool.abandon(threading.get_ident())
    thread.join(PATIENCE)
    assert not thread.is_alive() and not errors and len(found) == 1


def test_a_thread_does_not_wait_for_views_where_none_is_kept(monkeypatch):
    monkeypatch.setattr(slot_file, "_PATIENCE", 2.0)
    bench = make_bench(2)
    a, b = make_streamed(bench, 0, 1)
    bench.fetch(a)
    bench.others_active = True
    began = time.monotonic()
    with bench.using(a.unit), pytest.raises(BudgetError):
        bench.fault(b.unit, bench.make_unit(UNIT))
    assert time.monotonic() - began < 1


@pytest.mark.parametrize("active", [True, False])
def test_a_thread_waits_for_a_view_only_while_another_may_drop_it(monkeypatch, active):
    monkeypatch.setattr(slot_file, "_PATIENCE", 0.3)
    bench = make_bench(1)
    a, b = make_streamed(bench, 0, 0)
    bench.fetch(a)
    user = bench.make_user()
    bench.pool.enter(a.unit, 1, user)
    a.views.kept = True
    bench.pool.leave(a, user, held=True)
    bench.others_active = active
    began = time.monotonic()
    with bench.lock, pytest.raises(BudgetError):
        bench.fault(b.unit)
    assert (time.monotonic() - began > 0.25) == active


def test_a_thread_that_waits_for_a_view_leaves_the_lock_to_the_one_that_drops_it(monkeypatch):
    monkeypatch.setattr(slot_file, "_PATIENCE", 1.0)
    bench = make_bench(1)
    a, b = make_streamed(bench, 0, 0)
    bench.fetch(a)
    user = bench.make_user()
    bench.pool.enter(a.unit, 1, user)
    a.views.kept = bench.others_active = True
    bench.pool.leave(a, user, held=True)

    def drop():
        with bench.lock:
            a.views.kept = False

    with bench.lock:
        threads, errors = in_threads(drop)
        bench.fault(b.unit)
    threads[0].join(PATIENCE)
    assert not errors and bench.states()["u1"] == "IN_USE 0"


# -- what fails


@on_every_timing
def test_a_copy_that_failed_leaves_its_place_to_others(timing):
    bench = make_bench(1, timing=timing)
    a, b = make_streamed(bench, 0, 0)
    assert bench.pool.issue(a, 1) is Issue.TAKEN
    bench.copy(a, 1)  # issued, and then something fails
    assert not bench.use(a.unit) and not bench.fetch(b), "the copy may still run"
    bench.pool.cancel_copies(threading.get_ident())
    assert not bench.use(a.unit)
    assert bench.fetch(b, decoded=True) and bench.use(b.unit)


def test_a_user_that_leaves_before_its_fetch_is_complete_marks_nothing():
    bench = make_bench(1)
    unit, user = bench.make_unit(UNIT), bench.make_user()
    (slot,) = bench.pool.fault({unit: 1}, user)
    bench.pool.leave(slot, user)
    assert bench.states() == {"u0": "FILLING 0"}
    bench.pool.cancel_copies(user.thread)
    assert not bench.use(unit)


def test_a_copy_of_another_thread_is_not_cancelled():
    bench = make_bench(1)
    (a,) = make_streamed(bench, 0)
    bench.pool.issue(a, 1)
    bench.pool.cancel_copies(threading.get_ident() + 1)
    bench.pool.complete(a, bench.copy(a, 1))
    assert bench.use(a.unit)


@on_every_timing
def test_what_a_thread_did_is_forgotten_and_what_others_do_is_not(timing):
    bench = make_bench(2, timing=timing)
    a, b, c = make_streamed(bench, 0, 1, 0)
    for slot in (a, b):
        bench.fetch(slot)
    with bench.device.stream(1):
        mine = bench.make_user(1)
        for slot in (a, b):
            bench.pool.enter(slot.unit, 1, mine)
            bench.read(slot)
    with bench.using(b.unit, stream=2) as slot:
        bench.pool.abandon(mine.thread + 1)
        assert bench.states() == {"u0": "IN_USE 0", "u1": f"IN_USE {UNIT}"}
        other = bench.make_user(2)
        other.thread = mine.thread + 1
        with bench.device.stream(2):
            bench.pool.enter(b.unit, 1, other)
        bench.pool.abandon(mine.thread)
        assert bench.states() == {"u0": "CACHED 0", "u1": f"IN_USE {UNIT}"}
        bench.read(slot)
        bench.pool.leave(slot, mine)  # as the handlers of the interrupted pass may do, too late
        bench.pool.leave(slot, other)
    assert bench.fetch(c) and bench.use(c.unit) and bench.use(b.unit)


def test_views_that_an_interrupt_left_with_the_program_keep_their_place():
    bench = make_bench(1)
    a, b = make_streamed(bench, 0, 0)
    bench.fetch(a)
    bench.pool.enter(a.unit, 1, bench.make_user())
    a.views.kept = True
    bench.pool.abandon(threading.get_ident())
    assert bench.states() == {"u0": "HELD 0"} and not bench.fetch(b)
    a.views.kept = False
    assert bench.fetch(b)


def test_a_use_of_a_slot_without_views_is_abandoned():
    bench = make_bench(1)
    (a,) = make_streamed(bench, 0)
    bench.fetch(a)
    a.views = None
    bench.pool.enter(a.unit, 1, bench.make_user())
    bench.pool.abandon(threading.get_ident())
    assert bench.states() == {"u0": "CACHED 0"}


def test_a_use_whose_event_cannot_be_recorded_goes_on_until_it_is_abandoned(monkeypatch):
    bench = make_bench(1)
    a, b = make_streamed(bench, 0, 0)
    bench.fetch(a)
    user = bench.make_user()
    bench.pool.enter(a.unit, 1, user)

    def fails(self, stream, event=None):
        raise RuntimeError("no event")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no event"):
        patch.setattr(SimulatedEngine, "record", fails)
        bench.pool.leave(a, user)
    assert not bench.fetch(b)
    bench.pool.abandon(user.thread)
    assert bench.fetch(b) and bench.use(b.unit)


def test_a_step_that_the_table_does_not_have_is_refused_and_named():
    bench = make_bench(1)
    (a,) = make_streamed(bench, 0)
    bench.fetch(a)
    with pytest.raises(BrokenRuleError) as broken:
        bench.pool.complete(a, None)
    assert (broken.value.rule, broken.value.found) == ("P8", "CACHED")
    assert "one of FREE, IN_USE, LOST after CACHED" in str(broken.value)
    assert not isinstance(broken.value, CaromError)


def test_every_state_can_be_left_and_reached():
    assert set(NEXT) == set(SlotState)
    assert all(NEXT.values()) and set().union(*NEXT.values()) == set(SlotState)


# -- engines without streams


def test_a_device_without_streams_is_served_the_same():
    bench = Bench(2 * UNIT, engine=PlainEngine(torch.device("cpu")))
    a, b = make_streamed(bench, 0, 0)
    (c,) = bench.make_cached(UNIT)
    for turn in (a, b, c, a):
        bench.fetch(turn)
        assert bench.use(turn.unit)
    slots, user = bench.fault(a.unit, b.unit)
    for each in slots:
        bench.read(each)
        bench.pool.leave(each, user)
    bench.pool.abandon(user.thread)
    assert bench.use(b.unit)
    bench.pool.close()


# -- what the check finds


def damage_record(**fields):
    return lambda bench, a: setattr(a, "now", a.now._replace(**fields))


def damage_extents(*extents):
    return lambda bench, a: setattr(
        a.chunk, "extents", tuple(pool_memory.Extent(*each, a) for each in extents)
    )


def damage_neighbour(*extents):
    def damage(bench, a):
        (other,) = make_streamed(bench, 1)
        a.chunk.extents += tuple(pool_memory.Extent(*each, other) for each in extents)

    return damage


USER = User(1, "stream")
DAMAGE = {
    "no extent of its own": ("P4", damage_extents()),
    "a part of its bytes": ("P4", damage_extents((0, UNIT - 1))),
    "extents that overlap": ("P4", damage_neighbour((UNIT - 1, 2 * UNIT))),
    "an empty extent": ("P4", damage_neighbour((UNIT, UNIT))),
    "bytes in use overwritten": ("P3", lambda bench, a: (make_used(bench, a), damage_extents()(bench, a))),
    "lost bytes overwritten": ("P12", lambda bench, a: (damage_record(state=SlotState.LOST)(bench, a), damage_extents()(bench, a))),
    "kept, and not held": ("P3", damage_record(held=True)),
    "users, and not in use": ("P8", damage_record(users=frozenset({USER}))),
    "in use by nobody": ("P8", damage_record(state=SlotState.IN_USE)),
    "held by a user": ("P8", damage_record(state=SlotState.HELD, users=frozenset({USER}))),
    "filled by nobody": ("P9", damage_record(state=SlotState.FILLING)),
    "read without a wait": ("P5", damage_record(state=SlotState.IN_USE, users=frozenset({USER}))),
    "read without an event": ("P1", damage_record(waited=frozenset({"stream"}))),
    "no memory": ("P7", lambda bench, a: a.forget_memory()),
    "memory of another place": ("P7", lambda bench, a: setattr(a, "base", a.base[1:])),
    "beyond its chunk": ("P7", lambda bench, a: setattr(a.chunk, "nbytes", UNIT - 1)),
    "not where its unit is looked for": ("P10", lambda bench, a: bench.raw._last.clear()),
    "another unit's": ("P10", lambda bench, a: bench.raw._last.update({bench.make_unit(1): a})),
    "of a chunk that is gone": ("P7", lambda bench, a: (setattr(bench.memory, "chunks", bench.memory.chunks[:0]), a.forget_memory())),
}  # fmt: skip


def make_used(bench, a):
    bench.raw.enter(a.unit, 1, bench.make_user())


@pytest.mark.parametrize("damage", DAMAGE)
def test_the_check_names_the_rule_that_is_broken(damage):
    rule, make_damage = DAMAGE[damage]
    bench = make_bench(2)
    (a,) = make_streamed(bench, 0)
    bench.fetch(a)
    bench.raw.check()
    make_damage(bench, a)
    with pytest.raises(BrokenRuleError) as broken:
        bench.raw.check()
    assert broken.value.rule == rule


# -- host time


def test_a_crossing_costs_few_calls():
    """A unit that is here is entered and left by one call each. A prefetch over one other unit takes six."""
    bench = make_bench(1)
    a, b = make_streamed(bench, 0, 0)
    bench.fetch(a), bench.fetch(b), bench.fetch(a)
    bench.use(a.unit)
    files, called = {"pool.py", "slot.py", "pool_memory.py"}, []
    raw, user = bench.raw, bench.make_user()

    def calls_of(step):
        def hook(frame, event, argument):
            code = frame.f_code
            if event == "call" and Path(code.co_filename).name in files:
                called.append(code.co_name)

        called.clear()
        sys.setprofile(hook)
        try:
            step()
        finally:
            sys.setprofile(None)
        return [name for name in called if not name.startswith("<")]

    assert calls_of(lambda: raw.enter(a.unit, 1, user)) == ["enter"]
    assert calls_of(lambda: raw.leave(a, user)) == ["leave"]
    assert calls_of(lambda: raw.issue(b, 1)) == [
        "issue", "extents_over", "_begin", "_unmark", "put_slot"
    ]  # fmt: skip
    copied = bench.copy(b, 1)
    assert calls_of(lambda: raw.complete(b, copied)) == ["complete"]


# -- each rule broken on purpose


def functions_of(code: CodeType, path: tuple[str, ...] = ()):
    """The code objects of functions in ``code``, by the names of their classes and their own."""
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield (*path, const.co_name), const
            yield from functions_of(const, (*path, const.co_name))


def break_on_purpose(monkeypatch, module, old: str, new: str) -> None:
    """Replace ``old`` in the source of ``module``, where it occurs once, and let its functions run the changed code."""
    source = Path(module.__file__).read_text("utf-8")
    assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times"
    changed = compile(source.replace(old, new), module.__file__, "exec", dont_inherit=True)
    for path, code in functions_of(changed):
        owner = module
        for name in path:
            owner = vars(owner).get(name) if owner is not None and hasattr(owner, "__dict__") else None
        function = owner.fget if isinstance(owner, property) else owner
        if isinstance(function, FunctionType) and function.__code__ != code:
            monkeypatch.setattr(function, "__code__", code)


BROKEN = [
    ("P1", pool, "reads = {**reads, stream: event}", "pass", test_two_users_on_two_streams_end_one_after_the_other),
    ("P1", pool, "after += extent.slot.now.after", "pass", test_a_place_is_overwritten_after_its_readers_on_every_stream),
    ("P1", pool, "engine.record(stream, now.reads.get(stream)) for", "now.reads.get(stream) for", test_a_kept_view_keeps_its_place_and_what_reads_it_is_waited_for),
    ("P1", pool, "now.waited & (now.reads.keys() | {user.stream for user in users})", "now.waited", test_what_a_thread_did_is_forgotten_and_what_others_do_is_not),
    ("P1", pool, "held or now.held\n        state", "held\n        state", test_a_view_kept_by_the_first_of_two_users_is_not_forgotten_by_the_second),
    ("P1", pool_memory, "*left, new, *right", "*left, new", test_what_is_left_of_a_place_still_waits_for_its_readers),
    ("P2", pool, " or (now.copied,)", "", test_a_decoder_waits_for_a_copy_that_nobody_read),
    ("P3", pool, "(state is _FREE or state is _CACHED or (state is _LOST and other is slot))", "state", test_a_place_that_is_in_use_is_refused_and_taken_afterwards),
    ("P3", pool, "if slot.kept:", "if False:", test_a_kept_view_keeps_its_place_and_what_reads_it_is_waited_for),
    ("P3", pool, "_IN_USE if users else _HELD if held else _CACHED\n        slot.now", "_IN_USE if users else _CACHED\n        slot.now", test_a_kept_view_keeps_its_place_and_what_reads_it_is_waited_for),
    ("P3", pool, "now.held or slot.kept", "now.held", test_views_that_an_interrupt_left_with_the_program_keep_their_place),
    ("P3", pool_room, "if slot is None or slot in stay:", "if slot is None:", test_a_fault_does_not_overwrite_units_of_its_own),
    ("P3", pool_room, "left[chunk] = put_slot", "put_slot", test_a_fault_takes_several_units_at_once_beside_what_is_in_use),
    ("P4", pool, "_unmark(self._engine, extent.slot)  # P4: before the copy", "pass", test_a_unit_is_fetched_once_and_found_until_its_place_is_taken),
    ("P4", pool, "now.state not in _READABLE or ", "", test_a_copy_that_failed_leaves_its_place_to_others),
    ("P5", pool, "self.wait(now.copied)", "pass", test_a_unit_is_fetched_once_and_found_until_its_place_is_taken),
    ("P5", pool, "self.wait(copied)", "pass", test_a_fault_takes_several_units_at_once_beside_what_is_in_use),
    ("P5", pool, "waited = waited | {user.stream}", "pass", test_a_unit_is_fetched_once_and_found_until_its_place_is_taken),
    ("P6", pool, " or (now.version != version and not now.users)", "", test_another_version_is_fetched_again_at_the_same_place),
    ("P6", pool, "now.version != version and not now.users", "now.version != version", test_a_use_of_another_version_shares_what_other_users_read),
    ("P7", pool_memory, "self._engine.synchronize()  # P7\n        self.chunks = (*self.chunks, *chunks)", "self.chunks = (*self.chunks, *chunks)", test_the_device_is_idle_between_an_allocation_and_the_first_copy_and_before_memory_goes),
    ("P7", pool_memory, "self._engine.synchronize()  # P7\n            self.chunks = (region", "self.chunks = (region", test_the_device_is_idle_between_an_allocation_and_the_first_copy_and_before_memory_goes),
    ("P7", pool_memory, "self._engine.synchronize()  # P7\n        for chunk", "for chunk", test_the_device_is_idle_between_an_allocation_and_the_first_copy_and_before_memory_goes),
    ("P7", pool, "if slot.now.state in (_FILLING, _IN_USE):", "if False:", test_a_new_region_has_none_of_the_old_slots),
    ("P7", pool, " or slot.end > slot.chunk.nbytes:", ":", test_a_new_region_has_none_of_the_old_slots),
    ("P7", pool, " or slot.end > slot.chunk.nbytes:", ":", test_a_place_that_is_not_within_the_region_is_refused),
    ("P4", pool, "slot.offset < 0 or ", "", test_a_place_that_is_not_within_the_region_is_refused),
    ("P7", pool, " if _unclaimed(chunk, dropped)]", "]", test_units_in_use_or_held_are_not_dropped),
    ("P8", slot_file, "raise BrokenRuleError(", "return (following, ", test_a_step_that_the_table_does_not_have_is_refused_and_named),
    ("P9", pool, "self._engine.synchronize()  # P9", "pass", test_a_copy_that_failed_leaves_its_place_to_others),
    ("P10", pool, "_unmark(self._engine, last)  # P10", "pass", test_a_unit_that_is_fetched_to_another_place_is_given_up_at_the_first),
    ("P10", pool, "if looked_for:", "if True:", test_a_kept_view_of_an_old_version_stays_while_the_unit_is_fetched_elsewhere),
    ("P11", slot_file, "used - mine > sum(self._used.values())", "used - mine > 0", test_threads_that_wait_do_not_wait_for_each_other),
    ("P11", pool, "all wait themselves.\n        if self._waiters.asleep:", "all wait themselves.\n        if False:", test_a_thread_waits_for_a_slot_of_another_and_goes_on_when_it_is_left),
    ("P11", pool, "all wait themselves.\n        if self", "all wait themselves.\n        if not users and self", test_a_thread_that_waits_for_the_other_user_of_its_own_slot_learns_that_waiting_is_in_vain),
    ("P11", pool, "if self._waiters.asleep:\n            self._waiters.slot_freed()  # P11\n\n    def cancel", "pass\n\n    def cancel", test_a_unit_that_another_thread_fetches_meanwhile_is_not_fetched_twice),
    ("P12", pool, "(state is _LOST and other is slot)", "state is _LOST", test_a_lost_slot_is_taken_by_nobody_until_it_is_fetched_again),
    ("P12", pool, "if chunk.lossy:", "if False:", test_no_fault_takes_a_place_whose_pages_may_be_taken),
    ("P12", pool_room, "if chunk.lossy:", "if False:", test_no_fault_takes_a_place_whose_pages_may_be_taken),
    ("P12", pool_room, "if not chunk.lossy and all(", "if all(", test_no_fault_takes_a_place_whose_pages_may_be_taken),
    ("P12", pool_room, "slot.chunk.lossy or ", "", test_no_fault_takes_a_place_whose_pages_may_be_taken),
    ("P1", pool, "[_LOST], after=after)", "[_LOST])", test_a_place_that_lost_its_memory_waits_for_its_readers_when_it_gets_memory_again),
    ("P12", pool_room, "return slot.unit.nbytes if slot.state is SlotState.CACHED else None", "return slot.unit.nbytes", test_a_lost_slot_is_taken_by_nobody_until_it_is_fetched_again),
]  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "module", "old", "new", "dialogue"), BROKEN, ids=[f"{each[0]}-{each[2][:30]}" for each in BROKEN]
)
def test_a_rule_that_is_broken_is_found_by_a_dialogue(rule, module, old, new, dialogue, monkeypatch, request):
    monkeypatch.setattr(slot_file, "_PATIENCE", 1.0)
    monkeypatch.setitem(globals(), "PATIENCE", 0.3)
    if "small_chunks" in dialogue.__code__.co_varnames:
        request.getfixturevalue("small_chunks")
    break_on_purpose(monkeypatch, module, old, new)
    given = {"timing": "late", "small_chunks": None, "monkeypatch": monkeypatch}
    taken = {name: given[name] for name in dialogue.__code__.co_varnames[: dialogue.__code__.co_argcount]}
    # AttributeError: of the simulated device, which is to wait for an event that does not exist yet.
    signs = (BrokenRuleError, SimulatedRaceError, AssertionError, AttributeError, pytest.fail.Exception)
    with pytest.raises(signs) as found:
        dialogue(**taken)
    if isinstance(found.value, BrokenRuleError):
        assert found.value.rule in (rule, "P3", "P8")


def test_every_rule_of_the_list_is_broken_once():
    listed = re.findall(r"^(P\d+) ", pool.__doc__, re.M)
    assert listed == [f"P{number}" for number in range(1, len(listed) + 1)]
    assert set(listed) == {each[0] for each in BROKEN}
    cited = "".join(
        Path(module.__file__).read_text("utf-8") for module in (pool, pool_memory, pool_room, slot_file)
    ).replace(pool.__doc__, "")
    assert all(re.search(rf"# .*\b{rule}\b", cited) or f'"{rule}"' in cited for rule in listed)
