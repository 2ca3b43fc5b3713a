"""Defines `PlanCache`: the latest plans of a session, so that a layout that was there before is not planned again.

A session that is parked and returns, and two sessions that alternate, ask for the same plans again and again. A carving
is a division of the module into units.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..model.tree_watch import Tree
from ..model.units import Carving
from ..plan.residency import Plan
from .rule_planner import Settings

_REMEMBERED = 8


@dataclass(frozen=True, eq=False)
class _Known:
    """A plan or a least budget, and what it was made of: settings, and the state of the module."""

    settings: Settings
    tree: Tree
    tensors: tuple[int, ...]  # ids of the tensors of the carving's entries
    kinds: list[Any]
    carving: Carving
    found: Any


class PlanCache:
    """The latest plans for the module tree ``root``. A plan is found again only if nothing has changed on which it
    depends.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._known: deque[_Known] = deque(maxlen=_REMEMBERED)

    def find(self, settings: Settings) -> tuple[Carving, Plan] | None:
        """Return the carving and the plan for ``settings``, or None if they are not known."""
        known = self._find(settings)
        return None if known is None else (_copy(known.carving), known.found)

    def least(self, settings: Settings) -> int | None:
        """Return the least budget for ``settings``, whose own budget is 0, or None if it is not known."""
        known = self._find(settings)
        return None if known is None else known.found

    def _find(self, settings: Settings) -> _Known | None:
        # Plans for another tree would keep weights in memory that were replaced.
        for known in [known for known in self._known if known.tree.changed()]:
            self._known.remove(known)
        for known in self._known:
            if known.settings != settings:
                continue
            now = _kinds(self._root)
            if known.tensors == _tensors(known.carving) and all(map(_same, known.kinds, now)):
                return known
        return None

    def keep(self, settings: Settings, carving: Carving, found: Plan | int) -> None:
        """Remember ``carving`` and its plan as the result for ``settings``, or the least budget if the budget of
        ``settings`` is 0.
        """
        own = _copy(carving)
        self._known.appendleft(
            _Known(settings, Tree(self._root), _tensors(own), _kinds(self._root), own, found)
        )

    def forget(self) -> None:
        """Forget all plans, and the module."""
        self._known.clear()
        self._root = nn.Module()


def _copy(carving: Carving) -> Carving:
    """Return a carving with lists of its own, because adopted tensors are added to the lists of the layout in effect."""
    return replace(
        carving, units=list(carving.units), resident=list(carving.resident), adapters=list(carving.adapters)
    )


def _tensors(carving: Carving) -> tuple[int, ...]:
    entries = [entry for unit in carving.units for entry in unit.entries]
    return tuple(
        id(entry.tensor) for entry in (*entries, *(entry for entry, _ in carving.resident), *carving.adapters)
    )


def _kinds(root: nn.Module) -> list[Any]:
    """Return for each tensor whether it requires a gradient, and its dtype, shape and strides. None instead of these for
    a managed tensor, which keeps them.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return [
            (tensor.requires_grad, None if "_carom" in tensor.__dict__ else _layout(tensor))
            for module in root.modules()
            for table in (module._parameters, module._buffers)
            for tensor in table.values()
            if tensor is not None
        ]


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    strides = (
        tensor.stride() if tensor.layout == torch.strided else tensor.layout
    )  # sparse tensors have no strides
    return tensor.dtype, tensor.shape, strides


def _same(before: tuple[bool, Any], now: tuple[bool, Any]) -> bool:
    return before[0] == now[0] and (before[1] is None or now[1] is None or before[1] == now[1])
