"""Against a real ai-toolkit: AI_TOOLKIT_PATH names a checkout, AI_TOOLKIT_PYTHON the Python that runs it.

The whole matrix is `python tests/support/ai_toolkit/aitoolkit_matrix.py`; here are a few of its rows and what it cannot show. The checkout is
only read, but for the installation test, which takes away what it puts there.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from carom.tools import ai_toolkit_folder as folder

CHECKOUT = os.environ.get("AI_TOOLKIT_PATH", "")
pytestmark = [
    pytest.mark.skipif(not CHECKOUT, reason="AI_TOOLKIT_PATH is not set: no ai-toolkit to test against"),
    pytest.mark.timeout(1800),
]

ROWS = ("lora", "sampling", "cached text", "convrot8", "steps skipped by oom", "sd1 lora", "flux.1 lora")


def _load():
    spec = importlib.util.spec_from_file_location(
        "aitoolkit_matrix", Path(__file__).parents[1] / "support" / "ai_toolkit" / "aitoolkit_matrix.py"
    )
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
    return {
        outcome.row.name: outcome
        for outcome in bench.outcomes([row for row in matrix.ROWS if row.name in ROWS])
    }


@pytest.mark.parametrize("name", ROWS)
def test_the_trained_lora_is_the_plain_runs_bit_for_bit(outcomes, name):
    outcome = outcomes[name]
    assert outcome.identical, f"{outcome.line()}\n{outcome.log[-3000:]}"


def test_the_log_and_the_output_folder_tell_what_was_done(bench, outcomes):
    log = outcomes["sampling"].log
    # The encoder comes first and has all of the budget but the transformer's least, which asks for its part when it comes.
    assert "carom: Qwen3ForCausalLM: all " in log and log.count("stream through") == 1, log[-3000:]
    (line,) = [line for line in log.splitlines() if "carom: step 2: " in line]
    assert line.count(" streamed, ") == 2, line
    report = json.loads((bench.output("bouncing") / "sampling" / "carom" / "report.json").read_text())
    transformer = report["models"]["ZImageTransformer2DModel"]
    assert transformer["vram_peak_bytes"] <= transformer["vram_budget_bytes"]
    # Of the training steps, not of the samples after them: twice each weight, less what the turns find in the slots.
    assert transformer["kind"] == "train"
    assert 1 < transformer["raw_bytes_per_step"] / transformer["streamed_bytes"] <= 2


READ = """
import os, sys
sys.path.insert(0, os.getcwd())
from toolkit.config import get_config
from toolkit.config_modules import *
from toolkit.util.get_model import get_model_class
for path in sys.argv[1:]:
    (process,) = get_config(path)["config"]["process"]
    model = ModelConfig(**process["model"])
    for section, kind in (("train", TrainConfig), ("network", NetworkConfig), ("save", SaveConfig), ("sample", SampleConfig)):
        kind(**process[section])
    for data in preprocess_dataset_raw_config(process["datasets"]):
        DatasetConfig(**data)
    kind = get_model_class(model)
    print("CLASS", os.path.basename(path), getattr(kind, "arch", None) or kind.__name__, model.arch)
"""


def test_the_examples_are_read_and_name_models_that_it_has(bench, root):
    files = sorted((root / "docs" / "ai-toolkit-examples").glob("*.yaml"))
    command = [bench.python, "-c", READ, *map(str, files)]
    done = subprocess.run(
        command, cwd=bench.place, env=bench.env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("CLASS ")]
    assert [name for name, *_ in found] == [file.name for file in files]
    for name, given, asked in found:
        assert given == asked or (asked, given) == ("sdxl", "StableDiffusion"), name


def test_a_bad_value_stops_the_job_before_it_loads(bench):
    job = bench.job(matrix.Row("bad value", bouncing={"offload": "bounce"}), "bouncing")
    assert dict(bench.run([("bad", job)]))["bad"] != 0
    log = bench.log("bad").read_text()
    assert "bouncing, aimdo, auto, off" in log and "Loading" not in log


def test_an_extension_that_raises_does_not_stop_a_plain_job(bench):
    file = bench.place / "extensions" / folder.NAME / "__init__.py"
    good = file.read_text()
    try:
        file.write_text(good.replace("from carom.toolkit_ext", "from carom.no_such_part"))
        job = bench.job(matrix.Row("broken", both={"train": {"steps": 1}}), "bouncing")
        assert dict(bench.run([("broken", job)]))["broken"] == 0
    finally:
        file.write_text(good)
    log = bench.log("broken").read_text()
    assert log.count("WARNING: Carom is not active") == 1 and "carom: " not in log
    assert list((bench.output("bouncing") / "broken").glob("*.safetensors"))


def test_the_tree_stays_clean_in_git():
    def status():
        command = ["git", "-C", CHECKOUT, "status", "--porcelain"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout

    if not (Path(CHECKOUT) / ".git").exists():
        pytest.skip("the checkout is no git repository")
    before, was_there = status(), (Path(CHECKOUT) / "extensions" / folder.NAME).exists()
    folder.install(Path(CHECKOUT))
    try:
        assert status() == before
    finally:
        if not was_there:
            folder.uninstall(Path(CHECKOUT))
    assert status() == before
