"""Several compute streams on the simulated device, and the engine of any accelerator's streams: each wait and each event
that is left out is found."""

from __future__ import annotations

import contextlib
from typing import Any

import carom
import pytest
import tests_harness as harness
import torch
from carom.core.device.simulated import SimulatedEngine, SimulatedRaceError
from carom.core.device.stream_engine import StreamEngine
from safetensors.torch import save_file
from tests_inside import inside
from torch import nn

TIMINGS = ("late", "early", "random")
on_every_timing = pytest.mark.parametrize("timing", TIMINGS)


def engine(timing: str = "late") -> tuple[carom.SimulatedDevice, SimulatedEngine]:
    device = carom.SimulatedDevice(seed=3, timing=timing)
    return device, SimulatedEngine(device)


def ones(count: int = 512) -> torch.Tensor:
    return torch.ones(count, dtype=torch.uint8)


# -- the device by itself


@on_every_timing
def test_a_stream_reads_only_what_it_has_waited_for_itself(timing):
    device, it = engine(timing)
    target, source = it.allocate(512), ones()
    copied, _ = it.copy_in(target, source, (), False)
    it.wait(copied)
    it.read(target)
    with device.stream(1):
        with pytest.raises(SimulatedRaceError, match="before the event of the copy"):
            it.read(target)
        it.wait(copied)
        it.read(target)
    assert torch.equal(target, source)


@on_every_timing
def test_an_overwrite_waits_for_the_reads_of_every_stream(timing):
    device, it = engine(timing)
    target, source = it.allocate(512), ones()
    it.wait(it.copy_in(target, source, (), False)[0])
    it.read(target)
    first = it.record(it.stream())
    with device.stream(1):
        it.wait(first)
        it.read(target)
        second = it.record(it.stream())
    with pytest.raises(SimulatedRaceError, match="overwritten before"):
        it.copy_in(target, source, (first,), False)
    it.copy_in(target, source, (first, second), False)


def test_an_event_counts_for_the_stream_that_it_was_recorded_on():
    device, it = engine("early")
    target, source = it.allocate(512), ones()
    it.wait(it.copy_in(target, source, (), False)[0])
    first = it.record(it.stream())
    with device.stream(1):
        it.wait(first)
        it.read(target)
    wrong = it.record(it.stream())  # of a stream that has not read it
    with pytest.raises(SimulatedRaceError, match="overwritten before"):
        it.copy_in(target, source, (wrong,), False)


def test_an_event_that_is_recorded_anew_does_not_move_who_waited_for_it():
    _, it = engine("late")
    target, other, source = it.allocate(512), it.allocate(512), ones()
    event, _ = it.copy_in(target, source, (), False)
    it.wait(event)
    it.copy_in(other, source, (), False)
    assert it.record(it._in, event) is event
    with pytest.raises(SimulatedRaceError):
        it.read(other)
    it.wait(event)
    it.read(other)


def test_two_writes_to_one_place_are_in_order():
    _, it = engine("late")
    wire, target = it.allocate(512), it.allocate(512)
    copied, _ = it.copy_in(wire, ones(), (), False)
    it.decode(lambda wire, target: target.copy_(wire), wire, target, (copied,), False)
    with pytest.raises(SimulatedRaceError, match="overwritten before"):
        it.copy_in(target, ones(), (), False)


def test_the_host_may_give_up_what_a_copy_reads_only_when_it_is_done():
    _, it = engine("late")
    target, source = it.allocate(512), ones()
    copied, _ = it.copy_in(target, source, (), False)
    del source
    with pytest.raises(SimulatedRaceError, match="given up before the copy was done"):
        it.wait(copied)


# -- the engine of any accelerator's streams: the simulated device runs it on virtual ones


def copied_out(it: StreamEngine, source: torch.Tensor) -> tuple[torch.Tensor, Any]:
    target = torch.empty_like(source)
    return target, it.copy_out(target, source)


def test_a_copy_to_the_host_is_there_after_its_event_and_not_before():
    _, it = engine("late")
    source = it.move(torch.arange(4.0), it.location)
    with it.step():
        made = source * 2
    target, event = copied_out(it, made)
    assert torch.isnan(target).all() and not it.landed(event)
    del made, source
    it.synchronize(event)
    assert torch.equal(target, torch.arange(4.0) * 2) and it.landed(event)


def test_a_copy_to_the_host_keeps_what_it_reads(monkeypatch):
    """StreamEngine.copy_out: without record_stream the allocator gives the memory to the next kernel."""
    monkeypatch.setattr(SimulatedEngine, "_keep_until_done", lambda self, tensor, stream: None)
    _, it = engine("late")
    made = it.move(torch.arange(4.0), it.location) * 2
    _, event = copied_out(it, made)
    del made
    with pytest.raises(SimulatedRaceError, match="given up before the copy was done"):
        it.synchronize(event)


@pytest.mark.parametrize("which", ["_in", "_decode", "_out"])
@on_every_timing
def test_each_stream_that_does_not_wait_is_found(which, timing, monkeypatch):
    _, it = engine(timing)
    wire, target, source = it.allocate(512), it.allocate(512), ones()
    it.synchronize()
    monkeypatch.setattr(getattr(it, which), "wait_event", lambda event: None)
    it.read(target)
    read = it.record(it.stream())
    with pytest.raises(SimulatedRaceError):
        if which == "_out":
            it.copy_out(torch.empty(512, dtype=torch.uint8), target)
        elif which == "_in":
            it.copy_in(target, source, (read,), False)
        else:
            copied, _ = it.copy_in(wire, source, (), False)
            it.decode(lambda wire, target: target.copy_(wire), wire, target, (copied, read), False)


