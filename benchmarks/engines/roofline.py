"""The roofline: the least step time of any engine that copies raw bytes, from compute and link measured in the same
run.

A step is bounded phase by phase. Time left over in the forward cannot be used for the backward, except for the
weights that the slots hold. A training step is therefore bounded by max(compute, wire) of its forward plus
max(compute, wire) of its backward. The module is pure: it touches no device.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .case import Case


@dataclass(frozen=True)
class Roofline:
    """The computing times (ms), bytes copied in each phase, and the link's rate (bytes/s).

    The time of the optimizer is included in the computing time of the backward.
    """

    compute_forward_ms: float
    compute_backward_ms: float
    forward_bytes: int
    backward_bytes: int
    link_bytes_per_second: float

    @property
    def wire_forward_ms(self) -> float:
        return 1e3 * self.forward_bytes / self.link_bytes_per_second

    @property
    def wire_backward_ms(self) -> float:
        return 1e3 * self.backward_bytes / self.link_bytes_per_second

    @property
    def ms(self) -> float:
        """The least time of a step, in ms."""
        return max(self.compute_forward_ms, self.wire_forward_ms) + max(
            self.compute_backward_ms, self.wire_backward_ms
        )

    def to_dict(self) -> dict[str, float | int]:
        return {
            **asdict(self),
            "wire_forward_ms": self.wire_forward_ms,
            "wire_backward_ms": self.wire_backward_ms,
            "ms": self.ms,
        }


def crossing_bytes(case: Case, report: dict[str, Any] | None = None) -> tuple[int, int]:
    """Return the bytes that must be copied in the forward and in the backward of one step.

    In inference every streamed block is copied once a pass. In training the weights that the slots hold at each of
    the two turns are not copied again, so each phase copies `slots` blocks fewer. The engine's `report`, if given,
    supplies the actual residents and slots (large blocks can stay and stream in parts), and the ratio of packed to
    raw bytes.
    """
    streamed, held = case.streamed * case.block_bytes, case.slots * case.block_bytes
    share = 1.0
    if report and report.get("slot_bytes") is not None:
        packed = report.get("resident_packed_raw_bytes", 0) - report.get("resident_packed_bytes", 0)
        streamed = max(0, case.weight_bytes - report["resident_bytes"] - packed)
        held = report["slot_bytes"]
        if report.get("packed_units"):
            share = report["waiting_bytes"] / report["streamed_bytes"]
    if case.mode == "infer":
        return (0 if held >= streamed else round(share * streamed)), 0
    crossing = round(share * max(0, streamed - held))
    return crossing, crossing


def roofline(
    case: Case,
    phases_ms: dict[str, float],
    link_bytes_per_second: float,
    report: dict[str, Any] | None = None,
) -> Roofline:
    """Return the roofline of `case`; `phases_ms`: times of the resident run's forward, backward and optimizer in ms."""
    if not link_bytes_per_second > 0:
        raise ValueError(f"link_bytes_per_second={link_bytes_per_second!r} must be above 0")
    forward_bytes, backward_bytes = crossing_bytes(case, report)
    return Roofline(
        compute_forward_ms=phases_ms["forward"],
        compute_backward_ms=phases_ms.get("backward", 0.0) + phases_ms.get("optimizer", 0.0),
        forward_bytes=forward_bytes,
        backward_bytes=backward_bytes,
        link_bytes_per_second=link_bytes_per_second,
    )
