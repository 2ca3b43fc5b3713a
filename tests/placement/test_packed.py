"""Sessions whose weights wait and cross packed: the same bits, fewer bytes, and values for who asks outside a step."""

# mypy: disable-error-code="union-attr,arg-type,operator,index"

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import carom
import pytest
import tests_harness as harness
import tests_models as models
import torch
from carom.core.codec.unit_decoder import UnitDecoder
from carom.core.common.errors import UnsupportedError
from carom.core.device.make_engine import make_engine
from carom.core.device.simulated import SimulatedEngine, SimulatedRaceError
from carom.core.device.staging import Staging
from carom.core.placement import packed_tier
from carom.core.placement import packer as packing
from carom.core.placement.decoder_check import DecoderCheck
from carom.core.session import settings
from tests_harness import EVERYWHERE, SIMULATED, assert_same, infer, on_some_devices, place, train
from tests_inside import inside
from tests_limits import pack_small_weights
from tests_models import WIDE, WideBlock, WideModel
from tests_models import wide_inputs as inputs
from tests_pairwise import each, pairwise
from torch import nn


@pytest.fixture
def small(monkeypatch):
    """Also the tests' small tensors pack, gain or not."""
    pack_small_weights(monkeypatch)


def model_and_copy(**kinds: Any) -> tuple[WideModel, WideModel]:
    torch.manual_seed(0)
    model = WideModel(**kinds)
    return model, copy.deepcopy(model)


VRAM = 3 * (8 * WIDE * WIDE * 2 + 8192)
both_hosts = each(device=EVERYWHERE, host=["auto", "raw"])


# -- the same bits


@each(name=list(models.CASES), device=EVERYWHERE)
def test_inference_is_exact(name, device, small):
    case, where = models.CASES[name], place(device)
    model = models.freeze(case.build("none"))
    expected = infer(copy.deepcopy(model).to(where), case, where)
    vram = harness.some_vram(model, device, 0.35, case.slots)
    with carom.stream(model, device=device, vram=vram, codec="lossless"):
        assert_same(expected, infer(model, case, where))


@pairwise(
    name=["stack", "heterogeneous", "tied", "attention"],
    way=["none", "non-reentrant", "reentrant"],
    device=EVERYWHERE,
)
def test_training_is_exact(name, way, device, small):
    case, where = models.CASES[name], place(device)
    model = models.freeze(case.build(way))
    expected = train(copy.deepcopy(model).to(where), case, where, steps=2)
    vram = harness.some_vram(model, device, 0.5, 3)
    with carom.stream(model, device=device, vram=vram, codec="lossless", training="resident"):
        assert_same(expected, train(model, case, where, steps=2))


@both_hosts
def test_adapters_train_to_the_same_bits_and_fewer_cross(device, host):
    where = place(device)
    model, plain = model_and_copy(adapted=True)
    plain.to(where)

    def steps(net: WideModel) -> list[torch.Tensor]:
        optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)
        for seed in range(4):
            net(inputs(seed).to(where)).float().pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().cpu().clone() for p in net.parameters() if p.requires_grad]

    expected = steps(plain)
    with carom.stream(model, device=device, vram=VRAM, codec="lossless", host=host) as session:
        assert_same(expected, steps(model))
        report = session.report()
    assert report.packed_units and report.staging_bytes
    assert report.wire_bytes_per_step < 0.75 * report.raw_bytes_per_step
    assert report.vram_peak_bytes <= VRAM
    assert report.transfers_per_weight <= 2
    assert report.decode_seconds > 0


# -- who asks outside a step


@both_hosts
def test_values_are_there_for_who_asks(device, host):
    where = place(device)
    model, plain = model_and_copy()
    objects = {name: id(p) for name, p in model.named_parameters()}
    with (
        torch.no_grad(),
        carom.stream(model, device=device, vram=VRAM, codec="lossless", host=host) as session,
    ):
        model(inputs().to(where))
        for name, value in plain.named_parameters():
            assert torch.equal(session.read(name), value)
            assert torch.equal(model.get_parameter(name).cpu(), value)
            assert (
                model.get_parameter(name).is_contiguous()
                and model.get_parameter(name).stride() == value.stride()
            )
        assert {n: id(p) for n, p in model.named_parameters()} == objects
        state = model.state_dict()
        assert all(torch.equal(state[name].cpu(), value) for name, value in plain.state_dict().items())
        twin = copy.deepcopy(model)
        assert all(
            torch.equal(a.cpu(), b) for a, b in zip(twin.parameters(), plain.parameters(), strict=True)
        )
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert {n: id(p) for n, p in model.named_parameters()} == objects
    assert_same(list(plain.parameters()), list(model.parameters()))


