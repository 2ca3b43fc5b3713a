"""From a patcher that ComfyUI made to one whose weights Carom streams; the same for what holds a patcher."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ..core.common.errors import UnsupportedError
from . import comfyui_api
from .inference_tensors import MAPPED, own_memory, settle_dtypes, structure_of
from .node_settings import Settings, Way, choose_way
from .patcher import KEY, strip, wear
from .streaming import streaming_of

_STATIC = "_carom_static"


def offload(
    patcher: Any, settings: Settings, fresh: bool = False, again: Callable[[Any], Any] | None = None
) -> tuple[Any, Way]:
    """A clone of ``patcher`` that streams, or one that is ComfyUI's own with the reason why.

    ``fresh``: it was loaded a moment ago and nobody else has it, so its weights may be taken as they are. ``again``: makes
    a dynamic patcher over weights of its own out of ``patcher``, whose loader cannot be run again.
    Raises UnsupportedError where streaming was asked for by name and cannot be had, BudgetError where ``settings`` allow
    less than the least budget that works.
    """
    leaves = None
    if patcher.is_dynamic() and patcher.cached_patcher_init is None and not fresh and again is None:
        leaves = "its loader cannot be run again, which leaving dynamic VRAM takes"
    way = choose_way(settings.mode, torch.device(patcher.load_device).type, leaves)
    if not way.streams:
        kept = strip(patcher.clone())
        own_memory(kept.model)
        kept.attachments[KEY] = replace(settings, reason=way.reason)
        return kept, way
    taken = fresh and patcher.is_dynamic() and not _in_use(patcher)
    ours = wear(_static(patcher) if taken else static_clone(patcher, settings, again), settings)
    streaming_of(ours.model).check(ours.load_device, settings)
    return ours, way


def static_clone(patcher: Any, settings: Settings, again: Callable[[Any], Any] | None = None) -> Any:
    """A clone outside dynamic VRAM, over the same weights where that is possible.

    Leaving dynamic VRAM runs the loader again, so what it gave is kept with the dynamic model: another LoRA or
    another prompt never reads the file again.
    """
    if not patcher.is_dynamic():
        return patcher.clone()
    known = patcher.model.__dict__.get(_STATIC)
    if known is None:
        known = patcher.model.__dict__[_STATIC] = wear(
            _loaded_again(patcher) if again is None else _static(again(patcher)), settings
        )
        known.parent = None  # it lives in the parent's model: no circle
    made = patcher.clone(disable_dynamic=True, model_override=known.get_clone_model_override())
    # When it goes, ComfyUI looks to its parent for the model that is still loaded: that is the static one's.
    made.parent = known
    return made


def _loaded_again(patcher: Any) -> Any:
    """A static patcher over weights of its own, from the file that ``patcher``'s are from."""
    load, arguments, *which = patcher.cached_patcher_init
    again = load(*arguments)
    if which:
        again = again[which[0]]
    if not again.is_dynamic() or _in_use(again):
        return patcher.clone(disable_dynamic=True)
    return patcher.clone(disable_dynamic=True, model_override=_static(again).get_clone_model_override())


def _static(patcher: Any) -> Any:
    """A static patcher over the model of a dynamic one that nobody else has.

    ComfyUI's dynamic loaders leave the weights in the mapped file, where ours reads them with every core; its static
    ones copy them first, on one (6.6 s for 9.4 GiB on an H200's host, and host memory for as much).
    """
    static = patcher.clone(disable_dynamic=True, model_override=patcher.get_clone_model_override())
    static.parent = None
    static.model.__dict__[MAPPED] = True
    settle_dtypes(static.model)
    return static


def _in_use(patcher: Any) -> bool:
    """Whether ComfyUI has begun to load it."""
    return getattr(patcher.model, "current_weight_patches_uuid", None) is not None


def offload_clip(clip: Any, settings: Settings, fresh: bool = False) -> tuple[Any, Way]:
    """The same for a CLIP: a clone of it whose patcher streams."""
    patcher, way = offload(clip.patcher, settings, fresh)
    made = clip.clone()
    made.patcher = patcher
    if patcher.model is not clip.patcher.model:
        made.cond_stage_model = patcher.model
    return made, way


def offload_vae(vae: Any, settings: Settings, fresh: bool = False) -> tuple[Any, Way]:
    """The same for a VAE: a copy of it whose patcher streams."""
    patcher, way = offload(vae.patcher, settings, fresh)
    made = copy.copy(vae)
    made.patcher, made.first_stage_model = patcher, patcher.model
    return made, way


def offload_control(control: Any, settings: Settings) -> tuple[Any, Way]:
    """The same for a ControlNet: a copy of it whose patcher streams.

    What has no patcher (T2I adapters, Control-LoRA, which is made anew in each run) is returned as it is with the reason;
    raises UnsupportedError there where streaming was asked for by name.
    """
    patcher = getattr(control, "control_model_wrapped", None)
    if patcher is None:
        reason = f"a {type(control).__name__} keeps its weights itself"
        if settings.mode == "stream":
            raise UnsupportedError(
                f"this ControlNet cannot be streamed: {reason}; set mode to auto or native"
            )
        return control, Way(False, f"{reason}; ComfyUI keeps the weights")
    ours, way = offload(patcher, settings, again=_copied)
    made = control.copy()
    made.control_model_wrapped, made.control_model = ours, ours.model
    return made, way


def _copied(patcher: Any) -> Any:
    """A patcher over a copy of a ControlNet: ComfyUI's loaders of those leave no way to load the file again."""
    if _in_use(patcher):
        comfyui_api.unload(patcher)  # small weights are on the device, theirs are in its backup
    made = structure_of(patcher.model)
    return type(patcher)(made, load_device=patcher.load_device, offload_device=patcher.offload_device)


def told(result: tuple[Any, Way], settings: Settings) -> Any:
    """What was made. Where it does not stream, the node says why."""
    made, way = result
    if not way.streams:
        comfyui_api.say(f"Carom: {way.reason}", settings.node)
    return made
