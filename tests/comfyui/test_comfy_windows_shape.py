"""The real ComfyUI server in the Windows shape, with a model that is larger than its RAM budget: what is written to the drive."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tests_comfy_server import OPTIONS, PATHS, PYTHON, REASON, Server, node
from tests_windows_shape import environment

SHAPE = {"double": 2, "single": 4, "hidden": 768, "width": 128, "pooled": 64}
MB = 10**6
MODEL = 326 * MB
SMALL = 60 * MB  # of RAM, and of the device

pytestmark = [
    pytest.mark.skipif(not PATHS, reason=REASON),
    pytest.mark.skipif("--cpu" not in OPTIONS, reason="the budgets are those of a server on the CPU"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the shape is made on Linux"),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, root, carom_cli) -> Path:
    """ComfyUI's data folder with a model of 326 MB."""
    base = tmp_path_factory.mktemp("comfy-windows")
    Server(PATHS[0], base).prepare()
    models = base / "models" / "diffusion_models"
    done = subprocess.run(
        [PYTHON, str(root / "benchmarks" / "hosts" / "comfy_checkpoint.py"), PATHS[0], str(models / "half.safetensors"),
         json.dumps(SHAPE)], capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    weights = load_file(models / "half.safetensors")
    save_file({name: tensor.float() for name, tensor in weights.items()}, models / "model.safetensors")
    assert (models / "model.safetensors").stat().st_size == pytest.approx(MODEL, rel=0.01)
    assert carom_cli("install-comfyui", str(base)).returncode == 0
    return base


@pytest.fixture(scope="module")
def linux(folder) -> Iterator[Server]:
    yield from started(folder, "linux", {})


@pytest.fixture
def windows(folder) -> Iterator[Server]:
    """A server whose own code sees Windows, as Carom's does."""
    yield from started(folder, "windows", environment(roots=[PATHS[0]]))


def started(folder: Path, name: str, surroundings: dict[str, str]) -> Iterator[Server]:
    server = Server(PATHS[0], folder, folder / f"{name}.log")
    try:
        server.start(*OPTIONS, environment={**surroundings, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"})
        yield server
    finally:
        server.stop()


def prompt(dtype: str) -> dict[str, Any]:
    nodes = {
        "load": node(
            "CaromLoadDiffusionModel", unet_name="model.safetensors", weight_dtype=dtype, mode="stream", vram=f"{SMALL}",
            ram=f"{SMALL}",
        ),
        "cond": node("CaromTestConditioning", tokens=8, width=128, pooled=64, seed=5),
        "latent": node("CaromTestLatent", shape="1,16,16,16"),
    }  # fmt: skip
    nodes["sample"] = node(
        "KSampler", model=["load", 0], positive=["cond", 0], negative=["cond", 0], latent_image=["latent", 0], seed=1,
        steps=2, cfg=1.0, sampler_name="euler", scheduler="simple", denoise=1.0,
    )  # fmt: skip
    nodes["hash"] = node("CaromTestHash", value=["sample", 0], model=["load", 0])
    return nodes


def written(server: Server) -> int:
    """Return the bytes that the server has written by system calls, its log included."""
    with open(f"/proc/{server.pid}/io") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("wchar:"))


def spilled(folder: Path) -> list[Path]:
    return list((folder / "temp").rglob("carom-spill-*"))


def test_weights_of_a_mapped_file_are_not_written_anywhere(windows, linux, folder):
    before = written(windows)
    told = windows.run(prompt("default"), timeout=300)["hash"]
    assert written(windows) - before < 1 * MB and not spilled(folder)
    report = told["report"][0]
    assert report["ram_budget_bytes"] == SMALL and report["ram_peak_bytes"] <= SMALL
    assert told["hash"] == linux.run(prompt("default"), timeout=300)["hash"]["hash"]


def test_weights_that_loading_converts_are_written_once_and_gone_after_the_exit(windows, linux, folder):
    before = written(windows)
    told = windows.run(prompt("fp8_e4m3fn"), timeout=300)["hash"]
    nbytes = sum(path.stat().st_size for path in spilled(folder))
    assert nbytes > SMALL
    assert written(windows) - before < 1.05 * nbytes
    windows.stop()
    give_up = time.monotonic() + 10
    while spilled(folder) and time.monotonic() < give_up:
        time.sleep(0.1)
    assert not spilled(folder)
    assert told["hash"] == linux.run(prompt("fp8_e4m3fn"), timeout=300)["hash"]["hash"]
