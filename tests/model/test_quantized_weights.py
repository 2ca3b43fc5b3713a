"""Quantised weights travel as they are, in any session: exact, frozen under LoRA, and given back as the same objects."""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Callable
from typing import Any

import carom
import pytest
import torch
from carom.core.model import tensor_flatten
from tests_disk_harness import least_on_disk
from tests_harness import SOME, assert_same, least_vram, on_simulated_devices, place, train
from tests_inside import inside
from tests_pairwise import pairwise
from torch import nn
from torch.utils.checkpoint import checkpoint

D = 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, kind: str = "none") -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.kind == "none" or not torch.is_grad_enabled():
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.kind == "reentrant")
        return x


class Lora(nn.Module):
    """An adapter around a layer, whatever the layer is."""

    def __init__(self, base: nn.Module, out: int, inside: int, seed: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.base = base
        self.a = nn.Parameter(torch.randn(2, inside, generator=draw) * 0.1)
        self.b = nn.Parameter(torch.randn(out, 2, generator=draw) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


class Case:
    @staticmethod
    def inputs(index: int, device: torch.device) -> torch.Tensor:
        return torch.randn(2, 3, D, generator=torch.Generator().manual_seed(index)).to(device)


# -- kinds of quantised weights: each turns a frozen net's linear layers into its own


class Scales:
    """A quantisation state, with one for its own scales inside."""

    def __init__(self, scale: torch.Tensor, inner: Scales | None = None) -> None:
        self.scale, self.inner, self.kind = scale, inner, "int8"


class Int8(nn.Parameter):
    """Dressed bytes with a state that holds tensors, and a way back to the module, as bitsandbytes' 4-bit weights."""

    def __new__(cls, codes: torch.Tensor, state: Any = None, module: Any = None) -> Int8:
        self = torch.Tensor._make_subclass(cls, codes, False)
        self.state, self.module = state, module
        return self


class Product(torch.autograd.Function):
    """Keeps codes and state on its context instead of saving them, as bitsandbytes' matrix products do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, codes: Any, state: Scales) -> torch.Tensor:
        ctx.tensors, ctx.state = (None, codes), state
        return x @ dequantised(codes, state).T

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] @ dequantised(ctx.tensors[1], ctx.state), None, None


class DressedLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert type(self.weight) is Int8 and self.weight.module is self
        return Product.apply(x, self.weight, self.weight.state) + self.bias


def dequantised(codes: Any, state: Scales) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return codes.detach().as_subclass(torch.Tensor).float() * (state.scale * state.inner.scale)


def dressed(net: Net) -> None:
    for block in net.blocks:
        for name in ("up", "down"):
            old = getattr(block, name)
            new = DressedLinear(old.in_features, old.out_features)
            new.bias = old.bias
            scale = old.weight.detach().abs().amax(1, keepdim=True) / 127
            codes = (old.weight.detach() / scale).round().to(torch.int8)
            new.weight = Int8(codes, Scales(scale / 2, Scales(torch.tensor(2.0))), new)
            setattr(block, name, new.requires_grad_(False))


class TakenOver:
    """What bitsandbytes' int8 layers do with the tensors that hang on a weight: the layer's state takes them over."""

    def __init__(self) -> None:
        self.CB: torch.Tensor | None = None
        self.SCB: torch.Tensor | None = None


class Bytes(nn.Parameter):
    def __new__(cls, codes: torch.Tensor) -> Bytes:
        return torch.Tensor._make_subclass(cls, codes, False)


class TakingLinear(nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.state = TakenOver()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.weight.CB is not None:
            self.state.CB, self.state.SCB = self.weight.CB, self.weight.SCB
            self.weight.CB = self.weight.SCB = None
        weight = self.state.CB.float() * self.state.SCB
        self.weight.data = self.state.CB
        return nn.functional.linear(x, weight, self.bias)


def taken_over(net: Net) -> None:
    for block in net.blocks:
        for name in ("up", "down"):
            old = getattr(block, name)
            new = TakingLinear(old.in_features, old.out_features)
            new.bias = old.bias
            scale = old.weight.detach().abs().amax(1, keepdim=True) / 127
            new.weight = Bytes((old.weight.detach() / scale).round().to(torch.int8))
            new.weight.CB, new.weight.SCB = new.weight.data.as_subclass(torch.Tensor), scale
            setattr(block, name, new.requires_grad_(False))


class Fp8Linear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


def plain_fp8(net: Net) -> None:
    for block in net.blocks:
        for name in ("up", "down"):
            old = getattr(block, name)
            new = Fp8Linear(old.in_features, old.out_features)
            new.bias = old.bias
            new.weight = nn.Parameter(old.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
            new.scale = nn.Parameter(torch.full((old.out_features, 1), 1.01))
            setattr(block, name, new.requires_grad_(False))


def library(name: str) -> Any:
    """The module ``name``, or a skip that says why not."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 - libraries fail to import in many ways
        pytest.skip(f"{name} does not import here: {type(error).__name__}: {str(error)[:100]}")


def torchao(
    config: str, where: str = "torchao.quantization", options: Callable[[Any], dict] = lambda api: {}
) -> Callable[[Net], None]:
    def quantise(net: Net) -> None:
        api = library("torchao.quantization")
        if not hasattr(library(where), config):
            pytest.skip(f"this torchao has no {config}")
        try:
            api.quantize_(net, getattr(library(where), config)(**options(api)))
        except (ImportError, AssertionError, RuntimeError, NotImplementedError) as error:
            pytest.skip(f"torchao's {config} does not run on this machine: {str(error)[:100]}")

    return quantise


def bnb(make: Callable[[Any, nn.Linear], nn.Module]) -> Callable[[Net], None]:
    def quantise(net: Net) -> None:
        modules = library("bitsandbytes").nn
        for block in net.blocks:
            for name in ("up", "down"):
                old = getattr(block, name)
                new = make(modules, old)
                new.load_state_dict(old.state_dict())
                setattr(block, name, new.to("cpu").requires_grad_(False))
        net(torch.zeros(1, D))  # some states are made at first use

    return quantise


def bnb_4bit(kind: str) -> Callable[[Net], None]:
    return bnb(lambda m, old: m.Linear4bit(
        old.in_features, old.out_features, quant_type=kind, compute_dtype=torch.float32, compress_statistics=True,
    ))  # fmt: skip


def quanto(kind: str) -> Callable[[Net], None]:
    def quantise(net: Net) -> None:
        api = library("optimum.quanto")
        api.quantize(net, weights=getattr(api, kind))
        api.freeze(net)

    return quantise


class GgufParameter(nn.Parameter):
    """A file's bytes that know their kind, as diffusers and ComfyUI's GGUF nodes make them; results of operators know it too."""

    def __new__(
        cls, data: torch.Tensor, requires_grad: bool = False, quant_type: Any = None
    ) -> GgufParameter:
        self = torch.Tensor._make_subclass(cls, data, requires_grad)
        self.quant_type = quant_type
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        kinds = [arg.quant_type for arg in args if isinstance(arg, GgufParameter)]
        return cls(result, quant_type=kinds[0]) if type(result) is torch.Tensor and kinds else result


class GgufLinear(nn.Linear):
    def __init__(self, *sizes: int, compute_dtype: torch.dtype) -> None:
        super().__init__(*sizes)
        self.compute_dtype = compute_dtype

    def decoded(self) -> torch.Tensor:
        assert self.weight.quant_type.name == "Q8_0"
        rows = self.weight.detach().as_subclass(torch.Tensor).view(-1, 34)  # 32 codes behind their scale
        scales, codes = rows[:, :2].view(torch.float16), rows[:, 2:].view(torch.int8)
        return (scales.float() * codes.float()).view(self.out_features, self.in_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.decoded().to(self.compute_dtype), self.bias)


def gguf(net: Net, layer: type = GgufLinear, parameter: type = GgufParameter) -> None:
    kind, quants = library("gguf").GGMLQuantizationType.Q8_0, library("gguf").quants
    for block in net.blocks:
        for name in ("up", "down"):
            old = getattr(block, name)
            new = layer(old.in_features, old.out_features, compute_dtype=torch.float32)
            data = quants.quantize(old.weight.detach().numpy(), kind)
            new.weight = parameter(torch.from_numpy(data), quant_type=kind)
            if layer is GgufLinear:
                assert torch.equal(new.decoded(), torch.from_numpy(quants.dequantize(data, kind)))
            new.bias = old.bias
            setattr(block, name, new.requires_grad_(False))


def gguf_of_diffusers(net: Net) -> None:
    library("gguf")
    utils = library("diffusers.quantizers.gguf.utils")
    gguf(net, utils.GGUFLinear, utils.GGUFParameter)


KINDS: dict[str, Callable[[Net], None]] = {
    "dressed": dressed,
    "taken over": taken_over,
    "plain fp8": plain_fp8,
    "torchao int8": torchao("Int8WeightOnlyConfig"),
    "torchao float8": torchao("Float8WeightOnlyConfig"),
    "torchao int4": torchao("Int4WeightOnlyConfig"),
    "torchao int4, CPU": torchao(
        "PrototypeInt4WeightOnlyConfig", "torchao.prototype.quantization.int4", lambda api: {"group_size": 32}
    ),
    "torchao intx int4": torchao(
        "IntxWeightOnlyConfig",
        options=lambda api: {"weight_dtype": torch.int4, "granularity": api.granularity.PerGroup(32)},
    ),
    "bitsandbytes nf4": bnb_4bit("nf4"),
    "bitsandbytes fp4": bnb_4bit("fp4"),
    "bitsandbytes int8": bnb(lambda m, old: m.Linear8bitLt(old.in_features, old.out_features, has_fp16_weights=False)),
    "quanto qint8": quanto("qint8"),
    "quanto qint4": quanto("qint4"),
    "gguf q8_0": gguf,
    "gguf q8_0, diffusers": gguf_of_diffusers,
}  # fmt: skip
on_every_kind = pytest.mark.parametrize("kind", KINDS)
DISK_RAM = 8192  # bytes: the least that reading works with
STAY = ("dressed", "taken over", "bitsandbytes int8")  # .to leaves what hangs on their weights where it was

NO_GRADIENT = ("torchao int4, CPU",)  # _weight_int4pack_mm_for_cpu is for inference


def quantised(kind: str, checkpointing: str = "none", seed: int = 5) -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = Net(checkpointing).requires_grad_(False)
        if kind != "none":
            KINDS[kind](net)
    return net.requires_grad_(False)  # quanto's weights say that they take gradients


def reachable(kind: str, device: Any) -> torch.device:
    where = place(device)
    if where.type != "cpu" and kind in STAY:
        pytest.skip(
            f"{kind}: once used on the CPU it runs resident nowhere else, so there is nothing to compare with"
        )
    return where


def with_adapters(net: Net) -> Net:
    for index, block in enumerate(net.blocks):
        block.up = Lora(block.up, 2 * D, D, index)
        block.down = Lora(block.down, D, 2 * D, 50 + index)
    return net


def weight_of(module: Any) -> Any:
    return module.weight


def streams(session: Any) -> list[str]:
    return [name for unit in inside(session).streamed for name in unit.weights]


def infer(net: Net, where: torch.device) -> list[torch.Tensor]:
    with torch.no_grad():
        return [net(Case.inputs(index, where)) for index in range(3)]


def lora(net: Net, where: torch.device) -> list:
    """All that training shows; not the buffers, which inner tensors are meanwhile."""
    seen = train(net, Case, where, sample=True)
    return seen[: len(seen) - len(list(net.buffers()))]


@pairwise(kind=list(KINDS), device=SOME)
def test_inference_on_streamed_codes_is_the_resident_runs(kind, device):
    where = reachable(kind, device)
    expected = infer(quantised(kind).eval().to(where), where)
    net = quantised(kind).eval()
    with carom.stream(net, device=device, vram=least_vram(net, device) * 2) as session:
        assert_same(expected, infer(net, where))
        names = streams(session)
        assert any("up.weight" in name for name in names), "the quantised bytes are what streams"
        assert not any("weight" in place.name for place in session.report().resident_by_need)
    assert_same(expected, infer(net.to(where), where))


@pairwise(
    kind=[kind for kind in KINDS if kind not in NO_GRADIENT],
    checkpointing=["non-reentrant", "reentrant"],
    device=SOME,
)
def test_lora_on_streamed_codes_trains_as_on_resident_ones(kind, checkpointing, device):
    where = reachable(kind, device)
    expected = lora(with_adapters(quantised(kind, checkpointing)).to(where), where)
    net = with_adapters(quantised(kind, checkpointing))
    with carom.stream(net, device=device, vram=least_vram(net, device) * 3) as session:
        assert any("up.base.weight" in name for name in streams(session))
        assert_same(expected, lora(net, where))


@pairwise(kind=list(KINDS), device=SOME)
def test_codes_that_stream_from_disk_give_the_resident_runs_results(tmp_path, kind, device):
    where = reachable(kind, device)
    expected = infer(quantised(kind).eval().to(where), where)
    net = quantised(kind).eval()
    weights = [block.up.weight for block in net.blocks]
    budget = least_on_disk(net, device, tmp_path, DISK_RAM)
    with carom.stream(net, device=device, vram=budget, ram=DISK_RAM, disk=tmp_path) as session:
        assert inside(session).on_disk, "the weights are on disk"
        assert_same(expected, infer(net, where))
        assert session.report().ram_peak_bytes <= DISK_RAM
    assert all(block.up.weight is weight for block, weight in zip(net.blocks, weights, strict=True))
    assert_same(expected, infer(net.to(where), where))


@pairwise(kind=[kind for kind in KINDS if kind not in NO_GRADIENT], device=SOME)
def test_lora_on_codes_from_disk_trains_as_on_resident_ones(tmp_path, kind, device):
    where = reachable(kind, device)
    expected = lora(with_adapters(quantised(kind, "non-reentrant")).to(where), where)
    net = with_adapters(quantised(kind, "non-reentrant"))
    budget = least_on_disk(net, device, tmp_path, DISK_RAM)
    with carom.stream(net, device=device, vram=budget, ram=DISK_RAM, disk=tmp_path) as session:
        assert inside(session).on_disk, "the weights are on disk"
        assert_same(expected, lora(net, where))


@on_every_kind
def test_the_same_objects_are_back_afterwards(kind):
    net = quantised(kind).eval()
    before = infer(net, torch.device("cpu"))
    layers = [module for block in net.blocks for module in (block.up, block.down)]
    tables = [(set(m.__dict__), list(m._parameters), list(m._buffers)) for m in layers]
    weights = [m._parameters["weight"] for m in layers]
    keys = set(net.state_dict())
    inner = [
        tensor_flatten.flatten(w)[1][tensor_flatten.is_data_subclass(w) :]
        if type(w) is not nn.Parameter
        else []
        for w in weights
    ]
    session = carom.stream(net, device="cpu", vram=least_vram(net, "cpu") * 2)
    infer(net, torch.device("cpu"))
    state = net.state_dict()
    assert set(state) == keys
    assert all(type(v).__module__.split(".")[0] != "carom" for n, v in state.items() if "up" in n)
    for module, weight in zip(layers, weights, strict=True):
        assert type(weight_of(module)) in (type(weight), carom_parameter())
    session.close()
    for module, weight, parts, kept in zip(layers, weights, inner, tables, strict=True):
        assert (set(module.__dict__), list(module._parameters), list(module._buffers)) == kept
        assert module._parameters["weight"] is weight
        if parts:
            found = tensor_flatten.flatten(weight)[1][tensor_flatten.is_data_subclass(weight) :]
            assert all(a is b for a, b in zip(parts, found, strict=True))
    assert_same(before, infer(net, torch.device("cpu")))


# bitsandbytes' int8 layers load nothing before their first forward on a GPU.
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "bitsandbytes int8"])
def test_a_state_dict_is_saved_and_loaded_as_without_a_session(kind):
    """Also where a class saves its weights itself, or does not load what it saved (bitsandbytes)."""
    cpu, strict = torch.device("cpu"), kind not in LOAD_NOT_ALL
    new = {name: value.detach() for name, value in quantised(kind, seed=6).state_dict().items()}
    plain, net = quantised(kind).eval(), quantised(kind).eval()
    with carom.stream(net, device="cpu", vram=least_vram(net, "cpu") * 2):
        before = infer(net, cpu)
        assert_same_state(plain, net)
        for model in (plain, net):
            model.load_state_dict(new, strict=strict)
        assert_same_state(plain, net)
        after = infer(net, cpu)
        assert not torch.equal(before[0], after[0])
        assert_same(infer(plain, cpu), after)
        del new["blocks.0.up.weight"]
        if strict:
            with pytest.raises(RuntimeError, match='Missing key.*: "blocks.0.up.weight"'):
                net.load_state_dict(new)
    assert_same(infer(plain, cpu), infer(net, cpu))


