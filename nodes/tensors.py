"""ComfyUI runs prompts in inference mode, so models loaded there hold inference tensors; sessions need ordinary ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..core.away import AwayParameter, AwayTensor
from ..core.ops import HostParameter, HostTensor


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
