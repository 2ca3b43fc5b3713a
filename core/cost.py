"""The cost model: bytes, FLOPs and rates in, seconds and token thresholds out.

Pure arithmetic: imports no torch, touches no device, draws no random number. Units are bytes, FLOPs, bytes per second,
FLOP per second and seconds throughout; `tokens` is batch times sequence length.

Two answers to "from how many tokens on is streaming free?" live here on purpose:

- `zero_overhead_tokens`: the published rule of a design note on partial-resident QLoRA. All the compute of a step
  (forward, recompute, input gradients: 3 passes) hides one transfer of each streamed byte.
- `zero_overhead_tokens_by_phase`: what Carom predicts. Forward and backward each fetch the streamed weights once, and
  slack in one cannot pay for the other, so the shortest phase (the forward) sets the threshold.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# Matrix products of one weight per token and pass: a multiply and an add.
FLOPS_PER_PARAM = 2
# Training on a frozen base under checkpointing: forward 1, recompute 1, input gradients 1 (no weight gradients).
TRAIN_PASSES = 3
INFER_PASSES = 1
# Thresholds beyond this many tokens are reported as infinite: no step is that large.
MAX_TOKENS = 1 << 40


@dataclass(frozen=True)
class Rates:
    """How fast one machine is.

    `compute` FLOP/s; `link` host to device and `disk` drive to host (or to device with `gds`), bytes/s, `disk` None
    where there is no drive to stream from; `memory` device memory bytes/s (None: not modelled); `decode` raw bytes/s of
    the wire codec's decoder (None: nothing to decode). `layer`: seconds of Python to issue a layer's forward, `use`: further
    ones for a layer that streams (0: not modelled).
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
    """What one forward pass over all layers costs, and what of it streams.

    `active_params`: parameters one token is multiplied with; `attention_per_token`: FLOPs of scores and values per token
    at the given context (0: leave attention out, as the published tables do); `device_bytes`: weight bytes read from
    device memory in a pass; `streamed_bytes`: wire bytes of the streamed units; `cached_bytes`: those of them that host
    memory holds; `kept_bytes`: streamed bytes still in the slots at each turn, fetched once less; `decoded_bytes`: raw
    bytes the codec restores in a pass; `layers`: that a pass runs through, `uses`: those of them that stream.
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
    """One phase of a step, in seconds: the roofline is the largest of its compute, its wire time, and its `host` time, in
    which Python issues the card's work; `plain`: what of that it takes with everything resident."""

    name: str
    compute: float
    link: float
    disk: float
    decode: float = 0.0
    host: float = 0.0
    plain: float = 0.0

    @property
    def wire(self) -> float:
        """Drive and link work at the same time on different units; the slower one paces the fetches."""
        return max(self.link, self.disk)

    @property
    def seconds(self) -> float:
        return max(self.compute + self.decode, self.wire, self.host)

    @property
    def resident_seconds(self) -> float:
        """What it would take with everything resident."""
        return max(self.compute, self.plain)

    @property
    def bound_by(self) -> str:
        """What the phase waits for: "compute", "link", "disk" or "host"."""
        if self.compute + self.decode >= max(self.wire, self.host):
            return "compute"
        if self.host > self.wire:
            return "host"
        return "disk" if self.disk > self.link else "link"


@dataclass(frozen=True)
class Step:
    """A predicted step; `compute_seconds` is what the card computes in it, unpacking apart."""

    phases: tuple[Phase, ...]

    @property
    def seconds(self) -> float:
        return sum(phase.seconds for phase in self.phases)

    @property
    def compute_seconds(self) -> float:
        return sum(phase.compute for phase in self.phases)

    @property
    def resident_seconds(self) -> float:
        """What it would take with everything resident."""
        return sum(phase.resident_seconds for phase in self.phases)

    @property
    def overhead(self) -> float:
        """0.0 where the copies hide fully; 1.0 where the step takes twice as long as with everything resident."""
        return self.seconds / self.resident_seconds - 1.0

    @property
    def bound_by(self) -> str:
        """What the longest phase that is not bound by compute waits for, else "compute"."""
        waiting = [phase for phase in self.phases if phase.bound_by != "compute"]
        return max(waiting, key=lambda phase: phase.seconds).bound_by if waiting else "compute"


