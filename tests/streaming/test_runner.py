"""`Runner`, the interface through which a session uses what runs the passes: what each member promises.

The tests use the members of `Runner` only, so they hold for every object that serves a session.
"""

from __future__ import annotations

import dataclasses
import gc
import threading
import time
import weakref

import carom
import pytest
import torch
from carom.core.session.layout_manager import LayoutManager
from carom.core.streaming.runner import HeldBytes, NextLayout, Runner, Use
from tests_harness import least_vram
from tests_inside import inside
from tests_limits import pack_small_weights
from torch import nn

WIDTH, DEPTH = 48, 5
X = torch.linspace(-1, 1, 2 * WIDTH).reshape(2, WIDTH)
MEMBERS = {name for name in (*vars(Runner), *Runner.__annotations__) if not name.startswith("_")}
WAIT_SECONDS = 10


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self, trains: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.requires_grad_(False)
        self.adapter = nn.Parameter(torch.ones(WIDTH), requires_grad=trains)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) * self.adapter
        return x


def stream(net: nn.Module, slots: int = 1, **options):
    device = carom.SimulatedDevice()
    vram = slots * least_vram(net, device, "block")
    return carom.stream(net, device=device, vram=vram, granularity="block", **{"codec": "raw", **options})


def runner_of(session) -> Runner:
    return inside(session).manager.layout.runner