class Module:
    """A device module whose streams are names; notes what is current when something runs."""

    def __init__(self, index: int = 0, sets: bool = True) -> None:
        self.now, self.index, self.made = "default", index, 0
        if sets:
            self.set_stream = lambda stream: setattr(self, "now", stream)

    def Stream(self, device=None, priority=0):  # noqa: N802
        self.made += 1
        return f"stream {self.made}"

    def device(self, device):
        return contextlib.nullcontext()

    def current_device(self):
        return self.index

    def current_stream(self, device=None):
        return self.now

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before


@pytest.mark.parametrize("sets", [True, False], ids=["set_stream", "context only"])
@pytest.mark.parametrize("index", [0, 1], ids=["current device", "another device"])
def test_what_an_engine_issues_runs_on_its_stream_and_the_callers_comes_back(sets, index):
    module = Module(sets=sets)
    it = StreamEngine(torch.device("cpu"), module)
    module.index = index
    seen = []
    it._on_stream("mine", lambda *given: seen.append((module.now, *given)), 1, 2)
    assert seen == [("mine", 1, 2)] and module.now == "default"

    def fails():
        raise RuntimeError("the kernel was refused")

    with pytest.raises(RuntimeError, match="refused"):
        it._on_stream("mine", fails)
    assert module.now == "default"


# -- backward on two streams


_INSIDE: list[contextlib.ExitStack] = []


@pytest.fixture(autouse=True)
def back_on_the_first_stream():
    """Also after a backward that failed, whose hooks are not called any more."""
    yield
    while _INSIDE:
        _INSIDE.pop().close()


def backward_on(device: carom.SimulatedDevice, index: int, node: Any) -> None:
    """The node's backward runs on another stream, as autograd has it for what ran there in the forward."""
    inside = contextlib.ExitStack()
    _INSIDE.append(inside)
    node.register_prehook(lambda given: inside.enter_context(device.stream(index)) and None)
    node.register_hook(lambda *given: inside.close())


class Fork(nn.Module):
    """Two branches in one unit; the second one's backward runs on a stream of its own."""

    def __init__(self, device: carom.SimulatedDevice | None) -> None:
        super().__init__()
        self.a, self.b, self.device = nn.Linear(16, 16), nn.Linear(16, 16), device

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        there, here = self.b(x), self.a(x)
        if self.device is not None and there.grad_fn is not None:
            backward_on(self.device, 1, there.grad_fn)
        return there + here


class Forks(nn.Module):
    def __init__(self, device: carom.SimulatedDevice | None, depth: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Fork(device) for _ in range(depth))
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def gradients(net: nn.Module) -> list[torch.Tensor]:
    found = []
    for seed in range(3):
        x = torch.randn(2, 16, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        net(x).pow(2).sum().backward()
        found.append(x.grad)
    return found


@on_every_timing
@pytest.mark.parametrize("slots", [1, 2])
def test_a_backward_on_two_streams_waits_on_both_and_is_waited_for_on_both(timing, slots):
    """Backward.unpack: the wait and the note of the second stream."""
    device = carom.SimulatedDevice(seed=5, timing=timing)
    net = Forks(device)
    expected = gradients(Forks(None))
    vram = harness.least_vram(net, device, "block") * slots
    with harness.streamed(net, device, vram, granularity="block") as session:
        found = gradients(net)
        assert len(inside(session).engine._virtual._computing) == 2, "nothing ran on a second stream"
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_gradients_that_leave_the_device_stay_until_they_have_landed():
    """Full fine-tuning: what is copied to the host was made by the kernels before it, and is kept until it is there."""
    plain, net = Forks(None), Forks(None)
    for one in (plain, net):
        one.requires_grad_(True)
    gradients(plain)
    device = carom.SimulatedDevice(timing="late")
    vram = harness.some_vram(net, device, 0.2, granularity="block", training="stream")
    out = []
    with harness.streamed(net, device, vram, granularity="block", training="stream") as session:
        copy_out = inside(session).engine.copy_out
        inside(session).engine.copy_out = lambda t, s: (out.append(s.shape), copy_out(t, s))[1]
        gradients(net)
    assert out
    for (name, mine), other in zip(net.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad), name


# -- weights from a file


@pytest.mark.parametrize("side", [32, 160], ids=["small", "pinned"])
def test_a_value_that_is_replaced_stays_until_its_copy_to_a_slot_is_done(side, tmp_path):
    """FileReads.write"""
    torch.manual_seed(0)
    loaded = nn.Sequential(*(nn.Linear(side, side, bias=False) for _ in range(8))).requires_grad_(False)
    with torch.device("meta"):
        empty = nn.Sequential(*(nn.Linear(side, side, bias=False) for _ in range(8))).requires_grad_(False)
    save_file(loaded.state_dict(), tmp_path / "m.safetensors")
    x, nbytes = torch.ones(2, side), side * side * 4
    device = carom.SimulatedDevice(timing="late")
    with (
        torch.no_grad(),
        carom.stream(
            empty, device=device, vram=3 * nbytes, ram=40 * nbytes + (1 << 20),
            weights=tmp_path / "m.safetensors", granularity="layer",
        ) as session,
    ):  # fmt: skip
        for factor in (2.0, 3.0, 5.0):
            for index in range(8):
                value = loaded[index].weight * factor / 2
                loaded[index].weight.copy_(value)
                session.write(f"{index}.weight", value.clone())
                assert torch.equal(empty(x), loaded(x))
