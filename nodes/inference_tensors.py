"""Replacement of the inference tensors in ComfyUI's models by ordinary tensors.

ComfyUI loads models in inference mode, so their weights are inference tensors. A session needs ordinary tensors.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from ..core.checkpoint.memory_maps import lists_files, mapped_files
from ..core.model.arriving_tensor import PendingParameter, PendingTensor
from ..core.model.elsewhere_tensor import AwayParameter, AwayTensor
from ..core.model.managed_tensor import HostParameter, HostTensor

MAPPED = "_carom_mapped"  # attribute of a model whose weights were loaded as views of a memory-mapped file
# The kinds of tensors that a session can stream, or streams or loads already.
_PLAIN = (
    torch.Tensor, nn.Parameter, HostParameter, HostTensor, AwayParameter, AwayTensor, PendingParameter, PendingTensor,
)  # fmt: skip
# Prefixes of the attributes in which ComfyUI keeps load state, on a dynamic patcher's model and on its modules.
LOADED = (
    "dynamic_", "current_weight_patches_uuid", "_v", "_pin", "_prefetch", "_comfy_graph", "weight_lowvram_function",
    "bias_lowvram_function", "weight_function", "bias_function",
)  # fmt: skip


def own_tensors(module: nn.Module) -> int:
    """Replace the inference tensors of ``module`` by ordinary tensors over the same memory; return their number.

    No values are copied, and shared tensors stay shared. ``requires_grad`` is set to False: ComfyUI leaves the flag on
    but never uses gradients. Meta tensors of modules that ComfyUI casts become zeros (see `_zeros`).
    """
    made: dict[int, Any] = {}
    for part in module.modules():
        tables: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for table in tables:
            for name, tensor in table.items():
                if tensor is None or not is_plain(tensor) or isinstance(tensor, (AwayParameter, AwayTensor)):
                    continue  # tensors of a session: their values wait packed, without memory of their own
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
def own_memory(module: nn.Module) -> None:
    """Copy weights whose memory ComfyUI must not write to: its static patchers write to weights in place.

    The system lists which mappings of files are read-only (Linux, Windows). Elsewhere every weight of a model that Carom
    loaded from a mapped file is copied.
    """
    if not module.__dict__.get(MAPPED, False):
        return
    read_only = [part for file in mapped_files() for part in file.read_only]
    if not lists_files():
        del module.__dict__[MAPPED]
    made: dict[int, Any] = {}
    for part in module.modules():
        tables: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for table in tables:
            for name, tensor in table.items():
                if tensor is None or not is_plain(tensor) or tensor.device.type != "cpu":
                    continue
                address = tensor.data_ptr()
                if lists_files() and not any(start <= address < end for start, end in read_only):
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
    """Return a copy of a dynamic patcher's model, with new weights over the same memory and without load state.

    The load state that ComfyUI keeps on the modules owns device memory and pinned memory through pointers. Two copies
    of the state would free that memory twice.
    """
    tensors = [*model.parameters(), *model.buffers()]
    alias: dict[int, Any] = {id(tensor): _over_same_memory(tensor) for tensor in tensors}
    config = getattr(model, "model_config", None)
    if config is not None:
        # ComfyUI's class returns None for each attribute that does not exist, also for the methods of `copy.deepcopy`.
        alias[id(config)] = object.__new__(type(config))
        alias[id(config)].__dict__.update(config.__dict__)
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


def _over_same_memory(tensor: torch.Tensor) -> Any:
    """Return a new tensor, parameter or quantised weight over the memory of ``tensor``."""
    if is_plain(tensor) or not hasattr(tensor, "__tensor_flatten__"):
        return ordinary(tensor) if is_plain(tensor) else copy.deepcopy(tensor)
    names, context = tensor.__tensor_flatten__()
    inner = {name: ordinary(getattr(tensor, name)) for name in names}
    made = type(tensor).__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())  # type: ignore[attr-defined]
    return nn.Parameter(made, requires_grad=False) if getattr(tensor, "_is_param", False) else made


@torch.inference_mode(False)
@torch.no_grad()
def ordinary(tensor: torch.Tensor) -> torch.Tensor:
    """Return an ordinary tensor (or parameter) over the memory of ``tensor``, with the same attributes."""
    new = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    new.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())  # type: ignore[call-overload]
    result = nn.Parameter(new, requires_grad=False) if isinstance(tensor, nn.Parameter) else new
    result.__dict__.update(tensor.__dict__)
    return result


@torch.inference_mode(False)
def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    """Return zeros in host memory with the shape of ``tensor``.

    ComfyUI's full load puts zeros in the place of a weight that the checkpoint lacks.
    """
    new = torch.zeros(tensor.shape, dtype=tensor.dtype)
    return nn.Parameter(new, requires_grad=False) if isinstance(tensor, nn.Parameter) else new


def wrapped_kind(module: nn.Module) -> str:
    """Return the class name of the first weight that is not a plain tensor (see `is_plain`), "" if all are plain."""
    for part in module.modules():
        for table in (part._parameters, part._buffers):
            for tensor in table.values():
                if tensor is not None and not is_plain(tensor):
                    return type(tensor).__name__
    return ""


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a session can stream ``tensor``: an ordinary tensor or parameter, or one of Carom's subclasses."""
    return type(tensor) in _PLAIN
