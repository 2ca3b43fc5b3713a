"""What the CPU matrix of ai-toolkit says of jobs that ran; the jobs themselves are stood in for: no ai-toolkit is needed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file


def _load():
    spec = importlib.util.spec_from_file_location(
        "aitoolkit_matrix", Path(__file__).parents[1] / "support" / "ai_toolkit" / "aitoolkit_matrix.py"
    )
    assert spec and spec.loader
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


matrix = _load()
ROWS = [row for row in matrix.ROWS if row.name in ("sd1 slider", "sdxl lora")]
STREAMED = "carom: UNet2DConditionModel: 4 of 4 units stream through 4 MiB\n"


class Stub(matrix.Bench):
    """Jobs that leave one tensor each, the same on both sides; those named in ``fails`` end with their error."""

    def __init__(self, folder: Path, fails: tuple[str, ...] = (), off: tuple[str, ...] = ()) -> None:
        self.folder, self.fails, self.off, self.jobs = folder, fails, off, {}

    def run(self, jobs, env=None):
        self.jobs = dict(jobs)
        for name, config in jobs:
            (process,) = config["config"]["process"]
            folder = Path(process["training_folder"]) / config["config"]["name"]
            folder.mkdir(parents=True, exist_ok=True)
            save_file({"a": torch.full((2,), float(name in self.off))}, folder / "lora.safetensors")
            self.log(name).write_text("ValueError: no\n" if name in self.fails else STREAMED)
            yield name, int(name in self.fails)


def test_every_kind_is_warmed_up_by_a_job_whose_output_no_other_job_finds(tmp_path):
    bench = Stub(tmp_path)
    assert all(outcome.identical for outcome in bench.outcomes(ROWS))
    places = {
        name: (config["config"]["process"][0]["training_folder"], config["config"]["name"])
        for name, config in bench.jobs.items()
    }
    assert list(places)[:2] == ["warm-sd1", "warm-sdxl"]
    assert len(set(places.values())) == len(places), places


def test_rows_of_a_kind_whose_warm_up_failed_show_nothing(tmp_path):
    slider, sdxl = Stub(tmp_path, fails=("warm-sdxl",)).outcomes(ROWS)
    assert slider.identical
    assert not sdxl.identical and sdxl.failed == "warm FAILED: ValueError: no"


@pytest.mark.parametrize("side", ["plain", "bouncing"])
def test_a_job_that_failed_is_named_by_its_side(tmp_path, side):
    _, sdxl = Stub(tmp_path, fails=(f"{side}-sdxl-lora",)).outcomes(ROWS)
    assert sdxl.failed == f"{side} FAILED: ValueError: no"


def test_what_was_trained_otherwise_is_named_by_its_file(tmp_path):
    _, sdxl = Stub(tmp_path, off=("bouncing-sdxl-lora",)).outcomes(ROWS)
    assert sdxl.different and sdxl.line().split("DIFFERENT: ")[1].startswith("sdxl-lora/lora.safetensors")
