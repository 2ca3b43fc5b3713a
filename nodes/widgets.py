"""The widgets that Carom's nodes share, and the nodes' category in ComfyUI's menu."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io  # type: ignore[import-not-found]

from . import comfyui_api
from .node_settings import CODECS, GRANULARITIES, MODES, PRIORITIES, Settings

CATEGORY = "Carom"


def widgets(*more: Any) -> list[Any]:
    """Return the inputs that Carom's nodes share, all of them optional.

    ``more``: further inputs of a node. They come before the newer ``priority`` and ``peers``, because workflows store
    values by position.
    """
    return [
        io.Combo.Input(
            "mode",
            options=list(MODES),
            default="auto",
            optional=True,
            tooltip="auto: weights that do not fit into vram stream. Where streaming is not possible, "
            "ComfyUI manages the weights, and the node shows the reason. stream: at least an "
            "eighth of the weights streams, even if the model fits; an error if streaming is "
            "not possible. native: ComfyUI manages the weights, Carom only plans and reports.",
        ),
        io.String.Input(
            "vram",
            default="auto",
            optional=True,
            tooltip="The most VRAM that the weights may take: auto (the free VRAM that ComfyUI offers), "
            "a size such as 8GiB or 6000MB, or a percentage of the card's VRAM such as 50%. "
            "Images and latents need VRAM in addition.",
        ),
        io.String.Input(
            "ram",
            default="auto",
            optional=True,
            advanced=True,
            tooltip="The most RAM that the weights of all models of Carom may take together: auto (what is free, "
            "less a reserve for the system), a size such as 24GiB, or a percentage such as 50%. Weights that do "
            "not fit stream from their files on disk.",
        ),
        io.Combo.Input(
            "granularity",
            options=list(GRANULARITIES),
            default="auto",
            optional=True,
            advanced=True,
            tooltip="Which weights are copied to the card together. auto: blocks of the model, in parts "
            "if a block is large or vram is small. block: whole blocks. phase: attention and "
            "feed-forward apart. layer: single layers. Smaller parts need less VRAM and more "
            "CPU time.",
        ),
        io.Combo.Input(
            "codec",
            options=list(CODECS),
            default="auto",
            optional=True,
            advanced=True,
            tooltip="Whether weights are copied to the card packed (losslessly compressed) and unpacked "
            "there. Every choice gives the same picture, bit for bit. auto: packed if Triton is "
            "installed, until measured times show that unpacked is faster. lossless: "
            "packed, for a slow link such as PCIe 3 or x4. raw: never packed.",
        ),
        *more,
        io.Combo.Input(
            "priority",
            options=list(PRIORITIES),
            default="normal",
            optional=True,
            advanced=True,
            tooltip="The order in which models give up VRAM when several of Carom's models share it: "
            "low gives it up first, high last. It only has an effect in comfy-aimdo's memory "
            "pool or with a shared budget, because ComfyUI otherwise gives each model a budget "
            "of its own.",
        ),
        io.String.Input(
            "peers",
            default="",
            optional=True,
            advanced=True,
            tooltip="Other GPUs whose memory holds weights: nothing (none), auto (all other GPUs, less a reserve), or "
            "GPUs with sizes such as cuda:1=8GiB, cuda:2=50%. Weights that do not fit into vram wait there, "
            "and are copied from there while others are copied from RAM. Where that is slower than RAM, they stay in "
            "RAM. These GPUs do not compute.",
        ),
    ]


def device_widget() -> Any:
    """Return the device input of a loader node, the same as in ComfyUI's own loaders."""
    return io.Combo.Input(
        "device",
        options=comfyui_api.device_options(),
        default="default",
        optional=True,
        advanced=True,
        tooltip="The device that runs the model: default (ComfyUI's choice), cpu (no weights "
        "stream), or one of several GPUs.",
    )


def settings_from(node: Any, options: dict[str, Any]) -> Settings:
    """Return the checked settings of a node's widgets. Raises ValueError that names an invalid widget."""
    names = ("mode", "vram", "ram", "granularity", "codec", "priority", "peers")
    given = {name: str(options[name]) for name in names if options.get(name) is not None}
    hidden = getattr(node, "hidden", None)
    return Settings(**given, node=str(getattr(hidden, "unique_id", None) or "")).checked()
