"""Units of which no two wires find room to be unpacked in cross in pieces: the same bits, one transfer, no idle link."""

# mypy: disable-error-code="union-attr,arg-type"

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import carom
import pytest
import torch
from carom.core.codec.unit_decoder import RawEntry, UnitDecoder
from carom.core.device.make_engine import make_engine
from carom.core.device.simulated import SimulatedDevice, SimulatedEngine
from carom.core.device.staging import Staging
from carom.core.session import rule_planner as planner
from hypothesis import given
from hypothesis import strategies as st
from tests_harness import EVERYWHERE, SIMULATED, assert_same, place
from tests_inside import inside
from tests_models import WIDE, WideModel
from tests_models import wide_inputs as inputs
from tests_pairwise import each
from torch import nn

BLOCK = 8 * WIDE * WIDE * 2 + 8192
VRAM = 3 * BLOCK


@pytest.fixture
def one_wire(monkeypatch):
    """Staging holds one wire of a whole block."""
    sizes = planner._staging
    monkeypatch.setattr(planner, "_staging", lambda *args: sizes(*args)[-1:])


def stream(model: WideModel, device: Any, vram: int = VRAM) -> carom.Session:
    return carom.stream(model, device=device, vram=vram, codec="lossless", granularity="block")


def model_and_copy(**kinds: Any) -> tuple[WideModel, WideModel]:
    torch.manual_seed(0)
    model = WideModel(**kinds)
    return model, copy.deepcopy(model)


