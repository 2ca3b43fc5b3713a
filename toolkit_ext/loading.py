"""Context managers that keep whole models on the host while a model class of ai-toolkit loads.

Loaders move a model to the device before they request offloading, or without such a request. On the cards that need
offloading, this move runs out of memory. Single blocks may still move: ai-toolkit quantises one block at a time on the
device and moves it back.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

# Classes that put all values of a checkpoint on the device before they build the model, unless `low_vram` is set.
_BUILDS_ON_DEVICE = {"Ideogram4Model"}


def _nothing(module: nn.Module) -> None:
    """Do nothing. The default for ``arrived`` in `models_stay_on_the_host`."""


@contextlib.contextmanager
def models_stay_on_the_host(
    device: torch.device, arrived: Callable[[nn.Module], None] = _nothing
) -> Iterator[list[weakref.ref[nn.Module]]]:
    """Keep modules that hold a stack of blocks on the host when they are moved to ``device`` inside this context.

    Such a move still converts dtypes.
    ``arrived``: called with each module whose own weights were moved to the host, or converted there.
    Yields a list of weak references to the modules that were kept on the host. The list grows during the context.
    """
    kept: list[weakref.ref[nn.Module]] = []
    plain = nn.Module._apply

    def _apply(module: nn.Module, function: Callable, recurse: bool = True) -> nn.Module:
        if device.type == "cpu" or not _moves_to(function, device) or not has_stack(module):
            result = plain(module, function, recurse)
            arrived(module)
            return result
        if not any(module is other() for other in kept):
            kept.append(weakref.ref(module))
        result = without_moving(module, function, plain, recurse)
        arrived(module)
        return result

    nn.Module._apply = _apply  # type: ignore[method-assign]
    try:
        yield kept
    finally:
        nn.Module._apply = plain  # type: ignore[method-assign]


def has_stack(module: nn.Module) -> bool:
    """Return whether ``module`` holds a stack of blocks: a list with several modules of one class with children."""
    for part in module.modules():
        if isinstance(part, (nn.ModuleList, nn.Sequential)) and part is not module:
            kinds = [type(child) for child in part if next(child.children(), None) is not None]
            if len(kinds) > len(set(kinds)):
                return True
    return False


def without_moving(module: nn.Module, function: Callable, apply: Callable, recurse: bool = True) -> nn.Module:
    """Apply ``function`` to the tensors of ``module`` as ``apply`` (`nn.Module._apply`) does, but keep their devices.

    If ``function`` changes no dtype, nothing is applied. Returns ``module``.
    """
    dtypes = {tensor.dtype for tensor in (*module.parameters(), *module.buffers())} or {torch.float32}
    if any(function(torch.empty(0, dtype=dtype)).dtype != dtype for dtype in dtypes):
        return apply(module, lambda tensor: function(tensor).to(tensor.device), recurse)
    return module


def _moves_to(function: Callable, device: torch.device) -> bool:
    try:
        return function(torch.empty(0)).device.type == device.type
    except Exception:  # a function of other code that needs other tensors: not a move
        return False


@contextlib.contextmanager
def building_on_the_host(sd: Any) -> Iterator[None]:
    """Set ``low_vram`` inside this context for classes that would otherwise put a model's values on the device."""
    config, before = sd.model_config, getattr(sd.model_config, "low_vram", None)
    if any(cls.__name__ in _BUILDS_ON_DEVICE for cls in type(sd).__mro__):
        config.low_vram = True
    try:
        yield
    finally:
        if before is not None:
            config.low_vram = before
