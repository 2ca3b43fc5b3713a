"""Plans compared with the steps that the project measured: each within 15 %, or named with its error and the reason.

A plan gets what the record's run had: the model's shape, the budget for weights, the link's rate, and where a host
limited the run, that host's time. The rest (the card's rate, the efficiency, the decoder) is the planner's own.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from carom.tools.planner import cost_model, estimate, placement, presets, shapes
from carom.tools.planner.estimate import Job, Machine
from carom.tools.planner.shapes import Group, Shape

RECORDS = Path(__file__).parents[2] / "benchmarks" / "records"
H200 = presets.CARDS["h200"]
WITHIN = 0.15


@cache
def record(name: str) -> dict:
    return json.loads((RECORDS / f"{name}.json").read_text(encoding="utf-8"))


def error(planned: float, measured: float) -> float:
    """The relative error of a plan; -0.1: it is 10 % too fast."""
    return planned / measured - 1


def first_layout(shape: Shape, machine: Machine, job: Job, tokens: int) -> float:
    """The planned seconds of a step under a session's first layout, which keeps no layer packed on the card."""
    assert job.vram is not None
    found = placement.place(shape, job, job.vram)
    assert found is not None
    work = estimate.work_of(shape, machine, job, found, tokens)
    return cost_model.step_time(tokens, work, machine.rates(shape, job), job.mode).seconds


# -- the benchmark's DiT (benchmarks/engines/dit.py): 20 blocks, d=3072, 6.8 GB


def dit(tokens: int) -> Shape:
    width = 3072
    square = width * width
    block = shapes.diffusion_layer(
        "block", 20, 18 * square, 12 * square, width, 4 * width, largest=6 * square
    )
    outside = Group("embedding and head", 1, 128 * width, 128 * width, repeated=False)
    return Shape("dit", "DiT", "", "diffusion", (block, outside), width, tokens, "", family="dit")


def dit_case(name: str, key: str, host_cost: presets.HostCost = presets.HOST_COST) -> tuple[float, float]:
    """Return the (planned, measured) seconds of one case of a suite."""
    entries = record(name)["cases"]
    (link,) = (e["result"]["link_bytes_per_second"] for e in entries if e["case"]["kind"] == "link")
    (entry,) = (e for e in entries if e["key"] == key)
    case, result = entry["case"], entry["result"]
    job = Job(
        case["mode"],
        codec=case["codec"].replace("auto", "lossless"),
        vram=result["vram_budget_bytes"] or None,
    )
    machine = Machine(replace(H200, link=link), host_cost=host_cost)
    step = estimate.evaluate(dit(case["tokens"]), machine, job, case["tokens"]).step
    return step.seconds, result["ms_per_step"] / 1e3


DIT = [
    ("2026-11-22-h200-suite-8", "none-infer-4096"),
    ("2026-11-22-h200-suite-12", "none-train-4096"),
    # Everything streams.
    ("2026-11-22-h200-suite-7", "carom-infer-4096"),
    ("2026-11-22-h200-suite-12", "carom-infer-4096-lossless"),
    ("2026-11-22-h200-suite-12", "carom-train-4096"),
    ("2026-11-22-h200-suite-12", "carom-train-4096-lossless"),
    ("2026-11-22-h200-suite-12", "carom-train-1024"),
    ("2026-11-22-h200-suite-12", "carom-train-1024-lossless"),
    # A quarter or half of the model stays.
    ("2026-11-22-h200-suite-12", "carom-infer-4096-half"),
    ("2026-11-22-h200-suite-7", "carom-infer-4096-vram-quarter"),
    ("2026-11-22-h200-suite-8", "carom-infer-4096-vram-quarter-lossless"),
    ("2026-11-22-h200-suite-8", "carom-infer-4096-vram-half"),
    ("2026-11-22-h200-suite-8", "carom-infer-4096-vram-half-lossless"),
]  # fmt: skip


@pytest.mark.parametrize("name, key", DIT)
def test_the_dit_is_planned_within_15_percent(name, key):
    planned, measured = dit_case(name, key)
    assert abs(error(planned, measured)) <= WITHIN, (planned, measured)


@pytest.mark.parametrize(
    "key", ["carom-infer-16384", "carom-train-4096-half", "carom-train-4096-half-lossless"]
)
def test_the_dit_of_the_older_suite_is_planned_within_15_percent(key):
    """Cases that no newer suite holds."""
    planned, measured = dit_case("2026-11-21-h200-suite-3-codec", key)
    assert abs(error(planned, measured)) <= WITHIN, (planned, measured)


def host_of(name: str, tokens: int) -> presets.HostCost:
    """The host's cost as a suite's own training without offloading shows it, which the host binds.

    Training issues a forward, and gradients that take twice as long (cost_model.step_time).
    """
    (entry,) = (e for e in record(name)["cases"] if e["key"] == f"none-train-{tokens}")
    return replace(presets.HOST_COST, train_layer=entry["result"]["phases_ms"]["forward"] / 1e3 / 20)


