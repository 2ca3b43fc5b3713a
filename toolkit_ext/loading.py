"""While a model class of ai-toolkit loads: whole models stay on the host, whatever the loader moves to the device.

Loaders move a model to the device before they ask for offloading, or whether they do or not. On the cards that offloading is
for, that alone runs out of memory. Blocks may pass: ai-toolkit quantises one block at a time on the device and moves it back.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

# Classes that make a checkpoint's values on the device, all of them before the model is there, unless `low_vram` is set.
_BUILDS_ON_DEVICE = {"Ideogram4Model"}


@contextlib.contextmanager
def models_stay_on_the_host(device: torch.device) -> Iterator[list[weakref.ref[nn.Module]]]:
    """Inside, moving a module that holds a stack of blocks to ``device`` converts its dtype and moves nothing.

    Yields a list, to which each module that was kept back is added.
    """
    kept: list[weakref.ref[nn.Module]] = []
    plain = nn.Module._apply

    def _apply(module: nn.Module, function: Callable, recurse: bool = True) -> nn.Module:
        if device.type == "cpu" or not _moves_to(function, device) or not has_stack(module):
            return plain(module, function, recurse)
        if not any(module is other() for other in kept):
            kept.append(weakref.ref(module))
        return without_moving(module, function, plain, recurse)

    nn.Module._apply = _apply  # type: ignore[method-assign]
    try:
        yield kept
    finally:
        nn.Module._apply = plain  # type: ignore[method-assign]


def has_stack(module: nn.Module) -> bool:
    """Whether ``module`` holds blocks one after another: a list of modules of one class that have parts themselves."""
    for part in module.modules():
        if isinstance(part, (nn.ModuleList, nn.Sequential)) and part is not module:
            kinds = [type(child) for child in part if next(child.children(), None) is not None]
            if len(kinds) > len(set(kinds)):
                return True
    return False


def without_moving(module: nn.Module, function: Callable, apply: Callable, recurse: bool = True) -> nn.Module:
    """``function``, as `nn.Module._apply` (``apply``) takes it, in ``module``: what converts is done, what moves is not."""
    dtypes = {tensor.dtype for tensor in (*module.parameters(), *module.buffers())} or {torch.float32}
    if any(function(torch.empty(0, dtype=dtype)).dtype != dtype for dtype in dtypes):
        return apply(module, lambda tensor: function(tensor).to(tensor.device), recurse)
    return module


def _moves_to(function: Callable, device: torch.device) -> bool:
    try:
        return function(torch.empty(0)).device.type == device.type
    except Exception:  # a function of somebody's own, for tensors of another kind: no move
        return False


@contextlib.contextmanager
def building_on_the_host(sd: Any) -> Iterator[None]:
    """Inside, a class that would make a model's values on the device keeps them on the host."""
    config, before = sd.model_config, getattr(sd.model_config, "low_vram", None)
    if any(cls.__name__ in _BUILDS_ON_DEVICE for cls in type(sd).__mro__):
        config.low_vram = True
    try:
        yield
    finally:
        if before is not None:
            config.low_vram = before
