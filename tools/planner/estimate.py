"""Estimates of a model's memory and step time on a machine, from the model's shape and the machine's rates
alone.

Given a `Shape`, a `Machine`, a `Job` and a number of tokens, `evaluate` returns which layers stay on the card
and which stream, the VRAM by use, the step's time and the resource that limits the step. Nothing is loaded or
run, and the same input always gives the same result. model_plan.py combines several estimates into a plan.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, replace

from ...core.common.errors import BudgetError
from ...core.common.sizes import GIB, format_size, round_up_to_mib
from . import cost_model, efficiency, presets
from .cost_model import Rates, Step, VramUse, Work
from .efficiency import Efficiency
from .placement import (
    SLOTS,
    Placement,
    least_weight_budget,
    packed_placements,
    part_wire_bytes,
    place,
    wire_bytes,
)
from .presets import Card, Quant
from .shapes import Shape

# RAM that is left to the system and the program itself: at least this many bytes, and this share of the RAM.
RAM_KEPT_LEAST, RAM_KEPT_SHARE = 4 * GIB, 0.20


@dataclass(frozen=True)
class Machine:
    """A machine to plan for: a card, host memory, a drive and the host's speed.

    Sizes in bytes, rates in bytes/s.

    `ram`: host memory (None: as much as is needed); `ram_usable`: the part of it that weights may use, where
    that was measured (None: all but a share that is left to the system); `disk`: rate of the drive (None: no
    drive); `gds`: whether the drive reads to the card directly; `source`: where the figures come from;
    `host_cost`: seconds that Python takes to issue work.
    """

    card: Card
    ram: int | None = None
    disk: float | None = None
    disk_title: str = ""
    gds: bool = False
    ram_usable: int | None = None
    source: str = ""
    host_cost: presets.HostCost = presets.HOST_COST

    def efficiency(self, shape: Shape) -> Efficiency:
        """Return the share of the card's dense rate that the model's steps reach."""
        return efficiency.PUBLISHED if self.card.published else efficiency.efficiency_of(shape.family)

    def rates(self, shape: Shape, job: Job) -> Rates:
        """Return the rates for `job` on the model `shape`.

        Raises ValueError where the card does not compute in the job's format.
        """
        link, decode = self.card.link, None
        if job.codec == "lossless":
            link *= presets.LOSSLESS_LINK_SHARE
            decode = self.card.memory * presets.LOSSLESS_DECODE_PER_MEMORY
        compute = self.card.bf16
        if job.compute == "nvfp4":
            if self.card.nvfp4 is None:
                raise ValueError(f"{self.card.title} is not known to compute in NVFP4; use --compute bf16")
            compute = self.card.nvfp4
        share = self.efficiency(shape).of(job.mode)
        return Rates(
            efficiency.effective_rate(compute, self.card.bf16, share), link, self.disk, self.gds, self.card.memory,
            decode, self.host_cost.of(job.mode), self.host_cost.use,
        )  # fmt: skip

    @property
    def host_bytes(self) -> float:
        """The bytes of weights that host memory can hold; 0 with a drive and unknown RAM, as in the published
        rule.
        """
        if self.ram_usable is not None:
            return self.ram_usable
        if self.ram is None:
            return math.inf if self.disk is None else 0
        return max(0, self.ram - max(RAM_KEPT_LEAST, int(RAM_KEPT_SHARE * self.ram)))


@dataclass(frozen=True)
class Job:
    """The task to plan: inference or LoRA training, and its settings.

    `mode`: "infer" or "train"; `tokens`: tokens of a step (None: one sample); `quant`: format of the weights
    (None: as stored); `vram`: limit in bytes for weights on the card; `rank`: LoRA rank; `codec`: "raw" or
    "lossless"; `compute`: number format in which the card computes; `in_flight`: microbatches whose layer inputs are
    kept at once in training (more than 1 in a pipeline).
    """

    mode: str = "infer"
    tokens: int | None = None
    quant: Quant | None = None
    vram: int | None = None
    rank: int = 16
    codec: str = "raw"
    compute: str = "bf16"
    in_flight: int = 1


@dataclass(frozen=True)
class Estimate:
    """The estimate for a step of `tokens` tokens: placement of the layers, VRAM by use, step time and codec."""

    tokens: int
    placement: Placement
    vram: VramUse
    step: Step
    work: Work
    codec: str

    @property
    def tokens_per_second(self) -> float:
        """The throughput in tokens per second."""
        return self.tokens / self.step.seconds


def reserved_vram(shape: Shape, job: Job, tokens: int) -> VramUse:
    """Return the VRAM for everything except weights, at `tokens` tokens a step.

    Activations, adapters and gradients have 16 bits; 8-bit Adam has two states. Training keeps each layer's
    input (activation checkpointing) and, at its peak, either the saved tensors of one layer or the logits (2
    bytes each, and 4 for the loss in fp32). Inference keeps the live tensors of one layer and the KV cache of
    a language model.
    """
    live = 2 * tokens * max(group.live_width for group in shape.groups)
    if job.mode == "infer":
        cache = 2 * tokens * shape.kv_width * shape.layers if shape.kind == "language" else 0
        return VramUse(0, 0, 0, 0, 0, live + cache, presets.CONTEXT_BYTES)
    params = job.rank * sum(group.count * group.adapter_width for group in shape.groups if group.repeated)
    saved = 2 * tokens * max(group.saved_width for group in shape.groups)
    kept = 2 * tokens * shape.layers * shape.hidden * job.in_flight
    activations = kept + max(saved, 6 * tokens * shape.vocabulary)
    return VramUse(0, 0, 2 * params, 2 * params, 2 * params, activations, presets.CONTEXT_BYTES)


def cached_bytes(shape: Shape, machine: Machine, job: Job, placement: Placement) -> float:
    """Return the bytes of the streamed layers that host memory keeps from one pass to the next.

    If it cannot hold all of them, a session's cache divides it into buffers and uses some for reading ahead; this
    is the same division. 0 where host memory is too small for two buffers.
    """
    streamed, host = placement.streamed_wire, machine.host_bytes
    if streamed <= host:
        return streamed
    # Imported here, because it imports torch, and most plans need it not.
    from ...core.host.cache_pieces import choose_buffers

    sizes = [
        wire_bytes(group, job)
        for group, resident in zip(shape.groups, placement.resident, strict=True)
        for _ in range(group.count - resident)
    ]
    try:
        buffers = choose_buffers(sizes, int(host))
    except BudgetError:
        return 0
    return min(streamed, (buffers.count - buffers.rotating) * buffers.nbytes)


def work_of(shape: Shape, machine: Machine, job: Job, placement: Placement, tokens: int) -> Work:
    """Return the amounts of computation and transfer of a placement, the input of the cost model."""
    smallest = min((part_wire_bytes(group, job) for group in shape.groups if group.repeated), default=0)
    streams = sum(group.count - n for n, group in zip(placement.resident, shape.groups, strict=True))
    # Layers that stay packed are unpacked into the slots too. Of the slots' contents at the change from
    # forward to backward, only the share of the streamed layers saves a copy.
    uses = streams + placement.packed_units
    # A step of few tokens reads few experts, and looks up few rows of an embedding.
    touched = sum(
        group.count * group.bytes_in(job.quant) * min(1.0, group.active_params / group.params * tokens)
        for group in shape.groups
        if group.params
    )
    return Work(
        active_params=shape.active_params,
        streamed_bytes=placement.streamed_wire,
        cached_bytes=cached_bytes(shape, machine, job, placement),
        kept_bytes=min(placement.streamed_wire, SLOTS * smallest * streams / uses if uses else 0.0),
        attention_per_token=shape.attention_per_token(min(tokens, shape.sample_tokens)),
        device_bytes=touched,
        decoded_bytes=placement.streamed_raw + placement.packed_raw,
        layers=sum(group.count for group in shape.groups),
        uses=uses,
    )


def evaluate(shape: Shape, machine: Machine, job: Job, tokens: int) -> Estimate:
    """Return the estimate at `tokens` tokens a step.

    Raises BudgetError, which states the least memory that works.

    Unpacking takes computing time, so a job with the lossless codec falls back to raw weights where those are
    faster, or where only those fit.
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


def _evaluate(shape: Shape, machine: Machine, job: Job, tokens: int) -> Estimate:
    """Return the estimate with the job's own codec. Raises BudgetError where VRAM or RAM is too small."""
    use = reserved_vram(shape, job, tokens)
    free = machine.card.vram - use.total
    budget = free if job.vram is None else min(free, job.vram)
    placement = place(shape, job, budget)
    if placement is None:
        least = least_weight_budget(shape, job)
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
    # Layers that stay packed keep a copy in host memory, so they must fit there. Among placements of equal
    # time, `min` takes the first, which unpacks the least.
    fitting = (
        found for found in packed_placements(shape, job, budget) if found.host_bytes <= machine.host_bytes
    )
    tried = []
    for found in (placement, *fitting):
        work = work_of(shape, machine, job, found, tokens)
        tried.append((cost_model.step_time(tokens, work, machine.rates(shape, job), job.mode), work, found))
    step, work, placement = min(tried, key=lambda candidate: candidate[0].seconds)
    vram = replace(use, resident=placement.resident_bytes, slots=placement.slot_bytes)
    return Estimate(tokens, placement, vram, step, work, job.codec)
