"""The nodes in a real ComfyUI server on the CPU: the same latents as the stock loader, bit for bit, whatever happens.

One command: COMFYUI_PATH=/path/to/ComfyUI python -m pytest tests/comfyui/test_comfy_server.py
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import carom
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests_comfy_graphs import CODEC, LIMITS, SHAPES, Graph, hash_of, lora, ours, stock, told_by
from tests_comfy_server import OPTIONS, PATHS, PYTHON, REASON, PromptFailed, Server, node

pytestmark = [pytest.mark.skipif(not PATHS, reason=REASON), pytest.mark.timeout(600)]


@pytest.fixture(scope="module", params=PATHS or ["none"], ids=lambda path: Path(path).name)
def server(request, tmp_path_factory, carom_cli):
    base = tmp_path_factory.mktemp("comfy")
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


def test_all_nodes_are_there_with_tooltips_docs_and_locale(server):
    found = server.get("/object_info")
    mine = {name: info for name, info in found.items() if name.startswith("Carom") and "Test" not in name}
    assert set(mine) == {
        "CaromLoadDiffusionModel", "CaromLoadCheckpoint", "CaromLoadCLIP", "CaromLoadVAE", "CaromOffload",
        "CaromOffloadCLIP", "CaromOffloadVAE", "CaromOffloadControlNet", "CaromPlan", "CaromReport",
    }  # fmt: skip
    translated = server.get("/i18n")["en"]["nodeDefs"]
    for name, info in mine.items():
        for group in (info["input"].get("required", {}), info["input"].get("optional", {})):
            for widget, spec in group.items():
                assert spec[1].get("tooltip"), f"{name}.{widget} has no tooltip"
                assert widget in translated[name]["inputs"]
        assert all(info["output_tooltips"]), name
        assert translated[name]["display_name"] == info["display_name"]
        assert server.get(f"/extensions/carom/docs/{name}.md").startswith("#")
    assert "carom" in server.get("/workflow_templates")


def test_loader_offers_what_the_stock_loader_offers(server):
    stock_types = server.get("/object_info/UNETLoader")["UNETLoader"]["input"]["required"]["weight_dtype"][0]
    inputs = server.get("/object_info/CaromLoadDiffusionModel")["CaromLoadDiffusionModel"]["input"][
        "required"
    ]
    spec = inputs["weight_dtype"]
    assert (spec[0] if isinstance(spec[0], list) else spec[1]["options"]) == stock_types


@pytest.mark.parametrize("family", ["flux", "wan", "sd15"])
def test_latents_equal_the_stock_loaders_bit_for_bit(server, family):
    told = told_by(server, ours(family))
    assert told["class"] == ["CaromModelPatcher"]
    assert 0 < told["held"][0] <= float(LIMITS[family].removesuffix("MiB")) * (1 << 20)
    assert told["hash"][0] == hash_of(server, stock(family))


@pytest.mark.parametrize("dtype", ["fp8_e4m3fn", "fp8_e5m2"])
def test_fp8_cast_weights_stream(server, dtype):
    told = told_by(server, ours("flux", dtype=dtype, vram="3MiB"))
    assert told["class"] == ["CaromModelPatcher"] and told["held"][0] <= 3 << 20
    assert told["hash"][0] == hash_of(server, stock("flux", dtype=dtype))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_fp8_weights_of_a_mapped_file_stream(server, dtype):
    def mapped(streams: bool) -> Graph:
        options = {"unet_name": "flux.safetensors", "dtype": dtype, "vram": "3MiB", "streams": streams}
        return Graph("flux", node("CaromTestMapped", **options))

    told = told_by(server, mapped(True))
    assert told["class"] == ["CaromModelPatcher"] and 0 < told["held"][0] <= 3 << 20
    assert told["hash"][0] == hash_of(server, mapped(False)) != hash_of(server, stock("flux"))


def test_quantised_checkpoints_stream_with_and_without_lora(server):
    reference = hash_of(server, stock("flux", name="flux_float8_e4m3fn"))
    told = told_by(server, ours("flux", name="flux_float8_e4m3fn", vram="6MiB"))
    assert told["class"] == ["CaromModelPatcher"] and told["held"][0] <= 6 << 20
    assert told["hash"][0] == reference
    patched = hash_of(server, lora(stock("flux", name="flux_float8_e4m3fn")).then("CaromTestLowVram"))
    assert patched != reference
    assert hash_of(server, lora(ours("flux", name="flux_float8_e4m3fn", vram="6MiB"))) == patched
    assert hash_of(server, ours("flux", name="flux_float8_e4m3fn", vram="6MiB")) == reference


@pytest.mark.parametrize(
    "kind", ["float8_e5m2", "nvfp4", "mxfp8", "int8_tensorwise", "convrot_w4a4", "asym_w4a8_int8"]
)
def test_every_kind_of_quantised_checkpoint_streams(server, kind):
    if not (server.base / "models" / "diffusion_models" / f"flux_{kind}.safetensors").exists():
        pytest.skip(f"this ComfyUI knows no {kind}")
    told = told_by(server, ours("flux", name=f"flux_{kind}", vram="5MiB"))
    assert told["class"] == ["CaromModelPatcher"] and 0 < told["held"][0] <= 5 << 20
    assert told["size"] == told["held"]  # ComfyUI frees no memory for a model that Carom streams
    assert told["hash"][0] == hash_of(server, stock("flux", name=f"flux_{kind}"))
    patched = hash_of(server, lora(stock("flux", name=f"flux_{kind}")).then("CaromTestLowVram"))
    assert patched != told["hash"][0]
    assert hash_of(server, lora(ours("flux", name=f"flux_{kind}", vram="5MiB"))) == patched


def test_offload_node_wraps_any_model(server):
    wrapped = stock("flux").then("CaromOffload", mode="stream", vram="8MiB")
    told = told_by(server, wrapped)
    assert told["class"] == ["CaromModelPatcher"] and told["held"][0] <= 8 << 20
    assert told["hash"][0] == hash_of(server, stock("flux"))


def test_lora_before_and_after_and_stacked(server):
    plain = hash_of(server, ours("flux"))
    reference = hash_of(server, lora(stock("flux")).then("CaromTestLowVram"))
    assert reference != plain
    assert hash_of(server, lora(ours("flux"))) == reference
    assert hash_of(server, lora(stock("flux")).then("CaromOffload", mode="stream", vram="8MiB")) == reference
    stacked = hash_of(server, lora(lora(stock("flux")), "other", 0.5).then("CaromTestLowVram"))
    assert stacked != reference
    assert hash_of(server, lora(lora(ours("flux")), "other", 0.5)) == stacked
    assert hash_of(server, ours("flux")) == plain


@pytest.mark.parametrize("kind", ["rank16", "dora", "lokr", "loha", "oft", "boft", "glora"])
def test_every_kind_of_adapter_gives_the_stock_loaders_latents(server, kind):
    chains = ([(kind, 0.8)], [(kind, 0.4)], [(kind, 0.4), ("flux", 0.5)], [("flux", 0.5)])
    seen = {hash_of(server, stock("flux"))}

    def with_loras(graph: Graph, chain: list) -> Graph:
        for name, strength in chain:
            lora(graph, name, strength)
        return graph

    for chain in chains:
        reference = hash_of(server, with_loras(stock("flux"), chain).then("CaromTestLowVram"))
        assert reference not in seen
        seen.add(reference)
        told = told_by(server, with_loras(ours("flux"), chain))
        assert told["hash"] == [reference] and told["held"][0] <= 8 << 20
    assert hash_of(server, ours("flux")) == hash_of(server, stock("flux"))
    whole = with_loras(ours("flux", mode="auto", vram="auto"), chains[0])
    assert hash_of(server, whole) == hash_of(server, with_loras(stock("flux"), chains[0]))


def test_a_lora_is_whole_although_memory_runs_out_for_it(server):
    """ComfyUI's adapters catch the OutOfMemory of one weight, and leave its LoRA out. The pass runs again with less."""
    plain = hash_of(server, ours("flux", vram="12MiB"))
    reference = hash_of(server, lora(stock("flux")).then("CaromTestLowVram"))

    def short(most: int) -> dict:
        graph = lora(ours("flux", vram="12MiB")).then("CaromTestShortOfMemory", most=most)
        return told_by(server, graph)

    try:
        told = short(10 << 20)
        assert told["hash"] == [reference] and reference != plain
        assert told["memory_errors"] == [1] and told["held"][0] <= 10 << 20
        with pytest.raises(PromptFailed, match="as if"):
            short(1)  # which no budget is: an error, no wrong image
    finally:
        told = short(0)
    assert told["hash"] == [reference]


