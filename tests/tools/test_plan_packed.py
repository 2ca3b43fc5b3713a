"""`carom plan` with layers that stay on the card packed: within the budget, never slower, and what the engine's own model says."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from carom.cli.main import main
from carom.core.common.errors import BudgetError
from carom.core.plan.predict import Link, PackedTransfer, Workload
from carom.core.plan.residency import SMALL_UNIT, UnitSize, Wish, plan_residency
from carom.tools.planner import cost_model, estimate, model_plan, placement, presets
from carom.tools.planner.estimate import Job, Machine
from carom.tools.planner.shapes import Group, Shape
from hypothesis import given, settings
from hypothesis import strategies as st
from tests_schedule_cases import predicted

CARD = presets.CARDS["rtx4090-note"]
LAYERS, PARAMS = 40, 143 << 20  # a layer of 286 MiB: slots of it lie on boundaries
LOSSLESS = Job(codec="lossless", rank=1)


def shape_of(*groups: Group) -> Shape:
    return Shape("s", "S", "drawn", "diffusion", groups, 1, 1024, "sample")


EQUAL = shape_of(Group("layer", LAYERS, PARAMS, PARAMS))


def machine(vram: float, **changes) -> Machine:
    """A card whose host issues work in no time."""
    return Machine(replace(CARD, vram=int(vram)), host_cost=presets.HostCost(0.0, 0.0, ""), **changes)


@st.composite
def shapes_of_several_sizes(draw):
    groups = []
    for number in range(draw(st.integers(1, 4))):
        params = draw(st.integers(1_000, 300_000_000))
        stored = draw(st.sampled_from([None, None, params]))  # 8 bits a parameter do not pack
        groups.append(
            Group(f"g{number}", draw(st.integers(1, 12)), params, draw(st.integers(1, params)), live_width=512,
                  saved_width=2048, adapter_width=1024, repeated=number == 0 or draw(st.booleans()), stored_bytes=stored)
        )  # fmt: skip
    return shape_of(*groups)


# -- placements


@settings(max_examples=200)
@given(shapes_of_several_sizes(), st.integers(0, int(20e9)))
def test_what_stays_packed_keeps_the_budget_and_every_byte_is_counted_once(shape, budget):
    size = [group.bytes_in(None) for group in shape.groups]
    wire = [placement.wire_bytes(group, LOSSLESS) for group in shape.groups]
    for found in placement.packed_placements(shape, LOSSLESS, budget):
        assert found.resident_bytes + found.slot_bytes <= budget
        raw = [n - k for n, k in zip(found.resident, found.packed, strict=True)]
        streams = [group.count - n for group, n in zip(shape.groups, found.resident, strict=True)]
        assert min(*raw, *found.packed, *streams) >= 0 < found.packed_units
        assert found.packed_bytes == sum(k * w for k, w in zip(found.packed, wire, strict=True))
        assert found.packed_raw == sum(k * s for k, s in zip(found.packed, size, strict=True))
        assert found.resident_bytes == found.packed_bytes + sum(n * s for n, s in zip(raw, size, strict=True))
        assert found.streamed_wire == sum(n * w for n, w in zip(streams, wire, strict=True))
        for index, group in enumerate(shape.groups):
            if found.packed[index]:
                assert wire[index] < size[index] >= SMALL_UNIT, group
            if (
                found.packed[index] or streams[index]
            ):  # passes through the slots, and what is packed through a staging buffer
                assert found.slot_bytes >= estimate.SLOTS * size[index]


def tried(shape, on, job, tokens):
    try:
        return estimate.evaluate(shape, on, job, tokens)
    except BudgetError:
        return None


@settings(max_examples=150)
@given(
    shapes_of_several_sizes(),
    st.sampled_from(["infer", "train"]),
    st.integers(int(1e9), int(30e9)),
    st.integers(0, int(10e9)),
    st.integers(1, 1 << 14),
)
def test_a_plan_is_never_slower_than_the_one_without_and_more_vram_never_makes_it_worse(
    shape, mode, vram, more, tokens
):
    job = replace(LOSSLESS, mode=mode)
    found = tried(shape, machine(vram), job, tokens)
    if found is None:
        return
    assert found.vram.total <= vram
    use = estimate.reserved_vram(shape, job, tokens)
    for codec in ("lossless", "raw"):
        plain = placement.place(shape, replace(job, codec=codec), vram - use.total)
        if plain is not None:
            work = estimate.work_of(shape, machine(vram), replace(job, codec=codec), plain, tokens)
            step = cost_model.step_time(
                tokens, work, machine(vram).rates(shape, replace(job, codec=codec)), mode
            )
            assert found.step.seconds <= step.seconds
    larger = tried(shape, machine(vram + more), job, tokens)
    if all(group.stored_bytes is None for group in shape.groups):
        assert larger.step.seconds <= found.step.seconds * (1 + 1e-6)


def test_the_copies_of_what_stays_packed_fit_into_ram_and_a_drive_s_weights_never_stay_so():
    few = 64
    wire = placement.wire_bytes(EQUAL.groups[0], LOSSLESS)
    free = estimate.evaluate(EQUAL, machine(8e9), LOSSLESS, few)
    assert free.placement.packed_units and free.placement.host_bytes == LAYERS * wire
    before = free
    for layers in (LAYERS, LAYERS - 1, LAYERS - 8, LAYERS - 16):
        found = estimate.evaluate(EQUAL, machine(8e9, ram_usable=layers * wire), LOSSLESS, few)
        assert found.placement.host_bytes <= layers * wire
        assert found.step.seconds >= before.step.seconds
        before = found
    assert before.placement.packed_units < free.placement.packed_units
    assert not estimate.evaluate(EQUAL, machine(8e9, disk=7e9), LOSSLESS, few).placement.packed_units
    assert not estimate.evaluate(
        EQUAL, machine(8e9), replace(LOSSLESS, codec="raw"), few
    ).placement.packed_units


# -- against the engine's own model


def evenly(raw: int, packed: int) -> tuple[set[int], set[int]]:
    """So many of the layers, each spread over the order of use."""
    kept = {int((i + 0.5) * LAYERS / raw) for i in range(raw)}
    rest = [layer for layer in range(LAYERS) if layer not in kept]
    return kept, {rest[int((i + 0.5) * len(rest) / packed)] for i in range(packed)}


def engine_says(
    outcome: estimate.Estimate, on: Machine, raw: set[int], packed: set[int], region: int
) -> float:
    """`predict` of a step: what streams is copied to staging and unpacked, what stays packed is unpacked."""
    job = replace(LOSSLESS, mode="train" if len(outcome.step.phases) > 1 else "infer")
    group, rates = EQUAL.groups[0], on.rates(EQUAL, job)
    size, wire = group.bytes_in(None), placement.wire_bytes(group, job)
    forward, *backward = ((phase.compute / LAYERS,) * LAYERS for phase in outcome.step.phases)
    assert rates.decode is not None
    there = {
        layer: PackedTransfer(0 if layer in packed else wire, size / rates.decode)
        for layer in range(LAYERS)
        if layer not in raw
    }
    work = Workload(tuple(range(LAYERS)), forward, *backward)
    return predicted([size] * LAYERS, raw, region, work, Link(rates.link, 0.0), packed=there).seconds


POINTS = [(vram, tokens) for vram in (4, 6, 7, 8, 9, 10, 11) for tokens in (64, 1024, 2048, 4096)]


@pytest.mark.parametrize("mode", ["infer", "train"])
def test_a_step_is_what_the_engine_s_model_says_of_the_same_layers_spread_evenly(mode):
    job, packed_points = replace(LOSSLESS, mode=mode), 0
    for vram, tokens in POINTS:
        on = machine(vram * 1e9)
        outcome = estimate._evaluate(EQUAL, on, job, tokens)
        packed = outcome.placement.packed_units
        packed_points += packed > 0
        raw, kept = evenly(outcome.placement.resident[0] - packed, packed)
        size = EQUAL.groups[0].bytes_in(None)
        found = engine_says(outcome, on, raw, kept, estimate.SLOTS * size)
        if mode == "infer":
            assert outcome.step.seconds == pytest.approx(found, rel=1e-3), (vram, tokens)
        else:  # which layers the slots hold at a turn is the order's: by a layer a phase it may be otherwise
            layer = placement.wire_bytes(EQUAL.groups[0], job) / on.rates(EQUAL, job).link
            assert outcome.step.seconds == pytest.approx(found, abs=2 * layer), (vram, tokens)
    assert packed_points > len(POINTS) / 2


def by_rule(units: list[UnitSize], budget: int, work: Workload, link: Link, decode: float):
    """The faster of the rule's two plans (residents raw, or packed) and its predicted step, as a session prices them."""
    found = []
    for packed in (False, True):
        plan = plan_residency(units, budget, 0, Wish(2), 512, packed=packed)
        there = {
            index: PackedTransfer(0 if index in plan.packed else unit.nbytes, unit.nbytes / decode)
            for index, unit in enumerate(units)
            if index not in plan.resident
        }
        step = predicted(
            [unit.nbytes for unit in units], plan.resident, plan.region_bytes, work, link, packed=there
        )
        found.append((plan, step))
    return min(found, key=lambda one: one[1].seconds)


