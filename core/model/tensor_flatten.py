"""Flattening of tensor subclasses into plain tensors and a spec, and rebuilding of a subclass from other
tensors.

Two kinds of subclasses are distinguished by their features, never by class names. *Wrapper* subclasses
(torchao, optimum-quanto, ComfyUI's quantised tensors) have no storage of their own, and name their inner
tensors through torch's protocol ``__tensor_flatten__``. *Data* subclasses (of GGUF and bitsandbytes) have
bytes of their own, and Python attributes that hold more tensors, directly or inside an object (a quantisation
state).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from . import managed_tensor

# levels of nested objects that are searched; a quantisation state may hold another for its scales
_MAX_DEPTH = 3
_NO_DISPATCH = torch._C._disabled_torch_dispatch_impl
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


@dataclass(frozen=True)
class WrapperSpec:
    """Everything about a wrapper subclass except its inner tensors: class, names, context, shape and strides.

    ``inner``: for each inner tensor, the spec of a nested wrapper, or None for a plain tensor.
    """

    cls: type
    names: tuple[str, ...]
    context: Any
    shape: torch.Size
    stride: tuple[int, ...]
    inner: tuple[WrapperSpec | None, ...]  # None for a plain tensor

    def unflatten(self, tensors: Iterator[Any]) -> Any:
        """Return a wrapper around the next of ``tensors``. Takes as many tensors as the spec needs."""
        parts = {
            name: next(tensors) if spec is None else spec.unflatten(tensors)
            for name, spec in zip(self.names, self.inner, strict=True)
        }
        make: Any = self.cls
        return make.__tensor_unflatten__(parts, self.context, self.shape, self.stride)


class _Marker:
    """The class of two placeholders (`INNER`, `SAME`) for tensors in an attribute."""


INNER, SAME = _Marker(), _Marker()  # INNER: the next inner tensor. SAME: the own bytes of the data subclass.


@dataclass(frozen=True)
class ObjectSpec:
    """The spec of an object in an attribute that holds tensors. `unflatten` makes a copy of the object with
    other tensors.

    ``original``: the object.
    ``attributes``: its attributes that hold tensors, as markers or specs.
    """

    original: Any
    attributes: dict[str, Any]

    def unflatten(self, bytes_: torch.Tensor, tensors: Iterator[Any]) -> Any:
        """Return a copy of the object with the next of ``tensors`` in its attributes.

        ``bytes_`` replaces attributes that hold the data subclass's own bytes.
        """
        copied = copy.copy(self.original)
        copied.__dict__.update(
            {name: _unflatten_value(v, bytes_, tensors) for name, v in self.attributes.items()}
        )
        return copied


@dataclass(frozen=True)
class SubclassSpec:
    """The spec of a data subclass, which has bytes of its own: its class, and its attributes with markers in
    place of tensors.
    """

    cls: type
    attributes: dict[str, Any]

    def unflatten(self, tensors: Iterator[Any]) -> Any:
        """Return a tensor of the subclass. The next of ``tensors`` holds its bytes; the following tensors go
        to its attributes.
        """
        bytes_ = next(tensors)
        with torch._C.DisableTorchFunctionSubclass():
            rebuilt = bytes_.detach().as_subclass(self.cls)
        rebuilt.__dict__.update(
            {name: _unflatten_value(v, bytes_, tensors) for name, v in self.attributes.items()}
        )
        return rebuilt


def _unflatten_value(value: Any, bytes_: torch.Tensor, tensors: Iterator[Any]) -> Any:
    """Return the attribute value that ``value`` (a marker, a spec or a plain value) represents."""
    if isinstance(value, ObjectSpec):
        return value.unflatten(bytes_, tensors)
    if isinstance(value, _Marker):
        return next(tensors) if value is INNER else bytes_
    return value


def is_wrapper(tensor: Any) -> bool:
    """Return whether ``tensor`` implements ``__tensor_flatten__`` and ``__tensor_unflatten__``."""
    return not _plain(tensor) and all(
        hasattr(tensor, name) for name in ("__tensor_flatten__", "__tensor_unflatten__")
    )


def is_data_subclass(tensor: Any) -> bool:
    """Return whether ``tensor`` is of a subclass with bytes of its own and without its own
    ``__torch_dispatch__``.
    """
    return (
        not _plain(tensor)
        and isinstance(tensor, torch.Tensor)
        and not is_wrapper(tensor)
        and type(tensor).__torch_dispatch__ is _NO_DISPATCH
        and not is_lazy(tensor)
        and tensor.layout == torch.strided
        and not tensor.is_meta
        and tensor.numel() > 0
    )


def _plain(tensor: Any) -> bool:
    """Return whether ``tensor`` is a Tensor, a Parameter, or a tensor whose class Carom replaced."""
    return type(tensor) in (torch.Tensor, nn.Parameter) or isinstance(
        tensor, (managed_tensor.HostParameter, managed_tensor.HostTensor)
    )


def flatten(tensor: Any) -> tuple[WrapperSpec | SubclassSpec, list[torch.Tensor]]:
    """Return the spec and the plain inner tensors, in the order in which ``unflatten`` takes them.

    The tensors are the objects themselves, not copies. For a data subclass, the first tensor is an alias that
    shares the subclass's memory.
    """
    return _flatten_wrapper(tensor) if is_wrapper(tensor) else _flatten_data_subclass(tensor)


def _flatten_wrapper(wrapper: Any) -> tuple[WrapperSpec, list[torch.Tensor]]:
    """Return the spec and the inner tensors of a wrapper. Nested wrappers are flattened too."""
    names, context = wrapper.__tensor_flatten__()
    specs: list[WrapperSpec | None] = []
    tensors: list[torch.Tensor] = []
    for name in names:
        part = getattr(wrapper, name)
        if is_wrapper(part):
            spec, inner = _flatten_wrapper(part)
            specs.append(spec)
            tensors += inner
        else:
            specs.append(None)
            tensors.append(part)
    kind = type(wrapper)
    return WrapperSpec(kind, tuple(names), context, wrapper.shape, wrapper.stride(), tuple(specs)), tensors


def _flatten_data_subclass(tensor: Any) -> tuple[SubclassSpec, list[torch.Tensor]]:
    """Return the spec of a data subclass, an alias of its bytes, and the tensors in its attributes."""
    with torch._C.DisableTorchFunctionSubclass():
        tensors = [tensor.detach().as_subclass(torch.Tensor)]
    attributes = {
        name: flattened
        for name, value in tensor.__dict__.items()
        for flattened in (_flatten_value(value, tensors, {id(tensor)}, 0),)
    }
    return SubclassSpec(type(tensor), attributes), tensors


def can_be_rebuilt(tensor: Any) -> bool:
    """Return whether ``tensor`` can be rebuilt from tensors at non-zero storage offsets in other memory, such
    as slot views.
    """
    try:
        spec, tensors = flatten(tensor)
        if any(not _plain(part) or part.layout != torch.strided or part.requires_grad for part in tensors):
            return False
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            copied = spec.unflatten(iter(make_stand_ins(tensors)))
        return type(copied) is type(tensor) and copied.shape == tensor.shape
    # A class of another library may raise anything. The weight then stays unflattened, and is reported.
    except Exception:  # noqa: BLE001
        return False


def make_stand_ins(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors like ``tensors``, each at another storage offset.

    Their memory is never touched, so the system allocates no pages for it.
    """
    found = []
    for number, part in enumerate(tensors, 1):
        memory = torch.empty(part.numel() + 16 * number, dtype=part.dtype)[16 * number :]
        found.append(memory.as_strided(part.shape, part.stride(), 16 * number))
    return found