def test_keyframed_lora_hooks(server):
    def hooked(graph: Graph, beside: str = "") -> Graph:
        graph = lora(graph, beside) if beside else graph
        graph.steps = 4
        graph.nodes["hook"] = node(
            "CreateHookLoraModelOnly", lora_name="flux.safetensors", strength_model=1.0
        )
        graph.nodes["first"] = node("CreateHookKeyframe", strength_mult=1.0, start_percent=0.0)
        graph.nodes["key"] = node(
            "CreateHookKeyframe", strength_mult=0.3, start_percent=0.5, prev_hook_kf=["first", 0]
        )
        graph.nodes["keyed"] = node("SetHookKeyframes", hooks=["hook", 0], hook_kf=["key", 0])
        graph.nodes["with"] = node(
            "ConditioningSetProperties", cond_NEW=["cond", 0], hooks=["keyed", 0], strength=1.0,
            set_cond_area="default",
        )  # fmt: skip
        graph.positive = ["with", 0]
        return graph

    reference = hash_of(server, hooked(stock("flux", steps=4)))
    assert reference != hash_of(server, stock("flux", steps=4))
    assert hash_of(server, hooked(ours("flux", steps=4))) == reference
    beside = hash_of(server, hooked(stock("flux", steps=4), "rank16").then("CaromTestLowVram"))
    assert beside != reference
    assert hash_of(server, hooked(ours("flux", steps=4), "rank16")) == beside
    assert hash_of(server, ours("flux", steps=4)) == hash_of(server, stock("flux", steps=4))


def test_attention_patches_and_compile_nodes(server):
    patched = hash_of(server, stock("flux").then("CaromTestAttention"))
    assert hash_of(server, ours("flux").then("CaromTestAttention")) == patched
    assert hash_of(server, ours("flux").then("CaromTestCompile")) == hash_of(server, stock("flux"))
    compiled = hash_of(
        server, lora(stock("flux"), "rank16").then("CaromTestLowVram").then("CaromTestCompile")
    )
    assert hash_of(server, lora(ours("flux"), "rank16").then("CaromTestCompile")) == compiled
    other = hash_of(server, lora(stock("flux"), "rank16", 0.3).then("CaromTestLowVram"))
    assert hash_of(server, lora(ours("flux"), "rank16", 0.3).then("CaromTestCompile")) == other != compiled


def test_adapters_with_weights_of_their_own_beside_the_streamed_ones(server):
    plain = hash_of(server, stock("sd15"))
    adapted = hash_of(server, stock("sd15").then("CaromTestImageAdapter"))
    assert adapted != plain
    assert hash_of(server, ours("sd15").then("CaromTestImageAdapter")) == adapted
    assert hash_of(server, ours("sd15")) == plain


