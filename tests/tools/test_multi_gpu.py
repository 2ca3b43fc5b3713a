"""Plans for several GPUs: the published note's tables of pipelines, one GPU's plan, and what more GPUs never do."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from carom.core.common.errors import BudgetError
from carom.tools.planner import estimate, gpu_table, model_plan, multi_gpu, presets, shapes
from carom.tools.planner.estimate import Job, Machine
from carom.tools.planner.interconnect import Interconnect, interconnect
from carom.tools.planner.presets import GB
from carom.tools.planner.shapes import Group, Shape
from hypothesis import assume, given, settings
from hypothesis import strategies as st

GLM, QUANT = shapes.find_shape("glm-4.7"), presets.find_quant("nf4+nf2")
DRIVES = {"gen3": 3.5 * GB, "gen4": 7 * GB, "gen5": 12.5 * GB, "2xgen5": 25 * GB}

# The published note's pipelines of GLM-4.7 with NF4 and NF2: card, format of the computing, GPUs, resident and streamed
# layers of a GPU, and for each drive the tokens from which streaming costs nothing (None: not published).
PIPELINES = [
    ("rtx4090-note", "bf16", 1, 14, 78, (16384, 8192, 8192, 4096)),
    ("rtx4090-note", "bf16", 2, 15, 31, (16384, 8192, 4096, 2048)),
    ("rtx4090-note", "bf16", 4, 15, 8, (8192, 4096, 2048, 1024)),
    ("rtx5090-note", "bf16", 1, 20, 72, (None, 16384, 8192, 4096)),
    ("rtx5090-note", "bf16", 2, 21, 25, (None, 8192, None, None)),
    ("rtx5090-note", "nvfp4", 2, 21, 25, (None, 16384, None, None)),
]


def plan(card: str, gpus: int, drive: str = "gen4", compute: str = "bf16", **more) -> multi_gpu.SplitPlan:
    found = presets.CARDS[card]
    machine = Machine(found, disk=DRIVES[drive])
    job = Job("train", quant=QUANT, compute=compute)
    return multi_gpu.pipeline(GLM, machine, job, GLM.sample_tokens, interconnect(found, gpus), **more)


@pytest.mark.parametrize("card, compute, gpus, resident, streamed, published", PIPELINES)
def test_pipeline_thresholds_are_within_one_power_of_two(card, compute, gpus, resident, streamed, published):
    for drive, tokens in zip(DRIVES, published, strict=True):
        found = plan(card, gpus, drive, compute)
        stage = found.slowest
        assert abs(stage.resident_layers - resident) <= 1 and abs(stage.streamed_layers - streamed) <= 1
        if tokens is not None:
            assert abs(math.log2(found.threshold("own_drive") / tokens)) <= 1, (drive, tokens)


@pytest.mark.parametrize(
    "card, without", [("rtx4090-note", (6,)), ("rtx5090-note", (4, 5)), ("a100-note", (2,)), ("h100-note", (2,)), ("rtx-pro-6000-note", (2,))],
)  # fmt: skip
def test_the_fewest_gpus_are_the_published_ones(card, without):
    """For the RTX 5090 the note says 4 in one table and 5 in another."""
    found = presets.CARDS[card]
    machine, job = Machine(found, disk=DRIVES["gen4"]), Job("train", quant=QUANT)
    links = lambda gpus: interconnect(found, gpus)  # noqa: E731
    fewest = [
        multi_gpu.min_gpus(GLM, machine, job, GLM.sample_tokens, links, streaming=streaming)
        for streaming in (False, True)
    ]
    assert fewest[0] in without and fewest[1] == 1


def test_two_rtx_4090_hold_llama_70b_as_published():
    llama, card = shapes.find_shape("llama-70b"), presets.CARDS["rtx4090-note"]
    job = Job("train", quant=presets.find_quant("nf4"))
    links = lambda gpus: interconnect(card, gpus)  # noqa: E731
    assert multi_gpu.min_gpus(llama, Machine(card), job, 1024, links, streaming=False) == 2


@pytest.mark.parametrize("gpus, measured", [(2, 110), (4, 220)])
def test_gathered_weights_come_as_fast_as_measured_on_h200(gpus, measured):
    card = presets.CARDS["h200"]
    assert interconnect(card, gpus).weight_rate(card.link) / GB == pytest.approx(measured, rel=0.03)


def test_which_way_weights_come_depends_on_the_connections():
    link = 50 * GB
    plain = Interconnect(4, "none", 0.0, 100 * GB)
    assert plain.weight_rate(link) == 25 * GB and not plain.gathers(link)
    p2p = Interconnect(4, "p2p", 0.0, 100 * GB)
    assert p2p.weight_rate(link) == link and p2p.gathers(link), "host memory is read once"
    assert not Interconnect(4, "p2p", 0.0, 400 * GB).gathers(link), "what is gathered crosses the same link"
    nvlink = Interconnect(4, "nvlink", 600 * GB, 400 * GB)
    assert nvlink.weight_rate(link) == 200 * GB and nvlink.gathers(link)
    slow = Interconnect(4, "nvlink", 30 * GB, 400 * GB)
    assert slow.gather_rate(link) == 40 * GB and slow.weight_rate(link) == link and not slow.gathers(link)


@pytest.mark.parametrize("split", multi_gpu.SPLITS)
@pytest.mark.parametrize("mode", ["infer", "train"])
@pytest.mark.parametrize(
    "name, card", [("llama3-70b", "rtx5090"), ("glm-4.7", "rtx4090-note"), ("flux2-dev", "h200")]
)
def test_the_plan_of_one_gpu_is_todays(split, mode, name, card):
    shape, found = shapes.find_shape(name), presets.CARDS[card]
    machine, job = Machine(found, disk=7 * GB, ram=64 << 30), Job(mode, quant=presets.find_quant("nf4"))
    tokens = shape.sample_tokens
    alone = estimate.evaluate(shape, machine, job, tokens)
    make = multi_gpu.data_parallel if split == "data" else multi_gpu.pipeline
    split_plan = make(shape, machine, job, tokens, interconnect(found, 1))
    (stage,) = split_plan.stages
    assert stage.outcome == alone and split_plan.seconds == alone.step.seconds and split_plan.bubble == 0
    assert split_plan.overhead == alone.step.overhead
    assert stage.rules == model_plan.thresholds(shape, machine, job, alone)


def test_stages_are_the_whole_model_and_only_the_last_computes_the_loss():
    for name in ("llama3-70b", "flux2-dev", "glm-4.7"):
        shape = shapes.find_shape(name)
        for gpus in (1, 2, 3, 7, shape.layers):
            parts = multi_gpu.stage_shapes(shape, gpus)
            assert len(parts) == gpus and {part.layers for part in parts} <= {
                shape.layers // gpus,
                -(-shape.layers // gpus),
            }
            assert sum(part.params for part in parts) == shape.params
            assert sum(part.active_params for part in parts) == shape.active_params
            assert [part.vocabulary for part in parts] == [0] * (gpus - 1) + [shape.vocabulary]
    with pytest.raises(ValueError, match="at most 92 stages"):
        multi_gpu.stage_shapes(GLM, 93)


def test_equal_stages_take_the_bubble_of_the_formula():
    shape = equal_layers(64, 50_000_000)
    card = replace(presets.CARDS["h200"], vram=int(400e9))
    for gpus, count in ((2, 4), (4, 8), (8, 3)):
        found = multi_gpu.pipeline(shape, Machine(card), Job("train"), 4096, interconnect(card, gpus), count)
        one = found.stages[0].outcome.step.seconds
        assert found.seconds == pytest.approx((count + gpus - 1) * one)
        assert found.bubble == pytest.approx((gpus - 1) / (count + gpus - 1))


def test_microbatches_in_flight_take_vram_of_the_first_stages():
    vram = [stage.outcome.vram.activations for stage in plan("rtx4090-note", 4).stages]
    assert vram == sorted(vram, reverse=True) and vram[0] > vram[-1]
    assert plan("rtx4090-note", 4, microbatches=1).stages[0].outcome.vram.activations == vram[-1]


def test_stages_share_the_drive():
    """Each alone could read faster; together they read no more than the drive delivers."""
    found = plan("rtx4090-note", 2)
    work = [stage.outcome.work for stage in found.stages]
    read = sum(2 * (each.streamed_bytes - each.kept_bytes) for each in work)
    assert found.bound_by == "disk"
    assert found.seconds >= found.microbatches * read / DRIVES["gen4"] * (1 - 1e-9)
    assert found.threshold("published_rule") == pytest.approx(2 * found.threshold("own_drive"))


# -- properties


def equal_layers(count: int, params: int) -> Shape:
    """A model of equal layers. Its activations are small, so that they decide nothing."""
    group = Group(
        "layer", count, params, params, attention_width=64, live_width=1, saved_width=1, adapter_width=8
    )
    return Shape("s", "S", "drawn", "diffusion", (group,), 1, 1024, "sample")


@st.composite
def equal_shapes(draw):
    return equal_layers(draw(st.integers(1, 40)), draw(st.integers(1_000, 500_000_000)))


kinds = st.sampled_from(["none", "p2p", "nvlink"])
modes = st.sampled_from(["infer", "train"])


def links_of(kind: str, gpus: int, nvlink: float, memory: float) -> Interconnect:
    return Interconnect(gpus, kind, nvlink if kind == "nvlink" else 0.0, memory)


def tried(make, *arguments) -> multi_gpu.SplitPlan | None:
    try:
        return make(*arguments)
    except BudgetError:
        return None


@settings(max_examples=150, deadline=None)
@given(
    equal_shapes(), modes, kinds, st.integers(1, 12), st.integers(1, 1 << 15), st.integers(int(1.5e9), int(40e9)),
    st.floats(1e9, 500e9), st.floats(1, 20), st.booleans(), st.booleans(),
)  # fmt: skip
def test_more_gpus_never_need_longer_for_as_many_tokens(
    shape, mode, kind, gpus, tokens, vram, nvlink, more, drive, gds
):
    """Equal layers. Weights wait in host memory, or all of them on a drive."""
    card = replace(presets.CARDS["rtx5090"], vram=vram)
    machine = Machine(card, disk=7 * GB if drive else None, gds=drive and gds)
    job, memory = Job(mode), card.link * more
    few, many = (links_of(kind, count, nvlink, memory) for count in (gpus, gpus + 1))
    makes = [multi_gpu.data_parallel] + [multi_gpu.pipeline] * (gpus < shape.layers)
    for make in makes:
        before, after = (
            tried(make, shape, machine, job, tokens, few),
            tried(make, shape, machine, job, tokens, many),
        )
        if before is not None:
            assert after is not None
            assert after.tokens_per_second >= before.tokens_per_second * (1 - 1e-9), make.__name__


@settings(max_examples=100, deadline=None)
@given(
    equal_shapes(),
    modes,
    st.integers(1, 12),
    st.integers(1, 24),
    st.integers(1, 1 << 15),
    st.integers(int(1.5e9), int(40e9)),
)
def test_a_longer_pipeline_never_needs_a_longer_step(shape, mode, gpus, microbatches, tokens, vram):
    """Of as many microbatches."""
    assume(gpus < shape.layers)
    card = replace(presets.CARDS["rtx4090"], vram=vram)
    found = [
        tried(
            multi_gpu.pipeline,
            shape,
            Machine(card),
            Job(mode),
            tokens,
            interconnect(card, count),
            microbatches,
        )
        for count in (gpus, gpus + 1)
    ]
    if found[0] is not None:
        assert found[1] is not None and found[1].seconds <= found[0].seconds * (1 + 1e-9)


def test_the_table_has_each_power_of_two_and_chooses_the_faster_split():
    machine, job = Machine(presets.CARDS["rtx4090-note"], disk=DRIVES["gen4"]), Job("train", quant=QUANT)
    table = gpu_table.plan_gpus(GLM, machine, job, 6)
    assert [row.gpus for row in table.rows] == [1, 2, 4, 6]
    assert table.chosen.split == "pipeline", "six cards hold the model"
    assert (table.without_streaming, table.with_streaming) == (6, 1)
    last = table.rows[-1]
    assert table.chosen.tokens_per_second > last.data.tokens_per_second
    assert gpu_table.plan_gpus(GLM, machine, job, 6, split="data").chosen == last.data
    assert gpu_table.to_dict(table) == gpu_table.to_dict(gpu_table.plan_gpus(GLM, machine, job, 6))


def test_a_model_that_fits_no_single_gpu_is_planned_for_several():
    """One card without a drive, and too little RAM for what it cannot hold."""
    machine, job = Machine(presets.CARDS["rtx4090"], ram=16 << 30), Job(quant=presets.find_quant("nf4"))
    table = gpu_table.plan_gpus(shapes.find_shape("llama3-70b"), machine, job, 2)
    assert table.one is None and table.speedup is None and "RAM" in table.rows[0].problems["data"]
    assert table.chosen.split == "pipeline" and table.with_streaming == 2
    assert gpu_table.to_dict(table)["one_gpu"] is None
    with pytest.raises(BudgetError, match="RAM"):
        gpu_table.plan_gpus(shapes.find_shape("llama3-70b"), machine, job, 2, split="data")
