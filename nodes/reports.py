"""Nodes that say what happened (`CaromReport`) and what would happen (`CaromPlan`)."""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from comfy_api.latest import io, ui  # type: ignore[import-not-found]

from ..core.report import Report
from ..core.sizes import format_size
from . import host
from .loaders import _files, _path
from .patcher import settings_of
from .streaming import known_streaming
from .widgets import CATEGORY

THIS_MACHINE = "this machine"


def figures(patcher: Any) -> tuple[str, Report]:
    """What is known of a patcher: one line, and a report (of sizes alone where ComfyUI keeps the weights)."""
    streaming = known_streaming(patcher.model)
    report = streaming.report() if streaming is not None else None
    loaded, size = patcher.loaded_size(), host.module_bytes(patcher.model)
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
    """The timeline as ComfyUI's IMAGE: float32 (1, height, width, 3) in [0, 1]."""
    from PIL import Image

    with tempfile.TemporaryDirectory(prefix="carom-") as folder:
        path = os.path.join(folder, "timeline.png")
        report.plot(path)
        with Image.open(path) as picture:
            pixels = np.asarray(picture.convert("RGB"), dtype=np.float32) / 255.0
    return torch.from_numpy(pixels)[None]


def _on_the_node(node: Any, text: str) -> None:
    """The page shows a text output on nodes of its own alone: on others, words that are sent."""
    host.show(text, str(getattr(getattr(node, "hidden", None), "unique_id", None) or ""))


class CaromReport(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> Any:
        return io.Schema(
            node_id="CaromReport",
            display_name="Report (Carom)",
            category=CATEGORY,
            description="What the last run did: VRAM and RAM used, what crossed to the card, how long it waited; with a timeline.",
            search_aliases=["vram", "statistics", "profile"],
            inputs=[
                io.Model.Input("model", optional=True, tooltip="The model as it goes into the sampler."),
                io.Clip.Input("clip", optional=True, tooltip="A text encoder to report on instead."),
                io.AnyType.Input(
                    "after",
                    optional=True,
                    tooltip="Anything that comes out of the run (a latent, an image), so that the report is made after it.",
                ),  # fmt: skip
            ],
            outputs=[
                io.String.Output(display_name="text", tooltip="The figures as a table."),
                io.Image.Output(display_name="timeline", tooltip="One step: computing, copies and waits."),
            ],
            hidden=[io.Hidden.unique_id],
            is_output_node=True,
        )

    @classmethod
    def fingerprint_inputs(cls, **inputs: Any) -> float:
        return time.monotonic()  # the same inputs, another run: other figures

    @classmethod
    def execute(cls, model: Any = None, clip: Any = None, after: Any = None) -> Any:
        patcher = model if model is not None else getattr(clip, "patcher", None)
        if patcher is None:
            raise ValueError("connect a model or a clip: there is nothing to report on")
        line, report = figures(patcher)
        text = f"{line}\n\n{report.table()}"
        _on_the_node(cls, text)
        return io.NodeOutput(text, image_of(report), ui=ui.PreviewText(text))


class CaromPlan(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> Any:
        from ..core import presets

        return io.Schema(
            node_id="CaromPlan",
            display_name="Plan (Carom)",
            category=CATEGORY,
            description="What a model would do on this machine or on a card you think of buying, before anything is "
            "loaded: what stays, what streams, how fast and why.",
            search_aliases=["vram calculator", "estimate", "requirements"],
            inputs=[
                io.Combo.Input(
                    "model_name",
                    options=_plannable(),
                    tooltip="A file of models/diffusion_models or models/checkpoints. Only its header is read.",
                ),  # fmt: skip
                io.Combo.Input(
                    "card",
                    options=[THIS_MACHINE, *presets.CARDS],
                    default=THIS_MACHINE,
                    optional=True,
                    tooltip="The card to plan for.",
                ),  # fmt: skip
                io.String.Input(
                    "vram",
                    default="auto",
                    optional=True,
                    tooltip="Bound on the weights on the card: auto, or 8GiB.",
                ),
                io.String.Input(
                    "ram", default="auto", optional=True, tooltip="RAM of the machine: auto, or 32GiB."
                ),
                io.Int.Input(
                    "tokens",
                    default=0,
                    min=0,
                    max=1 << 20,
                    optional=True,
                    tooltip="Tokens of a step (4096 for 1024 x 1024 pixels with Flux); 0: one image, clip or sequence.",
                ),  # fmt: skip
            ],
            outputs=[io.String.Output(display_name="text")],
            hidden=[io.Hidden.unique_id],
            is_output_node=True,
        )

    @classmethod
    def execute(
        cls, model_name: str, card: str = THIS_MACHINE, vram: str = "auto", ram: str = "auto", tokens: int = 0
    ) -> Any:
        text = plan_text(_planned_path(model_name), card, vram, ram, tokens)
        _on_the_node(cls, text)
        return io.NodeOutput(text, ui=ui.PreviewText(text))


def _plannable() -> list[str]:
    return list(dict.fromkeys([*_files("diffusion_models"), *_files("checkpoints")]))


def _planned_path(name: str) -> str:
    folder = "diffusion_models" if name in _files("diffusion_models") else "checkpoints"
    return _path(folder, name)


def plan_text(path: str, card: str, vram: str, ram: str, tokens: int) -> str:
    """What `carom plan` says of a file. Raises CaromError or ValueError with a remedy."""
    from ..cli import plan as command
    from ..cli.plan_text import text
    from ..core import paper_plan, shape_files
    from ..core.paper import Job
    from ..core.sizes import parse_size

    def given(value: str) -> str | None:
        return None if str(value).strip().lower() in ("auto", "") else value

    arguments = argparse.Namespace(
        model=str(Path(path)),
        gpu=None if card == THIS_MACHINE else card,
        ram=given(ram),
        nvme=None,
        gds=False,
        link=None,
    )
    machine, remarks = command.machine_of(arguments)
    limit = given(vram)
    job = Job(
        "infer",
        tokens or None,
        None,
        None if limit is None else parse_size(limit, whole=machine.card.vram, setting="vram"),
    )
    return text(paper_plan.plan(shape_files.read_shape(path), machine, job), remarks)