LOAD_NOT_ALL = ("bitsandbytes nf4", "bitsandbytes fp4")  # these do not load the scales that they save


def test_a_module_that_is_itself_a_quantised_layer_saves_and_loads_its_weights():
    new = {
        name: value.detach() for name, value in quantised("dressed", seed=6).blocks[0].up.state_dict().items()
    }
    plain, layer = (quantised("dressed").blocks[0].up for _ in range(2))
    with carom.stream(layer, device="cpu", vram="1MiB"):
        assert_same_state(plain, layer)
        with pytest.raises(RuntimeError, match='Missing key.*: "weight"'):
            layer.load_state_dict({"bias": new["bias"]})
        for model in (plain, layer):
            model.load_state_dict(new)
        assert_same_state(plain, layer)
        assert_same([plain(torch.ones(1, D))], [layer(torch.ones(1, D))])
    assert_same_state(plain, layer)


@pytest.mark.parametrize("assign", [False, True])
def test_values_of_another_form_are_loaded_as_without_a_session(assign):
    """Here plain values for torchao's wrappers: copied, they are refused; assigned, they replace the weights."""
    cpu = torch.device("cpu")
    models = [quantised("torchao int8").eval() for _ in range(2)]
    with carom.stream(models[1], device="cpu", vram=least_vram(quantised("none"), "cpu") * 2):
        infer(models[1], cpu)
        new, errors = quantised("none", seed=6).state_dict(), []
        for model in models:
            try:
                model.load_state_dict(new, assign=assign)
                errors.append("")
            except RuntimeError as error:
                errors.append(str(error))
        assert errors[0] == errors[1] and bool(errors[0]) is not assign
        for _ in range(2):
            assert_same_state(*models)
            assert_same(infer(models[0], cpu), infer(models[1], cpu))
    assert_same_state(*models)


