"""Helpers that run a model resident and streamed, and compare the results bit for bit."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import Any

import carom
import pytest
import torch
from tests_inside import inside
from torch import nn

SIMULATED = {
    f"simulated-{timing}": carom.SimulatedDevice(seed=7, timing=timing)
    for timing in ("late", "early", "random")
}
DEVICES: dict[str, Any] = {"cpu": "cpu", **SIMULATED}
EVERYWHERE = {**DEVICES, **({"cuda": "cuda"} if torch.cuda.is_available() else {})}

on_every_device = pytest.mark.parametrize("device", EVERYWHERE.values(), ids=EVERYWHERE)
# For what varies models or settings: the timings each have their full share in the tests of training and transfers.
SOME = {
    name: device for name, device in EVERYWHERE.items() if name not in ("simulated-late", "simulated-early")
}
on_some_devices = pytest.mark.parametrize("device", SOME.values(), ids=SOME)
on_simulated_devices = pytest.mark.parametrize("device", SIMULATED.values(), ids=SIMULATED)


def place(device: Any) -> torch.device:
    """Return the torch device on which a session on ``device`` computes."""
    return torch.device("cpu") if isinstance(device, carom.SimulatedDevice) else torch.device(device)


def least_vram(model: nn.Module, device: Any, granularity: str = "auto", training: str = "resident") -> int:
    """Return the least budget in bytes, which the BudgetError of a too small budget names."""
    with pytest.raises(carom.BudgetError) as refused:
        carom.stream(model, device=device, vram=0, granularity=granularity, training=training)
    assert refused.value.least_bytes is not None
    return refused.value.least_bytes


def everything_vram(model: nn.Module, training: str = "resident") -> int:
    """Return a budget in bytes for all weights and an allocator's rounding.

    Adapters are not counted, because they are outside the budget, except with training="stream".
    """
    every = (*model.parameters(), *model.buffers())
    tensors = {id(t): t for t in every if training == "stream" or not t.requires_grad}
    grain = 512
    return sum(-(-t.numel() * t.element_size() // grain) * grain for t in tensors.values()) + grain


def some_vram(
    model: nn.Module,
    device: Any,
    share: float = 0.35,
    slots: int = 1,
    granularity: str = "auto",
    training: str = "resident",
) -> int:
    """Return a budget in bytes between the least budget (for ``slots`` slots) and all weights, by ``share``."""
    least = least_vram(model, device, granularity, training) * slots
    return least + int(max(0, everything_vram(model, training) - least) * share)


def heed_interrupts() -> None:
    """Reset SIGINT, as ``preexec_fn`` of a child, because a background job of a shell inherits that Ctrl-C is
    ignored.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextlib.contextmanager
def streamed(model: nn.Module, device: Any, vram: int, **settings: Any) -> Iterator[Any]:
    """Provide a session that must stream some weights and must close cleanly."""
    session = carom.stream(model, device=device, vram=vram, **settings)
    try:
        assert inside(session).streamed, "nothing streams: the test would show nothing"
        yield session
    finally:
        session.close()


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.float().pow(2).mean()


def infer(
    model: nn.Module, case: Any, device: torch.device, *, mode: Callable = torch.no_grad, passes: int = 3
) -> list:
    seen = []
    for index in range(passes):
        x = case.inputs(index, device)
        torch.manual_seed(index)
        with mode():
            seen.append(model(x))
    return seen + buffers_of(model)


def train(
    model: nn.Module, case: Any, device: torch.device, *, steps: int = 3, accumulate: int = 1, forwards: int = 1,
    autocast: bool = False, sample: bool = False, optimizer: Callable | None = None, clip: float | None = None,
) -> list:  # fmt: skip
    """Run a few training steps and return all observable results: outputs, gradients of inputs and parameters,
    trained weights.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    make = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9))
    opt = make([p for _, p in named])
    seen: list = []
    for step in range(steps):
        for part in range(accumulate):
            losses, leaves = [], []
            for again in range(forwards):
                x = case.inputs(step * 100 + part * 10 + again, device)
                if x.is_floating_point():
                    leaves.append(x.requires_grad_())
                torch.manual_seed(step * 100 + part * 10 + again)
                with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                    output = model(x)
                losses.append(loss_of(output))
                seen.append(output.detach().clone())
            total = torch.stack(losses).sum()
            del losses, output
            total.backward()
            seen += [leaf.grad for leaf in leaves]
        if clip is not None:
            seen.append(torch.nn.utils.clip_grad_norm_([p for _, p in named], clip))
        seen += [None if p.grad is None else p.grad.detach().clone() for _, p in named]
        opt.step()
        opt.zero_grad()
        if sample:
            with torch.no_grad():
                seen.append(model(case.inputs(900 + step, device)))
    return seen + [p.detach().clone() for _, p in named] + buffers_of(model)


def buffers_of(model: nn.Module) -> list:
    return [buffer.detach().clone() for buffer in model.buffers()]


def assert_same(expected: list, found: list) -> None:
    """Assert that the results are equal bit for bit, and that none is NaN."""
    assert len(expected) == len(found)
    for index, (a, b) in enumerate(zip(expected, found, strict=True)):
        if a is None or b is None:
            assert a is None and b is None, f"result {index}: only one run has it"
            continue
        a, b = a.detach().cpu(), b.detach().cpu()
        assert a.dtype == b.dtype and a.shape == b.shape, f"result {index}"
        assert not a.is_floating_point() or torch.isfinite(a).all(), (
            f"result {index} of the resident run is not finite"
        )
        assert torch.equal(a, b), f"result {index} of {len(expected)} differs"
