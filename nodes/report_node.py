"""The node `CaromReport`: reports the last run of a model, as text and as a picture."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from comfy_api.latest import io, ui  # type: ignore[import-not-found]

from ..core.common.sizes import format_size
from ..core.metrics.report import Report
from ..core.metrics.timeline import DPI, INK, WIDTH_INCHES
from . import comfyui_api
from .patcher import settings_of
from .streaming import known_streaming
from .widgets import CATEGORY

TABLE_SIZE, LINE_INCHES = 9, 0.165  # points, and inches between lines, of the table in the picture


class CaromReport(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> Any:
        return io.Schema(
            node_id="CaromReport",
            display_name="Report (Carom)",
            category=CATEGORY,
            description="Shows the figures of the last run: VRAM and RAM in use, bytes copied to the card, "
            "seconds of a step and of waiting for weights, and a timeline.",
            search_aliases=["vram", "statistics", "profile"],
            inputs=[
                io.Model.Input("model", optional=True, tooltip="The model that is connected to the sampler."),
                io.Clip.Input("clip", optional=True, tooltip="A text encoder to report on instead."),
                io.Vae.Input("vae", optional=True, tooltip="A VAE to report on instead."),
                io.ControlNet.Input(
                    "control_net", optional=True, tooltip="A ControlNet to report on instead."
                ),
                io.AnyType.Input(
                    "after",
                    optional=True,
                    tooltip="Any result of the run, such as a latent or an image. It makes ComfyUI run this "
                    "node after the run.",
                ),
            ],
            outputs=[
                io.String.Output(display_name="text", tooltip="The figures as text."),
                io.Image.Output(
                    display_name="timeline",
                    tooltip="A picture of one step (computing, copies and waiting), with the figures as a "
                    "table.",
                ),
            ],
            hidden=[io.Hidden.unique_id],
            is_output_node=True,
        )

    @classmethod
    def fingerprint_inputs(cls, **inputs: Any) -> float:
        return time.monotonic()  # never the same: figures differ between runs with the same inputs

    @classmethod
    def execute(
        cls, model: Any = None, clip: Any = None, vae: Any = None, control_net: Any = None, after: Any = None
    ) -> Any:
        held = getattr(control_net, "control_model_wrapped", None)
        patchers = (model, getattr(clip, "patcher", None), getattr(vae, "patcher", None), held)
        patcher = next((found for found in patchers if found is not None), None)
        if patcher is None:
            raise ValueError(
                "connect a model, a clip, a vae or a control_net whose weights Carom can hold: there is nothing to report on"
            )
        line, report = figures(patcher)
        text = f"{line}\n\n{report.listing()}"
        picture = image_of(report)
        comfyui_api.show(text, str(getattr(getattr(cls, "hidden", None), "unique_id", None) or ""))
        shown = {**ui.PreviewText(text).as_dict(), **ui.PreviewImage(picture).as_dict()}
        return io.NodeOutput(text, picture, ui=shown)


def figures(patcher: Any) -> tuple[str, Report]:
    """Return a line of text about a patcher, and a report, which has only sizes where ComfyUI keeps the weights."""
    streaming = known_streaming(patcher.model)
    report = streaming.report() if streaming is not None else None
    loaded, size = patcher.loaded_size(), comfyui_api.module_bytes(patcher.model)
    if streaming is not None and report is not None:
        line = streaming.line(loaded, streaming.stall_share())
        if not streaming.streams:
            line = f"Carom: unloaded; these are the figures of its last run ({format_size(size)} of weights)"
        return line, report
    settings = settings_of(patcher)
    if settings is None:
        line = "This model went through no Carom node; ComfyUI keeps its weights"
    elif settings.reason:
        line = f"Carom: {settings.reason}"
    elif streaming is not None and streaming.note:
        line = f"Carom: {streaming.note}"
    elif loaded:
        line = f"Carom: the whole model fits ({format_size(loaded)} loaded by ComfyUI); nothing streams"
    else:
        line = "Carom: not loaded yet; connect 'after' to the sampler's result"
    return line, Report(
        resident_bytes=int(loaded),
        vram_peak_bytes=int(loaded),
        vram_budget_bytes=size,
        device=str(patcher.load_device),
    )


def image_of(report: Report) -> torch.Tensor:
    """Return a picture of the timeline above the table of figures.

    The picture is an IMAGE of ComfyUI: float32, shape (1, height, width, 3), values in [0, 1].
    """
    from PIL import Image

    with tempfile.TemporaryDirectory(prefix="carom-") as folder:
        parts = []
        for name, draw in (("timeline", report.plot), ("table", lambda path: _draw_table(report, path))):
            draw(str(Path(folder) / f"{name}.png"))
            with Image.open(Path(folder) / f"{name}.png") as picture:
                parts.append(np.asarray(picture.convert("RGB"), dtype=np.float32) / 255.0)
    return torch.from_numpy(np.concatenate(parts))[None]


def _draw_table(report: Report, path: str) -> None:
    from matplotlib.figure import Figure  # without pyplot, which would change global state

    table = report.table()
    height = LINE_INCHES * (table.count("\n") + 3)
    figure = Figure(figsize=(WIDTH_INCHES, height), dpi=DPI, facecolor="white")
    top = 1 - LINE_INCHES / height
    figure.text(0.015, top, table, family="monospace", size=TABLE_SIZE, color=INK, va="top", linespacing=1.25)
    figure.savefig(path, format="png")
