"""Loader nodes that replace ComfyUI's own: same files and options, but the weights stream from the start."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from comfy_api.latest import io  # type: ignore[import-not-found]

from . import comfyui_api
from .convert_patchers import offload, offload_clip, offload_vae, told
from .file_preparation import prepare_file
from .host_allocator import give_large_blocks_back
from .inference_tensors import MAPPED, own_memory
from .loader_options import (
    dtype_options,
    embedding_folders,
    file_names,
    file_state,
    loaded,
    path_of,
    stock_node,
    stock_options,
)
from .mapped_loading import mapped_weights
from .node_settings import Settings, choose_way
from .packed_loading import Unpacking
from .widgets import CATEGORY, device_widget, settings_from, widgets

NO_FILE = "none"
VAES = ("comfyui", "stream")
MODEL, CLIP, VAE = "The model, for a sampler.", "The text encoder, for prompts.", "The VAE, for images."


@contextlib.contextmanager
def reading(settings: Settings, device: torch.device) -> Iterator[Unpacking]:
    """Context for loading: files of ``carom pack`` are decoded, and weights that will stream stay views of their file."""
    streams = choose_way(settings.mode, device.type).streams
    if streams and device.type == "cpu":
        give_large_blocks_back()  # before ComfyUI makes the modules
    unpacking = Unpacking(settings.ram if streams else None)
    with mapped_weights(settings.ram) if streams else contextlib.nullcontext(), unpacking.active():
        yield unpacking


def chosen_files(first: str, options: dict[str, Any]) -> list[str]:
    """Return the names of the files that the widgets of `CaromLoadCLIP` name."""
    names = [first, *(options.get(f"clip_name{number}") or NO_FILE for number in (2, 3, 4))]
    return [name for name in names if name != NO_FILE]


class CaromLoadDiffusionModel(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> Any:
        return io.Schema(
            node_id="CaromLoadDiffusionModel",
            display_name="Load Diffusion Model (Carom)",
            category=CATEGORY,
            description="Replaces Load Diffusion Model. Weights that do not fit into the VRAM stream from "
            "RAM.",
            search_aliases=["unet loader", "low vram", "flux", "wan"],
            inputs=[
                io.Combo.Input(
                    "unet_name",
                    options=file_names("diffusion_models"),
                    tooltip="A file of models/diffusion_models.",
                ),
                io.Combo.Input(
                    "weight_dtype",
                    options=stock_options("UNETLoader", "weight_dtype"),
                    default="default",
                    tooltip="The precision of the weights. default: that of the file. The other values are "
                    "those of ComfyUI's own loader.",
                ),
                *widgets(device_widget()),
            ],
            outputs=[io.Model.Output(tooltip=MODEL)],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def fingerprint_inputs(cls, unet_name: str, **options: Any) -> Any:
        return file_state("diffusion_models", unet_name)

    @classmethod
    def execute(cls, unet_name: str, weight_dtype: str = "default", **options: Any) -> Any:
        import comfy.sd  # type: ignore[import-not-found]

        settings = settings_from(cls, options)
        device, placed = comfyui_api.chosen_device(options.get("device"))
        path = path_of("diffusion_models", unet_name)
        asked = {**dtype_options(weight_dtype), **placed}
        prepare_file(path, settings, device)
        with reading(settings, device) as unpacking:
            model = loaded(unet_name, lambda: comfy.sd.load_diffusion_model(path, model_options=asked))
        unpacking.keep(model)
        return io.NodeOutput(told(offload(model, settings, fresh=True), settings))


class CaromLoadCheckpoint(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> Any:
        return io.Schema(
            node_id="CaromLoadCheckpoint",
            display_name="Load Checkpoint (Carom)",
            category=CATEGORY,
            description="Replaces Load Checkpoint. The weights of the model and its text encoder stream if "
            "they do not fit into the VRAM; those of the VAE stream if you choose so.",
            search_aliases=["checkpoint loader", "low vram", "sdxl"],
            inputs=[
                io.Combo.Input(
                    "ckpt_name", options=file_names("checkpoints"), tooltip="A file of models/checkpoints."
                ),
                *widgets(
                    io.Combo.Input(
                        "vae",
                        options=list(VAES),
                        default=VAES[0],
                        optional=True,
                        advanced=True,
                        tooltip="comfyui: ComfyUI loads the whole VAE. stream: the weights of the VAE stream like "
                        "the model's, for cards with too little VRAM for the VAE and its images.",
                    ),
                    device_widget(),
                ),
            ],
            outputs=[
                io.Model.Output(tooltip=MODEL),
                io.Clip.Output(tooltip=CLIP),
                io.Vae.Output(tooltip=VAE),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def fingerprint_inputs(cls, ckpt_name: str, **options: Any) -> Any:
        return file_state("checkpoints", ckpt_name)

    @classmethod
    def execute(cls, ckpt_name: str, **options: Any) -> Any:
        import comfy.sd

        settings = settings_from(cls, options)
        device, placed = comfyui_api.chosen_device(options.get("device"))
        path = path_of("checkpoints", ckpt_name)
        prepare_file(path, settings, device)
        with reading(settings, device) as unpacking:
            model, clip, vae = loaded(
                ckpt_name,
                lambda: comfy.sd.load_checkpoint_guess_config(
                    path, output_vae=True, output_clip=True, embedding_directory=embedding_folders(),
                    model_options=placed, te_model_options=placed,
                )[:3],
            )  # fmt: skip
        for part in (model, getattr(clip, "patcher", None), getattr(vae, "patcher", None)):
            unpacking.keep(part)
        model = None if model is None else told(offload(model, settings, fresh=True), settings)
        clip = None if clip is None else offload_clip(clip, settings, fresh=True)[0]
        if vae is not None and options.get("vae") == "stream":
            vae = offload_vae(vae, settings, fresh=True)[0]
        elif hasattr(vae, "first_stage_model"):
            vae.first_stage_model.__dict__[MAPPED] = True
            own_memory(vae.first_stage_model)
        return io.NodeOutput(model, clip, vae)


class CaromLoadCLIP(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> Any:
        files = file_names("text_encoders")
        kinds = [*stock_options("CLIPLoader", "type"), *stock_options("DualCLIPLoader", "type")]
        more = [
            io.Combo.Input(
                f"clip_name{number}",
                options=[NO_FILE, *files],
                default=NO_FILE,
                optional=True,
                tooltip="A further text encoder, for models that use several.",
            )
            for number in (2, 3, 4)
        ]
        return io.Schema(
            node_id="CaromLoadCLIP",
            display_name="Load CLIP (Carom)",
            category=CATEGORY,
            description="Replaces Load CLIP, DualCLIPLoader, TripleCLIPLoader and QuadrupleCLIPLoader: "
            "loads one to four text encoders, whose weights stream if they do not fit into the "
            "VRAM.",
            search_aliases=["text encoder", "clip loader", "dual clip", "t5"],
            inputs=[
                io.Combo.Input("clip_name", options=files, tooltip="A file of models/text_encoders."),
                io.Combo.Input(
                    "type",
                    options=list(dict.fromkeys(kinds)),
                    tooltip="The model family that the text encoders are for, as in ComfyUI's loaders.",
                ),
                *more,
                device_widget(),
                *widgets(),
            ],
            outputs=[io.Clip.Output(tooltip=CLIP)],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def fingerprint_inputs(cls, clip_name: str, **options: Any) -> Any:
        return file_state("text_encoders", *chosen_files(clip_name, options))

    @classmethod
    def execute(cls, clip_name: str, type: str, **options: Any) -> Any:
        import comfy.sd

        settings = settings_from(cls, options)
        device, placed = comfyui_api.chosen_device(options.get("device"))
        names = chosen_files(clip_name, options)
        paths = [path_of("text_encoders", name) for name in names]
        kind = getattr(comfy.sd.CLIPType, type.upper(), comfy.sd.CLIPType.STABLE_DIFFUSION)
        for path in paths:
            prepare_file(path, settings, device)
        with reading(settings, device) as unpacking:
            clip = loaded(
                ", ".join(names),
                lambda: comfy.sd.load_clip(
                    ckpt_paths=paths,
                    embedding_directory=embedding_folders(),
                    clip_type=kind,
                    model_options=placed,
                ),
            )
        unpacking.keep(clip.patcher)
        return io.NodeOutput(told(offload_clip(clip, settings, fresh=True), settings))


class CaromLoadVAE(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> Any:
        return io.Schema(
            node_id="CaromLoadVAE",
            display_name="Load VAE (Carom)",
            category=CATEGORY,
            description="Replaces Load VAE, for cards with too little VRAM for the VAE and its images or "
            "frames.",
            search_aliases=["vae loader", "low vram"],
            inputs=[
                io.Combo.Input(
                    "vae_name",
                    options=stock_options("VAELoader", "vae_name"),
                    tooltip="A file of models/vae.",
                ),
                *widgets(),
            ],
            outputs=[io.Vae.Output(tooltip=VAE)],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def fingerprint_inputs(cls, vae_name: str, **options: Any) -> Any:
        return file_state("vae", vae_name)

    @classmethod
    def execute(cls, vae_name: str, **options: Any) -> Any:
        settings = settings_from(cls, options)
        with reading(settings, comfyui_api.compute_device()) as unpacking:
            (vae,) = loaded(vae_name, lambda: stock_node("VAELoader")().load_vae(vae_name))
        unpacking.keep(vae.patcher)
        return io.NodeOutput(told(offload_vae(vae, settings, fresh=True), settings))