@pytest.mark.parametrize("widgets", [{}, {"codec": "lossless"}, {"ram": "8MiB"}], ids=str)
def test_modules_that_a_pack_injects_run_in_a_streamed_model(server, widgets):
    def mine(inject: bool, seed: int = 1) -> str:
        graph = ours("sd15", seed=seed)
        graph.nodes["load"]["inputs"].update(widgets)
        return hash_of(server, graph.then("CaromTestInject") if inject else graph)

    injected = [hash_of(server, stock("sd15", seed=seed).then("CaromTestInject")) for seed in (1, 2)]
    plain = hash_of(server, stock("sd15"))
    assert injected[0] != plain
    assert [mine(True, seed) for seed in (1, 2)] == injected
    assert mine(False) == plain and mine(True) == injected[0] and mine(False) == plain


def test_controlnets_steer_a_streamed_model(server):
    def steered(graph: Graph) -> Graph:
        graph.nodes["net"] = node("ControlNetLoader", control_net_name="sd15.safetensors")
        graph.nodes["hint"] = node("EmptyImage", width=128, height=128, batch_size=1, color=0x40A0F0)
        graph.nodes["steer"] = node(
            "ControlNetApply",
            conditioning=["cond", 0],
            control_net=["net", 0],
            image=["hint", 0],
            strength=0.7,
        )
        graph.positive = ["steer", 0]
        return graph

    def streamed(graph: Graph) -> Graph:
        steered(graph).nodes["ours"] = node(
            "CaromOffloadControlNet", control_net=["net", 0], mode="stream", vram="12MiB"
        )
        graph.nodes["steer"]["inputs"]["control_net"] = ["ours", 0]
        return graph

    reference = hash_of(server, steered(stock("sd15", cfg=2.0)))
    assert reference != hash_of(server, stock("sd15", cfg=2.0))
    for _ in range(2):
        assert hash_of(server, steered(ours("sd15", cfg=2.0))) == reference
        assert hash_of(server, streamed(ours("sd15", cfg=2.0))) == reference
    assert hash_of(server, streamed(stock("sd15", cfg=2.0))) == reference
    prompt = streamed(ours("sd15", cfg=2.0)).prompt()
    prompt["report"] = node("CaromReport", control_net=["ours", 0], after=["sample", 0])
    assert "12.00 MiB allowed" in server.run(prompt)["report"]["text"][0]


def test_a_model_that_fits_streams_where_that_was_asked_for(server):
    graph = ours("flux", vram="auto", mode="stream")
    prompt = graph.prompt()
    prompt["report"] = node("CaromReport", model=graph.model, after=["sample", 0])
    outputs = server.run(prompt)
    assert outputs["hash"]["class"] == ["CaromModelPatcher"]
    assert outputs["hash"]["hash"] == [hash_of(server, stock("flux"))]
    assert "streams" in outputs["report"]["text"][0] and "\nCarom: 0 %" not in outputs["report"]["text"][0]


def test_two_models_alternate_and_free_memory_unloads_them(server):
    first, second = hash_of(server, stock("flux")), hash_of(server, stock("flux", name="flux2nd"))
    assert first != second
    for seed in (1, 1, 2, 1):
        assert (hash_of(server, ours("flux", seed=seed)) == first) is (seed == 1)
        assert (hash_of(server, ours("flux", name="flux2nd", seed=seed)) == second) is (seed == 1)
    server.free()
    assert hash_of(server, ours("flux")) == first
    assert hash_of(server, ours("flux", name="flux2nd")) == second


def test_stock_and_carom_branches_of_one_model(server):
    reference = hash_of(server, stock("flux"))
    with_lora = hash_of(server, lora(stock("flux")).then("CaromTestLowVram"))
    for _ in range(2):
        assert hash_of(server, stock("flux").then("CaromOffload", mode="stream", vram="8MiB")) == reference
        assert hash_of(server, stock("flux", seed=9)) == hash_of(server, ours("flux", seed=9))
        assert (
            hash_of(server, lora(stock("flux")).then("CaromOffload", mode="stream", vram="8MiB")) == with_lora
        )


def test_stock_takes_a_quantised_model_over_and_gives_it_back(server):
    reference = hash_of(server, stock("flux", name="flux_float8_e4m3fn"))
    for _ in range(2):
        graph = stock("flux", name="flux_float8_e4m3fn").then(
            "CaromOffload", mode="stream", vram="6MiB", codec=CODEC
        )
        assert hash_of(server, graph) == reference
        assert hash_of(server, stock("flux", name="flux_float8_e4m3fn")) == reference


def test_giving_vram_back_in_the_middle(server):
    graph = ours("flux", vram="16MiB")
    before = told_by(server, graph)
    graph.nodes["squeezed"] = node("CaromTestSqueeze", latent=["latent", 0], model=graph.model, share=0.5)
    prompt = graph.prompt()
    prompt["sample"]["inputs"]["latent_image"] = ["squeezed", 0]
    after = server.run(prompt)["hash"]
    assert after["hash"] == before["hash"]


def test_the_page_sees_a_bar_while_weights_are_laid_out_and_words_while_it_runs(server):
    server.free()
    graph = ours("flux", steps=5, seed=31).then("CaromTestSlow", seconds=0.6).then("CaromTestListen")
    prompt = graph.prompt()
    prompt["heard"] = node("CaromTestHeard", value=["sample", 0])
    heard = server.run(prompt)["heard"]
    total = heard["bar"][0][1]
    laying = [value for value, of in heard["bar"] if of == total]
    # ComfyUI sends a few a second, so a quick machine shows few.
    assert total > 8 << 20 and laying == sorted(laying) and laying[-1] == total and len(laying) >= 2
    words = [text for text, where in heard["text"] if where == "load"]
    assert any("streams" in text for text in words)
    # ... while it runs, not only at its end
    assert sum("waited for weights" in text for text in words) >= 2, words


def other_pack(server: Server, kind: str) -> None:
    if kind not in server.get("/object_info"):
        pytest.skip(f"no pack with {kind} here: COMFYUI_PACKS names folders of packs to install beside")


