"""Units that stay on the device packed: more of them fit, nothing of them crosses, and every bit is as it was."""

# mypy: disable-error-code="union-attr,arg-type,operator,index"

from __future__ import annotations

import copy
import dataclasses
import mmap
from typing import Any

import carom
import pytest
import tests_harness as harness
import tests_models as models
import torch
from carom.core.codec.unit_decoder import RawEntry
from carom.core.device.simulated import SimulatedRaceError
from carom.core.placement import packed_residents
from carom.core.plan.predict import Link, PackedTransfer, Workload
from carom.core.plan.residency import (
    UnitSize,
    Wish,
    choose_packed,
    packed_cost,
    plan_residency,
    resident_cost,
)
from carom.core.session import measured_planner as advice
from carom.core.session.planner import Planner
from carom.core.session.session import Session
from carom.core.streaming import run
from hypothesis import given
from hypothesis import strategies as st
from tests_harness import SIMULATED, assert_same, infer, train
from tests_inside import inside
from tests_limits import pack_small_weights
from tests_models import WIDE, WideModel
from tests_models import wide_inputs as inputs
from tests_pairwise import each
from tests_schedule_cases import predicted
from torch import nn

DEVICES = {name: dataclasses.replace(device, unpacks=True) for name, device in SIMULATED.items()}
on_every_device = pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)


@pytest.fixture(autouse=True)
def also_small_units(monkeypatch):
    monkeypatch.setattr(packed_residents, "LEAST_UNIT", 1)


@pytest.fixture
def known(monkeypatch):
    """As after the first steps, where the link binds."""
    settings = Planner.settings

    def measured(self: Planner, wanted: Any) -> Any:
        packing = wanted.packing and dataclasses.replace(wanted.packing, residents=True)
        return settings(self, dataclasses.replace(wanted, packing=packing))

    monkeypatch.setattr(Planner, "settings", measured)


PAGE = mmap.PAGESIZE
BLOCK = 8 * WIDE * WIDE * 2 + 2048
VRAM = 6 * BLOCK  # two slots, two wires of staging, and what is left


def model_and_copy(depth: int = 8, **kinds: Any) -> tuple[WideModel, WideModel]:
    torch.manual_seed(0)
    model = WideModel(depth, **kinds)
    return model, copy.deepcopy(model)


def plan_says_what_stays(session: Session) -> bool:
    names = [unit.name for unit in inside(session).units]
    here = {names.index(unit.name) for unit in inside(session).streamed if unit.on_device}
    return session.plan.packed == here and (
        session.plan.packed_bytes >= inside(session).placement.tier.packed_residents.nbytes
        and bool(here) == bool(inside(session).placement.tier.packed_residents.nbytes)
    )


# -- the same bits, fewer bytes


def exact_passes(device: Any, depth: int, vram: int) -> tuple[Any, nn.Module]:
    """Four passes under ``vram`` give the plain model's bits: the report, and the plain model."""
    model, plain = model_and_copy(depth=depth)
    with torch.no_grad():
        expected = plain(inputs())
        with carom.stream(
            model, device=dataclasses.replace(device), vram=vram, codec="lossless", granularity="block"
        ) as session:
            for _ in range(4):
                assert torch.equal(model(inputs()), expected)
            report = session.report()
            assert not session.plan.resident
    assert report.vram_peak_bytes <= vram
    return report, plain


@on_every_device
def test_what_stays_packed_does_not_cross_and_more_stays(device, known):
    report, plain = exact_passes(device, 8, VRAM)
    assert report.resident_packed_units >= 2
    assert report.resident_packed_bytes < 0.75 * report.resident_packed_raw_bytes
    assert report.resident_packed_units + report.packed_units == report.units == 8
    wire = report.packed_units * report.resident_packed_bytes / report.resident_packed_units
    assert abs(report.wire_bytes_per_step - wire) < 0.02 * wire, "what stays must not cross"
    assert report.transfers_per_weight == 1
    with carom.stream(plain, device="cpu", vram=VRAM, codec="lossless", granularity="block") as session:
        assert report.resident_packed_units > len(session.plan.resident)


@on_every_device
def test_a_model_that_fits_packed_crosses_no_link(device, known):
    vram = int(16 * BLOCK * 0.74 + 4 * BLOCK)
    assert vram < 16 * BLOCK
    report, _ = exact_passes(device, 16, vram)
    assert report.resident_packed_units == 16 and report.wire_bytes_per_step == 0


