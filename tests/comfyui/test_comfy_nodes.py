"""The nodes as ComfyUI sees them: schemas, widgets, bad input, docs, locale, workflows, the registry's rules."""

from __future__ import annotations

import asyncio
import importlib
import json
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import carom
import pytest
import torch
from carom.nodes.patcher import settings_of
from carom.nodes.streaming import known_streaming
from tests_comfy_stand_in import Control, Linear, ModelPatcher, ModelPatcherDynamic, installed
from tests_inside import inside
from torch import nn

NODES = {
    "CaromLoadDiffusionModel", "CaromLoadCheckpoint", "CaromLoadCLIP", "CaromLoadVAE", "CaromOffload", "CaromOffloadCLIP",
    "CaromOffloadVAE", "CaromOffloadControlNet", "CaromPlan", "CaromReport",
}  # fmt: skip
# Nodes of ComfyUI itself that the example workflows use; each is in 0.16 and in 0.33.
STOCK = {
    "CLIPTextEncode", "ConditioningZeroOut", "DualCLIPLoader", "EmptyHunyuanLatentVideo", "EmptySD3LatentImage",
    "FluxGuidance", "KSampler", "LoraLoaderModelOnly", "MarkdownNote", "ModelSamplingSD3",
    "SaveAnimatedWEBP", "SaveImage", "UNETLoader", "VAEDecode", "VAEDecodeTiled", "VAELoader",
}  # fmt: skip
ROOT = Path(carom.__file__).resolve().parent
WORKFLOWS = sorted((ROOT / "workflows").glob("*.json"))


class Model(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.diffusion_model = layers(width)


def layers(width: int = 64) -> nn.Sequential:
    made = nn.Sequential(*(Linear(width, width) for _ in range(6)))
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.05)
    return made


@pytest.fixture
def comfy(tmp_path):
    for folder in ("diffusion_models", "checkpoints", "text_encoders", "vae"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "model.safetensors").write_bytes(b"a file")
    with installed(tmp_path) as state:
        state.make = lambda path: Model()
        extension = asyncio.run(carom.comfy_entrypoint())
        state.nodes = {node.define_schema().node_id: node for node in asyncio.run(extension.get_node_list())}
        yield state


def schemas(comfy: Any) -> dict[str, Any]:
    return {name: node.define_schema() for name, node in comfy.nodes.items()}


def execute(node: Any, **inputs: Any) -> Any:
    copy = type(node.__name__, (node,), {"hidden": types.SimpleNamespace(unique_id="12")})
    return copy.execute(**inputs)


def test_the_entrypoint_gives_every_node_of_the_design(comfy):
    assert set(comfy.nodes) == NODES


def test_importing_carom_imports_no_node():
    code = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("carom", {str(ROOT / "__init__.py")!r}, submodule_search_locations=[{str(ROOT)!r}])
