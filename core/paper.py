"""Planning on paper: what a model would do on a machine, from its shape and rates alone. Pure; nothing is loaded.

Given a `Shape`, a `Machine` and a `Job`, says which layers stay on the card and which stream, from where, the VRAM by
use, the step's time and what it waits for, the best batch, and what another drive, card or more RAM would change. The
same input always gives the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from . import cost, presets
from .cost import Rates, Step, VramUse, Work
from .errors import BudgetError
from .presets import GB, Card, Drive, Quant
from .shapes import Group, Shape
from .sizes import GIB, format_size

SLOTS = 2  # device slots a streamed layer lands in: one computes while the other fills
RAM_KEPT_LEAST, RAM_KEPT_SHARE = 4 * GIB, 0.20  # left to the system and the program itself
BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
SWEEP = tuple(1 << power for power in range(8, 17))
NEARLY = 1.02  # a larger batch must be this much faster to be worth its memory


@dataclass(frozen=True)
class Machine:
    """A card with what is around it. Bytes and bytes/s; `ram` None: as much as is needed; `disk` None: no drive.

    `ram_usable` where it was measured (else a share of `ram` is left to the system); `source` says where figures come from.
    """

    card: Card
    ram: int | None = None
    disk: float | None = None
    disk_title: str = ""
    gds: bool = False
    ram_usable: int | None = None
    source: str = ""

    def rates(self, job: Job) -> Rates:
        decode = self.card.memory * presets.LOSSLESS_DECODE_PER_MEMORY if job.codec == "lossless" else None
        compute = self.card.bf16
        if job.compute == "nvfp4":
            if self.card.nvfp4 is None:
                raise ValueError(f"{self.card.title} is not known to compute in NVFP4; use --compute bf16")
            compute = self.card.nvfp4
        return Rates(compute, self.card.link, self.disk, self.gds, self.card.memory, decode)

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
class Placement:
    """Which units stay. `resident`: count by group, in the shape's order; bytes of one pass."""

    resident: tuple[int, ...]
    resident_bytes: int
    slot_bytes: int
    streamed_wire: int
    streamed_raw: int


@dataclass(frozen=True)
class Outcome:
    """A plan at one number of tokens."""

    tokens: int
    placement: Placement
    vram: VramUse
    step: Step
    work: Work

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step.seconds


def wire_bytes(group: Group, job: Job) -> int:
    """Bytes of one layer on the wire: raw, or re-coded without loss where they are 16-bit."""
    raw = group.bytes_in(job.quant)
    is_16bit = group.params and abs(raw * 8 / group.params - 16) < 0.1
    return int(raw * presets.LOSSLESS_RATIO) if job.codec == "lossless" and is_16bit else raw


def _slot_bytes(group: Group, job: Job) -> int:
    """A slot, with the staging buffer that a coded layer lands in first."""
    raw, wire = group.bytes_in(job.quant), wire_bytes(group, job)
    return raw if wire == raw else raw + wire


def _cuts(shape: Shape, job: Job) -> list[tuple[list[int], list[int], int]]:
    """(groups that must stay, groups that may stream, slot bytes) for each choice of the largest layer that streams."""
    order = sorted(range(len(shape.groups)), key=lambda i: (-shape.groups[i].bytes_in(job.quant), i))
    return [
        (order[:i], order[i:], SLOTS * _slot_bytes(shape.groups[order[i]], job)) for i in range(len(order))
    ]


def least_weights(shape: Shape, job: Job) -> int:
    """The smallest weight budget in bytes that works."""
    size = [group.count * group.bytes_in(job.quant) for group in shape.groups]
    return min(sum(size), *(sum(size[i] for i in stay) + slots for stay, _, slots in _cuts(shape, job)))