def effective_bandwidth(link: float, disk: float | None = None, gds: bool = False) -> float:
    """Bytes/s at which a byte from the drive reaches the device: the drive alone with GPUDirect Storage, else the slower."""
    if disk is None:
        return link
    return disk if gds else min(disk, link)


def compute_seconds(tokens: float, active_params: float, flops: float, passes: float = INFER_PASSES) -> float:
    """Seconds of matrix products: tokens x passes x 2 x active parameters / FLOP/s."""
    return tokens * passes * FLOPS_PER_PARAM * active_params / flops


def transfer_seconds(wire_bytes: float, bandwidth: float) -> float:
    """Seconds on the wire."""
    return wire_bytes / bandwidth


def zero_overhead_tokens(
    streamed_bytes: float, active_params: float, flops: float, bandwidth: float,
    *, computes: float = TRAIN_PASSES, transfers: float = 1,
) -> float:  # fmt: skip
    """Tokens from which `computes` passes over `active_params` hide `transfers` fetches of `streamed_bytes`.

    The published rule, "compute >= f x transfer" with f = streamed / all layers, is this with sums over all layers in
    place of one layer and f: streamed_bytes = f x all bytes. Infinite beyond `MAX_TOKENS`.
    """
    tokens = transfers * streamed_bytes / bandwidth * flops / (computes * FLOPS_PER_PARAM * active_params)
    return tokens if tokens <= MAX_TOKENS else math.inf


def phases_of(mode: str) -> tuple[tuple[str, float, float], ...]:
    """(name, matrix passes, attention passes) of each phase of a step; `mode` is "infer" or "train".

    Attention's backward is 5 products against the forward's 2 (FlashAttention, Dao et al. 2022), plus the recompute.
    """
    if mode == "infer":
        return (("forward", 1.0, 1.0),)
    if mode == "train":
        return (("forward", 1.0, 1.0), ("backward", 2.0, 3.5))
    raise ValueError(f"mode={mode!r} is unknown; use 'infer' or 'train'")


def wire_times(work: Work, rates: Rates, mode: str) -> tuple[float, float]:
    """(link seconds, disk seconds) of one phase.

    What the slots keep across a turn is not fetched again; only training has a turn (inference wraps around to the
    first layer, whose slots have long been reused). The rest of what host memory does not hold is read from the drive.
    Infinite where the drive is needed and there is none.
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
    """Predicted step of a partly resident, partly streamed model: the roofline phase by phase.

    Compute of a pass is the larger of its FLOPs and of reading its weights from device memory once (few tokens). Python
    issues a layer's gradients in as long as its forward (autograd does that without Python's interpreter, but for about
    twice the operators), and uses each streamed layer once a phase.
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
        phases.append(Phase(name, compute, link, disk, decode, host, plain))
    return Step(tuple(phases))


def zero_overhead_tokens_by_phase(
    work: Work, rates: Rates, mode: str, *, attention_of=None, limit: int = MAX_TOKENS
) -> float:
    """Fewest whole tokens from which every phase of `step_time` is bound by compute; infinite where none up to `limit`.

    `attention_of(tokens)` gives `attention_per_token` at that many tokens (the context grows with them until a sample
    is full); default: the constant of `work`. Bisection is exact because compute never falls as tokens rise.
    """

    def hidden(tokens: int) -> bool:
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
    """Device bytes by use. `total` is what the card must hold at once."""

    resident: int
    slots: int
    adapters: int
    gradients: int
    optimizer: int
    activations: int
    context: int

    @property
    def total(self) -> int:
        return self.weights + self.reserve

    @property
    def weights(self) -> int:
        """What Carom's `vram` budget bounds."""
        return self.resident + self.slots

    @property
    def reserve(self) -> int:
        """Everything but the weights."""
        return self.adapters + self.gradients + self.optimizer + self.activations + self.context
