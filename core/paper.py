"""Planning on paper: what a model would do on a machine, from its shape and rates alone. Pure; nothing is loaded.

Given a `Shape`, a `Machine`, a `Job` and a number of tokens, `evaluate` says which layers stay on the card and which
stream, from where, the VRAM by use, the step's time and what it waits for. The same input always gives the same answer.
paper_plan.py makes a whole plan of such answers.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, replace

from . import cost, presets
from .cost import Rates, Step, VramUse, Work
from .errors import BudgetError
from .paper_place import SLOTS, Placement, least_weights, place, places_packed, wire_bytes
from .presets import Card, Quant
from .shapes import Shape
from .sizes import GIB, format_size, round_up_to_mib

RAM_KEPT_LEAST, RAM_KEPT_SHARE = 4 * GIB, 0.20  # left to the system and the program itself


@dataclass(frozen=True)
class Machine:
    """A card with what is around it. Bytes and bytes/s; `ram` None: as much as is needed; `disk` None: no drive.

    `ram_usable` where it was measured (else a share of `ram` is left to the system); `source` says where figures come from;
    `python`: what issuing the card's work takes.
    """

    card: Card
    ram: int | None = None
    disk: float | None = None
    disk_title: str = ""
    gds: bool = False
    ram_usable: int | None = None
    source: str = ""
    python: presets.Python = presets.PYTHON

    def rates(self, job: Job) -> Rates:
        decode = self.card.memory * presets.LOSSLESS_DECODE_PER_MEMORY if job.codec == "lossless" else None
        compute = self.card.bf16
        if job.compute == "nvfp4":
            if self.card.nvfp4 is None:
                raise ValueError(f"{self.card.title} is not known to compute in NVFP4; use --compute bf16")
            compute = self.card.nvfp4
        return Rates(
            compute, self.card.link, self.disk, self.gds, self.card.memory, decode, self.python.layer, self.python.use
        )  # fmt: skip

    @property
    def host_bytes(self) -> float:
        """Bytes of weights that host memory can hold. With a drive and no word about RAM: none, as in the published rule."""
        if self.ram_usable is not None:
            return self.ram_usable
        if self.ram is None:
            return math.inf if self.disk is None else 0
        return max(0, self.ram - max(RAM_KEPT_LEAST, int(RAM_KEPT_SHARE * self.ram)))


@dataclass(frozen=True)
class Job:
    """What is to be done. `tokens` of a step (None: one sample); `quant` None: as stored; `vram`: bound on the weights."""

    mode: str = "infer"
    tokens: int | None = None
    quant: Quant | None = None
    vram: int | None = None
    rank: int = 16
    codec: str = "raw"
    compute: str = "bf16"


@dataclass(frozen=True)
class Outcome:
    """A plan at one number of tokens."""

    tokens: int
    placement: Placement
    vram: VramUse
    step: Step
    work: Work
    codec: str

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step.seconds


def reserve(shape: Shape, job: Job, tokens: int) -> VramUse:
    """VRAM that is not weights, at `tokens` a step: 16-bit activations, adapters and gradients, 8-bit Adam's two states.

    Training keeps each layer's input (checkpointing) and, at its peak, either one layer's saved tensors or the logits
    (2 bytes, and 4 for the loss in fp32). Inference keeps one layer's live tensors and a language model's KV cache.
    """
    live = 2 * tokens * max(group.live_width for group in shape.groups)
    if job.mode == "infer":
        cache = 2 * tokens * shape.kv_width * shape.layers if shape.kind == "language" else 0
        return VramUse(0, 0, 0, 0, 0, live + cache, presets.CONTEXT_BYTES)
    params = job.rank * sum(group.count * group.adapter_width for group in shape.groups if group.repeated)
    saved = 2 * tokens * max(group.saved_width for group in shape.groups)
    kept = 2 * tokens * shape.layers * shape.hidden
    activations = kept + max(saved, 6 * tokens * shape.vocabulary)
    return VramUse(0, 0, 2 * params, 2 * params, 2 * params, activations, presets.CONTEXT_BYTES)


def work_of(shape: Shape, machine: Machine, job: Job, placement: Placement, tokens: int) -> Work:
    """The cost model's view of a placement."""
    smallest = min((wire_bytes(group, job) for group in shape.groups if group.repeated), default=0)
    streams = sum(group.count - n for n, group in zip(placement.resident, shape.groups, strict=True))
    # What stays packed passes through the slots as well: of what they hold at a turn, its share did not cross.
    uses = streams + placement.packed_units
    # Few tokens touch few experts; an embedding is looked up, not read.
    touched = sum(
        group.count * group.bytes_in(job.quant) * min(1.0, group.active_params / group.params * tokens)
        for group in shape.groups
        if group.params
    )
    return Work(
        active_params=shape.active_params,
        streamed_bytes=placement.streamed_wire,
        cached_bytes=min(placement.streamed_wire, machine.host_bytes),
        kept_bytes=min(placement.streamed_wire, SLOTS * smallest * streams / uses if uses else 0.0),
        attention_per_token=shape.attention_per_token(min(tokens, shape.sample_tokens)),
        device_bytes=touched,
        decoded_bytes=placement.streamed_raw + placement.packed_raw,
        layers=sum(group.count for group in shape.groups),
        uses=uses,
    )


