"""ComfyUI's casting forwards, without the casting where there is nothing to cast.

A low-VRAM load sends every operator through ComfyUI's ``cast_bias_weight``, which asks some twenty questions of a weight
that is where the operator wants it, as the operator wants it: with hundreds of operators a pass, more host time than the
pass has to give. So while a session streams, modules get a shortcut that computes what ComfyUI's own forward for loaded
modules computes; with a patch, another dtype or another kind of weight the casting forward runs as before.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

NAME = "forward_comfy_cast_weights"
KINDS: tuple[type[nn.Module], ...] = (nn.Linear, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def shorten(root: nn.Module) -> Callable[[], None]:
    """Give the modules below ``root`` their shortcut, where they cast as ComfyUI's own; returns what takes it away."""
    try:
        from comfy.ops import disable_weight_init as own  # type: ignore[import-not-found]
    except ImportError:
        return lambda: None
    taken: list[nn.Module] = []
    for module in root.modules():
        kind = next((kind for kind in KINDS if isinstance(module, kind)), None)
        if kind is None or NAME in module.__dict__:
            continue
        casting: Any = getattr(type(module), NAME, None)
        if not callable(casting) or casting is not getattr(getattr(own, kind.__name__, None), NAME, None):
            continue  # quantised, another pack's: they know what they do
        module.__dict__[NAME] = types.MethodType(_shortcut(kind, casting), module)  # type: ignore[arg-type]
        taken.append(module)

    def undo() -> None:
        for module in taken:
            module.__dict__.pop(NAME, None)

    return undo


def _shortcut(kind: type[nn.Module], casting: Callable) -> Callable:
    found = _made.get((kind, casting))
    if found is None:
        found = _made[kind, casting] = _linear(casting) if kind is nn.Linear else _make(kind.forward, casting)
    return found


_made: dict[tuple[type, Callable], Callable] = {}


def _linear(casting: Callable) -> Callable:
    """Of most operators: their own forward, without asking the module for its weights once more."""
    linear = nn.functional.linear

    def forward(module: Any, input: torch.Tensor) -> torch.Tensor:
        if not module.weight_function and not module.bias_function:
            held = module._parameters
            if "weight" in held and "bias" in held:
                weight, bias, dtype = held["weight"], held["bias"], input.dtype
                if (
                    weight is not None
                    and weight.dtype is dtype
                    and (bias is None or bias.dtype is dtype)
                    and weight.device == input.device
                ):
                    return linear(input, weight, bias)
        return casting(module, input)

    return forward


def _make(plain: Callable, casting: Callable) -> Callable:
    def forward(module: Any, input: torch.Tensor) -> torch.Tensor:
        if not module.weight_function and not module.bias_function:
            held = module._parameters
            bias = held.get("bias")
            if "weight" in held and (bias is None or bias.dtype is input.dtype):
                weight = held["weight"]
                if weight is None or (weight.dtype is input.dtype and weight.device == input.device):
                    return plain(module, input)
        return casting(module, input)

    return forward