@on_every_device
def test_what_lies_beside_packed_weights_is_renewed_when_they_are_unpacked(device, known):
    """Everything stays packed, so that the stream of copies has waited for nothing else."""
    model, plain = model_and_copy(20)
    vram = int(20 * BLOCK * 0.74 + 4 * BLOCK)
    with torch.no_grad(), carom.stream(
        model, device=dataclasses.replace(device), vram=vram, codec="lossless", granularity="block"
    ) as session:  # fmt: skip
        for _ in range(3):
            for net in (model, plain):
                for parameter in net.parameters():
                    if parameter.dim() == 1:
                        parameter.add_(0.5)
            assert torch.equal(model(inputs()), plain(inputs()))
        assert session.report().resident_packed_units == 20


@each(name=["stack", "heterogeneous", "tied", "attention"], device=DEVICES)
def test_inference_and_training_are_exact(name, device, monkeypatch, known):
    pack_small_weights(monkeypatch)
    monkeypatch.setattr(packed_residents, "wire_bytes", lambda unit, *rest: unit.nbytes)
    case = models.CASES[name]
    where = torch.device("cpu")
    model = models.freeze(case.build("none"))
    vram = harness.some_vram(model, dataclasses.replace(device), 0.7, case.slots)
    expected = infer(copy.deepcopy(model), case, where)
    with carom.stream(model, device=dataclasses.replace(device), vram=vram, codec="lossless"):
        assert_same(expected, infer(model, case, where))
    model = models.freeze(case.build("non-reentrant"))
    expected = train(copy.deepcopy(model), case, where)
    with carom.stream(
        model, device=dataclasses.replace(device), vram=vram, codec="lossless", training="resident"
    ):
        assert_same(expected, train(model, case, where))


@on_every_device
def test_adapters_train_to_the_same_bits(device, monkeypatch, known):
    model, plain = model_and_copy(adapted=True)

    def steps(net: WideModel) -> list[torch.Tensor]:
        optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)
        for seed in range(4):
            net(inputs(seed)).float().pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in net.parameters() if p.requires_grad]

    expected = steps(plain)
    with carom.stream(model, device=dataclasses.replace(device), vram=VRAM, codec="lossless") as session:
        assert_same(expected, steps(model))
        report = session.report()
    assert report.resident_packed_units and report.vram_peak_bytes <= VRAM
    assert report.transfers_per_weight <= 2


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("flops, packed", [(1e15, True), (1e9, False)])
def test_what_was_learnt_decides_whether_units_stay_packed(flops, packed, trained):
    """A link that binds wants as much packed as fits; where computing does, raw residents need no unpacking."""
    model, plain = model_and_copy(depth=10, adapted=trained)
    vram = 8 * BLOCK
    device = carom.SimulatedDevice(
        flops=flops, link_bytes_per_second=1e9, copy_latency_seconds=0, kernel_seconds=1e-6,
        decode_bytes_per_second=5e9, unpacks=True,
    )  # fmt: skip

    def step(net: WideModel, seed: int) -> torch.Tensor:
        with torch.set_grad_enabled(trained and packed):  # backwards take this device no time
            out = net(inputs(seed))
            if trained and packed:
                out.float().pow(2).mean().backward()
        return out.detach()

    with carom.stream(model, device=device, vram=vram, codec="lossless", granularity="block") as session:
        assert not session.plan.packed, "nothing is known yet"
        for seed in range(8):
            assert torch.equal(step(model, seed), step(plain, seed))
        session.tune()
        for seed in range(3):
            assert torch.equal(step(model, seed), step(plain, seed))
        if trained:
            gradients = [[p.grad for p in net.parameters() if p.grad is not None] for net in (plain, model)]
            assert_same(*gradients)
        report = session.report()
    assert (report.resident_packed_units > 0) == packed
    assert report.vram_peak_bytes <= vram