@both_hosts
def test_values_that_are_written_are_those_of_the_next_pass(device, host):
    where = place(device)
    model, plain = model_and_copy()
    new = torch.randn(4 * WIDE, WIDE).bfloat16()

    def change(net: WideModel) -> None:
        net.blocks[1].up.weight.copy_(new)
        net.blocks[2].up.weight.mul_(2)
        net.blocks[3].up.weight.data += 1
        net.blocks[3].down.weight.data = net.blocks[4].down.weight.data
        net.blocks[4].norm.weight.add_(0.5)
        net.load_state_dict({"blocks.5.up.weight": new}, strict=False)

    with torch.no_grad():
        change(plain)
        expected = plain.to(where)(inputs().to(where))
        with carom.stream(model, device=device, vram=VRAM, codec="lossless", host=host) as session:
            model(inputs().to(where))
            session.write("blocks.0.up.weight", new)
            session.write("blocks.0.up.weight", plain.blocks[0].up.weight.cpu())
            change(model)
            session.refresh()
            for _ in range(3):
                assert torch.equal(model(inputs().to(where)), expected)
    assert_same([p.cpu() for p in plain.parameters()], list(model.parameters()))


@on_some_devices
def test_a_model_that_writes_to_its_weights_keeps_what_it_wrote(device):
    class Writes(WideBlock):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.up.weight.mul_(0.5)
            return super().forward(x)

    where = place(device)
    torch.manual_seed(0)
    model = nn.Sequential(*(Writes() for _ in range(6))).bfloat16().requires_grad_(False)
    plain = copy.deepcopy(model).to(where)
    with torch.no_grad(), carom.stream(model, device=device, vram=VRAM, codec="lossless"):
        for seed in range(3):
            assert torch.equal(model(inputs(seed).to(where)), plain(inputs(seed).to(where)))
    assert_same([p.cpu() for p in plain.parameters()], list(model.parameters()))


def test_a_packed_weight_cannot_be_trained_and_says_what_to_do():
    model, _ = model_and_copy()
    with (
        carom.stream(model, device="cpu", vram=VRAM, codec="lossless"),
        pytest.raises(UnsupportedError, match="codec='raw'"),
    ):
        model.blocks[0].up.weight.requires_grad_(True)


# -- layouts that change


@on_some_devices
def test_other_budgets_and_parking_keep_every_bit(device):
    where = place(device)
    model, plain = model_and_copy()
    with torch.no_grad():
        expected = plain.to(where)(inputs().to(where))
        with carom.stream(model, device=device, vram=VRAM, codec="lossless") as session:
            for budget in (VRAM, int(0.8 * VRAM), 2 * VRAM, 50 * VRAM, VRAM):
                session.set_budget(vram=budget)
                assert torch.equal(model(inputs().to(where)), expected)
                assert session.report().vram_peak_bytes <= 50 * VRAM
            session.park()
            assert torch.equal(model.blocks[0].up.weight.cpu(), plain.blocks[0].up.weight.cpu())
            assert torch.equal(session.read("blocks.3.up.weight"), plain.blocks[3].up.weight.cpu())
            session.write("blocks.3.up.weight", plain.blocks[3].up.weight.cpu())
            assert torch.equal(model(inputs().to(where)), expected)
            session.park()
    assert_same([p.cpu() for p in plain.parameters()], list(model.parameters()))


def test_a_budget_without_room_to_unpack_streams_plain_bytes():
    model, plain = model_and_copy()
    with pytest.raises(carom.BudgetError) as refused:
        carom.stream(model, device="cpu", vram=0, codec="lossless")
    least = refused.value.least_bytes
    assert least is not None
    with torch.no_grad(), carom.stream(model, device="cpu", vram=least, codec="lossless") as session:
        assert torch.equal(model(inputs()), plain(inputs()))
        report = session.report()
    assert report.packed_units == 0 and report.vram_peak_bytes <= least


def test_a_session_that_fails_to_attach_leaves_the_values(monkeypatch):
    model, plain = model_and_copy()
    found = packed_tier.PackedTier._build
    calls = []

    def fails(self: Any, *args: Any) -> None:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        found(self, *args)

    monkeypatch.setattr(packed_tier.PackedTier, "_build", fails)
    with pytest.raises(KeyboardInterrupt):
        carom.stream(model, device="cpu", vram=VRAM, codec="lossless")
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert_same(list(plain.parameters()), list(model.parameters()))


def test_a_dropped_model_still_gives_its_values():
    model, plain = model_and_copy()
    session = carom.stream(model, device="cpu", vram=VRAM, codec="lossless")
    session.close(discard=True)
    assert torch.equal(model.blocks[5].up.weight, plain.blocks[5].up.weight)


