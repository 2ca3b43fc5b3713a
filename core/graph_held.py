"""Slots that autograd nodes keep as attributes: handles in their place until the node's backward runs.

Functions written in Python may keep tensors on their context instead of saving them (``ctx.tensors = ...``,
``ctx.state = quant_state``, as bitsandbytes' matrix products do). No hook sees these, and each would hold its slot from
the forward to the backward. A node's context is the node itself: it is found in the graph that a module's forward
made, what it keeps of slots becomes handles, and a hook before its backward puts views of wherever the unit
landed back in their place.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from . import ops

if TYPE_CHECKING:
    from .streamer import Streamer

_DEPTH = 4  # objects within objects
_MOST = 4096  # nodes looked at: one module's forward makes few


@dataclass(frozen=True)
class _Object:
    """An object that kept slots: a copy of it is made around views."""

    original: Any
    attributes: dict[str, Any]


def let_go(streamer: Streamer, result: Any, given: Sequence[Any]) -> None:
    """What the graph from ``given`` to ``result`` keeps of slots in nodes' attributes is kept as handles."""
    waiting = [leaf.grad_fn for leaf in _leaves((result,)) if isinstance(leaf, torch.Tensor)]
    seen: set[Any] = {None}
    seen.update(leaf.grad_fn for leaf in _leaves(given) if isinstance(leaf, torch.Tensor))
    while waiting and len(seen) < _MOST:
        node: Any = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        waiting.extend(after for after, _ in node.next_functions)
        kept = getattr(node, "__dict__", None)
        if kept:
            _scrub(streamer, node, kept)


def _leaves(values: Sequence[Any]) -> Sequence[Any]:
    """Also of what lies deeper; quickly where there is nothing but tensors."""
    return values if all(isinstance(value, torch.Tensor) for value in values) else tree_leaves(values)


def _scrub(streamer: Streamer, node: Any, kept: dict[str, Any]) -> None:
    packed: dict[str, Any] = {}
    for name, value in kept.items():
        new = _pack(streamer, value, 0)
        if new is not value:
            packed[name] = new
    if not packed:
        return
    kept.update(dict.fromkeys(packed))

    def before(_: Any) -> None:
        for name, value in packed.items():
            setattr(node, name, _unpack(value))

    def after(*_: Any) -> None:
        for name in packed:
            setattr(node, name, None)

    node.register_prehook(before)
    node.register_hook(after)


def _pack(streamer: Streamer, value: Any, depth: int) -> Any:
    """``value`` with handles in the place of slots' views; the very same where there are none."""
    if isinstance(value, torch.Tensor):
        try:
            with torch._C.DisableTorchFunctionSubclass():
                if streamer.low <= value.data_ptr() < streamer.high:
                    return streamer.backward.handle(value)
        except RuntimeError:  # no storage of its own
            pass
        return value
    if depth == _DEPTH:
        return value
    if type(value) in (tuple, list):
        parts = [_pack(streamer, part, depth + 1) for part in value]
        same = all(new is old for new, old in zip(parts, value, strict=True))
        return value if same else type(value)(parts)
    held = getattr(value, "__dict__", None)
    if not isinstance(held, dict) or isinstance(value, (type, nn.Module)) or callable(value):
        return value
    changed = {n: new for n, old in held.items() if (new := _pack(streamer, old, depth + 1)) is not old}
    if not changed:
        return value
    # What is kept must not lead to the slots either.
    bare = copy.copy(value)
    bare.__dict__.update(dict.fromkeys(changed))
    return _Object(bare, changed)


def _unpack(value: Any) -> Any:
    if type(value) is ops.Handle:
        return value.backward.unpack(value)
    if type(value) is _Object:
        made = copy.copy(value.original)
        made.__dict__.update({name: _unpack(part) for name, part in value.attributes.items()})
        return made
    if type(value) in (tuple, list):
        return type(value)(_unpack(part) for part in value)
    return value
