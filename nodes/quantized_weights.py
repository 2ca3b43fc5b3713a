"""Weights that wrap several tensors (quantised ones) or dress one (GGUF's), taken apart so that a session can stream them.

While open, a module holds the inner tensors as parameters of their own, which stream like any, and its ``weight`` is a
property that puts the wrapper together from wherever they are at that moment. Wrappers are asked for their parts by
torch's own protocol (``__tensor_flatten__``), so nothing here knows a format.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..core.model.elsewhere_tensor import AwayParameter, AwayTensor
from .inference_tensors import is_plain, ordinary

_TABLE = "_carom_wrapped"
_classes: dict[tuple[type, tuple[str, ...]], type] = {}


@dataclass(frozen=True)
class Wrapping:
    """How one weight is put together: ``names`` of the module's parameters that hold its parts."""

    kind: type
    names: tuple[str, ...]
    parts: tuple[str, ...]  # by the wrapper's own names; none for a subclass that dresses one tensor
    context: Any
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    attributes: dict[str, Any]
    place: int  # among the module's parameters

    @torch.inference_mode()
    def together(self, module: nn.Module) -> torch.Tensor:
        """The wrapper over the parts as they are now. Never kept: a slot that is referred to cannot be used again."""
        found = [module._parameters[name] for name in self.names]
        if self.parts:
            inner = dict(zip(self.parts, found, strict=True))
            return self.kind.__tensor_unflatten__(inner, self.context, self.shape, self.stride)  # type: ignore[attr-defined]
        dressed: Any = _undressed(found[0]).as_subclass(self.kind)  # type: ignore[arg-type]
        dressed.__dict__.update(self.attributes)
        return dressed


def take_apart(root: nn.Module) -> list[tuple[nn.Module, str]]:
    """Open every wrapped parameter below ``root``; returns which, for `put_together`. What has no parts is left alone."""
    opened = []
    for module in list(root.modules()):
        for name, tensor in list(module._parameters.items()):
            if tensor is not None and not is_plain(tensor) and _parts(tensor) is not None:
                _open(module, name, tensor)
                opened.append((module, name))
    return opened


def dresses(opened: list[tuple[nn.Module, str]]) -> bool:
    """Whether any of them dresses a tensor of its own: what its owner writes on it (patches) is not seen while open."""
    return any(not module.__dict__[_TABLE][name].parts for module, name in opened)


def put_together(opened: list[tuple[nn.Module, str]]) -> None:
    """Every weight a parameter again, over the same memory."""
    for module, name in opened:
        if name in module.__dict__.get(_TABLE, {}):
            _close(module, name)


def _parts(tensor: Any) -> tuple[tuple[str, ...], Any] | None:
    """(names of inner tensors, context); no names for a subclass with memory of its own; None where neither holds."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, context = tensor.__tensor_flatten__()
        return tuple(names), context
    own_dispatch = type(tensor).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl
    plain = not own_dispatch and tensor.layout == torch.strided and not tensor.is_meta
    return ((), None) if plain else None


def _undressed(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, (AwayParameter, AwayTensor)):
        return tensor._carom.read()  # its own memory is no value: that waits packed
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach().as_subclass(torch.Tensor)


def _open(module: nn.Module, name: str, tensor: Any) -> None:
    found = _parts(tensor)
    assert found is not None
    parts, context = found
    inner = [getattr(tensor, part) for part in parts] if parts else [_undressed(tensor)]
    names = tuple(f"carom_{name}_{number}" for number in range(len(inner)))
    keys = list(module._parameters)
    wrapping = Wrapping(
        type(tensor), names, parts, context, tuple(tensor.shape), tuple(tensor.stride()) if parts else (),
        {} if parts else dict(tensor.__dict__), keys.index(name),
    )  # fmt: skip
    module.__dict__.setdefault(_TABLE, {})[name] = wrapping
    del module._parameters[name]
    for piece_name, piece in zip(names, inner, strict=True):
        with torch.inference_mode(False), torch.no_grad():
            module._parameters[piece_name] = nn.Parameter(ordinary(piece), requires_grad=False)
    _dress(module)


def _close(module: nn.Module, name: str) -> None:
    wrapping: Wrapping = module.__dict__[_TABLE][name]
    with torch.inference_mode():
        weight = nn.Parameter(wrapping.together(module), requires_grad=False)
    del module.__dict__[_TABLE][name]
    for piece in wrapping.names:
        module._parameters.pop(piece, None)
    items = list(module._parameters.items())
    items.insert(wrapping.place, (name, weight))
    module._parameters.clear()
    module._parameters.update(items)
    _dress(module)


def _dress(module: nn.Module) -> None:
    """The class that fits what is open: the module's own, with a property a weight."""
    own = type(module)
    own = getattr(own, "_carom_own", own)
    names = tuple(module.__dict__[_TABLE])
    if not names:
        del module.__dict__[_TABLE]
        module.__class__ = own
        return
    if (own, names) not in _classes:
        members: dict[str, Any] = {name: _property(name) for name in names}
        _classes[own, names] = type(own.__name__, (own,), {**members, "__setattr__": _set, "_carom_own": own})
    module.__class__ = _classes[own, names]


def _property(name: str) -> property:
    def read(module: nn.Module) -> torch.Tensor:
        return module.__dict__[_TABLE][name].together(module)

    return property(read)


def _set(module: nn.Module, name: str, value: Any) -> None:
    """ComfyUI put another weight there (it merges patches so): that one stands, whole."""
    if name in module.__dict__.get(_TABLE, {}):
        _close(module, name)
        setattr(module, name, value)
        return
    nn.Module.__setattr__(module, name, value)
