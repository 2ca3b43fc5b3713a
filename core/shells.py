"""Tensors that are more than one plain tensor, taken apart and put together again. By feature, never by name:

*Wrappers* (torchao, optimum-quanto, ComfyUI's quantised tensors) have no bytes of their own and name their inner tensors by
torch's protocol, ``__tensor_flatten__``. *Dressed* tensors (GGUF's, bitsandbytes') are a subclass around bytes of
their own, with attributes that hold more tensors, directly or in an object (a quantisation state).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from . import ops

_DEPTH = 3  # objects within objects: a quantisation state has one for its own scales
_NO_DISPATCH = torch._C._disabled_torch_dispatch_impl
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Shell:
    """What is left of a wrapper without its inner tensors; these follow in order, nested wrappers as shells."""

    cls: type
    names: tuple[str, ...]
    context: Any
    shape: torch.Size
    stride: tuple[int, ...]
    inner: tuple[Shell | None, ...]  # None: a plain tensor

    def fill(self, tensors: Iterator[Any]) -> Any:
        """The wrapper again, around the next of ``tensors``."""
        parts = {
            name: next(tensors) if shell is None else shell.fill(tensors)
            for name, shell in zip(self.names, self.inner, strict=True)
        }
        make: Any = self.cls
        return make.__tensor_unflatten__(parts, self.context, self.shape, self.stride)


class _Place:
    """Stands for a tensor in an attribute."""


INNER, SAME = _Place(), _Place()  # the next inner tensor; the dressed bytes themselves once more


@dataclass(frozen=True)
class Held:
    """An object in an attribute that holds tensors: a copy of it is made around others."""

    original: Any
    attributes: dict[str, Any]

    def fill(self, bytes_: torch.Tensor, tensors: Iterator[Any]) -> Any:
        made = copy.copy(self.original)
        made.__dict__.update({name: _filled(v, bytes_, tensors) for name, v in self.attributes.items()})
        return made


@dataclass(frozen=True)
class Dress:
    """What is left of a dressed tensor without its bytes and the tensors that hang on it."""

    cls: type
    attributes: dict[str, Any]

    def fill(self, tensors: Iterator[Any]) -> Any:
        """The tensor again: the next of ``tensors`` dressed, the following ones in its attributes."""
        bytes_ = next(tensors)
        with torch._C.DisableTorchFunctionSubclass():
            dressed = bytes_.detach().as_subclass(self.cls)
        dressed.__dict__.update({name: _filled(v, bytes_, tensors) for name, v in self.attributes.items()})
        return dressed


def _filled(value: Any, bytes_: torch.Tensor, tensors: Iterator[Any]) -> Any:
    if isinstance(value, Held):
        return value.fill(bytes_, tensors)
    if isinstance(value, _Place):
        return next(tensors) if value is INNER else bytes_
    return value


def is_wrapper(tensor: Any) -> bool:
    """Whether ``tensor`` names its inner tensors, so that it can be taken apart and put together."""
    return not _plain(tensor) and all(
        hasattr(tensor, name) for name in ("__tensor_flatten__", "__tensor_unflatten__")
    )


def is_dressed(tensor: Any) -> bool:
    """Whether ``tensor`` is a subclass around bytes of its own that no dispatch of its class stands before."""
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
    return type(tensor) in (torch.Tensor, nn.Parameter) or isinstance(
        tensor, (ops.HostParameter, ops.HostTensor)
    )


def lay_open(tensor: Any) -> tuple[Shell | Dress, list[torch.Tensor]]:
    """The shell and the plain inner tensors, the very objects, in the order that ``fill`` takes them.

    Of a dressed tensor the first one is an alias: it has the same memory.
    """
    return _open_wrapper(tensor) if is_wrapper(tensor) else _open_dressed(tensor)


def _open_wrapper(wrapper: Any) -> tuple[Shell, list[torch.Tensor]]:
    names, context = wrapper.__tensor_flatten__()
    shells: list[Shell | None] = []
    tensors: list[torch.Tensor] = []
    for name in names:
        part = getattr(wrapper, name)
        if is_wrapper(part):
            shell, inner = _open_wrapper(part)
            shells.append(shell)
            tensors += inner
        else:
            shells.append(None)
            tensors.append(part)
    kind = type(wrapper)
    return Shell(kind, tuple(names), context, wrapper.shape, wrapper.stride(), tuple(shells)), tensors


def _open_dressed(tensor: Any) -> tuple[Dress, list[torch.Tensor]]:
    with torch._C.DisableTorchFunctionSubclass():
        tensors = [tensor.detach().as_subclass(torch.Tensor)]
    attributes = {
        name: taken
        for name, value in tensor.__dict__.items()
        for taken in (_taken(value, tensors, {id(tensor)}, 0),)
    }
    return Dress(type(tensor), attributes), tensors


def can_be_filled(tensor: Any) -> bool:
    """Whether ``tensor`` can be made of tensors that lie elsewhere, each at its own place of a storage, as in a slot."""
    try:
        shell, tensors = lay_open(tensor)
        if any(not _plain(part) or part.layout != torch.strided or part.requires_grad for part in tensors):
            return False
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            made = shell.fill(iter(elsewhere(tensors)))
        return type(made) is type(tensor) and made.shape == tensor.shape
    except Exception:  # noqa: BLE001 - whatever it is that the class wants: it stays as it is, and is reported
        return False


def elsewhere(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Others like them, each at its own place of a storage, in memory that is not touched and so takes none."""
    found = []
    for number, part in enumerate(tensors, 1):
        room = torch.empty(part.numel() + 16 * number, dtype=part.dtype)[16 * number :]
        found.append(room.as_strided(part.shape, part.stride(), 16 * number))
    return found


def hold(value: Any, tensors: list[torch.Tensor]) -> Held | None:
    """An object that holds tensors, laid open: those that are not ``tensors[0]``'s memory are added to ``tensors``."""
    taken = _taken(value, tensors, set(), 0)
    return taken if isinstance(taken, Held) else None


def _taken(value: Any, tensors: list[torch.Tensor], seen: set[int], depth: int) -> Any:
    """What stands for an attribute's ``value`` in a dress."""
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
    if depth == _DEPTH or id(value) in seen:
        return value
    seen.add(id(value))
    attributes = {name: _taken(part, tensors, seen, depth + 1) for name, part in held.items()}
    changed = {n: v for n, v in attributes.items() if isinstance(v, (Held, _Place))}
    return Held(value, changed) if changed else value


def hangs(shell: Dress) -> set[str]:
    """Attributes of a dressed tensor that are, or hold, tensors."""
    return {name for name, value in shell.attributes.items() if isinstance(value, (Held, _Place))}


def same_memory(of: Dress | Held, owner: Any) -> Iterator[torch.Tensor]:
    """Attributes of ``owner``, which was laid open as ``of``, that are the dressed bytes once more."""
    for name, value in of.attributes.items():
        if value is SAME:
            yield owner.__dict__[name]
        elif isinstance(value, Held):
            yield from same_memory(value, value.original)


def set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """``tensor.data = data`` whatever the classes of either."""
    with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False):
        plain = data.detach()
        plain.__class__ = torch.Tensor
        _SET_DATA(tensor, plain)
