"""A small replacement for the parts of ComfyUI that Carom's nodes use: the patcher interface, ops, loaders and the
node API.

It is written from the behaviour of ComfyUI 0.16 to 0.33, so that the adapter can be tested without ComfyUI. The tests
of test_comfy_patcher.py also run against the real patcher if COMFYUI_PATH is set, which shows whether this one is
right.
"""

from __future__ import annotations

import contextlib
import enum
import sys
import types
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.nn import functional

CPU = torch.device("cpu")


# -- ops


class CastOp:
    comfy_cast_weights = False
    weight_function: list[Callable] = []
    bias_function: list[Callable] = []


class Linear(nn.Linear, CastOp):
    """A linear layer that casts its weight and applies functions to it if so configured."""

    def reset_parameters(self) -> None:
        return None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not (self.comfy_cast_weights or self.weight_function or self.bias_function):
            return super().forward(input)
        return self.forward_comfy_cast_weights(input)

    def forward_comfy_cast_weights(self, input: torch.Tensor) -> torch.Tensor:
        weight = _cast(self.weight, input, self.weight_function)
        bias = None if self.bias is None else _cast(self.bias, input, self.bias_function)
        return functional.linear(input, weight, bias)


def _cast(tensor: torch.Tensor, like: torch.Tensor, functions: list[Callable]) -> torch.Tensor:
    if tensor.device != like.device:
        tensor = torch.empty_like(tensor, device=like.device).copy_(tensor)
    elif functions:
        tensor = tensor.to(dtype=tensor.dtype, copy=True)
    tensor = tensor.to(like.dtype)
    for function in functions:
        tensor = function(tensor)
    return tensor


# -- the patcher


class LowVramPatch:
    def __init__(self, key: str, patches: dict) -> None:
        self.key, self.patches = key, patches

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        return _patched(self.patches[self.key], weight)


def _patched(patches: list, weight: torch.Tensor) -> torch.Tensor:
    for strength, (kind, (difference,)), *_ in patches:
        assert kind == "diff"
        weight = weight + strength * difference.to(weight.device, weight.dtype)
    return weight


class Ejector:
    def __init__(self, patcher: Any, only_on_exit: bool) -> None:
        self.patcher, self.only_on_exit = patcher, only_on_exit

    def __enter__(self) -> None:
        self.before, self.was = self.patcher.skip_injection, self.patcher.is_injected
        if self.only_on_exit:
            self.patcher.skip_injection = True
        if self.was:
            self.patcher.eject_model()

    def __exit__(self, *_: Any) -> None:
        if self.only_on_exit:
            self.patcher.skip_injection = self.before
            self.patcher.inject_model()
        if self.was and not self.patcher.skip_injection:
            self.patcher.inject_model()
        self.patcher.skip_injection = self.before


class LazyCastingParam(nn.Parameter):
    """A weight that is cast and patched when safetensors moves it to the CPU."""

    def __new__(cls, patcher: Any, key: str, tensor: torch.Tensor) -> Any:
        return super().__new__(cls, tensor)

    def __init__(self, patcher: Any, key: str, tensor: torch.Tensor) -> None:
        self.patcher, self.key = patcher, key

    @property
    def device(self) -> Any:
        return torch.device("meta", 1)  # any but the CPU

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.patcher.patch_weight_to_device(self.key, CPU, return_weight=True).to("cpu")


