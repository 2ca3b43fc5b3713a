"""Loaders that take the place of ComfyUI's own: same files, same options, weights that stream from the start."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from comfy_api.latest import io  # type: ignore[import-not-found]

from ..core.errors import CaromError, WeightsError
from . import host
from .offload import offload, offload_clip, offload_vae
from .policy import Settings, choose_way
from .read_ahead import read_ahead
from .widgets import CATEGORY, settings_from, widgets

NO_FILE = "none"
VAES = ("comfyui", "stream")


def _stock(name: str) -> Any:
    """One of ComfyUI's own node classes."""
    return importlib.import_module("nodes").NODE_CLASS_MAPPINGS[name]  # ComfyUI's module, not this package


def _options(node: str, widget: str) -> list[str]:
    """What ComfyUI's own loader offers for a widget, so that nothing it loads is missing here."""
    inputs = _stock(node).INPUT_TYPES()
    for group in ("required", "optional"):
        if widget in inputs.get(group, {}):
            choices = inputs[group][widget]
            found = choices[0] if isinstance(choices[0], list) else choices[1].get("options", [])
            return list(found)
    return []


def _files(folder: str) -> list[str]:
    import folder_paths  # type: ignore[import-not-found]

    return list(folder_paths.get_filename_list(folder))


def _path(folder: str, name: str) -> str:
    import folder_paths

    found = folder_paths.get_full_path(folder, name)
    if found is None:
        raise WeightsError(
            f"{name!r} is not in ComfyUI's {folder} folders (any more); put it there, press R on the page, and choose again"
        )
    return found


def _embeddings() -> Any:
    import folder_paths

    return folder_paths.get_folder_paths("embeddings")


def _reading(name: str, load: Callable[[], Any]) -> Any:
    """What ``load`` returns; whatever a bad file makes it raise becomes a message that names the file."""
    try:
        result = load()
    except (CaromError, MemoryError):
        raise
    except Exception as error:
        if type(error).__name__ == "InterruptProcessingException":
            raise
        raise WeightsError(
            f"{name!r} could not be loaded: {type(error).__name__}: {error}; check that the file is complete and of the "
            "kind this loader is for"
        ) from error
    if result is None:
        raise WeightsError(f"{name!r} holds no model that ComfyUI knows")
    return result


def ahead(path: str, settings: Settings, device: torch.device | None = None) -> None:
    """Have the file read while the model is built, where its weights are going to stream."""
    where = host.compute_device() if device is None else device
    if choose_way(settings.mode, where.type).streams:
        read_ahead(path)


def model_options(weight_dtype: str) -> dict[str, Any]:
    """ComfyUI's model options for its ``weight_dtype`` names ("fp8_e4m3fn_fast" and the like).

    Raises ValueError for a name that stands for no dtype.
    """
    if weight_dtype == "default":
        return {}
    name = weight_dtype.removesuffix("_fast")
    dtype = getattr(torch, name.replace("fp8_", "float8_") if name.startswith("fp8_") else name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"weight_dtype={weight_dtype!r} is unknown here; use default")
    options: dict[str, Any] = {"dtype": dtype}
    if weight_dtype.endswith("_fast"):
        options["fp8_optimizations"] = True
    return options


