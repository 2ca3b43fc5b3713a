"""The node `CaromPlan`: plans a model file for a card without loading the model, as the command `carom plan` does."""

from __future__ import annotations

import argparse
import re
import time
from pathlib import Path
from typing import Any

from comfy_api.latest import io, ui  # type: ignore[import-not-found]

from ..cli import plan as command
from ..cli.plan_text import Table, plan_blocks
from ..core.common.errors import BudgetError
from ..core.common.sizes import parse_size
from ..tools.planner import model_plan, presets, shape_files
from ..tools.planner.estimate import Job
from . import comfyui_api
from .loader_options import file_names, path_of
from .node_settings import is_auto
from .widgets import CATEGORY

THIS_MACHINE, AS_STORED = "this machine", "as stored"
CARDS = {card.title: name for name, card in presets.CARDS.items()}
_WORDS = {"gpu": "card"}  # the widgets of command-line options with another name


class CaromPlan(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> Any:
        return io.Schema(
            node_id="CaromPlan",
            display_name="Plan (Carom)",
            category=CATEGORY,
            description="Predicts how a model would run on this machine or on another card, without loading "
            "it: which layers stay on the card, which stream, how long a step takes, and what "
            "limits it.",
            search_aliases=["vram calculator", "estimate", "requirements"],
            inputs=[
                io.Combo.Input(
                    "model_name",
                    options=list(
                        dict.fromkeys([*file_names("diffusion_models"), *file_names("checkpoints")])
                    ),
                    tooltip="A file of models/diffusion_models or models/checkpoints. Only its header is read.",
                ),
                io.Combo.Input(
                    "card",
                    options=[THIS_MACHINE, *CARDS],
                    default=THIS_MACHINE,
                    optional=True,
                    tooltip="The card to plan for. this machine: the card of this machine is measured; if there "
                    "is none, the plan names the card that it assumes.",
                ),
                io.String.Input(
                    "vram",
                    default="auto",
                    optional=True,
                    tooltip="The most VRAM that the weights may take: auto (all that activations leave), or a "
                    "size such as 8GiB.",
                ),
                io.String.Input(
                    "ram",
                    default="auto",
                    optional=True,
                    tooltip="The RAM of the machine: auto, or a size such as 32GiB.",
                ),
                io.Int.Input(
                    "tokens",
                    default=0,
                    min=0,
                    max=1 << 20,
                    optional=True,
                    tooltip="The number of tokens of a step (with Flux, 4096 for 1024 x 1024 pixels). 0: the "
                    "usual number for the model.",
                ),
                io.Combo.Input(
                    "quant",
                    options=[AS_STORED, *presets.QUANT_BITS],
                    default=AS_STORED,
                    optional=True,
                    tooltip="The format of the weights: as stored in the file, or quantised to this format.",
                ),
                io.Combo.Input(
                    "codec",
                    options=["auto", "raw"],
                    default="auto",
                    optional=True,
                    advanced=True,
                    tooltip="auto: weights are copied to the card losslessly packed if that is faster. raw: "
                    "weights are copied unpacked.",
                ),
                io.String.Input(
                    "link",
                    default="auto",
                    optional=True,
                    advanced=True,
                    tooltip="The rate at which weights are copied from RAM to the card, in bytes a second: "
                    "auto, or a rate such as 22GB.",
                ),
            ],
            outputs=[io.String.Output(display_name="text", tooltip="The plan, as the node shows it.")],
            hidden=[io.Hidden.unique_id],
            is_output_node=True,
        )

    @classmethod
    def fingerprint_inputs(cls, **inputs: Any) -> float:
        return time.monotonic()  # never the same: ComfyUI shows the text only of a node that it runs

    @classmethod
    def execute(cls, model_name: str, **options: Any) -> Any:
        folder = "diffusion_models" if model_name in file_names("diffusion_models") else "checkpoints"
        text = plan_text(path_of(folder, model_name), **options)
        comfyui_api.show(text, str(getattr(getattr(cls, "hidden", None), "unique_id", None) or ""))
        return io.NodeOutput(text, ui=ui.PreviewText(text))


def plan_text(
    path: str,
    card: str = THIS_MACHINE,
    vram: str = "auto",
    ram: str = "auto",
    tokens: int = 0,
    quant: str = AS_STORED,
    codec: str = "auto",
    link: str = "auto",
) -> str:
    """Return the text of `carom plan` for the file at ``path``, as paragraphs and lists.

    Raises CaromError or ValueError. The message names a remedy.
    """
    arguments = argparse.Namespace(
        model=str(Path(path)),
        gpu=None if card == THIS_MACHINE else CARDS.get(card, card),
        ram=None if is_auto(ram) else ram,
        nvme="",  # ComfyUI's models wait in RAM, so the plan measures and uses no drive
        gds=False,
        link=None if is_auto(link) else link,
    )
    try:
        machine, remarks = command.machine_of(arguments)
        limit = None if is_auto(vram) else parse_size(vram, whole=machine.card.vram, setting="vram")
        kept = None if quant == AS_STORED else presets.find_quant(quant)
        job = Job("infer", tokens or None, kept, limit, codec="raw" if codec == "raw" else "lossless")
        plan = model_plan.plan(shape_files.read_shape(path), machine, job)
    except BudgetError as error:
        raise BudgetError(in_widgets(str(error)), error.least_bytes) from error
    except ValueError as error:
        raise ValueError(in_widgets(str(error))) from error
    return in_widgets("\n\n".join(_listed(block) for block in plan_blocks(plan, remarks)))


def in_widgets(text: str) -> str:
    """Return ``text`` with the command-line options in it ("--gpu rtx4090") replaced by the node's widgets."""
    text = re.sub(r",? or name\s+a drive to stream from \(--nvme \w+\)", "", text)
    text = text.replace("--codec lossless", "codec: auto")
    text = re.sub(r"--gpu (\w+)", lambda found: f"card: {_title(found[1])}", text)
    text = re.sub(r"--(\w+)(?: |=)([0-9][\w.]*|fp8|nf4)\b", r"\1: \2", text)
    return re.sub(r"--(\w+)", lambda found: f'"{_WORDS.get(found[1], found[1])}"', text)


def _title(name: str) -> str:
    return presets.CARDS[name].title if name in presets.CARDS else name


def _listed(block: str | Table) -> str:
    if isinstance(block, str):
        return block
    return "\n".join([block.head, *(f"- {name}: {value}" for name, value in block.rows)])