class ModelPatcher:
    """The static patcher: weights are moved at loading, or cast by their modules if memory is short."""

    def __init__(
        self,
        model: Any,
        load_device: Any,
        offload_device: Any,
        size: int = 0,
        weight_inplace_update: bool = False,
    ) -> None:
        self.model, self.load_device, self.offload_device, self.size = (
            model,
            load_device,
            offload_device,
            size,
        )
        self.weight_inplace_update = weight_inplace_update
        self.patches: dict = {}
        self.backup: dict = {}
        self.object_patches: dict = {}
        self.object_patches_backup: dict = {}
        self.injections: dict = {}
        self.attachments: dict = {}
        self.is_injected = self.skip_injection = False
        self.force_cast_weights = False
        self.patches_uuid = uuid.uuid4()
        self.cached_patcher_init: Any = None
        self.pinned: set = set()
        self.parent = None
        for name, value in (
            ("device", offload_device), ("model_loaded_weight_memory", 0), ("lowvram_patch_counter", 0),
            ("model_lowvram", False), ("current_weight_patches_uuid", None),
        ):  # fmt: skip
            if not hasattr(model, name):
                setattr(model, name, value)

    def is_dynamic(self) -> bool:
        return False

    def model_size(self) -> int:
        self.size = self.size or module_size(self.model)
        return self.size

    def loaded_size(self) -> int:
        return self.model.model_loaded_weight_memory

    def get_free_memory(self, device: Any) -> int:
        return sys.modules["comfy.model_management"].get_free_memory(device)

    def current_loaded_device(self) -> Any:
        return self.model.device

    def get_clone_model_override(self) -> Any:
        return self.model, (self.backup, self.object_patches_backup, self.pinned)

    def clone(self, disable_dynamic: bool = False, model_override: Any = None) -> Any:
        kind: type = type(self)
        if self.is_dynamic() and disable_dynamic:
            kind = ModelPatcher
            if model_override is None:
                if self.cached_patcher_init is None:
                    raise RuntimeError("no loader to run again")
                load, args = self.cached_patcher_init
                model_override = load(*args, disable_dynamic=True).get_clone_model_override()
        model, shared = model_override or self.get_clone_model_override()
        copy = kind(
            model, self.load_device, self.offload_device, self.model_size(), weight_inplace_update=False
        )
        copy.patches = {key: list(found) for key, found in self.patches.items()}
        copy.patches_uuid, copy.parent = self.patches_uuid, self
        copy.force_cast_weights = self.force_cast_weights
        copy.object_patches, copy.attachments = dict(self.object_patches), dict(self.attachments)
        copy.injections = {key: list(found) for key, found in self.injections.items()}
        copy.is_injected, copy.skip_injection = self.is_injected, self.skip_injection
        copy.backup, copy.object_patches_backup, copy.pinned = shared
        copy.cached_patcher_init = self.cached_patcher_init
        return copy

    def is_clone(self, other: Any) -> bool:
        return self.model is other.model

    def add_patches(self, patches: dict, strength_patch: float = 1.0, strength_model: float = 1.0) -> list:
        known = set(self.model.state_dict())
        for key, patch in patches.items():
            if key in known:
                self.patches.setdefault(key, []).append((strength_patch, patch, strength_model))
        self.patches_uuid = uuid.uuid4()
        return [key for key in patches if key in known]

    def add_object_patch(self, name: str, value: Any) -> None:
        self.object_patches[name] = value

    def use_ejected(self, skip_and_inject_on_exit_only: bool = False) -> Ejector:
        return Ejector(self, skip_and_inject_on_exit_only)

    def inject_model(self) -> None:
        if self.is_injected or self.skip_injection:
            return
        for found in self.injections.values():
            for injection in found:
                injection.inject(self)
                self.is_injected = True

    def eject_model(self) -> None:
        if self.is_injected:
            for found in self.injections.values():
                for injection in found:
                    injection.eject(self)
            self.is_injected = False

    def pin_weight_to_device(self, key: str) -> None:
        self.pinned.add(key)

    def unpin_all_weights(self) -> None:
        self.pinned.clear()

    def patch_weight_to_device(self, key: str, device_to: Any = None, return_weight: bool = False) -> Any:
        owner, leaf = _owner(self.model, key)
        weight = getattr(owner, leaf)
        if key not in self.patches:
            return weight
        merged = _patched(self.patches[key], weight.to(device_to or weight.device, copy=True))
        if return_weight:
            return merged
        self.backup.setdefault(key, weight.to(self.offload_device))
        setattr(owner, leaf, nn.Parameter(merged, requires_grad=False))
        return None

    def model_state_dict_for_saving(self, model: Any = None, prefix: str = "") -> dict:
        found = (model or self.model).state_dict()
        for key in found:
            owner, leaf = _owner(self.model, prefix + key)
            if hasattr(owner, "comfy_cast_weights") and not getattr(owner, "comfy_patched_weights", False):
                found[key] = LazyCastingParam(self, prefix + key, getattr(owner, leaf))
        return found

    def load(
        self, device_to: Any = None, lowvram_model_memory: float = 0, force_patch_weights: bool = False,
        full_load: bool = False,
    ) -> None:  # fmt: skip
        with self.use_ejected():
            held, low = 0, False
            whole = []
            for path, module in self.model.named_modules():
                names = [name for name, _ in module.named_parameters(recurse=False)]
                if not names or len(names) != len(list(module.parameters())):
                    continue
                size = module_size(module)
                fits = full_load or held + 2 * size < lowvram_model_memory
                if not fits and hasattr(module, "comfy_cast_weights"):
                    low = True
                    if hasattr(module, "prev_comfy_cast_weights"):
                        continue
                    for leaf, functions in (("weight", "weight_function"), ("bias", "bias_function")):
                        key = f"{path}.{leaf}"
                        setattr(
                            module,
                            functions,
                            [LowVramPatch(key, self.patches)] if key in self.patches else [],
                        )
                    module.prev_comfy_cast_weights = module.comfy_cast_weights
                    module.comfy_cast_weights = True
                    for leaf in names:
                        self.pin_weight_to_device(f"{path}.{leaf}")
                elif fits:
                    _wipe(module)
                    held += size
                    whole.append((path, module, names))
                    if self.force_cast_weights and hasattr(module, "comfy_cast_weights"):
                        module.prev_comfy_cast_weights = module.comfy_cast_weights
                        module.comfy_cast_weights = True
            for path, module, names in whole:
                if not getattr(module, "comfy_patched_weights", False):
                    for name in names:
                        self.patch_weight_to_device(f"{path}.{name}", device_to)
                    module.comfy_patched_weights = True
                module.to(device_to)
            self.model.model_lowvram = low
            if not low and full_load:
                self.model.to(device_to)
                held = self.model_size()
            self.model.device = device_to
            self.model.model_loaded_weight_memory = held
            self.model.current_weight_patches_uuid = self.patches_uuid

    def patch_model(
        self, device_to: Any = None, lowvram_model_memory: float = 0, load_weights: bool = True,
        force_patch_weights: bool = False,
    ) -> Any:  # fmt: skip
        with self.use_ejected():
            for name, value in self.object_patches.items():
                owner, leaf = _owner(self.model, name)
                self.object_patches_backup.setdefault(name, getattr(owner, leaf, None))
                setattr(owner, leaf, value)
            if load_weights:
                self.load(
                    device_to, lowvram_model_memory, force_patch_weights, full_load=lowvram_model_memory == 0
                )
        self.inject_model()
        return self.model

    def unpatch_model(self, device_to: Any = None, unpatch_weights: bool = True) -> None:
        self.eject_model()
        if unpatch_weights:
            self.unpin_all_weights()
            if self.model.model_lowvram:
                for module in self.model.modules():
                    _wipe(module)
                self.model.model_lowvram = False
            for key, weight in self.backup.items():
                owner, leaf = _owner(self.model, key)
                setattr(owner, leaf, nn.Parameter(weight, requires_grad=False))
            self.backup.clear()
            self.model.current_weight_patches_uuid = None
            if device_to is not None:
                self.model.to(device_to)
                self.model.device = device_to
            self.model.model_loaded_weight_memory = 0
            for module in self.model.modules():
                module.__dict__.pop("comfy_patched_weights", None)
        for name, value in self.object_patches_backup.items():
            owner, leaf = _owner(self.model, name)
            setattr(owner, leaf, value)
        self.object_patches_backup.clear()

    def partially_load(
        self, device_to: Any, extra_memory: float = 0, force_patch_weights: bool = False
    ) -> float:
        with self.use_ejected(skip_and_inject_on_exit_only=True):
            model = self.model
            known = model.current_weight_patches_uuid
            other = known is not None and (known != self.patches_uuid or force_patch_weights)
            used = model.model_loaded_weight_memory
            self.unpatch_model(self.offload_device, unpatch_weights=other)
            if other:
                extra_memory += used - model.model_loaded_weight_memory
            self.patch_model(load_weights=False)
            if extra_memory < 0 and not other:
                self.partially_unload(self.offload_device, -extra_memory)
                return 0
            if not model.model_lowvram and model.model_loaded_weight_memory > 0:
                return 0
            now = model.model_loaded_weight_memory
            full = now + extra_memory > self.model_size()
            try:
                self.load(device_to, now + extra_memory, force_patch_weights, full_load=full)
            except Exception:
                self.detach()
                raise
            return model.model_loaded_weight_memory - now

    def partially_unload(
        self, device_to: Any, memory_to_free: float = 0, force_patch_weights: bool = False
    ) -> float:
        freed = 0
        for path, module in self.model.named_modules():
            if freed >= memory_to_free:
                break
            if getattr(module, "comfy_patched_weights", False) and hasattr(module, "comfy_cast_weights"):
                for leaf, functions in (("weight", "weight_function"), ("bias", "bias_function")):
                    key = f"{path}.{leaf}"
                    if key in self.backup:
                        setattr(module, leaf, nn.Parameter(self.backup.pop(key), requires_grad=False))
                    setattr(
                        module, functions, [LowVramPatch(key, self.patches)] if key in self.patches else []
                    )
                module.to(device_to)
                module.prev_comfy_cast_weights, module.comfy_cast_weights = module.comfy_cast_weights, True
                module.comfy_patched_weights = False
                freed += module_size(module)
        self.model.model_lowvram = True
        self.model.model_loaded_weight_memory -= freed
        return freed

    def detach(self, unpatch_all: bool = True) -> Any:
        self.eject_model()
        if unpatch_all:
            self.unpatch_model(self.offload_device, unpatch_weights=unpatch_all)
        return self.model

    def __del__(self) -> None:
        if hasattr(self, "pinned"):  # the constructor ended
            self.detach(unpatch_all=False)

    def pre_run(self) -> None:
        return None

    def cleanup(self) -> None:
        return None