def test_gguf_models_stream_with_and_without_lora(server):
    other_pack(server, "UnetLoaderGGUF")

    def gguf(**options: Any) -> Graph:
        return Graph("flux", node("UnetLoaderGGUF", unet_name="flux_q8.gguf"), **options)

    def streamed(graph: Graph) -> Graph:
        return graph.then("CaromOffload", mode="stream", vram="4MiB", codec=CODEC)

    reference, patched = hash_of(server, gguf()), hash_of(server, lora(gguf()))
    assert reference != patched
    told = told_by(server, streamed(gguf()))
    assert told["class"] == ["CaromGGUFModelPatcher"] and 0 < told["held"][0] <= 4 << 20
    assert told["hash"] == [reference]
    assert hash_of(server, streamed(lora(gguf()))) == patched
    assert hash_of(server, lora(streamed(gguf()))) == patched
    assert hash_of(server, streamed(gguf())) == reference
    assert hash_of(server, gguf()) == reference


def test_kjnodes_patches_stand(server):
    other_pack(server, "ModelPatchTorchSettings")
    reference = hash_of(server, stock("flux"))
    assert (
        hash_of(server, ours("flux").then("ModelPatchTorchSettings", enable_fp16_accumulation=False))
        == reference
    )
    assert (
        hash_of(
            server, ours("flux").then("PathchSageAttentionKJ", sage_attention="disabled", allow_compile=False)
        )
        == reference
    )


def test_kjnodes_compiled_blocks_stream(server):
    """Through inductor, as its page offers: what is compiled over streamed weights is what is compiled over whole ones."""
    other_pack(server, "TorchCompileModelAdvanced")
    if shutil.which("c++") is None and shutil.which("g++") is None:
        pytest.skip("inductor compiles for the CPU with a C++ compiler, and there is none here")

    def compiled(graph: Graph) -> Graph:
        return graph.then(
            "TorchCompileModelAdvanced", backend="inductor", fullgraph=False, mode="default", dynamic="false",
            compile_transformer_blocks_only=True, dynamo_cache_size_limit=64, debug_compile_keys=False,
        )  # fmt: skip

    def told(graph: Graph) -> dict:
        return server.run(graph.prompt(), timeout=500)["hash"]

    reference = told(compiled(stock("flux")))
    assert reference["finite"] == [True]
    mine = told(compiled(ours("flux")))
    assert mine["class"] == ["CaromModelPatcher"] and 0 < mine["held"][0] <= 8 << 20
    assert mine["hash"] == reference["hash"]
    plain = hash_of(server, ours("flux"))
    assert plain == hash_of(server, stock("flux")) != mine["hash"][0]  # fused kernels round in other places


def test_blocks_that_a_compile_node_replaced_stream(server):
    reference = hash_of(server, stock("flux"))
    assert hash_of(server, ours("flux").then("CaromTestCompileBlocks")) == reference
    assert hash_of(server, ours("flux")) == reference
    assert hash_of(server, lora(ours("flux")).then("CaromTestCompileBlocks")) == hash_of(
        server, lora(ours("flux"))
    )


def test_error_in_a_node_leaves_the_next_prompt_working(server):
    reference = hash_of(server, stock("flux", steps=3))
    with pytest.raises(PromptFailed, match="a node of the test fails here"):
        server.run(ours("flux", steps=3).then("CaromTestFails", call=2).prompt())
    assert hash_of(server, ours("flux", steps=3)) == reference


def test_cancel_in_mid_run(server):
    reference = hash_of(server, stock("flux", steps=4))
    running = server.queue(ours("flux", steps=40).then("CaromTestSlow", seconds=0.2).prompt())
    time.sleep(2.5)
    server.post("/interrupt", {})
    with pytest.raises(PromptFailed, match="interrupted"):
        server.result(running)
    assert hash_of(server, ours("flux", steps=4)) == reference


def test_several_prompts_queued(server):
    reference = {seed: hash_of(server, stock("flux", seed=seed)) for seed in (21, 22, 23)}
    queued = {seed: server.queue(ours("flux", seed=seed).prompt()) for seed in reference}
    for seed, prompt_id in queued.items():
        assert server.result(prompt_id)["hash"]["hash"] == [reference[seed]]


def clip_prompt(loader: dict, text: str = "a lighthouse", offload: bool = False) -> dict:
    nodes = {"clip": loader}
    source = ["clip", 0]
    if offload:
        nodes["off"] = node("CaromOffloadCLIP", clip=["clip", 0], mode="stream", vram="90MiB")
        source = ["off", 0]
    nodes["encode"] = node("CLIPTextEncode", clip=source, text=text)
    nodes["hash"] = node("CaromTestHash", value=["encode", 0])
    nodes["report"] = node("CaromReport", clip=source, after=["encode", 0])
    return nodes


def test_text_encoders_stream_too(server):
    loader = node("CLIPLoader", clip_name="clip_l.safetensors", type="stable_diffusion")
    reference = server.run({k: v for k, v in clip_prompt(loader).items() if k != "report"})["hash"]
    mine = node(
        "CaromLoadCLIP", clip_name="clip_l.safetensors", type="stable_diffusion", mode="stream", vram="90MiB"
    )
    for prompt in (clip_prompt(mine), clip_prompt(loader, offload=True)):
        outputs = server.run(prompt)
        assert outputs["hash"]["hash"] == reference["hash"]
        assert "streams" in outputs["report"]["text"][0]
    again = server.run(clip_prompt(mine, text="a lighthouse at night"))
    assert again["hash"]["hash"] != reference["hash"]


