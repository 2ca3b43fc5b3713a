"""What a resident tensor of a file is until its bytes are on the device: a tensor that brings them when its value is wanted.

What only asks for shape, dtype or device gets its answer without.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from . import ops
from .away import AwayParameter, AwayTensor

if TYPE_CHECKING:
    from .disk_residents import Residents
    from .loads import Load

_ASKED = {
    "size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "is_floating_point", "is_complex",
    "is_contiguous", "is_signed", "storage_offset", "__len__", "__hash__", "requires_grad_", "register_hook",
    "is_pinned", "register_post_accumulate_grad_hook", "get_device", "is_inference", "has_names", "_is_view",
    "is_same_size", "is_shared", "is_conj", "is_neg",
}  # fmt: skip
_WITH_VALUES = {
    *ops._VIEW_GETTERS, torch.Tensor.imag.__get__, torch.Tensor.data.__set__, torch.Tensor._base.__get__,  # type: ignore[attr-defined,union-attr]
}  # fmt: skip


def bring_all(values: Any) -> None:
    """Bring the bytes of every tensor in ``values`` that is not there yet."""
    for leaf in tree_leaves(values):
        if isinstance(leaf, (PendingParameter, PendingTensor)):
            residents, load = leaf._pending
            residents.bring(load)


def _function(cls: type, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
    kwargs = kwargs or {}
    name = getattr(func, "__name__", "")
    getter = name in ("__get__", "__set__")
    if name in _ASKED or (getter and func not in _WITH_VALUES):
        return ops.plain(func, args, kwargs)
    bring_all((args, kwargs))
    return func(*args, **kwargs)  # plain tensors by now, or such as stream


class PendingParameter(AwayParameter):
    """The class that a resident Parameter wears until its bytes are on the device."""

    _pending: tuple[Residents, Load]
    __torch_function__: Any = classmethod(_function)

    def __deepcopy__(self, memo: dict) -> Any:
        bring_all(self)
        return self.__deepcopy__(memo)  # of the class that it has now

    def __reduce_ex__(self, proto: Any) -> Any:
        bring_all(self)
        return self.__reduce_ex__(proto)


class PendingTensor(AwayTensor):
    """The same for buffers."""

    _pending: tuple[Residents, Load]
    __torch_function__: Any = classmethod(_function)

    def __deepcopy__(self, memo: dict) -> Any:
        bring_all(self)
        return self.__deepcopy__(memo)

    def __reduce_ex__(self, proto: Any) -> Any:
        bring_all(self)
        return self.__reduce_ex__(proto)


def wear(tensor: torch.Tensor, residents: Residents, load: Load) -> None:
    """``tensor`` (a plain Parameter or Tensor of ours) has no value before ``load`` is here."""
    tensor._pending = (residents, load)  # type: ignore[attr-defined]
    tensor.__class__ = PendingParameter if isinstance(tensor, nn.Parameter) else PendingTensor


def unwear(tensor: torch.Tensor) -> None:
    """``tensor`` is plain again."""
    if isinstance(tensor, (PendingParameter, PendingTensor)):
        is_parameter = isinstance(tensor, nn.Parameter)
        del tensor._pending
        tensor.__class__ = nn.Parameter if is_parameter else torch.Tensor  # type: ignore[assignment]
