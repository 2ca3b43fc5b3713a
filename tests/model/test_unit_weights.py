"""A block that reads the quantised weight of a layer without calling the layer, as DoRA does."""

from __future__ import annotations

import carom
import pytest
import torch
from tests_inside import inside
from tests_wrappers import Codes
from torch import nn
from torch.utils.checkpoint import checkpoint

D = 48


class Bytes(nn.Parameter):
    """A quantised weight as bitsandbytes has it: a parameter of codes, with the scale as an attribute."""

    @staticmethod
    def __new__(cls, codes, scale):
        self = torch.Tensor._make_subclass(cls, codes, False)
        self.scale = scale
        return self

    def dequantize(self):
        return self.data * self.scale


class Used(torch.autograd.Function):
    """A product with a quantised weight, which is kept for the backward."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return x @ weight.dequantize().T

    @staticmethod
    def backward(ctx, grad):
        (weight,) = ctx.saved_tensors
        return grad @ weight.dequantize(), None


class Layer(nn.Module):
    """A layer with a quantised weight."""

    def __init__(self, kind):
        super().__init__()
        weight = torch.randn(D, D) / 8
        scale = weight.abs().amax(1, keepdim=True) / 127
        made = kind((weight / scale).round().to(torch.int8), scale)
        self.weight = made if kind is Bytes else nn.Parameter(made, requires_grad=False)

    def forward(self, x):
        return Used.apply(x, self.weight)


class Around(nn.Module):
    """Reads its base layer's weight before and after it calls the layer, and not at all through the layer if not `calls`."""

    def __init__(self, calls, kind):
        super().__init__()
        self.base, self.calls = Layer(kind), calls
        self.factor = nn.Parameter(torch.ones(D))

    def forward(self, x):
        before = self.base.weight.dequantize().norm(dim=1)
        result = self.base(x) if self.calls else Used.apply(x, self.base.weight)
        after = self.base.weight.dequantize().norm(dim=1)
        assert torch.equal(before, after)
        return result * self.factor / after


class Block(nn.Module):
    def __init__(self, calls, kind):
        super().__init__()
        self.up, self.down = Around(calls, kind), Around(calls, kind)

    def forward(self, x):
        return x + self.down(self.up(x).tanh())


class Net(nn.Module):
    def __init__(self, calls, checkpointing, kind):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(calls, kind) for _ in range(5))
        self.checkpointing = checkpointing

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return x


@pytest.fixture(autouse=True)
def small_buffers_stream(monkeypatch):
    monkeypatch.setattr("carom.core.model.units.SMALL_BUFFER", 1024)


def train(model, steps=3):
    x, found = torch.linspace(-1, 1, 2 * D).reshape(2, D), []
    for _ in range(steps):
        model.zero_grad()
        out = model(x)
        out.square().mean().backward()
        found += [out.detach(), *(p.grad.clone() for p in model.parameters() if p.requires_grad)]
    with torch.no_grad():
        return [*found, model(x)]


@pytest.mark.parametrize("granularity", ["block", "layer"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpoint"])
@pytest.mark.parametrize("calls", [True, False], ids=["calls", "reads"])
@pytest.mark.parametrize("timing", ["late", "random"])
@pytest.mark.parametrize("kind", [Codes, Bytes])
def test_a_weight_that_is_read_outside_its_layer_is_that_of_the_slot(
    timing, calls, checkpointing, granularity, kind
):
    expected, model = train(Net(calls, checkpointing, kind)), Net(calls, checkpointing, kind)
    device = carom.SimulatedDevice(timing=timing)
    layers = [part for part in model.modules() if isinstance(part, Layer)]
    weights = [layer.weight for layer in layers]
    with carom.stream(model, vram=12_000, device=device, granularity=granularity) as session:
        assert session.report().streamed_bytes > 0
        assert all(torch.equal(a, b) for a, b in zip(train(model), expected, strict=True))
        assert not any(slot.users for slot in inside(session).slots)
    assert all(part.weight is weight for part, weight in zip(layers, weights, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(train(model), expected, strict=True))


@pytest.mark.parametrize("granularity", ["block", "layer"])
@pytest.mark.parametrize("share", [0.5, 3.0], ids=["streamed", "resident"])
def test_qdora_on_bitsandbytes_trains_as_resident(share, granularity):
    bitsandbytes, peft = pytest.importorskip("bitsandbytes"), pytest.importorskip("peft")

    def model():
        torch.manual_seed(0)
        base = nn.Sequential(*(nn.Sequential() for _ in range(4)))
        for block in base:
            for name in ("up", "down"):
                layer = bitsandbytes.nn.Linear4bit(
                    64, 64, bias=False, compute_dtype=torch.float32, quant_type="nf4"
                )
                weight = torch.randn(64, 64) / 8
                layer.weight = bitsandbytes.nn.Params4bit(weight, requires_grad=False, quant_type="nf4")
                block.add_module(name, layer.to("cpu"))
        base.is_loaded_in_4bit = True
        config = peft.LoraConfig(r=4, target_modules=["up", "down"], use_dora=True, init_lora_weights=False)
        return peft.get_peft_model(base, config)

    def run(module):
        x = torch.linspace(-1, 1, 128).reshape(2, 64)
        found = []
        for _ in range(2):
            module.zero_grad()
            module(x).square().mean().backward()
            found += [p.grad.clone() for p in module.parameters() if p.requires_grad]
        return found

    expected, streamed = run(model()), model()
    options = {"device": carom.SimulatedDevice(), "granularity": granularity}
    with carom.stream(streamed, vram=int(share * 60_000), **options) as session:
        assert (session.report().streamed_bytes > 0) == (share < 1)
        assert all(torch.equal(a, b) for a, b in zip(run(streamed), expected, strict=True))
        assert session.report().steps > 0
    names = [name for name, _ in streamed.named_parameters()]
    assert any(name.endswith("base_layer.weight") for name in names)
    assert all(torch.equal(a, b) for a, b in zip(run(streamed), expected, strict=True))


@pytest.mark.parametrize("kind", [Codes, Bytes])
def test_a_state_dict_that_is_made_while_the_unit_runs_has_the_weights_values(kind):
    plain, model, states = Net(True, False, kind), Net(True, False, kind), []
    expected = plain.state_dict()
    device = carom.SimulatedDevice(timing="random")
    with torch.no_grad(), carom.stream(model, vram=12_000, device=device, granularity="block"):
        model.blocks[2].up.register_forward_pre_hook(lambda *_: states.append(model.state_dict()))
        for _ in range(2):
            assert torch.equal(model(torch.ones(2, D)), plain(torch.ones(2, D)))
        assert len(states) == 2
        for state in states:
            assert state.keys() == expected.keys()
            for name, value in expected.items():
                pair = [v.dequantize() if name.endswith("base.weight") else v for v in (state[name], value)]
                assert torch.equal(*pair)
