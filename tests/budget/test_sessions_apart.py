"""Sessions that share a device or a budget: one's trouble is not another's, and nobody waits for what is not his."""

from __future__ import annotations

import gc
import threading

import carom
import pytest
import torch
from carom.core.budget import shared_budget
from carom.core.model.shared_attributes import original_of
from carom.core.session.layout_manager import LayoutManager
from tests_inside import inside
from tests_models import Chain as Net

pytestmark = pytest.mark.timeout(60)
X = torch.linspace(-1, 1, 64).reshape(2, 32)


def size(net):
    return sum(p.nbytes for p in net.parameters())


def run(net):
    with torch.no_grad():
        return net(X)


def auto(net, device, vram="auto"):
    return carom.stream(net, device=device, vram=vram, granularity="layer")


class Boom(Exception):
    pass


# -- who gives has trouble


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, Boom])
@pytest.mark.parametrize("asks", ["who begins", "who returns", "who is used more"])
def test_the_trouble_of_who_gives_is_not_raised_in_the_forward_of_who_asks(monkeypatch, kind, asks, caplog):
    a, b = Net(), Net(seed=1)
    expected = run(a), run(b)
    device = carom.SimulatedDevice(memory_bytes=int(1.5 * size(a)))

    def failing(nbytes):
        raise kind("the giver's")

    with auto(a, device) as first:
        if asks == "who begins":
            for _ in range(12):
                run(a)
            giver = first
            monkeypatch.setattr(inside(giver).engine, "allocate", failing)
            second = auto(b, device)
        else:
            second = auto(b, device)
            for _ in range(12):
                run(b)
            if asks == "who returns":
                second.park()
                for _ in range(200):
                    run(a)
                assert first.plan.all_resident
                giver = first
                monkeypatch.setattr(inside(giver).engine, "allocate", failing)
                assert torch.equal(run(b), expected[1])
            else:
                giver = second
                monkeypatch.setattr(inside(giver).engine, "allocate", failing)
                for _ in range(60):
                    assert torch.equal(run(a), expected[0])
        assert giver.parked and "the giver's" in caplog.text
        with pytest.raises(kind, match="the giver's"):  # in its own forward
            run(giver.module)
        assert giver.parked
        monkeypatch.undo()
        for _ in range(3):
            assert torch.equal(run(a), expected[0]) and torch.equal(run(b), expected[1])
        second.close()
        assert torch.equal(run(b), expected[1])
    assert torch.equal(run(a), expected[0])


# -- a budget that a host set, and one that follows the device


def test_room_is_followed_under_a_budget_in_bytes_only():
    net = Net()
    device = carom.SimulatedDevice(memory_bytes=3 * size(net))
    for vram in ("auto", carom.SharedBudget(size(net))):
        with auto(net, device, vram) as session:
            with pytest.raises(carom.UnsupportedError, match=r"set_budget\(vram=bytes\)"):
                session.follow_room()
            session.set_budget(vram=size(net))
            session.follow_room()
            assert session.beyond > 0


def test_a_pass_that_runs_out_of_memory_is_answered_where_room_was_followed_before():
    net = Net()
    expected = run(net)
    device = carom.SimulatedDevice(memory_bytes=4 << 30)
    with auto(net, device, 2 * size(net)) as session:
        session.follow_room()
        run(net)
        session.set_budget(vram="auto")
        assert torch.equal(run(net), expected) and session.plan.all_resident
        inside(session).engine.activations = device.memory_bytes - size(net) // 2
        assert torch.equal(run(net), expected), "it runs again with less"
        assert not session.plan.all_resident


# -- who is remembered


def test_devices_are_forgotten_with_their_last_session():
    gc.collect()
    before = len(shared_budget._devices)
    for _ in range(3):
        with auto(Net(), carom.SimulatedDevice()) as one, auto(Net(), carom.SimulatedDevice()):
            assert len(inside(one).mates.members) == 1
    gc.collect()
    assert len(shared_budget._devices) == before


def test_a_session_that_was_dropped_unclosed_is_forgotten_when_the_next_one_comes():
    budget, device = carom.SharedBudget("1MiB"), carom.SimulatedDevice()
    for _ in range(3):
        auto(Net(), device, budget)  # with its module
        gc.collect()
    with auto(Net(), device, budget):
        assert len(budget.mates.order.givers(0)) == 1


# -- who comes while others run


@pytest.mark.parametrize("grows", [False, True])
def test_a_session_that_begins_keeps_nobody_waiting_who_runs(monkeypatch, grows):
    a, b, c = Net(), Net(seed=1), Net(seed=2)
    expected = run(a), run(b), run(c)
    budget = carom.SharedBudget(int(2.2 * size(a)), grows=grows)
    device = carom.SimulatedDevice(memory_bytes=1 << 24)
    begun, go_on, sessions, order = threading.Event(), threading.Event(), {}, []
    build = LayoutManager._build

    def slowly(self, wanted):
        root = original_of(self.module.root)
        order.append(root)
        if root is b:
            begun.set()
            assert go_on.wait(40)
        return build(self, wanted)

    def begin(net):
        sessions[net] = auto(net, device, budget)

    with auto(a, device, budget) as first:
        for _ in range(4):
            run(a)
        if not grows:
            first.park()
        monkeypatch.setattr(LayoutManager, "_build", slowly)
        threads = [threading.Thread(target=begin, args=(net,), daemon=True) for net in (b, c)]
        threads[0].start()
        assert begun.wait(20)
        threads[1].start()
        used = threading.Thread(target=lambda: [run(a) for _ in range(8)], daemon=True)
        used.start()
        used.join(10)
        waited = used.is_alive()
        promised = budget.nbytes - budget.free_bytes
        newest = [net for net in order if net is not a]
        go_on.set()
        for thread in (*threads, used):
            thread.join(20)
        assert not waited, "a step waited for another session's first layout"
        assert newest == [b], "who comes next waits, and is given room then"
        assert promised <= budget.nbytes
        assert sum(inside(s).held_bytes for s in (first, *sessions.values())) <= budget.nbytes
        for net, wanted in zip((a, b, c), expected, strict=True):
            assert torch.equal(run(net), wanted)
        for session in sessions.values():
            session.close()
