"""ai-toolkit with `codec: lossless`: the same training from weights that wait packed and have no second copy on the host."""

from __future__ import annotations

import gc
import warnings

import carom
import pytest
import tests_aitoolkit_stand_in as standin
import torch
from carom.core.placement.packed_home import PackedHome
from carom.core.placement.packed_tensor import PackedTensor
from carom.toolkit_ext import toolkit_patches
from carom.toolkit_ext.job import JobOffload
from carom.toolkit_ext.options import Policy
from tests_harness import DEVICES, assert_same
from tests_inside import inside
from tests_limits import pack_small_weights
from tests_pairwise import each
from torch import nn

BOTH = 400_000  # bytes: about a third of the stand-in's models
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def toolkit(monkeypatch):
    pack_small_weights(monkeypatch, 1024, ratio=None)  # the stand-in's weights are small
    with standin.installed():
        yield
    gc.collect()


def run(folder, codec, model_class=standin.Attaching, config=None, **train):
    model = dict(config or {})
    if codec is not None:
        model |= {"offload": "bouncing", "offload_kwargs": {"vram": BOTH, "codec": codec}}
    process = standin.BaseSDTrainProcess(model, folder, **train)
    process.model_class = model_class
    process.run()
    return process


@pytest.fixture
def job():
    """A transformer under a job whose weights wait packed."""
    toolkit_patches._current = JobOffload(
        Policy("bouncing", 200_000, codec="lossless"), "cpu", standin.SAID.append
    )
    torch.manual_seed(1)
    yield toolkit_patches._current, standin.Transformer().requires_grad_(False)
    toolkit_patches._current.close()
    toolkit_patches._current = None


def packed(module):
    session = module._memory_manager.session
    assert session is not None and session.report().packed_units > 0
    return {
        owner.entry.name: owner
        for unit in inside(session).placement.streamed
        for owner in unit.homes
        if isinstance(owner, PackedHome)
    }


def inputs(step=0):
    return standin._noise(step), standin._noise(50 + step)


@each(
    device=["cpu", "simulated-late", "simulated-random"],
    model_class={"Attaching": standin.Attaching, "Legacy": standin.Legacy},
    checkpointing=[True, False],
)
def test_training_is_the_plain_jobs_bit_for_bit(tmp_path, monkeypatch, device, model_class, checkpointing):
    monkeypatch.setattr("carom.toolkit_ext.devices.engine_device", lambda _: DEVICES[device])
    train = {"gradient_checkpointing": checkpointing, "sample_every": 1, "steps": 2}
    plain = run(tmp_path, None, model_class, **train)
    assert_same(plain.result, run(tmp_path, "lossless", model_class, **train).result)


def test_a_packed_weight_keeps_no_bytes_beside_the_packed_ones(job):
    _, model = job
    nbytes = {name: p.nbytes for name, p in model.named_parameters()}
    standin.MemoryManager.attach(model, CPU)
    model(*inputs())
    owners = packed(model)
    assert sum(nbytes[name] for name in owners) > 0.5 * sum(nbytes.values())
    with torch._C.DisableTorchFunctionSubclass():
        for name, owner in owners.items():
            assert owner.tensor.untyped_storage().nbytes() <= 8, f"{name} keeps its plain bytes as well"
    report = model._memory_manager.session.report()
    assert (
        report.pinned_bytes
        < report.streamed_bytes
        == sum(unit.nbytes for unit in inside(model._memory_manager.session).streamed)
    )


def test_packed_weights_are_readable_and_true(job):
    _, model = job
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    standin.MemoryManager.attach(model, CPU)
    model(*inputs())
    assert packed(model)
    for name, value in expected.items():
        path, _, leaf = name.rpartition(".")
        weight = getattr(model.get_submodule(path), leaf)
        assert (weight.shape, weight.dtype) == (value.shape, value.dtype)
        assert torch.equal(weight.detach().float(), value.float()) and torch.equal(weight.data, value), name
        norm = torch.linalg.vector_norm(weight, dim=0)  # as DoRA asks
        assert torch.equal(norm, torch.linalg.vector_norm(value, dim=0))


def merge_through_data(self, merge_weight=1.0):
    """As ai-toolkit's FullModule merges: the parameter stays, and gets other data."""
    (layer,) = self.org_module
    added = merge_weight * (self.up.detach().float() @ self.down.detach().float())
    layer.weight.data = (layer.weight.float() + added).to(layer.weight.dtype)


