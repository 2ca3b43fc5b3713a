"""Wrapped quantised weights laid open: streamed by their inner tensors, exact, and put back as the same objects."""

from __future__ import annotations

import contextlib

import carom
import pytest
import torch
from carom.core.wrapped import LaidOpen, is_wrapper, lay_open
from tests_harness import DEVICES, assert_same, some_vram, streamed
from torch import nn
from torch.utils.checkpoint import checkpoint

D = 48


class Codes(torch.Tensor):
    """What a library's quantised storage looks like: 8-bit codes and a scale for each row."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype, device=codes.device)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["codes"], inner["scale"])

    def dequantize(self):
        return self.codes.to(self.scale.dtype) * self.scale

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(func(args[0].codes), func(args[0].scale))
        raise NotImplementedError(func)


class Quantised(torch.Tensor):
    """The weight tensor around it, as torchao nests them; its linear keeps the wrapper for backward."""

    @staticmethod
    def __new__(cls, impl, dtype):
        return torch.Tensor._make_wrapper_subclass(cls, impl.shape, dtype=dtype, device=impl.device)

    def __init__(self, impl, dtype):
        self.impl, self.kind = impl, dtype

    def __tensor_flatten__(self):
        return ["impl"], {"dtype": self.kind}

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["impl"], context["dtype"])

    @classmethod
    def of(cls, weight):
        scale = weight.abs().amax(1, keepdim=True) / 127
        return cls(Codes((weight / scale).round().to(torch.int8), scale), weight.dtype)

    def dequantize(self):
        return self.impl.dequantize()

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is nn.functional.linear:
            return Linear.apply(*args)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(func(args[0].impl), args[0].kind)
        raise NotImplementedError(func)


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias=None):
        ctx.save_for_backward(weight)
        return x @ weight.dequantize().T + bias

    @staticmethod
    def backward(ctx, grad):
        (weight,) = ctx.saved_tensors
        return grad @ weight.dequantize(), None, None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(D, 2 * D), nn.LayerNorm(2 * D), nn.Linear(2 * D, D)

    def forward(self, x):
        return x + self.down(self.norm(self.up(x)).tanh())


class Net(nn.Module):
    def __init__(self, checkpointing):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.checkpointing = checkpointing

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return x


@pytest.fixture(autouse=True)
def small_buffers_stream(monkeypatch):
    monkeypatch.setattr("carom.core.units.SMALL_BUFFER", 1024)


def net(checkpointing=False):
    torch.manual_seed(2)
    model = Net(checkpointing).requires_grad_(False)
    for part in model.modules():
        if isinstance(part, nn.Linear):
            part.weight = nn.Parameter(Quantised.of(part.weight.detach()), requires_grad=False)
    return model


def steps(model, count=3):
    seen = []
    for index in range(count):
        x = torch.randn(4, D, generator=torch.Generator().manual_seed(index)).requires_grad_()
        y = model(x)
        y.pow(2).sum().backward()
        with torch.no_grad():
            seen += [y.detach(), x.grad, model(x.detach())]
    return seen


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_wrapped_weights_stream_exactly_both_ways(device, checkpointing):
    expected = steps(net(checkpointing))
    model = net(checkpointing)
    with contextlib.closing(LaidOpen(model)) as laid_open:
        assert len(laid_open) == 10
        with streamed(model, device, some_vram(model, device, slots=2)) as session:
            assert_same(expected, steps(model))
            names = [e.name for unit in session._placement.streamed for e in unit.unit.entries]
            assert any("inner_0" in name for name in names), "the codes are what streams"
    assert_same(expected, steps(model))


def test_the_same_parameters_are_back_and_nothing_else_is_left():
    model = net()
    tables = {
        id(m): (list(m._parameters), list(m._buffers), set(m.__dict__), set(m._non_persistent_buffers_set))
        for m in model.modules()
    }
    weights = [(m, m.weight, lay_open(m.weight)[1]) for m in model.modules() if isinstance(m, nn.Linear)]
    laid_open = LaidOpen(model)
    with streamed(model, "cpu", some_vram(model, "cpu")):
        steps(model, 1)
    laid_open.close()
    laid_open.close()
    for m in model.modules():
        kept = tables[id(m)]
        assert (list(m._parameters), list(m._buffers), set(m.__dict__), m._non_persistent_buffers_set) == kept
    for module, weight, inner in weights:
        assert module.weight is weight and all(
            a is b for a, b in zip(lay_open(weight)[1], inner, strict=True)
        )
        assert all(type(part) is torch.Tensor for part in inner)


def test_a_wrapper_is_readable_while_its_inner_tensors_stream():
    model, plain = net(), net()
    with contextlib.closing(LaidOpen(model)), streamed(model, "cpu", some_vram(model, "cpu")):
        for _ in range(2):
            for a, b in zip(model.blocks, plain.blocks, strict=True):
                assert isinstance(a.up.weight, Quantised) and a.up.weight.shape == b.up.weight.shape
                assert torch.equal(a.up.weight.dequantize(), b.up.weight.dequantize())
            assert model.state_dict().keys() == plain.state_dict().keys()
            steps(model, 1)


def test_a_weight_put_in_its_place_is_used_and_noticed():
    model = net()
    laid_open = LaidOpen(model)
    assert not laid_open.replaced
    model.blocks[0].up.weight = nn.Parameter(Quantised.of(torch.ones(2 * D, D)), requires_grad=False)
    assert laid_open.replaced
    plain = net()
    plain.blocks[0].up.weight = nn.Parameter(Quantised.of(torch.ones(2 * D, D)), requires_grad=False)
    assert_same(steps(plain, 1), steps(model, 1))
    laid_open.close()
    assert_same(steps(plain, 1), steps(model, 1))


def test_an_exception_in_a_forward_leaves_the_wrapper_standing():
    model = net()
    before = model.blocks[1].up.weight
    with contextlib.closing(LaidOpen(model)), pytest.raises(RuntimeError):
        model(torch.randn(4, D + 1))
    assert model.blocks[1].up.weight is before


def test_plain_and_trainable_tensors_are_left_alone():
    model = nn.Linear(D, D)
    with contextlib.closing(LaidOpen(model)) as laid_open:
        assert len(laid_open) == 0 and not is_wrapper(model.weight)


def test_without_room_for_what_autograd_keeps_the_budget_is_named():
    model = net()
    with contextlib.closing(LaidOpen(model)), pytest.raises(carom.BudgetError):
        carom.stream(model, device="cpu", vram=1000)
