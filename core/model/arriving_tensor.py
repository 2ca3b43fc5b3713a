"""Tensor subclasses with `__torch_function__` for resident weights whose bytes are still being read from a
file.

A resident weight is a weight that stays on the device. A tensor of these classes is called pending. The first
operator that needs the values of a pending tensor waits until the bytes are on the device. Queries of shape,
dtype or device are answered without waiting.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from . import managed_tensor
from .elsewhere_tensor import AwayParameter, AwayTensor

_METADATA_QUERIES = {
    "size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "is_floating_point", "is_complex",
    "is_contiguous", "is_signed", "storage_offset", "__len__", "__hash__", "requires_grad_", "register_hook",
    "is_pinned", "register_post_accumulate_grad_hook", "get_device", "is_inference", "has_names", "_is_view",
    "is_same_size", "is_shared", "is_conj", "is_neg",
}  # fmt: skip
_VALUE_GETTERS = {
    *managed_tensor._VIEW_GETTERS, torch.Tensor.imag.__get__, torch.Tensor.data.__set__, torch.Tensor._base.__get__,  # type: ignore[attr-defined,union-attr]
}  # fmt: skip


def load_pending(values: Any) -> None:
    """Load the bytes of every tensor in ``values`` (a pytree) that is still pending."""
    for leaf in tree_leaves(values):
        if isinstance(leaf, (PendingParameter, PendingTensor)):
            leaf.__dict__["_pending"]()


def _dispatch_pending(cls: type, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
    """Run ``func``: at once if it only queries metadata, otherwise after the pending tensors among its
    arguments are loaded.
    """
    kwargs = kwargs or {}
    name = getattr(func, "__name__", "")
    getter = name in ("__get__", "__set__")
    if name in _METADATA_QUERIES or (getter and func not in _VALUE_GETTERS):
        return managed_tensor.plain(func, args, kwargs)
    load_pending((args, kwargs))
    # Loaded arguments are plain tensors. Streamed arguments have a __torch_function__ of their own, which
    # func calls.
    return func(*args, **kwargs)


class PendingParameter(AwayParameter):
    """The class of a resident Parameter until its bytes are on the device."""

    _pending: Callable[[], None]  # loads the bytes
    __torch_function__: Any = classmethod(_dispatch_pending)

    def __deepcopy__(self, memo: dict) -> Any:
        load_pending(self)
        return self.__deepcopy__(memo)  # loading set the class back, so this calls the method of Parameter

    def __reduce_ex__(self, proto: Any) -> Any:
        load_pending(self)
        return self.__reduce_ex__(proto)


class PendingTensor(AwayTensor):
    """The class of a resident buffer until its bytes are on the device."""

    _pending: Callable[[], None]  # loads the bytes
    __torch_function__: Any = classmethod(_dispatch_pending)

    def __deepcopy__(self, memo: dict) -> Any:
        load_pending(self)
        return self.__deepcopy__(memo)

    def __reduce_ex__(self, proto: Any) -> Any:
        load_pending(self)
        return self.__reduce_ex__(proto)


def mark_pending(tensor: torch.Tensor, load: Callable[[], None]) -> None:
    """Set the class of ``tensor`` to a pending class, which calls ``load`` when an operator needs the
    tensor's values.

    ``tensor`` is a plain Parameter or Tensor that Carom made. `clear_pending` undoes this.
    """
    tensor._pending = load  # type: ignore[attr-defined]
    tensor.__class__ = PendingParameter if isinstance(tensor, nn.Parameter) else PendingTensor


def clear_pending(tensor: torch.Tensor) -> None:
    """Set the class of ``tensor`` back to Parameter or Tensor. Do nothing if ``tensor`` is not pending."""
    if isinstance(tensor, (PendingParameter, PendingTensor)):
        is_parameter = isinstance(tensor, nn.Parameter)
        tensor.__dict__.pop("_pending", None)  # an interrupted call may have removed it
        tensor.__class__ = nn.Parameter if is_parameter else torch.Tensor  # type: ignore[assignment]
