"""ai-toolkit with `disk`: the same training while weights beyond `ram` stream from disk, on the stand-in for ai-toolkit."""

from __future__ import annotations

import gc

import carom
import pytest
import tests_aitoolkit_stand_in as standin
import torch
from carom.core.checkpoint.mapped_views import MappedViews
from carom.core.checkpoint.memory_maps import lists_files
from carom.toolkit_ext.loading import models_stay_on_the_host
from carom.toolkit_ext.spilled_loading import SpilledLoading, own_tensors
from safetensors.torch import load_file, save_file
from tests_harness import DEVICES, assert_same
from tests_pairwise import each
from torch import nn

pytestmark = pytest.mark.skipif(not lists_files(), reason="the system does not tell which files are mapped")

VRAM, RAM = 800_000, 400_000  # bytes; the stand-in's two models together have 1.2 MB
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def toolkit():
    with standin.installed():
        yield
    gc.collect()


class Mapped(standin.Attaching):
    """A model class whose weights are views of a mapped safetensors file, as those of diffusers and transformers."""

    folder = None

    def make(self):
        super().make()
        for name in ("unet", "text_encoder"):
            module, path = getattr(self, name), self.folder / f"{name}.safetensors"
            save_file(module.state_dict(), path)
            module.load_state_dict(load_file(path), assign=True)


def run(folder, disk, model_class=standin.Attaching, ram=RAM, config=None, **train):
    """Run a job; ``disk``: None for a job without Carom."""
    model = dict(config or {})
    if disk is not None:
        kwargs = {"vram": VRAM, "ram": ram, "disk": str(disk), "granularity": "layer"}
        model |= {"offload": "bouncing", "offload_kwargs": kwargs}
    process = standin.BaseSDTrainProcess(model, folder, **train)
    process.model_class = model_class
    process.run()
    return process


def from_disk():
    return [line for line in standin.SAID if " from disk, with " in line]


@each(
    device=["cpu", "simulated-late", "simulated-random"],
    model_class={"Attaching": standin.Attaching, "Legacy": standin.Legacy},
    checkpointing=[True, False],
    quantize_te=[False, True],
)
def test_training_from_a_spill_file_is_the_plain_jobs_bit_for_bit(
    tmp_path, monkeypatch, device, model_class, checkpointing, quantize_te
):
    monkeypatch.setattr("carom.toolkit_ext.devices.engine_device", lambda _: DEVICES[device])
    train = {"checkpointing": checkpointing, "sample_every": 1, "steps": 2}
    config = {"quantize_te": quantize_te}
    plain = run(tmp_path, None, model_class, config=config, **train)
    disk = run(tmp_path, tmp_path / "spill", model_class, config=config, **train)
    assert_same(plain.result, disk.result)
    assert any("Transformer" in line for line in from_disk()), standin.SAID
    del plain, disk
    gc.collect()
    assert not list((tmp_path / "spill").glob("*")), "spill files stay"


def test_auto_streams_from_the_mapped_file_and_writes_nothing(tmp_path):
    Mapped.folder = tmp_path
    plain = run(tmp_path, None, Mapped)
    before = set(tmp_path.rglob("*"))
    assert_same(plain.result, run(tmp_path, "auto", Mapped).result)
    assert any("Transformer" in line for line in from_disk()), standin.SAID
    assert not [path for path in set(tmp_path.rglob("*")) - before if path.suffix == ".bin"]


@pytest.mark.parametrize("disk", ["auto", "spill"])
def test_nothing_goes_to_disk_if_ram_suffices(tmp_path, disk):
    folder = disk if disk == "auto" else tmp_path / disk
    assert_same(run(tmp_path, None).result, run(tmp_path, folder, ram=8_000_000).result)
    assert not from_disk() and not (tmp_path / "spill").exists()


def test_a_merge_on_save_into_weights_on_disk_is_refused_before_the_first_step(tmp_path):
    class Merges(standin.BaseSDTrainProcess):
        train_config = type("", (), {"merge_network_on_save": True})()

    kwargs = {"vram": VRAM, "ram": RAM, "disk": str(tmp_path / "spill"), "granularity": "layer"}
    process = Merges({"offload": "bouncing", "offload_kwargs": kwargs}, tmp_path)
    with pytest.raises(carom.UnsupportedError, match="merge_network_on_save"):
        process.run()
    assert not process.result
    kwargs["ram"] = 8_000_000
    Merges({"offload": "bouncing", "offload_kwargs": kwargs}, tmp_path).run()


@pytest.mark.parametrize(("ram", "merges"), [(RAM, False), (8_000_000, True)])
def test_samples_merge_nothing_into_weights_on_disk(tmp_path, monkeypatch, ram, merges):
    monkeypatch.setattr(standin.ToolkitNetworkMixin, "can_merge_in", True, raising=False)
    process = run(tmp_path, tmp_path / "spill", ram=ram, sample_every=1)
    assert process.network.can_merge_in is merges


def test_a_model_whose_own_weights_train_stays_in_memory(tmp_path):
    plain, disk = (run(tmp_path, folder, full=True) for folder in (None, tmp_path / "spill"))
    assert_same(plain.result, disk.result)
    assert not any("Transformer" in line for line in from_disk())
    assert any("disk has no effect" in line for line in standin.SAID), standin.SAID


