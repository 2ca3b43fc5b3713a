"""ComfyUI runs prompts in inference mode, so models loaded there hold inference tensors; sessions need ordinary ones."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from ..core.model.elsewhere_tensor import AwayParameter, AwayTensor
from ..core.model.managed_tensor import HostParameter, HostTensor

MAPPED = "_carom_mapped"  # of a model: its weights lie in a mapped file, which nobody may write to
# How attributes begin in which ComfyUI keeps what is loaded, on a dynamic patcher's model and on its modules.
LOADED = ("dynamic_", "current_weight_patches_uuid", "_v", "_pin", "_prefetch", "_comfy_graph")
SMALL = 16 << 10  # bytes of a module; from there on ComfyUI's dynamic patcher converts weights as a whole


def own_tensors(module: nn.Module) -> int:
    """Put ordinary tensors over the same memory in the place of inference tensors; returns how many.

    Nothing is copied, shared tensors stay shared, and parameters take no gradients (ComfyUI never asks for any, but
    leaves ``requires_grad`` on).
    """
    made: dict[int, Any] = {}
    for part in module.modules():
        tables: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for table in tables:
            for name, tensor in table.items():
                if tensor is None or not is_plain(tensor) or isinstance(tensor, (AwayParameter, AwayTensor)):
                    continue  # those are the session's: packed, without memory of their own
                if tensor.is_meta and hasattr(part, "comfy_cast_weights"):
                    table[name] = _zeros(tensor)
                    continue
                if tensor.is_inference():
                    if id(tensor) not in made:
                        made[id(tensor)] = tensor, ordinary(tensor)
                    table[name] = made[id(tensor)][1]
                elif tensor.requires_grad and tensor.is_leaf:
                    tensor.requires_grad_(False)
    return len(made)


@torch.inference_mode(False)
@torch.no_grad()
def settle_dtypes(module: nn.Module) -> None:
    """Weights in the dtype that ComfyUI means them to have on the device, where that is not the file's.

    Its dynamic patcher converts on the way to the device, and its static one expects that loading has converted.
    What is small stays as it is: ComfyUI casts that in every use.
    """
    for part in module.modules():
        small = hasattr(part, "comfy_cast_weights") and _bytes(part) <= SMALL
        tables: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for table in tables:
            for name, tensor in table.items():
                meant = getattr(part, f"{name}_comfy_model_dtype", None)
                if tensor is None or meant is None or tensor.dtype == meant or tensor.is_meta or small:
                    continue
                if is_plain(tensor) and tensor.is_floating_point() and meant.is_floating_point:
                    new = tensor.detach().to(meant)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    table[name] = nn.Parameter(new, requires_grad=False) if is_parameter else new


@torch.inference_mode(False)
@torch.no_grad()
def own_memory(module: nn.Module) -> None:
    """Weights out of a mapped file, if they are still there: ComfyUI's static patchers write to weights in place."""
    if not module.__dict__.pop(MAPPED, False):
        return
    made: dict[int, Any] = {}
    for part in module.modules():
        tables: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for table in tables:
            for name, tensor in table.items():
                if tensor is None or not is_plain(tensor) or tensor.device.type != "cpu":
                    continue
                if id(tensor) not in made:
                    new = tensor.detach().clone()
                    is_parameter = isinstance(tensor, nn.Parameter)
                    made[id(tensor)] = (
                        tensor,
                        nn.Parameter(new, requires_grad=False) if is_parameter else new,
                    )
                table[name] = made[id(tensor)][1]


@torch.inference_mode(False)
@torch.no_grad()
def structure_of(model: nn.Module) -> nn.Module:
    """A copy of a dynamic patcher's model with parameters of its own over the same memory, as if it were never loaded.

    What ComfyUI keeps on the modules of a loaded model owns device memory and pinned memory through pointers, which two
    copies would free twice.
    """
    tensors = [*model.parameters(), *model.buffers()]
    alias: dict[int, Any] = {id(tensor): ordinary(tensor) for tensor in tensors if is_plain(tensor)}
    taken = [
        (module, name, module.__dict__.pop(name))
        for module in model.modules()
        for name in [name for name in module.__dict__ if name.startswith(LOADED)]
    ]
    try:
        return copy.deepcopy(model, alias)
    finally:
        for module, name, value in taken:
            module.__dict__[name] = value


def _bytes(module: nn.Module) -> int:
    return sum(t.numel() * t.element_size() for t in module.parameters(recurse=False))


@torch.inference_mode(False)
@torch.no_grad()
def ordinary(tensor: torch.Tensor) -> torch.Tensor:
    """An ordinary tensor over the memory of an inference tensor, of the same kind and with the same attributes."""
    new = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    new.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())  # type: ignore[call-overload]
    result = nn.Parameter(new, requires_grad=False) if isinstance(tensor, nn.Parameter) else new
    result.__dict__.update(tensor.__dict__)
    return result


@torch.inference_mode(False)
def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    """What ComfyUI's full load puts where a checkpoint lacks a weight."""
    new = torch.zeros(tensor.shape, dtype=tensor.dtype)
    return nn.Parameter(new, requires_grad=False) if isinstance(tensor, nn.Parameter) else new


def wrapped_kind(module: nn.Module) -> str:
    """The class of the first weight that is no plain tensor, "" where there is none."""
    for part in module.modules():
        for table in (part._parameters, part._buffers):
            for tensor in table.values():
                if tensor is not None and not is_plain(tensor):
                    return type(tensor).__name__
    return ""


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a session can stream it: no subclass but those that streamed tensors wear."""
    return type(tensor) in (torch.Tensor, nn.Parameter, HostParameter, HostTensor, AwayParameter, AwayTensor)