@each(device=EVERYWHERE, adapted=[False, True])
def test_a_unit_in_pieces_has_the_same_bits_and_is_one_transfer(device, adapted, one_wire):
    where = place(device)
    model, plain = model_and_copy(adapted=adapted)
    plain.to(where)
    with torch.set_grad_enabled(adapted), stream(model, device) as session:
        for seed in range(4):
            x = inputs(seed).to(where)
            expected, found = plain(x), model(x)
            if adapted:
                for output in (expected, found):
                    output.float().pow(2).mean().backward()
            assert_same([expected], [found])
        trained = [[p.grad for p in net.parameters() if p.requires_grad] for net in (plain, model)]
        assert_same(*trained)
        streamer, report = inside(session).streamer, session.report()
        unit = next(unit for unit in inside(session).placement.streamed if unit.packed)
        assert len(streamer.staging.pieces(unit.decoder, unit.host.numel())) > 1
        assert report.transfers_per_weight <= (2 if adapted else 1)
        assert report.wire_bytes_per_step < 0.75 * report.raw_bytes_per_step


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float8_e4m3fn], ids=str)
def test_what_packs_to_more_than_bfloat16_does_finds_room_too(dtype):
    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(
                nn.Parameter((torch.randn(512, 512) / 32).to(dtype), requires_grad=False) for _ in range(4)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for weight in self.weights:
                x = torch.tanh(x @ weight.float())
            return x

    torch.manual_seed(0)
    model = nn.Sequential(*(Held() for _ in range(12)))
    total, x = sum(p.nbytes for p in model.parameters()), torch.randn(2, 512)
    with torch.no_grad():
        expected = model(x)
        with stream(model, SIMULATED["simulated-late"], int(0.4 * total)) as session:
            assert_same([expected] * 3, [model(x) for _ in range(3)])
            streamed = inside(session).streamed
            assert streamed and all(unit.packed for unit in streamed)


@each(device=EVERYWHERE, share=[0.7, 0.1])
def test_a_wire_larger_than_its_room_crosses_in_pieces_where_its_tensors_are_not(device, share, monkeypatch):
    """Weights that pack to more than was planned for; below that, they cross as they are."""
    packed = share > 0.5
    room = planner._staging
    monkeypatch.setattr(planner, "_staging", lambda *args: [int(share * size) for size in room(*args)[-1:]])
    where = place(device)
    model, plain = model_and_copy()
    plain.to(where)
    with torch.no_grad(), stream(model, device) as session:
        for seed in range(3):
            x = inputs(seed).to(where)
            assert_same([plain(x)], [model(x)])
        units = inside(session).placement.streamed
        assert any(unit.packed for unit in units) is packed
        if packed:
            assert max(unit.host.numel() for unit in units) > inside(session).streamer.staging.nbytes


def seconds(monkeypatch: pytest.MonkeyPatch, pieces: bool) -> tuple[float, float]:
    """A step on a device that unpacks at four times the link's rate; and what the link alone takes."""
    device = SimulatedDevice(
        link_bytes_per_second=1e9, decode_bytes_per_second=4e9, copy_latency_seconds=1e-7
    )
    model, _ = model_and_copy()
    with monkeypatch.context() as patch, torch.no_grad():
        if not pieces:
            patch.setattr(Staging, "pieces", lambda self, decoder, nbytes: [])
        with stream(model, device) as session:
            for seed in range(8):
                model(inputs(seed))
            report = session.report()
    return report.step_seconds, report.wire_bytes_per_step / 1e9


def test_the_link_is_not_idle_while_a_piece_is_unpacked(one_wire, monkeypatch):
    whole, wire = seconds(monkeypatch, pieces=False)
    pieces, _ = seconds(monkeypatch, pieces=True)
    assert whole > 1.2 * wire, "unpacking did not hold the link up: the test would show nothing"
    assert pieces < wire + 0.7 * (whole - wire)


@each(where=["copy_in", "decode"], device=SIMULATED)
def test_an_interrupt_between_two_pieces_leaves_the_session_whole(device, where, one_wire, monkeypatch):
    model, plain = model_and_copy()
    with torch.no_grad(), stream(model, dataclasses.replace(device)) as session:
        model(inputs())
        call, count = getattr(SimulatedEngine, where), [0]

        def interrupted(self: Any, *args: Any, **kwargs: Any) -> Any:
            count[0] += 1
            if count[0] == 2:  # of a unit's pieces
                raise KeyboardInterrupt
            return call(self, *args, **kwargs)

        monkeypatch.setattr(SimulatedEngine, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            model(inputs(1))
        for seed in range(3):
            assert_same([plain(inputs(seed))], [model(inputs(seed))])
        assert session.report().packed_units


@given(st.lists(st.integers(1, 300), min_size=1, max_size=12), st.integers(1, 1500))
def test_pieces_hold_every_tensor_once_and_are_no_larger_than_asked_for(sizes, most):
    entries, at, out = [], 0, 0
    for size in sizes:
        entries.append(RawEntry(size, at, out))
        at, out = -(-(at + size) // 128) * 128, out + size
    decoder = UnitDecoder(entries)
    wire = torch.randint(0, 256, (decoder.wire_bytes,), dtype=torch.uint8)
    whole, parts = torch.zeros(out, dtype=torch.uint8), torch.zeros(out, dtype=torch.uint8)
    decoder(wire, whole)
    pieces = decoder.pieces(most)
    for start, end, low, high, part in pieces:
        part(wire[start:end].clone(), parts[low:high])
        assert end - start <= most or len(part.entries) == 1
    assert torch.equal(whole, parts)
    assert sum(len(piece.decoder.entries) for piece in pieces) == len(sizes)


def test_a_half_that_is_a_few_bytes_larger_than_the_one_before_it_waits_for_that_one_only():
    ring, found = Staging(make_engine("cpu"), 4096), []
    for number, nbytes in enumerate((1000, 1010, 1020, 1000)):
        piece, after = ring.take(nbytes, in_halves=True)
        ring.release_after(number)
        found.append((piece.data_ptr() - ring.memory.data_ptr(), after))
    assert found == [(0, []), (2048, []), (0, [0]), (2048, [1])]


@pytest.mark.parametrize(
    "ring, pieces", [(2048, []), (1536, [(0, 512), (512, 1024)]), (1024, [(0, 512), (512, 1024)])]
)
def test_a_wire_that_finds_room_twice_crosses_at_once(ring, pieces):
    decoder = UnitDecoder([RawEntry(512, 0, 0), RawEntry(512, 512, 512)])
    found = Staging(make_engine("cpu"), ring).pieces(decoder, 1024)
    assert [(piece.start, piece.end) for piece in found] == pieces


def test_a_tensor_that_is_half_of_the_wire_and_more_crosses_at_once():
    ring = Staging(make_engine("cpu"), 1024)
    assert ring.pieces(UnitDecoder([RawEntry(1000, 0, 0)]), 1000) == []


def test_pieces_that_nobody_knows_of_are_waited_for(monkeypatch):
    """What lands in the slot next need not be unpacked: a plain copy does not come after what is."""
    engine: Any = make_engine(SIMULATED["simulated-late"])
    ring, target = Staging(engine, 1024), engine.allocate(1024)
    decoder = UnitDecoder([RawEntry(512, 0, 0), RawEntry(512, 512, 512)])
    wire, value = torch.ones(1024, dtype=torch.uint8), torch.full((1024,), 7, dtype=torch.uint8)
    for _ in ring.bring(wire, decoder, target, [], False):
        break  # the one who asked was interrupted
    copied, _ = engine.copy_in(target, value, (), False)
    engine.wait(copied)
    engine.synchronize()
    assert torch.equal(target, value)
