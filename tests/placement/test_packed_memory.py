"""Packed units where host memory runs short: nothing is half done, no value lost, and it goes on when there is some."""

# mypy: disable-error-code="union-attr,arg-type,operator,index"

from __future__ import annotations

import copy
import dataclasses
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import carom
import pytest
import torch
from carom.core.device.make_engine import make_engine
from carom.core.device.simulated import SimulatedEngine
from carom.core.host.arena import HostArena
from carom.core.placement import packed_tensor
from carom.core.placement import packer as packing
from carom.core.placement.decoder_check import DecoderCheck
from carom.core.session import settings
from tests_harness import SIMULATED, assert_same
from tests_inside import inside
from tests_models import WIDE, WideModel
from tests_models import wide_inputs as inputs
from tests_pairwise import each
from torch import nn

VRAM = 3 * (8 * WIDE * WIDE * 2 + 8192)


def model_and_copy(**kinds: Any) -> tuple[WideModel, WideModel]:
    torch.manual_seed(0)
    model = WideModel(**kinds)
    return model, copy.deepcopy(model)


@each(where=["the block", "the values", "the second value"], device=SIMULATED)
def test_a_unit_that_cannot_be_unpacked_for_want_of_memory_is_as_it_was(device, where, monkeypatch):
    model, plain = model_and_copy()
    with (
        torch.no_grad(),
        carom.stream(model, device=dataclasses.replace(device), vram=VRAM, codec="lossless") as session,
    ):
        model(inputs())
        placement = inside(session).placement
        before = [(unit, unit.block, unit.block.pinned, unit.decoder) for unit in placement.streamed]
        pinned, wire = inside(session).pinned_bytes, placement.wire_bytes
        with monkeypatch.context() as patch:
            refuse(patch, where)
            left = placement.tier.unpack(inside(session).streamer, placement.streamed)
        assert left == placement.streamed
        assert [(u, u.block, u.block.pinned, u.decoder) for u in placement.streamed] == before
        assert (inside(session).pinned_bytes, placement.wire_bytes) == (pinned, wire)
        for net in (model, plain):  # what travels as it is beside them leads where the next pass looks
            net.blocks[2].norm.weight.add_(0.5)
            net.blocks[1].up.weight.mul_(2)
        session.refresh()
        assert torch.equal(model(inputs()), plain(inputs()))
        assert placement.tier.unpack(inside(session).streamer, placement.streamed) == []
        for net in (model, plain):
            net.blocks[2].norm.weight.add_(0.5)
        assert torch.equal(model(inputs()), plain(inputs()))
        assert session.report().packed_units == 0
    assert_same(list(plain.parameters()), list(model.parameters()))


def refuse(monkeypatch: Any, where: str) -> None:
    """From now on the host has no memory for ``where``, and the device does not unpack in its stead."""
    calls = []

    def fails(*_: Any) -> Any:
        raise MemoryError("injected")

    def value(self: Any, *device: Any) -> torch.Tensor:
        calls.append(1)
        return found(self, *device) if where == "the second value" and len(calls) % 2 else fails()

    if where == "the block":
        monkeypatch.setattr(HostArena, "allocate", fails)
        return
    found = packed_tensor.PackedTensor.value
    monkeypatch.setattr(SimulatedEngine, "copy_out", fails)
    monkeypatch.setattr(packed_tensor.PackedTensor, "value", value)


def test_a_close_that_had_no_memory_for_blocks_gives_the_values_back(monkeypatch):
    model, plain = model_and_copy()
    session = carom.stream(model, device=SIMULATED["simulated-late"], vram=VRAM, codec="lossless")
    with torch.no_grad():
        model(inputs())
    refuse(monkeypatch, "the block")
    session.close()
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert_same(list(plain.parameters()), list(model.parameters()))


def test_a_close_that_ran_out_of_memory_goes_on_when_it_is_called_again(monkeypatch):
    model, plain = model_and_copy()
    session = carom.stream(model, device=SIMULATED["simulated-late"], vram=VRAM, codec="lossless")
    with torch.no_grad():
        model(inputs())
    refuse(monkeypatch, "the second value")
    monkeypatch.setattr(HostArena, "allocate", lambda *_: (_ for _ in ()).throw(MemoryError("injected")))
    with pytest.raises(MemoryError):
        session.close()
    monkeypatch.undo()
    session.close()
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert_same(list(plain.parameters()), list(model.parameters()))


def test_a_value_whose_block_cannot_be_had_is_not_half_written(monkeypatch):
    model, plain = model_and_copy()
    with (
        torch.no_grad(),
        carom.stream(model, device=SIMULATED["simulated-late"], vram=VRAM, codec="lossless") as session,
    ):
        model(inputs())
        name = inside(session).streamed[1].weights[2]
        refuse(monkeypatch, "the block")
        with pytest.raises(MemoryError):
            session.write(name, plain.get_parameter(name) * 2)
        assert torch.equal(session.read(name), plain.get_parameter(name))
        assert torch.equal(model(inputs()), plain(inputs()))
        monkeypatch.undo()
        session.write(name, plain.get_parameter(name) * 2)
        plain.get_parameter(name).mul_(2)
        assert torch.equal(model(inputs()), plain(inputs()))


def test_units_that_could_not_be_unpacked_stay_packed_in_the_layouts_to_come(monkeypatch):
    monkeypatch.setattr(settings, "packing", lambda *given: packing.Packing(auto=True))
    device = carom.SimulatedDevice(
        flops=1e9, link_bytes_per_second=1e9, copy_latency_seconds=0, kernel_seconds=1e-6,
        decode_bytes_per_second=2e9,
    )  # fmt: skip
    model, plain = model_and_copy(depth=12)
    with torch.no_grad(), carom.stream(model, device=device, vram=VRAM, codec="auto") as session:
        for seed in range(4):
            assert torch.equal(model(inputs(seed)), plain(inputs(seed)))
        packed = session.report().packed_units
        with monkeypatch.context() as patch:
            refuse(patch, "the block")
            assert not session.tune()
        assert session.report().packed_units == packed and not inside(session).packing.plain
        session.set_budget(vram=2 * VRAM)
        assert session.report().packed_units
        assert torch.equal(model(inputs()), plain(inputs()))


@pytest.mark.parametrize("parts, most", [((4, 4, 4, 4), 2), ((12, 4), 1)])
def test_tensors_come_to_the_device_one_ahead_where_two_take_no_more_than_half_a_unit_each(
    parts, most, monkeypatch
):
    """Where there is no room for units ahead; the values come in their order."""
    entries = [SimpleNamespace(nbytes=part, place=place) for place, part in enumerate(parts)]
    unit: Any = SimpleNamespace(entries=entries)
    engine: Any = make_engine("cpu")
    monkeypatch.setattr(type(engine), "unpacks", True)
    packer = packing.Packer(engine, {}, packing.Packing(), DecoderCheck(engine), 2 * sum(parts), sum(parts))
    assert not packer.moves_a_unit_ahead
    there, seen, lock = [0], [0], threading.Lock()

    def bring(entry: Any) -> int:
        with lock:
            there[0] += 1
            seen[0] = max(seen[0], there[0])
        return entry.place

    monkeypatch.setattr(packer, "move_value", bring)
    with ThreadPoolExecutor(4) as pool:
        order = []
        for value in packer.move_values_one_ahead(unit, pool):
            order.append(value)
            time.sleep(0.02)  # packing it
            with lock:
                there[0] -= 1
    assert order == list(range(len(parts))) and seen[0] == most
