"""Defines `UnreadTensor`, the result of moving a weight to where its value waits already: ``weight.to("cpu")``.

The value of such a weight is in a file or packed (compressed losslessly), and `nn.Module.to` assigns the result to
``weight.data`` at once. Nothing is read for that. An `UnreadTensor` reads the value at the first use of any other kind
and is an ordinary tensor from then on. The value is that of the time of the move: later writes to the weight do not
change it.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from .new_parameter import MakesParameters

# Queries that are answered without the value, from a meta tensor with the weight's layout.
_QUERIES = {
    "size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "is_floating_point", "is_complex",
    "is_contiguous", "is_signed", "is_conj", "is_neg", "is_inference", "__len__", "__hash__", "get_device",
}  # fmt: skip
_GETTERS = {
    getattr(torch.Tensor, name).__get__
    for name in (
        "dtype", "shape", "ndim", "layout", "itemsize", "nbytes", "requires_grad", "is_leaf", "grad", "grad_fn",
        "is_cuda", "is_sparse", "is_quantized",
    )
}  # fmt: skip
_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
_DEVICE = torch.Tensor.device.__get__  # type: ignore[attr-defined]
_COMPATIBLE = torch._has_compatible_shallow_copy_type
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Snapshot:
    """The value of a weight at one time, which is not read yet.

    ``layout``: a meta tensor with the value's dtype, shape and strides.
    ``read``: returns the value as a new CPU tensor.
    ``current``: returns whether it is still the value of the weight.
    ``among``: where to note tensors that have to be read before the file goes, by their ids; None for no such place.
    """

    layout: torch.Tensor
    read: Callable[[], torch.Tensor]
    current: Callable[[], bool]
    among: MutableMapping[int, torch.Tensor] | None = None


class UnreadTensor(MakesParameters, torch.Tensor):
    """A tensor on the CPU whose value is read at its first use.

    ``_unread``: the value. `read_values` removes the attribute and changes the class to `torch.Tensor`.
    """

    _unread: Snapshot

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        snapshot = getattr(first, "_unread", None)
        if snapshot is not None:
            name = getattr(func, "__name__", "")
            if func == _DEVICE:
                return _CPU
            if func == _IS_META:
                return False
            if name in _QUERIES or (name == "__get__" and func in _GETTERS):
                return func(snapshot.layout, *args[1:], **kwargs)
            if stays_there(snapshot.layout.dtype, name, args, kwargs):
                return first
        return with_values(func, args, kwargs)

    def own_value(self) -> torch.Tensor | None:
        """Return the value for a new `nn.Parameter`, None if the value was read already."""
        snapshot = self.__dict__.get("_unread")
        return None if snapshot is None else snapshot.read()


def stays_there(dtype: torch.dtype, name: str, args: tuple, kwargs: dict) -> bool:
    """Return whether the operator called ``name`` moves its first argument, a value of ``dtype`` that waits in host
    memory or in a file, to the CPU, and neither converts nor has to copy it.
    """
    if name == "cpu":
        return len(args) == 1 and not kwargs
    if name != "to":
        return False
    try:
        device, wanted, _, memory_format = torch._C._nn._parse_to(*args[1:], **kwargs)
    except (RuntimeError, TypeError):  # ``copy=``, or a tensor whose device and dtype are wanted
        return False
    return device == _CPU and wanted in (None, dtype) and memory_format is None


def unread(snapshot: Snapshot) -> UnreadTensor:
    """Return a tensor that reads the value ``snapshot`` at its first use."""
    with torch.inference_mode(False), torch.no_grad():
        # No kernel of torch computes with this dtype. Code that gets the tensor past ``__torch_function__`` raises.
        one = torch.zeros(1, dtype=torch.uint8).view(torch.bits8)
        layout = snapshot.layout
        tensor = one.as_strided(layout.shape, (0,) * layout.dim())
    tensor.__class__ = UnreadTensor
    tensor._unread = snapshot  # type: ignore[attr-defined]
    if snapshot.among is not None:
        snapshot.among[id(tensor)] = tensor
    return tensor  # type: ignore[return-value]


def read_value(tensor: torch.Tensor) -> None:
    """Read the value of ``tensor``, which `unread` made. It is an ordinary tensor afterwards."""
    snapshot = tensor.__dict__.get("_unread")
    if snapshot is None:
        return
    value = snapshot.read()
    with torch._C.DisableTorchFunctionSubclass():
        tensor.data = value
    tensor.__dict__.pop("_unread", None)
    tensor.__class__ = torch.Tensor


def with_values(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Run ``func`` after the values of all `UnreadTensor` arguments were read."""
    if func == _COMPATIBLE:  # asked by `nn.Module.to` before it assigns the result
        return True
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if "_unread" in getattr(leaf, "__dict__", ())]
    for leaf in leaves:
        read_value(leaf)
    if leaves:
        return func(*args, **kwargs)
    with torch._C.DisableTorchFunctionSubclass():  # `nn.Parameter` is making a parameter
        return func(*args, **kwargs)
