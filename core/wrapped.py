"""Wrapped quantised weights (torchao, quanto, any tensor that names its inner tensors): laid open, so that these stream.

A wrapper has no bytes of its own, so it can neither be pinned nor lie in a slot; its inner tensors can. While laid
open they are buffers of the module, the wrapper stands beside the parameters, readable as ever, and whenever
the module's own forward runs it finds a wrapper made of what stands in the buffers then: slots, or what stays
on the device. What autograd saves of such a wrapper is kept as what the surrounding hook makes of its inner
tensors: handles, while a unit runs. Nothing is known of any one library but `__tensor_flatten__`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from . import ops
from .errors import UnsupportedError


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


def is_wrapper(tensor: Any) -> bool:
    """Whether ``tensor`` is a wrapper that can be taken apart and put together."""
    plain = type(tensor) in (torch.Tensor, nn.Parameter) or isinstance(
        tensor, (ops.HostParameter, ops.HostTensor)
    )
    return not plain and all(hasattr(tensor, name) for name in ("__tensor_flatten__", "__tensor_unflatten__"))


def lay_open(wrapper: Any) -> tuple[Shell, list[torch.Tensor]]:
    """The shell and the plain inner tensors, the very objects, in the order that `Shell.fill` takes them."""
    names, context = wrapper.__tensor_flatten__()
    shells: list[Shell | None] = []
    tensors: list[torch.Tensor] = []
    for name in names:
        part = getattr(wrapper, name)
        if is_wrapper(part):
            shell, inner = lay_open(part)
            shells.append(shell)
            tensors += inner
        else:
            shells.append(None)
            tensors.append(part)
    return Shell(
        type(wrapper), tuple(names), context, wrapper.shape, wrapper.stride(), tuple(shells)
    ), tensors


class LaidOpen:
    """Every frozen wrapped parameter below ``root`` laid open; `close` puts them back as they were."""

    def __init__(self, root: nn.Module) -> None:
        self._leaves: list[_Leaf] = []
        try:
            for module in root.modules():
                names = [
                    name
                    for name, p in module._parameters.items()
                    if p is not None and is_wrapper(p) and not p.requires_grad
                ]
                if names:
                    self._leaves.append(_Leaf(module, names))
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return sum(len(leaf.weights) for leaf in self._leaves)

    @property
    def replaced(self) -> bool:
        """Whether somebody put another weight in the place of one of them (a merge into quantised weights)."""
        return any(not leaf.whole for leaf in self._leaves)

    @property
    def wrappers(self) -> list[nn.Parameter]:
        """What was laid open."""
        return [weight.wrapper for leaf in self._leaves for weight in leaf.weights.values()]

    @property
    def inner(self) -> set[int]:
        """Ids of the inner tensors, which stand in the modules' buffers outside a run."""
        return {
            id(leaf.module._buffers.get(name))
            for leaf in self._leaves
            for weight in leaf.weights.values()
            for name in weight.buffers
        }

    def close(self) -> None:
        """The same Parameter objects as before, around the same inner tensors. Idempotent."""
        while self._leaves:
            self._leaves.pop().close()


@dataclass(frozen=True)
class _Weight:
    wrapper: nn.Parameter
    shell: Shell
    buffers: tuple[str, ...]