def test_a_state_dict_keeps_weights_that_were_put_in_the_place_of_others():
    net = quantised("dressed").eval()
    with carom.stream(net, device="cpu", vram=least_vram(net, "cpu") * 2):
        infer(net, torch.device("cpu"))
        layer = net.blocks[1].up
        layer.weight = Int8(torch.ones(2 * D, D, dtype=torch.int8), layer.weight.state, layer)
        for _ in range(2):
            assert (net.state_dict()["blocks.1.up.weight"] == 1).all()


def assert_same_state(plain: nn.Module, net: nn.Module) -> None:
    """Assert that two models have equal state dicts, with the names in the same order."""
    wanted, found = plain.state_dict(), net.state_dict()
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert_same(inner_bytes(value), inner_bytes(found[name]))


def inner_bytes(tensor: torch.Tensor) -> list[torch.Tensor]:
    parts = tensor_flatten.flatten(tensor)[1] if tensor_flatten.is_wrapper(tensor) else [tensor]
    plain = [part.detach().as_subclass(torch.Tensor) for part in parts]
    return [part.contiguous().flatten().view(torch.uint8) for part in plain]


def carom_parameter() -> type:
    from carom.core.model.managed_tensor import HostParameter

    return HostParameter


@on_simulated_devices
@pytest.mark.parametrize("kind", ["dressed", "taken over"])
def test_no_slot_is_read_early_or_kept(kind, device):
    where = place(device)
    expected = lora(with_adapters(quantised(kind, "non-reentrant")), where)
    net = with_adapters(quantised(kind, "non-reentrant"))
    with carom.stream(net, device=device, vram=least_vram(net, device) * 2):
        assert_same(expected, lora(net, where))