def test_host_memory_holds_the_packed_bytes_only():
    model, _ = model_and_copy()
    with carom.stream(model, device=SIMULATED["simulated-late"], vram=VRAM, codec="lossless") as session:
        report = session.report()
        assert report.waiting_bytes < 0.75 * report.streamed_bytes
        assert report.pinned_bytes <= 1.1 * report.waiting_bytes + 4096 * report.units
        held = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in model.parameters()}
        assert sum(held.values()) < 0.2 * report.streamed_bytes + report.resident_bytes


def test_what_does_not_pack_crosses_as_it_is():
    model, plain = model_and_copy()
    with torch.no_grad():
        for net in (model, plain):
            generator = torch.Generator().manual_seed(1)
            for p in net.parameters():
                bits = torch.randint(-(1 << 15), 1 << 15, p.shape, generator=generator, dtype=torch.int16)
                p.copy_(torch.where(bits.view(torch.bfloat16).isfinite(), bits, 0).view(torch.bfloat16))
        with carom.stream(model, device="cpu", vram=VRAM, codec="lossless") as session:
            model(inputs())
            assert session.report().packed_units == 0
            assert_same(list(plain.parameters()), [session.read(n) for n, _ in plain.named_parameters()])


@on_some_devices
def test_weights_of_a_dtype_without_a_codec_cross_as_they_are_and_the_report_names_them(device):
    where = place(device)
    model, plain = model_and_copy()
    for net in (model, plain):
        net.double()
    plain.to(where)
    x = inputs().double().to(where)
    with torch.no_grad(), carom.stream(model, device=device, vram=4 * VRAM, codec="lossless") as session:
        assert torch.equal(model(x), plain(x))
        report = session.report()
    assert report.packed_units == 0 and report.wire_bytes_per_step == report.raw_bytes_per_step
    (note,) = report.notes
    assert "of float64" in note and "no lossless codec and cross as they are" in note
    assert note in report.table()


# -- no race


@pytest.mark.parametrize("device", SIMULATED.values(), ids=SIMULATED)
def test_staging_is_overwritten_only_after_it_was_unpacked(device, monkeypatch):
    model, _ = model_and_copy()
    monkeypatch.setattr(Staging, "release_after", lambda self, event: None)  # a missing wait
    with (
        torch.no_grad(),
        pytest.raises(SimulatedRaceError),
        carom.stream(model, device=dataclasses.replace(device), vram=VRAM, codec="lossless"),
    ):
        for _ in range(3):
            model(inputs())


def test_the_staging_memory_is_nobodys_any_more_when_the_first_copy_comes(monkeypatch):
    """What the allocator hands out may still be in use by streams that it was not told of."""
    calls: list[str] = []

    def note(name: str) -> Any:
        function = getattr(SimulatedEngine, name)
        return lambda *args, **kwargs: (calls.append(name), function(*args, **kwargs))[1]

    for name in ("allocate", "synchronize", "copy_in"):
        monkeypatch.setattr(SimulatedEngine, name, note(name))
    model, _ = model_and_copy()
    with carom.stream(model, device=carom.SimulatedDevice(), vram=VRAM, codec="lossless") as session:
        with torch.no_grad():
            model(inputs())
        assert session.report().packed_units
    until = calls.index("copy_in")
    assert "synchronize" in calls[max(i for i in range(until) if calls[i] == "allocate") : until]


def test_a_slot_is_unpacked_to_only_after_its_last_read():
    engine: Any = make_engine(SIMULATED["simulated-late"])
    memory = engine.allocate(1024)
    wire = engine.allocate(1024)
    copied, _ = engine.copy_in(wire, torch.zeros(1024, dtype=torch.uint8), (), False)
    engine.read(memory)
    with pytest.raises(SimulatedRaceError, match="overwritten"):
        engine.decode(lambda a, b: b.copy_(a), wire, memory, (copied,), False)


def test_packed_bytes_are_unpacked_only_after_their_copy():
    engine: Any = make_engine(SIMULATED["simulated-late"])
    memory, wire = engine.allocate(1024), engine.allocate(1024)
    engine.copy_in(wire, torch.zeros(1024, dtype=torch.uint8), (), False)
    with pytest.raises(SimulatedRaceError, match="brings"):
        engine.decode(lambda a, b: b.copy_(a), wire, memory, (), False)


def test_the_ring_gives_pieces_that_wait_for_what_lay_there():
    ring = Staging(make_engine("cpu"), 2048)
    taken = []
    for number, size in enumerate([1000, 1000, 512, 2048, 100]):
        piece, after = ring.take(size)
        assert piece.numel() == size
        ring.release_after(number)
        taken.append(after)
    assert taken == [[], [], [0], [0, 1, 2], [3]]