@each(share=[6, 8, 10], device=DEVICES)
def test_of_what_trains_and_stays_packed_only_what_trains_crosses_and_once_a_step(device, share, known):
    """LoRA weights that stream with their blocks: the optimizer changes them on the host, and nothing else of a unit."""
    model, plain = model_and_copy(depth=12, adapted=True)
    device = dataclasses.replace(
        device, flops=1e15, link_bytes_per_second=1e9, copy_latency_seconds=0, kernel_seconds=1e-6,
        decode_bytes_per_second=5e9,
    )  # fmt: skip

    def steps(net: WideModel) -> list[torch.Tensor]:
        optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)
        for seed in range(6):
            net(inputs(seed)).float().pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in net.parameters() if p.requires_grad]

    expected = steps(plain)
    with carom.stream(
        model,
        device=device,
        vram=share * BLOCK,
        codec="lossless",
        granularity="block",
        training="stream",
    ) as session:
        assert_same(expected, steps(model))
        report, streamed, learnt = (
            session.report(),
            inside(session).placement.streamed,
            inside(session).learn(),
        )
        here = [unit for unit in streamed if unit.on_device]
        assert len(here) >= 2 and all(unit.trainable for unit in here)
        beside = sum(e.nbytes for unit in here for e in unit.decoder.entries if isinstance(e, RawEntry))
        assert 0 < beside < 0.05 * sum(unit.wire_bytes for unit in here)
        assert report.vram_peak_bytes <= share * BLOCK
        assert learnt is not None and report.transfers_per_weight <= 2
        pieces = advice.pieces(inside(session).carving)
        packed = {
            index: PackedTransfer(0 if unit.on_device else unit.wire_bytes, unit.nbytes / 5e9)
            for index, unit in zip(inside(session).layout.streamed_indices(), streamed, strict=True)
        }
        found = predicted(
            [piece.nbytes for piece in pieces], session.plan.resident, session.plan.region_bytes,
            learnt.workload(pieces, advice.blocks(model)), Link(1e9, 0.0), packed=packed,
        )  # fmt: skip
        assert found.wire_bytes == pytest.approx(report.wire_bytes_per_step, rel=0.01)
        assert found.transfers == report.transfers_per_weight * (len(streamed) - len(here))
        if device.timing == "late":
            assert found.seconds == pytest.approx(report.step_seconds, rel=0.08)


@pytest.mark.parametrize("budget", [1, 1.5])
def test_a_step_with_what_stays_packed_is_predicted_as_it_is_simulated(budget):
    """What crosses packed waits for its staging buffer and for no slot: a search that thought so gave slots the residents' room."""
    model, _ = model_and_copy(depth=12)
    device = carom.SimulatedDevice(
        flops=1e15, link_bytes_per_second=1e9, copy_latency_seconds=0, kernel_seconds=1e-6,
        decode_bytes_per_second=20e9, unpacks=True,
    )  # fmt: skip
    with torch.no_grad(), carom.stream(
        model, device=device, vram=int(budget * VRAM), codec="lossless", granularity="block"
    ) as session:  # fmt: skip
        for seed in range(8):
            model(inputs(seed))
        session.tune()
        for seed in range(4):
            model(inputs(seed))
        report = session.report()
    assert 0 < report.resident_packed_units < 12 and report.wire_bytes_per_step > 0
    assert report.predicted_seconds == pytest.approx(report.step_seconds, rel=0.02)


# -- values that change, budgets that change


@each(device=DEVICES, host=["auto", "raw"])
def test_values_that_are_written_are_those_of_the_next_pass(device, host, known):
    model, plain = model_and_copy()
    new = torch.randn(4 * WIDE, WIDE).bfloat16()
    hard = torch.randint(-(1 << 14), 1 << 14, (4 * WIDE, WIDE), dtype=torch.int16).view(torch.bfloat16)

    def change(net: WideModel, value: torch.Tensor) -> None:
        for block in net.blocks:
            block.up.weight.copy_(value)
        net.blocks[2].down.weight.mul_(2)
        net.blocks[3].norm.weight.add_(0.5)

    with (
        torch.no_grad(),
        carom.stream(
            model,
            device=dataclasses.replace(device),
            vram=VRAM,
            codec="lossless",
            host=host,
            granularity="block",
        ) as session,
    ):
        assert torch.equal(model(inputs()), plain(inputs()))
        assert session.report().resident_packed_units
        for value in (new, hard, new):  # what packs, what does not and has to leave, and again
            change(plain, value)
            change(model, value)
            session.refresh()
            for _ in range(3):
                assert torch.equal(model(inputs()).view(torch.int16), plain(inputs()).view(torch.int16))
            assert session.report().vram_peak_bytes <= VRAM
            assert plan_says_what_stays(session)
    assert_same(list(plain.parameters()), list(model.parameters()))