class CaromLoadDiffusionModel(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> Any:
        return io.Schema(
            node_id="CaromLoadDiffusionModel",
            display_name="Load Diffusion Model (Carom)",
            category=CATEGORY,
            description="Takes the place of Load Diffusion Model, for models that are larger than the VRAM.",
            search_aliases=["unet loader", "low vram", "flux", "wan"],
            inputs=[
                io.Combo.Input(
                    "unet_name",
                    options=_files("diffusion_models"),
                    tooltip="A file of models/diffusion_models.",
                ),
                io.Combo.Input(
                    "weight_dtype",
                    options=_options("UNETLoader", "weight_dtype"),
                    default="default",
                    tooltip="default keeps the file's own precision; the others are ComfyUI's.",
                ),  # fmt: skip
                *widgets(),
            ],
            outputs=[io.Model.Output()],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, unet_name: str, weight_dtype: str = "default", **options: Any) -> Any:
        import comfy.sd  # type: ignore[import-not-found]

        settings = settings_from(cls, options)
        path = _path("diffusion_models", unet_name)
        asked = model_options(weight_dtype)
        ahead(path, settings)
        model = _reading(unet_name, lambda: comfy.sd.load_diffusion_model(path, model_options=asked))
        return io.NodeOutput(_told(offload(model, settings, fresh=True), settings))


class CaromLoadCheckpoint(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> Any:
        return io.Schema(
            node_id="CaromLoadCheckpoint",
            display_name="Load Checkpoint (Carom)",
            category=CATEGORY,
            description="Takes the place of Load Checkpoint; the model and its text encoder stream, and the VAE if you like.",
            search_aliases=["checkpoint loader", "low vram", "sdxl"],
            inputs=[
                io.Combo.Input(
                    "ckpt_name", options=_files("checkpoints"), tooltip="A file of models/checkpoints."
                ),
                *widgets(),
                io.Combo.Input(
                    "vae",
                    options=list(VAES),
                    default=VAES[0],
                    optional=True,
                    advanced=True,
                    tooltip="comfyui: the VAE is loaded whole, as always. stream: its weights stream like the model's, "
                    "for cards on which even the VAE is too large beside its images.",
                ),  # fmt: skip
            ],
            outputs=[io.Model.Output(), io.Clip.Output(), io.Vae.Output()],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, ckpt_name: str, **options: Any) -> Any:
        import comfy.sd

        settings = settings_from(cls, options)
        path = _path("checkpoints", ckpt_name)
        ahead(path, settings)
        model, clip, vae = _reading(
            ckpt_name,
            lambda: comfy.sd.load_checkpoint_guess_config(
                path, output_vae=True, output_clip=True, embedding_directory=_embeddings()
            )[:3],
        )
        model = None if model is None else _told(offload(model, settings, fresh=True), settings)
        clip = None if clip is None else offload_clip(clip, settings, fresh=True)[0]
        if vae is not None and options.get("vae") == "stream":
            vae = offload_vae(vae, settings)[0]
        return io.NodeOutput(model, clip, vae)


class CaromLoadCLIP(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> Any:
        files = _files("text_encoders")
        kinds = list(dict.fromkeys([*_options("CLIPLoader", "type"), *_options("DualCLIPLoader", "type")]))
        more = [
            io.Combo.Input(
                f"clip_name{number}",
                options=[NO_FILE, *files],
                default=NO_FILE,
                optional=True,
                tooltip="A further text encoder, for models that use several.",
            )  # fmt: skip
            for number in (2, 3, 4)
        ]
        return io.Schema(
            node_id="CaromLoadCLIP",
            display_name="Load CLIP (Carom)",
            category=CATEGORY,
            description="Takes the place of Load CLIP, DualCLIPLoader and their larger kin: one to four text encoders.",
            search_aliases=["text encoder", "clip loader", "dual clip", "t5"],
            inputs=[
                io.Combo.Input("clip_name", options=files, tooltip="A file of models/text_encoders."),
                io.Combo.Input(
                    "type",
                    options=kinds,
                    tooltip="The model family that the text encoders are for, as in ComfyUI's loaders.",
                ),
                *more,
                io.Combo.Input(
                    "device",
                    options=["default", "cpu"],
                    default="default",
                    optional=True,
                    advanced=True,
                    tooltip="cpu computes on the CPU; nothing streams then.",
                ),  # fmt: skip
                *widgets(),
            ],
            outputs=[io.Clip.Output()],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, clip_name: str, type: str, device: str = "default", **options: Any) -> Any:
        import comfy.sd

        settings = settings_from(cls, options)
        names = [clip_name, *(options.get(f"clip_name{number}") or NO_FILE for number in (2, 3, 4))]
        names = [name for name in names if name != NO_FILE]
        paths = [_path("text_encoders", name) for name in names]
        kind = getattr(comfy.sd.CLIPType, type.upper(), comfy.sd.CLIPType.STABLE_DIFFUSION)
        where = torch.device("cpu") if device == "cpu" else host.compute_device()
        asked: dict[str, Any] = {}
        if device == "cpu":
            asked = {"load_device": where, "offload_device": where}
        for path in paths:
            ahead(path, settings, where)
        clip = _reading(
            ", ".join(names),
            lambda: comfy.sd.load_clip(
                ckpt_paths=paths,
                embedding_directory=_embeddings(),
                clip_type=kind,
                model_options=asked,
            ),
        )
        return io.NodeOutput(_told(offload_clip(clip, settings, fresh=True), settings))


def _told(result: tuple[Any, Any], settings: Settings) -> Any:
    """The patcher or CLIP; where it does not stream, the node says why."""
    made, way = result
    if not way.streams:
        host.say(f"Carom: {way.reason}", settings.node)
    return made
