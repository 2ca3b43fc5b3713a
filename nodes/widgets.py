"""The widgets that Carom's nodes share, and the nodes' category in ComfyUI's menu."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io  # type: ignore[import-not-found]

from . import comfyui_api
from .node_settings import CODECS, GRANULARITIES, MODES, PRIORITIES, Settings

CATEGORY = "Carom"


def widgets(*more: Any) -> list[Any]:
    """Return the inputs that Carom's nodes share, all of them optional.

    ``more``: further inputs of a node. They come before the newer ``priority``, because workflows store values by
    position.
    """
    return [
        io.Combo.Input(
            "mode",
            options=list(MODES),
            default="auto",
            optional=True,
            tooltip="auto: stream what does not fit, where copies run beside computing; else leave the weights to ComfyUI, and "
            "say which and why. stream: always stream, also a model that fits (an eighth of it at least). native: ComfyUI keeps the weights, Carom only plans and reports.",
        ),
        io.String.Input(
            "vram",
            default="auto",
            optional=True,
            tooltip="The most VRAM the weights may take: auto (what ComfyUI has to give), a size such as 8GiB or "
            "6000MB, or a share of the card such as 50%. Images and latents come on top of it.",
        ),
        io.String.Input(
            "ram",
            default="auto",
            optional=True,
            advanced=True,
            tooltip="The most RAM that may be pinned for fast copies: auto, a size such as 24GiB, or a share such as 50%. "
            "Weights beyond it still stream, more slowly.",
        ),
        io.Combo.Input(
            "granularity",
            options=list(GRANULARITIES),
            default="auto",
            optional=True,
            advanced=True,
            tooltip="What comes and goes as one. Leave it on auto, which takes whole blocks while two of them fit into vram. "
            "block: fewest copies. phase, layer: smaller pieces, for a vram in which a block does not fit.",
        ),
        io.Combo.Input(
            "codec",
            options=list(CODECS),
            default="auto",
            optional=True,
            advanced=True,
            tooltip="How weights are packed on the way to the card. Every choice gives the same picture, bit for bit. Leave it "
            "on auto, which measures. lossless: packs from the start, for a slow link (a laptop, PCIe 3, x4 or x8). raw: never "
            "packs, for a fast link or a CPU that has little to spare.",
        ),
        *more,
        io.Combo.Input(
            "priority",
            options=list(PRIORITIES),
            default="normal",
            optional=True,
            advanced=True,
            tooltip="Which model gives way first where models of Carom share memory: high gives way last, low first. ComfyUI "
            "gives each model a budget of its own in bytes, so this only matters in comfy-aimdo's pool, or where sessions "
            "share a budget.",
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
        tooltip="Where the model computes: default (where ComfyUI does), cpu (nothing streams then), or one of several GPUs.",
    )


def settings_from(node: Any, options: dict[str, Any]) -> Settings:
    """Return the checked settings of a node's widgets. Raises ValueError that names an invalid widget."""
    names = ("mode", "vram", "ram", "granularity", "codec", "priority")
    given = {name: str(options[name]) for name in names if options.get(name) is not None}
    hidden = getattr(node, "hidden", None)
    return Settings(**given, node=str(getattr(hidden, "unique_id", None) or "")).checked()