def encoded(server: Server, loader: dict, *chain: str) -> str:
    """Return the hash of a prompt's conditioning, after the nodes ``chain`` (each takes and gives a text encoder)."""
    nodes = {"clip": loader, "unet": node("UNETLoader", unet_name="flux.safetensors", weight_dtype="default")}
    source = ["clip", 0]
    for number, kind in enumerate(chain):
        made = node(kind, clip=source)
        if kind == "CaromOffloadCLIP":
            made["inputs"].update(mode="stream", vram="90MiB")
        if kind == "LoraLoader":
            made["inputs"].update(
                model=["unet", 0], lora_name="clip_l.safetensors", strength_model=0.0, strength_clip=1.0
            )
        nodes[f"n{number}"] = made
        source = [f"n{number}", 1 if kind == "LoraLoader" else 0]
    nodes["encode"] = node("CLIPTextEncode", clip=source, text="a lighthouse")
    nodes["hash"] = node("CaromTestHash", value=["encode", 0])
    return server.run(nodes)["hash"]["hash"][0]


def test_a_lora_reaches_a_text_encoder_that_its_loader_has_loaded_whole(server):
    loader = node("CLIPLoader", clip_name="clip_l.safetensors", type="stable_diffusion")
    ours = node(
        "CaromLoadCLIP", clip_name="clip_l.safetensors", type="stable_diffusion", mode="stream", vram="90MiB"
    )
    server.free()
    first = encoded(server, loader, "CaromOffloadCLIP", "LoraLoader")
    server.free()
    reference = encoded(server, loader, "LoraLoader", "CaromTestLowVramClip")
    plain = encoded(server, loader)
    assert first == reference != plain
    assert encoded(server, ours, "LoraLoader") == reference
    assert encoded(server, ours) == plain
    for _ in range(2):  # the same loader's encoder, whole and streamed in turns
        assert encoded(server, loader) == plain
        assert encoded(server, loader, "LoraLoader", "CaromOffloadCLIP") == reference
        assert encoded(server, loader, "CaromOffloadCLIP") == plain


def test_a_lora_reaches_a_model_with_forced_casts_that_was_loaded_whole(server):
    def cast(graph: Graph) -> Graph:
        return graph.then("ModelComputeDtype", dtype="fp32")

    def streamed(graph: Graph) -> Graph:
        return graph.then("CaromOffload", mode="stream", vram="8MiB")

    server.free()
    plain = hash_of(server, cast(stock("flux")))  # loaded whole
    first = hash_of(server, streamed(lora(cast(stock("flux")))))
    assert first == hash_of(server, lora(cast(stock("flux"))).then("CaromTestLowVram")) != plain
    assert hash_of(server, streamed(cast(stock("flux")))) == plain


ENCODERS = {  # type: (files, budget)
    "stable_audio": (["t5_base"], "64MiB"),
    "pixart": (["t5_xxl"], "16MiB"),
    "wan": (["umt5_xxl"], "16MiB"),
    "lumina2": (["gemma2"], "1MiB"),
    "flux": (["clip_l", "t5_xxl"], "90MiB"),
    "sd3": (["t5_xxl"], "16MiB"),
}


@pytest.mark.parametrize("kind", ENCODERS)
def test_every_kind_of_text_encoder_streams(server, kind):
    """T5 base in its true size; T5 XXL, UMT5 XXL and Gemma 2 with their layers and tokens, and less width."""
    files, vram = ENCODERS[kind]
    files = [f"{file}.safetensors" for file in files]
    names = {"clip_name": files[0]}
    mine = node("CaromLoadCLIP", type=kind, mode="stream", vram=vram, codec=CODEC, **names)
    loader = node("CLIPLoader", type=kind, **names)
    if len(files) == 2:
        mine["inputs"]["clip_name2"] = files[1]
        loader = node("DualCLIPLoader", type=kind, clip_name1=files[0], clip_name2=files[1])
    reference = server.run({k: v for k, v in clip_prompt(loader).items() if k != "report"})["hash"]
    assert reference["finite"] == [True]
    behind = clip_prompt(loader, offload=True)
    behind["off"]["inputs"]["vram"] = vram
    for prompt in (clip_prompt(mine), behind):
        outputs = server.run(prompt)
        assert outputs["hash"]["hash"] == reference["hash"]
        assert "streams" in outputs["report"]["text"][0]
    again = server.run(clip_prompt(mine, text="a lighthouse at night"))
    assert again["hash"]["hash"] != reference["hash"]


def test_a_whole_vae_streams_in_tiles_both_ways(server):
    def prompt(loader: dict, vae: bool) -> dict:
        tiles = {"tile_size": 64, "overlap": 0, "temporal_size": 64, "temporal_overlap": 8}
        return {
            "load": loader,
            "picture": node("CaromTestPicture", width=96, height=64, seed=3),
            "encode": node("VAEEncodeTiled", pixels=["picture", 0], vae=["load", 2], **tiles),
            "decode": node("VAEDecodeTiled", samples=["encode", 0], vae=["load", 2], **tiles),
            "latent": node("CaromTestHash", value=["encode", 0]),
            "hash": node("CaromTestHash", value=["decode", 0], **({"vae": ["load", 2]} if vae else {})),
        }

    stock = server.run(prompt(node("CheckpointLoaderSimple", ckpt_name="sd15_vae.safetensors"), False))
    assert stock["hash"]["finite"] == [True]
    mine = node(
        "CaromLoadCheckpoint",
        ckpt_name="sd15_vae.safetensors",
        mode="stream",
        vram="40MiB",
        vae="stream",
        codec=CODEC,
    )
    told = server.run(prompt(mine, True))
    assert told["hash"]["class"] == ["CaromModelPatcher"] and 0 < told["hash"]["held"][0] <= 40 << 20
    assert told["latent"]["hash"] == stock["latent"]["hash"]
    assert told["hash"]["hash"] == stock["hash"]["hash"]


