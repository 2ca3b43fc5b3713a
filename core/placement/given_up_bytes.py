"""Lets the model's tensor object have no bytes of its own, while its value lies elsewhere (packed, or in a store)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# The floating point dtype with the fewest kernels that this version of torch has.
_NO_KERNELS_FLOAT: torch.dtype = getattr(torch, "float4_e2m1fn_x2", torch.float8_e5m2fnuz)
# Makes the storage of a tensor raise an error where its address is asked for.
_refuse_address: Callable[[torch.Tensor], Any] = getattr(
    torch._C, "_set_throw_on_mutable_data_ptr", lambda tensor: None
)


def show_one(tensor: torch.Tensor, layout: torch.Tensor, one: torch.Tensor) -> None:
    """Let ``tensor`` be the single element of ``one``, expanded to the shape of ``layout``."""
    with torch._C.DisableTorchFunctionSubclass():  # whichever class the tensor has now
        tensor.data = one.as_strided(layout.shape, (0,) * layout.dim())


def refuse_kernels(tensor: torch.Tensor, layout: torch.Tensor) -> None:
    """Give up the memory of ``tensor``, and let it refuse kernels that are given the tensor itself.

    ``layout``: a meta tensor with the weight's dtype, shape and strides. Code that torch calls without
    ``__torch_function__`` (C++ extensions, DLPack) would otherwise compute with the single element. No kernel of torch
    computes with the dtype of the tensor, and its storage gives no address.
    """
    with torch.inference_mode(False), torch.no_grad():
        # A tensor that requires a gradient must have a floating point dtype. In those with 8 bits, 0x80 is NaN.
        dtype = _NO_KERNELS_FLOAT if tensor.requires_grad else torch.bits8
        one = torch.full((1,), 0x80, dtype=torch.uint8).view(dtype)
        _refuse_address(one)
        show_one(tensor, layout, one)