@on_every_device
def test_other_budgets_and_parking_keep_every_bit_and_give_the_memory_back(device, known):
    model, plain = model_and_copy()
    device = dataclasses.replace(device)
    with torch.no_grad():
        expected = plain(inputs())
        with carom.stream(model, device=device, vram=VRAM, codec="lossless") as session:
            for budget in (VRAM, int(0.8 * VRAM), int(1.2 * VRAM), 50 * VRAM, VRAM):
                session.set_budget(vram=budget)
                assert torch.equal(model(inputs()), expected)
                assert inside(session).held_bytes <= budget
            assert session.report().resident_packed_units
            session.park(keep=True)
            assert inside(session).engine.allocated == 0
            assert torch.equal(session.read("blocks.3.up.weight"), plain.blocks[3].up.weight)
            assert torch.equal(model(inputs()), expected)
    assert inside(session).engine.allocated == 0
    assert_same(list(plain.parameters()), list(model.parameters()))


def test_weights_that_pack_less_than_expected_stay_as_they_are(known):
    model, plain = model_and_copy()
    with torch.no_grad():
        for net in (model, plain):
            generator = torch.Generator().manual_seed(1)
            for p in net.parameters():
                bits = torch.randint(-(1 << 15), 1 << 15, p.shape, generator=generator, dtype=torch.int16)
                p.copy_(torch.where(bits.view(torch.bfloat16).isfinite(), bits, 0).view(torch.bfloat16))
        device = carom.SimulatedDevice(unpacks=True)
        with carom.stream(model, device=device, vram=VRAM, codec="lossless") as session:
            found = model(inputs())
            assert torch.equal(found.view(torch.int16), plain(inputs()).view(torch.int16))
            report = session.report()
    assert report.resident_packed_units == 0 and report.resident_by_choice
    assert report.resident_bytes > 2 * BLOCK, "the room is used"
    assert_same(list(plain.parameters()), list(model.parameters()))


# -- no race


@on_every_device
def test_a_unit_is_unpacked_only_after_its_slot_was_read(device, monkeypatch, known):
    model, _ = model_and_copy()

    def forgets(self: Any, decoder: Any, wire: Any, target: Any, after: Any, timed: bool) -> Any:
        return found(self, decoder, wire, target, (), timed)

    engine = type(inside(carom.stream(WideModel(), device=dataclasses.replace(device), vram=VRAM)).engine)
    found = engine.decode
    monkeypatch.setattr(engine, "decode", forgets)
    with (
        torch.no_grad(),
        pytest.raises(SimulatedRaceError),
        carom.stream(model, device=dataclasses.replace(device), vram=VRAM, codec="lossless"),
    ):
        for _ in range(3):
            model(inputs())


@pytest.mark.parametrize("timing", ["late", "early", "random"])
def test_units_that_cross_raw_share_slots_with_what_is_unpacked(timing, known):
    """As where host memory was short: a copy that nobody waited for may still be on its way when its place is given to
    what is unpacked there."""
    model, plain = model_and_copy()
    device = carom.SimulatedDevice(
        flops=2.5e9, link_bytes_per_second=1e9, copy_latency_seconds=0, kernel_seconds=1e-6, timing=timing, seed=3,
        decode_bytes_per_second=1.6e10, unpacks=True,
    )  # fmt: skip
    with (
        torch.no_grad(),
        carom.stream(model, device=device, vram=int(0.96 * VRAM), codec="lossless") as session,
    ):
        model(inputs())
        assert not inside(session).placement.tier.unpack(
            inside(session).streamer, inside(session).placement.streamed[::2]
        )
        for seed in range(16):
            assert torch.equal(model(inputs(seed)), plain(inputs(seed)))
        assert any(not unit.packed for unit in inside(session).streamed)


# -- the plan

MIB = 1 << 20
uneven = st.lists(st.integers(8, 200), min_size=2, max_size=24)
even = st.tuples(st.integers(8, 200), st.integers(2, 24)).map(lambda both: [both[0]] * both[1])


@given(uneven | even, st.floats(0.3, 1.2), st.floats(0.5, 0.9))
def test_a_plan_with_packed_units_keeps_its_budget_and_keeps_more(sizes, share, ratio):
    units = [UnitSize(str(i), size * MIB, packed=int(ratio * size * MIB)) for i, size in enumerate(sizes)]
    budget = int(share * sum(unit.nbytes for unit in units))
    try:
        raw = plan_residency(units, budget, wish=Wish(2))
    except carom.BudgetError:
        return
    plan = plan_residency(units, budget, wish=Wish(2), packed=True)
    assert plan == plan_residency(units, budget, wish=Wish(2), packed=True)
    assert not plan.packed & plan.resident.keys()
    assert plan.packed_bytes == packed_cost(units[i].packed for i in plan.packed)
    spent = resident_cost([units[i].nbytes for i in plan.resident]) + plan.packed_bytes
    assert spent + plan.region_bytes <= budget
    if raw.all_resident:
        assert plan == raw
        return
    assert plan.region_bytes >= max(units[i].nbytes for i in range(len(units)) if i not in plan.resident)
    if (
        len(set(sizes)) == 1
    ):  # else a large unit that stays raw may spare more of the region than packing gains
        kept = len(plan.resident) + len(plan.packed)
        assert kept >= len(raw.resident) - 1


