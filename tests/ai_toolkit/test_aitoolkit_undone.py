"""In ai-toolkit: what fails, is moved or is unloaded leaves models, reports and budgets as its code expects them."""

from __future__ import annotations

import gc
import json

import pytest
import tests_aitoolkit_stand_in as standin
import torch
from tests_inside import open_sessions
from torch import nn

VRAM = 160_000  # bytes: about a fourth of the stand-in's transformer
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def toolkit():
    before = open_sessions()  # of other files' tests
    with standin.installed():
        yield
    gc.collect()
    assert all(found in before for found in open_sessions()), "a session was left open"


@pytest.fixture
def offload():
    from carom.toolkit_ext import toolkit_patches
    from carom.toolkit_ext.job import JobOffload
    from carom.toolkit_ext.options import Policy

    toolkit_patches._current = JobOffload(Policy("bouncing", VRAM), "cpu", standin.SAID.append)
    yield toolkit_patches._current
    toolkit_patches._current.close()
    toolkit_patches._current = None


def attached(quantised: bool = False):
    torch.manual_seed(1)
    model = standin.Transformer().requires_grad_(False)
    standin.MemoryManager.attach(model, CPU)
    if quantised:
        for layer in [module for module in model.modules() if isinstance(module, nn.Linear)]:
            codes = (layer.weight / 0.01).round().to(torch.int8)
            layer.weight = nn.Parameter(Scaled(codes, torch.tensor(0.01)), requires_grad=False)
    return model


class Scaled(torch.Tensor):
    """A quantised weight as torchao's: a wrapper around inner tensors."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, shape, stride):
        return Scaled(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return Scaled(args[0].codes, args[0].scale)
        plain = torch.utils._pytree.tree_map(
            lambda a: a.codes * a.scale if isinstance(a, Scaled) else a, args
        )
        return func(*plain, **(kwargs or {}))


def inputs():
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(2, 6, standin.D, generator=generator) for _ in range(2)]


def test_quantised_weights_are_whole_again_where_streaming_could_not_begin(offload, monkeypatch):
    model = attached(quantised=True)
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    before = [(layer._parameters["weight"], sorted(layer._buffers)) for layer in layers]

    def full(*args, **kwargs):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr("carom.toolkit_ext.job_sessions.Session", full)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="out of memory"):
                model(*inputs())
            for layer, (weight, buffers) in zip(layers, before, strict=True):
                assert layer._parameters["weight"] is weight and sorted(layer._buffers) == buffers
    model(*inputs())
    assert model._memory_manager.session is not None


def test_a_part_called_alone_streams_again_after_a_pause(offload):
    model = attached()
    x = standin._noise(3)
    expected = model.blocks[1](x)
    manager = model._memory_manager
    assert manager.session is not None
    manager.pause()
    assert manager.session is None
    assert torch.equal(model.blocks[1](x), expected)
    assert manager.session is not None, "the part ran where its weights wait"


def test_moving_a_parked_model_to_its_device_brings_it_back(offload):
    model = attached()
    expected = model(*inputs())
    session = model._memory_manager.session
    session.park()
    assert session.report().slot_bytes == 0
    assert model.to(CPU) is model
    assert not session.parked and session.report().slot_bytes > 0
    assert torch.equal(model(*inputs()), expected)


def test_the_report_of_an_unloaded_model_is_written_too(offload, tmp_path):
    model, other = attached(), attached()
    for one in (model, other):
        with torch.no_grad():
            one(*inputs())
    standin.MemoryManager.free(model)
    offload.reports.write(tmp_path, "job", pictures=False)
    written = json.loads(next(tmp_path.rglob("report.json")).read_text())["models"]
    assert sorted(written) == ["Transformer", "Transformer 2"]
    assert all(figures["vram_peak_bytes"] > 0 for figures in written.values())