@pytest.mark.parametrize("how", ["load_state_dict", "data"])
def test_a_merge_is_seen_and_warns_of_nothing(job, monkeypatch, how):
    if how == "data":
        monkeypatch.setattr(standin.Lora, "merge_in", merge_through_data)
    _, model = job
    x, text = inputs()
    standin.MemoryManager.attach(model, CPU)
    network = standin.Network(model)
    network.apply_to()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.fill_(0.01)
        before = model(x, text)
        assert packed(model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            network.merge_in()
        merged = model(x, text)
        network.merge_out()
    reference = standin.Transformer()
    torch.manual_seed(1)
    reference = standin.Transformer().requires_grad_(False)
    again = standin.Network(reference)
    again.apply_to()
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.fill_(0.01)
        again.merge_in()
        assert not torch.equal(before, merged) and torch.equal(reference(x, text), merged)


def test_a_merge_unpacks_each_weight_once_on_the_device(job, monkeypatch):
    _, model = job
    standin.MemoryManager.attach(model, CPU)
    network = standin.Network(model)
    network.apply_to()
    unpacked, written = [], []
    value, replace = PackedTensor.value, PackedHome.replace
    monkeypatch.setattr(
        PackedTensor, "value", lambda self, device=None: unpacked.append(device) or value(self, device)
    )
    monkeypatch.setattr(PackedHome, "replace", lambda self, new: written.append(self) or replace(self, new))
    with torch.no_grad():
        model(*inputs())
        weights = [lora.org_module[0]._parameters["weight"] for lora in network.loras]
        packed_weights = sum(isinstance(getattr(weight, "_carom", None), PackedHome) for weight in weights)
        unpacked.clear()
        network.merge_in()
    # None would be the host, whatever the device is.
    assert unpacked == [model._memory_manager.session.device] * packed_weights and packed_weights > 0
    assert len(written) == packed_weights
    assert all(
        lora.org_module[0]._parameters["weight"] is w for lora, w in zip(network.loras, weights, strict=True)
    )
    assert not any("merge_in" in lora.__dict__ for lora in network.loras)


def test_a_merge_that_fails_leaves_the_weights_in_place(job):
    _, model = job
    standin.MemoryManager.attach(model, CPU)
    network = standin.Network(model)
    with torch.no_grad():
        expected = model(*inputs()).clone()
    before = dict(model.named_parameters())
    network.loras[-1].up = nn.Parameter(torch.ones(1, 3))  # of the wrong shape
    with pytest.raises(RuntimeError):
        network.merge_in()
    after = dict(model.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())
    with torch.no_grad():
        assert torch.equal(model(*inputs()), expected)  # the other adapters are zero


class Aliasing(standin.Wrapped):
    """As torchao's: what is inside becomes a plain tensor when it is put together, so operators see no stand-in there."""

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["codes"].detach(), context)


class Refined(nn.Module):
    """As a transformer with a single refiner: a list of one before a list of several."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.refiner = nn.ModuleList([nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256))])
        self.blocks = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))
        self.requires_grad_(False)
        for linear in (self.refiner[0][0], self.refiner[0][2]):
            codes = (linear.weight.detach() * 8).to(torch.float8_e4m3fn)
            linear.weight = nn.Parameter(Aliasing(codes, torch.float32), requires_grad=False)

    def forward(self, x):
        x = self.refiner[0](x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def test_packed_wrapped_weights_below_a_list_of_one_are_exact_and_saved_true():
    x = torch.linspace(-1, 1, 512).reshape(2, 256).requires_grad_()
    results = []
    for streamed in (False, True):
        model = Refined()
        codes = model.refiner[0][0].weight.codes.clone()
        x.grad = None
        if streamed:
            with carom.stream(
                model, device="cpu", vram=800_000, codec="lossless", granularity="block"
            ) as session:
                units = {unit.name: unit for unit in inside(session).streamed}
                assert units["refiner"].packed
                y = model(x)
                y.sum().backward()
                saved, read = model.state_dict(), session.read("refiner.0.0.weight")
                assert torch.equal(read.codes, codes) and torch.equal(
                    saved["refiner.0.0.weight"].codes, codes
                )
        else:
            y = model(x)
            y.sum().backward()
        results.append([y.detach(), x.grad.clone()])
    assert_same(*results)
