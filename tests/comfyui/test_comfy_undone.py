"""What fails in ComfyUI leaves a model that ComfyUI can go on with: its weights, its hooks, its injections."""

from __future__ import annotations

import gc
import sys
from types import SimpleNamespace
from typing import Any

import carom
import pytest
import torch
from carom.nodes.node_settings import Settings
from carom.nodes.patcher import wear
from carom.nodes.streaming import streaming_of
from tests_comfy_stand_in import installed
from torch import nn

CPU = torch.device("cpu")
WIDTH = 32
BLOCK = 2 * (WIDTH * WIDTH + WIDTH) * 4
X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def comfy(tmp_path):
    with installed(tmp_path) as state:
        patcher = sys.modules["comfy.model_patcher"].ModelPatcher
        linear = sys.modules["comfy.ops"].disable_weight_init.Linear
        yield SimpleNamespace(ModelPatcher=patcher, Linear=linear, management=state.management)


class Block(nn.Module):
    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.up, self.down = linear(WIDTH, WIDTH), linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Diffusion(nn.Module):
    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(linear) for _ in range(6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Model(nn.Module):
    """As ComfyUI's BaseModel: the network is one of its members."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.diffusion_model = Diffusion(linear)

    def apply_model(self, x: torch.Tensor) -> torch.Tensor:
        return self.diffusion_model(x)


class Scaled(torch.Tensor):
    """A quantised weight as torchao's: a wrapper around inner tensors."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict, context: Any, shape: Any, stride: Any) -> Any:
        return Scaled(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Scaled(args[0].codes, args[0].scale)
        plain = torch.utils._pytree.tree_map(
            lambda a: a.codes * a.scale if isinstance(a, Scaled) else a, args
        )
        return func(*plain, **(kwargs or {}))


def make(comfy: Any, vram: str = "auto", quantised: bool = False) -> Any:
    torch.manual_seed(0)
    model = Model(comfy.Linear)
    with torch.inference_mode(quantised):
        for tensor in model.parameters():
            tensor.data = torch.randn(tensor.shape) * 0.1
        for layer in [
            layer for block in model.diffusion_model.blocks for layer in (block.up, block.down)
        ] * quantised:
            codes = (layer.weight / 0.01).round().to(torch.int8)
            layer.weight = nn.Parameter(Scaled(codes, torch.tensor(0.01)), requires_grad=False)
    return wear(comfy.ModelPatcher(model, CPU, CPU), Settings(mode="stream", vram=vram))


def run(patcher: Any, extra: float = 1e32) -> torch.Tensor:
    with torch.inference_mode():
        patcher.partially_load(CPU, extra)
        patcher.pre_run()
        y = patcher.model.apply_model(X)
        patcher.cleanup()
    return y.clone()


class Injection:
    """Counts how often it stands in the model."""

    def __init__(self) -> None:
        self.stands = 0

    def inject(self, patcher: Any) -> None:
        self.stands += 1

    def eject(self, patcher: Any) -> None:
        self.stands -= 1


def test_quantised_weights_that_found_no_budget_are_whole_again(comfy):
    patcher = make(comfy, vram="100", quantised=True)
    model = patcher.model
    before = {name: (type(module), sorted(module._buffers)) for name, module in model.named_modules()}
    names = [name for name, _ in model.named_parameters()]
    with pytest.raises(carom.BudgetError, match="least budget that works"):
        run(patcher)
    assert [name for name, _ in model.named_parameters()] == names
    assert {name: (type(module), sorted(module._buffers)) for name, module in model.named_modules()} == before
    assert isinstance(model.diffusion_model.blocks[2].up._parameters["weight"], Scaled)
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_a_load_that_fails_leaves_nothing_loaded_and_the_next_one_works(comfy, monkeypatch):
    patcher = make(comfy, str(3 * BLOCK))
    reference = run(patcher)
    streaming = streaming_of(patcher.model)
    patcher.detach()
    injection = Injection()
    patcher.injections["one"] = [injection]

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("no luck")

    with monkeypatch.context() as broken:
        broken.setattr(carom.Session, "unpark", fails)
        broken.setattr(carom.Session, "set_budget", fails)
        broken.setattr("carom.nodes.opening.stream", fails)
        with pytest.raises(RuntimeError, match="no luck"), torch.inference_mode():
            patcher.partially_load(CPU, 1e32)
    model = patcher.model
    assert model.current_weight_patches_uuid is None, "ComfyUI would take it for loaded"
    assert model.model_loaded_weight_memory == 0 and not model.model_lowvram
    assert not streaming.streams
    assert not any(hasattr(module, "prev_comfy_cast_weights") for module in model.modules())
    assert torch.equal(run(patcher), reference)
    assert injection.stands == 1


def test_a_model_taken_over_from_a_whole_load_has_its_injections_and_may_have_more(comfy):
    patcher = make(comfy)
    reference = run(patcher)  # loaded whole, by ComfyUI
    injection = Injection()
    patcher.injections["one"] = [injection]
    assert not patcher.skip_injection
    # Room for some of it: the weights become Carom's, within one load.
    assert torch.equal(run(patcher, 3 * BLOCK - patcher.loaded_size()), reference)
    assert streaming_of(patcher.model).streams
    assert not patcher.skip_injection and injection.stands == 1
    patcher.unpatch_model(CPU)
    assert injection.stands == 0
    patcher.inject_model()
    assert injection.stands == 1


def test_a_load_called_directly_leaves_injections_allowed(comfy):
    patcher = make(comfy)
    run(patcher)
    with torch.inference_mode():
        patcher.load(CPU, 3 * BLOCK)
    assert streaming_of(patcher.model).streams and not patcher.skip_injection


def test_each_run_expects_the_sizes_of_its_passes_anew(comfy, monkeypatch):
    """Between runs others had the device's memory: what fitted in the last run is looked at again."""
    patcher = make(comfy, str(3 * BLOCK))
    run(patcher)
    session = streaming_of(patcher.model).session
    assert session is not None
    calls: list[int] = []
    expect = carom.Session.expect_anew
    monkeypatch.setattr(carom.Session, "expect_anew", lambda self: (calls.append(1), expect(self))[1])
    run(patcher)
    assert calls, "the session was not told that a run begins"


def test_pins_of_a_closed_and_of_a_suspended_model_are_comfyuis_again(comfy, monkeypatch):
    device = carom.SimulatedDevice()
    make_session = sys.modules["carom.nodes.opening"].stream
    monkeypatch.setattr(
        "carom.nodes.opening.stream", lambda *a, **k: make_session(*a, **{**k, "device": device})
    )
    first, second = make(comfy, str(3 * BLOCK)), make(comfy, str(3 * BLOCK))
    run(first)
    pinned = comfy.management.TOTAL_PINNED_MEMORY
    assert pinned > 0
    with torch.inference_mode():
        first.detach()  # it waits, pinned
    assert comfy.management.TOTAL_PINNED_MEMORY > 0
    comfy.management.MAX_PINNED_MEMORY = pinned + 4096  # no room for both
    run(second)
    report = streaming_of(second.model).report()
    assert report is not None and report.pinned_bytes == pinned, "the model that runs comes first"
    assert streaming_of(first.model).report().pinned_bytes == 0
    for patcher in (first, second):
        streaming_of(patcher.model).close()
    assert comfy.management.TOTAL_PINNED_MEMORY == 0


def test_a_model_that_is_freed_after_comfyui_gives_its_memory_back(tmp_path, caplog):
    with installed(tmp_path):
        comfy = SimpleNamespace(
            ModelPatcher=sys.modules["comfy.model_patcher"].ModelPatcher,
            Linear=sys.modules["comfy.ops"].disable_weight_init.Linear,
        )
        patcher = make(comfy, str(3 * BLOCK))
        run(patcher)
        streaming = streaming_of(patcher.model)
        session = streaming.session
        assert session is not None
    del patcher
    gc.collect()
    assert streaming.model is None and session.closed and not caplog.records
