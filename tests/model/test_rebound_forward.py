"""Other code that puts a forward of its own on a streamed module, and takes it off again."""

from __future__ import annotations

import copy
import inspect
from types import MethodType

import carom
import pytest
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(32, 32)

    def forward(self, x):
        return x + torch.tanh(self.a(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.requires_grad_(False)

    def forward(self, x, scale=1.0):
        for block in self.blocks:
            x = block(x)
        return x * scale


X = torch.linspace(-1, 1, 64).reshape(2, 32)
VRAM = 9_000


def accelerator():
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()
    return accelerate.Accelerator(cpu=True, mixed_precision="bf16")


@pytest.mark.parametrize("closed", ["at the end", "before"])
def test_accelerate_wraps_and_unwraps_a_module_that_streams(closed):
    plain, model, outside = Net(), Net(), accelerator()
    expected = [accelerator().prepare(Net())(X), plain(X)]
    with (
        torch.no_grad(),
        carom.stream(model, vram=VRAM, device=carom.SimulatedDevice(), codec="raw") as session,
    ):
        model(X)
        prepared = outside.prepare(model)
        found = [prepared(X)]
        outside.unwrap_model(prepared, keep_fp32_wrapper=False)
        if closed == "before":
            session.close()
        found.append(model(X))
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        if closed == "at the end":
            for _ in range(3):
                model(X)
            assert session.report().steps == 4  # of six, without the first two
    assert torch.equal(model(X), plain(X))
    assert torch.equal(copy.deepcopy(model)(X), plain(X))


def test_a_module_that_was_prepared_before_is_streamed_on_after_it_is_unwrapped():
    plain, model, outside = Net(), Net(), accelerator()
    prepared = outside.prepare(model)
    with (
        torch.no_grad(),
        carom.stream(model, vram=VRAM, device=carom.SimulatedDevice(), codec="raw") as session,
    ):
        prepared(X)
        whole = 6 * 4 * 33 * 32
        outside.unwrap_model(prepared, keep_fp32_wrapper=False)
        for _ in range(8):
            assert torch.equal(model(X), plain(X))
        report = session.report()
        assert report.steps >= 4
        assert report.raw_bytes_per_step > whole / 2, "a step is the root's forward again"
        session.park()
        assert torch.equal(model(X), plain(X))
        assert not session.parked
    assert torch.equal(model(X), plain(X))


def test_a_forward_that_is_bound_again_is_the_streamed_one():
    plain, model = Net(), Net()
    with (
        torch.no_grad(),
        carom.stream(model, vram=VRAM, device=carom.SimulatedDevice(), codec="raw") as session,
    ):
        assert inspect.signature(model.forward) == inspect.signature(plain.forward)
        model.forward = MethodType(model.forward.__func__, model)
        assert inspect.signature(model.forward) == inspect.signature(plain.forward)
        for _ in range(4):
            assert torch.equal(model(X, scale=2.0), plain(X, scale=2.0))
        assert session.report().steps == 2
        twin = copy.deepcopy(model)
        with torch.no_grad():
            for p in twin.parameters():
                p.zero_()
        assert torch.equal(twin(X), X), "a copy computes with its own weights"
        assert torch.equal(model(X), plain(X))
    assert torch.equal(model(X), plain(X))
