"""Plans for several GPUs of one machine: data parallel, or a pipeline of stages that each stream their own layers.

Data parallel: each GPU runs the whole model on its own tokens. Host memory holds one copy of the weights, which all
GPUs need at the same time (interconnect.py gives the rate at which they come). Pipeline: each GPU holds and streams a
part of the layers over its own link. A step has several microbatches, and each microbatch copies what streams anew,
because the layers of a stage pass through its slots once for each.

Both are computed from estimates of single GPUs (estimate.py), so a plan for one GPU is that of estimate.py. What all
stages share, the drive and host memory, bounds the step as a whole. The averaging of gradients and the activations that
pass between stages are small beside weights, and are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from ...core.common.errors import BudgetError
from .estimate import Estimate, Job, Machine, evaluate
from .interconnect import Interconnect
from .model_plan import thresholds
from .shapes import Group, Shape

SPLITS = ("data", "pipeline")
MOST_GPUS = 1024
# Microbatches for each GPU of a pipeline, if none are asked for. The bubble is then below one half of a step.
MICROBATCHES = 2


@dataclass(frozen=True)
class Stage:
    """What one GPU of a plan does: the layers that it runs, its machine, the estimate of one microbatch, and the tokens
    from which streaming costs it no time.

    `rules`: the rules of `model_plan.thresholds` with the stage's share of the drive; `own_drive`: the published rule
    if each GPU had the whole rate of the drive, as in the published note.
    """

    shape: Shape
    machine: Machine
    outcome: Estimate
    rules: dict[str, float]
    own_drive: float

    @property
    def resident_layers(self) -> int:
        """The number of layers that stay on the GPU."""
        pairs = zip(self.outcome.placement.resident, self.shape.groups, strict=True)
        return sum(count for count, group in pairs if group.repeated)

    @property
    def streamed_layers(self) -> int:
        """The number of layers that stream."""
        return self.shape.layers - self.resident_layers


@dataclass(frozen=True)
class SplitPlan:
    """A plan for `gpus` GPUs.

    `split`: "data" or "pipeline"; `microbatches`: of a step (1 for data parallel); `tokens`: of one microbatch, or of
    each GPU's pass; `stages`: one for each GPU of a pipeline, and a single one, which is the same on all GPUs, for data
    parallel; `link`: bytes/s at which weights come to a GPU; `gathers`: whether GPUs copy 1/N each and gather the rest;
    `host_memory`: bytes/s that all GPUs together can read.
    """

    split: str
    gpus: int
    microbatches: int
    tokens: int
    stages: tuple[Stage, ...]
    link: float
    gathers: bool
    host_memory: float

    @property
    def step_tokens(self) -> int:
        """The tokens of a step on all GPUs together."""
        return self.tokens * (self.microbatches if self.split == "pipeline" else self.gpus)

    def _whole(self, seconds_of: Callable[[Estimate], float]) -> float:
        """Return the seconds of a step from the seconds of each stage: the first microbatch passes all stages, the
        others follow at the pace of the slowest. Of N equal stages that is (m + N - 1) / m of m microbatches' time.
        """
        each = [seconds_of(stage.outcome) for stage in self.stages]
        return sum(each) + (self.microbatches - 1) * max(each)

    @property
    def shared_seconds(self) -> float:
        """The seconds of a pipeline's step in which the shared drive, or host memory, delivers the bytes of all stages;
        0 for data parallel, where `link` and the estimate contain this.
        """
        if self.split == "data":
            return 0.0
        phases = [phase for stage in self.stages for phase in stage.outcome.step.phases]
        drive = sum(phase.disk for phase in phases)
        memory = sum(phase.wire_bytes for phase in phases) / self.host_memory
        return self.microbatches * max(drive, memory)

    @property
    def seconds(self) -> float:
        """The seconds of a step."""
        return max(self._whole(lambda outcome: outcome.step.seconds), self.shared_seconds)

    @property
    def resident_seconds(self) -> float:
        """The seconds of a step if every layer were resident."""
        return self._whole(lambda outcome: outcome.step.resident_seconds)

    @property
    def overhead(self) -> float:
        """The relative extra time of streaming: 0.0 where copies are hidden."""
        return self.seconds / self.resident_seconds - 1.0

    @property
    def tokens_per_second(self) -> float:
        """The throughput of all GPUs together."""
        return self.step_tokens / self.seconds

    @property
    def bubble(self) -> float:
        """The share of the stages' time in which the slowest stage waits for the others to begin or to end: (N - 1) /
        (m + N - 1) for N equal stages and m microbatches, and 0 for data parallel.
        """
        whole = self._whole(lambda outcome: outcome.step.seconds)
        return 1.0 - self.microbatches * self.slowest.outcome.step.seconds / whole

    @property
    def bound_by(self) -> str:
        """The resource that limits the step: that of the slowest stage, or the shared "disk" or "memory"."""
        if self.shared_seconds < self.seconds:
            return self.slowest.outcome.step.bound_by
        drive = sum(phase.disk for stage in self.stages for phase in stage.outcome.step.phases)
        return "disk" if self.microbatches * drive >= self.shared_seconds else "memory"

    @property
    def slowest(self) -> Stage:
        """The stage that takes longest."""
        return max(self.stages, key=lambda stage: stage.outcome.step.seconds)

    @property
    def all_resident(self) -> bool:
        """Whether nothing streams on any GPU."""
        return all(stage.outcome.placement.streamed_wire == 0 for stage in self.stages)

    def threshold(self, rule: str) -> float:
        """Return the tokens of a microbatch (of a GPU's pass, for data parallel) from which streaming costs no time on
        any GPU. `rule`: one of `model_plan.thresholds`, or "own_drive".
        """
        return max(stage.own_drive if rule == "own_drive" else stage.rules[rule] for stage in self.stages)


def stage_shapes(shape: Shape, gpus: int) -> tuple[Shape, ...]:
    """Return the parts of `shape` for a pipeline of `gpus` stages: consecutive layers, as equal in number as possible.

    The larger parts come first. Weights outside the layers go to the first stage if they stand before the layers
    (embeddings), else to the last one, which also computes the loss. Raises ValueError for more stages than layers.
    """
    if gpus > shape.layers:
        raise ValueError(
            f"{shape.title} has {shape.layers} layers, so a pipeline has at most {shape.layers} stages, not {gpus}; use "
            "--split data or fewer --gpus"
        )
    least, more = divmod(shape.layers, gpus)
    parts: list[list[Group]] = [[] for _ in range(gpus)]
    left = [least + (number < more) for number in range(gpus)]
    at = 0
    layers_began = False
    for group in shape.groups:
        if not group.repeated:
            parts[-1 if layers_began else 0].append(group)
            continue
        layers_began = True
        rest = group.count
        while rest:
            if not left[at]:
                at += 1
            taken = min(rest, left[at])
            parts[at].append(replace(group, count=taken))
            left[at] -= taken
            rest -= taken
    return tuple(
        replace(shape, groups=tuple(part), vocabulary=shape.vocabulary if number == gpus - 1 else 0)
        for number, part in enumerate(parts)
    )


def data_parallel(shape: Shape, machine: Machine, job: Job, tokens: int, links: Interconnect) -> SplitPlan:
    """Return the plan in which each GPU runs the whole model on `tokens` tokens.

    Host memory and its cache of a drive's weights are shared, so a drive is read once for all GPUs; with GPUDirect
    Storage each GPU reads it, unless they gather. Raises BudgetError where a GPU or host memory is too small.
    """
    link, gathers = links.weight_rate(machine.card.link), links.gathers(machine.card.link)
    each = machine
    if links.gpus > 1:
        disk = machine.disk
        if disk is not None and machine.gds and not gathers:
            disk /= links.gpus
        each = replace(machine, card=replace(machine.card, link=link), disk=disk)
    stage = _stage(shape, each, each, job, tokens, machine.disk)
    return SplitPlan("data", links.gpus, 1, tokens, (stage,), link, gathers, links.host_memory)


def pipeline(
    shape: Shape,
    machine: Machine,
    job: Job,
    tokens: int,
    links: Interconnect,
    microbatches: int | None = None,
) -> SplitPlan:
    """Return the plan in which each GPU runs a part of the layers, on `microbatches` microbatches of `tokens` tokens.

    `microbatches`: None for one on one GPU, else two for each GPU. The stages share the drive, host memory and its
    bandwidth. In training each stage keeps the layer inputs of as many microbatches as a 1F1B schedule has in flight.
    Raises BudgetError where a GPU or host memory is too small, ValueError for more stages than layers.
    """
    gpus = links.gpus
    count = microbatches or (1 if gpus == 1 else MICROBATCHES * gpus)
    each = shared = machine
    if gpus > 1:
        usable = machine.host_bytes
        each = replace(machine, ram_usable=None if math.isinf(usable) else int(usable / gpus))
        shared = replace(
            each,
            card=replace(machine.card, link=links.whole_rate(machine.card.link)),
            disk=None if machine.disk is None else machine.disk / gpus,
        )
    stages = tuple(
        _stage(part, each, shared, replace(job, in_flight=min(count, gpus - number)), tokens, machine.disk)
        for number, part in enumerate(stage_shapes(shape, gpus))
    )
    return SplitPlan("pipeline", gpus, count, tokens, stages, machine.card.link, False, links.host_memory)


def _stage(
    shape: Shape, machine: Machine, shared: Machine, job: Job, tokens: int, disk: float | None
) -> Stage:
    """Return the plan of one GPU.

    `machine`: what the GPU has while the others are idle; `shared`: while all GPUs stream, for the thresholds; `disk`:
    bytes/s of the whole drive.
    """
    outcome = evaluate(shape, machine, job, tokens)
    own = thresholds(shape, replace(shared, disk=disk), job, outcome)["published_rule"]
    return Stage(shape, machine, outcome, thresholds(shape, shared, job, outcome), own)


def min_gpus(
    shape: Shape,
    machine: Machine,
    job: Job,
    tokens: int,
    links: Callable[[int], Interconnect],
    *,
    streaming: bool,
) -> int | None:
    """Return the fewest GPUs on which a pipeline runs; None where no number up to the number of layers does.

    `links(n)`: the connections of n GPUs; `streaming`: whether layers may stream. Without it, all layers must stay on the
    GPUs. A stage of fewer layers never needs more memory, so the search bisects.
    """

    def works(gpus: int) -> bool:
        """Return whether `gpus` GPUs suffice, with one microbatch, which takes the least memory."""
        try:
            found = pipeline(shape, machine, job, tokens, links(gpus), 1)
        except BudgetError:
            return False
        return streaming or found.all_resident

    low, high = 0, min(shape.layers, MOST_GPUS)
    if not works(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if works(middle) else (middle, high)
    return high