@pytest.mark.parametrize(
    "name, key",
    [
        # At 1024 tokens Python is slower than the card on every host.
        ("2026-11-21-h200-suite", "none-train-1024"),
        ("2026-11-21-h200-suite-2", "none-train-1024"),
        ("2026-11-21-h200-suite-4", "none-train-1024"),
        # Hosts that were slow throughout (benchmarks/README.md).
        ("2026-11-22-h200-suite-8", "carom-train-1024-lossless"),
        ("2026-11-22-h200-suite-8", "carom-train-4096-lossless"),
        ("2026-11-22-h200-suite-10", "carom-train-1024"),
        ("2026-11-22-h200-suite-10", "carom-train-1024-lossless"),
        ("2026-11-22-h200-suite-10", "carom-train-4096"),
        ("2026-11-22-h200-suite-7", "carom-train-1024"),
    ],
)
def test_a_training_step_that_the_host_binds_gets_that_host_s_time(name, key):
    planned, measured = dit_case(name, key, host_of(name, 1024 if "-1024" in key else 4096))
    assert abs(error(planned, measured)) <= WITHIN, (planned, measured)


@pytest.mark.parametrize(
    "key, off", [("carom-train-1024-lossless", -0.23), ("carom-train-4096-lossless", -0.18)]
)
def test_the_packed_training_that_a_mended_defect_slowed_is_missed_and_known(key, off):
    """suite-7: its rate of unpacking was read off a small unit's launch, which is mended since (benchmarks/README.md)."""
    name = "2026-11-22-h200-suite-7"
    planned, measured = dit_case(name, key, host_of(name, 1024 if "-1024" in key else 4096))
    assert error(planned, measured) == pytest.approx(off, abs=0.02)


# -- Flux in ComfyUI: 5.05 B parameters (8 + 16 blocks), and the true size (19 + 38)


def flux(kept: dict) -> Shape:
    """The shape of a record's file, which holds 2 bytes a parameter."""
    made = kept["shape"]
    return shapes.flux1(
        "flux", "Flux", "", made["double"], made["single"], made["hidden"], kept["file_bytes"] // 2
    )


def flux_case(name: str, gib: int | None, loader: str, prompt: str) -> tuple[float, float, float]:
    """Return (planned, planned for the first layout, measured) seconds of one run of a ComfyUI record.

    `prompt`: "second", whose layout is the first one, or "settled".
    """
    kept = record(name)
    limit = None if gib is None else gib << 30
    run = next(
        r for r in kept["runs"] if r["limit"] == limit and r["loader"] == loader and not r.get("alternating")
    )
    measured = run["s_per_iteration_settled" if prompt == "settled" else "s_per_iteration"]
    report = run[prompt]["report"]
    budget = report["vram_budget_bytes"] if report else None
    codec = {"stock": "raw", "auto": "lossless"}.get(loader, loader)
    job, machine, tokens = Job(codec=codec, vram=budget), Machine(H200), 4608
    planned = estimate.evaluate(flux(kept), machine, job, tokens).step.seconds
    first = first_layout(flux(kept), machine, job, tokens) if budget else planned
    return planned, first, measured


@pytest.mark.parametrize(
    "name, gib, loader",
    [
        ("2026-11-22-h200-comfyui-14", 6, "lossless"), ("2026-11-22-h200-comfyui-13", 6, "raw"),
        ("2026-11-22-h200-comfyui-13", 4, "lossless"), ("2026-11-22-h200-comfyui-13", 4, "raw"),
        ("2026-11-22-h200-comfyui-11", 6, "lossless"), ("2026-11-22-h200-comfyui-11", 4, "lossless"),
    ],
)  # fmt: skip
def test_flux_in_comfyui_is_planned_within_15_percent_once_its_layout_has_settled(name, gib, loader):
    planned, _, measured = flux_case(name, gib, loader, "settled")
    assert abs(error(planned, measured)) <= WITHIN, (planned, measured)


DEFAULTS = ["2026-11-24-h200-comfyui", "2026-11-24-h200-comfyui-2"]


@pytest.mark.parametrize("name", DEFAULTS)
def test_flux_in_comfyui_with_default_settings_is_planned_within_15_percent(name):
    """These records were taken before the layout had settled, so the plan is of the first layout."""
    _, first, measured = flux_case(name, 4, "auto", "second")
    assert abs(error(first, measured)) <= WITHIN, (first, measured)


@pytest.mark.parametrize("name", DEFAULTS)
def test_the_first_layout_at_6_gib_is_missed_and_known(name):
    """Kernels (77 ms) and copies (79 ms) take about equally long there, and the plan lets them overlap in full. In the
    record the step waits for weights for 11 % of its time, and the host is late for 8 %.
    """
    _, first, measured = flux_case(name, 6, "auto", "second")
    assert error(first, measured) == pytest.approx(-0.20, abs=0.02)