def place(shape: Shape, job: Job, budget: int) -> Placement | None:
    """The placement with most resident bytes within `budget` bytes of weights and slots; None where none fits.

    Layers of one size are interchangeable, so only counts matter: for each choice of the largest streamed layer (which
    sets the slots' size) the rest is filled largest first. Resident bytes never fall as the budget grows.
    """
    groups, size = shape.groups, [group.bytes_in(job.quant) for group in shape.groups]
    total = shape.bytes_in(job.quant)
    if total <= budget:
        return Placement(tuple(group.count for group in groups), total, 0, 0, 0)
    best: Placement | None = None
    for stay, may, slots in _cuts(shape, job):
        counts = [0] * len(groups)
        left = budget - slots
        for i in stay:
            counts[i] = groups[i].count
            left -= counts[i] * size[i]
        if left < 0:
            continue
        for i in may:
            counts[i] = min(groups[i].count, left // size[i]) if size[i] else groups[i].count
            left -= counts[i] * size[i]
        wire = sum(
            (group.count - n) * wire_bytes(group, job) for group, n in zip(groups, counts, strict=True)
        )
        raw = sum(
            (g.count - n) * g.bytes_in(job.quant)
            for g, n in zip(groups, counts, strict=True)
            if _slot_bytes(g, job) != g.bytes_in(job.quant)
        )
        found = Placement(tuple(counts), budget - slots - left, slots, wire, raw)
        if best is None or (found.resident_bytes, -found.slot_bytes) > (
            best.resident_bytes,
            -best.slot_bytes,
        ):
            best = found
    return best


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
        kept_bytes=min(placement.streamed_wire, SLOTS * smallest),
        attention_per_token=shape.attention_per_token(min(tokens, shape.sample_tokens)),
        device_bytes=touched,
        decoded_bytes=placement.streamed_raw,
    )


def evaluate(shape: Shape, machine: Machine, job: Job, tokens: int) -> Outcome:
    """The plan at `tokens` a step. Raises BudgetError, which states the least that works."""
    use = reserve(shape, job, tokens)
    free = machine.card.vram - use.total
    budget = free if job.vram is None else min(free, job.vram)
    placement = place(shape, job, budget)
    if placement is None:
        least = least_weights(shape, job)
        if job.vram is not None and job.vram < least <= free:
            raise BudgetError(
                f"a weight budget of {format_size(job.vram)} cannot hold two slots of the largest layer; the least "
                f"that works is --vram {_mib_up(least)}MiB", least,
            )  # fmt: skip
        raise BudgetError(
            f"{tokens} tokens of {shape.title} need {format_size(use.total)} beside the weights and at least "
            f"{format_size(least)} for them: {format_size(use.total + least)} of VRAM is the least that works, "
            f"{machine.card.title} offers {format_size(machine.card.vram)}; take fewer --tokens or a smaller --quant",
            use.total + least,
        )  # fmt: skip
    if machine.disk is None and placement.streamed_wire > machine.host_bytes:
        least_ram = placement.streamed_wire + max(
            RAM_KEPT_LEAST, int(placement.streamed_wire * RAM_KEPT_SHARE / (1 - RAM_KEPT_SHARE)) + 1
        )
        raise BudgetError(
            f"{format_size(placement.streamed_wire)} of weights do not fit on the card and RAM can hold "
            f"{format_size(machine.host_bytes)} of them; the least that works is --ram {_mib_up(least_ram)}MiB, or name "
            "a drive to stream from (--nvme gen4)", least_ram,
        )  # fmt: skip
    work = work_of(shape, machine, job, placement, tokens)
    step = cost.step_time(tokens, work, machine.rates(job), job.mode)
    vram = replace(use, resident=placement.resident_bytes, slots=placement.slot_bytes)
    return Outcome(tokens, placement, vram, step, work)


