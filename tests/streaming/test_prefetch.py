"""A schedule is made once for each order of uses, and units are fetched by it; no order of uses changes a result."""

from __future__ import annotations

import copy
import random

import carom
import torch
from carom.core.placement.pinned_tier import PinnedBacking
from carom.core.streaming import unit_schedules
from tests_harness import SIMULATED
from tests_inside import inside
from tests_pairwise import each, pairwise
from torch import nn
from torch.utils.checkpoint import checkpoint

ORDERS, PASSES = 4, 6


class Uneven(nn.Module):
    """Blocks of three sizes, so that places in the region overlap in many ways."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        widths = [32 * (1 + n % 3) for n in range(11)]
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, wide), nn.GELU(), nn.Linear(wide, 32)) for wide in widths
        )
        self.scale = nn.Parameter(torch.ones(32))

    def forward(self, x: torch.Tensor, order: list[int], again: bool) -> torch.Tensor:
        for n in order:
            x = x + (checkpoint(self.blocks[n], x, use_reentrant=False) if again else self.blocks[n](x))
        return x * self.scale


def outputs(model: nn.Module, orders: list[list[int]], train: bool) -> list[torch.Tensor]:
    """The outputs of passes that are alike for a while and then are not."""
    found = []
    for order in orders:
        for _ in range(PASSES):
            with torch.set_grad_enabled(train):
                output = model(torch.linspace(-1, 1, 64).view(2, 32), order, train)
            if train:
                output.sum().backward()
            found.append(output.detach().clone())
    return found


def streamed(device):
    model = Uneven().requires_grad_(False)
    return model, carom.stream(model, device=device, vram=34_000, granularity="block", codec="raw")


@pairwise(device=SIMULATED, train={"inference": False, "training": True}, seed=range(3))
def test_a_schedule_is_made_once_for_each_order(seed, train, device, monkeypatch):
    made, make = [], unit_schedules.schedule_in_region
    monkeypatch.setattr(unit_schedules, "schedule_in_region", lambda *a: (made.append(a[0]), make(*a))[1])
    rng = random.Random(seed)
    orders = [rng.sample(range(11), rng.choice([11, 11, 7])) for _ in range(ORDERS)]
    twin = copy.deepcopy(Uneven()).requires_grad_(False)
    twin.scale.requires_grad_(train)
    model, session = streamed(device)
    model.scale.requires_grad_(train)
    with session:
        got = outputs(model, orders * 2, train)
        assert len(made) == len(set(made)), "an order was seen before"
        again = len(made)
        got += outputs(model, orders[-1:], train)
        assert len(made) == again
        assert inside(session).streamer.follower.schedule is not None
    assert all(map(torch.equal, got, outputs(twin, orders * 2 + orders[-1:], train)))


@each(device=SIMULATED, at=[1, 7, 23])
def test_a_use_that_ends_while_a_slot_is_filled_fetches_nothing(at, device, monkeypatch):
    """The collector may drop a failed backward anywhere: its slots are freed, and fetches are due, inside a copy's issue."""
    fetch, count = PinnedBacking.fetch, [0]
    orders = [list(range(11)), list(range(10, -1, -1))]

    def interrupted(self, target, after, link):
        count[0] += 1
        if count[0] == at:
            self.runtime.run.issue_due()
        return fetch(self, target, after, link)

    monkeypatch.setattr(PinnedBacking, "fetch", interrupted)
    model, session = streamed(device)
    with session:
        got = outputs(model, orders, False)
    assert count[0] > at and all(map(torch.equal, got, outputs(Uneven(), orders, False)))
