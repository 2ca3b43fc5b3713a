"""Quantised weights laid open, so that they stream as they are: torchao, bitsandbytes, optimum-quanto, GGUF and their like.

What is quantised is a tensor subclass: a wrapper has no bytes of its own, so it can neither be pinned nor lie in a slot,
and what hangs on a dressed tensor (its scales) would stay behind; the inner tensors can (`shells`). While laid
open they are buffers of the module, the weight stands beside the parameters, readable as ever, and whenever
the module's own forward runs it finds a weight made of what stands in the buffers then: slots, or what stays
on the device. What autograd saves of such a weight is kept as what the surrounding hook makes of its inner
tensors: handles, while a unit runs.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from . import ops
from .errors import UnsupportedError
from .graph_held import let_go
from .made_once import Grip, Kept, around_of, grip_of
from .shells import (
    Dress,
    Held,
    Shell,
    can_be_filled,
    hangs,
    hold,
    is_dressed,
    is_wrapper,
    lay_open,
    same_memory,
    set_data,
)

if TYPE_CHECKING:
    from .streamer import Streamer

_PLAIN = (torch.Tensor, nn.Parameter)
INNER = "__inner_"  # in the names of buffers that hold inner tensors


class LaidOpen:
    """Every frozen quantised parameter below ``root`` laid open; `close` puts them back as they were."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._leaves: list[_Leaf] = []
        self.renew()

    def renew(self) -> None:
        """Lay open what came since, and let go of what the model replaced. Not within a run."""
        kept = [leaf for leaf in self._leaves if leaf.whole]
        gone = [leaf for leaf in self._leaves if not leaf.whole]
        self._leaves = kept
        for leaf in gone:
            leaf.close()
        try:
            for module in self._root.modules():
                names = _open_names(module)
                if names and any(leaf.module is module for leaf in self._leaves):
                    continue  # one more of a module that is laid open already stays whole
                if names:
                    self._leaves.append(_Leaf(module, names))
        except BaseException:
            self.close()
            raise

    def follow(self) -> None:
        """The dressed weights' own memory is where their bytes are now: after these moved."""
        for leaf in self._leaves:
            leaf.follow()

    def __len__(self) -> int:
        return sum(len(leaf.weights) for leaf in self._leaves)

    @property
    def replaced(self) -> bool:
        """Whether somebody put another weight in the place of one of them (a merge into quantised weights)."""
        return any(not leaf.whole for leaf in self._leaves)

    @property
    def stale(self) -> bool:
        """Whether `renew` would change anything."""
        known = {id(leaf.module) for leaf in self._leaves}
        return self.replaced or any(
            id(module) not in known and _open_names(module) for module in self._root.modules()
        )

    def read(self, name: str) -> torch.Tensor | None:
        """The true value of the quantised weight called ``name`` in the tree, on the CPU; None where there is none."""
        path, _, leaf_name = name.rpartition(".")
        for leaf in self._leaves:
            weight = leaf.weights.get(leaf_name)
            if weight is not None and leaf.module is dict(self._root.named_modules()).get(path):
                with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                    parts = [_bytes(leaf.module._buffers[b]).detach().cpu().clone() for b in weight.buffers]
                    return weight.shell.fill(iter(parts))
        return None

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


def _open_names(module: nn.Module) -> list[str]:
    """Parameters of ``module`` that can be laid open."""
    return [
        name
        for name, p in module._parameters.items()
        if p is not None and (is_wrapper(p) or is_dressed(p))
        and not (p.requires_grad or p.is_inference()) and can_be_filled(p)
    ]  # fmt: skip


def is_inner(name: str) -> bool:
    """Whether a buffer called ``name`` is part of a weight: never state, however small."""
    return INNER in name


@dataclass(frozen=True)
class _Weight:
    wrapper: nn.Parameter
    shell: Shell | Dress
    buffers: tuple[str, ...]
    companions: dict[str, Held] = field(
        default_factory=dict
    )  # attributes of the module, filled after the shell
    grip: Grip | None = None  # of a wrapper that may be kept, None where it is made anew for every run
    key: object = field(default_factory=object)


