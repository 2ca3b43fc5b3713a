"""The learnt orders of modules that were streamed, for later sessions of the same modules."""

from __future__ import annotations

import weakref

from torch import nn

from ..plan.learnt_order import LearntOrder

# By a module of the tree that holds tensors: sessions of one model may have different root objects.
_orders: weakref.WeakKeyDictionary[nn.Module, LearntOrder] = weakref.WeakKeyDictionary()


def recall(root: nn.Module) -> LearntOrder:
    """Return the order that was noted last for the module tree ``root``."""
    return _orders.get(_key(root), LearntOrder())


def note(root: nn.Module, order: LearntOrder) -> None:
    """Keep ``order`` for the next session of the module tree ``root``."""
    _orders[_key(root)] = order


def _key(root: nn.Module) -> nn.Module:
    below = (module for module in root.modules() if module is not root)
    return next((module for module in below if module._parameters or module._buffers), root)