def flatten_object(value: Any, tensors: list[torch.Tensor]) -> ObjectSpec | None:
    """Return the spec of an object that holds tensors, and append these tensors to ``tensors``. Returns None
    if the object holds none.

    Tensors that share the memory of ``tensors[0]`` are not appended.
    """
    flattened = _flatten_value(value, tensors, set(), 0)
    return flattened if isinstance(flattened, ObjectSpec) else None


def _flatten_value(value: Any, tensors: list[torch.Tensor], seen: set[int], depth: int) -> Any:
    """Return a marker or spec for the attribute ``value``, and append its tensors to ``tensors``.

    A value that holds no tensor is returned as it is.
    """
    if isinstance(value, torch.Tensor):
        if type(value) is not torch.Tensor or value.requires_grad or not value.numel() or value.is_meta:
            return value
        if value.data_ptr() == tensors[0].data_ptr() and value.nbytes == tensors[0].nbytes:
            return SAME
        tensors.append(value)
        return INNER
    held = getattr(value, "__dict__", None)
    if not isinstance(held, dict) or isinstance(value, (type, nn.Module)) or callable(value):
        return value
    if depth == _MAX_DEPTH or id(value) in seen:
        return value
    seen.add(id(value))
    attributes = {name: _flatten_value(part, tensors, seen, depth + 1) for name, part in held.items()}
    changed = {n: v for n, v in attributes.items() if isinstance(v, (ObjectSpec, _Marker))}
    return ObjectSpec(value, changed) if changed else value


def tensor_attributes(spec: SubclassSpec) -> set[str]:
    """Return the names of the attributes that are tensors or hold tensors."""
    return {name for name, value in spec.attributes.items() if isinstance(value, (ObjectSpec, _Marker))}


def aliases_of(of: SubclassSpec | ObjectSpec, owner: Any) -> Iterator[torch.Tensor]:
    """Yield the attributes of ``owner`` that share the own bytes of the data subclass. ``of``: the spec of
    ``owner``.
    """
    for name, value in of.attributes.items():
        if value is SAME:
            yield owner.__dict__[name]
        elif isinstance(value, ObjectSpec):
            yield from aliases_of(value, value.original)


def set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Perform ``tensor.data = data``, whatever subclasses the two tensors have."""
    with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False):
        plain = data.detach()
        plain.__class__ = torch.Tensor
        _SET_DATA(tensor, plain)
