"""Wrapped quantised weights laid open: streamed by their inner tensors, exact, and put back as the same objects.

They are put together once for every place of their inner tensors, and who keeps one keeps its slot.
"""

from __future__ import annotations

import contextlib

import carom
import pytest
import torch
from carom.core.model.quantized import FlattenedWeights, flatten, is_wrapper
from tests_harness import DEVICES, assert_same, on_simulated_devices, some_vram, streamed
from tests_inside import inside
from tests_pairwise import each
from tests_wrappers import Codes
from torch import nn
from torch.utils.checkpoint import checkpoint

D = 48


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
    monkeypatch.setattr("carom.core.model.units.SMALL_BUFFER", 1024)


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


@each(checkpointing=[True, False], device=DEVICES)
def test_wrapped_weights_stream_exactly_both_ways(device, checkpointing):
    expected = steps(net(checkpointing))
    model = net(checkpointing)
    with contextlib.closing(FlattenedWeights(model)) as laid_open:
        assert len(laid_open) == 10
        with streamed(model, device, some_vram(model, device, slots=2)) as session:
            assert_same(expected, steps(model))
            names = [name for unit in inside(session).streamed for name in unit.weights]
            assert any("inner_0" in name for name in names), "the codes are what streams"
    assert_same(expected, steps(model))


def test_the_same_parameters_are_back_and_nothing_else_is_left():
    model = net()

    def tables_of(m: nn.Module):
        hooks = len(m._state_dict_hooks), len(m._state_dict_pre_hooks)
        return (
            list(m._parameters),
            list(m._buffers),
            set(m.__dict__),
            set(m._non_persistent_buffers_set),
            hooks,
        )

    tables = {id(m): tables_of(m) for m in model.modules()}
    weights = [(m, m.weight, flatten(m.weight)[1]) for m in model.modules() if isinstance(m, nn.Linear)]
    laid_open = FlattenedWeights(model)
    with streamed(model, "cpu", some_vram(model, "cpu")):
        steps(model, 1)
    laid_open.close()
    laid_open.close()
    for m in model.modules():
        assert tables_of(m) == tables[id(m)]
    for module, weight, inner in weights:
        assert module.weight is weight and all(a is b for a, b in zip(flatten(weight)[1], inner, strict=True))
        assert all(type(part) is torch.Tensor for part in inner)


def test_a_wrapper_is_readable_while_its_inner_tensors_stream():
    model, plain = net(), net()
    with contextlib.closing(FlattenedWeights(model)), streamed(model, "cpu", some_vram(model, "cpu")):
        for _ in range(2):
            for a, b in zip(model.blocks, plain.blocks, strict=True):
                assert isinstance(a.up.weight, Quantised) and a.up.weight.shape == b.up.weight.shape
                assert torch.equal(a.up.weight.dequantize(), b.up.weight.dequantize())
            assert model.state_dict().keys() == plain.state_dict().keys()
            steps(model, 1)


def test_a_weight_put_in_its_place_is_used_and_noticed():
    model = net()
    laid_open = FlattenedWeights(model)
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
    with contextlib.closing(FlattenedWeights(model)), pytest.raises(RuntimeError):
        model(torch.randn(4, D + 1))
    assert model.blocks[1].up.weight is before


def test_plain_and_trainable_tensors_are_left_alone():
    model = nn.Linear(D, D)
    with contextlib.closing(FlattenedWeights(model)) as laid_open:
        assert len(laid_open) == 0 and not is_wrapper(model.weight)


def test_without_room_for_what_autograd_keeps_the_budget_is_named():
    model = net()
    with contextlib.closing(FlattenedWeights(model)), pytest.raises(carom.BudgetError):
        carom.stream(model, device="cpu", vram=1000)


def open_vram(model, device, **share):
    with contextlib.closing(FlattenedWeights(model)):
        return some_vram(model, device, **share)


