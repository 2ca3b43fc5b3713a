"""What a streamed parameter of a file is while attached: a meta tensor whose true value is a read away.

In a step it is its slot, as every streamed tensor. Outside one, an operator that is given it gets its true value,
read from disk for that operator: `state_dict()` of a model larger than RAM costs nothing until a value of it
is used. Operators that would write to it are refused, but for ``copy_``, which replaces its value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from . import ops
from .errors import UnsupportedError
from .ops import HostParameter, HostTensor
from .streamed import Owner, Streamed
from .units import Entry

if TYPE_CHECKING:
    from .checkpoint import Checkpoint, Stand
    from .streamer import Streamer

_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_INPLACE = {"__setitem__", *(f"__i{name}__" for name in (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift",
))}  # fmt: skip


class DiskOwner(Owner):
    """An owner whose bytes are in a file."""

    __slots__ = ("checkpoint", "stand", "write")

    def __init__(
        self,
        streamer: Streamer,
        unit: Streamed,
        entry: Entry,
        checkpoint: Checkpoint,
        stand: Stand,
        write: Callable[[Stand, torch.Tensor], None],
    ) -> None:
        super().__init__(streamer, unit, entry, ops.plain(torch.Tensor.detach, (entry.tensor,), {}))
        self.checkpoint, self.stand, self.write = checkpoint, stand, write

    def value(self) -> torch.Tensor:
        return lazy(self)

    def set_trainable(self, trainable: bool) -> None:
        if trainable:
            raise UnsupportedError(
                f"{self.entry.name} streams from a file and cannot be trained; train adapters, or load the module first"
            )

    def set_data(self, new: torch.Tensor) -> None:
        device = self.streamer.engine.device
        if new.is_meta or (new.device.type != "cpu" and new.device == device):
            return  # moved to where it computes already (a submodule's .to): it stays streamed
        self.write(self.stand, new)

    def read(self) -> torch.Tensor:
        """The true value, a CPU tensor of its own."""
        return self.checkpoint.read(self.stand)


def _function(cls: type, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
    kwargs = kwargs or {}
    name = getattr(func, "__name__", "")
    first = args[0] if args else None
    owner = getattr(first, "_carom", None)
    getter = name in ("__get__", "__set__")
    if name in ops._ATTRIBUTES or (getter and func not in ops._VIEW_GETTERS):
        if isinstance(first, LazyTensor):  # a value: it is where it is, not where the model computes
            return ops.plain(func, args, kwargs)
        return ops._bounced(cls, func, types, args, kwargs)
    leaves = tree_leaves((args, kwargs))
    for leaf in leaves:
        if isinstance(leaf, ops._Bounced) and "_pending" in leaf.__dict__:  # a resident that is not there yet
            residents, load = leaf.__dict__["_pending"]
            residents.bring(load)
    ours = [leaf for leaf in leaves if isinstance(leaf, ops._Bounced)]
    found = [leaf._carom for leaf in ours if isinstance(getattr(leaf, "_carom", None), DiskOwner)]
    if not found:
        return ops.plain(func, args, kwargs)
    streamer = found[0].streamer
    if not streamer.closed and (streamer.runs.computing() or _on_device(streamer, leaves)):
        return ops._bounced(cls, func, types, args, kwargs)
    if owner is not None and (func == _DATA or name == "detach"):
        return lazy(owner)
    with torch._C.DisableTorchFunctionSubclass():
        if isinstance(owner, DiskOwner) and _writes(name, kwargs):
            return _written(owner, name, args)
        values = {id(leaf): leaf._carom.read() for leaf in ours if isinstance(leaf._carom, DiskOwner)}
        args, kwargs = ops.substitute(args, kwargs, values)
    return ops.plain(func, args, kwargs)


def _on_device(streamer: Streamer, leaves: list) -> bool:
    device = streamer.engine.device
    return device.type != "cpu" and any(
        isinstance(leaf, torch.Tensor)
        and not isinstance(leaf, ops._Bounced)
        and leaf.device == device
        and leaf.dim() > 0
        for leaf in leaves
    )


def _writes(name: str, kwargs: dict) -> bool:
    inplace = name.endswith("_") and not name.endswith("__")
    return inplace or name in _INPLACE or kwargs.get("out") is not None


def _written(owner: DiskOwner, name: str, args: tuple) -> torch.Tensor:
    if name == "copy_" and len(args) > 1 and isinstance(args[1], torch.Tensor):
        source = getattr(args[1], "_carom", None)
        value = source.read() if isinstance(source, DiskOwner) else args[1]
        owner.write(owner.stand, value.to(owner.host.dtype).expand(owner.host.shape))
        return args[0]
    raise UnsupportedError(
        f"{name} on {owner.entry.name}, which streams from a file: read it with session.read(), change the copy, "
        "and give it back with session.write(), or load the module first and stream it without weights="
    )


def lazy(owner: DiskOwner) -> torch.Tensor:
    """The weight's value, read when it is used: what state dicts hold."""
    with torch._C.DisableTorchFunctionSubclass():
        tensor = owner.host.detach()
    tensor.__class__ = LazyTensor
    tensor._carom = owner  # type: ignore[attr-defined]
    return tensor


class DiskParameter(HostParameter):
    """The class a meta Parameter wears while its value streams from a file."""

    __torch_function__: Any = classmethod(_function)

    def __deepcopy__(self, memo: dict) -> nn.Parameter:
        copy = nn.Parameter(self._carom.read(), self.requires_grad)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, proto: Any) -> Any:
        return nn.Parameter(self._carom.read(), self.requires_grad).__reduce_ex__(proto)


class DiskTensor(HostTensor):
    """The same for buffers."""

    __torch_function__: Any = classmethod(_function)

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        copy = self._carom.read()
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, proto: Any) -> Any:
        return self._carom.read().__reduce_ex__(proto)


class LazyTensor(DiskTensor):
    """A value that is read when it is used."""