def test_values_are_read_by_name_and_weights_put_in_their_place_are_taken_up():
    net, other = quantised("dressed").eval(), quantised("dressed").eval()
    with carom.stream(net, device="cpu", vram=least_vram(net, "cpu") * 2) as session:
        value = session.read("blocks.1.up.weight")
        wanted = other.blocks[1].up.weight
        assert torch.equal(dequantised(value, value.state), dequantised(wanted, wanted.state))
        for model in (net, other):
            layer = model.blocks[1].up
            codes = torch.ones(2 * D, D, dtype=torch.int8)
            layer.weight = Int8(codes, Scales(torch.full((2 * D, 1), 0.1), Scales(torch.tensor(0.5))), layer)
        assert_same(infer(other, torch.device("cpu")), infer(net, torch.device("cpu")))
        assert "blocks.1.up.weight__inner_0" in {
            name for unit in inside(session).units for name in unit.weights
        }
    assert type(net.blocks[1].up._parameters["weight"]) is Int8
    assert_same(infer(other, torch.device("cpu")), infer(net, torch.device("cpu")))


class Stubborn(torch.Tensor):
    """A wrapper that insists on where its inner tensors lie: it cannot be put together in a slot."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        assert inner.storage_offset() == 0
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> Any:
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = torch.utils._pytree.tree_map(
            lambda leaf: leaf.inner if isinstance(leaf, Stubborn) else leaf, (args, kwargs or {})
        )
        out = func(*args, **kwargs)
        return cls(out) if func is torch.ops.aten.detach.default else out


def test_what_cannot_be_put_together_stays_resident_and_is_named():
    net = Net().requires_grad_(False).eval()
    weight = net.blocks[2].up.weight.detach().clone()
    expected = infer(net, torch.device("cpu"))
    net.blocks[2].up.weight = nn.Parameter(Stubborn(weight), requires_grad=False)
    with carom.stream(net, device="cpu", vram=300_000) as session:
        assert_same(expected, infer(net, torch.device("cpu")))
        need = {place.name: place.reason for place in session.report().resident_by_need}
        assert "Stubborn" in need["blocks.2.up.weight"]
    assert type(net.blocks[2].up.weight) is Stubborn


def test_a_failed_attach_leaves_quantised_weights_as_they_were():
    net = quantised("dressed").eval()
    before, weight = infer(net, torch.device("cpu")), net.blocks[0].up.weight
    with pytest.raises(carom.BudgetError):
        carom.stream(net, device="cpu", vram=100)
    assert net.blocks[0].up._parameters["weight"] is weight and weight.numel() == 2 * D * D
    assert_same(before, infer(net, torch.device("cpu")))