class _Leaf:
    """A module with wrapped parameters: their inner tensors are its buffers now."""

    def __init__(self, module: nn.Module, names: list[str]) -> None:
        self.module = module
        self.weights: dict[str, _Weight] = {}
        self._order = list(module._parameters)
        self._not_saved = set(module._non_persistent_buffers_set)
        for name in names:
            wrapper: Any = module._parameters[name]
            shell, tensors = lay_open(wrapper)
            buffers = tuple(f"{name}__inner_{i}" for i in range(len(tensors)))
            for buffer, tensor in zip(buffers, tensors, strict=True):
                if hasattr(module, buffer):
                    raise UnsupportedError(f"{type(module).__name__} has an attribute {buffer} of its own")
                module.register_buffer(buffer, tensor, persistent=False)
            del module._parameters[name]
            module.__dict__[name] = wrapper
            self.weights[name] = _Weight(wrapper, shell, buffers)
        self._hook = module._register_state_dict_hook(self._save)
        self._had = module.__dict__.get("forward")
        self._front = _Front(self, module.forward)
        module.__dict__["forward"] = self._front

    @property
    def whole(self) -> bool:
        """Whether what was laid open is still what the module has."""
        return all(self.module.__dict__.get(name) is weight.wrapper for name, weight in self.weights.items())

    def made(self, weight: _Weight) -> Any:
        """A wrapper of what stands in the buffers now."""
        table = self.module._buffers
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            tensors = iter([table[name] for name in weight.buffers])
            return nn.Parameter(weight.shell.fill(tensors), requires_grad=False)

    def _save(self, module: nn.Module, state: dict, prefix: str, metadata: Any) -> None:
        for name, weight in self.weights.items():
            if self.module is module and name in module.__dict__:
                state[prefix + name] = weight.wrapper

    def close(self) -> None:
        module, table = self.module, self.module._parameters
        self._front.live = False
        if module.__dict__.get("forward") is self._front:
            if self._had is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = self._had
        self._hook.remove()
        for name, weight in self.weights.items():
            for buffer in weight.buffers:
                module._buffers.pop(buffer, None)
            if module.__dict__.pop(name, None) is not None:
                table[name] = weight.wrapper
        module._non_persistent_buffers_set = self._not_saved
        ordered = {name: table[name] for name in [*self._order, *table] if name in table}
        table.clear()
        table.update(ordered)


class _Front:
    """Stands before the module's forward: its wrapped weights are made of what the buffers hold for this run."""

    def __init__(self, leaf: _Leaf, inner: Callable) -> None:
        functools.update_wrapper(self, inner)
        self.live, self._leaf, self._inner = True, leaf, inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaf = self._leaf
        if not self.live or not leaf.whole:
            return self._inner(*args, **kwargs)
        table = leaf.module.__dict__
        saved = _Saved() if torch.is_grad_enabled() else None
        try:
            for name, weight in leaf.weights.items():
                table[name] = leaf.made(weight)
            if saved is not None:
                saved.push([table[name] for name in leaf.weights])
            return self._inner(*args, **kwargs)
        finally:
            if saved is not None:
                saved.pop()
            for name, weight in leaf.weights.items():
                table[name] = weight.wrapper

    def __deepcopy__(self, memo: dict) -> Any:
        raise UnsupportedError(
            "a module with wrapped weights that stream cannot be copied; close the session first"
        )


@dataclass(frozen=True)
class _Packed:
    shell: Shell
    parts: tuple[Any, ...]
    unpack: Callable


class _Saved:
    """While pushed, what autograd saves of given wrappers is kept as what the hook below keeps of their inner tensors."""

    def __init__(self) -> None:
        self._pushed = False

    def push(self, wrappers: list[Any]) -> None:
        below: Any = ops._top_hooks(False) if ops._top_hooks is not None else None
        # Without a unit's hook nothing below would become a handle; a checkpoint's hook counts what it is shown.
        if below is None or not ops.hooks_are_ours():
            return
        pack_below, unpack_below = below
        shapes = {type(wrapper) for wrapper in wrappers}

        def pack(tensor: torch.Tensor) -> Any:
            if type(tensor) in shapes or is_wrapper(tensor):
                shell, parts = lay_open(tensor)
                return _Packed(shell, tuple(pack_below(part) for part in parts), unpack_below)
            return pack_below(tensor)

        def unpack(packed: Any) -> Any:
            if type(packed) is not _Packed:
                return unpack_below(packed)
            parts = [packed.unpack(part) for part in packed.parts]  # a checkpoint recomputes in here
            with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                return packed.shell.fill(iter(parts))

        pack._carom = True  # type: ignore[attr-defined]
        ops._push_hooks(pack, unpack)
        self._pushed = True

    def pop(self) -> None:
        if self._pushed:
            ops.pop_handles()
            self._pushed = False
