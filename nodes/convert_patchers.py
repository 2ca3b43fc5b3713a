"""Conversion of ComfyUI's patchers, CLIPs, VAEs and ControlNets to ones whose weights Carom streams."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch

from ..core.common.errors import UnsupportedError
from . import comfyui_api
from .file_preparation import prepare_kernels
from .inference_tensors import MAPPED, own_memory, structure_of
from .meant_dtypes import meant_bytes, settle_dtypes
from .node_settings import Settings, Way, choose_way, without_gain
from .patcher import KEY, strip, wear
from .read_ahead import read_ahead
from .streaming import known_streaming, streaming_of

_STATIC = "_carom_static"


def offload(patcher: Any, settings: Settings, fresh: bool = False) -> tuple[Any, Way]:
    """Return a clone of ``patcher`` whose weights stream, or a clone whose weights ComfyUI keeps, and the decision.

    ``fresh``: ``patcher`` was just loaded and has no other user, so the clone may take over its weights.
    Raises UnsupportedError if mode is "stream" and the model cannot be streamed, BudgetError if ``settings`` allow less
    than the least budget that works.
    """
    way = choose_way(settings.mode, torch.device(patcher.load_device).type)
    if way.streams and settings.may_stand_aside and patcher.is_dynamic():
        room, passes = comfyui_api.room_on(patcher.load_device), comfyui_api.least_for_passes()
        way = without_gain(meant_bytes(patcher.model), room, passes) or way
    if not way.streams:
        return _kept(patcher, settings, way)
    if fresh:
        patcher.model.__dict__[MAPPED] = True
    taken = fresh and patcher.is_dynamic() and not _in_use(patcher)
    try:
        static = _static(patcher, settings.ram) if taken else static_clone(patcher, settings)
    except UnsupportedError as error:
        if settings.mode == "stream":
            raise
        return _kept(patcher, settings, Way(False, f"{error}; ComfyUI keeps the weights"))
    ours = wear(static, settings)
    streaming = streaming_of(ours.model)
    streaming.files = files_of(patcher)
    if patcher.is_dynamic():
        for path in streaming.files:
            read_ahead(path)
    for path in streaming.files:
        prepare_kernels(path, settings, torch.device(ours.load_device))
    streaming.check(ours.load_device, settings)
    return ours, way


def _kept(patcher: Any, settings: Settings, way: Way) -> tuple[Any, Way]:
    """Return a clone of ``patcher`` whose weights ComfyUI keeps for the reason that ``way`` tells, and ``way``."""
    kept = strip(patcher.clone())
    known = known_streaming(kept.model)
    if known is None or known.session is None:
        own_memory(kept.model)
    kept.attachments[KEY] = replace(settings, reason=way.reason)
    return kept, way


def files_of(patcher: Any) -> tuple[str, ...]:
    """Return the paths of the files from which ComfyUI loaded the model, as far as its patcher records them."""
    recorded = getattr(patcher, "cached_patcher_init", None)
    first = recorded[1][0] if recorded and recorded[1] else ()
    paths = [first] if isinstance(first, str) else first
    return tuple(path for path in paths if isinstance(path, str)) if isinstance(paths, (list, tuple)) else ()


def static_clone(patcher: Any, settings: Settings) -> Any:
    """Return a clone of ``patcher`` outside ComfyUI's dynamic VRAM, over the same weights.

    The model of a dynamic patcher is copied without its weights, so that no file is read and both can be used. The
    static patcher is stored on the dynamic model, so that another LoRA or another prompt copies nothing. Raises
    UnsupportedError for a model that cannot be copied.
    """
    if not patcher.is_dynamic():
        return patcher.clone()
    known = patcher.model.__dict__.get(_STATIC)
    if known is None:
        known = patcher.model.__dict__[_STATIC] = wear(_static(_copied(patcher), settings.ram), settings)
        known.parent = None  # the parent's model holds `known`: a reference back would be a cycle
    made = patcher.clone(disable_dynamic=True, model_override=known.get_clone_model_override())
    # When the clone is deleted, ComfyUI looks up the loaded model at the clone's parent: the static patcher has it.
    made.parent = known
    return made


def _static(patcher: Any, ram: str | None = None) -> Any:
    """Return a static patcher over the model of the dynamic ``patcher``, which must have no other user.

    ComfyUI's dynamic loaders leave the weights in the memory-mapped file, and Carom reads them with all CPU cores.
    ComfyUI's static loaders copy the weights first, on one core (6.6 s for 9.4 GiB on the host of an H200), which needs
    host memory of the same size. ``ram``: as for `settle_dtypes`.
    """
    static = patcher.clone(disable_dynamic=True, model_override=patcher.get_clone_model_override())
    static.parent = None
    static.model.__dict__[MAPPED] = True
    streaming_of(static.model).was_dynamic = True
    settle_dtypes(static.model, ram, getattr(patcher, "force_cast_weights", False))
    return static


def _in_use(patcher: Any) -> bool:
    """Return whether ComfyUI has begun to load the model of ``patcher`` to a device."""
    return getattr(patcher.model, "current_weight_patches_uuid", None) is not None


def offload_clip(clip: Any, settings: Settings, fresh: bool = False) -> tuple[Any, Way]:
    """Return a clone of ``clip`` with the patcher that `offload` makes, and the decision. Raises as `offload` does."""
    patcher, way = offload(clip.patcher, settings, fresh)
    made = clip.clone()
    made.patcher = patcher
    if patcher.model is not clip.patcher.model:
        made.cond_stage_model = patcher.model
    return made, way


def offload_vae(vae: Any, settings: Settings, fresh: bool = False) -> tuple[Any, Way]:
    """Return a copy of ``vae`` with the patcher that `offload` makes, and the decision. Raises as `offload` does."""
    patcher, way = offload(vae.patcher, settings, fresh)
    made = copy.copy(vae)
    made.patcher, made.first_stage_model = patcher, patcher.model
    return made, way


def offload_control(control: Any, settings: Settings) -> tuple[Any, Way]:
    """Return a copy of the ControlNet ``control`` with the patcher that `offload` makes, and the decision.

    A control model without a patcher is returned unchanged, with the reason. T2I adapters have no patcher, nor has
    Control-LoRA, whose model is made anew in each run. Raises as `offload` does, and UnsupportedError for a control
    model without a patcher if mode is "stream".
    """
    patcher = getattr(control, "control_model_wrapped", None)
    if patcher is None:
        reason = f"a {type(control).__name__} keeps its weights itself"
        if settings.mode == "stream":
            raise UnsupportedError(
                f"this ControlNet cannot be streamed: {reason}; set mode to auto or native"
            )
        return control, Way(False, f"{reason}; ComfyUI keeps the weights")
    ours, way = offload(patcher, settings)
    made = control.copy()
    made.control_model_wrapped, made.control_model = ours, ours.model
    return made, way


def _copied(patcher: Any) -> Any:
    """Return a dynamic patcher over a copy of the model of ``patcher`` that shares its weights.

    Raises UnsupportedError if the model cannot be copied.
    """
    if _in_use(patcher):
        comfyui_api.unload(patcher)  # small weights are on the device, and their originals in a backup
    try:
        made = structure_of(patcher.model)
    except Exception as error:
        raise UnsupportedError(
            f"this model cannot be copied, which leaving dynamic VRAM takes ({type(error).__name__}: {error})"
        ) from error
    copied = type(patcher)(made, load_device=patcher.load_device, offload_device=patcher.offload_device)
    copied.force_cast_weights = getattr(patcher, "force_cast_weights", False)
    return copied


def told(result: tuple[Any, Way], settings: Settings) -> Any:
    """Return the object in ``result``. If its weights do not stream, show the reason on the node."""
    made, way = result
    if not way.streams:
        comfyui_api.say(f"Carom: {way.reason}", settings.node)
    return made