module = importlib.util.module_from_spec(spec); sys.modules["carom"] = module; spec.loader.exec_module(module)
assert callable(module.comfy_entrypoint) and not hasattr(module, "NODE_CLASS_MAPPINGS")
print([name for name in sys.modules if name.startswith("carom.nodes") or name == "torch"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_every_input_has_a_tooltip_in_words_and_budgets_are_auto(comfy):
    for name, schema in schemas(comfy).items():
        assert schema.description and schema.display_name.endswith("(Carom)"), name
        for item in schema.inputs:
            assert item.tooltip and len(item.tooltip) > 15 and item.tooltip.endswith("."), f"{name}.{item.id}"
            if item.id in ("mode", "vram", "ram", "granularity", "codec"):
                assert item.default == "auto" and item.optional
            if item.default is not None and item.options:
                assert item.default in item.options
        for output in schema.outputs:
            assert output.tooltip and output.tooltip.endswith("."), name


def test_newer_inputs_are_the_last_ones_so_that_saved_workflows_keep_their_values(comfy):
    found = {name: schema.inputs[-2:] for name, schema in schemas(comfy).items()}
    for name in NODES - {"CaromPlan", "CaromReport"}:
        priority, peers = found[name]
        assert (priority.id, priority.default, priority.optional) == ("priority", "normal", True), name
        assert priority.options == ["normal", "high", "low"], name
        assert (peers.id, peers.default, peers.optional) == ("peers", "", True), name


def test_loaders_offer_what_comfyuis_own_loaders_offer(comfy):
    found = {name: {item.id: item for item in schema.inputs} for name, schema in schemas(comfy).items()}
    assert found["CaromLoadDiffusionModel"]["weight_dtype"].options == [
        "default",
        "fp8_e4m3fn",
        "fp8_e4m3fn_fast",
    ]
    assert found["CaromLoadDiffusionModel"]["unet_name"].options == ["model.safetensors"]
    assert found["CaromLoadCLIP"]["type"].options == ["stable_diffusion", "wan", "sdxl", "flux"]
    assert found["CaromLoadCLIP"]["clip_name3"].options[0] == "none"


def test_locale_and_docs_say_what_the_schemas_say(comfy):
    told = json.loads((ROOT / "locales" / "en" / "nodeDefs.json").read_text("utf-8"))
    assert set(told) == NODES
    for name, schema in schemas(comfy).items():
        assert told[name]["display_name"] == schema.display_name
        assert told[name]["description"] == schema.description
        assert {i.id: i.tooltip for i in schema.inputs} == {
            k: v["tooltip"] for k, v in told[name]["inputs"].items()
        }
        page = (ROOT / "web" / "docs" / f"{name}.md").read_text("utf-8")
        assert page.startswith(f"# {schema.display_name}\n")
        assert all(f"| `{item.id}` | {item.tooltip} |" in page for item in schema.inputs)


@pytest.mark.parametrize(("vram", "meant"), [("5", "5GiB"), (" 7.5 ", "7.5GiB"), ("6000", "6000MiB")])
def test_a_bare_number_is_refused_on_the_node_with_what_it_probably_means(comfy, vram, meant):
    with pytest.raises(ValueError, match=f"did you mean {meant}"):
        execute(comfy.nodes["CaromOffload"], model=None, vram=vram)


def test_comfyuis_error_dialog_names_the_error_as_users_import_it():
    for name in ("BudgetError", "CaromError", "PinError", "UnsupportedError", "WeightsError"):
        error = getattr(carom, name, None) or getattr(carom.core.common.errors, name)
        assert f"{error.__module__}.{error.__qualname__}" == f"carom.{name}"


# -- loaders


def test_the_diffusion_model_loader_streams_and_says_so(comfy):
    node = comfy.nodes["CaromLoadDiffusionModel"]
    (model,) = execute(
        node, unet_name="model.safetensors", weight_dtype="fp8_e4m3fn_fast", mode="stream", vram="40KiB"
    ).args
    (path, options), *rest = comfy.loads
    assert path.endswith("model.safetensors") and not rest
    assert options == {"dtype": torch.float8_e4m3fn, "fp8_optimizations": True}
    model.partially_load(torch.device("cpu"), 1e32)
    assert 0 < model.loaded_size() <= 40 << 10
    assert [text for to, text in comfy.server.texts if to == "12" and "streams" in text]


def test_dynamic_systems_get_a_static_patcher_in_one_load(comfy):
    comfy.dynamic = True
    (model,) = execute(
        comfy.nodes["CaromLoadDiffusionModel"], unet_name="model.safetensors", mode="stream"
    ).args
    assert not model.is_dynamic() and len(comfy.loads) == 1
    (native,) = execute(
        comfy.nodes["CaromLoadDiffusionModel"], unet_name="model.safetensors", mode="native"
    ).args
    assert native.is_dynamic()


def test_checkpoint_loader_gives_model_clip_and_the_vae_as_it_is(comfy):
    output = execute(
        comfy.nodes["CaromLoadCheckpoint"], ckpt_name="model.safetensors", mode="stream", vram="40KiB"
    )
    model, clip, vae = output.args
    assert type(model).__name__ == type(clip.patcher).__name__ == "CaromModelPatcher" and vae == "vae"


def test_clip_loader_takes_several_files(comfy):
    (clip,) = execute(
        comfy.nodes["CaromLoadCLIP"], clip_name="model.safetensors", type="flux", clip_name2="model.safetensors",
        clip_name3="none", mode="stream",
    ).args  # fmt: skip
    paths, kind = comfy.loads[-1]
    assert len(paths) == 2 and kind.name == "FLUX"
    assert type(clip.patcher).__name__ == "CaromModelPatcher"


def test_auto_on_a_cpu_leaves_everything_to_comfyui_and_says_why(comfy):
    (model,) = execute(comfy.nodes["CaromLoadDiffusionModel"], unet_name="model.safetensors").args
    assert type(model) is ModelPatcher
    assert any("CPU" in text for _, text in comfy.server.texts)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"unet_name": "gone.safetensors"}, carom.WeightsError, "gone.safetensors"),
        ({"vram": "lots"}, ValueError, "vram='lots' is not a size"),
        ({"vram": "0"}, ValueError, "leaves no memory"),
        ({"vram": "101%"}, ValueError, "more than 100 %"),
        ({"vram": "-5GiB"}, ValueError, "is not a size"),
        ({"ram": "9" * 40}, ValueError, "ram="),
        ({"mode": "fast"}, ValueError, "mode='fast': choose one of auto, stream, native"),
        ({"granularity": "atom"}, ValueError, "granularity='atom'"),
        ({"codec": "zip"}, ValueError, "codec='zip'"),
        ({"priority": "urgent"}, ValueError, "priority='urgent': choose one of normal, high, low"),
        ({"peers": "the other one"}, ValueError, "peers='the other one': write auto"),
        ({"peers": "cuda:1="}, ValueError, "peers='cuda:1=': write auto"),
        ({"peers": "cuda:1=lots"}, ValueError, "peers='lots' is not a size"),
        ({"peers": "cuda:1=8"}, ValueError, "8 means 8 bytes; did you mean 8GiB?"),
        ({"weight_dtype": "fp3"}, ValueError, "weight_dtype='fp3'"),
    ],
)
def test_bad_widgets_are_refused_by_name(comfy, options, error, message):
    with pytest.raises(error, match=re.escape(message)):
        execute(comfy.nodes["CaromLoadDiffusionModel"], **{"unet_name": "model.safetensors", **options})
    assert not comfy.loads


