"""A pass that failed, or that was interrupted anywhere, leaves nothing behind: slots, pinned memory, figures."""

from __future__ import annotations

import contextlib
import linecache
import sys
import threading
from pathlib import Path

import carom
import pytest
import torch
from carom.core.device.simulated import SimulatedEngine
from tests_inside import inside
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.timeout(60)
WIDTH = 32
X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.b(F.gelu(self.a(x)))


class Model(nn.Module):
    def __init__(self, count: int = 6, block: type[nn.Module] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(block() for _ in range(count))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Stop(Exception):
    pass


def device(timing: str = "late", **settings):
    return carom.SimulatedDevice(timing=timing, **settings)


def least(model: nn.Module, **settings) -> int:
    with pytest.raises(carom.BudgetError) as refused:
        carom.stream(model, device=device(), vram=0, **settings)
    return refused.value.least_bytes


def infer(model: nn.Module):
    with torch.no_grad():
        return model(X)


def step(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    y = model(X)
    y.square().sum().backward()
    return [y.detach(), *(p.grad for p in model.parameters())]


def same(got: list, want: list) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def fails(*_):
    raise Stop


def test_failed_backwards_take_no_more_pinned_memory():
    model = Model()
    with carom.stream(
        model, device=device(), vram=2 * least(model, training="stream"), training="stream"
    ) as session:
        pinned = []
        for _ in range(6):
            step(model)  # gradients are on the host: each weight has the buffers that it needs
            x = X.clone().requires_grad_()
            y = model(x)
            x.register_hook(fails)
            with pytest.raises(Stop):  # at its very end, when most gradients are on their way
                y.square().sum().backward()
            pinned.append(session.report().pinned_bytes)
        weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        assert pinned[0] >= 2 * weights, "gradients land in pinned memory"
        assert pinned[-1] == pinned[1], f"pinned bytes after each failed backward: {pinned}"
    assert inside(session).pinned_bytes == 0, "nothing stays pinned, though .grad keeps the memory"
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


def test_a_failed_backward_gives_its_slots_back_at_once():
    model, twin = Model(), Model()
    with carom.stream(model, device=device(), vram=least(model)):
        for _ in range(3):
            x = X.clone().requires_grad_()
            model.blocks[1].register_full_backward_hook(fails)
            with pytest.raises(Stop):
                model(x).sum().backward()
            model.blocks[1]._backward_hooks.clear()
            assert torch.equal(infer(model), infer(twin))


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_a_failed_pass_is_no_step_of_the_report(training):
    model = Model()
    with carom.stream(
        model.requires_grad_(training),
        device=device(),
        vram=least(model, training="stream"),
        training="stream",
    ) as session:
        for _ in range(4):
            step(model) if training else infer(model)
        before = session.report()
        hook = model.blocks[1].register_forward_pre_hook(fails)
        for _ in range(3):
            with pytest.raises(Stop):
                model(X)
        hook.remove()
        x = X.clone().requires_grad_()
        x.register_hook(fails)
        if training:
            with pytest.raises(Stop):
                model(x).sum().backward()
        after = session.report()
        assert (after.steps, after.raw_bytes_per_step) == (before.steps, before.raw_bytes_per_step)


@contextlib.contextmanager
def interrupted(place: str, call: int):
    """A KeyboardInterrupt comes at the beginning of the ``call``-th call of a method, called "file.method", of carom.core."""
    file, function = place.split(".")
    path = str(Path(carom.__file__).parent / "core" / f"{file}.py")
    calls = [0]

    def trace(frame, event, _):
        if event == "call" and frame.f_code.co_name == function and frame.f_code.co_filename == path:
            calls[0] += 1
            if calls[0] == call:
                raise KeyboardInterrupt

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("timing", ["late", "early"])
@pytest.mark.parametrize("call", [1, 4])
@pytest.mark.parametrize(
    "place",
    [
        "streaming/run.end",
        "streaming/run.leave",
        "streaming/streamer.wait_timed",
        "streaming/unit.show",
        "streaming/run.issue_due",
        "streaming/run.copy_unit",
        "device/pool._begin",
    ],
)
def test_a_pass_that_is_interrupted_leaves_slots_that_can_be_overwritten(place, call, timing):
    model, twin = Model(), Model()
    want = infer(twin)
    with carom.stream(model, device=device(timing), vram=least(model)):
        infer(model)
        parameters = list(map(id, model.parameters()))
        for _ in range(2):
            with interrupted(place, call):
                infer(model)
            assert list(map(id, model.parameters())) == parameters, "views of slots stand in the modules"
            for _ in range(2):  # the order is learnt anew in the first pass
                assert torch.equal(infer(model), want)


@contextlib.contextmanager
def interrupted_before(file: str, text: str):
    """A KeyboardInterrupt comes before the first line of a file of carom.core that begins with ``text``."""
    path = str(Path(carom.__file__).parent / "core" / f"{file}.py")
    done = []

    def line(frame, event, _):
        if event == "line" and not done and linecache.getline(path, frame.f_lineno).strip().startswith(text):
            done.append(text)
            raise KeyboardInterrupt
        return line

    before = sys.gettrace()
    sys.settrace(lambda frame, event, _: line if frame.f_code.co_filename == path else None)
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("line", ["mine.entered.append(", "if unit.depth == 0:"])
def test_an_interrupt_between_taking_a_slot_and_noting_it_leaves_no_slot_in_use(line):
    model, twin = Model(), Model()
    want = infer(twin)
    with carom.stream(model, device=device(), vram=least(model)):
        parameters = list(map(id, model.parameters()))
        for _ in range(2):
            with interrupted_before("streaming/run", line):
                infer(model)
            assert list(map(id, model.parameters())) == parameters, "views of slots stand in the modules"
            assert torch.equal(infer(model), want)


@pytest.mark.parametrize(
    "place", ["streaming/unit.show", "streaming/streamer.wait_timed", "placement/pinned_tier.fetch"]
)
def test_a_part_that_was_interrupted_outside_of_the_models_forward_leaves_its_slot(place):
    model, twin = Model(), Model()
    want = infer(twin)
    with carom.stream(model, device=device(), vram=least(model)):
        for index in (0, 3):
            infer(model)
            with interrupted(place, 1), torch.no_grad():
                model.blocks[index](X)
                model.blocks[index + 2](X)
            assert torch.equal(infer(model), want)


@pytest.mark.parametrize("call", [1, 2, 3, 29, 30, 35])  # from the fourth on of the backward
def test_an_event_that_the_device_refuses_to_record_leaves_no_slot_in_use(call, monkeypatch):
    model, twin = Model(), Model()
    with carom.stream(
        model, device=device(), vram=2 * least(model, training="stream"), training="stream"
    ) as session:
        step(model)
        calls, record = [0], SimulatedEngine.record

        def refused(*arguments):
            calls[0] += 1
            if calls[0] == call:
                raise Stop
            return record(*arguments)

        with monkeypatch.context() as patch, pytest.raises(Stop):
            patch.setattr(SimulatedEngine, "record", refused)
            step(model)
            raise AssertionError("no event was refused")
        inside(session).end_finished_uses()
        assert not any(slot.users for slot in inside(session).slots)
        assert same(step(model), step(twin))


def test_a_backward_that_failed_in_another_thread_gives_its_slots_back():
    model, twin = Model(), Model()
    with carom.stream(model, device=device(), vram=least(model)):
        for _ in range(2):
            x = X.clone().requires_grad_()
            y = model(x)
            errors = []
            x.register_hook(fails)

            def backward(y=y, errors=errors):
                try:
                    y.sum().backward()
                except Stop as error:
                    errors.append(type(error))

            thread = threading.Thread(target=backward)
            thread.start()
            thread.join(20)
            assert errors == [Stop]
            assert torch.equal(infer(model), infer(twin))


@pytest.mark.parametrize("call", [3, 8])
def test_a_slot_whose_last_read_could_not_be_noted_is_not_overwritten_too_early(call, monkeypatch):
    model, twin = Model(), Model()
    want = infer(twin)
    with carom.stream(model, device=device(), vram=least(model)):
        infer(model)
        calls, record = [0], SimulatedEngine.record

        def fails_once(*args):
            calls[0] += 1
            if calls[0] == call:
                raise Stop
            return record(*args)

        monkeypatch.setattr(SimulatedEngine, "record", fails_once)
        with pytest.raises(Stop):
            infer(model)
        assert torch.equal(infer(model), want)


def test_a_step_with_a_forward_that_failed_is_not_in_the_figures():
    """A second forward before the backward is part of the step. Where it fails, what was measured is no step's."""
    model = Model()
    with carom.stream(model, device=device(), vram=4 * least(model), granularity="block") as session:
        for _ in range(4):
            step(model)
        before = session.report().steps
        out = model(X)
        broken = model.blocks[3].register_forward_hook(raises)
        with pytest.raises(Stop):
            model(X)
        broken.remove()
        out.sum().backward()
        assert session.report().steps == before
        step(model)
        assert session.report().steps == before + 1


def raises(*_) -> None:
    raise Stop


class Outer(Block):
    """Calls ``inner``, the block of another unit, and goes on without it where a user interrupts that."""

    inner: tuple[nn.Module, ...] = ()

    def forward(self, x):
        y = super().forward(x)
        for block in self.inner:
            with contextlib.suppress(KeyboardInterrupt):
                return block(y)
        return y


@pytest.mark.parametrize("grad", [False, True])
def test_a_block_may_go_on_after_an_interrupt_in_a_block_that_it_calls(grad):
    model, twin = Model(block=Outer), Model(block=Outer)

    def interrupt(*_):
        raise KeyboardInterrupt

    def run(net):
        inner = net.blocks[4].a.register_forward_pre_hook(interrupt)
        following = net.blocks[2].register_forward_pre_hook(lambda *_: inner.remove())
        with torch.set_grad_enabled(grad):
            y = net(X)
        following.remove()
        return y

    for net in (model, twin):
        net.blocks[1].inner = (net.blocks[4],)
    with carom.stream(model, device=device(), vram=4 * least(model), granularity="block"):
        for _ in range(2):
            assert torch.equal(run(model), run(twin))
            assert torch.equal(model(X), twin(X))
