"""What was decided before for the same place in the order and the same slots is found again, and is what would be decided anew."""

from __future__ import annotations

import random

import carom
import torch
from carom.core.placement.pinned_tier import PinnedBacking
from carom.core.streaming.streamer import Streamer
from tests_harness import SIMULATED
from tests_inside import inside
from tests_pairwise import each, pairwise
from torch import nn
from torch.utils.checkpoint import checkpoint


class Uneven(nn.Module):
    """Blocks of three sizes, so that slots may lie differently from step to step."""

    def __init__(self) -> None:
        super().__init__()
        widths = [32 * (1 + n % 3) for n in range(11)]
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, wide), nn.GELU(), nn.Linear(wide, 32)) for wide in widths
        )
        self.scale = nn.Parameter(torch.ones(32))

    def forward(self, x: torch.Tensor, order: list[int], again: bool) -> torch.Tensor:
        for n in order:
            x = x + (checkpoint(self.blocks[n], x, use_reentrant=False) if again else self.blocks[n](x))
        return x * self.scale


def fills(device, seed: int, train: bool, monkeypatch, remembers: bool):
    """Every unit that was brought, and where to, over passes that are alike for a while and then are not; the outputs; how
    many decisions were found again."""
    torch.manual_seed(0)
    model = Uneven().requires_grad_(False)
    model.scale.requires_grad_(train)
    rng, seen, outputs = random.Random(seed), [], []
    fill = Streamer.fill

    def noted(self, unit, offset, victims):
        seen.append((unit.name, offset, sorted(victim.unit.name for victim in victims)))
        return fill(self, unit, offset, victims)

    monkeypatch.setattr(Streamer, "caches_decisions", remembers)
    monkeypatch.setattr(Streamer, "fill", noted)
    with carom.stream(model, device=device, vram=34_000, granularity="block", codec="raw") as session:
        for _ in range(4):
            order = rng.sample(range(11), rng.choice([11, 11, 7]))
            for _ in range(6):
                with torch.set_grad_enabled(train):
                    output = model(torch.linspace(-1, 1, 64).view(2, 32), order, train)
                if train:
                    output.sum().backward()
                outputs.append(output.detach().clone())
        found = inside(session).streamer.prefetcher.replayed
    monkeypatch.setattr(Streamer, "fill", fill)
    return seen, outputs, found


@pairwise(device=SIMULATED, train={"inference": False, "training": True}, seed=range(3))
def test_what_is_found_again_is_what_would_be_decided_anew(seed, train, device, monkeypatch):
    anew, plain, none = fills(device, seed, train, monkeypatch, False)
    found, outputs, count = fills(device, seed, train, monkeypatch, True)
    assert found == anew and none == 0
    assert count > 40
    assert all(map(torch.equal, outputs, plain))


@each(device=SIMULATED, at=[1, 7, 23])
def test_a_use_that_ends_while_a_slot_is_filled_asks_for_nothing(at, device, monkeypatch):
    """The collector may drop a failed backward anywhere: its slots are freed, and looked ahead from, inside a copy's issue."""
    _, plain, _ = fills(device, 0, False, monkeypatch, True)
    fetch, count = PinnedBacking.fetch, [0]

    def interrupted(self, target, after, link):
        count[0] += 1
        if count[0] == at:
            self.runtime.prefetcher.prefetch()
        return fetch(self, target, after, link)

    monkeypatch.setattr(PinnedBacking, "fetch", interrupted)
    _, outputs, _ = fills(device, 0, False, monkeypatch, True)
    assert count[0] > at and all(map(torch.equal, outputs, plain))
