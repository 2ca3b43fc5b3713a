"""The cost model of the planner: computes step seconds and token thresholds from bytes, FLOPs and rates.

`Step.roofline_seconds` is the least time of a step, by the definition in core/plan/roofline.py; `Step.seconds` is the
prediction, which adds the unpacking of weights and the time that Python needs.

The module is pure arithmetic: no torch, no device, no random numbers. Quantities are in bytes, FLOPs, bytes
per second, FLOP per second and seconds; `tokens` is batch times sequence length.

Two functions answer from how many tokens per step on streaming costs no extra time:

- `zero_overhead_tokens`: the rule published in a design note on partial-resident QLoRA. All the compute of a
  step (forward, recomputation, input gradients: 3 passes) hides one transfer of each streamed byte.
- `zero_overhead_tokens_by_phase`: the threshold that Carom predicts. The forward and the backward each copy
  the streamed weights once. Idle link time in one phase cannot be used for the other phase, so the shorter
  phase, the forward, sets the threshold.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...core.plan.roofline import PhaseWork, roofline_seconds

# FLOPs of one parameter of a matrix per token and pass: a multiplication and an addition.
FLOPS_PER_PARAM = 2
# Matrix passes of a training step on frozen weights with activation checkpointing: one forward, one
# recomputation and one for the input gradients. There are no weight gradients.
TRAIN_PASSES = 3
INFER_PASSES = 1
# Thresholds of more tokens than this are reported as infinite, because no step is that large.
MAX_TOKENS = 1 << 40


@dataclass(frozen=True)
class Rates:
    """The rates of a machine.

    `compute`: FLOP/s that a step reaches, its other kernels included (see efficiency.py); `link`: bytes/s from host to device; `disk`: bytes/s from the drive to host memory, or
    to the device with `gds` (GPUDirect Storage), None where there is no drive to stream from; `memory`:
    bytes/s of device memory (None: not modelled); `decode`: unpacked bytes/s at which the device unpacks
    weights (None: weights are not packed); `layer`: seconds that Python takes to issue the forward of a
    layer; `use`: further seconds for a layer that streams (0: not modelled). Raises ValueError for rates that
    are not positive and finite, or for negative seconds.
    """

    compute: float
    link: float
    disk: float | None = None
    gds: bool = False
    memory: float | None = None
    decode: float | None = None
    layer: float = 0.0
    use: float = 0.0

    def __post_init__(self) -> None:
        for name in ("compute", "link", "disk", "memory", "decode"):
            value = getattr(self, name)
            if value is not None and not (0 < value < math.inf):
                raise ValueError(f"{name}={value!r} must be a positive, finite rate")
        for name in ("layer", "use"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)!r} must be seconds, 0 or more")


@dataclass(frozen=True)
class Work:
    """The amounts of computation and transfer in one forward pass over all layers.

    `active_params`: parameters that one token is multiplied with; `attention_per_token`: FLOPs of attention
    scores and values per token at the given context (0: attention is left out, as in the published tables);
    `device_bytes`: weight bytes read from device memory; `streamed_bytes`: bytes copied to the device for the
    streamed layers; `cached_bytes`: the part of them that host memory holds; `kept_bytes`: streamed bytes
    that are still in the slots when forward changes to backward and need no second copy; `decoded_bytes`:
    unpacked bytes of the weights that the device unpacks; `layers`: number of layers; `uses`: number of
    layers that pass through a slot.
    """

    active_params: float
    streamed_bytes: float = 0.0
    cached_bytes: float = 0.0
    kept_bytes: float = 0.0
    attention_per_token: float = 0.0
    device_bytes: float = 0.0
    decoded_bytes: float = 0.0
    layers: int = 0
    uses: int = 0


@dataclass(frozen=True)
class Phase:
    """The seconds of one phase of a step: forward or backward.

    `compute`, `link`, `disk`, `decode`: seconds of computing, of copies to the device, of drive reads and of
    unpacking; `host`: seconds in which Python issues the device's work; `plain`: `host` if every layer were
    resident; `wire_bytes`: bytes that cross the link.
    """

    name: str
    compute: float
    link: float
    disk: float
    decode: float = 0.0
    host: float = 0.0
    plain: float = 0.0
    wire_bytes: float = 0.0

    @property
    def wire(self) -> float:
        """The seconds to bring the streamed weights; drive and link work on different layers at the same
        time.
        """
        return max(self.link, self.disk)

    @property
    def seconds(self) -> float:
        """The predicted seconds of the phase: the longest of computing with unpacking, transfers and host."""
        return max(self.compute + self.decode, self.wire, self.host)

    @property
    def resident_seconds(self) -> float:
        """The seconds of the phase if every layer were resident."""
        return max(self.compute, self.plain)

    @property
    def bound_by(self) -> str:
        """The resource that limits the phase: "compute", "link", "disk" or "host"."""
        if self.compute + self.decode >= max(self.wire, self.host):
            return "compute"
        if self.host > self.wire:
            return "host"
        return "disk" if self.disk > self.link else "link"


@dataclass(frozen=True)
class Step:
    """A predicted step: its phases, and sums over them.

    `link_rate`: bytes/s of copies to the device, None if nothing limits them.
    """

    phases: tuple[Phase, ...]
    link_rate: float | None = None

    @property
    def seconds(self) -> float:
        """The seconds of the step."""
        return sum(phase.seconds for phase in self.phases)

    @property
    def roofline_seconds(self) -> float:
        """The least seconds of the step: phase by phase the longer of kernels and copies, at least the drive's."""
        return roofline_seconds(
            (PhaseWork(phase.compute, phase.wire_bytes) for phase in self.phases),
            self.link_rate,
            sum(phase.disk for phase in self.phases),
        )

    @property
    def compute_seconds(self) -> float:
        """The seconds in which the device computes, without unpacking."""
        return sum(phase.compute for phase in self.phases)

    @property
    def resident_seconds(self) -> float:
        """The seconds of the step if every layer were resident."""
        return sum(phase.resident_seconds for phase in self.phases)

    @property
    def overhead(self) -> float:
        """The relative extra time: 0.0 where copies are fully hidden, 1.0 where the step takes twice the
        resident time.
        """
        return self.seconds / self.resident_seconds - 1.0

    @property
    def bound_by(self) -> str:
        """The resource that limits the longest phase not limited by compute; "compute" where there is no such
        phase.
        """
        waiting = [phase for phase in self.phases if phase.bound_by != "compute"]
        return max(waiting, key=lambda phase: phase.seconds).bound_by if waiting else "compute"