def infer(net: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return net(X)


def uses(runner: Runner) -> set[Use]:
    return {use for use in Use if runner.in_use(use)}


def test_a_forward_a_graph_and_a_backward_are_uses_until_they_end():
    net = Net(trains=True)
    seen: list[set[Use]] = []
    with stream(net) as session:
        runner = runner_of(session)
        net.blocks[2].down.register_forward_pre_hook(lambda *_: seen.append(uses(runner)))
        assert uses(runner) == set()
        infer(net)
        assert seen == [{Use.PASS}] and uses(runner) == set()
        result = net(X)
        assert uses(runner) == {Use.GRAPH}
        net.adapter.register_hook(lambda _: seen.append(uses(runner)))
        result.sum().backward()
        assert seen[-1] >= {Use.PASS, Use.BACKWARD}
        del result
        assert uses(runner) == set()


def test_a_pass_that_waits_for_a_slot_is_a_use_of_its_own():
    net, entered, go_on = Net(), threading.Event(), threading.Event()

    def stops_the_first(*_):
        if not entered.is_set():
            entered.set()
            assert go_on.wait(WAIT_SECONDS)

    with stream(net) as session:
        runner = runner_of(session)
        net.blocks[0].down.register_forward_pre_hook(stops_the_first)
        threads = [threading.Thread(target=infer, args=(net,), daemon=True) for _ in range(2)]
        threads[0].start()
        assert entered.wait(WAIT_SECONDS) and uses(runner) == {Use.PASS}
        threads[1].start()  # the only slot is in use
        until = time.monotonic() + WAIT_SECONDS
        while not runner.in_use(Use.WAIT) and time.monotonic() < until:
            time.sleep(0.001)
        waited = uses(runner)
        go_on.set()
        for thread in threads:
            thread.join(WAIT_SECONDS)
        assert waited == {Use.PASS, Use.WAIT} and uses(runner) == set()


@pytest.mark.parametrize("part", [False, True])
def test_a_pass_lasts_from_its_beginning_to_its_end(part):
    net = Net()
    with stream(net) as session:
        runner = runner_of(session)
        with runner.lock:
            running = runner.begin_pass(net.blocks[1] if part else None)
        assert running.runner is runner and uses(runner) == {Use.PASS}
        running.end_forward(failed=False)
        assert uses(runner) == set()


def test_a_pass_without_a_result_to_differentiate_is_a_whole_step():
    def steps(gradients: bool) -> tuple[int, str]:
        net = Net()  # frozen
        with stream(net) as session, torch.set_grad_enabled(gradients):
            for _ in range(6):
                net(X)
            return session.report().steps, session.report().kind

    assert steps(True) == steps(False)


def test_an_interrupt_ends_the_passes_of_its_thread_and_the_next_pass_is_right():
    net = Net()
    want = infer(net)
    with stream(net) as session:
        runner = runner_of(session)
        with runner.lock:
            runner.begin_pass(None)
        runner.interrupted()
        assert uses(runner) == set()
        assert torch.equal(infer(net), want)


def test_device_bytes_are_held_until_close():
    net = Net()
    with stream(net, slots=2) as session:
        runner = runner_of(session)
        assert runner.held_bytes() == HeldBytes(session.plan.region_bytes, 0) and session.plan.region_bytes
        session.park()
        assert runner.held_bytes() == HeldBytes(0, 0)
        runner.close()  # may be repeated
        infer(net)
        assert runner_of(session) is not runner and runner_of(session).held_bytes().slots


def test_a_close_that_is_interrupted_while_it_waits_for_the_device_waits_before_it_gives_memory_up():
    with stream(Net(), slots=2) as session:
        runner, engine, held = runner_of(session), inside(session).engine, []

        def synchronize(*args) -> None:
            held.append(runner.held_bytes())
            if len(held) == 1:
                raise KeyboardInterrupt
            type(engine).synchronize(engine, *args)

        engine.synchronize = synchronize
        with pytest.raises(KeyboardInterrupt):
            runner.close()
        del engine.synchronize
        assert held[0] == held[1] != HeldBytes(0, 0) == runner.held_bytes()


def test_staging_memory_is_held_where_units_cross_packed(monkeypatch):
    pack_small_weights(monkeypatch)
    with stream(Net().to(torch.bfloat16), slots=3, codec="lossless") as session:
        held = runner_of(session).held_bytes()
        assert held.staging == session.plan.staging_bytes > 0
        assert held.slots == session.plan.region_bytes


def test_the_order_of_use_is_known_until_close():
    net = Net(trains=True)  # a frozen adapter would stream as a unit of its own
    with stream(net) as session:
        runner, streamed = runner_of(session), [unit.name for unit in inside(session).streamed]
        infer(net)
        infer(net)
        assert runner.expected_uses() == [(place, False) for place in range(len(streamed))]
        order = runner.learnt_order()
        assert order is not None
        assert [names[0].rpartition(".up")[0] for names, _ in order.uses] == [
            f"blocks.{i}" for i in range(DEPTH)
        ]
        session.park()
        assert runner.learnt_order() is None


def test_weights_that_a_pass_writes_to_are_named_until_the_next_pass():
    class Counts(Net):
        def forward(self, x):
            self.blocks[1].up.bias.add_(1)
            return super().forward(x)

    net = Counts()
    with stream(net, slots=2) as session:
        runner = runner_of(session)
        with torch.no_grad():
            net(X)
        assert list(runner.next_layout.stay) == ["blocks.1.up.bias"]
        infer(net)
        assert runner_of(session).next_layout == NextLayout()


def test_a_closed_runner_keeps_nothing_of_the_module():
    net = Net()
    with stream(net) as session:
        runner = runner_of(session)
        infer(net)
    kept = [weakref.ref(tensor) for tensor in net.parameters()]
    del net, session
    gc.collect()  # the first session of a process leaves a cycle
    assert runner.held_bytes() == HeldBytes(0, 0)
    assert not any(reference() is not None for reference in kept)


def test_a_thread_whose_pass_begins_is_in_a_pass(monkeypatch):
    net = Net()
    seen: list[bool] = []
    with stream(net) as session:
        runner = runner_of(session)
        begin = runner.begin_pass

        def asks(part):
            running = begin(part)
            seen.append(session.in_pass)
            return running

        monkeypatch.setattr(runner, "begin_pass", asks)
        infer(net)
        assert seen == [True] and not session.in_pass


class Only:
    """Passes on the members of `Runner`, and nothing else, of the object that runs a layout's passes."""

    def __init__(self, runner: Runner) -> None:
        self._passed_on = runner

    def __getattr__(self, name: str):
        assert name in MEMBERS, f"{name} is no member of Runner"
        return getattr(self._passed_on, name)


def test_a_session_needs_no_more_than_the_interface(monkeypatch):
    build = LayoutManager._build

    def narrow(self, wanted):
        layout = build(self, wanted)
        return dataclasses.replace(layout, runner=Only(layout.runner))

    monkeypatch.setattr(LayoutManager, "_build", narrow)
    net, twin = Net(trains=True), Net(trains=True)
    with stream(net) as session:
        assert isinstance(runner_of(session), Only)
        for _ in range(3):
            assert torch.equal(infer(net), infer(twin))
        for model in (net, twin):
            model(X).sum().backward()
        assert torch.equal(net.adapter.grad, twin.adapter.grad)
        assert session.report().steps and session.stall_share() is not None
        session.refresh()
        session.tune()
        session.set_budget(vram=2 * session.vram)
        assert torch.equal(infer(net), infer(twin))
        session.park(keep=True)
        assert torch.equal(infer(net), infer(twin))
        assert torch.equal(session.read("blocks.0.up.weight"), twin.blocks[0].up.weight)
    assert torch.equal(infer(net), infer(twin))