def test_what_a_piece_of_the_ring_leaves_of_an_earlier_one_keeps_its_event():
    ring = Staging(make_engine("cpu"), 2048)
    taken = []
    # piece 2 takes the begin of piece 0, and its copy waits for the event; that of piece 3 runs on another stream
    for number, size in enumerate([1536, 512, 512, 1024, 512]):
        taken.append(ring.take(size)[1])
        ring.release_after(number)
    assert taken == [[], [], [0], [0], [1]]


def test_a_decoder_that_fails_leaves_the_session_whole(monkeypatch):
    model, plain = model_and_copy()
    with (
        torch.no_grad(),
        carom.stream(model, device=SIMULATED["simulated-random"], vram=VRAM, codec="lossless") as session,
    ):
        model(inputs())
        call, failing = UnitDecoder.__call__, [True]

        def fails(self: Any, wire: torch.Tensor, out: torch.Tensor) -> None:
            if failing and out.numel():
                failing.clear()
                raise torch.OutOfMemoryError("injected")
            call(self, wire, out)

        monkeypatch.setattr(UnitDecoder, "__call__", fails)
        with pytest.raises(torch.OutOfMemoryError):
            model(inputs())
        monkeypatch.undo()
        session.set_budget(vram=VRAM)
        assert torch.equal(model(inputs()), plain(inputs()))
    assert_same(list(plain.parameters()), list(model.parameters()))


# -- what is packed, and when not


@pytest.mark.parametrize("flops,stays", [(1e9, False), (1e15, True)])
def test_an_automatic_session_unpacks_what_need_not_be_packed(flops, stays, monkeypatch):
    monkeypatch.setattr(
        settings, "packing", lambda *given: packing.Packing(auto=True)
    )  # as on a device that unpacks by itself
    device = carom.SimulatedDevice(
        flops=flops, link_bytes_per_second=1e9, copy_latency_seconds=0, kernel_seconds=1e-6,
        decode_bytes_per_second=2e9 if not stays else 1e12,
    )  # fmt: skip
    model, plain = model_and_copy(depth=8)
    with torch.no_grad(), carom.stream(model, device=device, vram=VRAM) as session:
        before = session.report().packed_units
        expected = plain(inputs())
        for _ in range(9):
            assert torch.equal(model(inputs()), expected)
        session.tune()
        assert torch.equal(model(inputs()), expected)
        after, streamed = session.report().packed_units, len(inside(session).streamed)
    assert before > 0 and streamed >= before - 1  # it may have found room for another resident
    assert after == streamed if stays else after == 0
    assert_same(list(plain.parameters()), list(model.parameters()))


@pytest.mark.parametrize(("room", "ahead"), [(4, True), (2.7, False), (2, False)])
def test_a_short_budget_is_packed_tensor_by_tensor_and_in_large_steps(room, ahead):
    """A region of two blocks leaves nothing beside three: tens of thousands of steps of 4 MiB for a model of 7 GB."""
    block = 400 << 20
    engine = make_engine(carom.SimulatedDevice())
    engine.unpacks = True
    policy, decoder_check = packing.Packing(), DecoderCheck(engine)
    packer = packing.Packer(engine, {}, policy, decoder_check, int(room * block), block)
    assert packer.moves_a_unit_ahead == ahead
    if room > 2:
        assert packer.scratch_bytes >= packing.ENOUGH_SCRATCH
    engine.unpacks = False
    assert packing.Packer(engine, {}, policy, decoder_check, int(room * block), block).moves_a_unit_ahead


def test_lossless_with_a_file_says_how_to_pack_it(tmp_path):
    with pytest.raises(UnsupportedError, match="carom pack"):
        carom.stream(WideModel(), device="cpu", weights=tmp_path / "x.safetensors", codec="lossless")


def test_a_layout_of_plain_bytes_has_the_room_for_unpacking_too(monkeypatch):
    """Where packing does not pay, ``codec="auto"`` ends where raw begins."""
    monkeypatch.setattr(settings, "packing", lambda *given: packing.Packing(auto=True))
    device = carom.SimulatedDevice(flops=1e9, link_bytes_per_second=1e9, decode_bytes_per_second=2e9)
    model, plain = model_and_copy(depth=10)
    with torch.no_grad(), carom.stream(model, device=device, vram=2 * VRAM) as session:
        expected = plain(inputs())
        staging, packed, slots = session.plan.staging_bytes, session.report().packed_units, session.plan.slots
        assert staging and packed
        inside(session).replan.at = float("inf")
        for _ in range(9):
            assert torch.equal(model(inputs()), expected)
        assert session.report().packed_units == packed
        assert session.tune()
        assert (session.plan.staging_bytes, session.report().packed_units) == (0, 0)
        assert session.plan.slots > slots or len(session.plan.resident) > 0
        for _ in range(9):
            assert torch.equal(model(inputs()), expected)
        session.tune()
        assert session.report().packed_units == 0, "laid out plain it stays"
    assert_same(list(plain.parameters()), list(model.parameters()))
