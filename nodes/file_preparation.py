"""`prepare_file`: reads a model's file in the background and compiles the kernels that its weights need, while ComfyUI
builds the model.
"""

from __future__ import annotations

import os

import torch

from ..core.checkpoint.index import read_header
from ..core.codec import warm_up
from ..core.common.errors import CaromError
from ..core.placement.packer import LEAST
from . import comfyui_api
from .node_settings import Settings, choose_way, without_gain
from .read_ahead import read_ahead


def prepare_file(path: str, settings: Settings, device: torch.device) -> None:
    """Begin to read the file at ``path`` and to compile the kernels that unpack its weights, if the weights will stream.

    The file of a model that ComfyUI's dynamic VRAM will keep is not read: ComfyUI reads it itself, and the drive would
    deliver it twice.
    """
    if not choose_way(settings.mode, device.type).streams:
        return
    if comfyui_api.has_dynamic_vram() and _fits(path, settings, device):
        return
    read_ahead(path)
    prepare_kernels(path, settings, device)


def prepare_kernels(path: str, settings: Settings, device: torch.device) -> None:
    """Begin to compile the kernels that unpack weights of the file at ``path`` on ``device``, in the background.

    Nothing happens where weights are not packed: on other devices than GPUs, if the user chose to copy them raw, if
    the file has no large tensors or no header of safetensors, and if ComfyUI will keep so small a model.
    """
    if device.type != "cuda" or settings.codec == "raw" or _fits(path, settings, device):
        return
    if dtypes := _dtypes_of(path):
        warm_up(device, dtypes)


def _fits(path: str, settings: Settings, device: torch.device) -> bool:
    """Return whether ComfyUI will keep a model of the file's size, as `offload` decides it for the model itself."""
    if not settings.may_stand_aside:
        return False
    try:
        size = os.path.getsize(path)
    except OSError:  # the loader of the file reports the error
        return True
    room, passes = comfyui_api.room_on(device), comfyui_api.least_for_passes()
    return without_gain(size, room, passes) is not None


def _dtypes_of(path: str) -> set[torch.dtype]:
    """Return the dtypes of the large tensors of a safetensors file; none of other files."""
    try:
        return {entry.torch_dtype for entry in read_header(path)[1] if entry.nbytes >= LEAST}
    except (CaromError, OSError):  # the loader of the file reports the error
        return set()