@given(st.lists(st.integers(0, 90), max_size=12), st.sets(st.integers(0, 11)), st.integers(0, 400))
def test_what_stays_packed_fits_the_room_and_nothing_more_would(wires, first, room):
    sizes = [wire * MIB for wire in wires]
    chosen = choose_packed(sizes, {i for i in first if i < len(sizes)}, room * MIB)
    left = room * MIB - packed_cost(sizes[i] for i in chosen)
    assert left >= 0 and all(sizes[i] > 0 for i in chosen)
    assert all(packed_cost([size]) > left for i, size in enumerate(sizes) if size and i not in chosen)


def _work(count: int, seconds: float) -> Workload:
    return Workload(tuple(range(count)), (seconds,) * count)


def test_a_unit_that_stays_packed_takes_the_link_no_time():
    sizes, work, link = [100 * MIB] * 4, _work(4, 1e-3), Link(10e9)
    here = dict.fromkeys(range(4), PackedTransfer(0, 1e-4))
    step = predicted(sizes, (), 2 * sizes[0], work, link, packed=here)
    assert (step.wire_bytes, step.transfers) == (0, 0)
    assert step.seconds == pytest.approx(4 * (1e-3 + 1e-4), rel=0.01), "unpacking slows the kernels beside it"
    some = predicted(sizes, (), 2 * sizes[0], work, link, packed={0: here[0], 2: here[2]})
    assert some.wire_bytes == 2 * sizes[0] and some.seconds == pytest.approx(
        2 * link.seconds(sizes[0]), rel=0.1
    )


@each(device=DEVICES, fails={"device unpacks": False, "device cannot be asked": True})
def test_what_stays_packed_and_comes_to_cross_as_it_is_leaves_the_device(device, fails, monkeypatch, known):
    """Unpacked on the device, or on the host where that fails: the same bits, and no packed copy is left there."""
    model, plain = model_and_copy()
    with torch.no_grad():
        expected = plain(inputs())
        with carom.stream(
            model, device=dataclasses.replace(device), vram=VRAM, codec="lossless", granularity="block"
        ) as session:
            assert torch.equal(model(inputs()), expected)
            assert session.report().resident_packed_units >= 2
            with monkeypatch.context() as patch:
                if fails:
                    patch.setattr(run.Run, "acquire", _refuses)
                inside(session).placement.tier.unpack(
                    inside(session).streamer, inside(session).placement.streamed
                )
            report = session.report()
            assert (report.resident_packed_units, report.packed_units) == (0, 0)
            assert plan_says_what_stays(session)
            assert report.waiting_bytes == report.streamed_bytes
            for _ in range(2):
                assert torch.equal(model(inputs()), expected)
    assert_same(list(model.state_dict().values()), list(plain.state_dict().values()))


