"""A replacement for ai-toolkit with the same toolkit_patches and the same order of calls, and none of its code.

`installed()` puts its modules into `sys.modules`, as when an extension of the real ai-toolkit is imported: the
modules that use `MemoryManager` have bound its name already. A job is a `TrainProcess` with a model class that
attaches the memory manager itself (`Attaching`), or that does not know the memory manager (`Legacy`).
"""

from __future__ import annotations

import contextlib
import copy
import sys
import types
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

D = 64
STOCK: list[str] = []  # what the stock memory manager was asked to do
SAID: list[str] = []  # the job's log


# -- models


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.up = nn.Linear(D, 4 * D)
        self.down = nn.Linear(4 * D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Transformer(nn.Module):
    """A model with blocks, convolutions of every dimension, a parameter outside all layers, and a buffer."""

    def __init__(self, depth: int = 5) -> None:
        super().__init__()
        self.pad = nn.Parameter(torch.randn(1, D))
        self.register_buffer("scale", torch.rand(D) + 0.5)
        self.conv1 = nn.Conv1d(D, D, 3, padding=1)
        self.conv2 = nn.Conv2d(D, D, 1)
        self.conv3 = nn.Conv3d(D, D, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.out = nn.Linear(D, D)
        self.gradient_checkpointing = False

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def forward(self, x: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        x = x * self.scale + self.pad + text
        x = x + self.conv1(x.transpose(1, 2)).transpose(1, 2)
        cube = x.transpose(1, 2)[..., None]
        x = x + (self.conv2(cube)[..., 0] + self.conv3(cube[..., None])[..., 0, 0]).transpose(1, 2)
        for block in self.blocks:
            if self.gradient_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return self.out(x)


class TextEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, D)
        self.layers = nn.ModuleList(Block() for _ in range(3))

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return x


class Quantised(nn.Linear):
    """A custom quantised linear: the weight is a property that dequantises, the bytes are buffers, and its autograd
    saves them.
    """

    is_ostris_quantized = True

    @classmethod
    def convert(cls, linear: nn.Linear) -> None:
        weight = linear.weight.detach()
        scale = weight.abs().amax(1, keepdim=True) / 127
        linear.register_buffer("codes", (weight / scale).round().to(torch.int8), persistent=False)
        linear.register_buffer("step", scale, persistent=False)
        del linear._parameters["weight"]
        linear.__class__ = cls

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        return self.codes.to(self.step.dtype) * self.step

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _QuantisedLinear.apply(x, self.codes, self.step, self.bias)


class _QuantisedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, codes: torch.Tensor, step: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(codes, step)
        return x @ (codes.to(x.dtype) * step).T + bias

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        codes, step = ctx.saved_tensors
        return grad @ (codes.to(grad.dtype) * step), None, None, None


class Wrapped(torch.Tensor):
    """A wrapped quantised weight as in torchao: it has the model's dtype outside, and float8 inside."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, dtype: torch.dtype) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)  # type: ignore[attr-defined]

    def __init__(self, codes: torch.Tensor, dtype: torch.dtype) -> None:
        self.codes, self.outside = codes, dtype

    def __tensor_flatten__(self) -> Any:
        return ["codes"], self.outside

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["codes"], context)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear:
            x, weight, bias = args
            return torch.nn.functional.linear(x, weight.codes.to(x.dtype), bias)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].codes, args[0].outside)
        raise NotImplementedError(func)


def quantise(module: nn.Module) -> None:
    """Quantise the linears of ``module`` in place, as text encoders are quantised after they were attached."""
    for part in list(module.modules()):
        if type(part) is nn.Linear:
            Quantised.convert(part)


class Lora(nn.Module):
    """An adapter that replaces the forward of a layer, as ai-toolkit's networks do."""

    def __init__(self, layer: nn.Linear, index: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(index)
        self.down = nn.Parameter(torch.randn(4, layer.in_features, generator=draw) * 0.1)
        self.up = nn.Parameter(torch.zeros(layer.out_features, 4))
        self.org_module = [layer]
        self.org_forward = layer.forward

    def apply_to(self) -> None:
        self.org_module[0].forward = self.forward  # type: ignore[method-assign]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.org_forward(x) + x @ self.down.T @ self.up.T

    def merge_in(self, merge_weight: float = 1.0) -> None:
        (layer,) = self.org_module
        values = layer.state_dict()
        weight = layer.weight.float()
        weight = weight.to(self.up.device) + merge_weight * (
            self.up.detach().float() @ self.down.detach().float()
        )
        values["weight"] = weight.to(layer.weight.device, layer.weight.dtype)
        layer.load_state_dict(values)


class ToolkitNetworkMixin:
    def merge_in(self, merge_weight: float = 1.0) -> None:
        for lora in self.get_all_modules():  # type: ignore[attr-defined]
            lora.merge_in(merge_weight)

    def merge_out(self, merge_weight: float = 1.0) -> None:
        self.merge_in(-merge_weight)


class Network(ToolkitNetworkMixin, nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
        self.loras = nn.ModuleList(Lora(linear, i) for i, linear in enumerate(linears))

    def get_all_modules(self) -> list[nn.Module]:
        return list(self.loras)

    def apply_to(self) -> None:
        for lora in self.loras:
            lora.apply_to()


# -- the toolkit


class MemoryManager:
    @classmethod
    def attach(cls, module: Any, device: Any, offload_percent: float = 1.0, ignore_modules: Any = ()) -> None:
        STOCK.append(f"attach {type(module).__name__} {offload_percent}")

    @classmethod
    def detach(cls, module: Any) -> None:
        STOCK.append(f"detach {type(module).__name__}")

    @classmethod
    def free(cls, module: Any) -> None:
        STOCK.append(f"free {type(module).__name__}")
        nn.Module.to(module, "meta")

    @classmethod
    def release_cached_memory(cls) -> None:
        STOCK.append("release_cached_memory")


class ModelConfig:
    def __init__(self, **kwargs: Any) -> None:
        self.name_or_path = kwargs.get("name_or_path")
        self.low_vram = kwargs.get("low_vram", False)
        self.quantize_te = kwargs.get("quantize_te", False)
        self.qtype = kwargs.get("qtype", "qfloat8")
        self.qtype_te = kwargs.get("qtype_te", "qfloat8")
        self.layer_offloading = kwargs.get("layer_offloading", False)
        if self.layer_offloading and self.qtype == "qfloat8":
            self.qtype = "float8"
        self.layer_offloading_transformer_percent = kwargs.get("layer_offloading_transformer_percent", 1.0)
        self.layer_offloading_text_encoder_percent = kwargs.get("layer_offloading_text_encoder_percent", 1.0)
        self.compile = kwargs.get("compile", False)


class Legacy:
    """A model class that never attaches, and moves everything to its device while it loads."""

    def __init__(self, device: torch.device, model_config: ModelConfig, seed: int = 3) -> None:
        self.device_torch = self.te_device_torch = self.quantize_device = torch.device(device)
        self.model_config, self.seed = model_config, seed
        self.loaded_on: list[torch.device] = []
        self.refiner_unet = None

    def make(self) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            self.unet, self.text_encoder = Transformer(), TextEncoder()

    def load_model(self) -> None:
        self.make()
        for module in (self.unet, self.text_encoder):
            self.loaded_on.append(self.device_torch)
            module.to(self.device_torch)

    def predict(self, x: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        if self.unet.device == torch.device("cpu"):
            self.unet.to(self.device_torch)
        return self.unet(x, text)

    def encode(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self.text_encoder(tokens)


Legacy.__module__ = "standin_legacy"  # where no MemoryManager is bound


class Attaching(Legacy):
    """A model class that uses the memory manager; `attaching` is its module, in which that name is bound."""

    def load_model(self) -> None:
        config, manager = self.model_config, attaching.MemoryManager  # type: ignore[attr-defined]
        self.make()
        self.text_encoder = [self.text_encoder]  # type: ignore[assignment]
        (encoder,) = self.text_encoder  # type: ignore[misc]
        if config.layer_offloading and config.layer_offloading_transformer_percent > 0:
            percent = config.layer_offloading_transformer_percent
            manager.attach(
                self.unet, self.device_torch, offload_percent=percent, ignore_modules=[self.unet.pad]
            )
        if config.layer_offloading and config.layer_offloading_text_encoder_percent > 0:
            percent = config.layer_offloading_text_encoder_percent
            manager.attach(encoder, self.device_torch, offload_percent=percent)
        encoder.to(self.device_torch, dtype=torch.float32)
        if config.quantize_te:
            quantise(encoder)
        self.unet.to(self.device_torch)

    def encode(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self.text_encoder[0](tokens)  # type: ignore[index]


Attaching.__module__ = "standin_attaching"
attaching = types.ModuleType("standin_attaching")
attaching.MemoryManager = MemoryManager  # type: ignore[attr-defined]


class BaseSDTrainProcess:
    """A process of a job, with the order of calls before and in a training step."""

    model_class: type = Attaching

    def __init__(self, config: dict[str, Any], folder: Path, name: str = "job", **train: Any) -> None:
        self.job = types.SimpleNamespace(name=name)
        self.save_root = str(folder / name)
        self.model_config = ModelConfig(**config)
        self.device_torch = torch.device("cpu")
        self.train = {
            "steps": 3,
            "checkpointing": True,
            "accumulate": 1,
            "cache_text": False,
            "sample_every": 0,
            **train,
        }
        self.result: list[torch.Tensor] = []
        self.skipped = 0

    def hook_after_sd_init_before_load(self) -> None:
        pass

    def hook_before_train_loop(self) -> None:
        pass

    def ensure_params_requires_grad(self, force: bool = False) -> None:
        for parameter in self.params:
            parameter.requires_grad_(True)

    def sample(self, step: int | None = None, is_first: bool = False) -> None:
        with torch.no_grad():
            self.sd.unet.to(self.device_torch)
            self.result.append(self.sd.predict(_noise(99), self.text(99)).clone())
            self.sd.unet.to(self.device_torch, None)

    def text(self, index: int) -> torch.Tensor:
        if self.train["cache_text"]:
            return self.cached[index % 2]
        return self.sd.encode(_tokens(index))

    def run(self) -> None:
        self.sd = self.model_class(self.device_torch, copy.deepcopy(self.model_config))
        self.hook_after_sd_init_before_load()
        self.sd.load_model()
        unet, train = self.sd.unet, self.train
        unet.gradient_checkpointing = train["checkpointing"]
        unet.to(self.device_torch, dtype=torch.float32)
        unet.requires_grad_(train.get("full", False))
        for encoder in _listed(self.sd.text_encoder):
            encoder.requires_grad_(False)
        if train.get("full"):
            self.network, self.params = None, list(unet.parameters())
        else:
            self.network = Network(unet)
            self.network.apply_to()
            self.params = list(self.network.parameters())
        self.ensure_params_requires_grad(force=True)
        optimizer = torch.optim.AdamW(self.params, lr=1e-2)
        shadow = [(weakref.ref(p), p.detach().clone()) for p in self.params]
        self.hook_before_train_loop()
        if train["cache_text"]:
            unet.to("cpu")
            for encoder in _listed(self.sd.text_encoder):
                encoder.to(self.device_torch)
            self.cached = [self.sd.encode(_tokens(i)).clone() for i in range(2)]
            for encoder in _listed(self.sd.text_encoder):
                attaching.MemoryManager.free(encoder)  # type: ignore[attr-defined]
            self.sd.text_encoder = None
        if train["sample_every"]:
            self.sample(0)
        for step in range(train["steps"]):
            try:
                for part in range(train["accumulate"]):
                    self.one(step * 10 + part)
                    if train.get("oom") == step:
                        raise RuntimeError("CUDA out of memory. Tried to allocate 1.00 GiB")
            except RuntimeError as error:
                if "CUDA out of memory" not in str(error):
                    raise
                optimizer.zero_grad(set_to_none=True)
                self.skipped += 1
                continue
            torch.nn.utils.clip_grad_norm_(self.params, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            for reference, average in shadow:
                average.lerp_(reference().detach(), 0.1)  # type: ignore[union-attr]
            if train["sample_every"] and step % train["sample_every"] == 0:
                self.sample(step)
        if train.get("merge"):
            self.network.merge_in()  # type: ignore[union-attr]
            self.result += [value.clone() for value in unet.state_dict().values()]
            self.result.append(self.sd.predict(_noise(7), self.text(7)).detach().clone())
        self.result += [p.detach().clone() for p in self.params] + [average for _, average in shadow]

    def one(self, index: int) -> None:
        """Run forward (twice with a preservation loss), then backward."""
        x, text = _noise(index), self.text(index)
        loss = self.sd.predict(x, text).pow(2).mean()
        if self.train.get("preserve"):
            with torch.no_grad():
                prior = self.sd.predict(x, text * 0)
            loss = loss + (self.sd.predict(x, text * 0) - prior - 1).pow(2).mean()
        if self.train.get("oom_inside") == index // 10:
            hook = self.sd.unet.blocks[1].register_forward_hook(_fail)
            try:
                self.sd.predict(x, text)
            finally:
                hook.remove()
        loss.backward()


def _fail(*_: Any) -> None:
    raise RuntimeError("CUDA out of memory. Tried to allocate 1.00 GiB")


def _listed(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]


def _noise(index: int) -> torch.Tensor:
    return torch.randn(2, 6, D, generator=torch.Generator().manual_seed(index))


def _tokens(index: int) -> torch.Tensor:
    return torch.randint(0, 32, (2, 6), generator=torch.Generator().manual_seed(index))


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Provide the replacement as the `toolkit` and `jobs` packages, with Carom's extension installed."""
    from carom.toolkit_ext import install, toolkit_patches

    tree: dict[str, dict[str, Any]] = {
        "toolkit": {}, "toolkit.config_modules": {"ModelConfig": ModelConfig}, "toolkit.print": {"print_acc": SAID.append},
        "toolkit.memory_management": {"MemoryManager": MemoryManager},
        "toolkit.memory_management.manager": {"MemoryManager": MemoryManager},
        "toolkit.network_mixins": {"ToolkitNetworkMixin": ToolkitNetworkMixin},
        "jobs": {}, "jobs.process": {"BaseSDTrainProcess": BaseSDTrainProcess},
        "jobs.process.BaseSDTrainProcess": {"BaseSDTrainProcess": BaseSDTrainProcess}, "standin_attaching": {},
    }  # fmt: skip
    before = {name: sys.modules.get(name) for name in tree}
    STOCK.clear()
    SAID.clear()
    try:
        for name, members in tree.items():
            module = attaching if name == "standin_attaching" else types.ModuleType(name)
            vars(module).update(members)
            sys.modules[name] = module
        install()
        yield
    finally:
        toolkit_patches.uninstall()
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module
