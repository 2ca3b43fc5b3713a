"""A budget that is set between a forward and its backward is refused, and the graph stays whole."""

from __future__ import annotations

import carom
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.timeout(60)
X = torch.linspace(-1, 1, 64).reshape(2, 32)


class Net(nn.Module):
    def __init__(self, trains, checkpoints) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32)) for _ in range(5))
        self.head = nn.Linear(32, 32)
        self.blocks.requires_grad_(trains)
        self.checkpoints = checkpoints

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else torch.tanh(block(x))
        return self.head(x)


def size(net):
    return sum(p.nbytes for p in net.parameters())


def gradients(net, x, y):
    y.square().sum().backward()
    found = [y.detach(), x.grad, *(p.grad for p in net.parameters())]
    net.zero_grad()
    return found


def step(net):
    x = X.clone().requires_grad_()
    return gradients(net, x, net(x))


def same(found, wanted):
    return all(a is b is None or torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("shares", [(0.5, 0.4), (0.5, 2.0), (2.0, 0.5), (2.0, 3.0)])
@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("trains", [False, True])
def test_it_is_refused_and_the_backward_is_right(trains, checkpoints, shares):
    net, twin = Net(trains, checkpoints), Net(trains, checkpoints)
    wanted, whole = step(twin), size(twin)
    options = {"training": "stream" if trains else None, "device": carom.SimulatedDevice()}
    with carom.stream(net, vram=int(shares[0] * whole), **options) as session:
        for _ in range(2):
            x = X.clone().requires_grad_()
            y = net(x)
            with pytest.raises(carom.UnsupportedError, match=r"Call backward\(\) first"):
                session.set_budget(vram=int(shares[1] * whole))
            assert session.vram == int(shares[0] * whole)
            assert same(gradients(net, x, y), wanted)
        session.set_budget(vram=int(shares[1] * whole))  # the loss may live on
        assert same(step(net), wanted)


@pytest.mark.parametrize("share", [0.5, 2.0])
def test_what_no_backward_can_come_of_is_in_nobodys_way(share):
    net, twin = Net(False, False), Net(False, False)
    whole = size(net)
    with carom.stream(net, device=carom.SimulatedDevice(), vram=int(share * whole)) as session:
        with torch.no_grad():
            kept = net(X)
        session.set_budget(vram=int(0.6 * whole))
        dropped = net(X.clone().requires_grad_())
        del dropped
        session.set_budget(vram=int(share * whole))
        net(X.clone().requires_grad_())
        session.park()
        session.set_budget(vram=int(0.6 * whole))
        assert same(step(net), step(twin)) and torch.equal(kept, twin(X))


def test_it_is_refused_within_a_backward():
    net, twin = Net(False, False), Net(False, False)
    seen = []

    def hook(gradient):
        with pytest.raises(carom.UnsupportedError, match="between a forward and its backward"):
            session.set_budget(vram=size(twin) // 2)
        seen.append(True)

    with carom.stream(net, device=carom.SimulatedDevice(), vram=2 * size(twin)) as session:
        x = X.clone().requires_grad_()
        x.register_hook(hook)
        assert same(gradients(net, x, net(x)), step(twin))
    assert seen


def test_it_is_refused_while_the_graph_of_a_part_that_was_called_alone_is_open():
    net, twin = Net(False, False), Net(False, False)
    grads = []
    with carom.stream(net, device=carom.SimulatedDevice(), vram=size(twin) // 2) as session:
        for model in (net, twin):
            x = X.clone().requires_grad_()
            y = model.blocks[2](x)
            if model is net:
                with pytest.raises(carom.UnsupportedError, match=r"Call backward\(\) first"):
                    session.set_budget(vram=size(twin))
            y.square().sum().backward()
            grads.append(x.grad)
        session.set_budget(vram=size(twin))
    assert torch.equal(*grads)
