"""Weights on disk of models that are not plain safetensors models, in the real ComfyUI server on the CPU: GGUF files, a
ControlNet beside a model, compiled models.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests_comfy_graphs import Graph, hash_of, lora, ours, stock, told_by
from tests_comfy_server import PATHS, PYTHON, REASON, Server, node

pytestmark = [pytest.mark.skipif(not PATHS, reason=REASON), pytest.mark.timeout(600)]
MIB = 1 << 20
RAM = 2 * MIB


@pytest.fixture(scope="module", params=PATHS or ["none"], ids=lambda path: Path(path).name)
def server(request, tmp_path_factory, carom_cli) -> Iterator[Server]:
    base = tmp_path_factory.mktemp("comfy-disk-kinds")
    server = Server(request.param, base)
    server.prepare()
    done = carom_cli("install-comfyui", str(base))
    assert done.returncode == 0, done.stderr
    try:
        server.start_for_tests()
        yield server
    finally:
        server.stop()
        shutil.rmtree(base / "models", ignore_errors=True)


def spilled(server: Server) -> int:
    """Return the bytes of the spill files."""
    folder = server.base / "temp" / "carom"
    return sum(path.stat().st_size for path in folder.glob("carom-spill-*"))


def assert_reads_disk(told: dict[str, Any], ram: int = RAM) -> None:
    report = told["report"][0]
    assert report["ram_budget_bytes"] == ram and report["ram_peak_bytes"] <= ram + MIB
    assert report["disk_bytes_per_step"] > 0


def with_ram(graph: Graph, ram: int = RAM) -> Graph:
    graph.nodes["load"]["inputs"]["ram"] = f"{ram}"
    return graph


def needs_gguf() -> None:
    if subprocess.run([PYTHON, "-c", "import gguf"], capture_output=True).returncode:
        pytest.skip("the package gguf is not installed in the Python of COMFYUI_PYTHON")


def gguf(name: str = "flux_q8", loader: str = "CaromTestLoadGGUF") -> Graph:
    return Graph("flux", node(loader, unet_name=f"{name}.gguf"), steps=4)


def gguf_on_disk(graph: Graph) -> Graph:
    return graph.then("CaromOffload", mode="stream", vram="4MiB", ram=f"{RAM}")


def test_gguf_weights_beyond_ram_are_read_from_their_file(server):
    """The pack maps the file (gguf-py), so the blocks are on disk already and none is written."""
    needs_gguf()
    reference = hash_of(server, gguf())
    server.free()
    before = spilled(server)
    for _ in range(2):
        told = told_by(server, gguf_on_disk(gguf()))
        assert told["class"] == ["CaromBlocksPatcher"] and told["hash"] == [reference]
        assert_reads_disk(told)
        assert spilled(server) == before
    assert hash_of(server, gguf()) == reference


def test_lora_over_gguf_weights_that_are_read_from_their_file(server):
    """The pack writes patches to attributes of the weights. The blocks stay in the file, and no patched block is written."""
    needs_gguf()
    graphs = [gguf(), lora(gguf()), lora(lora(gguf(), strength=0.3), "other"), lora(gguf())]
    wanted = [hash_of(server, graph) for graph in graphs]
    assert len(set(wanted)) == 3 and wanted[1] == wanted[3]
    server.free()
    before = spilled(server)
    for graph, latents in zip(graphs, wanted, strict=True):
        told = told_by(server, gguf_on_disk(graph))
        assert told["hash"] == [latents]
        assert_reads_disk(told)
    told = told_by(server, lora(gguf_on_disk(gguf())))  # the LoRA behind Carom's node
    assert told["hash"] == [wanted[1]]
    assert_reads_disk(told)
    assert hash_of(server, gguf_on_disk(gguf())) == wanted[0]
    assert spilled(server) == before
    assert hash_of(server, gguf()) == wanted[0]


@pytest.mark.parametrize("ram", ["auto", f"{RAM}"])
@pytest.mark.parametrize("name", ["flux_q8", "flux_f16"])
@pytest.mark.parametrize("loader", ["CaromTestLoadGGUF", "UnetLoaderGGUF"])
def test_a_lora_of_every_gguf_weight_stands_from_the_second_prompt(server, loader, name, ram):
    """Norms, biases and embedders are of plain types in every file. While the model streams, ComfyUI finds them too."""
    needs_gguf()
    if loader not in server.get("/object_info"):
        pytest.skip(f"no pack with {loader} here: COMFYUI_PACKS names folders of packs to install beside")

    def streamed(graph: Graph) -> Graph:
        return graph.then("CaromOffload", mode="stream", vram="6MiB", ram=ram)

    plain = hash_of(server, gguf(name, loader))
    server.free()
    patched = hash_of(server, lora(gguf(name, loader), "every_weight"))
    server.free()
    assert plain != patched
    assert hash_of(server, streamed(gguf(name, loader))) == plain
    for _ in range(2):
        assert hash_of(server, streamed(lora(gguf(name, loader), "every_weight"))) == patched
        assert hash_of(server, lora(streamed(gguf(name, loader)), "every_weight")) == patched
        assert hash_of(server, streamed(gguf(name, loader))) == plain


def test_a_lora_of_gguf_weights_is_whole_although_memory_runs_out_for_it(server):
    needs_gguf()
    patched = hash_of(server, lora(gguf()))

    def streamed(most: int) -> dict[str, Any]:
        graph = lora(gguf().then("CaromOffload", mode="stream", vram="6MiB"))
        return told_by(server, graph.then("CaromTestShortOfMemory", most=most))

    try:
        told = streamed(5 * MIB)
        assert told["hash"] == [patched] and told["memory_errors"] == [1]
    finally:
        assert streamed(0)["hash"] == [patched]


def test_a_controlnet_beside_a_model_whose_weights_are_on_disk(server):
    """Both share `ram`, and both read what it does not hold."""

    def steered(graph: Graph, carom: bool) -> dict[str, Any]:
        graph.nodes["net"] = node("ControlNetLoader", control_net_name="sd15.safetensors")
        net = ["net", 0]
        if carom:
            graph.nodes["ours"] = node(
                "CaromOffloadControlNet", control_net=net, mode="stream", vram="12MiB", ram=f"{32 * MIB}"
            )
            net = ["ours", 0]
        graph.nodes["hint"] = node("EmptyImage", width=128, height=128, batch_size=1, color=0x40A0F0)
        graph.nodes["steer"] = node(
            "ControlNetApply", conditioning=["cond", 0], control_net=net, image=["hint", 0], strength=0.7
        )
        graph.positive = ["steer", 0]
        prompt = graph.prompt()
        prompt["net_hash"] = node("CaromTestHash", value=["sample", 0], control_net=net)
        return prompt

    wanted = server.run(steered(stock("sd15", cfg=2.0, steps=3), carom=False))["hash"]["hash"]
    assert wanted != [hash_of(server, stock("sd15", cfg=2.0, steps=3))]
    for seed in (1, 2, 1):
        model = with_ram(ours("sd15", cfg=2.0, steps=3, seed=seed), 32 * MIB)
        told = server.run(steered(model, carom=True))
        assert (told["hash"]["hash"] == wanted) is (seed == 1)
    reports = [told[name]["report"][0] for name in ("hash", "net_hash")]
    assert all(report["disk_bytes_per_step"] > 0 for report in reports)
    assert sum(report["ram_budget_bytes"] for report in reports) <= 32 * MIB


@pytest.mark.parametrize("kind", ["CaromTestCompileNode", "CaromTestCompile", "CaromTestCompileBlocks"])
def test_compiled_models_read_weights_from_disk(server, kind):
    """ComfyUI's own node, its helper for other packs, and blocks as object patches, with and without LoRA.

    ComfyUI applies no LoRA to a block that was compiled in the prompt before, so stock runs the same prompts.
    """
    reference = hash_of(server, stock("flux", steps=4).then(kind))
    patched = hash_of(server, lora(stock("flux", steps=4)).then("CaromTestLowVram").then(kind))
    assert patched != reference
    server.free()
    told = told_by(server, with_ram(ours("flux", steps=4)).then(kind))
    assert told["class"] == ["CaromModelPatcher"] and told["hash"] == [reference]
    assert_reads_disk(told)
    told = told_by(server, lora(with_ram(ours("flux", steps=4))).then(kind))
    assert told["hash"] == [patched]
    assert_reads_disk(told)