def test_a_file_that_cannot_be_loaded_is_named(comfy):
    def fail(path: str) -> Any:
        raise KeyError("conv_in.weight")

    comfy.make = fail
    with pytest.raises(carom.WeightsError, match="'model.safetensors' could not be loaded: KeyError"):
        execute(comfy.nodes["CaromLoadDiffusionModel"], unet_name="model.safetensors")


def test_interrupts_pass_through_the_loader(comfy):
    class InterruptProcessingException(Exception):
        pass

    def stop(path: str) -> Any:
        raise InterruptProcessingException

    comfy.make = stop
    with pytest.raises(InterruptProcessingException):
        execute(comfy.nodes["CaromLoadDiffusionModel"], unet_name="model.safetensors")


# -- offload, report, plan


def test_offload_twice_takes_the_later_settings_and_native_takes_it_back(comfy):
    plain = ModelPatcher(Model(), torch.device("cpu"), torch.device("cpu"))
    node = comfy.nodes["CaromOffload"]
    (first,) = execute(node, model=plain, mode="stream", vram="64KiB").args
    (second,) = execute(node, model=first, mode="stream", vram="40KiB").args
    assert (settings_of(first).vram, settings_of(second).vram) == ("64KiB", "40KiB")
    (native,) = execute(node, model=second, mode="native").args
    assert type(native) is ModelPatcher and native.model_size() == plain.model_size()
    assert type(plain) is ModelPatcher and "carom" not in plain.attachments


@pytest.mark.parametrize(("given", "rank"), [({}, 0), ({"priority": "high"}, 1), ({"priority": "low"}, -1)])
def test_priority_reaches_the_session(comfy, given, rank):
    node, options = comfy.nodes["CaromLoadDiffusionModel"], {"mode": "stream", "vram": "40KiB", **given}
    (model,) = execute(node, unet_name="model.safetensors", **options).args
    model.partially_load(torch.device("cpu"), 1e32)
    streaming = known_streaming(model.model)
    assert inside(streaming.session).ledger.priority == rank
    streaming.close()


