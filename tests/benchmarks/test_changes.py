"""The benchmarks of what changes cost: they run without a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from carom.benchmarks.engines import attaching, session_memory, switches
from carom.benchmarks.results.render_sessions import attaching_rows

ROOT = Path(__file__).resolve().parents[2]


def test_switches_and_budgets_are_timed_for_weights_in_ram_and_in_a_file(capsys, monkeypatch):
    monkeypatch.setattr(switches, "ROUNDS", 2)
    monkeypatch.setattr(switches, "PASSES", 1)
    monkeypatch.setattr(switches, "SMALL", switches.Case(d=64, depth=6))
    assert switches.main([]) == 0
    cells = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [cell["cell"] for cell in cells] == ["ram raw", "ram auto", "file raw"]
    for cell in cells:
        spread = cell["beyond_seconds"]
        assert spread["least"] <= spread["median"] <= spread["largest"] < 5
        assert cell["budget_beyond_seconds"].keys() == {"smaller", "larger"}


def test_attaching_is_timed_for_many_small_tensors(capsys, monkeypatch):
    monkeypatch.setattr(attaching, "TENSORS", 100)
    monkeypatch.setattr(attaching, "TURNS", 3)
    assert attaching.main([]) == 0
    cells = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [cell["tensors"] for cell in cells] == [100, 100]
    assert all(0 < cell["seconds"]["least"] <= cell["seconds"]["largest"] < 5 for cell in cells)
    rows = attaching_rows({"cases": [{"key": cell["cell"], "result": cell} for cell in cells]})
    assert [row.metric for row in rows] == ["the first attach", "later attaches"] * 2


def test_attaching_counts_what_pinning_takes_as_its_floor():
    times = {"first": 2.0, "least": 1.0, "median": 1.1, "largest": 1.2}
    record = {"cases": [
        {"key": "pinning alone", "result": {"bytes": 9e9, "pin_seconds": [0.7, 0.5, 0.6]}},
        {"key": "DiT raw", "result": {"bytes": 9e9, "seconds": times}},
    ]}  # fmt: skip
    assert [(row.value, row.floor) for row in attaching_rows(record)] == [(2.0, 0.6), (1.1, 0.6)]


def test_without_a_gpu_the_large_models_are_refused(capsys, monkeypatch):
    monkeypatch.setattr(switches.torch.cuda, "is_available", lambda: False)
    assert switches.main(["--cuda"]) == attaching.main(["--cuda"]) == 2
    assert capsys.readouterr().err.count("GPU") == 2


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the anonymous memory of a process")
def test_the_host_memory_of_a_session_is_measured_in_a_process_of_its_own():
    found = session_memory.run("after a park", ROOT)
    assert 0.7 < found["parked"] < 2 and 0.7 < found["attached"] < 2
    assert session_memory.run("no such case", ROOT / "tests").keys() == {"error"}


def test_other_systems_are_told_that_they_cannot_measure_it(capsys, monkeypatch):
    monkeypatch.setattr(session_memory.sys, "platform", "win32")
    assert session_memory.main([]) == 2
    assert "Linux" in capsys.readouterr().err
