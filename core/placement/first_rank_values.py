"""Defines `follow_first_rank`: gives the tensors that ranks do not share the values that they have on the first rank.

`share_memory` and `share_files` cover frozen weights. Trainable weights, buffers, and small or unusual tensors stay in
each rank's own memory. With values of their own (another seed) the ranks would compute with a mixture of two models.
"""

from __future__ import annotations

import functools
import io
import zlib

import torch
from torch import nn

from ..common.errors import GroupError
from ..host.node_group import NodeGroup
from ..model.units import Entry, collect
from .shared_weights import agree, describe


def follow_first_rank(module: nn.Module, node: NodeGroup) -> str:
    """Copy the values of the first rank of the machine to the tensors of ``module`` that differ from them, and return a
    note for the report ("" if none differs).

    Tensors on meta, which stand for shared weights, are left out. To be called on all ranks at once. Raises GroupError on
    all ranks, naming the first difference, if the modules have other tensors or if a tensor cannot be copied.
    """
    entries = [entry for entry in collect(module) if not entry.tensor.is_meta]
    agree(node, "the module", [describe(entry) for entry in entries])
    sums = node.together("comparing values", lambda: [zlib.crc32(_bytes(entry)) for entry in entries])
    ranks = node.exchange(sums, "comparing values")
    differing = [
        entry
        for index, entry in enumerate(entries)
        if any(found[index] != ranks[0][index] for found in ranks)
    ]
    for entry in differing:
        if not _plain(entry.tensor):
            raise GroupError(
                f"carom.stream(group=...): {entry.name} ({type(entry.tensor).__name__}) has other values on another rank, "
                "and cannot be copied from there; load the same values on every rank"
            )
        node.together(f"copying {entry.name}", functools.partial(_receive, entry, node))
    if not differing:
        return ""
    others = f" and {len(differing) - 1} others" if len(differing) > 1 else ""
    return (
        f"{differing[0].name}{others} differed between the ranks, and have the values of the first rank now"
    )


def _plain(tensor: torch.Tensor) -> bool:
    """Return whether the values of ``tensor`` are bytes that can be copied."""
    return (
        type(tensor) in (torch.Tensor, nn.Parameter)
        and tensor.layout == torch.strided
        and not tensor.is_quantized
    )


def _bytes(entry: Entry) -> memoryview | bytes:
    """Return the values of a tensor in the order of its elements."""
    tensor = entry.tensor.detach()
    if _plain(entry.tensor):
        return _flat(tensor).numpy().data
    file = io.BytesIO()
    torch.save(tensor, file)
    return file.getvalue()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of ``tensor`` as contiguous uint8 on the CPU, which may be the tensor's own memory."""
    with torch.no_grad():
        resolved = tensor.detach().resolve_conj().resolve_neg()
        return resolved.cpu().contiguous().reshape(-1).view(torch.uint8)


def _receive(entry: Entry, node: NodeGroup) -> None:
    """Replace the values of a tensor by those of the first rank."""
    tensor = entry.tensor
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        values = _flat(tensor).clone()
        node.broadcast(values, f"copying {entry.name}")
        if node.rank:
            tensor.copy_(values.view(tensor.dtype).reshape(tensor.shape))