def test_report_gives_a_table_and_a_picture(comfy):
    node = comfy.nodes["CaromReport"]
    (model,) = execute(
        comfy.nodes["CaromLoadDiffusionModel"], unet_name="model.safetensors", mode="stream", vram="40KiB"
    ).args
    before = execute(node, model=model)
    assert "not loaded yet" in before.args[0]
    model.partially_load(torch.device("cpu"), 1e32)
    for _ in range(4):
        model.model.diffusion_model(torch.randn(2, 64))
    output = execute(node, model=model, after="a latent")
    text, picture = output.args
    assert "streams" in text and "- budget for weights: 40.00 KiB" in text and output.ui["text"] == (text,)
    assert output.ui["images"] == [tuple(picture.shape)] and "  " not in text
    assert picture.shape[0] == 1 and picture.shape[3] == 3 and picture.dtype == torch.float32
    assert 0 <= float(picture.min()) < float(picture.max()) <= 1
    model.detach()
    assert "figures of its last run" in execute(node, model=model).args[0]
    assert node.fingerprint_inputs(model=model) != node.fingerprint_inputs(model=model)


def test_report_of_models_that_do_not_stream_says_why(comfy):
    node = comfy.nodes["CaromReport"]
    plain = ModelPatcher(Model(), torch.device("cpu"), torch.device("cpu"))
    assert "no Carom node" in execute(node, model=plain).args[0]
    (native,) = execute(comfy.nodes["CaromOffload"], model=plain, mode="native").args
    assert "asked for" in execute(node, model=native).args[0]
    with pytest.raises(ValueError, match="connect a model, a clip, a vae or a control_net"):
        execute(node)


def test_plan_reads_a_header_and_plans_for_a_card(comfy, tmp_path):
    from safetensors.torch import save_file

    weights = {
        f"double_blocks.{i}.{part}.weight": torch.zeros(512, 512, dtype=torch.bfloat16)
        for i in range(4)
        for part in ("qkv", "proj")
    }
    save_file(weights, tmp_path / "diffusion_models" / "tiny.safetensors")
    node = comfy.nodes["CaromPlan"]
    text = execute(node, model_name="tiny.safetensors", card="RTX 4090", ram="32GiB", tokens=4096).args[0]
    assert "tiny" in text and "4090" in text and "VRAM\n- " in text and "  " not in text
    with pytest.raises(ValueError, match="vram"):
        execute(node, model_name="tiny.safetensors", card="RTX 4090", vram="lots", tokens=64)
    with pytest.raises((carom.CaromError, ValueError)):
        execute(node, model_name="model.safetensors", card="RTX 4090")


def test_plan_speaks_of_widgets_and_says_that_a_card_is_assumed(comfy, tmp_path):
    from safetensors.torch import save_file

    weights = {
        f"blocks.{i}.weight": torch.empty(8192, 8192, dtype=torch.bfloat16, device="cpu") for i in range(4)
    }
    save_file(weights, tmp_path / "diffusion_models" / "large.safetensors")
    node = comfy.nodes["CaromPlan"]
    for options in (
        {},
        {"card": "RTX 3060", "vram": "300MiB"},
        {"codec": "raw", "quant": "fp8", "link": "4GB"},
    ):
        text = execute(node, model_name="large.safetensors", **options).args[0]
        assert "--" not in text, text
        assert ('the card is assumed to be an RTX 4090; name yours with "card"' in text) == (
            "card" not in options
        )
    with pytest.raises(carom.BudgetError, match="the least that works is vram: [0-9]+MiB") as refused:
        execute(node, model_name="large.safetensors", card="RTX 4090", vram="1MiB")
    assert "--" not in str(refused.value)
    with pytest.raises(carom.BudgetError, match="ram: [0-9]+MiB$"):
        execute(node, model_name="large.safetensors", card="RTX 4090", vram="300MiB", ram="10MiB")


