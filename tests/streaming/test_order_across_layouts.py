"""The learnt order of use outlives a layout: the first pass after a change fetches no more than a steady one."""

from __future__ import annotations

import carom
import pytest
import safetensors.torch
import torch
from carom.core.plan.learnt_order import LearntOrder
from tests_inside import inside
from tests_limits import units_apart_from
from torch import nn

WIDTH, DEPTH = 160, 6
X = torch.linspace(-1, 1, 2 * WIDTH).reshape(2, WIDTH)


class Interleaved(nn.Module):
    """Two streams, as the double blocks of Flux: registered one after the other, used in turns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.texts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.images = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.requires_grad_(False)

    def forward(self, x):
        x = self.first(x)
        for image, text in zip(self.images, self.texts, strict=True):
            x = text(torch.tanh(image(x))) + x
        return self.last(x)


UNIT = sum(t.nbytes for t in nn.Linear(WIDTH, WIDTH).parameters()) + 1024
UNITS = 2 * DEPTH + 2


def stream(net, slots: float, **options):
    return carom.stream(
        net,
        device=carom.SimulatedDevice(),
        vram=int(slots * UNIT),
        codec="raw",
        granularity="layer",
        **options,
    )


def copies(session, net) -> int:
    before = inside(session).engine.copies
    with torch.no_grad():
        net(X)
    return inside(session).engine.copies - before


def most(session) -> int:
    """The units that a pass uses, and those of the next one that it may fetch ahead."""
    return len(inside(session).streamed) + session.plan.slots


@pytest.fixture(autouse=True)
def every_unit_alone(monkeypatch):
    units_apart_from(monkeypatch)
    monkeypatch.setattr("carom.core.session.rule_planner.SMALL_UNIT", 1)


def surprises(session) -> int:
    return inside(session).surprises


def test_the_first_pass_after_a_park_uses_the_order_that_was_learnt():
    net = Interleaved()
    expected = net(X)
    with stream(net, 4) as session:
        assert len(inside(session).streamed) >= DEPTH
        for _ in range(3):
            copies(session, net)
        steady = copies(session, net)
        for keep in (True, False):
            session.park(keep=keep)
            session.unpark()
            assert copies(session, net) <= min(steady + session.plan.slots, most(session))
            assert surprises(session) == 0
            assert copies(session, net) <= steady
        assert torch.equal(net(X), expected)


@pytest.mark.parametrize("slots", [(10, 4), (4, 10), (8, 3.2, 12, 5)])
def test_the_first_pass_after_another_budget_uses_the_order_that_was_learnt(slots):
    """Whatever streams now and stayed before: its place was recorded in the first pass."""
    net = Interleaved()
    with stream(net, slots[0]) as session:
        copies(session, net)
        for budget in slots[1:]:
            session.set_budget(vram=int(budget * UNIT))
            first = copies(session, net)
            assert surprises(session) == 0 and first <= most(session)
            copies(session, net)
            assert copies(session, net) >= first - session.plan.slots


def test_a_model_that_was_wholly_resident_streams_in_the_right_order_at_once():
    net = Interleaved()
    with stream(net, 2 * UNITS) as session:
        assert session.plan.all_resident
        net(X)
        assert all("forward" not in module.__dict__ for module in net.texts), "wrapped for one pass"
        session.set_budget(vram=int(4 * UNIT))
        assert copies(session, net) <= most(session) and surprises(session) == 0


def test_the_next_session_of_the_model_knows_the_order():
    net = Interleaved()
    with stream(net, 4) as session:
        net(X)
    with stream(net, 5) as session:
        assert copies(session, net) <= most(session) and surprises(session) == 0


def test_the_first_pass_after_a_park_reads_each_weight_once_where_ram_is_bounded(tmp_path):
    net = Interleaved()
    safetensors.torch.save_file(net.state_dict(), tmp_path / "w.safetensors")
    expected = net(X)
    with stream(net, 4, ram=5 * UNIT, weights=tmp_path / "w.safetensors") as session:
        for _ in range(3):
            net(X)
        session.park()
        session.unpark()
        assert torch.equal(net(X), expected)
        assert surprises(session) == 0


def test_a_training_step_after_a_park_is_foreseen_in_both_directions():
    net = Interleaved()
    x = X.clone().requires_grad_()
    with stream(net, 4) as session:
        for _ in range(2):
            net(x).sum().backward()
        session.park()
        net(x).sum().backward()
        assert surprises(session) == 0


def order(*uses) -> LearntOrder:
    return LearntOrder(tuple((tuple(names), 0) for names in uses))


def test_units_of_another_division_follow_the_order_of_their_tensors():
    known = order("ab", "ef", "cd")
    assert known.positions([("a", "b"), ("c", "d"), ("e", "f")]) == [(0, 0), (2, 0), (1, 0)]
    assert known.positions([("a",), ("b",), ("c", "d", "e", "f")]) == [(0, 0), (1, 0), (2, 0)]
    assert known.positions([("c", "d"), ("x",), ("a", "b"), ("y",)]) == [(2, 0), (3, 0), (0, 0), (1, 0)]
    assert known.positions([("x",), ("a", "b")]) == [(0, 0), (1, 0)]
    assert order().positions([("x",), ("y",)]) == [(0, 0), (1, 0)]


def test_what_only_the_older_order_knows_keeps_its_neighbour():
    newer = LearntOrder(((("a",), 0), (("c",), 0), (("c",), 2), (("a",), 2)))
    merged = newer.with_others(order("x", "a", "bc", "d"))
    assert merged.uses == (
        (("x",), 0),
        (("a",), 0),
        (("c",), 0),
        (("b",), 0),
        (("d",), 0),
        (("c",), 2),
        (("a",), 2),
    )
    assert newer.with_others(order("c", "a")) is newer
