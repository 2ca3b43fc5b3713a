"""Several sessions under one budget, attacked: what is promised is kept by threads too, by those that return, and by those that fail."""

from __future__ import annotations

import threading
import time

import carom
import pytest
import torch
from carom.core.budget import optimizer_reserve
from carom.core.budget.device_governor import Governor
from carom.core.budget.ledger import BudgetLedger
from carom.core.common.memory_snapshot import Memory
from carom.core.session.layout_manager import LayoutManager
from tests_inside import inside
from tests_models import Chain as Net
from torch import nn

KB, GIB = 1024, 1 << 30


X = torch.linspace(-1, 1, 64).reshape(2, 32)


def run(net, x=X):
    with torch.no_grad():
        return net(x)


def size(net):
    return sum(p.numel() * p.element_size() for p in net.parameters())


def under(budget, net, device="cpu"):
    return carom.stream(net, device=device, vram=budget, granularity="layer")


def held(*sessions):
    return sum(inside(session).held_bytes for session in sessions)


def promised(*sessions):
    return sum(inside(session).promised_bytes + inside(session).ledger.kept_bytes for session in sessions)


@pytest.fixture(autouse=True)
def looking(monkeypatch):
    """Memory is looked at before every step."""
    monkeypatch.setattr("carom.core.session.policies.device_memory._SECONDS", 0.0)


# -- threads


@pytest.fixture
def hasty():
    """Threads take turns as often as they can."""
    import sys

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def at_once(*functions):
    """Runs them in threads; raises what one of them raised."""
    failures: list[BaseException] = []

    def guarded(function):
        try:
            function()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(function,), daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a deadlock"
    if failures:
        raise failures[0]


@pytest.mark.usefixtures("hasty")
def test_sessions_that_begin_at_once_in_several_threads_share_what_there_is():
    for _ in range(6):
        nets = [Net(seed=seed) for seed in range(3)]
        budget = carom.SharedBudget(int(1.2 * size(nets[0])))
        sessions = {}

        def begin(index, nets=nets, budget=budget, sessions=sessions):
            sessions[index] = under(budget, nets[index])

        at_once(*(lambda index=index: begin(index) for index in range(3)))
        assert held(*sessions.values()) <= promised(*sessions.values()) <= budget.nbytes
        for session in sessions.values():
            session.close()


@pytest.mark.usefixtures("hasty")
def test_threads_that_run_and_park_keep_to_the_budget_in_the_middle_of_layouts_too():
    nets = [Net(seed=seed) for seed in range(3)]
    right = [run(net) for net in nets]
    budget = carom.SharedBudget(int(1.3 * size(nets[0])))
    sessions = [under(budget, net) for net in nets]
    over, done = [], []

    def use(index):
        try:
            for number in range(60):
                assert torch.equal(run(nets[index]), right[index])
                if (number + index) % 3 == 0:
                    sessions[index].park(keep=number % 2 == 0)
        finally:
            done.append(index)

    def watch():
        began = time.monotonic()
        while len(done) < 3 and time.monotonic() - began < 50:
            there = [
                inside(s).placement.resident_bytes
                + (0 if inside(s).streamer.closed else inside(s).region_bytes)
                for s in sessions
            ]
            if sum(there) > budget.nbytes:
                over.append(there)
            time.sleep(0)

    at_once(*(lambda index=index: use(index) for index in range(3)), watch)
    for session in sessions:
        session.close()
    assert not over


def test_a_session_that_parks_while_free_bytes_are_counted_counts_once(monkeypatch):
    net = Net()
    budget = carom.SharedBudget(2 * size(net))
    with under(budget, net) as session:
        run(net)
        free = budget.free_bytes
        promised = BudgetLedger.promised_bytes.fget

        def parks_after_the_read(self):
            value = promised(self)
            monkeypatch.undo()
            session.park()
            return value

        monkeypatch.setattr(BudgetLedger, "promised_bytes", property(parks_after_the_read))
        assert budget.free_bytes == free and session.parked
        assert budget.free_bytes > free


def test_what_is_laid_out_is_promised_meanwhile(monkeypatch):
    net, other = Net(), Net(seed=1)
    budget = carom.SharedBudget(int(1.2 * size(net)))
    seen = []
    build = LayoutManager._build

    def built(self, wanted):
        before = budget.free_bytes
        layout = build(self, wanted)
        seen.append((before, budget.nbytes - budget.held_bytes))
        return layout

    monkeypatch.setattr(LayoutManager, "_build", built)
    with under(budget, net) as first, under(budget, other) as second:
        for session in (first, second, first):
            session.set_budget(ram="auto")
            session.park()
            run(session.module)
    assert seen and all(before <= after for before, after in seen), (
        "what is on its way to the device is not free"
    )