# -- a budget that is too small


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_budget_too_small_is_reported_on_the_node_that_has_the_widget(comfy, dynamic):
    comfy.dynamic = dynamic
    small = {"mode": "stream", "vram": "1KiB"}
    with pytest.raises(
        carom.BudgetError, match="vram=1KiB is too small for this model: set vram on this node to"
    ) as refused:
        execute(comfy.nodes["CaromLoadDiffusionModel"], unet_name="model.safetensors", **small)
    least = refused.value.least_bytes
    (model,) = execute(
        comfy.nodes["CaromLoadDiffusionModel"], unet_name="model.safetensors", mode="stream", vram=f"{least}B"
    ).args
    model.partially_load(torch.device("cpu"), 1e32)
    assert 0 < model.loaded_size() <= least
    plain = ModelPatcher(Model(), torch.device("cpu"), torch.device("cpu"))
    for _ in range(2):  # the answer is remembered
        with pytest.raises(carom.BudgetError, match="vram=1KiB"):
            execute(comfy.nodes["CaromOffload"], model=plain, **small)
    with pytest.raises(carom.BudgetError, match="vram=1KiB"):
        execute(comfy.nodes["CaromLoadCheckpoint"], ckpt_name="model.safetensors", **small)
    with pytest.raises(carom.BudgetError, match="vram=1KiB"):
        execute(comfy.nodes["CaromLoadVAE"], vae_name="model.safetensors", **small)


def test_a_loader_opens_one_session_for_a_budget_that_is_not_small(comfy, monkeypatch):
    def many(path: str) -> Model:
        model = Model()
        model.diffusion_model = nn.Sequential(*(layer for _ in range(6) for layer in layers()))
        return model

    opened, begin = [], carom.Session.__init__
    monkeypatch.setattr(
        carom.Session, "__init__", lambda self, *a, **k: (opened.append(self), begin(self, *a, **k))[1]
    )
    comfy.make = many
    node = comfy.nodes["CaromLoadDiffusionModel"]
    (model,) = execute(node, unet_name="model.safetensors", mode="stream", vram="200KiB").args
    assert not opened
    model.partially_load(torch.device("cpu"), 1e32)
    assert len(opened) == 1 and 0 < model.loaded_size() <= 200 << 10


@pytest.mark.parametrize("mode", ["stream", "native"])
def test_a_budget_too_small_is_reported_on_the_node_when_the_model_is_loaded_already(comfy, mode):
    plain = ModelPatcher(Model(), torch.device("cpu"), torch.device("cpu"))
    node = comfy.nodes["CaromOffload"]
    (first,) = execute(node, model=plain, mode=mode, vram="64KiB").args
    x, cpu = torch.randn(2, 64), torch.device("cpu")
    first.partially_load(cpu, 1e32)
    expected, held = first.model.diffusion_model(x), first.loaded_size()
    with pytest.raises(carom.BudgetError, match="vram=1KiB is too small for this model"):
        execute(node, model=plain, mode="stream", vram="1KiB")
    assert torch.equal(first.model.diffusion_model(x), expected)
    assert first.loaded_size() == held
    first.detach()  # ComfyUI unloads it
    with pytest.raises(carom.BudgetError, match="vram=1KiB is too small for this model"):
        execute(node, model=plain, mode="stream", vram="1KiB")
    first.partially_load(cpu, 1e32)
    assert torch.equal(first.model.diffusion_model(x), expected)


def test_what_a_too_small_budget_is_set_to_then_works(comfy):
    node = comfy.nodes["CaromLoadDiffusionModel"]
    comfy.make = lambda path: Model(width=600)
    with pytest.raises(carom.BudgetError) as refused:
        execute(node, unet_name="model.safetensors", mode="stream", vram="1KiB")
    advice = re.search(r"to (\w+) or more", str(refused.value))[1]
    execute(node, unet_name="model.safetensors", mode="stream", vram=advice)


# -- VAE and ControlNet


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = layers()

    def decode(self, latent: torch.Tensor) -> torch.Tensor:
        return self.decoder(latent)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_vae_streams_from_its_own_loader(comfy, dynamic):
    comfy.dynamic, comfy.make = dynamic, lambda path: Decoder()
    (vae,) = execute(
        comfy.nodes["CaromLoadVAE"], vae_name="model.safetensors", mode="stream", vram="40KiB"
    ).args
    latent = torch.randn(2, 64)
    expected = vae.first_stage_model.decode(latent)
    vae.patcher.partially_load(torch.device("cpu"), 1e32)
    assert torch.equal(vae.first_stage_model.decode(latent), expected)
    assert 0 < vae.patcher.loaded_size() <= 40 << 10
    assert "streams" in execute(comfy.nodes["CaromReport"], vae=vae).args[0]


