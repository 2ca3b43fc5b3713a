"""What is said to be held after weights gave way within a pass is what the device has."""

from __future__ import annotations

import gc

import carom
import pytest
import torch
from torch import nn

pytestmark = pytest.mark.timeout(60)
X = torch.linspace(-1, 1, 64).reshape(2, 32)


class Block(nn.Module):
    def __init__(self, look) -> None:
        super().__init__()
        self.up, self.down, self.look = nn.Linear(32, 128), nn.Linear(128, 32), look

    def forward(self, x):
        x = x + self.down(torch.relu(self.up(x)))
        self.look(self)
        return x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.short, self.seen = False, []
        self.blocks = nn.ModuleList(Block(self.look) for _ in range(8))
        self.session = None
        self.requires_grad_(False)

    def look(self, block):
        if block is self.blocks[3] and self.short:
            self.short = False
            raise torch.OutOfMemoryError("injected")
        if block in (self.blocks[5], self.blocks[2]) and self.session is not None:
            gc.collect()
            self.seen.append((self.session._held_bytes(), self.session._engine.allocated))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.blocks[2](x) * 1.0  # which may have to come back for it


def test_a_pass_that_needed_weights_to_leave_leaves_the_session_with_what_was_left(monkeypatch):
    monkeypatch.setattr("carom.core.on_device.SMALL_UNIT", 1)  # units lie apart, as those of real models do
    net = Net()
    memory = 8 * sum(p.nbytes for p in net.parameters())
    with torch.no_grad():
        expected = net(X)
        device = carom.SimulatedDevice(timing="random", memory_bytes=memory)
        with carom.stream(net, device=device, vram="auto", granularity="block") as session:
            while not session.plan.all_resident:
                net(X)
            net.session, net.short = session, True
            assert torch.equal(net(X), expected)
            assert all(said == held for said, held in net.seen), "said while weights leave and return"
            held = net.seen[1][1]
            assert held < net.seen[2][1] <= net.seen[0][1]
            assert session.report().vram_budget_bytes <= held, "what was left then is the budget"
            assert session._held_bytes() <= held
            assert torch.equal(net(X), expected)
            assert net.seen[-1] == (session._held_bytes(),) * 2
