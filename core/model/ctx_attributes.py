"""Replacement of slot views that Python autograd functions keep as attributes of ``ctx`` instead of saving
them.

A slot is the device memory that holds a streamed unit while the unit is used. A slot view is a tensor in that
memory. An autograd function may set ``ctx.tensors = ...`` or ``ctx.state = quant_state``, as bitsandbytes'
matrix products do. Saved-tensor hooks do not see such tensors, and each of them would occupy its slot from
the forward to the backward pass. A function's ``ctx`` is its autograd node. So this module walks the autograd
graph of a module's forward, and replaces slot views in the nodes' attributes by handles. Before a node's
backward runs, a prehook of the node sets the attributes to views of the slot that holds the unit then.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from . import managed_tensor

if TYPE_CHECKING:
    from .home import SlotRange

_MAX_DEPTH = 4  # levels of nested objects that are searched
_MAX_NODES = 4096  # limit on the autograd nodes that one call visits; one module's forward makes far fewer


@dataclass(frozen=True)
class _PackedObject:
    """A replacement for an object whose attributes held slot views.

    ``original``: a copy of the object without these attributes' values.
    ``attributes``: the values, with handles in place of slot views.
    """

    original: Any
    attributes: dict[str, Any]


def pack_node_attributes(slots: SlotRange, result: Any, inputs: Sequence[Any]) -> None:
    """Replace slot views in attributes of the autograd nodes between ``inputs`` and ``result`` by handles."""
    waiting = [leaf.grad_fn for leaf in _leaves((result,)) if isinstance(leaf, torch.Tensor)]
    seen: set[Any] = {None}
    seen.update(leaf.grad_fn for leaf in _leaves(inputs) if isinstance(leaf, torch.Tensor))
    while waiting and len(seen) < _MAX_NODES:
        node: Any = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        waiting.extend(after for after, _ in node.next_functions)
        kept = getattr(node, "__dict__", None)
        if kept:
            _pack_attributes(slots, node, kept)


def _leaves(values: Sequence[Any]) -> Sequence[Any]:
    """Return the leaves of the pytrees in ``values``.

    If all values are tensors, ``values`` itself is returned, which is faster.
    """
    return values if all(isinstance(value, torch.Tensor) for value in values) else tree_leaves(values)


def _pack_attributes(slots: SlotRange, node: Any, kept: dict[str, Any]) -> None:
    """Replace slot views in ``kept``, the attributes of ``node``, by handles.

    Hooks are registered that set the attributes to slot views for the duration of the node's backward.
    """
    packed: dict[str, Any] = {}
    for name, value in kept.items():
        new = _pack(slots, value, 0)
        if new is not value:
            packed[name] = new
    if not packed:
        return
    kept.update(dict.fromkeys(packed))

    def before(_: Any) -> None:
        """Put views of the unit's current slot into the node's attributes, before the node's backward."""
        for name, value in packed.items():
            setattr(node, name, _unpack(value))

    def after(*_: Any) -> None:
        """Remove the views from the node's attributes, after the node's backward."""
        for name in packed:
            setattr(node, name, None)

    node.register_prehook(before)
    node.register_hook(after)


def _pack(slots: SlotRange, value: Any, depth: int) -> Any:
    """Return ``value`` with every slot view replaced by a handle, or ``value`` itself if it holds no slot
    view.
    """
    if isinstance(value, torch.Tensor):
        try:
            with torch._C.DisableTorchFunctionSubclass():
                if managed_tensor.in_slots(slots, value.data_ptr()):
                    return slots.handle(value)
        except RuntimeError:  # the tensor has no storage, so it is no slot view
            pass
        return value
    if depth == _MAX_DEPTH:
        return value
    if type(value) in (tuple, list):
        parts = [_pack(slots, part, depth + 1) for part in value]
        same = all(new is old for new, old in zip(parts, value, strict=True))
        return value if same else type(value)(parts)
    attributes = getattr(value, "__dict__", None)
    if not isinstance(attributes, dict) or isinstance(value, (type, nn.Module)) or callable(value):
        return value
    changed = {n: new for n, old in attributes.items() if (new := _pack(slots, old, depth + 1)) is not old}
    if not changed:
        return value
    # The copy that the node keeps must not refer to slot views either.
    emptied = copy.copy(value)
    emptied.__dict__.update(dict.fromkeys(changed))
    return _PackedObject(emptied, changed)


def _unpack(value: Any) -> Any:
    """Return ``value`` with every handle replaced by a view of the slot that holds the handle's unit now."""
    if type(value) is managed_tensor.Handle:
        return value.source.unpack(value)
    if type(value) is _PackedObject:
        made = copy.copy(value.original)
        made.__dict__.update({name: _unpack(part) for name, part in value.attributes.items()})
        return made
    if type(value) in (tuple, list):
        return type(value)(_unpack(part) for part in value)
    return value
