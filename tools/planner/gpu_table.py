"""The plan of `carom plan --gpus N`: both ways to use the GPUs for each number of GPUs up to N, and the fewest GPUs.

`plan_gpus` computes a `GpuTable`, and `to_dict` converts it to the JSON of the command.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...core.common.errors import BudgetError
from . import model_plan, multi_gpu
from .estimate import Job, Machine
from .interconnect import Interconnect, interconnect
from .multi_gpu import SplitPlan, Stage
from .shapes import Shape


@dataclass(frozen=True)
class GpuRow:
    """The plans for a number of GPUs; None where the model does not fit, with the reason in `problems` by split."""

    gpus: int
    data: SplitPlan | None
    pipeline: SplitPlan | None
    problems: dict[str, str]

    def plan(self, split: str) -> SplitPlan | None:
        """Return the plan of `split`, "data" or "pipeline"."""
        return self.data if split == "data" else self.pipeline


@dataclass(frozen=True)
class GpuTable:
    """The complete plan for several GPUs.

    `links`: the connections; `rows`: plans for 1, 2, 4 ... GPUs and the number asked for; `chosen`: the plan of the split
    asked for, or of the faster one; `without_streaming`, `with_streaming`: the fewest GPUs (None: no number suffices).
    """

    shape: Shape
    machine: Machine
    job: Job
    tokens: int
    links: Interconnect
    rows: tuple[GpuRow, ...]
    chosen: SplitPlan
    without_streaming: int | None
    with_streaming: int | None

    @property
    def one(self) -> SplitPlan | None:
        """The plan for one GPU, None where the model does not fit on one."""
        return self.rows[0].data

    @property
    def speedup(self) -> float | None:
        """The throughput over that of one GPU; None where the model does not fit on one."""
        return None if self.one is None else self.chosen.tokens_per_second / self.one.tokens_per_second


def counts_up_to(gpus: int) -> tuple[int, ...]:
    """Return 1, 2, 4 ... up to `gpus`, and `gpus`."""
    return tuple(sorted({gpus, *(1 << power for power in range(gpus.bit_length()))}))


def plan_gpus(
    shape: Shape, machine: Machine, job: Job, gpus: int, *, kind: str | None = None, split: str | None = None,
    microbatches: int | None = None, host_memory: float | None = None,
) -> GpuTable:  # fmt: skip
    """Return the plan for `gpus` GPUs. Deterministic; loads and runs nothing.

    `kind`, `host_memory`: see `interconnect`; `split`: "data", "pipeline" or None for the faster one; `microbatches`: see
    `multi_gpu.pipeline`. Raises ValueError for settings out of range, BudgetError where the model does not fit.
    """
    if not 1 <= gpus <= multi_gpu.MOST_GPUS:
        raise ValueError(f"gpus={gpus} is out of range; between 1 and {multi_gpu.MOST_GPUS}")
    if microbatches is not None and not 1 <= microbatches <= 1 << 16:
        raise ValueError(f"microbatches={microbatches} is out of range; between 1 and {1 << 16}")
    tokens = job.tokens or shape.sample_tokens
    links = interconnect(machine.card, gpus, kind, host_memory)

    def links_of(count: int) -> Interconnect:
        """Return the connections of ``count`` GPUs, of the same kind."""
        return Interconnect(count, links.kind, links.nvlink, links.host_memory, links.source)

    rows = []
    errors: dict[str, Exception] = {}
    for count in counts_up_to(gpus):
        found: dict[str, SplitPlan | None] = {}
        errors = {}
        for way in multi_gpu.SPLITS:
            found[way] = None
            try:
                if way == "data":
                    found[way] = multi_gpu.data_parallel(shape, machine, job, tokens, links_of(count))
                else:
                    asked = microbatches if count > 1 else None
                    found[way] = multi_gpu.pipeline(shape, machine, job, tokens, links_of(count), asked)
            except (BudgetError, ValueError) as error:
                errors[way] = error
        rows.append(
            GpuRow(
                count, found["data"], found["pipeline"], {way: str(error) for way, error in errors.items()}
            )
        )
    last = rows[-1]
    ways = [way for way in multi_gpu.SPLITS if split in (None, way)]
    fitting = [plan for way in ways if (plan := last.plan(way)) is not None]
    if not fitting:
        raise errors[ways[-1]]
    least = [
        multi_gpu.min_gpus(shape, machine, job, tokens, links_of, streaming=streams)
        for streams in (False, True)
    ]
    chosen = max(fitting, key=lambda plan: plan.tokens_per_second)
    return GpuTable(shape, machine, job, tokens, links, tuple(rows), chosen, least[0], least[1])


def _whole(value: float) -> int | None:
    """Return a number of tokens rounded up, or None for infinity, which JSON lacks."""
    return None if math.isinf(value) else math.ceil(value)


def _stage_dict(stage: Stage) -> dict:
    """Return the figures of one GPU for JSON."""
    outcome = stage.outcome
    return {
        "layers": stage.shape.layers, "resident_layers": stage.resident_layers, "streamed_layers": stage.streamed_layers,
        "streamed_bytes": outcome.placement.streamed_wire, "vram_bytes": outcome.vram.total,
        "microbatch_seconds": outcome.step.seconds, "overhead": outcome.step.overhead, "bound_by": outcome.step.bound_by,
    }  # fmt: skip


def split_dict(plan: SplitPlan | None) -> dict | None:
    """Return the figures of a plan for JSON; None for None. A threshold is None where no number of tokens suffices."""
    if plan is None:
        return None
    return {
        "split": plan.split, "gpus": plan.gpus, "microbatches": plan.microbatches, "step_tokens": plan.step_tokens,
        "step_seconds": plan.seconds, "resident_seconds": plan.resident_seconds, "overhead": plan.overhead,
        "tokens_per_second": plan.tokens_per_second, "bubble_fraction": plan.bubble, "bound_by": plan.bound_by,
        "gathers": plan.gathers, "weight_bytes_per_second": plan.link,
        "zero_overhead_tokens": _whole(plan.threshold("own_drive")),
        "zero_overhead_tokens_shared_drive": _whole(plan.threshold("published_rule")),
        "zero_overhead_tokens_by_phase": _whole(plan.threshold("by_phase")),
        "stages": [_stage_dict(stage) for stage in plan.stages],
    }  # fmt: skip


def to_dict(table: GpuTable) -> dict:
    """Convert the plan to JSON-ready values: sizes in bytes, times in seconds, rates in bytes/s, overhead 0.5 = 50 %.

    `zero_overhead_tokens` are tokens of a microbatch (data parallel: of each GPU's pass).
    """
    shape, machine, job, links = table.shape, table.machine, table.job, table.links
    return {
        "model": shape.name, "title": shape.title, "mode": job.mode,
        "quant": job.quant.name if job.quant else "as stored", "tokens": table.tokens, "layers": shape.layers,
        "model_bytes": shape.bytes_in(job.quant),
        **(split_dict(table.chosen) or {}),
        "speedup": table.speedup,
        "min_gpus": {"without_streaming": table.without_streaming, "with_streaming": table.with_streaming},
        "by_gpus": [
            {"gpus": row.gpus, "data": split_dict(row.data), "pipeline": split_dict(row.pipeline), "problems": row.problems}
            for row in table.rows
        ],
        "interconnect": {
            "kind": links.kind, "gather_bytes_per_second": links.nvlink or None, "source": links.source,
            "host_memory_bytes_per_second": links.host_memory,
        },
        "hardware": {
            "gpu": machine.card.title, "source": machine.source or machine.card.source, "vram_bytes": machine.card.vram,
            "link_bytes_per_second": machine.card.link, "disk_bytes_per_second": machine.disk, "ram_bytes": machine.ram,
        },
        "one_gpu": _one(table),
    }  # fmt: skip


def _one(table: GpuTable) -> dict | None:
    """Return what `carom plan` without --gpus prints as JSON; None where the model does not fit on one GPU."""
    try:
        return model_plan.to_dict(model_plan.plan(table.shape, table.machine, table.job))
    except BudgetError:
        return None
