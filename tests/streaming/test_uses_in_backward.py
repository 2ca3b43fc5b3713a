"""What a use of a streamed unit costs the host: a recomputation and the gradients after it are one use."""

from __future__ import annotations

import carom
import pytest
import torch
from tests_harness import on_simulated_devices
from tests_inside import inside
from tests_watch import watch_uses
from torch import nn
from torch.utils.checkpoint import checkpoint

BLOCKS, WIDTH = 6, 64


class Shift(nn.Module):
    """Autograd saves nothing of its weight, so that no gradient asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x + self.shift)


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.linear(x))


class Model(nn.Module):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(BLOCKS)).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def gradients(model: Model, steps: int) -> list[torch.Tensor]:
    found = []
    for step in range(steps):
        model.scale.grad = None
        model(torch.linspace(-1, 1, WIDTH * WIDTH).view(WIDTH, WIDTH) + step).sum().backward()
        found.append(model.scale.grad.clone())
    return found


def streamed(model: Model, device, slots: int) -> carom.Session:
    unit = WIDTH * WIDTH * 4
    return carom.stream(model, device=device, vram=slots * unit + 4096, granularity="block", codec="raw")


@on_simulated_devices
def test_a_recomputation_and_its_gradients_are_one_use(device, monkeypatch):
    torch.manual_seed(0)
    model, uses = Model(Linear), watch_uses(monkeypatch)
    with streamed(model, device, 3) as session:
        gradients(model, 4)
        uses.clear()
        gradients(model, 1)
        names = [unit.name for unit in inside(session).streamed]
    assert len(names) == BLOCKS
    assert [name for what, name in uses if what == "end"] == [*names, *reversed(names)]


@on_simulated_devices
@pytest.mark.parametrize("slots", [1, 3])
def test_a_recomputed_unit_that_no_gradient_asks_for_is_let_go(device, slots):
    torch.manual_seed(0)
    model = Model(Shift)
    expected = gradients(model, 3)
    with streamed(model, device, slots) as session:
        found = gradients(model, 3)
        assert not any(slot.users for slot in inside(session).slots)
    assert all(map(torch.equal, found, expected))


@on_simulated_devices
def test_the_slot_of_a_use_that_ended_is_filled_before_the_next_unit_is_recomputed(device, monkeypatch):
    torch.manual_seed(0)
    model, events, again = Model(Linear), watch_uses(monkeypatch), Linear.forward
    monkeypatch.setattr(Linear, "forward", lambda self, x: (events.append(("run", "")), again(self, x))[1])
    with streamed(model, device, 2):
        gradients(model, 4)
        events.clear()
        gradients(model, 1)
    backward = events[[kind for kind, _ in events].index("run", 0) :]
    runs = [place for place, (kind, _) in enumerate(backward) if kind == "run"][BLOCKS:]
    # Blocks 5 and 4 are there at the turn; when 4 is recomputed, 3 is on its way to where 5 was.
    assert ("fetch", "blocks.3") in backward[runs[0] : runs[1]]