def effective_bandwidth(link: float, disk: float | None = None, gds: bool = False) -> float:
    """Return the bytes/s from the drive to the device: the drive's with GPUDirect Storage, else the slower of
    drive and link.
    """
    if disk is None:
        return link
    return disk if gds else min(disk, link)


def compute_seconds(tokens: float, active_params: float, flops: float, passes: float = INFER_PASSES) -> float:
    """Return the seconds of matrix products: tokens x passes x 2 x active parameters / FLOP/s."""
    return tokens * passes * FLOPS_PER_PARAM * active_params / flops


def transfer_seconds(wire_bytes: float, bandwidth: float) -> float:
    """Return the seconds of a transfer of `wire_bytes` bytes at `bandwidth` bytes/s."""
    return wire_bytes / bandwidth


def zero_overhead_tokens(
    streamed_bytes: float, active_params: float, flops: float, bandwidth: float,
    *, computes: float = TRAIN_PASSES, transfers: float = 1,
) -> float:  # fmt: skip
    """Return the tokens from which `computes` passes over `active_params` hide `transfers` copies of
    `streamed_bytes`.

    The published rule is "compute >= f x transfer" for one layer, with f = streamed layers / all layers. This
    function uses sums over all layers instead, where streamed_bytes = f x all bytes. The result is infinite
    beyond `MAX_TOKENS`.
    """
    tokens = transfers * streamed_bytes / bandwidth * flops / (computes * FLOPS_PER_PARAM * active_params)
    return tokens if tokens <= MAX_TOKENS else math.inf