def evaluate(shape: Shape, machine: Machine, job: Job, tokens: int) -> Outcome:
    """The plan at `tokens` a step. Raises BudgetError, which states the least that works.

    Decoding is not free where compute binds, so a lossless job falls back to raw where that is faster (or alone fits).
    """
    if job.codec != "lossless":
        return _evaluate(shape, machine, job, tokens)
    raw, coded = replace(job, codec="raw"), None
    with contextlib.suppress(BudgetError):
        coded = _evaluate(shape, machine, job, tokens)
    if coded is None:
        return _evaluate(shape, machine, raw, tokens)
    with contextlib.suppress(BudgetError):
        plain = _evaluate(shape, machine, raw, tokens)
        return plain if plain.step.seconds <= coded.step.seconds else coded
    return coded


def _evaluate(shape: Shape, machine: Machine, job: Job, tokens: int) -> Outcome:
    use = reserve(shape, job, tokens)
    free = machine.card.vram - use.total
    budget = free if job.vram is None else min(free, job.vram)
    placement = place(shape, job, budget)
    if placement is None:
        least = least_weights(shape, job)
        if job.vram is not None and job.vram < least <= free:
            raise BudgetError(
                f"a weight budget of {format_size(job.vram)} cannot hold two slots of the largest layer; the least "
                f"that works is --vram {round_up_to_mib(least)}", least,
            )  # fmt: skip
        raise BudgetError(
            f"{tokens} tokens of {shape.title} need {format_size(use.total)} beside the weights and at least "
            f"{format_size(least)} for them: {format_size(use.total + least)} of VRAM is the least that works, "
            f"{machine.card.title} offers {format_size(machine.card.vram)}; take fewer --tokens or a smaller --quant",
            use.total + least,
        )  # fmt: skip
    if machine.disk is None and placement.streamed_wire > machine.host_bytes:
        least_ram = placement.streamed_wire + max(
            RAM_KEPT_LEAST, math.ceil(placement.streamed_wire * RAM_KEPT_SHARE / (1 - RAM_KEPT_SHARE))
        )
        raise BudgetError(
            f"{format_size(placement.streamed_wire)} of weights do not fit on the card and RAM can hold "
            f"{format_size(machine.host_bytes)} of them; the least that works is --ram {round_up_to_mib(least_ram)}, or name "
            "a drive to stream from (--nvme gen4)", least_ram,
        )  # fmt: skip
    # Of equals the one that unpacks less. What stays packed keeps its copy in host memory: none of a drive's weights do.
    fitting = (found for found in places_packed(shape, job, budget) if found.host_bytes <= machine.host_bytes)
    tried = []
    for found in (placement, *fitting):
        work = work_of(shape, machine, job, found, tokens)
        tried.append((cost.step_time(tokens, work, machine.rates(job), job.mode), work, found))
    step, work, placement = min(tried, key=lambda one: one[0].seconds)
    vram = replace(use, resident=placement.resident_bytes, slots=placement.slot_bytes)
    return Outcome(tokens, placement, vram, step, work, job.codec)