@pytest.mark.parametrize("kind", ["CaromLoadVAE", "CaromOffloadVAE"])
def test_a_vae_streams_by_itself(server, kind):
    def prompt(nodes: dict) -> dict:
        tiles = {"tile_size": 64, "overlap": 0, "temporal_size": 64, "temporal_overlap": 8}
        return {
            **nodes,
            "picture": node("CaromTestPicture", width=96, height=64, seed=3),
            "encode": node("VAEEncodeTiled", pixels=["picture", 0], vae=["vae", 0], **tiles),
            "decode": node("VAEDecodeTiled", samples=["encode", 0], vae=["vae", 0], **tiles),
            "hash": node("CaromTestHash", value=["decode", 0]),
        }

    stock = node("VAELoader", vae_name="sd15.safetensors")
    widgets = {"mode": "stream", "vram": "40MiB", "codec": CODEC}
    mine = (
        {"vae": node(kind, vae_name="sd15.safetensors", **widgets)}
        if kind == "CaromLoadVAE"
        else {"stock": stock, "vae": node(kind, vae=["stock", 0], **widgets)}
    )
    reference = server.run(prompt({"vae": stock}))["hash"]
    asked = prompt(mine)
    asked["report"] = node("CaromReport", vae=["vae", 0], after=["decode", 0])
    told = server.run(asked)
    assert told["hash"]["hash"] == reference["hash"] and reference["finite"] == [True]
    assert "40.00 MiB allowed" in told["report"]["text"][0]


def checkpoint_prompt(loader: dict) -> dict:
    return {
        "load": loader,
        "positive": node("CLIPTextEncode", clip=["load", 1], text="a lighthouse"),
        "latent": node("CaromTestLatent", shape=SHAPES["sd15"]),
        "sample": node(
            "KSampler", model=["load", 0], positive=["positive", 0], negative=["positive", 0],
            latent_image=["latent", 0], seed=3, steps=2, cfg=2.0, sampler_name="euler", scheduler="normal",
            denoise=1.0,
        ),
        "decode": node("VAEDecodeTiled", samples=["sample", 0], vae=["load", 2], tile_size=64, overlap=32,
                       temporal_size=64, temporal_overlap=8),
        "hash": node("CaromTestHash", value=["decode", 0]),
    }  # fmt: skip


def test_checkpoint_with_clip_and_vae(server):
    reference = server.run(checkpoint_prompt(node("CheckpointLoaderSimple", ckpt_name="sd15.safetensors")))[
        "hash"
    ]
    for vae in ("comfyui", "stream"):
        mine = node("CaromLoadCheckpoint", ckpt_name="sd15.safetensors", mode="stream", vram="90MiB", vae=vae)
        assert server.run(checkpoint_prompt(mine))["hash"]["hash"] == reference["hash"]


def saved_by(server: Server, prompt: dict) -> dict:
    """Run a prompt that saves models; return the tensors of its files, by file and name."""
    folder = server.base / "output"
    shutil.rmtree(folder, ignore_errors=True)
    server.run(prompt)
    files = {path.name: load_file(path) for path in sorted(folder.rglob("*.safetensors"))}
    # The tiny encoder's file has no projection. ComfyUI leaves it as it finds the memory.
    return {
        (file, name): value
        for file, found in files.items()
        for name, value in found.items()
        if not name.endswith("text_projection.weight")
    }


def test_saved_models_are_those_of_the_stock_loader(server):
    def model(graph: Graph, **widgets: Any) -> dict:
        graph.nodes["load"]["inputs"].update(widgets)
        return {**graph.prompt(), "save": node("ModelSave", model=graph.model, filename_prefix="model")}

    def checkpoint(loader: dict) -> dict:
        parts = {"model": ["load", 0], "clip": ["load", 1], "vae": ["load", 2]}
        return {
            "load": loader,
            "save": node("CheckpointSave", **parts, filename_prefix="all"),
            "encoder": node("CLIPSave", clip=["load", 1], filename_prefix="encoder"),
        }

    def bits(value: torch.Tensor) -> torch.Tensor:
        return value.reshape(-1).view(torch.uint8)

    streams = {"ckpt_name": "sd15.safetensors", "mode": "stream", "vram": "90MiB"}
    mine_and_theirs = {
        "raw": (model(ours("flux"), codec="raw"), model(stock("flux"))),
        "packed with LoRA": (model(lora(ours("flux")), codec="lossless"), model(lora(stock("flux")))),
        "disk with LoRA": (model(lora(ours("flux")), ram="4MiB"), model(lora(stock("flux")))),
        "fp8": (
            model(ours("flux", name="flux_float8_e4m3fn", vram="6MiB")),
            model(stock("flux", name="flux_float8_e4m3fn")),
        ),
        "checkpoint": (
            checkpoint(node("CaromLoadCheckpoint", vae="stream", **streams)),
            checkpoint(node("CheckpointLoaderSimple", ckpt_name="sd15.safetensors")),
        ),
    }
    for kind, (mine, theirs) in mine_and_theirs.items():
        server.free()  # a prompt whose nodes are all cached saves nothing
        found, expected = saved_by(server, mine), saved_by(server, theirs)
        assert found.keys() == expected.keys() and found, kind
        for name, value in found.items():
            assert value.dtype == expected[name].dtype and torch.equal(bits(value), bits(expected[name])), (
                name
            )


def pack(server: Server, carom_cli: Any, source: str, *options: str) -> Path:
    """Pack a model file of the server's, and return the path of the packed file, which is in the same folder."""
    file = server.base / "models" / source
    made = file.with_stem(f"packed_{file.stem}_{options[-1]}")
    if not made.exists():
        done = carom_cli("pack", str(file), str(made), "--device", "cpu", *options)
        assert done.returncode == 0, done.stderr
    return made