def test_a_vae_streams_behind_any_loader(comfy):
    model = Decoder()
    vae = types.SimpleNamespace(
        patcher=ModelPatcher(model, torch.device("cpu"), torch.device("cpu")), first_stage_model=model
    )
    (ours,) = execute(comfy.nodes["CaromOffloadVAE"], vae=vae, mode="stream", vram="40KiB").args
    assert ours is not vae and type(ours.patcher).__name__ == "CaromModelPatcher"
    assert type(vae.patcher) is ModelPatcher


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_controlnet_streams_behind_any_loader(comfy, dynamic):
    model = layers()
    kind = ModelPatcherDynamic if dynamic else ModelPatcher
    control = Control(kind(model, torch.device("cpu"), torch.device("cpu")))
    node = comfy.nodes["CaromOffloadControlNet"]
    (ours,) = execute(node, control_net=control, mode="stream", vram="40KiB").args
    hint = torch.randn(2, 64)
    ours.control_model_wrapped.partially_load(torch.device("cpu"), 1e32)
    assert torch.equal(ours.control_model(hint), model(hint))
    assert (ours.control_model is model) == (not dynamic) and type(control.control_model_wrapped) is kind
    report = execute(comfy.nodes["CaromReport"], control_net=ours).args[0]
    assert "streams" in report and "- step time:" in report


class Handle:
    """Owns memory by a pointer, as comfy-aimdo's buffers do."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise AssertionError("two owners")


class Config:
    """Returns None for attributes that do not exist, as the base class of ComfyUI's model configurations does."""

    def __getattr__(self, name: str) -> None:
        return None


def test_a_copy_of_a_loaded_model_shares_its_weights_and_owns_nothing_of_comfyuis(comfy):
    from carom.nodes.inference_tensors import structure_of

    model = layers()
    model.model_config = Config()
    model.model_config.shift = 1.5
    handles = {"cuda": Handle()}, Handle()
    model.dynamic_pins, model[0]._v = handles
    model[1]._pin_state = model.dynamic_pins["cuda"]
    model.current_weight_patches_uuid = "loaded"
    copy = structure_of(model)
    for mine, theirs in zip(copy.parameters(), model.parameters(), strict=True):
        assert mine is not theirs and mine.data_ptr() == theirs.data_ptr() and not mine.requires_grad
    assert not {"dynamic_pins", "current_weight_patches_uuid"} & set(vars(copy)) and not hasattr(
        copy[0], "_v"
    )
    assert (model.dynamic_pins, model[0]._v) == handles
    assert copy.model_config is not model.model_config and copy.model_config.shift == 1.5


def test_a_controlnet_without_weights_of_its_own_is_left_alone_and_the_reason_is_said(comfy):
    node = comfy.nodes["CaromOffloadControlNet"]
    adapter = types.SimpleNamespace()
    assert execute(node, control_net=adapter).args == (adapter,)
    assert any("keeps its weights itself" in text for _, text in comfy.server.texts)
    with pytest.raises(carom.CaromError, match="set mode to auto or native"):
        execute(node, control_net=adapter, mode="stream")


# -- devices


def test_a_loaders_device_is_comfyuis(comfy):
    node = comfy.nodes["CaromLoadDiffusionModel"]
    (model,) = execute(node, unet_name="model.safetensors", mode="auto", device="cpu").args
    assert comfy.loads[-1][1]["load_device"] == torch.device("cpu") and type(model) is ModelPatcher
    with pytest.raises(ValueError, match="device='gpu:7' is not on this machine: choose one of default, cpu"):
        execute(node, unet_name="model.safetensors", device="gpu:7")


# -- workflows


def test_no_folder_stands_before_the_workflows():
    """ComfyUI serves the first of these folders that there is under the pack's name, and lists the files of all."""
    for name in ("example_workflows", "example", "examples", "workflow"):
        assert not (ROOT / name).exists(), f"{name}/ would hide workflows/ from the template browser"


