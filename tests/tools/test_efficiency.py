"""The planner's measured figures, computed again from the records and tables that they name."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path

import pytest
from carom.core.session import rule_planner
from carom.tools.planner import cost_model, efficiency, pcie, placement, presets, shapes

ROOT = Path(__file__).parents[2]
DENSE = presets.CARDS["h200"].bf16


def record(name: str) -> dict:
    return json.loads((ROOT / "benchmarks" / "records" / f"{name}.json").read_text(encoding="utf-8"))


def results(name: str) -> dict[str, dict]:
    return {entry["key"]: entry["result"] for entry in record(name)["cases"]}


def matrix_seconds(active: float, attention_width: float, tokens: int, mode: str) -> float:
    """The seconds of a step's matrix products at the card's dense rate."""
    work = cost_model.Work(active, attention_per_token=4 * tokens * attention_width)
    return cost_model.step_time(tokens, work, cost_model.Rates(DENSE, 1e12), mode).compute_seconds


DIT = (
    20 * 12 * 3072**2,
    20 * 3072,
)  # qkv, projection and two matrices of the MLP; the modulation is per sample


def test_the_dit_s_efficiency_is_that_of_the_records_without_offloading():
    found = efficiency.MEASURED["dit"]
    infer = results("2026-11-22-h200-suite-8")["none-infer-4096"]["phases_ms"]["forward"] / 1e3
    assert matrix_seconds(*DIT, 4096, "infer") / infer == pytest.approx(found.infer, rel=0.01)
    phases = results("2026-11-22-h200-suite-12")["none-train-4096"]["phases_ms"]
    train = (phases["forward"] + phases["backward"]) / 1e3
    assert matrix_seconds(*DIT, 4096, "train") / train == pytest.approx(found.train, rel=0.01)


def test_the_mmdit_s_efficiency_is_that_of_comfyui_with_all_weights_on_the_card():
    kept = record("2026-11-22-h200-comfyui-4")
    shape = shapes.flux1("flux", "Flux", "", kept["shape"]["double"], kept["shape"]["single"])
    (seconds,) = (
        run["s_per_iteration"] for run in kept["runs"] if run["limit"] is None and run["loader"] == "stock"
    )
    needed = matrix_seconds(shape.active_params, (8 + 16) * 3072, 4608, "infer")
    assert needed / seconds == pytest.approx(efficiency.MEASURED["mmdit"].infer, rel=0.01)


def test_the_decoder_s_efficiency_is_that_of_the_published_note_s_measured_rows():
    """One pass of one Llama-3-70B layer of 855.6 M parameters on an RTX 4090: tokens, milliseconds."""
    rows = [(512, 6.4), (1024, 12.6), (2048, 24.5), (4096, 50), (8192, 100)]
    layer = shapes.find_shape("llama3-70b").groups[0].active_params
    reached = [2 * layer * tokens / (ms / 1e3) / presets.CARDS["rtx4090"].bf16 for tokens, ms in rows]
    assert statistics.median(reached) == pytest.approx(efficiency.MEASURED["decoder"].infer, rel=0.01)


def test_a_family_that_was_not_measured_gets_the_median_and_says_so():
    assert efficiency.efficiency_of("single-stream") is efficiency.efficiency_of("") is efficiency.DEFAULT
    assert efficiency.DEFAULT.infer == efficiency.MEASURED["dit"].infer
    assert "not measured" in efficiency.DEFAULT.source


def test_every_efficiency_names_records_that_exist():
    for found in efficiency.MEASURED.values():
        for path in re.findall(r"benchmarks/records/[\w.-]+\.json", found.source):
            assert (ROOT / path).is_file(), path
        assert 0 < found.train < found.infer < 1


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_a_faster_number_format_speeds_up_matrix_products_alone(share):
    assert efficiency.effective_rate(100.0, 100.0, share) == pytest.approx(100 * share)
    other = 1 / 100 / share - 1 / 100
    assert 1 / efficiency.effective_rate(400.0, 100.0, share) == pytest.approx(1 / 400 + other)


def test_the_family_is_known_for_every_shape():
    families = {"dit", "mmdit", "single-stream", "unet", "decoder", "encoder"}
    assert {shape.family for shape in shapes.SHAPES.values()} <= families
    assert shapes.find_shape("flux1-dev").family == shapes.find_shape("qwen-image").family == "mmdit"


def lossless_reports() -> list[tuple[dict, float | None, int]]:
    """(report, the link's rate in the same run, passes a step) of each lossless case in LOSSLESS_RECORDS."""
    found = []
    for name in presets.LOSSLESS_RECORDS:
        kept = record(name)
        link = next(
            (e["result"]["link_bytes_per_second"] for e in kept["cases"] if e["case"]["kind"] == "link"), None
        )
        for entry in kept["cases"]:
            passes = 2 if entry["case"]["mode"] == "train" else 1
            found.append((entry["result"].get("report"), link, passes))
        for run in kept.get("runs", []):
            for prompt in ("second", "settled"):
                found.append(((run.get(prompt) or {}).get("report"), None, 1))
    return [
        (report, link, passes) for report, link, passes in found if report and report.get("decode_seconds")
    ]


def test_the_decoder_s_rate_and_the_link_beside_it_are_the_medians_of_the_records():
    reports = lossless_reports()
    decoded = [
        (report["raw_bytes_per_step"] + passes * report["resident_packed_raw_bytes"])
        / report["decode_seconds"]
        for report, _, passes in reports
    ]
    rate = presets.LOSSLESS_DECODE_PER_MEMORY * presets.CARDS["h200"].memory
    assert statistics.median(decoded) == pytest.approx(rate, rel=0.01)
    shares = [report["link_bytes_per_second"] / link for report, link, _ in reports if link]
    assert statistics.median(shares) == pytest.approx(presets.LOSSLESS_LINK_SHARE, rel=0.01)


def test_the_training_host_s_seconds_are_the_record_s():
    forward = results("2026-11-21-h200-suite-2")["none-host-train"]["phases_ms"]["forward"] / 1e3
    assert forward / 20 == pytest.approx(presets.HOST_COST.of("train"), rel=0.01)


def test_parts_have_the_size_that_a_session_cuts():
    assert placement.PART == rule_planner.PART


# -- links


@pytest.mark.parametrize(
    "card, slot, rate",
    [
        ("rtx4060", "PCIe 4.0 x8", 12.5), ("rtx5060", "PCIe 5.0 x8", 27.8), ("rtx4060ti-16gb", "PCIe 4.0 x8", 12.5),
        ("rtx3060", "PCIe 4.0 x16", 25), ("rtx4090", "PCIe 4.0 x16", 25), ("rx7900xtx", "PCIe 4.0 x16", 25),
        ("rtx5080", "PCIe 5.0 x16", 55.5), ("rtx5090", "PCIe 5.0 x16", 55.5),
    ],
)  # fmt: skip
def test_a_card_has_its_own_link(card, slot, rate):
    found = presets.CARDS[card]
    assert (found.slot, found.link) == (slot, pytest.approx(rate * 1e9, rel=0.01))


def test_the_reached_share_of_a_gen5_link_is_the_measured_one():
    (measured,) = (
        entry["result"]["link_bytes_per_second"]
        for entry in record("2026-11-21-h200-suite-3-codec")["cases"]
        if entry["case"]["kind"] == "link"
    )
    assert pcie.PcieLink(5, 16).rate == pytest.approx(measured, rel=0.01)
    assert pcie.PcieLink(3, 16).rate == pcie.PcieLink(4, 8).rate == pytest.approx(12.5e9)


def test_users_cards_of_each_size_are_known():
    sizes = {card.vram // presets.GB for card in presets.CARDS.values()}
    assert {8, 12, 16, 24, 32} <= sizes
    for name in ("rtx3060ti", "rtx3070", "rtx5060", "rtx4070tisuper", "rtx4080", "rtx5070ti", "rtx3090"):
        assert name in presets.CARDS


def test_the_published_note_s_cards_keep_their_host_s_link_and_count_matrix_products_alone():
    from carom.tools.planner.estimate import Job, Machine

    note, own = presets.CARDS["rtx4090-note"], presets.CARDS["rtx4090"]
    shape = shapes.find_shape("llama-70b")
    assert note.link == 11e9 < own.link
    assert Machine(note).rates(shape, Job("train")).compute == pytest.approx(160e12)
    reached = efficiency.MEASURED["decoder"].train * own.bf16
    assert Machine(own).rates(shape, Job("train")).compute == pytest.approx(reached)
    assert presets.find("gpu", "RTX 4090 (published note)", presets.CARDS) is note
