"""The complete plan for a model on a machine: an estimate, thresholds, the best batch size, and the effect of
changes.

`plan` computes a `ModelPlan`, and `to_dict` converts the plan to the JSON of `carom plan`. Nothing touches a
device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ...core.common.errors import BudgetError
from ...core.common.sizes import GIB
from . import cost_model, presets
from .cost_model import Step
from .estimate import Estimate, Job, Machine, evaluate, work_of
from .placement import wire_bytes
from .presets import GB, Drive
from .shapes import Shape

BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # batch sizes tried for the best batch
SWEEP = tuple(1 << power for power in range(8, 17))  # tokens of the estimates in the JSON's "sweep"
NEARLY = 1.02  # a larger batch must have at least this many times the throughput to be worth its memory


@dataclass(frozen=True)
class ModelPlan:
    """A complete plan; `carom plan --json` prints the result of `to_dict`.

    `outcome`: the estimate for the job's tokens; `thresholds`: see `thresholds`; `best`: the estimate at the
    best batch size; `what_if`: (description of a change, command line option, estimate or None where the
    model does not fit).
    """

    shape: Shape
    machine: Machine
    job: Job
    outcome: Estimate
    thresholds: dict[str, float]
    best: Estimate | None
    generation: Step | None  # the step of a language model that generates one token after the prompt
    what_if: tuple[tuple[str, str, Estimate | None], ...]

    @property
    def resident_layers(self) -> int:
        """The number of layers that stay on the card."""
        return sum(
            count
            for count, group in zip(self.outcome.placement.resident, self.shape.groups, strict=True)
            if group.repeated
        )

    @property
    def packed_layers(self) -> int:
        """The number of resident layers that stay packed."""
        packed = self.outcome.placement.packed or (0,) * len(self.shape.groups)
        return sum(n for n, group in zip(packed, self.shape.groups, strict=True) if group.repeated)

    @property
    def streamed_layers(self) -> int:
        """The number of layers that stream."""
        return self.shape.layers - self.resident_layers

    @property
    def from_drive_bytes(self) -> int:
        """The bytes that a pass reads from the drive."""
        return int(self.outcome.work.streamed_bytes - self.outcome.work.cached_bytes)

    @property
    def drive_rate_needed(self) -> float:
        """The rate of a drive, in bytes/s, from which the drive is not what the step waits for; 0 if nothing is read
        from it.
        """
        if not self.from_drive_bytes or self.machine.disk is None:
            return 0.0
        return max(
            phase.disk * self.machine.disk / max(phase.compute + phase.decode, phase.link, phase.host)
            for phase in self.outcome.step.phases
        )


def thresholds(shape: Shape, machine: Machine, job: Job, outcome: Estimate) -> dict[str, float]:
    """Return the tokens per step from which streaming costs no time, by four rules, for the placement of
    `outcome`.

    `published_rule`: all compute passes of a step (3 in training, 1 in inference) hide one transfer of the
    streamed bytes, all read from the drive. `two_transfers`: the same passes hide one transfer for each
    phase. `by_phase_from_drive`: each phase hides its own transfer. `by_phase`: like the previous rule, but
    with the bytes that host memory and the slots hold left out, and with the FLOPs of attention; this is
    Carom's own prediction.
    """
    rates, work = machine.rates(shape, job), outcome.work
    phases = cost_model.phases_of(job.mode)
    passes = sum(matrix for _, matrix, _ in phases)
    bandwidth = cost_model.effective_bandwidth(rates.link, rates.disk, rates.gds)

    def rule(computes: float, transfers: int) -> float:
        """Return the tokens from which ``computes`` passes hide ``transfers`` transfers."""
        return cost_model.zero_overhead_tokens(
            work.streamed_bytes,
            work.active_params,
            rates.compute,
            bandwidth,
            computes=computes,
            transfers=transfers,
        )

    by_phase = cost_model.zero_overhead_tokens_by_phase(
        replace(work, device_bytes=0.0), rates, job.mode,
        attention_of=lambda tokens: shape.attention_per_token(min(tokens, shape.sample_tokens)),
    )  # fmt: skip
    return {
        "published_rule": rule(passes, 1),
        "two_transfers": rule(passes, len(phases)),
        "by_phase_from_drive": rule(min(matrix for _, matrix, _ in phases), 1),
        "by_phase": by_phase,
    }


def _evaluate_or_none(shape: Shape, machine: Machine, job: Job, tokens: int) -> Estimate | None:
    """Return the estimate, or None where memory is too small."""
    try:
        return evaluate(shape, machine, job, tokens)
    except BudgetError:
        return None


def best_batch(shape: Shape, machine: Machine, job: Job, sample: int) -> Estimate | None:
    """Return the estimate of the smallest batch in BATCHES whose throughput is within 2 % of the best; None
    if none fits.

    `sample`: tokens of one sample. The placement of layers is chosen anew for each batch size.
    """
    found = [
        outcome for batch in BATCHES if (outcome := _evaluate_or_none(shape, machine, job, batch * sample))
    ]
    top = max((outcome.tokens_per_second for outcome in found), default=0.0)
    return next((outcome for outcome in found if outcome.tokens_per_second * NEARLY >= top), None)


def configurations(shape: Shape, machine: Machine, job: Job) -> list[tuple[str, str, Machine, Job]]:
    """List (description, command line option, machine, job) of each change of hardware or settings that is
    worth trying.
    """
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
    """Return `machine` with another drive."""
    return replace(machine, disk=drive.rate, disk_title=drive.title)


def sweep(
    shape: Shape, machine: Machine, job: Job, points: Iterable[int] = SWEEP
) -> list[tuple[int, Estimate | None]]:
    """Return (tokens, estimate) for each of `points` tokens, with the placement chosen anew; None where
    memory is too small.
    """
    return [(tokens, _evaluate_or_none(shape, machine, job, tokens)) for tokens in points]


def plan(shape: Shape, machine: Machine, job: Job) -> ModelPlan:
    """Return the complete plan.

    Raises BudgetError, which states the least memory that works, and ValueError for bad settings.
    """
    if job.tokens is not None and not 1 <= job.tokens <= 1 << 30:
        raise ValueError(f"tokens={job.tokens} is out of range; between 1 and {1 << 30}")
    if not 1 <= job.rank <= 1 << 16:
        raise ValueError(f"rank={job.rank} is out of range; between 1 and {1 << 16}")
    tokens = job.tokens or shape.sample_tokens
    outcome = evaluate(shape, machine, job, tokens)
    changed = tuple(
        (what, how, _evaluate_or_none(shape, other, changed, tokens))
        for what, how, other, changed in configurations(shape, machine, job)
    )
    generation = None
    if shape.kind == "language" and job.mode == "infer":
        used = replace(job, codec=outcome.codec)
        one = work_of(shape, machine, used, outcome.placement, 1)
        one = replace(one, attention_per_token=outcome.work.attention_per_token)
        generation = cost_model.step_time(1, one, machine.rates(shape, used), "infer")
    return ModelPlan(
        shape, machine, job, outcome, thresholds(shape, machine, job, outcome),
        best_batch(shape, machine, job, min(tokens, shape.sample_tokens)), generation, changed,
    )  # fmt: skip


def _whole(value: float) -> int | None:
    """Return a number of tokens rounded up, or None for infinity, which JSON lacks."""
    return None if math.isinf(value) else math.ceil(value)


def _brief(shape: Shape, outcome: Estimate | None) -> dict | None:
    """Return the main figures of an estimate for JSON; None for None."""
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


def to_dict(plan: ModelPlan) -> dict:
    """Convert the plan to JSON-ready values: sizes in bytes, times in seconds, overhead 0.5 = 50 %.

    A threshold is None where streaming costs time at any number of tokens.
    """
    shape, machine, job, outcome = plan.shape, plan.machine, plan.job, plan.outcome
    place = outcome.placement
    card, vram, rates = machine.card, outcome.vram, machine.rates(shape, job)
    share = machine.efficiency(shape)
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
        "resident_seconds": outcome.step.resident_seconds, "roofline_seconds": outcome.step.roofline_seconds,
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
            "drive_bytes": plan.from_drive_bytes, "drive_bytes_per_second_needed": plan.drive_rate_needed,
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
            "flops": card.nvfp4 if job.compute == "nvfp4" else card.bf16, "effective_flops": rates.compute,
            "efficiency": share.of(job.mode), "efficiency_source": share.source, "link_bytes_per_second": rates.link, "disk_bytes_per_second": rates.disk,
            "host_seconds_per_layer": machine.host_cost.of(job.mode), "host_seconds_per_streamed_layer": machine.host_cost.use,
            "host_source": machine.host_cost.source,
            "disk": machine.disk_title, "gds": machine.gds, "ram_bytes": machine.ram,
        },
    }  # fmt: skip
