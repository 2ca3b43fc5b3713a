"""Copies from the device to the host take their time: nothing reads them before their event, and nothing needs more waits."""

from __future__ import annotations

import carom
import pytest
import torch
from carom.core.device.simulated import SimulatedEngine
from tests_inside import inside
from tests_models import WIDE, WideModel, wide_inputs
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.timeout(60)
WIDTH = 32
BLOCK = 8 * WIDE * WIDE * 2 + 8192  # bytes of a block of a WideModel
X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def late(monkeypatch):
    """A copy to the host lands when somebody waits for its event, or for everything; NaN until then."""
    copy_out, synchronize = SimulatedEngine.copy_out, SimulatedEngine.synchronize
    under_way: list[tuple[object, torch.Tensor, torch.Tensor]] = []

    def late_copy_out(self, target, source):
        event = copy_out(self, target, source)
        with self._watch.unwatched(), torch.no_grad():
            under_way.append((event, target, target.clone()))
            target.fill_(255 if target.dtype == torch.uint8 else float("nan"))
        return event

    def land(self, event=None):
        with self._watch.unwatched(), torch.no_grad():
            for one in list(under_way):
                if event is None or one[0] is event:
                    under_way.remove(one)
                    one[1].copy_(one[2])
        synchronize(self, event)

    monkeypatch.setattr(SimulatedEngine, "copy_out", late_copy_out)
    monkeypatch.setattr(SimulatedEngine, "synchronize", land)


class Block(nn.Module):
    writes = False

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        if self.writes:
            with torch.no_grad():
                self.a.weight.mul_(0.5)
        return x + self.b(F.gelu(self.a(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(5))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def budget(model: nn.Module, **settings) -> int:
    with pytest.raises(carom.BudgetError) as refused:
        carom.stream(model, device=carom.SimulatedDevice(), vram=0, **settings)
    return 2 * refused.value.least_bytes


def test_gradients_are_added_up_when_they_are_on_the_host():
    results = []
    for streams in (False, True):
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        settings = {"device": carom.SimulatedDevice(), "training": "stream"}
        session = carom.stream(model, vram=budget(model, training="stream"), **settings) if streams else None
        for _ in range(3):
            for _ in range(2):  # accumulated
                (model(X) + model(2 * X)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if session is not None:
            session.close()
        results.append([p.detach().clone() for p in model.parameters()])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


def test_what_a_forward_writes_is_read_when_it_is_on_the_host():
    model, twin = Model(), Model()
    for one in (model, twin):
        one.blocks[2].writes = True
    vram = 2 * budget(model)
    with carom.stream(model, device=carom.SimulatedDevice(), vram=vram, granularity="block"), torch.no_grad():
        for _ in range(3):
            assert torch.equal(model(X), twin(X))
    for got, want in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("timing", ["late", "early"])
def test_packed_weights_come_back_whole_at_the_end(timing):
    model, twin = WideModel(4), WideModel(4)
    twin.load_state_dict(model.state_dict())
    session = carom.stream(
        model,
        device=carom.SimulatedDevice(timing=timing),
        vram=3 * BLOCK,
        codec="lossless",
        granularity="block",
    )
    with torch.no_grad():
        assert torch.equal(model(wide_inputs()), twin(wide_inputs()))
    assert session.report().packed_units
    session.close()
    for got, want in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(got, want)


def test_packed_units_that_wait_plain_from_now_on_are_there_before_they_cross():
    """As the layout does between passes where a step's times say that unpacking costs more than it saves."""
    model, twin = WideModel(4), WideModel(4)
    twin.load_state_dict(model.state_dict())
    with torch.no_grad(), carom.stream(
        model, device=carom.SimulatedDevice(), vram=3 * BLOCK, codec="lossless", granularity="block"
    ) as session:  # fmt: skip
        assert torch.equal(model(wide_inputs()), twin(wide_inputs()))
        assert not inside(session).placement.tier.unpack(
            inside(session).streamer, inside(session).placement.streamed
        )
        for _ in range(2):
            assert torch.equal(model(wide_inputs()), twin(wide_inputs()))
