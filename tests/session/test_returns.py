"""A switch: a session is parked and returns to the layout that was there before. What crosses and what is planned,
counted."""

from __future__ import annotations

import carom
import pytest
import torch
from carom.core.session import rule_planner
from torch import nn

WIDTH = 192
CODECS = ["raw", "lossless"]
X = torch.linspace(-1, 1, 2 * WIDTH).reshape(2, WIDTH).to(torch.bfloat16)


class Net(nn.Module):
    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(depth)
        )
        self.to(torch.bfloat16).requires_grad_(False)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def size(net):
    return sum(p.numel() * p.element_size() for p in net.parameters())


def run(net):
    with torch.no_grad():
        return net(X)


def streamed(net, share, codec="raw", **options):
    options = {"device": carom.SimulatedDevice(), "granularity": "layer"} | options
    return carom.stream(net, vram=int(share * size(net)), codec=codec, **options)


@pytest.fixture
def plans(monkeypatch):
    """The plans that were made by the rule, each with a division of the module into units."""
    made: list[object] = []
    decide = rule_planner.decide
    monkeypatch.setattr(rule_planner, "decide", lambda *a: (made.append(1), decide(*a))[1])
    return made


@pytest.mark.parametrize("codec", CODECS)
def test_a_return_to_a_layout_that_was_there_before_plans_nothing(plans, codec):
    net = Net()
    expected = run(net)
    with streamed(net, 0.7, codec) as session:
        plan = session.plan
        for keep in (True, False):
            plans.clear()
            session.park(keep=keep)
            session.set_budget(vram=int(0.7 * size(net)))
            session.unpark()
            assert not plans and session.plan.resident == plan.resident
            assert torch.equal(run(net), expected)
        session.set_budget(vram=int(0.5 * size(net)))
        fallen = session.plan.resident
        session.park(keep=True)
        plans.clear()
        session.set_budget(vram=int(0.5 * size(net)))
        session.unpark()
        assert not plans and session.plan.resident == fallen, "the residents that a fall of the budget left"
        assert torch.equal(run(net), expected)


@pytest.mark.parametrize("change", ["weight", "module", "strides", "gradient"])
def test_a_module_that_changed_meanwhile_is_planned_anew(plans, change):
    net = Net()
    with streamed(net, 0.7) as session:
        run(net)
        session.park(keep=True)
        plans.clear()
        linear = net.blocks[2][0]
        if change == "weight":
            linear.weight = nn.Parameter(torch.zeros_like(linear.weight), requires_grad=False)
        elif change == "module":
            net.blocks.append(nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16).requires_grad_(False))
        elif change == "strides":
            linear.weight.data = linear.weight.data.t().contiguous().t()
        else:
            linear.weight.requires_grad_(True)
        expected = run(net)
        assert plans and not session.parked
    assert torch.equal(run(net), expected)
