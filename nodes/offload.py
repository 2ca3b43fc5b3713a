"""From a patcher that ComfyUI made to one whose weights Carom streams, and the nodes that do it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from comfy_api.latest import io  # type: ignore[import-not-found]

from . import host
from .patcher import KEY, strip, wear
from .policy import Settings, Way, choose_way
from .widgets import CATEGORY, settings_from, widgets

_STATIC = "_carom_static"


def offload(patcher: Any, settings: Settings) -> tuple[Any, Way]:
    """A clone of ``patcher`` that streams, or one that is ComfyUI's own with the reason why.

    Raises UnsupportedError where streaming was asked for by name and cannot be had.
    """
    leaves = None
    if patcher.is_dynamic() and patcher.cached_patcher_init is None:
        leaves = "its loader cannot be run again, which leaving dynamic VRAM takes"
    way = choose_way(settings.mode, torch.device(patcher.load_device).type, leaves)
    if not way.streams:
        kept = strip(patcher.clone())
        kept.attachments[KEY] = replace(settings, reason=way.reason)
        return kept, way
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
        known = patcher.model.__dict__[_STATIC] = wear(patcher.clone(disable_dynamic=True), settings)
        known.parent = None  # it lives in the parent's model: no circle
    copy = patcher.clone(disable_dynamic=True, model_override=known.get_clone_model_override())
    # When the copy goes, ComfyUI looks to its parent for the model that is still loaded: that is the static one's.
    copy.parent = known
    return copy


def offload_clip(clip: Any, settings: Settings) -> tuple[Any, Way]:
    """The same for a CLIP: a clone of it whose patcher streams."""
    patcher, way = offload(clip.patcher, settings)
    copy = clip.clone()
    copy.patcher = patcher
    if patcher.model is not clip.patcher.model:
        copy.cond_stage_model = patcher.model
    return copy, way


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
        copy, way = offload_clip(clip, settings)
        if not way.streams:
            host.say(f"Carom: {way.reason}", settings.node)
        return io.NodeOutput(copy)
