"""Layers that stream in parts, the family of a model read from a file, and the roofline beside the prediction."""

from __future__ import annotations

import json
import math

import pytest
import torch
from carom.cli import main
from carom.core.common.sizes import MIB
from carom.core.plan.roofline import PhaseWork, roofline_seconds
from carom.tools.planner import cost_model, estimate, placement, presets, shape_files, shapes
from carom.tools.planner.estimate import Job, Machine
from carom.tools.planner.shapes import Group
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

BF16 = Job(quant=presets.find_quant("bf16"))


def group(params: int, largest: int) -> Group:
    return Group("layer", 10, params, params, largest=largest)


@pytest.mark.parametrize(
    "params, largest, part",
    [
        (300 * MIB, 0, 600 * MIB),  # the matrices are not known: whole
        (300 * MIB, 10 * MIB, 128 * MIB),  # matrices are gathered up to 128 MiB
        (300 * MIB, 100 * MIB, 200 * MIB),  # a matrix is not divided
        (20 * MIB, 10 * MIB, 40 * MIB),  # a small layer is one part
    ],
)
def test_a_part_is_a_layer_s_share_of_128_mib_or_its_largest_matrix(params, largest, part):
    assert placement.part_bytes(group(params, largest), BF16) == part
    assert placement.part_wire_bytes(group(params, largest), BF16) == part


def test_slots_hold_parts_so_a_budget_below_two_layers_works():
    shape = shapes.find_shape("flux1-dev")
    double = shape.groups[0].bytes_in(None)
    found = placement.place(shape, Job(), 600 * MIB)
    assert found is not None and found.resident_bytes + found.slot_bytes <= 600 * MIB < 2 * double
    assert placement.least_weight_budget(shape, Job()) < 600 * MIB


def test_a_packed_part_has_a_staging_buffer_of_its_packed_bytes():
    found = placement.place(shapes.find_shape("flux1-dev"), Job(codec="lossless"), 2000 * MIB)
    assert found is not None and found.streamed_raw > found.streamed_wire
    part = placement.part_bytes(shapes.find_shape("flux1-dev").groups[0], Job(codec="lossless"))
    assert found.slot_bytes == pytest.approx(placement.SLOTS * part * (1 + presets.LOSSLESS_RATIO), rel=0.05)


@pytest.mark.parametrize(
    "names, family",
    [
        (("double_blocks.0.img_attn.qkv.weight", "double_blocks.1.img_attn.qkv.weight"), "mmdit"),
        (("transformer_blocks.0.attn.add_q_proj.weight", "transformer_blocks.0.attn.to_q.weight"), "mmdit"),
        (("layers.0.attention.qkv.weight", "noise_refiner.0.attention.qkv.weight"), "single-stream"),
        (("down_blocks.0.attentions.0.proj_in.weight", "down_blocks.1.attentions.0.proj_in.weight"), "unet"),
        (("blocks.0.modulation.weight", "blocks.0.w.weight"), "dit"),
        (("blocks.0.w.weight", "blocks.1.w.weight"), ""),
        (("model.embed_tokens.weight", "model.layers.0.q_proj.weight"), "decoder"),
        (("embeddings.word_embeddings.weight", "encoder.layer.0.query.weight"), "encoder"),
    ],
)  # fmt: skip
def test_a_file_s_family_follows_from_its_tensors_names(tmp_path, names, family):
    save_file({name: torch.zeros(8, 8) for name in names}, tmp_path / "m.safetensors")
    assert shape_files.read_shape(tmp_path / "m.safetensors").family == family


def test_a_file_s_layers_know_their_largest_matrix(tmp_path):
    tensors = {
        f"blocks.{i}.{name}.weight": torch.zeros(8, n) for i in range(2) for name, n in (("a", 8), ("b", 32))
    }
    save_file(tensors, tmp_path / "m.safetensors")
    assert shape_files.read_shape(tmp_path / "m.safetensors").groups[0].largest == 8 * 32


@given(
    st.floats(1e3, 1e12), st.floats(0, 1e12), st.floats(0, 1), st.floats(0, 1e12), st.sampled_from(["infer", "train"]),
    st.integers(1, 1 << 16),
)  # fmt: skip
def test_the_roofline_is_core_plan_s_and_never_above_the_prediction(
    active, streamed, cached, decoded, mode, tokens
):
    work = cost_model.Work(active, streamed, streamed * cached, decoded_bytes=decoded, layers=10, uses=5)
    rates = cost_model.Rates(1e12, 1e10, 5e9, decode=1e11, layer=1e-4, use=1e-4)
    step = cost_model.step_time(tokens, work, rates, mode)
    phases = [PhaseWork(phase.compute, phase.link * rates.link) for phase in step.phases]
    disk = sum(phase.disk for phase in step.phases)
    assert step.roofline_seconds == pytest.approx(roofline_seconds(phases, rates.link, disk))
    assert step.roofline_seconds <= step.seconds * (1 + 1e-9)


def test_the_host_and_unpacking_are_in_the_prediction_and_not_in_the_roofline():
    work = cost_model.Work(1e9, 1e9, 1e9, decoded_bytes=1e9, layers=10, uses=10)
    step = cost_model.step_time(1, work, cost_model.Rates(1e15, 1e10, decode=1e9, layer=0.5), "infer")
    assert step.roofline_seconds == pytest.approx(0.1) and step.seconds == pytest.approx(5)


def test_the_command_shows_the_roofline_beside_the_prediction(capsys):
    line = "plan flux1-dev --gpu rtx4090 --link 6GB --vram 4GiB"
    assert main.main([*line.split(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert 0 < found["roofline_seconds"] <= found["step_seconds"]
    hardware = found["hardware"]
    assert hardware["effective_flops"] == pytest.approx(hardware["flops"] * hardware["efficiency"])
    assert "benchmarks/records/" in hardware["efficiency_source"]
    assert main.main(line.split()) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"Roofline: {found['roofline_seconds']:.1f} s" in text and "51 % of the card's rate" in text


def test_training_on_a_machine_that_was_measured_scales_the_training_host_s_time_too():
    slower = presets.HOST_COST.scaled(2 * presets.HOST_COST.layer, "measured")
    assert slower.of("train") == pytest.approx(2 * presets.HOST_COST.of("train"))
    machine = Machine(presets.CARDS["h200"], host_cost=slower)
    shape = shapes.find_shape("z-image")
    step = estimate.evaluate(shape, machine, Job("train"), 16).step
    assert step.bound_by == "host" and math.isclose(
        step.seconds, 3 * slower.of("train") * sum(g.count for g in shape.groups)
    )