def phases_of(mode: str) -> tuple[tuple[str, float, float], ...]:
    """Return (name, matrix passes, attention passes) of each phase of a step; `mode` is "infer" or "train".

    The backward of attention takes 5 matrix products where the forward takes 2 (FlashAttention, Dao et al.
    2022), plus the recomputation of the forward.
    """
    if mode == "infer":
        return (("forward", 1.0, 1.0),)
    if mode == "train":
        return (("forward", 1.0, 1.0), ("backward", 2.0, 3.5))
    raise ValueError(f"mode={mode!r} is unknown; use 'infer' or 'train'")


def wire_times(work: Work, rates: Rates, mode: str) -> tuple[float, float]:
    """Return (link seconds, disk seconds) of one phase.

    When training changes from forward to backward, weights still in the slots are not copied again. Inference
    has no such saving: the next forward starts at the first layer, whose slot has been reused. Bytes that
    host memory does not hold are read from the drive; the disk seconds are infinite where a drive is needed
    and there is none.
    """
    kept = work.kept_bytes if mode == "train" else 0.0
    fetched = max(0.0, work.streamed_bytes - kept)
    from_disk = max(0.0, fetched - work.cached_bytes)
    if from_disk > 0 and rates.disk is None:
        return fetched / rates.link, math.inf
    disk = from_disk / rates.disk if rates.disk is not None else 0.0
    over_link = fetched - from_disk if rates.gds else fetched
    return over_link / rates.link, disk


def step_time(tokens: float, work: Work, rates: Rates, mode: str) -> Step:
    """Predict the step of a partly resident, partly streamed model, phase by phase.

    The computing time of a pass is the longer of computing its FLOPs and reading its weights from device
    memory once; the latter dominates for few tokens. Issuing the gradients of a layer is taken to be as long
    as issuing its forward: autograd runs without the Python interpreter, but on about twice the operators.
    Each streamed layer is used once a phase.
    """
    link, disk = wire_times(work, rates, mode)
    floor = work.device_bytes / rates.memory if rates.memory is not None else 0.0
    decode = work.decoded_bytes / rates.decode if rates.decode is not None else 0.0
    phases = []
    for name, matrix, attention in phases_of(mode):
        flops = tokens * (
            matrix * FLOPS_PER_PARAM * work.active_params + attention * work.attention_per_token
        )
        plain = matrix * rates.layer * work.layers
        host = plain + rates.use * work.uses
        compute = max(flops / rates.compute, matrix * floor)
        phases.append(Phase(name, compute, link, disk, decode, host, plain, link * rates.link))
    return Step(tuple(phases), rates.link)


def zero_overhead_tokens_by_phase(
    work: Work, rates: Rates, mode: str, *, attention_of=None, limit: int = MAX_TOKENS
) -> float:
    """Return the fewest tokens from which computing hides the transfers in every phase; infinite where none
    up to `limit` do.

    `attention_of(tokens)` returns `attention_per_token` for a step of that many tokens, because the context
    grows with the tokens until a sample is full; default: the constant in `work`. Bisection is exact because
    the computing time never falls as the tokens rise.
    """

    def hidden(tokens: int) -> bool:
        """Return whether computing hides the transfers at `tokens`."""
        attention = work.attention_per_token if attention_of is None else attention_of(tokens)
        at = Work(**{**work.__dict__, "attention_per_token": attention, "decoded_bytes": 0.0})
        return all(phase.wire <= phase.compute for phase in step_time(tokens, at, rates, mode).phases)

    if max(wire_times(work, rates, mode)) == 0:
        return 0
    if not hidden(limit):
        return math.inf
    low, high = 0, limit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if hidden(middle) else (middle, high)
    return high


@dataclass(frozen=True)
class VramUse:
    """The device bytes of a step, by what they are used for."""

    resident: int
    slots: int
    adapters: int
    gradients: int
    optimizer: int
    activations: int
    context: int

    @property
    def total(self) -> int:
        """The bytes that the card must hold at once."""
        return self.weights + self.reserve

    @property
    def weights(self) -> int:
        """The bytes that Carom's `vram` budget limits."""
        return self.resident + self.slots

    @property
    def reserve(self) -> int:
        """The bytes of everything except the weights."""
        return self.adapters + self.gradients + self.optimizer + self.activations + self.context
