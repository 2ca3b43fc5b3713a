"""Functions that take weights of tensor subclasses apart, so that a session can stream their inner tensors.

Two kinds of subclasses exist: quantised weights wrap several tensors, and GGUF's weights dress one tensor (they add
attributes to it). While a weight is taken apart ("open"), its module holds the inner tensors as separate parameters,
which stream like any other. The module's ``weight`` is then a property, which builds the weight from the inner tensors
wherever they are at that moment. A state dict has the weight under its own name, and loading one replaces the whole
weight: ComfyUI finds the weights of a LoRA or a merge by these names. The inner tensors come from torch's own protocol
(``__tensor_flatten__``), so this file depends on no quantisation format.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..core.model.elsewhere_tensor import AwayParameter, AwayTensor
from ..core.model.shared_attributes import original_of
from .inference_tensors import is_plain, ordinary

_TABLE = "_carom_wrapped"
_classes: dict[tuple[type, tuple[str, ...]], type] = {}
_local = threading.local()


@dataclass(frozen=True)
class Wrapping:
    """The description from which an open weight is built again.

    ``kind``: the tensor subclass; ``names``: the module's parameters that hold the inner tensors; ``parts``: the names
    of the inner tensors in the wrapper, empty for a subclass that dresses one tensor; ``context``: the context of
    ``__tensor_flatten__``; ``shape``, ``stride``: of the weight; ``attributes``: the attributes of a dressed tensor;
    ``place``: the weight's position among the module's parameters.
    """

    kind: type
    names: tuple[str, ...]
    parts: tuple[str, ...]
    context: Any
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    attributes: dict[str, Any]
    place: int

    @torch.inference_mode()
    def together(self, module: nn.Module) -> torch.Tensor:
        """Return the weight, built from the inner tensors as they are now.

        The result is never stored: a slot with a reference to its memory cannot be used again.
        """
        found = [module._parameters[name] for name in self.names]
        if self.parts:
            inner = dict(zip(self.parts, found, strict=True))
            return self.kind.__tensor_unflatten__(inner, self.context, self.shape, self.stride)  # type: ignore[attr-defined]
        return self.dress(found[0])

    def shown(self, module: nn.Module) -> torch.Tensor:
        """Return what reading the module's attribute gives: the weight, or within `attributes_only` a tensor that has
        the weight's class and attributes and no bytes.
        """
        if getattr(_local, "attributes_only", False) and self.keeps_patches(module):
            return self.dress(torch.empty(0, dtype=module._parameters[self.names[0]].dtype))  # type: ignore[union-attr]
        return self.together(module)

    def keeps_patches(self, module: nn.Module) -> bool:
        """Return whether the weight's class applies patches that are an attribute of the weight.

        ComfyUI-GGUF merges patches into weights that it does not have to dequantise.
        """
        inner = module._parameters[self.names[0]]
        assert inner is not None
        return isinstance(self.attributes.get("patches"), list) and not inner.dtype.is_floating_point

    def dress(self, tensor: Any) -> torch.Tensor:
        """Return the value of ``tensor`` as a tensor of the weight's class, with the weight's attributes."""
        dressed: Any = _undressed(tensor).as_subclass(self.kind)  # type: ignore[arg-type]
        dressed.__dict__.update(self.attributes)
        return dressed

    def saved(self, module: nn.Module, inner: list[torch.Tensor]) -> torch.Tensor:
        """Return the tensor that represents the weight in a state dict. ``inner``: what represents the inner tensors.

        An inner tensor without bytes in memory stays as it is: its value is read when it is used.
        """
        if self.parts:
            return self.together(module)
        return inner[0] if isinstance(inner[0], (AwayParameter, AwayTensor)) else self.dress(inner[0])


def take_apart(root: nn.Module) -> list[tuple[nn.Module, str]]:
    """Open every parameter below ``root`` that can be taken apart; return (module, name) pairs for `put_together`."""
    opened = []
    for module in list(root.modules()):
        for name, tensor in list(module._parameters.items()):
            if tensor is not None and not is_plain(tensor) and _parts(tensor) is not None:
                _open(module, name, tensor)
                opened.append((module, name))
    return opened


def dressing(opened: list[tuple[nn.Module, str]]) -> list[tuple[nn.Module, str]]:
    """Return those of the ``opened`` weights that dress one tensor."""
    return [(module, name) for module, name in opened if not module.__dict__[_TABLE][name].parts]


@contextlib.contextmanager
def attributes_only() -> Iterator[None]:
    """Context in which ComfyUI writes patches to open weights that carry them as an attribute.

    In this thread, reading the module's attribute gives such a weight without its bytes, so that none is read from a
    drive. Assigning that tensor to the module changes the weight's attributes and leaves its bytes as they are.
    """
    before = getattr(_local, "attributes_only", False)
    _local.attributes_only = True
    try:
        yield
    finally:
        _local.attributes_only = before


def forget_patches(module: nn.Module, name: str) -> None:
    """Remove the patches that the open weight ``name`` of ``module`` carries as an attribute."""
    wrapping = module.__dict__.get(_TABLE, {}).get(name)
    if wrapping is not None and isinstance(wrapping.attributes.get("patches"), list):
        wrapping.attributes["patches"] = []


def merges(module: nn.Module, name: str) -> bool:
    """Return whether ComfyUI merges patches into the open weight ``name`` of ``module``, and so has to have it whole."""
    wrapping = module.__dict__.get(_TABLE, {}).get(name)
    return wrapping is not None and not wrapping.parts and not wrapping.keeps_patches(module)


def put_together(opened: list[tuple[nn.Module, str]]) -> None:
    """Make every weight of ``opened`` a parameter again, over the same memory.

    The weight that was opened last comes first, so that parameters of a module return to their places.
    """
    for module, name in reversed(opened):
        if name in module.__dict__.get(_TABLE, {}):
            _close(module, name)


def whole_parameter(module: nn.Module, name: str) -> torch.Tensor | None:
    """Return the parameter ``name`` of ``module``, or what has the shape and dtype of an open weight; no value is read."""
    wrapping = module.__dict__.get(_TABLE, {}).get(name)
    if wrapping is None:
        return module._parameters.get(name)
    return wrapping.together(module) if wrapping.parts else module._parameters[wrapping.names[0]]


def parameter_names(module: nn.Module) -> list[str]:
    """Return the names of the parameters of ``module``, open weights under their own names."""
    table = module.__dict__.get(_TABLE, {})
    inner = {name for wrapping in table.values() for name in wrapping.names}
    return [*table, *(name for name in module._parameters if name not in inner)]


def attributes_of(module: nn.Module, name: str) -> dict[str, Any] | None:
    """Return the attributes that the weight ``name`` of ``module`` has whenever it is used; None if there is no weight.

    Changes of the result apply to an open weight from its next use on.
    """
    wrapping = module.__dict__.get(_TABLE, {}).get(name)
    if wrapping is not None:
        return wrapping.attributes
    weight = module._parameters.get(name)
    return None if weight is None else weight.__dict__


def _parts(tensor: Any) -> tuple[tuple[str, ...], Any] | None:
    """Return (names of the inner tensors, context), with no names for a subclass that has memory of its own.

    Return None for a tensor that cannot be taken apart.
    """
    if hasattr(tensor, "__tensor_flatten__"):
        names, context = tensor.__tensor_flatten__()
        return tuple(names), context
    own_dispatch = type(tensor).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl
    plain = not own_dispatch and tensor.layout == torch.strided and not tensor.is_meta
    return ((), None) if plain else None


def _undressed(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, (AwayParameter, AwayTensor)):
        return tensor._carom.read()  # the tensor's own memory holds no value: the value waits packed
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
    """Set the module's class: a subclass of its own class with one property for each open weight, or its own class."""
    own = type(module)
    own = getattr(own, "_carom_own", own)
    names = tuple(module.__dict__[_TABLE])
    if not names:
        del module.__dict__[_TABLE]
        module.__class__ = original_of(module).__class__ = own
        return
    if (own, names) not in _classes:
        members: dict[str, Any] = {name: _property(name) for name in names}
        members.update(
            __setattr__=_set, _save_to_state_dict=_save, _load_from_state_dict=_load, _carom_own=own
        )
        _classes[own, names] = type(own.__name__, (own,), members)
    # The root of a session may be a second object with the attributes of ComfyUI's module.
    module.__class__ = original_of(module).__class__ = _classes[own, names]


