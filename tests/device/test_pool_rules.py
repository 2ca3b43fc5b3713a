"""The pool's rules under random calls, and under an interrupt at every line."""

from __future__ import annotations

import contextlib
import random
import threading

import pytest
from carom.core.common.errors import BudgetError
from carom.core.device import pool_memory
from carom.core.device.pool import Pool
from carom.core.device.pool_room import bytes_for
from carom.core.device.slot import Issue, SlotState, User
from carom.core.plan.region import ALIGN
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests_interrupts import Interrupts
from tests_pool_bench import TIMINGS, Bench, in_threads

pytestmark = pytest.mark.timeout(120)
UNIT = ALIGN
REGION = 5 * UNIT
UNITS, CACHED = range(6), range(3)
THREADS = (1, 2)  # fake ones; copies are those of the present thread
FILES = ("device/pool", "device/slot")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(pool_memory, "OWN_CHUNK", 2 * UNIT)


class Calls(RuleBasedStateMachine):
    """Random calls, with offsets that follow no schedule. Each use reads right bytes as long as it lasts."""

    @initialize(
        timing=st.sampled_from(TIMINGS),
        seed=st.integers(0, 9),
        sizes=st.lists(st.integers(1, 1400), min_size=6, max_size=6),
    )
    def begin(self, timing, seed, sizes):
        self.bench = Bench(REGION, timing=timing, seed=seed)
        self.bench.waiters.new_deadline = lambda: 0.0  # nobody ends a use while a fault waits
        self.streamed = [self.bench.make_unit(nbytes) for nbytes in sizes]
        self.cached = self.bench.make_cached(2 * UNIT, UNIT, UNIT + 100)
        self.uses = []  # (user, stream, slot, version)
        self.held = []  # (slot, stream, version)

    def user(self, thread, stream):
        user = self.bench.make_user(stream)
        return User(thread, user.stream)

    def entered(self, user, stream, slot):
        mates = {version for _, _, other, version in self.uses if other is slot}
        assert slot.now.version == slot.unit.version or slot.now.version in mates
        self.uses.append((user, stream, slot, slot.now.version))

    @rule(number=st.sampled_from(UNITS), offset=st.integers(0, 4), decoded=st.booleans())
    def fetch_anywhere(self, number, offset, decoded):
        unit = self.streamed[number]
        offset = min(offset * UNIT, (REGION - unit.nbytes) // ALIGN * ALIGN)
        if self.bench.fetch(self.bench.make_slot(unit, offset), decoded=decoded):
            assert self.bench.use(unit)

    @rule(number=st.sampled_from(UNITS), offset=st.integers(0, 4))
    def fetch_and_leave_unread(self, number, offset):
        unit = self.streamed[number]
        self.bench.fetch(
            self.bench.make_slot(unit, min(offset * UNIT, (REGION - unit.nbytes) // ALIGN * ALIGN))
        )

    @rule(number=st.sampled_from(CACHED), decoded=st.booleans())
    def fetch_cached(self, number, decoded):
        self.bench.fetch(self.cached[number], decoded=decoded)

    @rule(number=st.integers(0, 8), stream=st.integers(0, 2), thread=st.sampled_from(THREADS))
    def enter(self, number, stream, thread):
        unit = self.bench.units[number]
        user = self.user(thread, stream)
        with self.bench.device.stream(stream):
            slot = self.bench.pool.enter(unit, unit.version, user)
        if slot is not None:
            self.entered(user, stream, slot)

    @precondition(lambda self: self.uses)
    @rule(which=st.integers(0, 99), keeps=st.booleans())
    def leave(self, which, keeps):
        user, stream, slot, version = self.uses.pop(which % len(self.uses))
        with self.bench.device.stream(stream):
            self.bench.read(slot, version)
            if keeps and slot.views is not None:
                slot.views.kept = True
                self.held.append((slot, stream, version))
            self.bench.pool.leave(slot, user, held=keeps and slot.views is not None)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99))
    def drop_a_view(self, which):
        slot, _, _ = self.held[which % len(self.held)]
        self.held = [each for each in self.held if each[0] is not slot]
        slot.views.kept = False

    @rule(number=st.integers(0, 8))
    def write(self, number):
        self.bench.units[number].version += 1

    @rule(numbers=st.sets(st.integers(0, 8), min_size=1, max_size=3), thread=st.sampled_from(THREADS))
    def fault(self, numbers, thread):
        user = self.user(thread, 0)
        try:
            slots, _ = self.bench.fault(*(self.bench.units[number] for number in sorted(numbers)), user=user)
        except BudgetError:
            lost = any(slot.state is SlotState.LOST for slot in self.cached)
            large = bytes_for([self.bench.units[number] for number in numbers]) > REGION
            assert self.uses or self.held or lost or large
            return
        for slot in slots:
            self.bench.read(slot, slot.now.version)
            self.entered(user, 0, slot)

    @rule(numbers=st.sets(st.integers(0, 8), max_size=9))
    def drop(self, numbers):
        units = [self.bench.units[number] for number in numbers]
        self.bench.pool.drop_units(units)
        busy = {slot.unit for _, _, slot, _ in self.uses} | {slot.unit for slot, _, _ in self.held}
        for unit in units:
            assert unit in busy or not self.bench.use(unit)

    @rule(thread=st.sampled_from(THREADS))
    def abandon(self, thread):
        self.bench.pool.abandon(thread)
        self.uses = [use for use in self.uses if use[0].thread != thread]

    @rule(number=st.sampled_from(UNITS), offset=st.integers(0, 4), copies=st.booleans())
    def fail_to_fetch(self, number, offset, copies):
        unit = self.streamed[number]
        slot = self.bench.make_slot(unit, min(offset * UNIT, (REGION - unit.nbytes) // ALIGN * ALIGN))
        if self.bench.pool.issue(slot, unit.version) is Issue.TAKEN:
            if copies:
                self.bench.copy(slot, unit.version)
            self.bench.pool.cancel_copies(threading.get_ident())
            assert not self.bench.use(unit)

    @rule(number=st.sampled_from(CACHED))
    def lose(self, number):
        slot = self.cached[number]
        if slot.gone or slot.state not in (SlotState.CACHED, SlotState.FREE):
            return
        over = [each for each in slot.chunk.slots if each is not slot]
        if all(each.state in (SlotState.CACHED, SlotState.FREE) for each in over):
            self.bench.engine.synchronize()
            self.bench.pool.lose_slot(slot)
            assert slot.state is SlotState.LOST  # the unit itself may lie elsewhere

    @precondition(lambda self: not self.uses and not self.held)
    @rule()
    def new_region(self):
        self.bench.pool.set_region(REGION)

    @invariant()
    def uses_and_views_have_their_bytes(self):
        for user, stream, slot, version in getattr(self, "uses", ()):
            assert user in slot.now.users
            with self.bench.device.stream(stream):
                self.bench.read(slot, version)
        for slot, stream, version in getattr(self, "held", ()):
            with self.bench.device.stream(stream):  # another stream would not wait for the copy
                self.bench.read(slot, version)

    def teardown(self):
        if hasattr(self, "bench"):
            self.bench.pool.check()


def test_any_calls_with_any_offsets_give_right_bytes_without_a_race():
    run_state_machine_as_test(
        Calls,
        settings=settings(max_examples=25, stateful_step_count=40, deadline=None, report_multiple_bugs=False),
    )


# -- threads


@pytest.mark.parametrize("timing", TIMINGS)
def test_threads_that_use_units_at_random_read_right_bytes_and_none_waits_forever(timing):
    bench = Bench(3 * UNIT, timing=timing)
    slots = [bench.make_slot(bench.make_unit(UNIT), number % 3 * UNIT) for number in range(6)]
    bench.make_cached(2 * UNIT)
    pool = bench.pool

    def work(number):
        chance = random.Random(number)

        def run():
            with bench.device.stream(number):
                for _ in range(30):
                    one, other = chance.sample(slots, 2)
                    user, units = bench.make_user(number), [one.unit, other.unit][: chance.randint(1, 2)]
                    with bench.lock:
                        if len(units) == 1 and chance.random() < 0.5:
                            bench.fetch(one)
                        found = [pool.enter(unit, 1, user) for unit in units]
                        if None in found:
                            for slot in filter(None, found):
                                pool.leave(slot, user)
                            found, _ = bench.fault(*units, user=user)
                    for slot in found:
                        bench.read(slot)
                    with bench.lock:
                        for slot in found:
                            pool.leave(slot, user)

        return run

    threads, errors = in_threads(*(work(number) for number in range(3)))
    for thread in threads:
        thread.join(30)
    assert not errors and not any(thread.is_alive() for thread in threads)
    assert not any("IN_USE" in state for state in bench.states().values())


# -- an interrupt at any line


def make_scene() -> tuple[Bench, list]:
    """A pool with two streamed units, of which one lies in the way of the other, and three cached ones."""
    bench = Bench(2 * UNIT)
    slots = [
        bench.make_slot(bench.make_unit(UNIT + 100), offset) for offset in (0, UNIT // ALIGN * ALIGN // 2)
    ]
    slots[1] = bench.make_slot(slots[1].unit, 0)
    cached = bench.make_cached(2 * UNIT, UNIT, UNIT)
    bench.fetch(slots[0])
    bench.use(slots[0].unit)
    return bench, [*slots, *cached]


def fetch(bench, slots):
    bench.fetch(slots[1])


def fetch_again(bench, slots):
    slots[0].unit.version = 2
    bench.fetch(slots[0])


def use(bench, slots):
    bench.use(slots[0].unit, stream=1)


def hold(bench, slots):
    user = bench.make_user()
    slot = bench.pool.enter(slots[0].unit, 1, user)
    slot.views.kept = True
    bench.pool.leave(slot, user, held=True)
    slot.views.kept = False
    bench.fetch(slots[1])


def fault_in_the_region(bench, slots):
    found, user = bench.fault(slots[1].unit, slots[2].unit)
    for slot in found:
        bench.pool.leave(slot, user)


def fault_over_cached_units(bench, slots):
    with bench.using(slots[0].unit):
        found, user = bench.fault(bench.make_unit(4 * UNIT))
        bench.pool.leave(found[0], user)


def wait_in_vain(bench, slots):
    bench.waiters.new_deadline = lambda: 0.0
    other = User(threading.get_ident() + 1, bench.engine.stream())
    bench.pool.enter(slots[0].unit, 1, other)
    with bench.lock, contextlib.suppress(BudgetError):
        bench.fault(bench.make_unit(5 * UNIT))
    bench.pool.abandon(other.thread)


def keep_version(bench, slots):
    with bench.using(slots[0].unit) as slot:
        slots[0].unit.version = 2
        slot.base.copy_(slots[0].unit.bytes(2))
        bench.pool.keep_version(slot, 2)


def fail(bench, slots):
    bench.pool.issue(slots[1], 1)
    bench.copy(slots[1], 1)
    bench.pool.cancel_copies(threading.get_ident())


def abandon(bench, slots):
    bench.pool.enter(slots[0].unit, 1, bench.make_user())
    bench.pool.abandon(threading.get_ident())


def drop(bench, slots):
    bench.pool.drop_units(bench.units)


def lose(bench, slots):
    bench.engine.synchronize()
    bench.pool.lose_slot(slots[2])
    bench.fetch(slots[2])


def reserve(bench, slots):
    bench.make_cached(2 * UNIT, UNIT)


def new_region(bench, slots):
    bench.pool.set_region(3 * UNIT)


def address(bench, slots):
    bench.memory.slot_at(slots[0].base.data_ptr())


def close(bench, slots):
    bench.pool.close()


SCENES = (
    fetch, fetch_again, use, hold, fault_in_the_region, fault_over_cached_units, wait_in_vain, keep_version, fail, abandon, drop, lose,
    reserve, new_region, address, close,
)  # fmt: skip


def verify_right_again(bench: Bench, slots, place: str) -> None:
    """The owner's recovery, and then each unit has right bytes, wherever it comes to lie."""
    bench.raw.check()
    for thread in (0, 1):
        bench.pool.abandon(threading.get_ident() + thread)
    assert not bench.waiters.asleep and not bench.waiters._used
    if not bench.memory.region.nbytes and not bench.raw.closed:
        bench.pool.set_region(2 * UNIT)
    for slot in slots:
        if bench.raw.closed:
            break
        if not bench.use(slot.unit) and not (bench.fetch(slot) and bench.use(slot.unit)):
            (found,), user = bench.fault(slot.unit)
            bench.read(found)
            bench.pool.leave(found, user)
    bench.pool.drop_units(bench.units)
    assert len(bench.memory.chunks) == 1, f"memory stays after an interrupt at {place}"
    bench.pool.close()
    assert not bench.memory.nbytes


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_an_interrupt_at_any_line_leaves_rules_kept_and_the_next_fetch_right(scene):
    counted = Interrupts(files=FILES)
    bench, slots = make_scene()
    bench.pool = bench.raw  # the interrupts come in the pool, not in its checks
    with counted:
        scene(bench, slots)
    assert counted.count
    for at, place in enumerate(counted.places, 1):
        # a line of a loop: the first time and the last
        if place in counted.places[: at - 1] and place in counted.places[at:]:
            continue
        bench, slots = make_scene()
        bench.pool = bench.raw
        lines = Interrupts(at, FILES)
        with lines:
            scene(bench, slots)
        assert lines.place
        verify_right_again(bench, slots, place)


def test_these_scenes_run_through_every_method_of_the_pool():
    called = set()

    def told(name, function):
        def call(*args, **kwargs):
            called.add(name)
            return function(*args, **kwargs)

        return call

    methods = {name for name in vars(Pool) if not name.startswith("__")}
    for scene in SCENES:
        bench, slots = make_scene()
        for name in methods:
            setattr(bench.raw, name, told(name, getattr(bench.raw, name)))
        scene(bench, slots)
        bench.pool.check()
    assert called == methods
