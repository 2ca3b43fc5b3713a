"""Finds weights that torchao saved in a checkpoint, and makes them with its own function.

The format is torchao's (`torchao.prototype.safetensors`), which transformers writes too. The tensors inside a weight
`layer.weight` are saved as `layer._weight_qdata`, `layer._weight_scale` and so on. The file's metadata has the entry
`tensor_names` (a JSON list) and, for each weight, its class and the names of its tensors.
"""

from __future__ import annotations

import functools
import importlib
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..common.errors import UnsupportedError, WeightsError
from .header import show
from .index import Index
from .quantised_weights import MadeWeight, QuantisedWeight, require_shape, require_size

_NAMES = "tensor_names"  # the metadata entry that lists all saved tensors
_SUPPORT = "torchao.prototype.safetensors.safetensors_support"
_PER_BLOCK = ("scale", "zero_point")  # parts with one element for each block of the weight


def find(index: Index) -> Iterator[QuantisedWeight]:
    """Yield the weights of ``index`` that torchao quantised. Raises WeightsError for damaged metadata."""
    metadata: dict[str, str] = {}
    names: list[str] = []
    for part in index.metadata:
        metadata.update(part)
        if _NAMES in part:
            found = _parse(part[_NAMES], _NAMES, index)
            names += found if isinstance(found, list) else []
    for name in dict.fromkeys(name for name in names if isinstance(name, str) and name in metadata):
        info = _parse(metadata[name], name, index)
        parts = info.get("_tensor_data_names") if isinstance(info, dict) else None
        if parts is None:
            continue  # a tensor that is not quantised
        head, _, leaf = name.rpartition(".")
        if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts) or not head:
            raise WeightsError(f"{index.path}: the metadata of {show(name)} is damaged; save the file again")
        stored = {part: f"{head}._{leaf}_{part}" for part in parts}
        yield QuantisedWeight(
            name,
            f"torchao {show(str(info.get('_type')))}",
            {part: index.entries.get(tensor) for part, tensor in stored.items()},
            functools.partial(_make, name, metadata[name], stored),
        )


def _parse(text: str, name: str, index: Index) -> Any:
    """Return the value of a metadata entry. Raises WeightsError if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WeightsError(
            f"{index.path}: the metadata of {show(name)} is damaged; save the file again"
        ) from error


def _make(
    saved: str,
    text: str,
    stored: Mapping[str, str],
    module: nn.Module,
    name: str,
    views: Mapping[str, torch.Tensor],
) -> MadeWeight:
    """Make the tensor that torchao saved as ``saved``; ``text``: its metadata, ``stored``: the names of its parts."""
    try:
        support = importlib.import_module(_SUPPORT)
    except ImportError as error:
        raise UnsupportedError(
            f"reading it needs a torchao with {_SUPPORT}; install torchao ({error})"
        ) from error
    tensors = {stored[part]: view for part, view in views.items()}
    made, _ = support.unflatten_tensor_state_dict(tensors, {_NAMES: json.dumps([saved]), saved: text})
    parameter = module._parameters[name]
    assert parameter is not None
    weight: torch.Tensor = made[saved]
    require_shape(tuple(weight.shape), module, parameter)
    if weight.dtype != parameter.dtype:
        raise WeightsError(
            f"the file's weight stands for {weight.dtype}, the module's is {parameter.dtype}; build the module as the file is"
        )
    block = getattr(weight, "block_size", None)
    if isinstance(block, (list, tuple)) and len(block) == weight.ndim:
        blocks = math.prod(-(-size // of) for size, of in zip(weight.shape, block, strict=True))
        for part in _PER_BLOCK:
            if part in views:
                require_size(part, views[part].numel(), blocks)
    return MadeWeight(nn.Parameter(weight, requires_grad=False))