# -- those that begin


def test_a_session_that_failed_to_begin_is_asked_for_nothing():
    """It lives on in a traceback, or until the collector comes by."""
    net = Net()
    device = carom.SimulatedDevice(memory_bytes=int(0.7 * size(net)))
    with pytest.raises(carom.WeightsError) as refused:
        carom.stream(net, device=device, vram="auto", weights="/nowhere.safetensors")
    with carom.stream(net, device=device, vram="auto", granularity="layer"):
        run(net)
    assert refused.traceback


@pytest.mark.parametrize("part", [0.2, 0.4])
def test_a_small_session_gets_its_least_where_its_part_by_size_is_less(part):
    big, small = Net(depth=60), Net(depth=2, seed=1)
    right = run(small)
    budget = carom.SharedBudget(int(part * size(big)), by_size=True)
    with under(budget, big) as first:
        for _ in range(20):
            run(big)
        assert budget.free_bytes < 4 * KB
        with under(budget, small) as second:
            assert torch.equal(run(small), right)
            assert held(first, second) <= budget.nbytes


def test_a_session_that_finds_less_than_its_least_is_told_who_has_the_rest(monkeypatch):
    a, b = Net(), Net(seed=1)
    budget = carom.SharedBudget(size(a) // 2)
    with under(budget, a) as first:
        run(a)
        monkeypatch.setattr(
            inside(first).ledger, "release", lambda *_: 0
        )  # it is in a step of another thread
        with pytest.raises(carom.BudgetError, match="of SharedBudget.* others hold the rest"):
            under(budget, b)
        monkeypatch.undo()
        with under(budget, b) as second:
            assert held(first, second) <= budget.nbytes


# -- those that return


def test_by_size_who_returns_again_and_again_keeps_its_part():
    a, b = Net(), Net(seed=1)
    budget = carom.SharedBudget(size(a), by_size=True)
    with under(budget, a) as first, under(budget, b) as second:
        for _ in range(30):
            run(a), run(b)
        before = inside(second).held_bytes
        for _ in range(4):
            second.park()
            for _ in range(600):
                run(a)
            assert inside(first).held_bytes > 0.8 * budget.nbytes
            run(b)
            assert inside(second).held_bytes >= before
            assert held(first, second) <= budget.nbytes


def on_a_full_device(nbytes):
    """A device, and what makes it just so full that nearly its first headroom is free."""
    device = carom.SimulatedDevice(memory_bytes=16 * GIB)
    headroom = Governor.headroom(Memory(16 * GIB, 0))

    def fill():
        device.ledger.others = 16 * GIB - device.ledger.allocated - headroom - nbytes

    return device, fill


def test_who_returns_to_a_device_that_is_nearly_full_takes_no_more_than_the_budget_has():
    a, b = Net(depth=36), Net(depth=36, seed=1)
    budget = carom.SharedBudget(size(a))
    device, fill = on_a_full_device(KB)
    with under(budget, a, device) as first, under(budget, b, device) as second:
        for _ in range(20):
            run(a), run(b)
        second.park()
        for _ in range(60):
            run(a)
        fill()
        run(b)
        assert held(first, second) <= budget.nbytes
        assert inside(second).held_bytes > budget.nbytes // 2, "the budget was short, and others gave way"


def test_a_settled_session_on_a_nearly_full_device_keeps_to_the_shared_budget():
    net = Net(depth=36)
    budget = carom.SharedBudget(size(net) // 2)
    device, fill = on_a_full_device(KB)
    with under(budget, net, device) as session:
        for _ in range(60):
            run(net)
        assert inside(session).governor.settled
        fill()
        layout = inside(session).arrangement
        for _ in range(60):
            run(net)
        assert inside(session).held_bytes <= inside(session).capacity <= budget.nbytes
        assert inside(session).arrangement is layout, "and it does not try again and again"


def test_a_parked_session_may_take_part_anew_with_what_is_kept_for_it():
    a, b = Net(), Net(seed=1)
    budget = carom.SharedBudget(size(a))
    with under(budget, a) as first, under(budget, b) as second:
        second.park()
        for _ in range(100):
            run(a)
        assert budget.free_bytes == 0 < inside(second).ledger.kept_bytes
        second.set_budget(vram=budget)
        run(b)
        assert held(first, second) <= budget.nbytes


def test_what_is_kept_for_a_parked_session_follows_it_into_a_shared_budget():
    a, b = Net(), Net(seed=1)
    budget = carom.SharedBudget(int(0.8 * size(a)))
    with under(budget, a) as first, under(size(b) // 2, b) as second:
        run(b)
        second.park()
        second.set_budget(vram=budget)
        for _ in range(100):
            run(a)
        assert inside(first).held_bytes + inside(second).least_bytes <= budget.nbytes


def test_what_came_while_a_session_was_parked_counts_for_its_least(monkeypatch):
    a, b = Net(), Net(seed=1)
    budget = carom.SharedBudget(size(a))
    budget.later = int(1.1 * size(b) / 12)
    with under(budget, a) as first, under(size(b), b) as second:
        for _ in range(100):
            run(a)
        budget.later = 0
        with monkeypatch.context() as busy:
            busy.setattr(inside(first).ledger, "release", lambda *_: 0)
            second.set_budget(vram=budget)
        assert inside(second).capacity < size(b) // 6
        second.park()
        b.blocks.append(nn.Linear(32, 32 * 6).requires_grad_(False))
        right = run_plain(b)
        assert torch.equal(run(b), right)
        assert held(first, second) <= budget.nbytes


def run_plain(net):
    """What it computes, without its session."""
    x = X
    for block in net.blocks:
        x = torch.tanh(nn.functional.linear(x, block.weight, block.bias))
    return x


# -- what is told


def test_a_report_while_parked_is_of_a_budget_that_was_kept(monkeypatch):
    a, b = Net(), Net(seed=1)
    budget = carom.SharedBudget(int(1.5 * size(a)))
    with under(budget, a) as first, under(budget, b) as second:
        run(a), run(b)
        second.park()
        monkeypatch.setattr(inside(first).ledger, "release", lambda *_: 0)
        budget.later = budget.nbytes
        with pytest.raises(carom.BudgetError):
            run(b)
        budget.later = 0
        assert "OVER THE BUDGET" not in second.report().table()
        second.set_budget(vram=size(b) // 2)
        assert second.parked and "OVER THE BUDGET" not in second.report().table()


# -- memory of the device, not of the budget


def test_an_optimizers_state_is_given_memory_and_not_what_of_a_budget_is_not_held():
    """Of a block's bytes of the budget most are not held: to give those is to give nothing."""
    net, x = Net(depth=3, width=256), torch.linspace(-1, 1, 512).reshape(2, 256)
    right = run(net, x)
    device = carom.SimulatedDevice(memory_bytes=3 * size(net) // 2)
    with under(carom.SharedBudget(int(0.97 * size(net))), net, device) as session:
        run(net, x)
        memory, member = inside(session).engine.memory(), optimizer_reserve._members[inside(session).ledger]
        headroom = Governor.headroom(memory)
        device.ledger.others = memory.free - headroom // 2
        wanted = optimizer_reserve.Needs(state=headroom // 16)
        assert 4 * wanted.missing(inside(session).engine.memory()) < inside(session).ledger.unused_bytes
        optimizer_reserve._give([(inside(session).ledger, member)], wanted)
        assert not wanted.missing(inside(session).engine.memory()), "the step finds what it needs"
        device.ledger.others = 0
        assert torch.equal(run(net, x), right)


# -- who is asked


@pytest.mark.parametrize("lock", ["session", "streamer"])
def test_who_is_busy_in_another_thread_gives_nothing_and_is_not_waited_for(lock):
    net = Net()
    with under(carom.SharedBudget(int(1.2 * size(net))), net) as first:
        run(net)
        taken, over = threading.Event(), threading.Event()

        def busy():
            with inside(first).lock if lock == "session" else inside(first).streamer.lock:
                taken.set()
                over.wait(30)

        thread = threading.Thread(target=busy)
        thread.start()
        try:
            assert taken.wait(30)
            layout = inside(first).arrangement
            assert (
                inside(first).ledger.spare_bytes == 0
                and inside(first).ledger.release(8 * KB) == 0
                and inside(first).arrangement is layout
            )
        finally:
            over.set()
            thread.join()
        assert inside(first).ledger.spare_bytes > 0 and inside(first).ledger.release(8 * KB) > 0


def test_what_was_read_as_left_is_taken_only_as_far_as_it_still_is():
    """Between a session's reading and its taking another one took some."""
    a, b = Net(), Net(seed=1)
    budget = carom.SharedBudget(size(a))
    with under(budget, a) as first, under(size(b) // 4, b) as second:
        budget.later = size(a) // 2
        first.set_budget(vram=budget)
        budget.later = 0
        left = inside(first).held_bytes + budget.free_bytes
        second.set_budget(vram=budget)
        inside(first).memory.resize(left)
        assert promised(first, second) <= budget.nbytes and held(first, second) <= budget.nbytes