@pytest.fixture
def made(monkeypatch):
    """Counts wrappers that are put together of inner tensors."""
    count, plain = [0], Quantised.__tensor_unflatten__.__func__

    def unflatten(cls, *args):
        count[0] += 1
        return plain(cls, *args)

    monkeypatch.setattr(Quantised, "__tensor_unflatten__", classmethod(unflatten))
    return count


def infer(model, passes):
    seen = []
    for index in range(passes):
        with torch.no_grad():
            seen.append(model(torch.randn(4, D, generator=torch.Generator().manual_seed(index))))
    return seen


@pytest.mark.parametrize("vram", ["1GiB", None], ids=["resident", "streamed"])
def test_once_a_layout_has_settled_no_pass_puts_a_weight_together(made, vram):
    expected, model = infer(net(), 12), net()
    with carom.stream(model, device="cpu", vram=vram or open_vram(model, "cpu", slots=2)) as session:
        assert bool(session.report().streamed_bytes) == (vram is None)
        seen = infer(model, 8)
        before = made[0]
        seen += infer(model, 12)[8:]
        assert made[0] == before
    assert_same(expected, seen)


def test_what_was_made_for_inference_trains():
    model = net()
    expected = steps(net(), 2)
    with streamed(model, "cpu", open_vram(model, "cpu", slots=2)):
        with torch.inference_mode():
            for _ in range(3):
                model(torch.zeros(4, D))
        assert_same(expected, steps(model, 2))


def test_a_parked_models_weights_are_right_when_it_returns():
    model = net()
    expected = infer(net(), 6)
    with carom.stream(model, device="cpu", vram="1GiB"):
        seen = infer(model, 3)
        model.to("cpu")
        assert_same(expected, [*seen, *infer(model, 6)[3:]])


KEPT = {
    "the weight": lambda weight: weight,
    "the wrapper within": lambda weight: weight.impl,
    "an inner tensor": lambda weight: weight.impl.codes,
    "an alias": lambda weight: weight.detach(),
    "an alias of an inner tensor": lambda weight: weight.impl.codes.detach(),
}


class Keeping(nn.Linear):
    def forward(self, x):
        self.keep(self.weight)
        return super().forward(x)


class Keeps(nn.Module):
    """Its first block's weight, or part of it, is still used when all the others ran."""

    def __init__(self, kept):
        super().__init__()
        self.blocks, self.keeps = net().blocks, []
        up = self.blocks[0].up
        up.__class__, up.keep = Keeping, lambda weight: self.keeps.append(kept(weight))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        kept = self.keeps.pop()
        value = kept.dequantize() if isinstance(kept, (Quantised, Codes)) else kept.float()
        return x + value.sum()


@on_simulated_devices
@pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT)
def test_who_keeps_a_weight_beyond_its_run_keeps_its_slot(device, kept):
    expected, model = infer(Keeps(kept), 4), Keeps(kept)
    with streamed(
        model, device, open_vram(model, device, share=0.3, slots=3), granularity="block"
    ) as session:
        assert_same(expected, infer(model, 4))
        assert not [slot for slot in inside(session).slots if slot.users]


class Aliases(Quantised):
    """Does not stand around what it is made of, but around aliases."""

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return super().__tensor_unflatten__({"impl": inner["impl"].detach()}, context, size, stride)


def test_a_wrapper_that_aliases_its_inner_tensors_is_made_anew():
    def aliasing():
        model = net()
        for part in model.modules():
            if isinstance(part, nn.Linear):
                part.weight = nn.Parameter(Aliases(part.weight.impl, part.weight.kind), requires_grad=False)
        return model

    expected, model = steps(aliasing()), aliasing()
    with streamed(model, "cpu", open_vram(model, "cpu", slots=2)) as session:
        assert_same(expected, steps(model))
        assert all(
            w.references is None
            for leaf in inside(session).manager.module.quantized._flattened
            for w in leaf.weights.values()
        )
