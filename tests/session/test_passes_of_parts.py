"""Work outside the root's forward, as a VAE's encode() and decode(): each call of a module below the root is a pass of its own."""

from __future__ import annotations

import copy

import carom
import pytest
import torch
from carom.core.common.sizes import MIB
from tests_inside import inside
from tests_limits import units_apart_from
from torch import nn


class Block(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Half(nn.Module):
    """An encoder or decoder. Its next forward runs out of memory if it is in FAILS."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        LOG.append(self)
        if FAILS and FAILS[0] is self:
            FAILS.pop()
            raise torch.OutOfMemoryError("injected")
        return x


LOG, FAILS = [], []


class Vae(nn.Module):
    """`nested`: the halves are modules with a forward of their own, and not lists of blocks."""

    def __init__(self, nested):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(64, 64)
        halves = [Half() if nested else nn.ModuleList(Block() for _ in range(6)) for _ in range(2)]
        self.encoder, self.decoder = halves
        self.requires_grad_(False)

    def _half(self, half, x):
        for one in half if isinstance(half, nn.ModuleList) else [half]:
            x = one(x)
        return x

    def encode(self, x):
        return self._half(self.encoder, x)

    def decode(self, x):
        return self._half(self.decoder, x)

    def forward(self, x):
        return self.decode(self.encode(x))


def size(module):
    return sum(p.numel() * p.element_size() for p in module.parameters())


X = torch.linspace(-1, 1, 128).reshape(2, 64)
NESTED = pytest.mark.parametrize("nested", [False, True], ids=["list", "module"])


def through(vae, x=X):
    return vae.decode(vae.encode(x.clone()))


@NESTED
def test_the_report_counts_work_of_methods_and_weights_are_fetched_ahead(nested):
    found, raw, seconds = {}, {}, {}
    for way in ("forward", "methods"):
        vae = Vae(nested)
        device = carom.SimulatedDevice(
            flops=2e9, link_bytes_per_second=1e9, memory_bytes=40 * size(vae), timing="late"
        )
        with torch.no_grad(), carom.stream(vae, vram=size(vae) // 3, device=device, codec="raw") as session:
            found[way] = [vae(X) if way == "forward" else through(vae) for _ in range(6)]
            report = session.report()
            assert report.steps > 0 and report.raw_bytes_per_step > 0
            assert report.step_seconds > 0
            raw[way] = report.raw_bytes_per_step
            engine = inside(session).engine
            engine.synchronize()
            seconds[way] = engine._streams["compute"].clock
    assert all(torch.equal(a, b) for a, b in zip(found["forward"], found["methods"], strict=True))
    assert seconds["methods"] <= 1.1 * seconds["forward"]
    if nested:  # a step is half of the module
        assert raw["methods"] == pytest.approx(raw["forward"] / 2, rel=0.5)


def auto(vae, share):
    """A budget that follows the device, and that changes only where a test makes it."""
    session = carom.stream(
        vae, vram="auto", device=carom.SimulatedDevice(memory_bytes=64 * MIB), granularity="block"
    )
    inside(session).governor.read = lambda *given, **named: None
    inside(session).ledger.set(int(share * size(vae)))
    inside(session).relay()
    return session


@NESTED
def test_a_budget_that_follows_memory_follows_it_at_calls_of_methods(nested):
    vae = Vae(nested)
    expected = through(vae)
    with torch.no_grad(), auto(vae, 0.7) as session:
        for _ in range(3):
            assert torch.equal(through(vae), expected)
        lower = int(0.4 * size(vae))
        inside(session).governor.read = lambda *given, **named: lower
        for _ in range(2):
            assert torch.equal(through(vae), expected)
        assert session.vram == lower
        assert inside(session).held_bytes <= lower


def test_a_part_that_ran_out_of_memory_runs_again_with_fewer_weights_on_the_device(monkeypatch):
    units_apart_from(monkeypatch)
    vae = Vae(nested=True)
    expected = through(vae)
    with torch.no_grad(), auto(vae, 1.1) as session:
        assert session.report().streamed_bytes == 0
        through(vae)
        held = inside(session).held_bytes
        FAILS.append(vae.decoder)
        LOG.clear()
        assert torch.equal(through(vae), expected)
        assert [vae.encoder, vae.decoder, vae.decoder] == LOG
        assert inside(session).held_bytes < held


@pytest.mark.parametrize("share", [0.4, 2.0], ids=["streamed", "resident"])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("called", ["encode", "encoder", "block", "up", "embed"])
def test_the_first_call_of_any_module_of_a_parked_session_moves_weights_to_the_device(share, keep, called):
    vae = Vae(nested=True)
    call = {
        "encode": lambda: vae.encode(X), "encoder": lambda: vae.encoder(X), "block": lambda: vae.decoder.blocks[2](X),
        "up": lambda: vae.decoder.blocks[2].up(X), "embed": lambda: vae.embed(X),
    }[called]  # fmt: skip
    expected, whole = call(), vae(X)
    budget = int(share * size(vae))
    with (
        torch.no_grad(),
        carom.stream(vae, vram=budget, device=carom.SimulatedDevice(), granularity="block") as session,
    ):
        for _ in range(2):
            assert torch.equal(call(), expected)
            session.park(keep=keep)
            assert session.parked
            assert torch.equal(call(), expected)
            assert not session.parked
            assert torch.equal(vae(X), whole)
        session.park()
    assert all("forward" not in vars(module) for module in vae.modules())
    assert torch.equal(call(), expected)


def test_a_copy_of_a_parked_module_is_a_plain_module():
    vae = Vae(nested=True)
    with torch.no_grad(), carom.stream(vae, vram=size(vae) // 2, device=carom.SimulatedDevice()) as session:
        expected = vae(X)
        session.park()
        twin = copy.deepcopy(vae)
        assert torch.equal(twin.decode(twin.encode(X)), expected)
        assert session.parked


def test_the_report_of_a_root_is_not_that_of_its_parts():
    vae = Vae(nested=True)
    with (
        torch.no_grad(),
        carom.stream(vae, vram=size(vae) // 3, device=carom.SimulatedDevice(), codec="raw") as session,
    ):
        for _ in range(5):
            vae(X)
        alone = session.report()
        for _ in range(5):
            vae.decoder.blocks[3](X)
            vae(X)
        both = session.report()
    assert both.raw_bytes_per_step == pytest.approx(alone.raw_bytes_per_step, rel=0.15)
    assert both.steps == 8


@pytest.mark.parametrize("timing", ["late", "random"])
def test_training_through_methods_is_exact(timing):
    found = []
    for streamed in (False, True):
        vae = Vae(nested=True)
        adapter = nn.Linear(64, 64)
        vae.embed = adapter
        session = None
        if streamed:
            device = carom.SimulatedDevice(timing=timing)
            session = carom.stream(vae, vram=size(vae) // 2, device=device, codec="raw")
        grads = []
        for _ in range(4):
            adapter.zero_grad()
            x = vae.embed(X)
            for _ in range(10):  # more passes than a step usually has forwards
                x = vae.encoder.blocks[0](vae.encoder.blocks[1](x))
            through(vae, x).square().mean().backward()
            grads += [p.grad.clone() for p in adapter.parameters()]
        found.append(grads)
        if session is not None:
            assert session.report().steps > 0
            session.close()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_compiled_code_has_no_break_at_parts_that_stay_on_the_device():
    vae = Vae(nested=True)
    with torch.no_grad(), carom.stream(vae, vram=2 * size(vae), device="cpu"):
        assert "forward" in vars(vae.encoder)
        compiled = torch.compile(lambda x: vae.encoder(x) * 2, backend="eager", fullgraph=True)
        assert torch.equal(compiled(X), vae.encoder(X) * 2)