def _property(name: str) -> property:
    def read(module: nn.Module) -> torch.Tensor:
        return module.__dict__[_TABLE][name].shown(module)

    return property(read)


def _set(module: nn.Module, name: str, value: Any) -> None:
    """Set an attribute. Close an open weight of that name first, so that the new weight replaces the whole weight.

    ComfyUI replaces weights in this way when it merges patches. A tensor without bytes comes from
    `attributes_only`: the weight then stays open and takes the attributes of ``value``.
    """
    wrapping = module.__dict__.get(_TABLE, {}).get(name)
    if wrapping is not None:
        if isinstance(value, wrapping.kind) and not value.untyped_storage().nbytes():
            wrapping.attributes.clear()
            wrapping.attributes.update(value.__dict__)
            return
        _close(module, name)
        setattr(module, name, value)
        return
    nn.Module.__setattr__(module, name, value)


def _save(module: Any, destination: dict, prefix: str, keep_vars: bool) -> None:
    """Save the module as its own class does, with each open weight under its own name and in its place.

    A class that saves its weights itself (ComfyUI-GGUF) reads them through the properties.
    """
    saved: dict[str, Any] = {}
    module._carom_own._save_to_state_dict(module, saved, prefix, keep_vars)
    opened = {}
    for name, wrapping in module.__dict__[_TABLE].items():
        inner = [saved.pop(prefix + piece) for piece in wrapping.names if prefix + piece in saved]
        if inner:
            opened[name] = wrapping.place, wrapping.saved(module, inner)
    items = list(saved.items())
    for name, (place, weight) in reversed(opened.items()):
        items.insert(place, (prefix + name, weight))
    destination.update(items)


def _load(module: Any, *args: Any, **kwargs: Any) -> None:
    """Load a state dict into the whole weights, as the module's own class does."""
    for name in reversed(list(module.__dict__[_TABLE])):
        _close(module, name)
    module._load_from_state_dict(*args, **kwargs)
