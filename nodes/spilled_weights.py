"""`spill_weights`: moves the weights of a model that are in no file from RAM to ComfyUI's folder of temporary files."""

from __future__ import annotations

import logging

import torch
from torch import nn

from ..core.checkpoint.spill import spill
from ..core.common.errors import CaromError
from ..core.host.arena import return_freed_memory
from ..core.host.page_release import MappedFiles
from . import comfyui_api

logger = logging.getLogger("carom")
LEAST = 4096  # bytes; smaller weights stay in memory


def spill_weights(root: nn.Module) -> None:
    """Let the weights of ``root`` that are in no mapped file be views of a spill file, which is deleted with them.

    They stay in RAM, and a warning is logged, if the file cannot be written.
    """
    weights = [tensor for tensor in weights_in_memory(root) if _may_spill(tensor)]
    folder = comfyui_api.spill_folder(sum(tensor.nbytes for tensor in weights)) if weights else "auto"
    if folder == "auto":
        return
    try:
        for tensor, spilled in zip(weights, spill(weights, folder), strict=True):
            tensor.data = spilled.view
    except CaromError as error:
        logger.warning("Carom: weights of a model that does not run stay in RAM: %s", error)
    return_freed_memory()


def weights_in_memory(root: nn.Module) -> list[torch.Tensor]:
    """Return the plain weights of ``root`` that take RAM: those on the CPU that are in no mapped file."""
    files = MappedFiles()
    found = {id(tensor): tensor for tensor in (*root.parameters(), *root.buffers()) if is_on_host(tensor)}
    return [tensor for tensor in found.values() if not files.contains(tensor.data_ptr(), tensor.nbytes)]


def _may_spill(tensor: torch.Tensor) -> bool:
    """Return whether spilling ``tensor`` gives memory back: it has memory of its own."""
    alone = tensor.untyped_storage().nbytes() == tensor.nbytes
    return alone and tensor.nbytes >= LEAST and not tensor.is_inference()


def is_on_host(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is a plain tensor or parameter on the CPU."""
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.device.type == "cpu"
