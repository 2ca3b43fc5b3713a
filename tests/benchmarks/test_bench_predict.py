"""`benchmarks/engines/predict_gpu.py` in miniature: the probe, a predicted and measured point, and the host timed apart."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import carom
import pytest
from carom.benchmarks.engines import dit
from carom.benchmarks.engines.case import Case

ROOT = Path(__file__).resolve().parents[2]


def _script():
    spec = importlib.util.spec_from_file_location(
        "bench_predict_gpu", ROOT / "benchmarks" / "engines" / "predict_gpu.py"
    )
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = _script()
LIB = script.load_checkout()


@pytest.mark.parametrize("mode", ["infer", "train"])
def test_a_probe_of_three_blocks_predicts_a_model_of_five(mode):
    case = Case(engine="carom", mode=mode, d=64, depth=5, tokens=8)
    device = carom.SimulatedDevice(
        timing="early", link_bytes_per_second=case.block_bytes / 200e-6, kernel_seconds=3e-6, flops=2e11
    )
    small = case.but(depth=script.PROBE_BLOCKS)
    model = dit.build(small)
    learnt, host = script.probe(model, small, device, LIB), script.probe_host(model, small, device, LIB)
    row = script.point(dit.build(case), case, device, 0.0, learnt, host, LIB)
    assert host is None and row["streamed"] > 0
    assert abs(row["error"]) < 0.1 and row["predicted_stall_s"] > 0
    assert "1 of 1 within 10 %" in script.table([row])


@pytest.mark.parametrize("mode", ["infer", "train"])
def test_the_host_is_timed_apart_streaming_and_resident(mode):
    case = Case(engine="carom", mode=mode, d=64, depth=script.PROBE_BLOCKS, tokens=8)
    host = script.probe_host(dit.build(case), case, "cpu", LIB)
    assert host.resident[0] > 0 and 0 < host.streamed[0] < 1
    assert all((seconds > 0) == (mode == "train") for seconds in (host.streamed[1], host.resident[1]))