def _mib_up(count: float) -> int:
    return -(-int(count) // (1 << 20))


@dataclass(frozen=True)
class PaperPlan:
    """A whole answer; `to_dict()` is what `carom plan --json` prints."""

    shape: Shape
    machine: Machine
    job: Job
    outcome: Outcome
    thresholds: dict[str, float]
    best: Outcome | None
    what_if: tuple[tuple[str, str, Outcome | None], ...]

    @property
    def resident_layers(self) -> int:
        return sum(
            count
            for count, group in zip(self.outcome.placement.resident, self.shape.groups, strict=True)
            if group.repeated
        )

    @property
    def streamed_layers(self) -> int:
        return self.shape.layers - self.resident_layers

    @property
    def from_drive_bytes(self) -> int:
        """Bytes a pass reads from the drive."""
        return int(self.outcome.work.streamed_bytes - self.outcome.work.cached_bytes)


def thresholds(shape: Shape, machine: Machine, job: Job, outcome: Outcome) -> dict[str, float]:
    """Tokens from which streaming is free, by four readings, at the residency of `outcome`.

    `published_rule`: 3 computes (inference: 1) hide one transfer, every byte from the drive. `two_transfers`: the same
    computes hide one transfer a phase. `by_phase_from_drive`: each phase hides its own. `by_phase`: that, with what host
    memory and the slots at each turn spare, and with attention's FLOPs: Carom's own prediction.
    """
    rates, work = machine.rates(job), outcome.work
    phases = cost.phases_of(job.mode)
    passes = sum(matrix for _, matrix, _ in phases)
    bandwidth = cost.effective_bandwidth(rates.link, rates.disk, rates.gds)

    def rule(computes: float, transfers: int) -> float:
        return cost.zero_overhead_tokens(
            work.streamed_bytes,
            work.active_params,
            rates.compute,
            bandwidth,
            computes=computes,
            transfers=transfers,
        )

    by_phase = cost.zero_overhead_tokens_by_phase(
        replace(work, device_bytes=0.0), rates, job.mode,
        attention_of=lambda tokens: shape.attention_per_token(min(tokens, shape.sample_tokens)),
    )  # fmt: skip
    return {
        "published_rule": rule(passes, 1),
        "two_transfers": rule(passes, len(phases)),
        "by_phase_from_drive": rule(min(matrix for _, matrix, _ in phases), 1),
        "by_phase": by_phase,
    }


def _try(shape: Shape, machine: Machine, job: Job, tokens: int) -> Outcome | None:
    try:
        return evaluate(shape, machine, job, tokens)
    except BudgetError:
        return None


def best_batch(shape: Shape, machine: Machine, job: Job, sample: int) -> Outcome | None:
    """Batch and residency together: most tokens a second over BATCHES; the smallest batch that is within 2 % of it."""
    found = [outcome for batch in BATCHES if (outcome := _try(shape, machine, job, batch * sample))]
    top = max((outcome.tokens_per_second for outcome in found), default=0.0)
    return next((outcome for outcome in found if outcome.tokens_per_second * NEARLY >= top), None)


def configurations(shape: Shape, machine: Machine, job: Job) -> list[tuple[str, str, Machine, Job]]:
    """(what changes, how to ask for it, machine, job) of each change worth knowing."""
    changes = []
    card = machine.card
    if machine.disk is not None:
        faster = [drive for drive in presets.DRIVES.values() if drive.rate > machine.disk * 1.2]
        if faster:
            changes.append(
                (f"{faster[0].title}", f"--nvme {faster[0].name}", with_drive(machine, faster[0]), job)
            )
    if machine.ram is not None:
        more = [step for step in presets.RAM_STEPS if step * GIB > machine.ram * 1.2]
        if more:
            roomier = replace(machine, ram=more[0] * GIB, ram_usable=None)
            changes.append((f"{more[0]} GiB of RAM", f"--ram {more[0]}GiB", roomier, job))
    if card.good_link is not None and card.good_link > card.link:
        rate = card.good_link
        good = replace(machine, card=replace(card, link=rate, good_link=None))
        changes.append(
            (f"a host whose link reaches {rate / GB:g} GB/s", f"--link {rate / GB:g}GB", good, job)
        )
    larger = [presets.CARDS[name] for name in presets.UPGRADES if presets.CARDS[name].vram > card.vram * 1.1]
    if larger and job.vram is None and not (job.compute == "nvfp4" and larger[0].nvfp4 is None):
        changes.append(
            (
                f"an {larger[0].title} ({larger[0].vram // GB} GB)",
                f"--gpu {larger[0].name}",
                replace(machine, card=larger[0]),
                job,
            )
        )
    if job.codec == "raw" and any(
        wire_bytes(group, replace(job, codec="lossless")) < group.bytes_in(job.quant)
        for group in shape.groups
    ):
        changes.append(
            ("lossless packing of the weights", "--codec lossless", machine, replace(job, codec="lossless"))
        )
    bits = shape.bytes_in(job.quant) * 8 / shape.params
    for name in ("fp8", "nf4"):
        if presets.QUANT_BITS[name] < bits * 0.75:
            changes.append(
                (
                    f"{name} weights (lossy)",
                    f"--quant {name}",
                    machine,
                    replace(job, quant=presets.find_quant(name), codec="raw"),
                )
            )
            break
    return changes


def with_drive(machine: Machine, drive: Drive) -> Machine:
    return replace(machine, disk=drive.rate, disk_title=drive.title)


def sweep(
    shape: Shape, machine: Machine, job: Job, points: Iterable[int] = SWEEP
) -> list[tuple[int, Outcome | None]]:
    """The plan over `points` tokens, residency chosen anew at each; None where it does not fit."""
    return [(tokens, _try(shape, machine, job, tokens)) for tokens in points]


def plan(shape: Shape, machine: Machine, job: Job) -> PaperPlan:
    """The whole answer. Raises BudgetError (the least that works) and ValueError (a bad setting)."""
    if job.tokens is not None and not 1 <= job.tokens <= 1 << 30:
        raise ValueError(f"tokens={job.tokens} is out of range; between 1 and {1 << 30}")
    if not 1 <= job.rank <= 1 << 16:
        raise ValueError(f"rank={job.rank} is out of range; between 1 and {1 << 16}")
    tokens = job.tokens or shape.sample_tokens
    outcome = evaluate(shape, machine, job, tokens)
    changed = tuple(
        (what, how, _try(shape, other, changed, tokens))
        for what, how, other, changed in configurations(shape, machine, job)
    )
    return PaperPlan(
        shape, machine, job, outcome, thresholds(shape, machine, job, outcome),
        best_batch(shape, machine, job, min(tokens, shape.sample_tokens)), changed,
    )  # fmt: skip


def _whole(value: float) -> int | None:
    """Tokens as JSON: rounded up; None for never."""
    return None if math.isinf(value) else math.ceil(value)


def _brief(shape: Shape, outcome: Outcome | None) -> dict | None:
    if outcome is None:
        return None
    resident = sum(
        n for n, group in zip(outcome.placement.resident, shape.groups, strict=True) if group.repeated
    )
    return {
        "tokens": outcome.tokens,
        "resident_layers": resident,
        "streamed_layers": shape.layers - resident,
        "step_seconds": outcome.step.seconds,
        "tokens_per_second": outcome.tokens_per_second,
        "overhead": outcome.step.overhead,
        "bound_by": outcome.step.bound_by,
    }


def to_dict(plan: PaperPlan) -> dict:
    """The plan as plain data. Sizes in bytes, times in seconds, overhead 0.5 = 50 %; null thresholds: never."""
    shape, machine, job, outcome = plan.shape, plan.machine, plan.job, plan.outcome
    card, vram, rates = machine.card, outcome.vram, machine.rates(job)
    sample = min(outcome.tokens, shape.sample_tokens)
    return {
        "model": shape.name, "title": shape.title, "source": shape.source, "note": shape.note,
        "mode": job.mode, "quant": job.quant.name if job.quant else "as stored", "codec": job.codec,
        "tokens": outcome.tokens, "layers": shape.layers,
        "resident_layers": plan.resident_layers, "streamed_layers": plan.streamed_layers,
        "zero_overhead_tokens": _whole(plan.thresholds["published_rule"]),
        "zero_overhead_tokens_by_phase": _whole(plan.thresholds["by_phase"]),
        "thresholds": {name: _whole(value) for name, value in plan.thresholds.items()},
        "step_seconds": outcome.step.seconds, "compute_seconds": outcome.step.compute_seconds,
        "overhead": outcome.step.overhead, "bound_by": outcome.step.bound_by,
        "phases": [
            {"name": phase.name, "seconds": phase.seconds, "compute_seconds": phase.compute,
             "link_seconds": phase.link, "disk_seconds": phase.disk, "bound_by": phase.bound_by}
            for phase in outcome.step.phases
        ],
        "groups": [
            {"name": group.name, "count": group.count, "bytes_each": group.bytes_in(job.quant), "resident": count,
             "is_layer": group.repeated}
            for group, count in zip(shape.groups, outcome.placement.resident, strict=True)
        ],
        "model_bytes": shape.bytes_in(job.quant),
        "vram": {
            "resident_bytes": vram.resident, "slot_bytes": vram.slots, "adapter_bytes": vram.adapters,
            "gradient_bytes": vram.gradients, "optimizer_bytes": vram.optimizer,
            "activation_bytes": vram.activations, "context_bytes": vram.context,
            "weights_bytes": vram.weights, "total_bytes": vram.total, "capacity_bytes": card.vram,
        },
        "host": {
            "streamed_bytes": outcome.placement.streamed_wire, "ram_bytes": int(outcome.work.cached_bytes),
            "drive_bytes": plan.from_drive_bytes,
        },
        "best": (_brief(shape, plan.best) or {}) | ({"batch": plan.best.tokens // sample} if plan.best else {}),
        "what_if": [
            {"change": what, "option": how, "fits": other is not None,
             "speedup": outcome.step.seconds / other.step.seconds if other else None, **(_brief(shape, other) or {})}
            for what, how, other in plan.what_if
        ],
        "sweep": [
            {"tokens": tokens, "fits": at is not None, **(_brief(shape, at) or {})}
            for tokens, at in sweep(shape, machine, job)
        ],
        "hardware": {
            "gpu": card.title, "source": machine.source or card.source, "vram_bytes": card.vram,
            "flops": rates.compute, "link_bytes_per_second": rates.link, "disk_bytes_per_second": rates.disk,
            "disk": machine.disk_title, "gds": machine.gds, "ram_bytes": machine.ram,
        },
    }  # fmt: skip
