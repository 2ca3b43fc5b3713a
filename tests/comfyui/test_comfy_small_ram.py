"""The real ComfyUI server in a control group that is smaller than its models: weights stream from their files.

The server runs on the CPU, so the slots of a session and its activations are in the same memory.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from carom.benchmarks.hosts.comfy_control_group import ControlGroup, control_group
from carom.benchmarks.hosts.process import evict
from carom.core.host.cache_pieces import choose_buffers
from safetensors.torch import load_file, save_file
from tests_comfy_server import OPTIONS, PATHS, PYTHON, REASON, Server, node

MIB = 1 << 20
SHAPE = {"double": 6, "single": 12, "hidden": 1024, "width": 128, "pooled": 64}
VRAM, RAM = 128 * MIB, 256 * MIB  # less than a quarter of the model together
WORK = 384 * MIB  # what a prompt takes beside weights: activations, packages that are imported late
STEPS = 6

pytestmark = [
    pytest.mark.skipif(not PATHS, reason=REASON),
    pytest.mark.skipif("--cpu" not in OPTIONS, reason="the limits are those of a server on the CPU"),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, root, carom_cli) -> Iterator[Path]:
    """ComfyUI's data folder with two models of 1.6 GiB, an encoder, and LoRAs."""
    base = tmp_path_factory.mktemp("comfy-small-ram")
    server = Server(PATHS[0], base)
    server.prepare()
    models = base / "models" / "diffusion_models"
    done = subprocess.run(
        [PYTHON, str(root / "benchmarks" / "hosts" / "comfy_checkpoint.py"), PATHS[0], str(models / "big16.safetensors"),
         json.dumps(SHAPE)], capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    weights = load_file(models / "big16.safetensors")
    (models / "big16.safetensors").unlink()
    save_file({name: tensor.float() for name, tensor in weights.items()}, models / "big.safetensors")
    save_file({name: tensor.float().neg() for name, tensor in weights.items()}, models / "big2.safetensors")
    save_file(lora(weights), base / "models" / "loras" / "big.safetensors")
    del weights
    done = carom_cli("install-comfyui", str(base))
    assert done.returncode == 0, done.stderr
    try:
        yield base
    finally:
        shutil.rmtree(base / "models", ignore_errors=True)


def lora(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found, generator = {}, torch.Generator().manual_seed(4)
    for name in ("double_blocks.1.img_mlp.0.weight", "single_blocks.3.linear1.weight"):
        out, into = weights[name].shape
        key = "diffusion_model." + name.removesuffix(".weight")
        found[f"{key}.lora_down.weight"] = torch.randn(4, into, generator=generator) * 0.1
        found[f"{key}.lora_up.weight"] = torch.randn(out, 4, generator=generator) * 0.1
    return found


class Limited:
    """A server, in a control group if one is given."""

    def __init__(self, server: Server, group: ControlGroup | None) -> None:
        self.server, self.group = server, group

    def outputs(self, prompt: dict[str, Any]) -> dict[str, Any]:
        """Return what the nodes of the prompt tell."""
        return self.server.run(prompt, timeout=400)

    def run(self, prompt: dict[str, Any]) -> dict[str, Any]:
        """Return what the node "hash" tells after the prompt."""
        told: dict[str, Any] = self.outputs(prompt)["hash"]
        assert told["finite"] == [True]
        return told


@pytest.fixture(scope="module")
def stock(folder) -> Iterator[Limited]:
    server = Server(PATHS[0], folder, folder / "stock.log")
    try:
        server.start_for_tests()
        yield Limited(server, None)
    finally:
        server.stop()


@pytest.fixture(scope="module")
def limited(folder) -> Iterator[Limited]:
    try:
        with control_group(4 << 30) as group:
            server = Server(PATHS[0], folder, folder / "limited.log", group.prefix)
            try:
                server.start_for_tests()
                group.set_limit(group.held_bytes + 2 * VRAM + RAM + WORK)  # two models may be loaded
                yield Limited(server, group)
            finally:
                server.stop()
    except OSError as error:
        pytest.skip(str(error))


def prompt(loader: dict, seed: int = 1, lora: bool = False, low: bool = False) -> dict[str, Any]:
    nodes = {
        "load": loader,
        "cond": node("CaromTestConditioning", tokens=8, width=128, pooled=64, seed=5),
        "latent": node("CaromTestLatent", shape="1,16,16,16"),
    }
    model: list[Any] = ["load", 0]
    if lora:
        nodes["lora"] = node(
            "LoraLoaderModelOnly", lora_name="big.safetensors", strength_model=0.8, model=model
        )
        model = ["lora", 0]
    if low:  # ComfyUI applies LoRA at each use there, as it does to models that stream
        nodes["low"] = node("CaromTestLowVram", model=model)
        model = ["low", 0]
    nodes["sample"] = node(
        "KSampler", model=model, positive=["cond", 0], negative=["cond", 0], latent_image=["latent", 0], seed=seed,
        steps=STEPS, cfg=1.0, sampler_name="euler", scheduler="simple", denoise=1.0,
    )  # fmt: skip
    nodes["hash"] = node("CaromTestHash", value=["sample", 0], model=model)
    return nodes


def theirs(name: str = "big") -> dict:
    return node("UNETLoader", unet_name=f"{name}.safetensors", weight_dtype="default")


def ours(name: str = "big", ram: int = RAM) -> dict:
    return node(
        "CaromLoadDiffusionModel", unet_name=f"{name}.safetensors", weight_dtype="default", mode="stream", vram=f"{VRAM}",
        ram=f"{ram}",
    )  # fmt: skip


def least_read(report: dict[str, Any], ram: int) -> float:
    """Return the bytes that a pass over all units in the same order reads at least, by Belady's rule.

    A cache of c pieces that holds the piece in use misses n (n - c) / (n - 1) of n pieces in each round. The pieces are
    those of the host cache, for units of one size.
    """
    streamed, units = int(report["streamed_bytes"]), report["units"]
    plan = choose_buffers([streamed // units] * units, ram)
    pieces = max(plan.count + 1, units * -(-streamed // units // plan.nbytes))
    return streamed * (pieces - plan.count) / (pieces - 1)


def test_a_model_of_four_times_the_memory_streams_from_its_file(limited, stock, folder):
    """Latents are the stock loader's, and a pass reads what it must at least."""
    evict(folder / "models" / "diffusion_models" / "big.safetensors")
    reference = stock.run(prompt(theirs()))["hash"]
    patched = stock.run(prompt(theirs(), lora=True, low=True))["hash"]
    told = limited.run(prompt(ours()))
    report = told["report"][0]
    assert report["ram_budget_bytes"] == RAM and report["ram_peak_bytes"] <= RAM
    assert told["hash"] == reference != patched
    assert limited.run(prompt(ours(), lora=True))["hash"] == patched
    told = limited.run(prompt(ours()))
    assert told["hash"] == reference
    report = told["report"][0]
    assert report["disk_bytes_per_step"] <= 1.05 * least_read(report, RAM)


def test_a_packed_model_of_four_times_the_memory_loads_and_streams(limited, stock, folder, carom_cli):
    """Its decoded weights are spilled while they are read, and stream from the spill file."""
    models = folder / "models" / "diffusion_models"
    done = carom_cli(
        "pack", str(models / "big.safetensors"), str(models / "packed.safetensors"), "--codec", "lossless",
        "--device", "cpu",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (models / "packed.safetensors").stat().st_size < (models / "big.safetensors").stat().st_size
    limited.server.free()
    told = limited.run(prompt(ours("packed")))
    assert told["hash"] == stock.run(prompt(theirs()))["hash"]
    report = told["report"][0]
    assert report["ram_budget_bytes"] == RAM and report["ram_peak_bytes"] <= RAM
    assert (
        limited.run(prompt(ours("packed"), lora=True))["hash"]
        == stock.run(prompt(theirs(), lora=True, low=True))["hash"]
    )
    limited.server.free()


def turns(first: dict, second: dict, encoder: dict, seed: int) -> dict[str, Any]:
    """Return a prompt in which two models sample one after the other, and an encoder reads a text."""
    nodes = prompt(first, seed)
    nodes["load2"] = second
    inputs = {
        **nodes["sample"]["inputs"],
        "model": ["load2", 0],
        "latent_image": ["sample", 0],
        "denoise": 0.9,
    }
    nodes["sample2"] = node("KSampler", **inputs)
    nodes["hash2"] = node("CaromTestHash", value=["sample2", 0], model=["load2", 0])
    nodes["clip"] = encoder
    nodes["text"] = node("CLIPTextEncode", clip=["clip", 0], text=f"lighthouse {seed}")
    nodes["words"] = node("CaromTestHash", value=["text", 0])
    return nodes


def test_two_models_and_an_encoder_take_turns(limited, stock):
    """Together they get the RAM of one, and the one that runs gets most of it."""
    mine = node(
        "CaromLoadCLIP",
        clip_name="clip_l.safetensors",
        type="stable_diffusion",
        mode="stream",
        vram="90MiB",
        ram=f"{RAM}",
    )
    other = node("CLIPLoader", clip_name="clip_l.safetensors", type="stable_diffusion")
    for seed in (1, 2, 1):
        wanted = stock.outputs(turns(theirs(), theirs("big2"), other, seed))
        found = limited.outputs(turns(ours(), ours("big2"), mine, seed))
        for name in ("hash", "hash2", "words"):
            assert found[name]["hash"] == wanted[name]["hash"], (seed, name)
        for name in ("hash", "hash2"):
            report = found[name]["report"][0]
            assert RAM // 2 <= report["ram_budget_bytes"] <= RAM
            assert report["ram_peak_bytes"] <= RAM


def small(kind: str, carom: bool, loras: int, ram: int = 4 * MIB) -> dict[str, Any]:
    """Return a prompt with a tiny Flux of a ``kind`` of quantisation, and a stack of ``loras``."""
    name = f"flux_{kind}" if kind else "flux"
    nodes = prompt(theirs(name))
    if carom:
        nodes["load"] = ours(name, ram)
        nodes["load"]["inputs"]["vram"] = "8MiB"
    model: list[Any] = ["load", 0]
    for index, file in enumerate(("flux", "other")[:loras]):
        nodes[f"lora{index}"] = node(
            "LoraLoaderModelOnly", lora_name=f"{file}.safetensors", strength_model=0.7, model=model
        )
        model = [f"lora{index}", 0]
    if loras and not carom:
        nodes["low"] = node("CaromTestLowVram", model=model)
        model = ["low", 0]
    for name in ("sample", "hash"):
        nodes[name]["inputs"]["model"] = model
    return nodes


@pytest.mark.parametrize("kind", ["", "float8_e4m3fn", "nvfp4", "int8_tensorwise"])
def test_lora_stacks_over_weights_on_disk(limited, stock, kind):
    """LoRA on, off and on again over a model of which a part is in no memory. Its file is bf16 and the CPU computes in
    fp32, so the weights that ComfyUI converts are spilled, and quantised ones stream from their file.
    """
    seen = set()
    for loras in (0, 2, 1, 0):
        told = limited.run(small(kind, True, loras))
        assert told["hash"] == stock.run(small(kind, False, loras))["hash"], loras
        report = told["report"][0]
        assert report["ram_budget_bytes"] == 4 * MIB
        # A change of layout while reads are under way was seen to take 0.37 MiB more for a moment.
        assert report["ram_peak_bytes"] <= 5 * MIB
        seen.add(told["hash"][0])
    assert len(seen) == 3


def test_weights_that_loading_converts_are_spilled(limited, stock, folder):
    """Their file in ComfyUI's temporary folder goes with the model."""
    spilled = small("", True, 0, 2 * MIB)
    plain = small("", False, 0)
    for nodes in (spilled, plain):
        nodes["load"]["inputs"]["weight_dtype"] = "fp8_e4m3fn"
    told = limited.run(spilled)
    assert told["hash"] == stock.run(plain)["hash"]
    assert told["report"][0]["ram_budget_bytes"] == 2 * MIB
    assert list((folder / "temp" / "carom").glob("carom-spill-*"))
    limited.server.free()
    give_up = time.monotonic() + 10
    while list((folder / "temp" / "carom").glob("carom-spill-*")) and time.monotonic() < give_up:
        time.sleep(0.2)
    assert not list((folder / "temp" / "carom").glob("carom-spill-*"))


def test_nothing_is_read_where_ram_suffices(folder, stock, limited):
    """Without a limit the weights wait in RAM as a whole."""
    told = stock.run(prompt(ours(ram=4 << 30)))
    report = told["report"][0]
    assert report["disk_bytes_per_step"] == 0 and report["ram_budget_bytes"] == 0
    assert told["hash"] == stock.run(prompt(theirs()))["hash"]
