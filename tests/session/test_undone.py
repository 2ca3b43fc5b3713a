"""What a session did to a module, a device and its allocator is undone: when it ends, is parked, or fails half way."""

from __future__ import annotations

import gc

import carom
import pytest
import torch
from carom.core.device.simulated import SimulatedEngine
from carom.core.host.arena import HostArena
from carom.core.placement import residents
from tests_limits import units_apart_from
from torch import nn

pytestmark = pytest.mark.timeout(60)
WIDTH = 64
X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))


class Model(nn.Module):
    def __init__(self, count: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count))
        self.register_buffer("scale", torch.ones(WIDTH))
        self.requires_grad_(False)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x * self.scale


def run(model: nn.Module):
    with torch.no_grad():
        return model(X)


BLOCK = (WIDTH * WIDTH + WIDTH) * 4


def stream(model: nn.Module, share: float = 0.5, **settings) -> carom.Session:
    vram = int(share * len(model.blocks) * BLOCK)
    return carom.stream(model, device=carom.SimulatedDevice(timing="late", **settings), vram=vram)


@pytest.fixture
def trims(monkeypatch):
    """When the allocator was told to give back what it keeps: bytes that sessions held then."""
    seen: list[int] = []
    trim = SimulatedEngine.trim
    monkeypatch.setattr(SimulatedEngine, "trim", lambda self: (seen.append(self.allocated), trim(self))[1])
    return seen


@pytest.mark.parametrize("keep", [False, True])
def test_a_parked_session_leaves_the_device_to_others(trims, keep):
    model, twin = Model(), Model()
    with stream(model) as session:
        run(model)
        trims.clear()
        session.park(keep=keep)
        assert trims and trims[-1] == 0, "what the allocator keeps of it is given back when all has left"
        assert session.report().slot_bytes == 0
        assert torch.equal(run(model), run(twin))


def test_a_parking_that_failed_on_the_host_brings_back_true_values(monkeypatch):
    units_apart_from(monkeypatch)
    model, twin = Model(), Model()
    with stream(model, 0.8) as session:  # several units stay, and are copied to the host
        run(model)
        pin, calls = HostArena.pin, [0]

        def fails_once(self, block):
            calls[0] += 1
            if calls[0] == 2:
                raise MemoryError("no luck")
            return pin(self, block)

        with monkeypatch.context() as broken:
            broken.setattr(HostArena, "pin", fails_once)
            session.park(keep=True)
        assert calls[0] >= 2 and session.report().pinned_bytes == 0, (
            "copies of half the units are worth nothing"
        )
        with torch.no_grad():
            for one in (model, twin):
                for weight in one.parameters():
                    weight.mul_(0.5)
        assert torch.equal(run(model), run(twin))


def test_weights_of_a_layout_that_failed_are_whole_and_on_the_host(monkeypatch):
    units_apart_from(monkeypatch)
    model, twin = Model(), Model()
    device = carom.SimulatedDevice(timing="late")
    session = carom.stream(model, device=device, vram=int(4.8 * BLOCK))
    run(model)
    go, calls = residents.DeviceTensors._move_off, [0]

    def fails_once(self, *args):
        calls[0] += 1
        if calls[0] == 1:
            raise MemoryError("no luck")
        return go(self, *args)

    with monkeypatch.context() as broken:
        broken.setattr(residents.DeviceTensors, "_move_off", fails_once)
        with pytest.raises(MemoryError):
            session.set_budget(vram=2 * BLOCK)
    session.close()
    del session
    gc.collect()
    assert device.ledger.allocated == 0, "weights stay in the session's memory on the device"
    assert torch.equal(run(model), run(twin))


@pytest.mark.parametrize("share", [0.4, 0.8])
def test_all_memory_of_the_device_is_given_back_when_a_session_ends(share):
    model, twin = Model(), Model()
    device = carom.SimulatedDevice(timing="random")
    with carom.stream(model, device=device, vram=int(share * 6 * BLOCK)):
        run(model)
        assert device.ledger.allocated > 0
        model.scale = model.scale * 2
        run(model)
    gc.collect()
    assert device.ledger.allocated == 0
    assert torch.equal(run(model), 2 * run(twin))


def test_a_resident_buffer_that_the_model_replaced_goes_home():
    model, twin, device = Model(), Model(), carom.SimulatedDevice()
    with carom.stream(model, device=device, vram=3 * BLOCK):
        run(model)
        assert device.holds(model.scale), "else it is no resident"
        model.scale = torch.full((WIDTH,), 2.0)
        assert torch.equal(run(model), 2 * run(twin))
        assert device.holds(model.scale)
    assert not device.holds(model.scale) and type(model.scale) is torch.Tensor
    assert torch.equal(model.scale, torch.full((WIDTH,), 2.0))


def test_hooks_of_state_dicts_and_forwards_are_gone_at_the_end():
    model = Model()
    before = {
        name: (len(m._state_dict_hooks), len(m._state_dict_pre_hooks), sorted(m.__dict__))
        for name, m in model.named_modules()
    }
    with stream(model):
        run(model)
        model.state_dict()
    after = {
        name: (len(m._state_dict_hooks), len(m._state_dict_pre_hooks), sorted(m.__dict__))
        for name, m in model.named_modules()
    }
    assert after == before


def test_a_front_that_was_stepped_before_stops_when_its_session_ends():
    """Somebody wraps a forward while attached, and leaves the wrapper there."""
    model, twin = Model(), Model()
    session = stream(model)
    run(model)
    inner, calls = model.blocks[1].forward, []

    def outer(x):
        calls.append(1)
        return inner(x)

    model.blocks[1].forward = outer
    session.close()
    assert torch.equal(run(model), run(twin)) and calls
    with stream(model):
        for _ in range(2):
            assert torch.equal(run(model), run(twin))
