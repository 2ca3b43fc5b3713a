"""`benchmarks/engines/auto_gpu.py` in miniature: everything it does on a GPU but the GPU, and what its table says."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from carom.benchmarks.engines.auto_cases import Bench, Wire
from carom.benchmarks.engines.case import Case
from carom.benchmarks.engines.mapped_model import Pages, make_model
from carom.core.device.simulated import SimulatedDevice, SimulatedEngine
from carom.core.metrics.meter import Meter

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "engines" / "auto_gpu.py"


def _script():
    spec = importlib.util.spec_from_file_location("bench_auto_gpu", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


auto_gpu = _script()


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the miniature is for machines without a GPU")
def test_the_whole_runs_in_miniature_and_keeps_its_record(tmp_path):
    done = subprocess.run(
        [
            sys.executable, str(SCRIPT), "--d", "32", "--cards", "1", "--tokens", "8", "--train-tokens", "8", "--rounds", "4",
            "--over", "1.2", "--seconds", "40", "--parts", "alternate,aimdo,cards", "--json", str(tmp_path / "auto.json"),
        ],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "auto.json").read_text())
    infer, train = record["cards"]
    assert (infer["mode"], train["mode"]) == ("infer", "train")
    for row in (infer, train):
        if "skipped" in row:  # a slow machine
            continue
        assert row["exact"] and row["auto"]["failed_steps"] == 0
        assert row["model_bytes"] > row["auto"]["held_bytes"] > 0
        assert row["ratio"] == row["auto"]["step_s"] / row["best_s"]
    assert "auto" in infer
    both = record["alternate"]
    assert both["exact"] and both["shared"]["most_held_bytes"] <= both["budget_bytes"]
    assert "two models, one budget for 1.5" in done.stdout


def test_a_part_or_a_card_that_does_not_exist_is_named():
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--parts", "cards,nonsense"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2 and "nonsense" in done.stderr


def test_models_that_share_pages_look_like_models_that_do_not():
    case = Case(engine="carom", mode="train", d=32, depth=3)
    model = make_model(case, Pages(case))
    first, second = model.blocks[0].mlp.fc1.base.weight, model.blocks[1].mlp.fc1.base.weight
    assert torch.equal(first, second) and first.data_ptr() != second.data_ptr()
    first.data[0, 0] = 7.0
    assert second[0, 0] != 7.0, "a page that is written is nobody else's"
    assert not any(p.is_meta for p in model.parameters())
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_a_model_is_larger_than_its_card_by_what_was_asked():
    bench = Bench(Case(engine="carom", d=3072), over=1.4)
    for card in (8, 24):
        size = bench.depth(card) * bench.case.block_bytes
        assert 1.4 <= size / (card * 1e9) < 1.45


def test_the_wire_counts_only_while_it_is_open():
    before = Meter.copied
    with Wire() as wire:
        Meter(SimulatedEngine(SimulatedDevice())).copied("a", None, 100, 200, False)
    Meter(SimulatedEngine(SimulatedDevice())).copied("a", None, 100, 200, False)
    assert (wire.total, Meter.copied) == (100, before)


def test_the_table_names_failures_and_the_worst_ratio():
    auto = {"step_s": 0.2, "host_s": 0.01, "held_bytes": 6 << 30, "ooms": 1, "layouts": 2}
    row = {"card_gb": 8, "mode": "infer", "tokens": 4096, "model_bytes": 11e9, "auto": auto, "best_s": 0.16,
           "best_budget_bytes": 7 << 30, "ratio": 1.25, "exact": True}  # fmt: skip
    other = {"card_gb": 12, "mode": "train", "tokens": 1024}
    record = {
        "cards": [row, other | {"failed": "OutOfMemoryError: x"}, other | {"skipped": "out of time"}],
        "doctor": {"doctor": {"exit_code": 0, "wall_s": 9.0, "output": {"seconds": 4.0}}},
        "aimdo": {"skipped": "comfy-aimdo is not installed"}, "seconds": 100.0,
    }  # fmt: skip
    text = auto_gpu.table(record)
    assert "at most 1.250 over 1 runs" in text and "OutOfMemoryError: x" in text and "out of time" in text
    assert "doctor: exit 0, 9.0 s, of which the probe 4.0 s" in text and "not installed" in text
