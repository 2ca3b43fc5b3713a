"""From a patcher that ComfyUI made to one whose weights Carom streams, and the nodes that do it."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from comfy_api.latest import io  # type: ignore[import-not-found]

from . import host
from .patcher import KEY, strip, wear
from .policy import Settings, Way, choose_way
from .tensors import MAPPED, own_memory, settle_dtypes
from .widgets import CATEGORY, settings_from, widgets

_STATIC = "_carom_static"


def offload(patcher: Any, settings: Settings, fresh: bool = False) -> tuple[Any, Way]:
    """A clone of ``patcher`` that streams, or one that is ComfyUI's own with the reason why.

    ``fresh``: it was loaded a moment ago and nobody else has it, so its weights may be taken as they are.
    Raises UnsupportedError where streaming was asked for by name and cannot be had.
    """
    leaves = None
    if patcher.is_dynamic() and patcher.cached_patcher_init is None and not fresh:
        leaves = "its loader cannot be run again, which leaving dynamic VRAM takes"
    way = choose_way(settings.mode, torch.device(patcher.load_device).type, leaves)
    if not way.streams:
        kept = strip(patcher.clone())
        own_memory(kept.model)
        kept.attachments[KEY] = replace(settings, reason=way.reason)
        return kept, way
    if fresh and patcher.is_dynamic() and not _in_use(patcher):
        return wear(_static(patcher), settings), way
    return wear(static_clone(patcher, settings), settings), way


def static_clone(patcher: Any, settings: Settings) -> Any:
    """A clone outside dynamic VRAM, over the same weights where that is possible.

    Leaving dynamic VRAM runs the loader again, so what it gave is kept with the dynamic model: another LoRA or
    another prompt never reads the file again.
    """
    if not patcher.is_dynamic():
        return patcher.clone()
    known = patcher.model.__dict__.get(_STATIC)
    if known is None:
        known = patcher.model.__dict__[_STATIC] = wear(_loaded_again(patcher), settings)
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


def offload_vae(vae: Any, settings: Settings) -> tuple[Any, Way]:
    """The same for a VAE that was loaded a moment ago: a copy of it whose patcher streams."""
    patcher, way = offload(vae.patcher, settings, fresh=True)
    made = copy.copy(vae)
    made.patcher, made.first_stage_model = patcher, patcher.model
    return made, way


class CaromOffload(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> Any:
        return io.Schema(
            node_id="CaromOffload",
            display_name="Offload Model (Carom)",
            category=CATEGORY,
            description="Runs a model that is larger than the VRAM at nearly the speed of one that fits: what does not "
            "fit waits in RAM and comes just in time. Goes anywhere between the loader and the sampler.",
            search_aliases=["low vram", "block swap", "offload", "streaming"],
            inputs=[
                io.Model.Input("model", tooltip="Any model, from any loader, with or without LoRA."),
                *widgets(),
            ],
            outputs=[io.Model.Output(tooltip="The same model; only where its weights wait has changed.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, model: Any, **options: Any) -> Any:
        settings = settings_from(cls, options)
        patcher, way = offload(model, settings)
        if not way.streams:
            host.say(f"Carom: {way.reason}", settings.node)
        return io.NodeOutput(patcher)


class CaromOffloadCLIP(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> Any:
        return io.Schema(
            node_id="CaromOffloadCLIP",
            display_name="Offload CLIP (Carom)",
            category=CATEGORY,
            description="The same as Offload Model, for text encoders: large ones such as T5 XXL or Qwen need only a few "
            "hundred MB of VRAM.",
            search_aliases=["low vram", "text encoder", "offload"],
            inputs=[io.Clip.Input("clip", tooltip="Any text encoder, from any loader."), *widgets()],
            outputs=[
                io.Clip.Output(tooltip="The same text encoder; only where its weights wait has changed.")
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, clip: Any, **options: Any) -> Any:
        settings = settings_from(cls, options)
        streamed, way = offload_clip(clip, settings)
        if not way.streams:
            host.say(f"Carom: {way.reason}", settings.node)
        return io.NodeOutput(streamed)