@pytest.mark.parametrize("ram", ["auto", "4MiB"])
@pytest.mark.parametrize("options", [("--codec", "raw"), ("--codec", "lossless"), ("--quant", "nf4")])
def test_packed_files_load_and_stream(server, carom_cli, options, ram):
    """Of a quantised file the latents are those of the plain file of its dequantised weights."""
    packed = pack(server, carom_cli, "diffusion_models/flux.safetensors", *options)
    plain = packed.with_stem(f"plain_{options[-1]}")
    save_file(carom.load_file(packed), plain)
    graph = ours("flux", name=packed.stem)
    graph.nodes["load"]["inputs"]["ram"] = ram
    told = told_by(server, graph)
    assert told["class"] == ["CaromModelPatcher"] and 0 < told["held"][0] <= 8 << 20
    assert told["report"][0]["ram_budget_bytes"] == (4 << 20 if ram == "4MiB" else 0)
    assert told["hash"][0] == hash_of(server, stock("flux", name=plain.stem))
    assert (told["hash"][0] == hash_of(server, stock("flux"))) is (options[-1] != "nf4")
    assert told_by(server, lora(graph))["hash"][0] == hash_of(
        server, lora(stock("flux", name=plain.stem)).then("CaromTestLowVram")
    )


def test_packed_files_of_other_kinds_load(server, carom_cli):
    """ComfyUI finds the kind of a quantised model in the metadata, and a whole checkpoint in the names."""
    name = pack(
        server, carom_cli, "diffusion_models/flux_float8_e4m3fn.safetensors", "--codec", "lossless"
    ).stem
    assert hash_of(server, ours("flux", name=name)) == hash_of(
        server, stock("flux", name="flux_float8_e4m3fn")
    )
    name = pack(server, carom_cli, "checkpoints/sd15.safetensors", "--codec", "lossless").name
    mine = node("CaromLoadCheckpoint", ckpt_name=name, mode="stream", vram="90MiB", ram="64MiB", vae="stream")
    theirs = node("CheckpointLoaderSimple", ckpt_name="sd15.safetensors")
    assert (
        server.run(checkpoint_prompt(mine))["hash"]["hash"]
        == server.run(checkpoint_prompt(theirs))["hash"]["hash"]
    )


def test_report_and_plan(server):
    graph = ours("flux")
    prompt = graph.prompt()
    prompt["report"] = node("CaromReport", model=graph.model, after=["sample", 0])
    prompt["picture"] = node("PreviewImage", images=["report", 1])
    prompt["plan"] = node(
        "CaromPlan", model_name="flux.safetensors", card="RTX 4090", vram="auto", ram="32GiB", tokens=4096
    )
    prompt["assumed"] = node("CaromPlan", model_name="flux.safetensors")
    outputs = server.run(prompt)
    text = outputs["report"]["text"][0]
    assert "streams" in text and "- budget for weights: 8.00 MiB" in text and "  " not in text
    assert outputs["picture"]["images"] and outputs["report"]["images"]
    assert "flux" in outputs["plan"]["text"][0].lower() and "--" not in outputs["plan"]["text"][0]
    if "--cpu" in OPTIONS:
        assert "the card is assumed to be" in outputs["assumed"]["text"][0]