@pytest.mark.parametrize("mode", ["infer", "train"])
def test_a_step_is_what_the_engine_finds_with_the_same_bytes(mode):
    job = replace(LOSSLESS, mode=mode)
    size, wire = EQUAL.groups[0].bytes_in(None), placement.wire_bytes(EQUAL.groups[0], job)
    units = [UnitSize(str(layer), size, packed=wire) for layer in range(LAYERS)]
    for vram, tokens in POINTS[::3]:  # each budget, and each number of tokens
        on = machine(vram * 1e9)
        outcome = estimate._evaluate(EQUAL, on, job, tokens)
        forward, *backward = ((phase.compute / LAYERS,) * LAYERS for phase in outcome.step.phases)
        # Allocators round each layer that stays up; the link carries what a layer packs to.
        budget = outcome.placement.resident_bytes + estimate.SLOTS * size + LAYERS * 512
        rates = on.rates(EQUAL, job)
        link = Link(rates.link * size / wire, 0.0)
        work = Workload(tuple(range(LAYERS)), forward, *backward)
        plan, found = by_rule(units, budget, work, link, rates.decode)
        if mode == "infer":
            assert 0.98 * found.seconds <= outcome.step.seconds <= 1.001 * found.seconds, (vram, tokens)
        else:
            assert outcome.step.seconds == pytest.approx(found.seconds, abs=2 * wire / rates.link), (
                vram,
                tokens,
            )
        # And what is predicted is what the plan takes, with what crosses packed waiting for staging alone.
        kept = engine_says(outcome, on, set(plan.resident), set(plan.packed), plan.region_bytes)
        assert found.seconds == pytest.approx(kept, rel=1e-6) and plan.slots >= 2