def test_quantised_weights_that_are_buffers_stream_from_disk(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4))).requires_grad_(False)
    standin.quantise(model)
    x = torch.randn(2, 1024)
    expected = model(x)
    with carom.stream(
        model, device="cpu", vram=3 << 20, ram=2 << 20, disk=tmp_path, granularity="layer"
    ) as session:
        assert_same([expected], [model(x)])
        assert session.report().streamed_bytes >= 4 << 20
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) >= 4 << 20
    assert_same([expected], [model(x)])


# -- while loading


def unmapped(model):
    views = MappedViews()
    parts = [t for module in model.modules() for t in own_tensors(module)]
    return sum(tensor.nbytes for tensor in parts if views.find(tensor) is None)


def load(model, arrived, make):
    """Load ``model`` as ai-toolkit quantises: ``make`` the weights of each block, then move the block to the host.

    Returns the most bytes of weights that were in memory, outside of mapped files.
    """
    most = 0
    with models_stay_on_the_host(CPU, arrived):
        for block in model:
            make(block)
            block.to("cpu")
            most = max(most, unmapped(model))
    return most


def wrap(block):
    codes = block[0].weight.detach().to(torch.float8_e4m3fn)
    block[0].weight = nn.Parameter(standin.Wrapped(codes, torch.float32), requires_grad=False)


def convert(block):
    block.to(torch.float64)


def mapped_blocks(path):
    """Return 12 blocks whose weights are views of a mapped file."""
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Sequential(nn.Linear(256, 256, bias=False)) for _ in range(12))
    save_file(model.state_dict(), path)
    model.load_state_dict(load_file(path), assign=True)
    return model


def values(model):
    return [t.detach().view(torch.uint8).clone() for m in model.modules() for t in own_tensors(m)]


@pytest.mark.parametrize("make", [wrap, convert, standin.quantise])
def test_weights_that_loading_makes_are_spilled_beyond_ram(tmp_path, make):
    plain, model = (mapped_blocks(tmp_path / f"{index}.safetensors") for index in range(2))
    load(plain, lambda module: None, make)
    expected = values(plain)
    block = sum(value.nbytes for value in expected) // len(plain)
    ram = 3 * block
    assert load(model, SpilledLoading(str(tmp_path), ram).note, make) <= ram + block < unmapped(plain)
    assert_same(expected, values(model))
    assert list(tmp_path.glob("carom-spill-*"))
    del model
    gc.collect()
    assert not list(tmp_path.glob("carom-spill-*"))


def test_weights_within_ram_are_not_spilled_while_they_load(tmp_path):
    model = nn.ModuleList(nn.Sequential(nn.Linear(64, 64)) for _ in range(4))
    load(model, SpilledLoading(str(tmp_path), 1 << 20).note, convert)
    assert not list(tmp_path.iterdir())


def wrap_layers(model):
    for block in model:
        wrap(block)


@pytest.mark.parametrize("make", [standin.quantise, wrap_layers])
def test_a_model_that_is_quantised_as_a_whole_is_spilled_layer_by_layer(tmp_path, make):
    """ai-toolkit quantises text encoders so: no module is moved in between."""
    plain, model = (mapped_blocks(tmp_path / f"{index}.safetensors") for index in range(2))
    make(plain)
    expected = values(plain)
    block = sum(value.nbytes for value in expected) // len(plain)
    loading, most = SpilledLoading(str(tmp_path), 3 * block), 0
    with loading.noting_quantised():
        for part in model:
            make(nn.ModuleList([part]))
            most = max(most, unmapped(model))
    assert 0 < most <= 4 * block < unmapped(plain)
    assert_same(expected, values(model))
    before = set(tmp_path.glob("carom-spill-*"))
    make(mapped_blocks(tmp_path / "2.safetensors"))
    assert before and set(tmp_path.glob("carom-spill-*")) == before, "outside of the context"


def test_a_text_encoder_is_spilled_while_a_job_quantises_it(tmp_path, monkeypatch):
    held, whole, plain = [], [], standin.quantise

    def quantise(encoder):
        plain(encoder)
        held.append(unmapped(encoder))
        whole.append(sum(value.nbytes for value in values(encoder)))

    monkeypatch.setattr(standin, "quantise", quantise)
    Mapped.folder = tmp_path
    run(tmp_path, tmp_path / "spill", Mapped, ram="40KB", config={"quantize_te": True}, steps=1)
    (most,), (all_of_it,) = held, whole
    assert most <= 40_000 + 20_000 < all_of_it, "ram and a layer"


def test_a_folder_that_cannot_be_written_stops_the_job_though_each_layers_errors_are_caught(tmp_path):
    """ai-toolkit prints an error of a layer and leaves the layer unquantised: the job would train another model."""
    model = mapped_blocks(tmp_path / "model.safetensors")
    (tmp_path / "file").write_text("")
    loading, failures = SpilledLoading(str(tmp_path / "file" / "folder"), 4096), []
    with pytest.raises(carom.WeightsError, match="folder"), loading.noting_quantised():
        for block in model:
            try:
                standin.quantise(block)
            except Exception as error:  # noqa: BLE001
                failures.append(error)
    assert not failures
