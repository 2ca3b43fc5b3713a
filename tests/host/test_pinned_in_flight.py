"""Host memory is not unpinned, and not overwritten, while a copy to the device still reads it: whatever changes between passes."""

from __future__ import annotations

from types import SimpleNamespace

import carom
import pytest
import torch
from carom.core.device.simulated import SimulatedEngine
from carom.core.host.arena import Pinner
from carom.core.session.policies import host_memory
from tests_inside import inside
from tests_limits import units_apart_from
from tests_models import WIDE, WideModel, wide_inputs
from torch import nn

pytestmark = pytest.mark.timeout(60)
BLOCK = 8 * WIDE * WIDE * 2 + 8192  # bytes of a block of a WideModel


@pytest.fixture(autouse=True)
def watched(monkeypatch):
    """No memory may be unregistered before the host has waited for the last copy from it."""
    too_early: list[int] = []
    make, copy_in, synchronize = (
        SimulatedEngine.__init__,
        SimulatedEngine.copy_in,
        SimulatedEngine.synchronize,
    )

    def init(self, config):
        make(self, config)
        sizes: dict[int, int] = {}
        self.under_way = []  # number on the copy stream, where its source lies

        def register(address, size):
            sizes[address] = size

        def unregister(address):
            end = address + sizes.pop(address)
            too_early.extend(start for _, start, stop in self.under_way if address < stop and start < end)

        self.pinner = Pinner(register, unregister)

    def noted(self, target, source, after, timed):
        done, marks = copy_in(self, target, source, after, timed)
        self.under_way.append((done.seen[self._in], source.data_ptr(), source.data_ptr() + source.numel()))
        return done, marks

    def waited(self, event=None):
        reached = float("inf") if event is None else event.seen.get(self._in, 0)
        self.under_way = [copy for copy in self.under_way if copy[0] > reached]
        synchronize(self, event)

    monkeypatch.setattr(SimulatedEngine, "__init__", init)
    monkeypatch.setattr(SimulatedEngine, "copy_in", noted)
    monkeypatch.setattr(SimulatedEngine, "synchronize", waited)
    yield
    assert not too_early, "memory was unpinned while it was copied from"


def pair(depth: int = 6):
    model, twin = WideModel(depth), WideModel(depth)
    twin.load_state_dict(model.state_dict())
    return model, twin


def same(model: nn.Module, twin: nn.Module) -> bool:
    with torch.no_grad():
        return torch.equal(model(wide_inputs()), twin(wide_inputs()))


def stream(model: nn.Module, slots: int = 3, timing: str = "late", **settings) -> carom.Session:
    return carom.stream(
        model,
        device=carom.SimulatedDevice(timing=timing),
        vram=slots * BLOCK,
        granularity="block",
        **settings,
    )


@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_weights_written_and_laid_out_anew_between_passes(codec):
    model, twin = pair()
    session = stream(model, codec=codec)
    assert same(model, twin)
    pinned = session.report().pinned_bytes
    large = [(name, weight) for name, weight in twin.named_parameters() if weight.numel() >= WIDE * WIDE]
    for change, (name, weight) in enumerate(large[::4]):
        assert same(model, twin), change  # what comes next is on its way
        with torch.no_grad():
            weight.mul_(0.5)
        session.write(name, weight.detach())
        assert same(model, twin), change
    assert abs(session.report().pinned_bytes - pinned) <= BLOCK // 2, "units wait pinned as before"
    session.set_budget(vram=4 * BLOCK)
    assert same(model, twin)
    session.park()
    assert same(model, twin)
    session.close()
    assert same(model, twin)
    assert session.report().pinned_bytes >= 0 and not any(hasattr(p, "_carom") for p in model.parameters())


@pytest.mark.parametrize("timing", ["late", "early"])
def test_a_session_closed_right_after_a_pass(timing):
    model, twin = pair()
    with stream(model, timing=timing):
        assert same(model, twin)
    assert same(model, twin)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)


def test_packed_units_that_wait_plain_from_now_on():
    """As the layout does where a step's times say that unpacking costs more than it saves."""
    model, twin = pair()
    session = stream(model, codec="lossless")
    assert same(model, twin)
    placement, before = inside(session).placement, session.report()
    assert before.packed_units and before.waiting_bytes < before.streamed_bytes
    assert not placement.tier.unpack(inside(session).streamer, placement.streamed)
    after = session.report()
    assert not after.packed_units and after.waiting_bytes == after.streamed_bytes
    assert placement.wire_bytes == after.streamed_bytes, "what waits to cross is counted anew"
    for _ in range(3):  # each slot can be given up again
        assert same(model, twin)
    session.close()
    assert same(model, twin)


def test_copies_of_residents_are_no_longer_pinned_where_host_memory_is_short(monkeypatch):
    whole = host_memory.probe.host_memory()
    free = SimpleNamespace(keep=8 * BLOCK, free=64 * BLOCK, usable=whole.usable, limit=whole.limit)
    monkeypatch.setattr(host_memory, "_SECONDS", 0.0)
    monkeypatch.setattr("carom.core.session.policies.host_memory._STEPS", 0)
    monkeypatch.setattr(host_memory.probe, "host_memory", lambda: free)
    monkeypatch.setattr("carom.core.session.settings.ram_budget", lambda value, *_: 16 * BLOCK)
    units_apart_from(monkeypatch)
    model, twin = pair()
    with stream(model, codec="raw") as session:
        assert same(model, twin)
        session.set_budget(vram=5 * BLOCK)
        assert same(model, twin)  # what comes next is on its way
        pinned = session.report().pinned_bytes
        free.free = 0
        for _ in range(4):
            assert same(model, twin)
        streamed = sum(unit.block.registered_bytes for unit in inside(session).placement.streamed)
        assert streamed <= session.report().pinned_bytes < pinned