def test_a_model_that_fits_packed_crosses_no_link_and_takes_its_unpacking():
    on = machine(11e9)
    outcome = estimate.evaluate(EQUAL, on, LOSSLESS, 64)
    place, rates = outcome.placement, on.rates(EQUAL, LOSSLESS)
    assert place.streamed_wire == 0 and place.packed_units == LAYERS
    assert outcome.step.phases[0].link == 0 and outcome.step.bound_by == "compute"
    unpacking = EQUAL.bytes_in(None) / rates.decode
    assert outcome.step.seconds == pytest.approx(outcome.step.resident_seconds + unpacking)


# -- the command


def ask(capsys, line: str) -> str:
    assert main(line.split()) == 0
    return capsys.readouterr().out


LINE = "plan flux2-dev --gpu rtx4090 --link 6GB --ram 128GiB --codec lossless"


def test_the_command_says_how_much_stays_packed(capsys):
    found = json.loads(ask(capsys, f"{LINE} --json"))
    assert found["resident_packed_units"] > 0 and found["codec"] == "lossless"
    assert found["resident_packed_bytes"] == pytest.approx(
        presets.LOSSLESS_RATIO * found["resident_packed_raw_bytes"], rel=1e-6
    )
    # They are among what stays, and counted with it.
    assert found["resident_packed_bytes"] <= found["vram"]["resident_bytes"]
    assert found["vram"]["total_bytes"] <= found["vram"]["capacity_bytes"]
    assert found["resident_packed_units"] == sum(group["resident_packed"] for group in found["groups"])
    assert all(group["resident_packed"] <= group["resident"] for group in found["groups"])
    assert found["host"]["resident_packed_bytes"] == found["resident_packed_bytes"]
    words = " ".join(ask(capsys, LINE).split())
    assert (
        "packed without loss" in words
        and "unpacked at each use" in words
        and "layers that stay packed" in words
    )
    raw = json.loads(ask(capsys, f"{LINE.replace('lossless', 'raw')} --json"))
    assert (
        raw["resident_packed_units"] == raw["resident_packed_bytes"] == raw["resident_packed_raw_bytes"] == 0
    )
    change = next(one for one in raw["what_if"] if one["option"] == "--codec lossless")
    assert change["step_seconds"] == pytest.approx(found["step_seconds"])
    assert change["resident_packed_units"] == found["resident_packed_units"]
    assert "packed" not in ask(capsys, LINE.replace("lossless", "raw")).split("What would change")[0]


def test_a_model_that_fits_packed_is_told_to_fit_so(capsys):
    line = "plan z-image --gpu rtx5080 --link 11GB --codec lossless --vram 9.9GB --tokens 32"
    found = json.loads(ask(capsys, f"{line} --json"))
    assert (
        found["streamed_layers"] == 0 < found["resident_packed_units"]
        and found["host"]["streamed_bytes"] == 0
    )
    words = " ".join(ask(capsys, line).split())
    assert (
        "It fits packed." in words
        and "nothing needs to stream" in words
        and "waits for unpacking the weights" in words
    )


def test_a_whole_plan_is_drawn_up_in_well_under_a_second():
    import time

    from carom.tools.planner import shapes

    began = time.process_time()
    model_plan.to_dict(model_plan.plan(shapes.find_shape("flux2-dev"), Machine(CARD), Job(codec="lossless")))
    assert time.process_time() - began < 2.0
