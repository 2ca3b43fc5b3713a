"""Files of `carom pack` in Carom's loaders: ComfyUI gets decoded weights, in memory or in a mapped spill file."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import sys
import types
from pathlib import Path
from typing import Any

import carom
import pytest
import torch
from carom.core.checkpoint.mapped_views import MappedViews
from carom.core.common.errors import WeightsError
from safetensors import safe_open
from safetensors.torch import save_file
from tests_comfy_stand_in import Linear, installed
from torch import nn

WIDTH, LAYERS = 256, 4
PACKINGS = {"raw": ["--codec", "raw"], "lossless": ["--codec", "lossless"], "nf4": ["--quant", "nf4"]}
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mapped views are found on Linux")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.diffusion_model = nn.Sequential(
            *(Linear(WIDTH, WIDTH, dtype=torch.bfloat16) for _ in range(LAYERS))
        )


@pytest.fixture(scope="module")
def packed(tmp_path_factory, carom_cli) -> Path:
    """A folder with a file of each packing, and the plain file."""
    folder = tmp_path_factory.mktemp("packed") / "diffusion_models"
    folder.mkdir()
    torch.manual_seed(3)
    weights = {name: torch.randn_like(value) * 0.02 for name, value in Model().state_dict().items()}
    weights["layout"] = torch.tensor([1, 2, 3], dtype=torch.uint8)
    save_file(weights, folder / "plain.safetensors", metadata={"config": json.dumps({"kind": "test"})})
    for name, options in PACKINGS.items():
        done = carom_cli(
            "pack", str(folder / "plain.safetensors"), str(folder / f"{name}.safetensors"), *options
        )
        assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def comfy(packed):
    with installed(packed.parent) as state:
        state.seen = []

        def make(path: str) -> nn.Module:
            weights, metadata = sys.modules["comfy.utils"].load_torch_file(path, return_metadata=True)
            state.seen.append((weights, metadata))
            model = Model()
            model.load_state_dict({name: weights[name] for name in model.state_dict()})
            return model

        state.make = make
        extension = asyncio.run(carom.comfy_entrypoint())
        nodes = {node.define_schema().node_id: node for node in asyncio.run(extension.get_node_list())}
        state.node = nodes["CaromLoadDiffusionModel"]
        yield state
        state.seen.clear()
    gc.collect()  # models and their sessions refer to each other


def load(comfy: Any, name: str, **options: Any) -> Any:
    node = type("Node", (comfy.node,), {"hidden": types.SimpleNamespace(unique_id="12")})
    options = {"mode": "stream", "vram": "300KiB", **options}
    return node.execute(unet_name=f"{name}.safetensors", **options).args[0]


def true_weights(packed: Path, name: str) -> dict[str, torch.Tensor]:
    return carom.load_file(packed / f"{name}.safetensors")


@pytest.mark.parametrize("name", PACKINGS)
@pytest.mark.parametrize("ram", ["auto", "1MiB", "1KiB"])
@pytest.mark.parametrize("mode", ["stream", "native"])
def test_comfyui_gets_the_decoded_weights_and_the_metadata_of_the_source(comfy, packed, name, ram, mode):
    model = load(comfy, name, ram=ram, mode=mode)
    ((weights, metadata),) = comfy.seen
    expected = true_weights(packed, name)
    assert set(weights) == set(expected) == set(true_weights(packed, "plain"))
    for key, value in expected.items():
        assert (weights[key].dtype, weights[key].shape) == (value.dtype, value.shape)
        assert torch.equal(weights[key], value), key
    assert metadata == {"config": json.dumps({"kind": "test"}), "format": "pt"}
    for key, value in model.model.state_dict().items():
        assert torch.equal(value, expected[key])


@linux
@pytest.mark.parametrize("name", ["lossless", "nf4"])
def test_weights_beyond_ram_are_in_a_mapped_file_that_goes_with_the_model(comfy, packed, name):
    folder = packed.parent / "temp" / "carom"
    model = load(comfy, name, ram="300KiB")
    in_file = [MappedViews().find(value) for value in model.model.parameters() if value.nbytes > 4096]
    assert len(in_file) == LAYERS and all(
        found and Path(found.file.path).parent == folder for found in in_file
    )
    model.partially_load(torch.device("cpu"), 1e32)
    value = torch.randn(2, WIDTH, dtype=torch.bfloat16)
    plain = Model()
    plain.load_state_dict(
        {key: value for key, value in true_weights(packed, name).items() if key != "layout"}
    )
    assert torch.equal(model.model.diffusion_model(value), plain.diffusion_model(value))
    model.detach()
    comfy.seen.clear()
    del model, in_file
    gc.collect()
    assert not list(folder.glob("carom-spill-*"))


@linux
def test_weights_that_fit_into_ram_are_written_nowhere(comfy, packed):
    model = load(comfy, "lossless", ram="1GiB")
    assert not list((packed.parent / "temp").glob("carom/carom-spill-*"))
    views = MappedViews()
    assert not any(views.find(value) for value in model.model.parameters() if value.nbytes > 4096)


@linux
@pytest.mark.parametrize("ram", ["300KiB", "1GiB"])
def test_converted_weights_beyond_ram_are_written_while_the_file_is_read(comfy, packed, ram):
    weights = {key: value.float() for key, value in true_weights(packed, "plain").items() if key != "layout"}
    save_file(weights, packed / "float.safetensors")
    model = load(comfy, "float", ram=ram)
    views, folder = MappedViews(), packed.parent / "temp" / "carom"
    for key, value in model.model.state_dict().items():
        assert value.dtype == torch.bfloat16 and torch.equal(value, weights[key].bfloat16())
        if value.nbytes > 4096:
            found = views.find(value)
            assert (found is not None and Path(found.file.path).parent == folder) is (ram == "300KiB")


@linux
def test_models_that_wait_in_memory_count_against_ram(comfy, packed):
    """Two models are loaded before one runs, and `ram` holds one of them."""
    nbytes = sum(value.nbytes for value in true_weights(packed, "lossless").values())
    first = load(comfy, "lossless", ram=str(nbytes * 3 // 2))
    second = load(comfy, "lossless", ram=str(nbytes * 3 // 2))
    views = MappedViews()
    assert not any(views.find(value) for value in first.model.parameters() if value.nbytes > 4096)
    assert all(views.find(value) for value in second.model.parameters() if value.nbytes > 4096)


@linux
def test_a_model_that_gives_its_ram_up_is_spilled_once(comfy, packed):
    """`ram` holds one of two models. Nothing is written again for the model that was spilled before."""
    folder, weights = packed.parent / "temp" / "carom", true_weights(packed, "lossless")
    ram = str(sum(value.nbytes for value in weights.values()) * 5 // 4)
    models = [load(comfy, name, ram=ram) for name in ("lossless", "nf4")]
    written = []
    for turn in (0, 1, 0, 1):
        models[turn].partially_load(torch.device("cpu"), 1e32)
        models[turn].detach()
        written.append({path.name for path in folder.glob("carom-spill-*")})
    assert written[1] == written[3]
    views = MappedViews()
    assert all(views.find(value) for value in models[0].model.parameters() if value.nbytes > 4096)
    for key, value in models[0].model.state_dict().items():
        assert torch.equal(value, weights[key])


@linux
def test_a_cache_on_disk_counts_with_the_ram_that_it_holds(comfy, packed, monkeypatch):
    """Under auto the limit is the free memory and what the models hold. A cache that is not full holds less than its bound."""
    from carom.nodes import comfyui_api
    from carom.nodes.streaming import streaming_of

    first = load(comfy, "lossless", ram="300KiB")
    first.partially_load(torch.device("cpu"), 1e32)
    waiting = streaming_of(first.model)
    assert waiting.from_disk and waiting.ram_now() < waiting.ram
    first.detach()
    held: list[int] = []
    ram_limit = comfyui_api.ram_limit
    monkeypatch.setattr(
        comfyui_api, "ram_limit", lambda value, now: (held.append(now), ram_limit(value, now))[1]
    )
    second = load(comfy, "nf4", ram="auto")
    held.clear()  # those of the loader, which counts what each model may hold
    second.partially_load(torch.device("cpu"), 1e32)
    assert held and max(held) <= waiting.ram_now() < waiting.ram


@linux
def test_ram_that_a_cache_gives_up_leaves_comfyuis_count_of_pinned_memory(comfy, monkeypatch):
    from carom.nodes import comfyui_api
    from carom.nodes.streaming import Streaming, streaming_of

    model = load(comfy, "lossless", ram="300KiB")
    model.partially_load(torch.device("cpu"), 1e32)
    streaming = streaming_of(model.model)
    counted: list[int] = []
    monkeypatch.setattr(comfyui_api, "count_pinned", counted.append)
    report = streaming.report()  # nothing is pinned on the CPU
    for pinned in (500, 200):
        pins = dataclasses.replace(report, pinned_bytes=pinned)
        monkeypatch.setattr(Streaming, "report", lambda self, pins=pins: pins)
        if pinned == 500:
            streaming.count_pinned()
        else:
            streaming.give_up_ram(16 << 10)
    assert counted == [500, -300]


def test_a_second_run_of_the_loader_decodes_too(comfy, packed):
    """ComfyUI runs a loader again to leave dynamic VRAM, and for further GPUs."""
    comfy.dynamic = True
    model = load(comfy, "nf4", mode="native")
    again = model.clone(disable_dynamic=True)
    assert len(comfy.seen) == 2
    for key, value in again.model.state_dict().items():
        assert torch.equal(value, true_weights(packed, "nf4")[key])


def test_other_loaders_read_files_as_before(comfy, packed):
    utils = sys.modules["comfy.utils"]
    before = utils.load_torch_file
    load(comfy, "nf4")
    assert utils.load_torch_file is before
    key = "diffusion_model.0.weight"
    assert utils.load_torch_file(str(packed / "nf4.safetensors"))[key].dtype == torch.uint8


@pytest.mark.parametrize("name", ["lossless", "nf4"])
def test_a_damaged_file_names_the_tensor_and_the_remedy(comfy, packed, name):
    key = "diffusion_model.2.weight"
    data = bytearray((packed / f"{name}.safetensors").read_bytes())
    with safe_open(packed / f"{name}.safetensors", framework="np") as file:
        blob = file.get_tensor(key).tobytes()
    data[data.index(blob) + len(blob) // 2] ^= 1
    (packed / "damaged.safetensors").write_bytes(data)
    before = sys.modules["comfy.utils"].load_torch_file
    with pytest.raises(WeightsError, match=rf"'{key}'.*pack the file again"):
        load(comfy, "damaged", ram="1KiB")
    assert sys.modules["comfy.utils"].load_torch_file is before
    assert not list((packed.parent / "temp").glob("carom/carom-spill-*"))


def test_a_user_can_cancel_while_tensors_are_decoded(comfy, packed):
    class InterruptProcessingException(Exception):
        pass

    class Bar:
        done: list[int] = []

        def __init__(self, total: int) -> None:
            self.total = total

        def update_absolute(self, done: int, total: int) -> None:
            self.done.append(done)
            if len(self.done) == 3:
                raise InterruptProcessingException

    sys.modules["comfy.utils"].ProgressBar = Bar
    with pytest.raises(InterruptProcessingException):
        load(comfy, "lossless", ram="1KiB")
    assert Bar.done == sorted(Bar.done) and len(Bar.done) == 3
    assert not list((packed.parent / "temp").glob("carom/carom-spill-*"))