class ModelPatcherDynamic(ModelPatcher):
    """The patcher of dynamic VRAM, with only the functions that are needed to replace it."""

    def is_dynamic(self) -> bool:
        return True


def _wipe(module: Any) -> None:
    if hasattr(module, "prev_comfy_cast_weights"):
        module.comfy_cast_weights = module.prev_comfy_cast_weights
        del module.prev_comfy_cast_weights
    if hasattr(module, "weight_function"):
        module.weight_function, module.bias_function = [], []


def _owner(root: Any, key: str) -> tuple[Any, str]:
    path, _, leaf = key.rpartition(".")
    for step in path.split(".") if path else ():
        root = getattr(root, step)
    return root, leaf


def module_size(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in module.state_dict().values())


# -- the node API


class _Input:
    def __init__(
        self, id: str, *, optional: bool = False, tooltip: str | None = None, default: Any = None, **more: Any
    ):
        self.id, self.optional, self.tooltip, self.default, self.more = id, optional, tooltip, default, more

    @property
    def options(self) -> list:
        return self.more.get("options", [])


class _Output:
    def __init__(
        self, id: str | None = None, display_name: str | None = None, tooltip: str | None = None
    ) -> None:
        self.id, self.display_name, self.tooltip = id, display_name, tooltip


class _Schema:
    def __init__(self, node_id: str, inputs: list, outputs: list, **more: Any) -> None:
        self.node_id, self.inputs, self.outputs = node_id, inputs, outputs
        self.display_name, self.description = more.get("display_name"), more.get("description", "")
        self.category, self.is_output_node = more.get("category"), more.get("is_output_node", False)


