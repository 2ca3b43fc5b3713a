"""Plans of the models of an ai-toolkit job: what each would do on a machine, and the lines to add to the job.

For each process of a job, `plan_process` finds the shapes of its transformer and text encoders (from files, or from
the table `ARCHES` for a model on the hub), counts the tokens of a step, divides the VRAM between models that run in
the same step, and calls `model_plan.plan` for each. Nothing is loaded or run.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ...core.common.errors import BudgetError, CaromError
from ...core.common.sizes import MIB, format_size, parse_size
from . import model_plan, shape_files, shapes
from .estimate import Estimate, Job, Machine, evaluate, reserved_vram
from .job_file import Process
from .job_quant import quant_of
from .model_plan import ModelPlan
from .shapes import Shape

ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")  # folders of a diffusers pipeline
MOST_CASES = 6  # resolutions whose step times are predicted: the largest ones


@dataclass(frozen=True)
class Architecture:
    """What the planner knows of a value of ai-toolkit's `arch`.

    `shape`: name of a known shape (None: only files say it); `patch`: pixels that a token covers, each way, which is
    the reduction of the VAE times the patch of the transformer; `text_tokens`: of a caption; `clip`: frames that a
    latent frame covers after the first (0: the architecture makes images); `encoder`: name of the text encoder's
    known shape; `transformers`: models that share the VRAM and take turns, unless one of them is not trained; `unlike`: parts of hub names whose models
    have another shape.
    """

    shape: str | None = None
    patch: int = 16
    text_tokens: int = 512
    clip: int = 0
    encoder: str | None = None
    transformers: int = 1
    unlike: tuple[str, ...] = ()


_WAN = Architecture("wan2.2-14b", text_tokens=0, clip=4, transformers=2, unlike=("1.3b", "5b"))
_QWEN = Architecture("qwen-image", text_tokens=256)
ARCHES: dict[str, Architecture] = {
    "flux": Architecture("flux1-dev", unlike=("flex",)),
    "flux_kontext": Architecture("flux1-dev"),
    "flux2": Architecture("flux2-dev", encoder="mistral-small-24b", unlike=("klein",)),
    "qwen_image": _QWEN, "qwen_image_edit": _QWEN, "qwen_image_edit_plus": _QWEN,
    "zimage": Architecture("z-image", text_tokens=256),
    "wan21": replace(_WAN, transformers=1), "wan21_i2v": replace(_WAN, transformers=1),
    "wan22_14b": _WAN, "wan22_14b_i2v": _WAN,
    # A token of a U-Net is a position of its lowest level (see shapes.py).
    "sdxl": Architecture("sdxl", patch=32, text_tokens=0, unlike=("ssd", "vega")),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A kind of step: the images or clips of one dataset at one resolution."""

    pixels: int
    frames: int
    controls: int
    sample_tokens: int
    tokens: int  # of the whole batch

    @property
    def title(self) -> str:
        """The description of one sample."""
        clip = f"{self.frames}-frame clip of " if self.frames > 1 else ""
        more = f" with {self.controls} control image{'s' * (self.controls > 1)}" if self.controls else ""
        return f"{clip}{self.pixels} x {self.pixels} pixels{more}"


@dataclass(frozen=True)
class PlannedModel:
    """A model of a process: its plan, or the reason why there is none.

    `role`: "transformer" or "text encoder"; `every_step`: whether the model runs in each step of the training (else
    once before it); `copies`: equal models that take turns; `vram`: limit in bytes of one copy's weights on the card
    (None: what the card has); `problem`: why `plan` is None, and what to do; `cases`: the predicted steps, largest
    first.
    """

    role: str
    name: str
    every_step: bool
    copies: int = 1
    vram: int | None = None
    plan: ModelPlan | None = None
    problem: str = ""
    cases: tuple[tuple[Case, Estimate], ...] = ()

    @property
    def streams(self) -> bool:
        """Whether weights of the model stream."""
        return self.plan is not None and self.plan.outcome.placement.streamed_wire > 0

    @property
    def streams_16bit(self) -> bool:
        """Whether 16-bit weights of the model stream, which can be packed without loss."""
        quant = self.plan.job.quant if self.plan is not None else None
        return self.streams and quant is not None and quant.is_16bit


