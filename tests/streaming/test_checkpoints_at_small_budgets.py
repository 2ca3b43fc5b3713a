"""Checkpointing where the slots have no room for all units that are used at once."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable

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

    def __init__(self, foreign: int, reentrant: bool = False, span: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.foreign, self.reentrant, self.span = foreign, reentrant, span

    def _segment(self, first: int, x: torch.Tensor) -> torch.Tensor:
        for index in range(first, first + self.span):
            x = self.blocks[index](x)
            for distance in range(1, self.foreign + 1):
                other = self.blocks[(index - distance) % 6]
                x = x + torch.tanh(F.linear(x, other.down.weight @ other.up.weight))
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for first in range(0, 6, self.span):
            x = checkpoint(self._segment, first, x, use_reentrant=self.reentrant)
        return x


def step(model: nn.Module, seed: int) -> list[torch.Tensor]:
    model.zero_grad()
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    out = model(x)
    out.square().mean().backward()
    return [out.detach(), x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def first_that_works(attempt: Callable[[int], None], vram: int) -> list[int]:
    """Call ``attempt`` with ``vram``, and then with what each BudgetError names, until one works. Returns what was named."""
    named: list[int] = []
    while len(named) < 4:
        try:
            attempt(vram)
            break
        except carom.BudgetError as error:
            assert error.least_bytes > vram
            vram = error.least_bytes
            named.append(vram)
    return named


@pytest.mark.parametrize("granularity", ["block", "layer"])
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("foreign", [0, 1, 2])
def test_small_budgets_train_bit_for_bit_under_checkpoints(foreign, trains, granularity):
    """The least budget works, unless an operator uses several units at once. The error of that step names one that works."""
    model = Checkpointed(foreign).requires_grad_(trains)
    plain = copy.deepcopy(model)
    options = {
        "device": carom.SimulatedDevice(seed=foreign, timing="random"), "codec": "raw", "granularity": granularity,
        "training": "stream" if trains else None,
    }  # fmt: skip
    with pytest.raises(carom.BudgetError) as refused:
        carom.stream(model, vram=1, **options)

    def attempt(vram: int) -> None:
        with carom.stream(model, vram=vram, **options) as session:
            for seed in range(2):
                for got, want in zip(step(model, seed), step(plain, seed), strict=True):
                    assert torch.equal(got, want)
            assert session.report().vram_peak_bytes <= session.report().vram_budget_bytes

    for factor in (1, 1.6):
        named = first_that_works(attempt, int(refused.value.least_bytes * factor))
        assert len(named) <= (2 if foreign else 0)


def test_a_nested_backward_does_not_wait_for_the_pass_that_it_runs_in():
    """The backward of a reentrant checkpoint is on the stack of the outer pass. It waited 20 seconds for its views."""
    model = Checkpointed(1, reentrant=True, span=1)
    plain = copy.deepcopy(model)
    options = {"device": "cpu", "codec": "raw", "granularity": "layer", "training": "stream"}
    with pytest.raises(carom.BudgetError) as refused:
        carom.stream(model, vram=1, **options)

    def attempt(vram: int) -> None:
        with carom.stream(model, vram=vram, **options):
            assert all(map(torch.equal, step(model, 0), step(plain, 0)))

    began = time.monotonic()
    assert len(first_that_works(attempt, refused.value.least_bytes)) == 1
    assert time.monotonic() - began < 15


class Gated(nn.Module):
    """Recomputed while autograd holds the weight of ``down``, whose gradient asked for the recomputation."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Language(nn.Module):
    """Blocks as those of a Llama, a head that is larger than the layers of a block.

    A plan keeps the small norms on the device first.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Gated() for _ in range(9))
        self.head = nn.Linear(WIDTH, 3 * WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[None]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


@pytest.mark.parametrize("granularity", ["auto", "layer"])
def test_the_error_of_a_step_names_a_budget_that_works(granularity):
    model = Language()
    plain = copy.deepcopy(model)

    def attempt(vram: int) -> None:
        device = carom.SimulatedDevice()
        with carom.stream(model, vram=vram, device=device, granularity=granularity, training="stream"):
            assert all(map(torch.equal, step(model, 0), step(plain, 0)))

    with pytest.raises(carom.BudgetError) as refused:
        attempt(1)
    with pytest.raises(carom.BudgetError, match="kept by the program beyond their run") as refused_in_step:
        attempt(refused.value.least_bytes)
    attempt(refused_in_step.value.least_bytes)


class Joined(nn.Module):
    """Six layers, three of whose weights one operator takes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.linear(x, torch.cat([layer.weight for layer in self.layers[:3]]))


def test_each_named_budget_is_larger_than_the_one_that_failed_until_one_works():
    model, x = Joined().requires_grad_(False), torch.ones(2, WIDTH)
    want = model(x)

    def attempt(vram: int) -> None:
        options = {"device": carom.SimulatedDevice(), "codec": "raw", "granularity": "layer"}
        with carom.stream(model, vram=vram, **options), torch.no_grad():
            assert torch.equal(model(x), want)

    assert 1 < len(first_that_works(attempt, 1)) < 4
