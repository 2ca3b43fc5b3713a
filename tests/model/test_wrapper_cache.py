"""Kept wrappers hide nobody who keeps a slot, keep no slot themselves, and forget what a run left in them."""

from __future__ import annotations

import gc
import io
import weakref

import carom
import pytest
import tests_wrappers
import torch
from carom.core.model import wrapper_cache
from tests_harness import assert_same, on_simulated_devices, streamed
from tests_inside import inside
from torch import nn

D = 48


class Codes(tests_wrappers.Codes):
    """With a linear of its own, as libraries have."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is nn.functional.linear:
            x, weight, bias = args
            return x @ weight.dequantize().T + bias
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Pair:
    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale


class Slots:
    __slots__ = ("codes", "scale")
    __init__ = Pair.__init__


class WithPair(Codes):
    """Has its tensors through an object, too."""

    pair = Pair

    def __init__(self, codes, scale):
        super().__init__(codes, scale)
        self.both = [self.pair(codes, scale)]


class WithSlots(WithPair):
    """Through one whose attributes are in no dict, too."""

    pair = Slots


class WithItself(Codes):
    def __init__(self, codes, scale):
        super().__init__(codes, scale)
        self.pair = Pair(codes, self)


class Derives(Codes):
    def __init__(self, codes, scale):
        super().__init__(codes, scale)
        self.ready = codes * scale

    def dequantize(self):
        return self.ready


class Remembers(Codes):
    """Keeps a view of its codes once it was used."""

    def dequantize(self):
        if not hasattr(self, "turned"):
            self.turned = self.codes.T
        return self.turned.T * self.scale


class RemembersDeeper(Codes):
    def __init__(self, codes, scale):
        super().__init__(codes, scale)
        self.cache = {}

    def dequantize(self):
        return self.cache.setdefault("turned", self.codes.T).T * self.scale


class Replaces(Codes):
    """Puts its codes elsewhere once it is used."""

    def dequantize(self):
        self.codes = self.codes.clone()
        return super().dequantize()


@pytest.fixture(autouse=True)
def small_buffers_stream(monkeypatch):
    monkeypatch.setattr("carom.core.model.units.SMALL_BUFFER", 1024)


class Linear(nn.Linear):
    keeps = None

    def forward(self, x):
        if self.keeps is not None:
            self.keeps.append(self.keep(self.weight))
        return super().forward(x)


class Net(nn.Module):
    """What its first layer keeps of the weight is used when all the others ran."""

    def __init__(self, kind, keep=None, use=None):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(Linear(D, D) for _ in range(6)).requires_grad_(False)
        for layer in self.layers:
            scale = layer.weight.abs().amax(1, keepdim=True) / 127
            codes = (layer.weight / scale).round().to(torch.int8)
            layer.weight = nn.Parameter(kind(codes, scale), requires_grad=False)
        self.use = use
        if use is not None:
            self.layers[0].keep, self.layers[0].keeps = keep, []

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x if self.use is None else x + self.use(self.layers[0].keeps.pop()).float().sum()


def infer(model, passes=4):
    seen = []
    for index in range(passes):
        with torch.no_grad():
            seen.append(model(torch.randn(4, D, generator=torch.Generator().manual_seed(index))))
    return seen


def steps(model, count=3):
    seen = []
    for index in range(count):
        x = torch.randn(4, D, generator=torch.Generator().manual_seed(index)).requires_grad_()
        y = model(x)
        y.pow(2).sum().backward()
        seen += [y.detach(), x.grad]
    return seen


def layers_vram(kind, device):
    """Room for three layers with their weights laid open."""
    with pytest.raises(carom.BudgetError) as refused:
        carom.stream(Net(kind), device=device, vram=0, granularity="layer")
    return refused.value.least_bytes * 3


def codes_once_used(weight):
    codes = weight.codes
    weight.dequantize()
    return codes


HELD = {
    "an object": (WithPair, lambda weight: weight.both[0], lambda pair: pair.codes),
    "a list": (WithPair, lambda weight: weight.both, lambda both: both[0].codes),
    "an object without a dict": (WithSlots, lambda weight: weight.both[0], lambda slots: slots.codes),
    "one of a circle": (WithItself, lambda weight: weight.pair, lambda pair: pair.scale.codes),
    "its attributes": (Codes, lambda weight: weight.__dict__, lambda attributes: attributes["codes"]),
    "what its class replaced": (Replaces, codes_once_used, lambda codes: codes),
}


@on_simulated_devices
@pytest.mark.parametrize("held", HELD.values(), ids=HELD)
def test_who_keeps_what_leads_to_a_weights_bytes_keeps_their_slot(device, held):
    expected, model = infer(Net(*held)), Net(*held)
    with streamed(model, device, layers_vram(held[0], device), granularity="layer"):
        assert_same(expected, infer(model))


@on_simulated_devices
@pytest.mark.parametrize("kind", [Remembers, RemembersDeeper])
def test_a_view_that_a_weight_remembers_keeps_no_slot(device, kind):
    expected, model = [*infer(Net(kind)), *steps(Net(kind))], Net(kind)
    with streamed(model, device, layers_vram(kind, device), granularity="layer") as session:
        seen = infer(model)
        assert not inside(session).held_slots
        assert_same(expected, [*seen, *steps(model)])


@pytest.mark.parametrize("vram", ["1GiB", None], ids=["resident", "streamed"])
def test_what_a_run_leaves_in_a_weight_goes_with_the_run(vram):
    left = []

    class Leaves(Codes):
        def dequantize(self):
            self.ready = super().dequantize()
            left.append(weakref.ref(self.ready))
            return self.ready

    expected, model = infer(Net(Leaves)), Net(Leaves)
    left.clear()
    with carom.stream(model, device="cpu", vram=vram or layers_vram(Leaves, "cpu"), granularity="layer"):
        assert_same(expected, infer(model))
        assert len(left) == 24 and not any(one() is not None for one in left)


@pytest.mark.parametrize("kind", [Derives, WithSlots])
def test_a_weight_with_tensors_of_its_own_or_in_hidden_places_is_made_anew(kind):
    expected, model = steps(Net(kind)), Net(kind)
    with streamed(model, "cpu", layers_vram(kind, "cpu"), granularity="layer") as session:
        seen = steps(model)
        assert all(
            w.references is None
            for leaf in inside(session).manager.module.quantized._flattened
            for w in leaf.weights.values()
        )
        gc.collect()
    assert_same(expected, seen)


def test_an_object_around_the_inner_tensors_does_not_prevent_keeping():
    model = Net(WithPair)
    with streamed(model, "cpu", layers_vram(WithPair, "cpu"), granularity="layer") as session:
        infer(model)
        held = [
            weight.references
            for leaf in inside(session).manager.module.quantized._flattened
            for weight in leaf.weights.values()
        ]
        assert all(
            len(references.holders) == 5 for references in held
        )  # weight, list, object, and attributes of two


def test_an_inner_tensor_that_a_run_saves_loads_as_a_plain_one():
    files = []

    def save(weight):
        files.append(io.BytesIO())
        torch.save(weight.codes, files[-1])
        return weight.codes.clone()

    model = Net(Codes, save, lambda codes: codes)
    codes = model.layers[0].weight.codes.clone()
    with streamed(model, "cpu", layers_vram(Codes, "cpu"), granularity="layer"):
        infer(model, 2)
    for file in files:
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        assert torch.equal(loaded, codes) and not vars(loaded)


def test_a_closed_session_leaves_no_kept_weight():
    made, before = [], len(wrapper_cache._PLACES)

    class Known(Codes):
        def __init__(self, codes, scale):
            super().__init__(codes, scale)
            made.append(weakref.ref(self))

    model, vram = Net(Known), layers_vram(Known, "cpu")
    gc.collect()
    made.clear()
    gc.disable()
    try:
        with streamed(model, "cpu", vram, granularity="layer"):
            infer(model)
            assert any(one() is not None for one in made)
        assert not any(one() is not None for one in made) and len(wrapper_cache._PLACES) == before
    finally:
        gc.enable()
