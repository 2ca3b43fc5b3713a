"""The real ComfyUI server in a control group of a quarter of the size of its model's file: all of the server counts, the
Python packages and the activations too.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from carom.benchmarks.hosts.comfy_control_group import ControlGroup, control_group
from carom.benchmarks.hosts.process import evict
from tests_comfy_server import OPTIONS, PATHS, PYTHON, REASON, Server, node

MIB = 1 << 20
SHAPE = {"double": 48, "single": 92, "hidden": 1024, "width": 128, "pooled": 64}  # 6.5 GB in bf16
VRAM, RAM = 128 * MIB, 448 * MIB  # RAM: without the cache, a pass would read 1.07 times the bound
STEPS = 3
FILE = "quarter.safetensors"
# The weights stay in the file's dtype, as on a GPU. By default ComfyUI converts bf16 to fp32 on a CPU.
SERVER = (*OPTIONS, "--bf16-unet")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PATHS, reason=REASON),
    pytest.mark.skipif("--cpu" not in OPTIONS, reason="the limit is that of a server on the CPU"),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, root, carom_cli) -> Iterator[Path]:
    """ComfyUI's data folder with a model of 6.5 GB."""
    base = tmp_path_factory.mktemp("comfy-quarter")
    Server(PATHS[0], base).prepare()
    target = base / "models" / "diffusion_models" / FILE
    made = subprocess.run(
        [PYTHON, str(root / "benchmarks" / "hosts" / "comfy_checkpoint.py"), PATHS[0], str(target), json.dumps(SHAPE)],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    try:
        assert made.returncode == 0, made.stderr
        installed = carom_cli("install-comfyui", str(base))
        assert installed.returncode == 0, installed.stderr
        yield base
    finally:
        shutil.rmtree(base, ignore_errors=True)


def run(server: Server, loader: dict[str, Any]) -> dict[str, Any]:
    """Return what the node "hash" tells after `STEPS` steps of the model that ``loader`` loads."""
    prompt = {
        "load": loader,
        "cond": node("CaromTestConditioning", tokens=8, width=128, pooled=64, seed=5),
        "latent": node("CaromTestLatent", shape="1,16,8,8"),
        "sample": node(
            "KSampler", model=["load", 0], positive=["cond", 0], negative=["cond", 0], latent_image=["latent", 0], seed=1,
            steps=STEPS, cfg=1.0, sampler_name="euler", scheduler="simple", denoise=1.0,
        ),
        "hash": node("CaromTestHash", value=["sample", 0], model=["load", 0]),
    }  # fmt: skip
    told: dict[str, Any] = server.run(prompt, timeout=400)["hash"]
    assert told["finite"] == [True]
    return told


def latents(base: Path, dtype: str) -> list[str]:
    """Return the hash of the latents of the stock loader, in a server without a limit."""
    server = Server(PATHS[0], base, base / "stock.log")
    try:
        server.start(*SERVER)
        return run(server, node("UNETLoader", unet_name=FILE, weight_dtype=dtype))["hash"]
    finally:
        server.stop()


@contextlib.contextmanager
def limited(nbytes: int) -> Iterator[ControlGroup]:
    with contextlib.ExitStack() as stack:
        try:
            group = stack.enter_context(control_group(nbytes))
        except OSError as error:
            pytest.skip(str(error))
        yield group


@pytest.mark.parametrize("dtype", ["default", "fp8_e4m3fn"])
def test_a_quarter_of_the_file_is_enough_for_the_server(folder, dtype):
    """Weights in the file's dtype are read from the file. Converted ones, half as large, are spilled while they are
    converted.
    """
    wanted = latents(folder, dtype)
    file = folder / "models" / "diffusion_models" / FILE
    evict(file)
    loader = node(
        "CaromLoadDiffusionModel", unet_name=FILE, weight_dtype=dtype, mode="stream", vram=f"{VRAM}", ram=f"{RAM}"
    )  # fmt: skip
    with limited(file.stat().st_size // 4) as group:
        server = Server(PATHS[0], folder, folder / f"{dtype}.log", group.prefix)
        try:
            server.start(*SERVER)
            told = run(server, loader)
        finally:
            server.stop()
    assert told["hash"] == wanted
    report = told["report"][0]
    assert report["ram_budget_bytes"] == RAM and report["ram_peak_bytes"] <= RAM
    # The bound of Belady's rule for pieces of any size: a round reads what the cache cannot hold.
    assert 0 < report["disk_bytes_per_step"] <= 1.05 * (report["streamed_bytes"] - RAM)
