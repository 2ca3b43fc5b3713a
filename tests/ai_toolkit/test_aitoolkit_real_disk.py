"""Weights from disk in a real ai-toolkit: AI_TOOLKIT_PATH names a checkout, AI_TOOLKIT_PYTHON the Python that runs it.

The jobs train on the CPU, whose "device memory" is host memory too. So a job's memory is what ai-toolkit itself takes,
plus `ram`, plus `vram`, plus activations.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from carom.benchmarks.hosts.comfy_control_group import control_group

CHECKOUT = os.environ.get("AI_TOOLKIT_PATH", "")
pytestmark = [
    pytest.mark.skipif(not CHECKOUT, reason="AI_TOOLKIT_PATH is not set: no ai-toolkit to test against"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mapped files are found on Linux only"),
    pytest.mark.timeout(1800),
]

HERE = Path(__file__).parents[1] / "support" / "ai_toolkit"
ROWS = ("disk folder", "disk auto", "disk float8", "disk qfloat8", "disk convrot8")
MIB = 1 << 20
RAM, VRAM = 64 * MIB, 34 * MIB
ENCODER_LAYERS, ENCODER_WIDTH = 32, 1024


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


def make(bench, name, *shape):
    """Return the folder of a Z-Image in float32, which is the dtype of the jobs. ``shape``: see `zimage_deep`."""
    folder = bench.folder / "models" / name
    program = (
        f"import sys, pathlib; sys.path.insert(0, {str(HERE)!r}); "
        f"import aitoolkit_models; aitoolkit_models.zimage_deep(pathlib.Path({str(folder)!r}), *{shape})"
    )
    subprocess.run([bench.python, "-c", program], env=bench.env, check=True, capture_output=True, timeout=300)
    return folder


@pytest.fixture(scope="module")
def deep(bench):
    """A transformer of 0.7 GB and a tiny text encoder."""
    return make(bench, "deep", 48)


@pytest.fixture(scope="module")
def deep_encoder(bench):
    """A transformer of 0.7 GB and a text encoder of 1.6 GB."""
    return make(bench, "deep-encoder", 48, ENCODER_LAYERS, ENCODER_WIDTH)


def job(folder, qtype, disk, *, encoder=False, kind="memory"):
    """Return a job, and its `ram` in bytes. ``encoder``: whether the text encoder is quantised too; ``kind``: the start
    of its name, because ai-toolkit goes on from the LoRA of an earlier job with the same name.
    """
    ram = RAM if qtype is None else RAM // 2
    model = {"name_or_path": str(folder), **({} if qtype is None else {"quantize": True, "qtype": qtype})}
    if encoder:
        model |= {"quantize_te": True, "qtype_te": qtype}
    row = matrix.Row(
        f"{kind} {qtype} {disk} {folder.name}".lower(),
        both={"model": model, "train": {"steps": 1 if encoder else 2}},
        bouncing={"offload_kwargs": {"vram": VRAM, "ram": ram, "disk": disk}},
    )
    return row, ram


def peak(bench, row):
    """Run the job of ``row``. Return (most bytes that it had, bytes that ai-toolkit itself had before it)."""
    name = matrix.slug(row)
    codes = dict(bench.run([(name, bench.job(row, "bouncing"))]))
    log = bench.log(name).read_text()
    assert codes[name] == 0, log[-3000:]
    assert re.search(matrix.FROM_DISK, log), log[-3000:]
    most, before = bench.peak(name)
    print(f"{row.name}: {most / MIB:.0f} MiB, of which ai-toolkit itself {before / MIB:.0f} MiB")
    return most, before


@pytest.mark.parametrize(
    ("qtype", "disk"), [(None, "auto"), (None, "SPILL"), ("qfloat8", "SPILL"), ("convrot8", "SPILL")]
)
def test_a_job_takes_ram_and_at_most_1_gib_more(bench, deep, qtype, disk):
    row, ram = job(deep, qtype, disk)
    most, before = peak(bench, row)
    limit = ram + 1024 * MIB
    assert most <= limit, f"{most / MIB:.0f} MiB, of which ai-toolkit itself {before / MIB:.0f} MiB"


@pytest.mark.parametrize("qtype", ["qfloat8", "convrot8"])
def test_a_text_encoder_that_is_quantised_as_a_whole_never_is_whole_in_memory(bench, deep_encoder, qtype):
    row, ram = job(deep_encoder, qtype, "SPILL", encoder=True)
    most, before = peak(bench, row)
    log = bench.log(matrix.slug(row)).read_text()
    assert re.search(r"carom: Qwen3\w+: .* stream through .* from disk", log), log[-3000:]
    # A layer of Qwen3 has three matrices of `width` times 4 `width` and two of `width` times 256, and two smaller ones.
    encoder = ENCODER_LAYERS * (12 * ENCODER_WIDTH**2 + 2 * 256 * ENCODER_WIDTH)
    limit = ram + VRAM + encoder // 2
    assert most - before <= limit, f"{(most - before) / MIB:.0f} MiB, and {limit / MIB:.0f} MiB are allowed"


@pytest.mark.parametrize(("qtype", "disk"), [(None, "auto"), ("qfloat8", "SPILL")])
def test_a_job_ends_well_in_a_control_group_that_kills_beyond_ram_and_1_gib(bench, request, qtype, disk):
    """The two processes of ai-toolkit's data loader count too, and the page cache, which the kernel takes back."""
    quantised = qtype is not None
    folder = request.getfixturevalue("deep_encoder" if quantised else "deep")
    row, ram = job(folder, qtype, disk, encoder=quantised, kind="limited")
    name = matrix.slug(row)
    with contextlib.ExitStack() as stack:
        try:
            group = stack.enter_context(control_group(ram + 1024 * MIB))
        except OSError as error:
            pytest.skip(str(error))
        code = bench.run_alone(name, bench.job(row, "bouncing"), group.prefix)
    log = bench.log(name).read_text()
    assert code == 0, f"exit code {code}\n{log[-3000:]}"
    assert re.search(matrix.FROM_DISK, log), log[-3000:]
