"""Calls of a session's methods while its module runs: they wait until the pass has ended, or raise an error."""

from __future__ import annotations

import gc
import sys
import threading

import carom
import pytest
import torch
from tests_inside import inside
from torch import nn


class Block(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        x = x + self.down(torch.relu(self.up(x)))
        if DURING and DURING[0][0] is self:
            DURING.pop()[1]()
        return x + self.down(torch.relu(self.up(x)))


DURING: list = []  # (block, what to call once in the middle of its forward)


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    DURING.clear()


def net(trains=False):
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(6))).requires_grad_(trains)


def size(module):
    return sum(p.numel() * p.element_size() for p in module.parameters())


X = torch.linspace(-1, 1, 64).reshape(2, 32)
N = size(net())
ACTS = {
    "less": lambda s: s.set_budget(N // 3),
    "more": lambda s: s.set_budget(2 * N),
    "ram": lambda s: s.set_budget(ram=2 * N),
    "park": lambda s: s.park(),
    "keep": lambda s: s.park(keep=True),
    "close": lambda s: s.close(),
    "write": lambda s: s.write("4.up.weight", torch.zeros(64, 32)),
}
OTHERS = {
    "tune": lambda s: s.tune(),
    "refresh": lambda s: s.refresh(),
    "read": lambda s: s.read("3.up.weight"),
    "report": lambda s: s.report(),
}
DEVICES = pytest.mark.parametrize("device", ["cpu", "simulated"])


def streamed(module, device, **options):
    device = carom.SimulatedDevice(timing="random") if device == "simulated" else device
    return carom.stream(module, vram=N // 2, device=device, codec="raw", granularity="block", **options)


@DEVICES
@pytest.mark.parametrize("act", [*ACTS, *OTHERS])
def test_a_call_of_another_thread_leaves_the_running_forward_alone(act, device):
    model, plain = net(), net()
    expected = plain(X)
    running, may_go_on, done = threading.Event(), threading.Event(), threading.Event()
    errors, read, early = [], [], []

    def pause():
        running.set()
        may_go_on.wait(10)
        early.append(done.is_set())

    def call():
        running.wait(10)
        try:
            read.append((ACTS | OTHERS)[act](session))
        except BaseException as error:
            errors.append(error)
        done.set()

    session = streamed(model, device)
    with torch.no_grad():
        model(X)
        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        DURING.append((model[3], pause))
        threading.Timer(0.05, may_go_on.set).start()
        assert torch.equal(model(X), expected)
        assert not (act in ACTS and early[0])
        thread.join(10)
        assert done.is_set() and not errors
        if act == "read":
            assert torch.equal(read[0], plain[3].up.weight)
        if act == "write":
            plain[4].up.weight.zero_()
            expected = plain(X)
        assert torch.equal(model(X), expected)
        session.close()
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


@DEVICES
@pytest.mark.parametrize("act", [*ACTS, *OTHERS])
def test_a_call_within_the_forward_is_an_error_or_works(act, device):
    model, plain = net(), net()
    said = []

    def call():
        try:
            (ACTS | OTHERS)[act](session)
        except carom.UnsupportedError as error:
            said.append(str(error))

    with torch.no_grad(), streamed(model, device) as session:
        expected = model(X)
        DURING.append((model[3], call))
        got = model(X)
        if act == "write":
            plain[4].up.weight.zero_()
            expected = plain(X)
        assert torch.equal(got, expected)
        assert bool(said) == (act in ACTS and act != "write")
        assert all("within its own forward" in text for text in said)
        assert torch.equal(model(X), expected)


@DEVICES
@pytest.mark.parametrize("act", [act for act in ACTS if act != "write"])
def test_a_call_within_a_backward_is_an_error(act, device):
    model, plain = net(True), net(True)
    plain(X).sum().backward()
    said = []

    def call(grad):
        try:
            ACTS[act](session)
        except carom.UnsupportedError as error:
            said.append(str(error))

    with streamed(model, device, training="stream") as session:
        x = model[:3](X)
        x.register_hook(call)
        model[3:](x).sum().backward()
        assert said
        assert all(
            torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True)
        )


@DEVICES
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("vram", [N // 2, 2 * N], ids=["streamed", "resident"])
def test_park_between_a_forward_and_its_backward_says_why_not(keep, vram, device):
    model, plain = net(), net()
    device = carom.SimulatedDevice() if device == "simulated" else device
    first, second = (X.clone().requires_grad_() for _ in range(2))
    plain(first).sum().backward()
    with carom.stream(model, vram=vram, device=device, granularity="block") as session:
        out = model(second)
        with pytest.raises(carom.UnsupportedError, match="between a forward and its backward"):
            session.park(keep=keep)
        out.sum().backward()
        assert torch.equal(first.grad, second.grad)
        session.park(keep=keep)
        assert session.parked
        kept = model(second)
        del out, kept  # without a backward
        session.park(keep=keep)


def test_a_thread_that_runs_pass_after_pass_lets_another_change_the_budget():
    model, plain = net(), net()
    expected, stop, found = plain(X), threading.Event(), []

    def loop():
        with torch.no_grad():
            while not stop.is_set():
                found.append(torch.equal(model(X), expected))

    with streamed(model, "cpu") as session:
        thread = threading.Thread(target=loop, daemon=True)
        thread.start()
        try:
            for i in range(10):
                session.set_budget(N // 2 if i % 2 else N // 3)
        finally:
            stop.set()
            thread.join(10)
        assert found and all(found)


def test_nothing_is_collected_while_the_stacks_of_threads_are_read(monkeypatch):
    """A collection would wait without end for CPython's lock on the list of threads."""
    model, frames, collects = net(), sys._current_frames, []
    monkeypatch.setattr(sys, "_current_frames", lambda: (collects.append(gc.isenabled()), frames())[1])
    with torch.no_grad(), streamed(model, "cpu") as session:
        model(X)
        inside(session).streamer.forwards.local.mine.roots.append(0)  # as if another thread ran a pass
        thread = threading.Thread(target=session.set_budget, args=(N // 2,))
        thread.start()
        thread.join(60)
        inside(session).streamer.forwards.local.mine.roots.clear()
    assert collects and not any(collects) and gc.isenabled()


def test_a_count_that_an_interrupt_left_behind_lets_nobody_wait():
    model = net()
    with torch.no_grad(), streamed(model, "cpu") as session:
        model(X)
        inside(session).streamer.forwards.local.mine.roots.append(0)
        session.park()
        model(X)
        inside(session).streamer.forwards.local.mine.roots.append(0)
    assert session.closed