def test_there_are_workflows_for_what_the_issue_names():
    names = {path.stem for path in WORKFLOWS}
    assert {
        "carom_flux_text_to_image",
        "carom_flux_lora",
        "carom_wan_text_to_video",
        "carom_8gb_card",
    } <= names


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_are_whole_and_name_only_nodes_that_exist(path, comfy):
    workflow = json.loads(path.read_text("utf-8"))
    nodes = {node["id"]: node for node in workflow["nodes"]}
    assert {node["type"] for node in nodes.values()} <= NODES | STOCK
    assert any(node["type"] in NODES for node in nodes.values())
    known = schemas(comfy)
    for node in nodes.values():
        if node["type"] not in known:
            continue
        schema = known[node["type"]]
        assert [item["name"] for item in node["inputs"]] == _in_order(schema)
        widgets = [item for item in node["inputs"] if "widget" in item]
        assert len(widgets) == len(node["widgets_values"])
        assert [output["type"] for output in node["outputs"]] == [o.kind.upper() for o in schema.outputs]
        options = {item.id: item.options for item in schema.inputs if item.options}
        for item, value in zip(widgets, node["widgets_values"], strict=True):
            if item["name"] in ("mode", "granularity", "codec", "card", "device", "priority"):
                assert value in options[item["name"]]
    for number, source, slot, target, into, kind in workflow["links"]:
        output, given = nodes[source]["outputs"][slot], nodes[target]["inputs"][into]
        assert number in output["links"] and given["link"] == number
        assert output["type"] == kind and given["type"] in (kind, "*")
    required = [
        (node["type"], item["name"])
        for node in nodes.values()
        for item in node["inputs"]
        if "widget" not in item and item["link"] is None
    ]
    assert {node for node, _ in required} <= {"CaromReport"}


FILES = re.compile(r".+\.safetensors")
TITLE = 30  # pixels above a node's position


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_say_where_their_files_are_and_what_their_nodes_do(path):
    workflow = json.loads(path.read_text("utf-8"))
    for node in workflow["nodes"]:
        assert " " in node["title"] or node["title"] in ("Prompt", "Guidance", "Sample", "Decode"), node[
            "type"
        ]
        files = {value for value in node["widgets_values"] if FILES.fullmatch(str(value))}
        models = node["properties"].get("models", [])
        assert {model["name"] for model in models} == files
        for model in models:
            assert model["url"].startswith("https://huggingface.co/") and model["url"].endswith(
                "/" + model["name"]
            )
            assert model["directory"] in ("diffusion_models", "text_encoders", "vae", "loras")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_no_node_of_a_workflow_covers_another(path):
    boxes = []
    for node in json.loads(path.read_text("utf-8"))["nodes"]:
        (left, top), (width, height) = node["pos"], node["size"]
        boxes.append((left, top - TITLE, left + width, top + height, node["title"]))
    for index, (left, top, right, bottom, name) in enumerate(boxes):
        for other in boxes[index + 1 :]:
            apart = right <= other[0] or other[2] <= left or bottom <= other[1] or other[3] <= top
            assert apart, f"{name} and {other[4]}"


def _in_order(schema: Any) -> list[str]:
    """ComfyUI lists required inputs before optional ones."""
    return [i.id for i in schema.inputs if not i.optional] + [i.id for i in schema.inputs if i.optional]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_every_workflow_has_a_picture(path):
    from PIL import Image

    with Image.open(path.with_suffix(".jpg")) as picture:
        assert picture.format == "JPEG" and picture.width >= 600
    assert path.with_suffix(".jpg").stat().st_size < 300_000


# -- the registry


def test_the_folder_follows_the_registrys_rules():
    tomllib = pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    comfy = settings["tool"]["comfy"]
    assert {"PublisherId", "DisplayName", "Icon", "Banner", "requires-comfyui", "includes", "web"} <= set(
        comfy
    )
    assert "comfyui" not in settings["project"]["name"].lower()
    assert (ROOT / comfy["web"] / "docs").is_dir() and not (ROOT / "install.py").exists()
    assert not any(
        line.startswith("torch") for line in (ROOT / "requirements.txt").read_text("utf-8").splitlines()
    )
    for path in (ROOT / "nodes").glob("*.py"):
        text = path.read_text("utf-8")
        assert not re.search(r"\b(eval|exec)\(|subprocess|os\.system|pip install", text), path.name
    assert importlib.import_module("carom").WEB_DIRECTORY == "./web"
