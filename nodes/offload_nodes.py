"""Nodes for use behind any loader: each returns its model, text encoder, VAE or ControlNet with weights that stream."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io  # type: ignore[import-not-found]

from .convert_patchers import offload, offload_clip, offload_control, offload_vae, told
from .widgets import CATEGORY, settings_from, widgets

SAME = "only where its weights wait has changed."


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
            description="The same as Offload Model, for text encoders: large ones such as T5 XXL or Qwen need only a few "
            "hundred MB of VRAM.",
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
            description="The same as Offload Model, for VAEs: for cards on which a large video VAE leaves too little room for "
            "the frames. Tiled decoding saves more where the frames themselves are too large.",
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
            description="The same as Offload Model, for ControlNets: goes between Load ControlNet Model and Apply ControlNet.",
            search_aliases=["low vram", "controlnet", "offload"],
            inputs=[
                io.ControlNet.Input(
                    "control_net",
                    tooltip="A ControlNet, as Load ControlNet Model gives it, before it is applied.",
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
