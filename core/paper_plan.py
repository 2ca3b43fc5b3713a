"""A whole plan on paper: thresholds, the best batch, what a change would bring, and all of it as plain data. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from . import cost, presets
from .cost import Step
from .errors import BudgetError
from .paper import Job, Machine, Outcome, evaluate, work_of
from .paper_place import wire_bytes
from .presets import GB, Drive
from .shapes import Shape
from .sizes import GIB

BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
SWEEP = tuple(1 << power for power in range(8, 17))
NEARLY = 1.02  # a larger batch must be this much faster to be worth its memory


@dataclass(frozen=True)
class PaperPlan:
    """A whole answer; `to_dict()` is what `carom plan --json` prints."""

    shape: Shape
    machine: Machine
    job: Job
    outcome: Outcome
    thresholds: dict[str, float]
    best: Outcome | None
    generation: Step | None  # one token more of a language model, after its prompt
    what_if: tuple[tuple[str, str, Outcome | None], ...]

    @property
    def resident_layers(self) -> int:
        return sum(
            count
            for count, group in zip(self.outcome.placement.resident, self.shape.groups, strict=True)
            if group.repeated
        )

    @property
    def packed_layers(self) -> int:
        """Of the resident ones, those that stay packed."""
        packed = self.outcome.placement.packed or (0,) * len(self.shape.groups)
        return sum(n for n, group in zip(packed, self.shape.groups, strict=True) if group.repeated)

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
    layers = [group for group in shape.groups if group.repeated]
    bits = 8 * sum(g.count * g.bytes_in(job.quant) for g in layers) / sum(g.count * g.params for g in layers)
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
    generation = None
    if shape.kind == "language" and job.mode == "infer":
        used = replace(job, codec=outcome.codec)
        one = work_of(shape, machine, used, outcome.placement, 1)
        one = replace(one, attention_per_token=outcome.work.attention_per_token)
        generation = cost.step_time(1, one, machine.rates(used), "infer")
    return PaperPlan(
        shape, machine, job, outcome, thresholds(shape, machine, job, outcome),
        best_batch(shape, machine, job, min(tokens, shape.sample_tokens)), generation, changed,
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
        "resident_packed_units": outcome.placement.packed_units,
        "step_seconds": outcome.step.seconds,
        "tokens_per_second": outcome.tokens_per_second,
        "overhead": outcome.step.overhead,
        "bound_by": outcome.step.bound_by,
    }


def to_dict(plan: PaperPlan) -> dict:
    """The plan as plain data. Sizes in bytes, times in seconds, overhead 0.5 = 50 %; null thresholds: never."""
    shape, machine, job, outcome = plan.shape, plan.machine, plan.job, plan.outcome
    place = outcome.placement
    card, vram, rates = machine.card, outcome.vram, machine.rates(job)
    sample = min(outcome.tokens, shape.sample_tokens)
    return {
        "model": shape.name, "title": shape.title, "source": shape.source, "note": shape.note,
        "mode": job.mode, "quant": job.quant.name if job.quant else "as stored", "codec": outcome.codec,
        "tokens": outcome.tokens, "layers": shape.layers,
        "resident_layers": plan.resident_layers, "streamed_layers": plan.streamed_layers,
        "resident_packed_units": place.packed_units, "resident_packed_bytes": place.packed_bytes,
        "resident_packed_raw_bytes": place.packed_raw,
        "zero_overhead_tokens": _whole(plan.thresholds["published_rule"]),
        "zero_overhead_tokens_by_phase": _whole(plan.thresholds["by_phase"]),
        "thresholds": {name: _whole(value) for name, value in plan.thresholds.items()},
        "step_seconds": outcome.step.seconds, "compute_seconds": outcome.step.compute_seconds,
        "resident_seconds": outcome.step.resident_seconds,
        "overhead": outcome.step.overhead, "bound_by": outcome.step.bound_by,
        "phases": [
            {"name": phase.name, "seconds": phase.seconds, "compute_seconds": phase.compute,
             "link_seconds": phase.link, "disk_seconds": phase.disk, "host_seconds": phase.host, "bound_by": phase.bound_by}
            for phase in outcome.step.phases
        ],
        "groups": [
            {"name": group.name, "count": group.count, "bytes_each": group.bytes_in(job.quant), "resident": count,
             "resident_packed": packed, "is_layer": group.repeated}
            for group, count, packed in zip(
                shape.groups, place.resident, place.packed or (0,) * len(shape.groups), strict=True
            )
        ],
        "model_bytes": shape.bytes_in(job.quant),
        "vram": {
            "resident_bytes": vram.resident, "slot_bytes": vram.slots, "adapter_bytes": vram.adapters,
            "gradient_bytes": vram.gradients, "optimizer_bytes": vram.optimizer,
            "activation_bytes": vram.activations, "context_bytes": vram.context,
            "weights_bytes": vram.weights, "total_bytes": vram.total, "capacity_bytes": card.vram,
        },
        "host": {
            "streamed_bytes": place.streamed_wire, "resident_packed_bytes": place.packed_bytes, "ram_bytes": int(outcome.work.cached_bytes),
            "drive_bytes": plan.from_drive_bytes,
        },
        "best": (_brief(shape, plan.best) or {}) | ({"batch": plan.best.tokens // sample} if plan.best else {}),
        "generation_seconds_per_token": plan.generation.seconds if plan.generation else None,
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
            "host_seconds_per_layer": machine.python.layer, "host_seconds_per_streamed_layer": machine.python.use,
            "host_source": machine.python.source,
            "disk": machine.disk_title, "gds": machine.gds, "ram_bytes": machine.ram,
        },
    }  # fmt: skip
