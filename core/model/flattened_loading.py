"""`load_inner`: loads a state dict into quantised weights whose inner tensors are registered as buffers.

The state dict has each weight under its own name. The module has no parameter of this name while the weight
is flattened (`quantized.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .tensor_flatten import SubclassSpec, WrapperSpec, flatten, is_wrapper


def load_inner(
    module: nn.Module, spec: WrapperSpec | SubclassSpec, buffers: Sequence[str], value: torch.Tensor
) -> bool:
    """Copy ``value`` into the inner tensors of a weight, as ``weight.copy_(value)`` does. Returns False, with
    nothing copied, if ``value`` does not have the weight's form.

    ``spec``: of the weight.
    ``buffers``: the names of the module's buffers that hold its inner tensors.
    """
    if isinstance(spec, SubclassSpec):
        buffers = buffers[:1]  # as with any tensor, copy_ changes no attribute
        with torch._C.DisableTorchFunctionSubclass():
            parts = [value.detach().as_subclass(torch.Tensor)] if not is_wrapper(value) else []
    elif is_wrapper(value):
        other, parts = flatten(value)
        if not isinstance(other, WrapperSpec) or _form(other) != _form(spec):
            return False
    else:
        return False
    inner: list[Any] = [module._buffers[name] for name in buffers]
    if [(part.shape, part.dtype) for part in parts] != [(part.shape, part.dtype) for part in inner]:
        return False
    with torch.no_grad():
        for target, part in zip(inner, parts, strict=True):
            target.copy_(part)
    return True


def _form(spec: WrapperSpec) -> Any:
    """Return what two wrappers must have in common, so that inner tensors of one can be copied to the other."""
    inner = tuple(part and _form(part) for part in spec.inner)
    return spec.cls, spec.names, repr(spec.context), tuple(spec.shape), spec.stride, inner
