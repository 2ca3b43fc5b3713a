"""What a streamed parameter without host memory of its own is while attached: a meta tensor whose value is a read away.

Its bytes are in a file, or packed (then the object is the model's own, without its memory). In a step it is its slot, as every streamed tensor. Outside one, an operator that
is given it gets its true value, read for that operator: `state_dict()` of a model larger than RAM costs
nothing until a value of it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from . import ops
from .asked import ForOperators
from .ops import HostParameter, HostTensor
from .streamed import Owner

_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
_LAYOUT = {"stride", "is_contiguous"}  # what stands for a tensor need not lie as it does


class AwayOwner(Owner):
    """An owner whose tensor has no host memory; what has is asked for values and given new ones."""

    __slots__ = ()

    def value(self) -> torch.Tensor:
        return lazy(self)

    def read(self) -> torch.Tensor:
        """The true value, a CPU tensor of its own."""
        raise NotImplementedError

    def replace(self, value: torch.Tensor) -> None:
        """From now on the tensor has this value (of its shape and dtype, on any device)."""
        raise NotImplementedError

    def change(self, func: Callable, args: tuple, kwargs: dict) -> None:
        """An operator would write to the tensor, its first argument. Raises UnsupportedError where it cannot."""
        raise NotImplementedError

    def set_data(self, new: torch.Tensor) -> None:
        if isinstance(new, LazyTensor):
            if new._carom is self:
                return
            new = new._carom.read()
        streamer = self.streamer
        if new.is_meta or streamer.low <= new.data_ptr() < streamer.high:
            return
        if new.device == streamer.engine.device:
            if new.device.type != "cpu" and (new.shape, new.dtype) != (self.host.shape, self.host.dtype):
                return
            # A submodule's .to moved it to where it computes already, or a value was made there.
            new = new.cpu()
        if (new.shape, new.dtype) == (self.host.shape, self.host.dtype) and torch.equal(new, self.read()):
            return
        self.refuse_in_graphs()
        self.replace(new)


def _function(cls: type, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
    kwargs = kwargs or {}
    name = getattr(func, "__name__", "")
    if not args and isinstance(kwargs.get("tensor"), ops._Bounced):  # as torch.nn.init hands it on
        kwargs = dict(kwargs)
        args = (kwargs.pop("tensor"),)
    first = args[0] if args else None
    owner = getattr(first, "_carom", None)
    getter = name in ("__get__", "__set__")
    if owner is not None and (name in _LAYOUT or func == _IS_META):
        return ops.plain(func, (owner.host, *args[1:]), kwargs)
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
    found = [leaf._carom for leaf in ours if isinstance(getattr(leaf, "_carom", None), AwayOwner)]
    if not found:
        return ops.plain(func, args, kwargs)
    streamer = found[0].streamer
    writes = isinstance(owner, AwayOwner) and ops.writes(name, kwargs)
    if func == _DATA and owner is not None and streamer.runs.computing():
        return lazy(owner)
    if not streamer.closed and (
        streamer.runs.computing() or (ops.on_device(streamer, leaves) and not writes)
    ):
        return ops._bounced(cls, func, types, args, kwargs)
    if owner is not None and (func == _DATA or name == "detach"):
        return lazy(owner)
    with torch._C.DisableTorchFunctionSubclass():
        if owner is not None and writes:
            return _written(owner, name, func, args, kwargs)
        values = {id(leaf): leaf._carom.read() for leaf in ours if isinstance(leaf._carom, AwayOwner)}
        args, kwargs = ops.substitute(args, kwargs, values)
    return ops.plain(func, args, kwargs)


def _written(owner: AwayOwner, name: str, func: Callable, args: tuple, kwargs: dict) -> torch.Tensor:
    if name == "copy_" and len(args) > 1 and isinstance(args[1], torch.Tensor):
        source = getattr(args[1], "_carom", None)
        value = source.read() if isinstance(source, AwayOwner) else args[1]
        owner.replace(value.to(owner.host.dtype).expand(owner.host.shape))
    else:
        owner.change(func, args, kwargs)
    return args[0]


def lazy(owner: AwayOwner) -> torch.Tensor:
    """The weight's value, read when it is used: what state dicts hold."""
    return ops.value_of(owner, LazyTensor)


class AwayParameter(HostParameter):
    """The class a meta Parameter wears while its value is elsewhere."""

    __torch_function__: Any = ForOperators(_function)

    def __deepcopy__(self, memo: dict) -> nn.Parameter:
        copy = nn.Parameter(self._carom.read(), self.requires_grad)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, proto: Any) -> Any:
        return nn.Parameter(self._carom.read(), self.requires_grad).__reduce_ex__(proto)


class AwayTensor(HostTensor):
    """The same for buffers."""

    __torch_function__: Any = ForOperators(_function)

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        copy = self._carom.read()
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, proto: Any) -> Any:
        return self._carom.read().__reduce_ex__(proto)


class LazyTensor(AwayTensor, ops.Value):
    """A value that is read when it is used."""
