"""How finely a module is carved for a budget: large blocks in parts, never at the cost of exactness or of a transfer."""

from __future__ import annotations

import copy
from functools import partial

import carom
import pytest
import tests_harness as harness
import tests_models as models
import torch
import torch._dynamo  # as `nn.Module.compile` imports it
from carom.core.common.sizes import MIB
from carom.core.model.compiling import CompiledParts
from carom.core.model.units import carve
from carom.core.plan.residency import SMALL_UNIT, UnitSize, Wish, plan_residency
from carom.core.session import rule_planner as planner
from tests_harness import EVERYWHERE, assert_same, on_simulated_devices, streamed
from tests_inside import inside
from tests_pairwise import pairwise
from torch import nn


class Large(nn.Module):
    """Two linears of 80 MiB each beside a small norm; never run."""

    def __init__(self, wide: int = 20480) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(1024)
        self.up, self.down = nn.Linear(1024, wide, bias=False), nn.Linear(wide, 1024, bias=False)


def larges(count: int, *wide: int, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Frozen, of memory that nobody writes: gigabytes of random numbers would take seconds, and nobody reads them."""
    with torch.device("meta"):
        model = nn.Sequential(*(Large(*wide) for _ in range(count))).to(dtype)
    return model.to_empty(device="cpu").requires_grad_(False)


def chosen(model: nn.Module, vram: int, granularity: str = "auto", training: str | None = None):
    compiled = CompiledParts(model).found()
    return planner.decide(
        partial(carve, model), planner.Settings(vram, granularity, training, {}, compiled=compiled), 512
    )


@pytest.fixture(scope="module")
def large() -> nn.Module:
    return larges(4)


def test_large_blocks_are_split_where_the_parts_are_still_large_copies(large):
    carving, plan = chosen(large, 300 * MIB)
    assert [unit.name for unit in carving.units if unit.nbytes > MIB] == [
        f"{block}.{part}" for block in range(4) for part in ("up", "down")
    ]
    assert all(carving.units[i].nbytes < MIB for i in plan.resident if carving.units[i].name.endswith("norm"))
    assert carving.split_bytes >= 160 * MIB


def test_backwards_that_train_others_adapters_have_slots_for_the_turns_too(large):
    alone = planner.decide(partial(carve, large), planner.Settings(600 * MIB, "auto", None, {}), 512)[1]
    through = planner.decide(
        partial(carve, large), planner.Settings(600 * MIB, "auto", None, {}, trains=True), 512
    )[1]
    assert through.region_bytes >= 3 * 160 * MIB > 2 * alone.region_bytes


@pytest.mark.parametrize(
    "budget, trains, packs, whole",
    [
        (2.9, True, True, True),  # two blocks and the wire of one
        (2.6, True, True, False),
        (2.9, True, False, False),
        (2.9, False, True, False),
    ],
)
def test_training_begins_with_whole_blocks_where_two_find_room_beside_a_packed_one(
    budget, trains, packs, whole
):
    large = larges(4, 40960, dtype=torch.bfloat16)
    large[0].norm.requires_grad_(trains)
    settings = planner.Settings(int(budget * 160 * MIB), "auto", None, {}, packs=packs)
    carving, plan = planner.decide(partial(carve, large), settings, 512)
    assert carving.largest == (160 if whole else 80) * MIB + (large[0].norm.weight.nbytes * 2 if whole else 0)
    assert plan.slots >= 2 and (plan.staging_bytes > 0) is packs


def test_no_room_to_unpack_in_is_kept_where_nothing_packs():
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False).double() for _ in range(6))).requires_grad_(False)
    plan = planner.decide(
        partial(carve, model), planner.Settings(7 * MIB, "block", None, {}, packs=True), 512
    )[1]
    assert not plan.all_resident and plan.staging_bytes == 0


def test_small_parts_stay_before_slots_are_wished_for():
    """In training slots would be three blocks' worth; a budget below that still keeps what is hardly worth a copy."""
    units = [UnitSize(f"unit {i}", (1 if i % 2 else 80) * MIB, block=not i % 2) for i in range(12)]
    plan = plan_residency(units, 200 * MIB, wish=Wish(2, 480 * MIB))
    assert set(plan.resident) == {i for i in range(12) if i % 2} and plan.slots >= 2


def test_whole_packed_blocks_take_two_slots_and_one_wire_and_the_rest_is_resident():
    wide = larges(6, 40960, dtype=torch.bfloat16)
    settings = planner.Settings(int(3.9 * 160 * MIB), "auto", None, {}, packs=True, trains=True)
    carving, plan = planner.decide(partial(carve, wide), settings, 512)
    block = carving.largest
    assert block > 128 * MIB and plan.slots == 2 and 0 < plan.staging_bytes < block
    assert any(carving.units[i].nbytes == block for i in plan.resident)


def test_small_blocks_stay_whole():
    model = models.CASES["stack"].build().requires_grad_(False)
    carving, _ = chosen(model, harness.some_vram(model, "cpu", 0.5))
    assert "blocks.0" in [unit.name for unit in carving.units] and carving.split_bytes == 0


def test_blocks_stay_whole_when_asked_and_when_compiled(large):
    carving, _ = chosen(large, 400 * MIB, granularity="block")
    assert [unit.name for unit in carving.units] == ["0", "1", "2", "3"]
    for inner in (large[0], large):
        part = copy.copy(inner)
        part._compiled_call_impl = lambda *args: None
        model = nn.Sequential(part, *large[1:]) if inner is not large else part
        carving, _ = chosen(model, 400 * MIB)
        assert [unit.name for unit in carving.units] == ["0", "1", "2", "3"]


@pytest.mark.parametrize("parts", [3, 6])
def test_what_is_compiled_stays_whole_under_any_budget(parts, monkeypatch):
    """Also where a share of it is as large as the parts of other models."""
    monkeypatch.setattr(planner, "PART", MIB)
    model = larges(12, 160)
    model._compiled_call_impl = lambda *args: None
    carving, plan = chosen(model, parts * MIB)
    assert not plan.all_resident and plan.slots >= 2 and carving.split_bytes == 0


def test_forwards_alone_are_served_by_a_block_of_slots_and_training_by_three(large):
    block = 160 * MIB
    carving, plan = chosen(large, int(3.5 * block))
    assert block <= plan.region_bytes < 1.6 * block
    try:
        large[0].norm.requires_grad_(True)  # an adapter, as good as any
        carving, plan = chosen(large, int(3.5 * block))
        assert 3 * block <= plan.region_bytes
        assert not any(carving.units[i].nbytes > SMALL_UNIT for i in plan.resident)
    finally:
        large[0].norm.requires_grad_(False)


@pytest.mark.parametrize("wish", [Wish(2, 30 * MIB), Wish(2, 45 * MIB)])
def test_a_wish_in_bytes_is_met_where_there_is_room_and_bounded_where_there_is_not(wish):
    units = [UnitSize(f"unit {i}", 10 * MIB) for i in range(12)]
    plan = plan_residency(units, 80 * MIB, wish=wish)
    assert plan.region_bytes >= wish.nbytes and plan.resident
    plan = plan_residency(units, 20 * MIB, wish=wish)
    assert plan.region_bytes == 20 * MIB and not plan.resident


# -- parts run as blocks do


@pytest.fixture
def in_parts(monkeypatch):
    """The test models' blocks count as large."""
    monkeypatch.setattr(planner, "PART", 5 << 10)


def stack(checkpoint: str, depth: int = 8) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = models.Stack(depth)
    model.checkpoint = checkpoint
    return model.requires_grad_(False)


def split_names(session) -> list[str]:
    return [unit.name for unit in inside(session).streamed if unit.name.endswith((".up", ".down"))]


@pairwise(device=EVERYWHERE, checkpoint=["none", "non-reentrant", "reentrant"], blocks=[1.2, 2, 3.4])
def test_training_in_parts_is_exact(in_parts, device, checkpoint, blocks):
    case = models.CASES["stack"]
    plain, model = stack(checkpoint), stack(checkpoint)
    plain = plain.to(harness.place(device))
    for net in (plain, model):
        net.blocks[3].norm.requires_grad_(True)
    expected = harness.train(plain, case, harness.place(device))
    with streamed(model, device, int(blocks * 9216) + 4096) as session:
        assert len(split_names(session)) > 8, "the blocks were not split: the test would show nothing"
        assert_same(expected, harness.train(model, case, harness.place(device)))


@on_simulated_devices
@pytest.mark.parametrize("checkpoint", ["none", "non-reentrant"])
def test_a_training_step_in_parts_takes_two_transfers_less_the_turns(in_parts, device, checkpoint):
    model = stack(checkpoint)
    model.head.requires_grad_(True)
    x = torch.randn(2, models.D, requires_grad=True)
    with streamed(model, device, 3 * 9216 + 4096) as session:
        units = inside(session).streamed
        largest = max(unit.nbytes for unit in units)
        everything = sum(unit.nbytes for unit in units)
        for _ in range(4):
            harness.loss_of(model(x)).backward()
        before = inside(session).engine.bytes_in
        for _ in range(4):
            harness.loss_of(model(x)).backward()
        crossed = (inside(session).engine.bytes_in - before) / 4
        # At each turn the region is full, but for less than one part that found no room.
        assert crossed <= 2 * (everything - inside(session).region_bytes + largest)


def test_parts_leave_smaller_bubbles_than_blocks(in_parts):
    """The simulated clock: half resident, where link and compute are near each other."""
    model = stack("none", depth=12)
    x = torch.randn(2, models.D)
    seconds = {}
    for granularity in ("block", "auto"):
        device = carom.SimulatedDevice(
            link_bytes_per_second=9216 / 100e-6, copy_latency_seconds=0, kernel_seconds=11e-6
        )
        with torch.no_grad(), streamed(model, device, 7 * 9216, granularity=granularity) as session:
            for _ in range(6):
                model(x)
            seconds[granularity] = session.report().step_seconds
    assert seconds["auto"] < 0.97 * seconds["block"]


class Narrow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def test_the_first_adapters_turn_a_layout_for_inference_into_one_for_training():
    """Whether adapters come before or after streaming begins, the slots are the same, and so are the transfers."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["up", "down"])

    def plan(before: bool):
        model = nn.Sequential(*(Narrow() for _ in range(12))).requires_grad_(False)
        budget = sum(p.nbytes for p in model.parameters()) // 2
        if before:
            adapted = peft.get_peft_model(model, config)
        with carom.stream(model, device="cpu", vram=budget, granularity="block") as session:
            if not before:
                first = session.plan.slots
                adapted = peft.get_peft_model(model, config)
            adapted(torch.randn(2, 64))
            assert before or session.plan.slots > first
            again = inside(session).arrangement
            adapted(torch.randn(2, 64))
            assert inside(session).arrangement is again, "once"
            return session.plan.slots, session.plan.region_bytes

    assert plan(before=True) == plan(before=False)