def test_native_mode_and_auto_on_a_cpu_leave_the_model_to_comfyui(server):
    for mode in ("native", "auto"):
        graph = ours("flux", mode=mode)
        prompt = graph.prompt()
        prompt["report"] = node("CaromReport", model=graph.model, after=["sample", 0])
        outputs = server.run(prompt)
        assert outputs["hash"]["class"] == ["ModelPatcher"]
        assert outputs["hash"]["hash"] == [hash_of(server, stock("flux"))]
        assert ("CPU" if mode == "auto" else "asked for") in outputs["report"]["text"][0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vram": "1KiB"}, "vram=1KiB is too small for this model: set vram on this node to"),
        ({"vram": "5"}, "did you mean 5GiB?"),
        ({"vram": "a lot"}, "is not a size"),
        ({"vram": "0"}, "no memory at all"),
        ({"vram": "900%"}, "more than 100 %"),
        ({"vram": "9" * 50}, "out of range"),
        ({"unet_name": "corrupt.safetensors"}, "corrupt.safetensors"),
        ({"unet_name": "text.safetensors"}, "text.safetensors"),
        ({"unet_name": "vae.safetensors"}, "vae.safetensors"),
        ({"unet_name": "gone.safetensors"}, "gone.safetensors"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_input_is_a_message_and_the_next_prompt_works(server, change, message):
    folder = server.base / "models" / "diffusion_models"
    flux = (folder / "flux.safetensors").read_bytes()
    (folder / "corrupt.safetensors").write_bytes(flux[: len(flux) // 2])
    (folder / "text.safetensors").write_text("this is no model")
    if not (folder / "vae.safetensors").exists():
        shutil.copy(server.base / "models" / "loras" / "flux.safetensors", folder / "vae.safetensors")
    graph = ours("flux")
    graph.nodes["load"]["inputs"].update(change)
    with pytest.raises(PromptFailed) as refused:
        server.run(graph.prompt())
    assert message in str(refused.value)
    if "vram" in change:  # the page marks the node that has the widget
        assert '"node_type": "CaromLoadDiffusionModel"' in str(refused.value)
    assert hash_of(server, ours("flux")) == hash_of(server, stock("flux"))


def test_memory_stays_flat_over_many_prompts(server):
    """ComfyUI keeps the results of past prompts for a while, and a session may be laid out anew by what its first steps
    taught, so the first two dozen are not counted."""

    def prompts(first: int) -> int:
        for seed in range(first, first + 12):
            hash_of(server, lora(ours("flux", seed=seed, steps=1), strength=seed / 200))
        return server.rss_bytes

    prompts(100)
    before = prompts(120)
    assert prompts(140) - before < 40 << 20  # twelve LoRA of one 44 MiB model


def test_settings_that_change_over_a_cached_loader_take_effect(server):
    def figures(**settings: str) -> tuple:
        told = told_by(server, stock("flux").then("CaromOffload", mode="stream", **settings))
        assert told["hash"] == [reference]
        report = told["report"][0]
        return report["vram_budget_bytes"], report["ram_budget_bytes"], report["units"]

    reference = hash_of(server, stock("flux"))
    first = figures(vram="8MiB", codec="raw")
    assert figures(vram="12MiB", codec="raw")[0] == 12 << 20
    assert figures(vram="8MiB", codec="raw", ram="4MiB")[:2] == (8 << 20, 4 << 20)
    assert figures(vram="8MiB", codec="raw", granularity="layer")[2] > first[2]
    assert figures(vram="8MiB", codec="raw") == first


@pytest.mark.parametrize("ram", ["auto", "4MiB"])
def test_a_model_file_that_is_replaced_is_loaded_again(server, ram):
    """The weights have the dtype in which they are used, so that they stream from this file."""

    def mine(seed: int) -> str:
        graph = ours("flux", name="changing", seed=seed, vram="12MiB")
        graph.nodes["load"]["inputs"]["ram"] = ram
        return hash_of(server, graph)

    def put(source: str) -> None:
        found = load_file(folder / f"{source}.safetensors")
        save_file({name: value.float() for name, value in found.items()}, folder / "new")
        os.replace(folder / "new", folder / "changing.safetensors")

    folder = server.base / "models" / "diffusion_models"
    first = hash_of(server, stock("flux", seed=1))
    second = [hash_of(server, stock("flux", name="flux2nd", seed=seed)) for seed in (2, 3)]
    put("flux")
    assert mine(1) == first
    put("flux2nd")  # ComfyUI has cached the loader's result
    assert [mine(2), mine(3)] == second


def test_models_that_replace_each_other_leave_memory_without_the_garbage_collector(server):
    """ComfyUI drops the model of the last prompt before the next one loads."""

    def models(make: Any, seed: int, collects: bool = False) -> list[int]:
        found = []
        for name in ("flux", "flux2nd", "flux", "flux2nd"):
            graph = make("flux", name=name, seed=seed, steps=1)
            prompt = graph.prompt()
            prompt["alive"] = node("CaromTestAlive", value=["sample", 0], collects=collects)
            found += server.run(prompt)["alive"]["models"]
        return found

    def offloaded(*args: Any, **options: Any) -> Graph:
        return stock(*args, **options).then("CaromOffload", mode="stream", vram="8MiB")

    server.free()
    reference = models(stock, 201)
    for make in (ours, offloaded):
        server.free()
        assert models(make, 202) == reference
    models(stock, 203, collects=True)


def test_example_workflows_name_nodes_of_the_server(server, root):
    import json

    known = set(server.get("/object_info"))
    listed = server.get("/workflow_templates")["carom"]
    for path in sorted((root / "workflows").glob("*.json")):
        workflow = json.loads(path.read_text("utf-8"))
        kinds = {item["type"] for item in workflow["nodes"]} - {"MarkdownNote", "Note"}
        assert kinds <= known, f"{path.name}: {kinds - known}"
        # ... and the template browser gets it, with its picture
        assert path.stem in listed
        assert server.get(f"/api/workflow_templates/carom/{path.name}") == workflow
        assert server.status(f"/api/workflow_templates/carom/{path.stem}.jpg") == 200


def test_table_of_stock_and_carom(server, capsys):
    """The comparison table that the documented command prints (tiny models on a CPU: figures of the path, not of speed)."""
    rows = []
    for family in SHAPES:
        for name, make in (("stock", stock), ("Carom", ours)):
            hash_of(server, make(family, seed=50))
            started = time.monotonic()
            told = told_by(server, make(family, seed=51, steps=4))
            rows.append((family, name, time.monotonic() - started, told["held"][0], told["hash"][0][:12]))
    with capsys.disabled():
        print(f"\n{Path(server.comfyui).name}: model, loader, seconds of 4 steps, MiB held, latent")
        for family, name, seconds, held, latent in rows:
            print(f"  {family:<6}{name:<7}{seconds:6.2f} {held / (1 << 20):8.1f}  {latent}")
    assert all(rows[i][4] == rows[i + 1][4] for i in range(0, len(rows), 2))


def test_python_of_the_server_is_named():
    done = subprocess.run([PYTHON, "-c", "import torch"], capture_output=True, env=os.environ)
    assert done.returncode == 0 and sys.version_info >= (3, 10)


def test_an_unload_compiles_nothing_again(server):
    """The budget holds two blocks, so that they stay whole."""

    def told(graph: Graph) -> tuple[int, str]:
        server.post("/free", {"unload_models": True})
        found = told_by(server, graph.then("CaromTestCompileNode"))
        return found["graphs"][0], found["hash"][0]

    expected = [told(stock("flux", seed=seed)) for seed in (11, 12, 13)]
    found = [told(ours("flux", vram="30MiB", seed=seed)) for seed in (11, 12, 13)]
    assert [latent for _, latent in found] == [latent for _, latent in expected]
    graphs = [count for count, _ in found]
    assert graphs[0] == graphs[1] == graphs[2]
    assert graphs[0] - expected[-1][0] <= expected[0][0], "more graphs than over whole weights"


@pytest.mark.parametrize("vram", ["21MiB", "8MiB"])  # two blocks; single layers
def test_a_model_that_is_loaded_again_compiles_nothing_again(server, vram):
    """ComfyUI drops the model of a loader that a prompt does not have."""

    def told(seed: int) -> tuple[int, str]:
        found = told_by(server, ours("flux", vram=vram, seed=seed).then("CaromTestCompileNode"))
        return found["graphs"][0], found["hash"][0]

    (first, _), other = told(31), hash_of(server, ours("wan", vram="8MiB"))
    again, latent = told(32)
    assert again == first and other != latent == hash_of(server, stock("flux", seed=32))
