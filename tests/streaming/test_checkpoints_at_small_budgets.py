"""Non-reentrant checkpointing where the slots have no room for all units that are used at once."""

from __future__ import annotations

import copy

import carom
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Checkpointed(nn.Module):
    """Two blocks a checkpoint; each block's result also goes through weights of its neighbours."""

    def __init__(self, foreign: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.foreign = foreign

    def _segment(self, first: int, x: torch.Tensor) -> torch.Tensor:
        for index in (first, first + 1):
            x = self.blocks[index](x)
            for distance in range(1, self.foreign + 1):
                other = self.blocks[(index - distance) % 6]
                x = x + torch.tanh(F.linear(x, other.down.weight @ other.up.weight))
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for first in (0, 2, 4):
            x = checkpoint(self._segment, first, x, use_reentrant=False)
        return x


def step(model: nn.Module, seed: int) -> list[torch.Tensor]:
    model.zero_grad()
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    out = model(x)
    out.square().mean().backward()
    return [out.detach(), x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("granularity", ["block", "layer"])
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("foreign", [0, 1, 2])
def test_the_least_budget_trains_bit_for_bit_under_checkpoints(foreign, trains, granularity):
    """A unit may be in a slot in forward and in host memory in recomputation, or the other way round."""
    model = Checkpointed(foreign).requires_grad_(trains)
    plain = copy.deepcopy(model)
    options = {
        "device": carom.SimulatedDevice(seed=foreign, timing="random"), "codec": "raw", "granularity": granularity,
        "training": "stream" if trains else None,
    }  # fmt: skip
    with pytest.raises(carom.BudgetError) as refused:
        carom.stream(model, vram=1, **options)
    for factor in (1, 1.6):
        with carom.stream(model, vram=int(refused.value.least_bytes * factor), **options) as session:
            for seed in range(2):
                for got, want in zip(step(model, seed), step(plain, seed), strict=True):
                    assert torch.equal(got, want)
            assert session.report().vram_peak_bytes <= session.report().vram_budget_bytes
