"""`memory_needed`: the device memory that a weight's cast and its patches (LoRA) take in a pass beside the weight itself.

ComfyUI applies patches to a copy of the weight, one weight after the other, so the weight that needs most decides.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from .quantized_weights import whole_parameter

FACTOR = 2  # copies of a weight, in the dtype of the computation, that applying a patch makes; ComfyUI's own estimate


def memory_needed(patcher: Any) -> int:
    """Return the bytes that casts and patches need, for a patcher whose low-VRAM load has attached its patches.

    Where weights are patched, the result is at least the reserve that ComfyUI computed in this load, and includes the
    patches that ComfyUI moved to the device (earlier versions).
    """
    model = patcher.model
    dtype = getattr(model, "manual_cast_dtype", torch.float32)
    most, patched = 0, False
    for path, module in model.named_modules():
        if not hasattr(module, "comfy_cast_weights"):
            continue
        nbytes = 0
        for leaf in ("weight", "bias"):
            weight = whole_parameter(module, leaf)
            if weight is not None:
                patches = patcher.patches.get(f"{path}.{leaf}", ())
                nbytes += _of_weight(weight, weight.dtype if dtype is None else dtype, patches)
                patched = patched or bool(patches)
        most = max(most, nbytes)
    if not patched:
        return most
    reserve = int(getattr(model, "model_offload_buffer_memory", 0))
    return max(most, reserve) + int(model.model_loaded_weight_memory)


def _of_weight(weight: torch.Tensor, dtype: torch.dtype, patches: Any) -> int:
    """Return the bytes for one weight. ``dtype``: of the computation."""
    result = weight.numel() * dtype.itemsize
    cast = result if weight.dtype != dtype else 0
    if not patches:
        return cast
    tensors = [leaf for leaf in _tensors(patches) if leaf.is_floating_point()]
    largest = max((leaf.numel() * dtype.itemsize for leaf in tensors), default=0)
    return weight.numel() * weight.itemsize + cast + FACTOR * result + 2 * largest


def _tensors(patches: Any) -> list[torch.Tensor]:
    """Return the tensors of patches: those in tuples, and those in the adapters of newer versions."""
    found = []
    for leaf in tree_leaves(list(patches)):
        inner = getattr(leaf, "weights", ())
        found += [part for part in (leaf, *tree_leaves(inner)) if isinstance(part, torch.Tensor)]
    return found