def test_units_that_come_to_cross_as_they_are_are_never_pinned_both_ways():
    """Of a budget that the plain bytes just fill, packed blocks would take two thirds beside them: all would be pageable."""
    model, plain = model_and_copy()
    device = carom.SimulatedDevice(seed=7)
    with torch.no_grad():
        expected = plain(inputs())
        with carom.stream(model, device=device, vram=VRAM, codec="lossless", granularity="block") as session:
            placement = inside(session).placement
            packed = placement.wire_bytes
            pages = sum(-(-unit.nbytes // PAGE) * PAGE for unit in placement.streamed)
            inside(session).arena._limit = pages
            placement.tier.unpack(inside(session).streamer, placement.streamed)
            report = session.report()
            assert torch.equal(model(inputs()), expected)
    assert packed < 0.8 * report.pinned_bytes
    assert report.pinned_bytes <= report.pinned_peak_bytes <= pages
    assert report.pageable_bytes == 0 and not any("RAM budget" in note for note in report.notes)


def _refuses(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("no device")


def test_residents_that_pack_less_than_expected_stay_as_they_are():
    """What the first steps taught asks for packed units; the weights that stayed do not pack: a layout without any."""
    model, _ = model_and_copy(depth=10)
    generator = torch.Generator().manual_seed(1)
    device = carom.SimulatedDevice(
        flops=1e15, link_bytes_per_second=1e9, copy_latency_seconds=0, kernel_seconds=1e-6,
        decode_bytes_per_second=5e9, unpacks=True,
    )  # fmt: skip
    asked: dict[str, Any] = {"vram": 8 * BLOCK, "codec": "lossless", "granularity": "block"}
    with carom.stream(copy.deepcopy(model), device=dataclasses.replace(device), **asked) as session:
        stays = inside(session).resident_names
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.rsplit(".", 2)[0] in stays and weight.dim() == 2:
                bits = torch.randint(
                    -(1 << 15), 1 << 15, weight.shape, generator=generator, dtype=torch.int16
                )
                weight.copy_(torch.where(bits.view(torch.bfloat16).isfinite(), bits, 0).view(torch.bfloat16))
    plain = copy.deepcopy(model)
    with torch.no_grad(), carom.stream(model, device=device, **asked) as session:
        for seed in range(11):
            if seed == 8:
                session.tune()
            bits, expected = (net(inputs(seed)).view(torch.int16) for net in (model, plain))
            assert torch.equal(bits, expected)
        assert session.report().resident_packed_units == 0
        assert not inside(session).packing.stay_on_device, "it was tried"


@pytest.mark.parametrize("codec", ["lossless", "raw"])
def test_the_region_is_given_back_after_training(codec):
    """What is due after a backward must not keep the region."""
    model, _ = model_and_copy(adapted=True)
    with carom.stream(
        model, device=carom.SimulatedDevice(unpacks=True), vram=VRAM, codec=codec, granularity="block"
    ) as session:
        for seed in range(3):
            model(inputs(seed)).float().pow(2).mean().backward()
        session.park()
        assert inside(session).engine.allocated == 0
        model(inputs()).float().pow(2).mean().backward()
    assert inside(session).engine.allocated == 0


@each(device=DEVICES, way=["in place", "write", "refresh"])
def test_plain_tensors_beside_packed_ones_are_used_as_they_were_last_written(device, way, known):
    """A norm's weight lies in the unit's block as it is: no wire on the device may go on with what it was."""
    model, plain = model_and_copy()
    with (
        torch.no_grad(),
        carom.stream(
            model, device=dataclasses.replace(device), vram=VRAM, codec="lossless", granularity="block"
        ) as session,
    ):
        for value in (1.5, 0.5):
            assert torch.equal(model(inputs()), plain(inputs()))
            assert session.report().resident_packed_units >= 2
            for index, (block, other) in enumerate(zip(model.blocks, plain.blocks, strict=True)):
                other.norm.weight.fill_(value)
                if way == "in place":
                    block.norm.weight.fill_(value)
                elif way == "write":
                    session.write(f"blocks.{index}.norm.weight", other.norm.weight)
                else:
                    block.norm.weight.data.fill_(value)
            if way == "refresh":
                session.refresh()
            for _ in range(3):
                assert torch.equal(model(inputs()), plain(inputs()))
    assert_same(list(plain.parameters()), list(model.parameters()))


@on_every_device
def test_streamed_weights_that_train_beside_packed_ones_are_the_optimizer_s(device, known):
    model, plain = model_and_copy()
    for block in (*model.blocks, *plain.blocks):
        block.norm.requires_grad_(True)
        block.up.bias.requires_grad_(True)
    with carom.stream(
        model,
        device=dataclasses.replace(device),
        vram=VRAM,
        codec="lossless",
        granularity="block",
        training="stream",
    ) as session:
        optimizers = [
            torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.5)
            for net in (model, plain)
        ]
        for seed in range(4):
            found = []
            for net, optimizer in zip((model, plain), optimizers, strict=True):
                found.append(net(inputs(seed)))
                found[-1].float().pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            assert torch.equal(*found)
        assert session.report().resident_packed_units


@on_every_device
def test_a_budget_may_fall_after_a_return_of_what_was_put_aside(device):
    """Residents were put aside as they were. Some of them are packed when the budget falls."""
    model, plain = model_and_copy()
    with torch.no_grad(), carom.stream(
        model, device=dataclasses.replace(device), vram=9 * BLOCK, codec="lossless", granularity="block"
    ) as session:  # fmt: skip
        session.park(keep=True)
        for share in (9, 7, 6):
            session.set_budget(vram=share * BLOCK)
            assert torch.equal(model(inputs()), plain(inputs()))