class ComfyNode:
    hidden: Any = None


class NodeOutput:
    def __init__(self, *args: Any, ui: Any = None) -> None:
        self.args, self.ui = args, ui


class ComfyExtension:
    async def on_load(self) -> None:
        return None


class PreviewText:
    def __init__(self, value: str) -> None:
        self.value = value

    def as_dict(self) -> dict:
        return {"text": (self.value,)}


class PreviewImage:
    def __init__(self, image: torch.Tensor) -> None:
        self.image = image

    def as_dict(self) -> dict:
        return {"images": [tuple(self.image.shape)], "animated": (False,)}


class PromptServer:
    """A server that records the messages sent to the page."""

    instance: Any = None

    def __init__(self) -> None:
        self.texts: list[tuple[str, str]] = []

    def send_progress_text(self, text: str, node_id: str, sid: Any = None) -> None:
        self.texts.append((node_id, text))


CLIPType = enum.Enum("CLIPType", "STABLE_DIFFUSION FLUX WAN")


class Clip:
    """A text encoder with the interface that nodes use."""

    def __init__(self, patcher: Any) -> None:
        self.patcher, self.cond_stage_model = patcher, patcher.model

    def clone(self) -> Clip:
        return Clip(self.patcher.clone())


class Control:
    """A ControlNet with the interface that nodes use."""

    def __init__(self, patcher: Any) -> None:
        self.control_model_wrapped, self.control_model = patcher, patcher.model

    def copy(self) -> Control:
        return Control(self.control_model_wrapped)