@dataclass(frozen=True)
class ProcessPlan:
    """The plan of one process: its models, the lines to add to its YAML, and remarks for the reader."""

    process: Process
    models: tuple[PlannedModel, ...]
    lines: tuple[str, ...]
    remarks: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Whether every transformer of the process was planned, and every model that was found fits."""
        return all(model.plan is not None for model in self.models)


@dataclass(frozen=True)
class _Found:
    """A model whose shape is known, with the job to plan for it; `tokens` are in the job."""

    role: str
    name: str
    shape: Shape
    job: Job
    every_step: bool
    copies: int = 1

    @property
    def nbytes(self) -> int:
        """The bytes of all copies' weights."""
        return self.copies * self.shape.bytes_in(self.job.quant)


def cases_of(process: Process, arch: Architecture) -> list[Case]:
    """Return the kinds of steps of a process, those with the most tokens first."""
    found = set()
    for data in process.datasets:
        frames = data.frames if arch.clip else 1
        latent_frames = 1 + (frames - 1) // arch.clip if arch.clip else 1
        for pixels in data.resolutions:
            image = max(1, pixels // arch.patch) ** 2 * latent_frames
            sample = image * (1 + data.controls) + arch.text_tokens
            found.add(Case(pixels, frames, data.controls, sample, process.batch * sample))
    return sorted(found, key=lambda case: (case.tokens, case.pixels), reverse=True)


def plan_process(
    process: Process, machine: Machine, *, vram: int | None = None, compute: str = "bf16", codec: str = "raw"
) -> ProcessPlan:
    """Return the plan of `process` on `machine`.

    `vram`: limit in bytes of all weights on the card, which replaces the job's own; `codec`: "raw" or "lossless", where
    the job does not decide. A model that does not fit or is not known is a `PlannedModel` with a `problem`. Raises
    ValueError for a bad `offload_kwargs.vram` of the job.
    """
    model = process.model
    arch = ARCHES.get(model.arch, Architecture())
    cases = cases_of(process, arch)
    remarks = list(_remarks(process, arch))
    if model.offload.codec in ("raw", "lossless"):
        codec = model.offload.codec
    own = model.offload.vram
    if vram is None and model.offload.mode and own != "auto":
        vram = parse_size(own, whole=machine.card.vram, setting="model.offload_kwargs.vram")
        remarks.append(f"The job itself bounds the weights on the card: offload_kwargs.vram is {own}.")
    if model.offload.mode and not model.offload.disk:
        machine = replace(machine, disk=None, disk_title="")
    job = Job("train", cases[0].tokens, None, None, process.rank, codec, compute)
    found, missing = _models(process, arch, cases[0], job, remarks)
    planned = [*_plan_all(found, machine, vram, cases), *missing]
    if model.offload.codec == "auto" and codec == "raw" and any(found.streams_16bit for found in planned):
        remarks.append(
            "16-bit weights are planned to cross as they are. The job's `codec: auto` packs them without loss where Triton "
            "runs and that is faster; --codec lossless shows the step times then."
        )
    lines, reasons = _advice(process, planned, vram)
    return ProcessPlan(process, tuple(planned), lines, (*remarks, *reasons))


def _remarks(process: Process, arch: Architecture) -> Iterable[str]:
    """Yield the sentences about settings that change what a plan is worth."""
    model = process.model
    if model.arch not in ARCHES:
        yield (
            f"arch {model.arch} is not known here: a token is taken to cover {arch.patch} x {arch.patch} pixels, and a "
            f"caption to have {arch.text_tokens} tokens."
        )
    if any(data.frames > 1 for data in process.datasets) and not arch.clip:
        yield f"num_frames is not counted: arch {model.arch} is not known to make clips."
    if not process.checkpointing:
        yield (
            "gradient_checkpointing is false: activations take more memory than is counted here, and autograd keeps "
            "more weights on the card. Set it to true."
        )
    if process.network not in (None, "lora", "locon"):
        yield f"network.type {process.network} is counted as a LoRA of rank {process.rank}."
    for qtype, key in ((model.qtype, "qtype"), (model.qtype_te, "qtype_te")):
        if qtype is not None and not quant_of(qtype, process.dtype)[1]:
            yield f"{key} {qtype} is not known here; its weights are counted in {quant_of(None, process.dtype)[0].name}."
    if process.trains_text_encoder:
        yield "train_text_encoder is true: the text encoder's gradients are not counted."
    if model.stock_offloading:
        yield "layer_offloading is not needed beside offload; remove it."


def _models(
    process: Process, arch: Architecture, case: Case, job: Job, remarks: list[str]
) -> tuple[list[_Found], list[PlannedModel]]:
    """Return the models of `process` whose shapes are known, and those whose shapes are not.

    Sentences about models that are not planned at all are added to `remarks`.
    """
    model = process.model
    found, missing = [], []
    try:
        shape = _transformer(process, arch)
    except (CaromError, ValueError) as error:
        missing.append(PlannedModel("transformer", model.path, True, arch.transformers, problem=str(error)))
    else:
        shape = replace(shape, sample_tokens=case.sample_tokens, sample=case.title)
        quant = quant_of(model.qtype, process.dtype)[0]
        idle = model.options.get("train_high_noise") is False or model.options.get("train_low_noise") is False
        copies = 1 if idle else arch.transformers
        found.append(_Found("transformer", shape.title, shape, replace(job, quant=quant), True, copies))
    quant = quant_of(model.qtype_te, process.dtype)[0]
    every_step = not process.caches_text
    captions = process.batch if every_step else 1
    for name, shape in _encoders(process, arch, remarks):
        tokens = captions * (arch.text_tokens or shape.sample_tokens)
        # It processes a caption once and generates nothing: no key-value cache, no output head.
        shape = replace(shape, kind="encoder", vocabulary=0, sample_tokens=tokens // captions)
        asked = replace(job, mode="infer", tokens=tokens, quant=quant)
        found.append(_Found("text encoder", name, shape, asked, every_step))
    return found, missing


def _transformer(process: Process, arch: Architecture) -> Shape:
    """Return the shape of the process's transformer.

    Raises a CaromError for a bad file, and ValueError for a model that is not on disk and not known, or whose weights
    themselves are trained.
    """
    path = process.model.path
    if process.network is None:
        raise ValueError(
            "The process has no `network`, so it trains the weights themselves; only the training of a LoRA can be planned"
        )
    if os.path.exists(path):
        return shape_files.read_shape(path)
    other = next((part for part in arch.unlike if part in path.lower()), None)
    if arch.shape is None or other is not None:
        why = (
            f"arch {process.model.arch} has no known shape here"
            if other is None
            else f"{other} has another shape"
        )
        raise ValueError(
            f"{path} is not on this machine, and {why}; download it and write its folder or .safetensors file as "
            "name_or_path"
        )
    return shapes.find_shape(arch.shape)


def _encoders(process: Process, arch: Architecture, remarks: list[str]) -> list[tuple[str, Shape]]:
    """Return (name, shape) of each text encoder that can be read or is known, and say in `remarks` what is not."""
    folder, found = process.model.extras, []
    if os.path.isdir(folder):
        for name in ENCODERS:
            path = os.path.join(folder, name)
            if not os.path.isdir(path):
                continue
            try:
                found.append((name, shape_files.read_shape(path)))
            except CaromError as error:
                remarks.append(f"{name} is not planned: {error}.")
    if not found and arch.encoder is not None:
        shape = shapes.find_shape(arch.encoder)
        found.append((shape.title, shape))
    if not found:
        remarks.append(
            f"Text encoders are not planned, because {folder} has no folder {ENCODERS[0]} on this machine. "
            + (
                "They run before the training and are then unloaded."
                if process.caches_text
                else "They run in every step and share the card; with cache_text_embeddings: true they do not."
            )
        )
    return found


def _plan_all(
    found: list[_Found], machine: Machine, vram: int | None, cases: list[Case]
) -> list[PlannedModel]:
    """Return the plans of all models. Models of every step share the VRAM by size, as in ai-toolkit's jobs."""
    together = [model for model in found if model.every_step]
    total = sum(model.nbytes for model in together)
    planned = []
    for model in found:
        limit = vram
        if model.every_step and (len(together) > 1 or model.copies > 1):
            tokens = model.job.tokens or model.shape.sample_tokens
            free = machine.card.vram - reserved_vram(model.shape, model.job, tokens).total
            room = max(0, free if vram is None else min(free, vram))
            limit = int(room * (model.nbytes / model.copies) / total) // MIB * MIB
        planned.append(_plan_one(model, machine, limit, cases))
    return _check_ram(planned, machine)


def _check_ram(planned: list[PlannedModel], machine: Machine) -> list[PlannedModel]:
    """Return `planned`, without the plans of the models of every step where RAM cannot hold what streams of all of
    them: each was planned as if it were alone.
    """
    together = [model for model in planned if model.every_step and model.plan]
    waits = sum(
        model.copies * model.plan.outcome.work.streamed_bytes for model in together if model.plan is not None
    )
    if waits <= machine.host_bytes or machine.disk is not None:
        return planned
    problem = (
        f"{format_size(waits)} of weights of the models of a step do not fit on the card together, and RAM can hold "
        f"{format_size(machine.host_bytes)} of them; take more RAM (--ram), a smaller qtype, or a drive (--nvme, and `disk` in offload_kwargs)"
    )
    return [
        replace(model, plan=None, cases=(), problem=problem) if model in together else model
        for model in planned
    ]


def _plan_one(model: _Found, machine: Machine, limit: int | None, cases: list[Case]) -> PlannedModel:
    """Return the plan of one model whose weights on the card are limited to `limit` bytes."""
    planned = PlannedModel(model.role, model.name, model.every_step, model.copies, limit)
    try:
        plan = model_plan.plan(model.shape, machine, replace(model.job, vram=limit))
    except BudgetError as error:
        drive = " and `disk` in the job's offload_kwargs" if "--nvme" in str(error) else ""
        return replace(planned, problem=f"{error}{drive}")
    steps = []
    if model.role == "transformer":
        # The layout is that of the step with the most tokens; smaller ones run with it.
        held = replace(plan.job, codec=plan.outcome.codec, vram=int(plan.outcome.vram.weights))
        for case in cases[:MOST_CASES]:
            shape = replace(model.shape, sample_tokens=case.sample_tokens, sample=case.title)
            at = plan.outcome if case is cases[0] else evaluate(shape, machine, held, case.tokens)
            steps.append((case, at))
    return replace(planned, plan=plan, cases=tuple(steps))


def _advice(
    process: Process, planned: list[PlannedModel], vram: int | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the lines to add under `model:` of the process, and remarks that explain where there are none.

    Options are written only where their default is not right, which is where the caller limits the weights on the
    card to `vram` bytes.
    """
    own = process.model.offload
    if own.mode is not None:
        return (), (f"The job has `offload: {own.mode}` already; nothing has to be added.",)
    if any(found.problem for found in planned if found.role == "transformer"):
        return (), ()
    if not any(found.streams for found in planned):
        return (), ("Every model that was planned fits on the card, so the job needs no offload line.",)
    options = [] if vram is None else [f"vram: {vram // MIB}MiB"]
    if any(found.plan is not None and found.plan.from_drive_bytes for found in planned):
        options.append("disk: auto")
    kwargs = [f"offload_kwargs: {{{', '.join(options)}}}"] if options else []
    return ("offload: bouncing", *kwargs), ()
