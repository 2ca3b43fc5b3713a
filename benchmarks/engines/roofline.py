"""The roofline of a case: the least step time for the bytes that its engine must move, with the slots that it has.

The definition is that of `core/plan/roofline.py`. The kernel times are those of the resident run, and the link's rate
is that of a pinned copy, both from the same run of the benchmark. The module is pure: it touches no device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ...core.plan.roofline import PhaseWork, roofline_seconds
from .case import ADAPTED, BLOCK_SQUARES, Case

# Part of a block's weights whose gradient computation needs the weight: all but the modulation (6 of 18 d^2), whose
# input needs no gradient.
_NEEDED_FOR_GRADIENTS = sum(rows * columns for rows, columns in ADAPTED) / BLOCK_SQUARES


@dataclass(frozen=True)
class Roofline:
    """The kernels (ms) and the bytes copied in each phase, and the link's rate (bytes/s).

    The kernels of the optimizer are included in those of the backward. ``source``: "profiler", or "phases" for records
    from before kernels were measured; their times contain the gaps between kernels.
    """

    kernel_forward_ms: float
    kernel_backward_ms: float
    forward_bytes: int
    backward_bytes: int
    link_bytes_per_second: float
    source: str = "profiler"

    @property
    def ms(self) -> float:
        """The least time of a step, in ms."""
        phases = (
            PhaseWork(1e-3 * self.kernel_forward_ms, self.forward_bytes),
            PhaseWork(1e-3 * self.kernel_backward_ms, self.backward_bytes),
        )
        return 1e3 * roofline_seconds(phases, self.link_bytes_per_second)

    def to_dict(self) -> dict[str, float | int | str]:
        return {**asdict(self), "ms": self.ms}


def crossing_bytes(case: Case, report: Mapping[str, Any] | None = None) -> tuple[int, int]:
    """Return the bytes that must be copied in the forward and in the backward of one step.

    In inference every streamed block is copied once a pass. In training the blocks that the engine holds at each of
    the two turns are not copied again: musubi holds its ring, RamTorch its window, Carom its slots. ai-toolkit holds
    none, and copies a weight twice in the backward of a checkpointed step: for the recomputation, and for the gradient
    of the weight's input where that is needed. It also keeps linears that it chooses at random, so this function counts
    its bytes only where no block is resident. Carom's `report`, if given, supplies the actual residents and slots
    (large blocks can stay and stream in parts), and the ratio of packed to raw bytes.
    """
    streamed, held, backward_copies = case.streamed * case.block_bytes, case.slots * case.block_bytes, 1.0
    share = 1.0
    if case.engine == "ai-toolkit":
        held, backward_copies = 0, 1 + _NEEDED_FOR_GRADIENTS
    elif case.engine == "musubi":
        held = case.ring * case.block_bytes
    elif report and report.get("slot_bytes") is not None:
        packed = report.get("resident_packed_raw_bytes", 0) - report.get("resident_packed_bytes", 0)
        streamed = max(0, case.weight_bytes - report["resident_bytes"] - packed)
        held = report["slot_bytes"]
        if report.get("packed_units"):
            share = report["waiting_bytes"] / report["streamed_bytes"]
    if case.mode == "infer":
        return (0 if held >= streamed else round(share * streamed)), 0
    return (
        round(share * max(0, streamed - held)),
        round(share * max(0, backward_copies * streamed - held)),
    )


def roofline(
    case: Case,
    resident: Mapping[str, Any],
    link_bytes_per_second: float,
    report: Mapping[str, Any] | None = None,
) -> Roofline:
    """Return the roofline of `case`.

    `resident`: the result of the resident run, with `kernel_ms` (or, in old records, `phases_ms`) by phase.
    """
    if not link_bytes_per_second > 0:
        raise ValueError(f"link_bytes_per_second={link_bytes_per_second!r} must be above 0")
    phases = resident.get("kernel_ms") or resident["phases_ms"]
    forward_bytes, backward_bytes = crossing_bytes(case, report)
    return Roofline(
        kernel_forward_ms=phases["forward"],
        kernel_backward_ms=phases.get("backward", 0.0) + phases.get("optimizer", 0.0),
        forward_bytes=forward_bytes,
        backward_bytes=backward_bytes,
        link_bytes_per_second=link_bytes_per_second,
        source="profiler" if resident.get("kernel_ms") else "phases",
    )