@contextlib.contextmanager
def installed(models: Path) -> Iterator[types.SimpleNamespace]:
    """Make the replacement's modules importable, with the model files in folder ``models``; restore the previous
    modules afterwards.

    Yields an object with ``loads`` (paths that a loader read), ``make`` (path -> module, set by the test),
    ``dynamic`` (whether loaders return dynamic patchers), ``device`` (the device that ComfyUI reports), ``server``
    and ``management``.
    """
    state = types.SimpleNamespace(loads=[], make=None, dynamic=False, device=CPU)

    def load_diffusion_model(
        path: str, model_options: dict | None = None, disable_dynamic: bool = False
    ) -> Any:
        state.loads.append((path, dict(model_options or {})))
        kind = ModelPatcherDynamic if state.dynamic and not disable_dynamic else ModelPatcher
        patcher = kind(state.make(path), state.device, CPU)
        patcher.cached_patcher_init = (load_diffusion_model, (path, model_options))
        return patcher

    def load_clip(
        ckpt_paths: list, embedding_directory: Any = None, clip_type: Any = None, model_options: Any = None,
        disable_dynamic: bool = False,
    ) -> Any:  # fmt: skip
        state.loads.append((tuple(ckpt_paths), clip_type))
        return Clip(ModelPatcher(state.make(ckpt_paths[0]), state.device, CPU))

    def load_checkpoint_guess_config(path: str, **options: Any) -> Any:
        disable = options.get("disable_dynamic", False)
        return load_diffusion_model(path, None, disable), load_clip([path]), "vae", None

    def module(name: str, **members: Any) -> types.ModuleType:
        made = types.ModuleType(name)
        made.__dict__.update(members)
        return made

    management = module(
        "comfy.model_management", get_torch_device=lambda: state.device, module_size=module_size,
        get_total_memory=lambda device: 1 << 30, TOTAL_PINNED_MEMORY=0, MAX_PINNED_MEMORY=1 << 30,
        get_free_memory=lambda device: 1 << 29, extra_reserved_memory=lambda: 400 << 20,
        minimum_inference_memory=lambda: 1.2 * (1 << 30), current_loaded_models=[],
        args=types.SimpleNamespace(reserve_vram=None),
    )  # fmt: skip
    sd = module(
        "comfy.sd", load_diffusion_model=load_diffusion_model, load_clip=load_clip, CLIPType=CLIPType,
        load_checkpoint_guess_config=load_checkpoint_guess_config,
    )  # fmt: skip
    patcher = module(
        "comfy.model_patcher", ModelPatcher=ModelPatcher, ModelPatcherDynamic=ModelPatcherDynamic, wipe_lowvram_weight=_wipe,
        CoreModelPatcher=lambda *args, **options: (ModelPatcherDynamic if state.dynamic else ModelPatcher)(*args, **options),
    )  # fmt: skip
    ops = module("comfy.ops", disable_weight_init=types.SimpleNamespace(Linear=Linear))

    def load_torch_file(path: str, safe_load: bool = False, return_metadata: bool = False) -> Any:
        with safe_open(path, framework="pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
            return (weights, file.metadata()) if return_metadata else weights

    utils = module("comfy.utils", load_torch_file=load_torch_file)
    comfy = module(
        "comfy", model_management=management, sd=sd, model_patcher=patcher, ops=ops, utils=utils, __path__=[]
    )

    def kind(name: str) -> Any:
        return types.SimpleNamespace(
            Input=type(f"{name}Input", (_Input,), {"kind": name}),
            Output=type(f"{name}Output", (_Output,), {"kind": name}),
        )

    names = ("Model", "Clip", "Vae", "ControlNet", "Image", "String", "Combo", "Int", "AnyType")
    io = types.SimpleNamespace(
        **{name: kind(name) for name in names}, Schema=_Schema, ComfyNode=ComfyNode, NodeOutput=NodeOutput,
        Hidden=types.SimpleNamespace(unique_id="UNIQUE_ID"),
    )  # fmt: skip
    latest = module(
        "comfy_api.latest",
        io=io,
        ui=types.SimpleNamespace(PreviewText=PreviewText, PreviewImage=PreviewImage),
        ComfyExtension=ComfyExtension,
    )

    def full_path(folder: str, name: str) -> str | None:
        path = models / folder / name
        return str(path) if path.is_file() else None

    paths = module(
        "folder_paths", get_temp_directory=lambda: str(models / "temp"), get_full_path=full_path, get_folder_paths=lambda folder: [str(models / folder)],
        get_filename_list=lambda folder: sorted(path.name for path in (models / folder).glob("*")),
    )  # fmt: skip

    class UNETLoader:
        @classmethod
        def INPUT_TYPES(cls) -> dict:
            return {
                "required": {
                    "unet_name": ([],),
                    "weight_dtype": (["default", "fp8_e4m3fn", "fp8_e4m3fn_fast"], {}),
                }
            }

    class CLIPLoader:
        @classmethod
        def INPUT_TYPES(cls) -> dict:
            return {"required": {"clip_name": ([],), "type": (["stable_diffusion", "wan"],)}}

    class DualCLIPLoader:
        @classmethod
        def INPUT_TYPES(cls) -> dict:
            return {"required": {"type": (["sdxl", "flux"],)}}

    class VAELoader:
        @classmethod
        def INPUT_TYPES(cls) -> dict:
            return {"required": {"vae_name": (paths.get_filename_list("vae"),)}}

        def load_vae(self, vae_name: str) -> tuple[Any]:
            kind = ModelPatcherDynamic if state.dynamic else ModelPatcher
            patcher = kind(state.make(vae_name), state.device, CPU)
            return (types.SimpleNamespace(patcher=patcher, first_stage_model=patcher.model),)

    kinds = (UNETLoader, CLIPLoader, DualCLIPLoader, VAELoader)
    stock = {loader.__name__: loader for loader in kinds}
    server = PromptServer()
    PromptServer.instance = server
    state.server, state.management, state.io = server, management, io
    put = {
        "comfy": comfy, "comfy.model_management": management, "comfy.sd": sd, "comfy.model_patcher": patcher,
        "comfy.ops": ops, "comfy.utils": utils, "comfy_api": module("comfy_api", latest=latest, __path__=[]), "comfy_api.latest": latest,
        "folder_paths": paths, "nodes": module("nodes", NODE_CLASS_MAPPINGS=stock),
        "server": module("server", PromptServer=PromptServer),
    }  # fmt: skip
    before = {name: sys.modules.get(name) for name in put}
    # Node classes bind the API they were defined with.
    ours = ("extension", "loaders", "offload_nodes", "plan_node", "report_node", "widgets")
    stale = {name: sys.modules.pop(name, None) for name in [f"carom.nodes.{part}" for part in ours]}
    sys.modules.update(put)
    try:
        yield state
    finally:
        for name, old in (*before.items(), *stale.items()):
            if old is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = old