def test_flux_with_all_weights_on_the_card_is_planned_within_15_percent():
    planned, _, measured = flux_case("2026-11-22-h200-comfyui-4", None, "stock", "second")
    assert abs(error(planned, measured)) <= WITHIN, (planned, measured)


@pytest.mark.parametrize(
    "name, gib", [("2026-11-22-h200-comfyui-8-true-size", 8), ("2026-11-22-h200-comfyui-8-true-size", 12), ("2026-11-22-h200-comfyui-8-true-size", 16), ("2026-11-22-h200-comfyui-10-true-size", 16)]
)  # fmt: skip
def test_flux_of_the_true_size_is_planned_within_15_percent(name, gib):
    """These records were taken before the layout had settled, so the plan is of the first layout."""
    planned, first, measured = flux_case(name, gib, "lossless", "second")
    assert abs(error(first, measured)) <= WITHIN, (first, measured)
    assert planned <= first


def test_the_flux_record_that_a_change_of_layout_disturbed_is_missed_and_known():
    """comfyui-13 at 6 GiB: the layout changed in the prompt that was timed as settled (benchmarks/README.md), so most of
    its iterations are of the layout before; the session's own report of the new layout's steps is within 15 %.
    """
    planned, _, measured = flux_case("2026-11-22-h200-comfyui-13", 6, "lossless", "settled")
    assert error(planned, measured) == pytest.approx(-0.19, abs=0.02)
    (run,) = (
        r for r in record("2026-11-22-h200-comfyui-13")["runs"] if (r["limit"], r["loader"]) == (6 << 30, "lossless")
    )  # fmt: skip
    assert abs(error(planned, run["settled"]["report"]["step_seconds"])) <= WITHIN


# -- Z-Image in ai-toolkit (benchmarks/hosts/aitoolkit_shape.py): 12 layers and 4 refiners, 512 px, LoRA

Z_IMAGE = shapes.z_image("z-image", "Z-Image", "", layers=12, refiners=4, total=2_900_000_000)
Z_TOKENS = 1024 + 32  # 512 x 512 pixels, and a caption's tokens, which are padded to 32


def z_image_cases(name: str) -> list[tuple[str, float, float, str]]:
    """Return (configuration, planned seconds, measured seconds, what binds) of a record's runs with a fixed budget.

    The host binds: a job without offloading computes for a fifth of its step. So the plan gets the host time of the
    record's own jobs without offloading, spread over the layers' three passes.
    """
    runs = [run for run in record(name)["runs"] if run["status"] == "ok"]
    plain = statistics.mean(run["s_per_step"] for run in runs if run["config"].split("#")[0] == "plain")
    layer = plain / (3 * 16)
    as_measured = presets.HOST_COST.layer * layer / presets.HOST_COST.of("train")
    machine = Machine(H200, host_cost=presets.HOST_COST.scaled(as_measured, name))
    found = []
    for run in runs:
        if not run["config"].startswith(("all/", "half/")) or not isinstance(run["budget"], int):
            continue
        job = Job("train", codec="raw" if "raw" in run["config"] else "lossless", vram=run["budget"])
        step = estimate.evaluate(Z_IMAGE, machine, job, Z_TOKENS).step
        found.append((run["config"], step.seconds, run["s_per_step"], step.bound_by))
    return found


# Cells that the plan misses, by (record, configuration): the error. In all of them the host binds.
Z_MISSED = {
    # Python's speed changes from job to job: the two jobs without offloading of -5 differ by a third.
    ("2026-11-22-h200-ai-toolkit-5", "all/raw"): -0.16,
    ("2026-11-22-h200-ai-toolkit-10", "all/raw"): -0.27,
    ("2026-11-22-h200-ai-toolkit-10", "all/lossless"): -0.27,
    # The one job without offloading, from which the host's time is taken, was slower than the job with half the memory.
    ("2026-11-23-h200-ai-toolkit-14", "half/auto#100"): 0.17,
    ("2026-11-23-h200-ai-toolkit-16", "half/auto#140"): 0.15,
}


@pytest.mark.parametrize(
    "name",
    [
        "2026-11-22-h200-ai-toolkit-slow-host", "2026-11-22-h200-ai-toolkit-5", "2026-11-22-h200-ai-toolkit-10",
        "2026-11-23-h200-ai-toolkit-13", "2026-11-23-h200-ai-toolkit-14", "2026-11-23-h200-ai-toolkit-15",
        "2026-11-23-h200-ai-toolkit-16",
    ],
)  # fmt: skip
def test_z_image_in_ai_toolkit_is_planned_within_15_percent_with_that_host_s_time(name):
    for config, planned, measured, bound_by in z_image_cases(name):
        off = error(planned, measured)
        if (name, config) in Z_MISSED:
            assert off == pytest.approx(Z_MISSED[name, config], abs=0.02) and bound_by == "host", config
        else:
            assert abs(off) <= WITHIN, (config, planned, measured)
