"""`make_room`: device memory of other models for a model of Carom, before ComfyUI frees memory for it.

ComfyUI frees the bytes that a static patcher reports. It detaches each model that holds less than these bytes. A model
of ComfyUI's dynamic VRAM that is detached loses its pinned host memory, so that its weights are read from the file
again for the next prompt. Here such a model gives up only device memory. Carom's patcher reports no bytes afterwards.
"""

from __future__ import annotations

from typing import Any

import torch

from . import comfyui_api

CPU = torch.device("cpu")  # ComfyUI frees no memory for models that compute there


def make_room(device: torch.device, nbytes: int) -> None:
    """Let models that ComfyUI loaded on ``device`` give up memory until ``nbytes`` bytes are free there.

    First static patchers give way, Carom's own among them, in ComfyUI's order. Models of dynamic VRAM then free the
    bytes that are still missing, and stay loaded: they keep their pinned host memory and copy weights to the device
    again when they compute. Must be called when ComfyUI's list of loaded models has none that is needed at the same
    time as the model that is about to be loaded.
    """
    if device == CPU or nbytes <= comfyui_api.free_bytes(device):
        return
    management = comfyui_api.management()
    dynamic = [one for one in management.current_loaded_models if _is_dynamic(one.model)]
    management.free_memory(nbytes, device, keep_loaded=dynamic)
    for one in reversed(dynamic):  # the longest unused first
        missing = nbytes - comfyui_api.free_bytes(device)
        if missing <= 0:
            return
        if one.device == device and one.model is not None:
            one.model.partially_unload(one.model.offload_device, missing)


def _is_dynamic(patcher: Any) -> bool:
    """Return whether ``patcher`` is of ComfyUI's dynamic VRAM; False for None, a patcher that was dropped."""
    return patcher is not None and patcher.is_dynamic()
