"""`shorten`: replaces ComfyUI's casting forwards by plain forwards for weights that need no cast.

A low-VRAM load sends every operator through ComfyUI's ``cast_bias_weight``. This function makes some twenty checks,
even for a weight that is on the right device in the right dtype. With hundreds of operators a pass, the checks take
more host time than the pass leaves. So while a session streams, modules get a shortcut that computes the same result as
ComfyUI's own forward for loaded modules. For a weight with a patch, another dtype or another device the casting forward
still runs.
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
    """Give modules below ``root`` with ComfyUI's own casting forward their shortcut; return an undo function."""
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
            continue  # quantised modules, and those of other node packs, keep their own forwards
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
    """Return the shortcut of linear modules, the most frequent kind: it reads each weight from the module once."""
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