class _Leaf:
    """A module with wrapped parameters: their inner tensors are its buffers now."""

    def __init__(self, module: nn.Module, names: list[str]) -> None:
        self.module = module
        self.weights: dict[str, _Weight] = {}
        self._kept: dict[str, tuple[list[Any], Any, Kept]] = {}  # inner tensors, device, what is around them
        self._order = list(module._parameters)
        self._not_saved = set(module._non_persistent_buffers_set)
        for name in names:
            wrapper: Any = module._parameters[name]
            shell, tensors = lay_open(wrapper)
            companions = _companions(module, shell, tensors) if isinstance(shell, Dress) else {}
            buffers = tuple(f"{name}{INNER}{i}" for i in range(len(tensors)))
            for buffer, tensor in zip(buffers, tensors, strict=True):
                if hasattr(module, buffer):
                    raise UnsupportedError(f"{type(module).__name__} has an attribute {buffer} of its own")
                module.register_buffer(buffer, tensor, persistent=False)
            del module._parameters[name]
            module.__dict__[name] = wrapper
            grip = grip_of(shell, tensors) if isinstance(shell, Shell) else None
            self.weights[name] = _Weight(wrapper, shell, buffers, companions, grip)
            # The bytes are the buffer's now: kept twice they would take host memory twice.
            _let_go(self.weights[name], torch.empty(0, dtype=tensors[0].dtype))
        self._hooks = [
            module.register_state_dict_pre_hook(self._begin_save),
            module._register_state_dict_hook(self._end_save),
        ]
        self._had = module.__dict__.get("forward")
        self._front = _Front(self, module.forward)
        module.__dict__["forward"] = self._front

    @property
    def whole(self) -> bool:
        """Whether what was laid open is still what the module has."""
        return all(self.module.__dict__.get(name) is weight.wrapper for name, weight in self.weights.items())

    def made(self, name: str, plain: bool = False) -> dict[str, Any]:
        """Attributes of the module made of what stands in the buffers now: the weight, and what goes with it.

        ``plain``: of tensors that no session's class stands before.
        """
        weight, table = self.weights[name], self.module._buffers
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            parts: list[Any] = [_bytes(table[buffer]) for buffer in weight.buffers]
            if plain:
                parts = [part.detach() for part in parts]
            tensors = iter(parts)
            made: Any = weight.shell.fill(tensors)
            if isinstance(weight.shell, Shell):
                made = nn.Parameter(made, requires_grad=False)
            more = {key: held.fill(parts[0], tensors) for key, held in weight.companions.items()}
        return {name: made, **more}

    def stand(self, name: str) -> Any:
        """The module has the weight, and what goes with it, made of what stands in the buffers now; returns the weight."""
        weight, module = self.weights[name], self.module
        if weight.grip is None:
            module.__dict__.update(self.made(name))
        else:
            parts = [module._buffers[buffer] for buffer in weight.buffers]
            module.__dict__[name] = self._around(name, weight, parts, weight.grip)
        return module.__dict__[name]

    def _around(self, name: str, weight: _Weight, parts: list[Any], grip: Grip) -> Any:
        """The wrapper around ``parts``: the one that was made of these very objects before, or a new one."""
        places = set(map(around_of, parts))
        around = places.pop()
        if places or (around is None and not all(type(part) in _PLAIN for part in parts)):
            return self.made(name)[name]  # some stream, or wait on the host
        if around is None:  # residents: the same objects wherever their bytes are
            found = self._kept.get(name)
            if found is not None:
                of, device, kept = found
                if device == parts[0].device and all(map(operator.is_, of, parts)) and not kept.changed:
                    return kept.made
            made = grip.around(parts)
            self._kept[name] = (parts, parts[0].device, Kept(made, parts))
            return made
        made = around.get(weight.key)
        if made is None:
            made = grip.around(parts)
            around.add(weight.key, made, parts, grip)
        return made

    def ran(self) -> None:
        """A run is over: what stands there outside one, and what the run left in a resident's wrapper is let go of."""
        for name in self.weights:
            self.module.__dict__.update(self.host(name))
            found = self._kept.get(name)
            if found is not None and found[2].changed:
                self._kept.pop(name, None)

    def host(self, name: str) -> dict[str, Any]:
        """What stands there outside a run."""
        weight = self.weights[name]
        return {name: weight.wrapper, **{key: held.original for key, held in weight.companions.items()}}

    def follow(self) -> None:
        for weight in self.weights.values():
            main = self.module._buffers.get(weight.buffers[0])
            if main is not None:
                _let_go(weight, main)

    def _begin_save(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """For as long as the module saves itself, as it likes, it has its weights as parameters of plain tensors."""
        if self.module is module and self.whole:
            for name in self.weights:
                made = self.made(name, plain=True)
                module._parameters[name] = made.pop(name)
                del module.__dict__[name]
                module.__dict__.update(made)
            self._reorder()

    def _end_save(self, module: nn.Module, state: dict, prefix: str, metadata: Any) -> None:
        if self.module is module:
            for name in self.weights:
                if name not in module.__dict__ and module._parameters.pop(name, None) is not None:
                    module.__dict__.update(self.host(name))

    def _reorder(self) -> None:
        table = self.module._parameters
        ordered = {name: table[name] for name in [*self._order, *table] if name in table}
        table.clear()
        table.update(ordered)

    def close(self) -> None:
        module, table = self.module, self.module._parameters
        self._front.live = False
        self._kept.clear()
        if module.__dict__.get("forward") is self._front:
            if self._had is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = self._had
        for hook in self._hooks:
            hook.remove()
        self.follow()
        for name, weight in self.weights.items():
            for buffer in weight.buffers:
                module._buffers.pop(buffer, None)
            if module.__dict__.pop(name, None) is not None:
                table[name] = weight.wrapper
        module._non_persistent_buffers_set = self._not_saved
        self._reorder()


def _bytes(tensor: Any) -> Any:
    """``tensor``, or its value where it waits packed: what is put together of it would not ask for that."""
    owner: Any = getattr(tensor, "_carom", None)
    return tensor if getattr(owner, "packed", None) is None else owner.read()


def _let_go(weight: _Weight, data: torch.Tensor) -> None:
    """A dressed weight's memory becomes ``data``'s; a wrapper has none."""
    if isinstance(weight.shell, Dress):
        set_data(weight.wrapper, data)
        again = list(same_memory(weight.shell, weight.wrapper))
        for held in weight.companions.values():
            again += same_memory(held, held.original)
        for tensor in again:
            set_data(tensor, data)


def _companions(module: nn.Module, shell: Dress, tensors: list[torch.Tensor]) -> dict[str, Held]:
    """Objects of ``module`` that hold tensors, or take over what hangs on the weight (bitsandbytes' int8 state)."""
    hanging = hangs(shell)
    found: dict[str, Held] = {}
    for name, value in module.__dict__.items():
        attributes = getattr(value, "__dict__", None)
        if name.startswith("_") or isinstance(value, (type, nn.Module, torch.Tensor)) or callable(value):
            continue
        if not isinstance(attributes, dict):
            continue
        held = hold(value, tensors)
        if held is None and hanging & attributes.keys():
            held = Held(value, {})
        if held is not None:
            found[name] = held
    return found


class _Front:
    """Stands before the module's forward: its wrapped weights are made of what the buffers hold for this run."""

    def __init__(self, leaf: _Leaf, inner: Callable) -> None:
        functools.update_wrapper(self, inner)
        self.live, self._leaf, self._inner = True, leaf, inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaf = self._leaf
        if not self.live or not leaf.whole:
            return self._inner(*args, **kwargs)
        streamer = ops.streaming() if torch.is_grad_enabled() else None
        saved = False
        try:
            weights = [leaf.stand(name) for name in leaf.weights]
            if streamer is not None:
                keep_inner(streamer, weights)
                saved = True
            del weights
            result = self._inner(*args, **kwargs)
            if streamer is not None:
                let_go(streamer, result, (*args, *kwargs.values()))
            return result
        finally:
            if saved:
                ops.pop_handles()
            leaf.ran()

    def __deepcopy__(self, memo: dict) -> Any:
        raise UnsupportedError(
            "a module with wrapped weights that stream cannot be copied; close the session first"
        )


@dataclass(frozen=True)
class _Packed:
    shell: Shell | Dress
    parts: tuple[Any, ...]
    unpack: Callable


def keep_inner(streamer: Streamer, wrappers: list[Any]) -> None:
    """From here to `ops.pop_handles`, what autograd saves of ``wrappers`` is kept as what the hook below, which is
    ``streamer``'s, keeps of their inner tensors."""
    pack_below, unpack_below = ops._top_hooks(False)  # type: ignore[misc]
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

    pack._carom = streamer  # type: ignore[attr-defined]
    ops._push_hooks(pack, unpack)
