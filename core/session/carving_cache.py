"""Defines `CarvingCache`: the latest carvings of a session's module, so that an unchanged module is not divided anew.

A carving is a division of the module into units. The limit of a unit's bytes rarely depends on the budget
(`rule_planner.decide`), so sessions that are parked and return, and budgets that follow the free memory of the device,
find their carvings here. The plan for a carving is made anew each time, which takes a small part of the time
that the division takes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..model.units import Carving, Entry, carve

_REMEMBERED = 12  # a plan looks at up to five carvings, see `rule_planner.decide`


@dataclass(frozen=True, eq=False)
class _Known:
    """A carving, and what it was made of.

    ``options``: the arguments of `carve`. ``tree``: the modules, see `_tree`. ``entries``: all entries of the carving.
    ``places``: the dicts of modules that hold their tensors, with the names. ``kinds``: what `_kinds` returned for the
    entries.
    """

    options: dict[str, Any]
    tree: list[int]
    entries: list[Entry]
    places: list[tuple[dict[str, Any], str, Entry]]
    kinds: list[Any]
    carving: Carving


class CarvingCache:
    """The latest carvings of the module tree ``root``. A carving is found again only if the tree, its tensors, and the
    dtypes, shapes, strides and ``requires_grad`` of the tensors have not changed.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._known: deque[_Known] = deque(maxlen=_REMEMBERED)

    def carve(self, **options: Any) -> Carving:
        """Return what `carve` returns for the module. ``options``: the arguments of `carve`."""
        tree = _tree(self._root)
        self._forget_replaced(tree)
        for known in self._known:
            if known.options == options and all(map(_same, known.kinds, _kinds(known.entries))):
                return _copy(known.carving)
        carving = carve(self._root, **options)
        own = _copy(carving)
        entries = [entry for unit in own.units for entry in unit.entries]
        entries += [entry for entry, _ in own.resident] + own.adapters
        places = [(site.table, site.name, entry) for entry in entries for site in entry.sites]
        self._known.appendleft(_Known(options, tree, entries, places, _kinds(entries), own))
        return carving

    def forget_replaced(self) -> None:
        """Forget the carvings of tensors that the module does not have any more, and which they would keep in memory.

        Called after a layout has ended. While it was in effect, weights of a file that stay on the device were other
        tensors than those that the module has now.
        """
        if self._known:
            self._forget_replaced(_tree(self._root))

    def _forget_replaced(self, tree: list[int]) -> None:
        for known in [known for known in self._known if known.tree != tree or _replaced(known)]:
            self._known.remove(known)

    def forget(self) -> None:
        """Forget all carvings, and the module."""
        self._known.clear()
        self._root = nn.Module()


def _copy(carving: Carving) -> Carving:
    """Return a carving with lists of its own, because adopted tensors are added to the lists of the layout in effect."""
    return replace(
        carving, units=list(carving.units), resident=list(carving.resident), adapters=list(carving.adapters)
    )


def _tree(root: nn.Module) -> list[int]:
    """Return the ids of the tree's modules, and how many parameters and buffers each of them has."""
    numbers = []
    for module in root.modules():
        numbers += [id(module), len(module._parameters), len(module._buffers)]
    return numbers


def _replaced(known: _Known) -> bool:
    """Return whether the module has another tensor in the place of an entry of the carving."""
    return any(table.get(name) is not entry.tensor for table, name, entry in known.places)


def _kinds(entries: list[Entry]) -> list[Any]:
    """Return for the tensor of each entry whether it requires a gradient, and its dtype, shape and strides. None instead
    of these for a managed tensor, which keeps them.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return [
            (tensor.requires_grad, None if "_carom" in tensor.__dict__ else _layout(tensor))
            for tensor in (entry.tensor for entry in entries)
        ]


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    # Sparse tensors have no strides.
    strides = tensor.stride() if tensor.layout == torch.strided else tensor.layout
    # The garbage collector passes over plain tuples of numbers, but not over a torch.Size.
    return tensor.dtype, tuple(tensor.shape), strides


def _same(before: tuple[bool, Any], now: tuple[bool, Any]) -> bool:
    return before[0] == now[0] and (before[1] is None or now[1] is None or before[1] == now[1])
