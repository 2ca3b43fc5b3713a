"""The dtypes that ComfyUI intends for weights on the device: `settle_dtypes` converts to them, `meant_bytes` counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .inference_tensors import is_plain
from .spilled_batches import in_batches

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
WIDER = (torch.float16, torch.bfloat16, torch.float32)  # have each value of `FLOAT8`
SMALL = 16 << 10  # bytes; ComfyUI's dynamic patcher converts the weights of larger modules as a whole


@torch.inference_mode(False)
@torch.no_grad()
def settle_dtypes(module: nn.Module, ram: str | None = None, casts: bool = False) -> None:
    """Convert weights to the dtype that ComfyUI intends for the device, where the file's dtype differs.

    ComfyUI's dynamic patcher converts weights on the way to the device. Its static patcher expects weights that were
    converted during loading. Modules of at most `SMALL` bytes are skipped: ComfyUI casts their weights at every use.
    ``ram``: the value of the node's ``ram`` widget. Converted weights of a model that exceeds it are written to disk
    (see `in_batches`). None: they stay in memory. ``casts``: whether ComfyUI casts the weights at each use in any case,
    as it does in text encoders. The float8 weights of their linear layers then stay as they are. Each float8 value is a
    value of the wider dtypes too, so one cast gives the bits of two, and the weights take half the bytes or less.
    """
    found = list(_differing(module, casts))
    nbytes = sum(table[name].numel() * meant.itemsize for table, name, meant in found)
    whole = nbytes + sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
    whole -= sum(table[name].nbytes for table, name, _ in found)
    made = (
        (str(number), table[name].detach().to(meant)) for number, (table, name, meant) in enumerate(found)
    )
    for (table, name, _), new in zip(found, in_batches(made, nbytes, whole, ram).values(), strict=True):
        is_parameter = isinstance(table[name], nn.Parameter)
        table[name] = nn.Parameter(new, requires_grad=False) if is_parameter else new


def _differing(module: nn.Module, casts: bool) -> Iterator[tuple[dict[str, Any], str, torch.dtype]]:
    """Yield (table, name, intended dtype) of the weights to convert. ``casts``: as for `settle_dtypes`."""
    for part in module.modules():
        stays = (
            FLOAT8 if casts and isinstance(part, nn.Linear) and hasattr(part, "comfy_cast_weights") else ()
        )
        small = hasattr(part, "comfy_cast_weights") and _bytes(part) <= SMALL
        tables: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for table in tables:
            for name, tensor in table.items():
                meant = getattr(part, f"{name}_comfy_model_dtype", None)
                if tensor is None or meant is None or tensor.dtype == meant or tensor.is_meta or small:
                    continue
                if tensor.dtype in stays and meant in WIDER:
                    continue
                if is_plain(tensor) and tensor.is_floating_point() and meant.is_floating_point:
                    yield table, name, meant


def _bytes(module: nn.Module) -> int:
    return sum(t.numel() * t.element_size() for t in module.parameters(recurse=False))


def meant_bytes(module: nn.Module) -> int:
    """Return the bytes of the weights in the dtypes in which ComfyUI's dynamic patcher has them on the device."""
    found: dict[int, int] = {}
    for part in module.modules():
        for name, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is not None and is_plain(tensor):
                meant = getattr(part, f"{name}_comfy_model_dtype", None) or tensor.dtype
                found[id(tensor)] = tensor.numel() * meant.itemsize
            elif tensor is not None:
                inner = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else ()
                found[id(tensor)] = sum(getattr(tensor, one).nbytes for one in inner) or tensor.nbytes
    return sum(found.values())
