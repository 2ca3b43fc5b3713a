"""Weights from disk in a real ai-toolkit: AI_TOOLKIT_PATH names a checkout, AI_TOOLKIT_PYTHON the Python that runs it.

The jobs train on the CPU, whose "device memory" is host memory too. So a job's memory is what ai-toolkit itself takes,
plus `ram`, plus `vram`, plus activations.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = os.environ.get("AI_TOOLKIT_PATH", "")
pytestmark = [
    pytest.mark.skipif(not CHECKOUT, reason="AI_TOOLKIT_PATH is not set: no ai-toolkit to test against"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mapped files are found on Linux only"),
    pytest.mark.timeout(1800),
]

HERE = Path(__file__).parents[1] / "support" / "ai_toolkit"
ROWS = ("disk folder", "disk auto", "disk float8", "disk qfloat8", "disk convrot8")
MIB = 1 << 20
RAM = 64 * MIB


def _load():
    spec = importlib.util.spec_from_file_location("aitoolkit_matrix", HERE / "aitoolkit_matrix.py")
    assert spec and spec.loader
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


matrix = _load()


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return matrix.Bench(Path(CHECKOUT).resolve(), tmp_path_factory.mktemp("ai-toolkit"))


@pytest.fixture(scope="module")
def outcomes(bench):
    rows = [row for row in matrix.ROWS if row.name in ROWS]
    return {outcome.row.name: outcome for outcome in bench.outcomes(rows)}


@pytest.mark.parametrize("name", ROWS)
def test_the_lora_of_a_model_that_streams_from_disk_is_the_plain_runs_bit_for_bit(outcomes, name):
    outcome = outcomes[name]
    assert outcome.identical, f"{outcome.line()}\n{outcome.log[-3000:]}"


def test_no_spill_file_is_left(bench, outcomes):
    assert not list((bench.folder / "spill").glob("*"))


# -- memory


@pytest.fixture(scope="module")
def deep(bench):
    """A Z-Image of 0.7 GB in float32, which is the dtype of the jobs."""
    folder = bench.folder / "models" / "deep"
    program = (
        f"import sys, pathlib; sys.path.insert(0, {str(HERE)!r}); "
        f"import aitoolkit_models; aitoolkit_models.zimage_deep(pathlib.Path({str(folder)!r}))"
    )
    subprocess.run([bench.python, "-c", program], env=bench.env, check=True, capture_output=True, timeout=300)
    return folder


@pytest.mark.parametrize(
    ("qtype", "disk"),
    [
        (None, "auto"),
        (None, "SPILL"),
        ("qfloat8", "SPILL"),
        ("convrot8", "SPILL"),
    ],
)
def test_a_job_takes_ram_and_at_most_1_gib_more(bench, deep, qtype, disk):
    ram = RAM if qtype is None else RAM // 2
    limit = ram + 1024 * MIB
    model = {"name_or_path": str(deep), **({} if qtype is None else {"quantize": True, "qtype": qtype})}
    row = matrix.Row(
        f"memory {qtype} {disk}".lower(),
        both={"model": model, "train": {"steps": 2}},
        bouncing={"offload_kwargs": {"vram": "34MiB", "ram": ram, "disk": disk}},
    )
    name = matrix.slug(row)
    codes = dict(bench.run([(name, bench.job(row, "bouncing"))]))
    log = bench.log(name).read_text()
    assert codes[name] == 0, log[-3000:]
    assert re.search(matrix.FROM_DISK, log), log[-3000:]
    most, before = bench.peak(name)
    assert most <= limit, f"{most / MIB:.0f} MiB, of which ai-toolkit itself {before / MIB:.0f} MiB"
    print(f"{row.name}: {most / MIB:.0f} MiB, of which ai-toolkit itself {before / MIB:.0f} MiB")
