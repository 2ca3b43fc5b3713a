"""Nodes for use behind any loader: each returns its model, text encoder, VAE or ControlNet with weights that stream."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io  # type: ignore[import-not-found]

from .convert_patchers import offload, offload_clip, offload_control, offload_vae, told
from .widgets import CATEGORY, settings_from, widgets

SAME = "its weights stream if they do not fit."


class CaromOffload(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> Any:
        return io.Schema(
            node_id="CaromOffload",
            display_name="Offload Model (Carom)",
            category=CATEGORY,
            description="Runs a model that is larger than the VRAM. Weights that do not fit stay in RAM and "
            "are copied to the card just before they are needed. Put the node anywhere between "
            "the loader and the sampler.",
            search_aliases=["low vram", "block swap", "offload", "streaming"],
            inputs=[
                io.Model.Input("model", tooltip="Any model, from any loader, with or without LoRA."),
                *widgets(),
            ],
            outputs=[io.Model.Output(tooltip=f"The same model; {SAME}")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, model: Any, **options: Any) -> Any:
        settings = settings_from(cls, options)
        return io.NodeOutput(told(offload(model, settings), settings))


class CaromOffloadCLIP(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> Any:
        return io.Schema(
            node_id="CaromOffloadCLIP",
            display_name="Offload CLIP (Carom)",
            category=CATEGORY,
            description="The same as Offload Model, for text encoders such as T5 XXL or Qwen.",
            search_aliases=["low vram", "text encoder", "offload"],
            inputs=[io.Clip.Input("clip", tooltip="Any text encoder, from any loader."), *widgets()],
            outputs=[io.Clip.Output(tooltip=f"The same text encoder; {SAME}")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, clip: Any, **options: Any) -> Any:
        settings = settings_from(cls, options)
        return io.NodeOutput(told(offload_clip(clip, settings), settings))


class CaromOffloadVAE(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> Any:
        return io.Schema(
            node_id="CaromOffloadVAE",
            display_name="Offload VAE (Carom)",
            category=CATEGORY,
            description="The same as Offload Model, for large video VAEs that leave too little VRAM for the "
            "frames. If the frames themselves need too much VRAM, tiled decoding saves more.",
            search_aliases=["low vram", "vae", "offload"],
            inputs=[io.Vae.Input("vae", tooltip="Any VAE, from any loader."), *widgets()],
            outputs=[io.Vae.Output(tooltip=f"The same VAE; {SAME}")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, vae: Any, **options: Any) -> Any:
        settings = settings_from(cls, options)
        return io.NodeOutput(told(offload_vae(vae, settings), settings))


class CaromOffloadControlNet(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> Any:
        return io.Schema(
            node_id="CaromOffloadControlNet",
            display_name="Offload ControlNet (Carom)",
            category=CATEGORY,
            description="The same as Offload Model, for ControlNets. Put the node between Load ControlNet "
            "Model and Apply ControlNet.",
            search_aliases=["low vram", "controlnet", "offload"],
            inputs=[
                io.ControlNet.Input(
                    "control_net",
                    tooltip="A ControlNet from Load ControlNet Model, before Apply ControlNet.",
                ),
                *widgets(),
            ],
            outputs=[io.ControlNet.Output(tooltip=f"The same ControlNet; {SAME}")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, control_net: Any, **options: Any) -> Any:
        settings = settings_from(cls, options)
        return io.NodeOutput(told(offload_control(control_net, settings), settings))
