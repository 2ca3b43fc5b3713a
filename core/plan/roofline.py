"""The roofline of a step: the least seconds that any order of the same work can take.

This is the only definition of the roofline. `Report.roofline_seconds`, `carom bench`, `carom plan` and the docs use
it. A step consists of phases: the forward in inference; the forward and the backward (with the optimizer) in
training. A phase takes at least as long as its kernels run on the device, and at least as long as its bytes need to
cross the link from host to device. Time that is left over in one phase cannot be used for another phase; what the
slots hold when a phase begins is not counted in the phase's bytes.

The kernel time of a phase is the sum of the durations of its kernels. It contains no gap between kernels, so a step
of an engine whose host is late takes longer than its roofline. It is the kernel time of the same model without
offloading, so decoding that slows other kernels down makes a step longer than its roofline, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class PhaseWork:
    """The work of one phase: seconds of its kernels, and the bytes that must cross the link in it."""

    kernel_seconds: float
    wire_bytes: float

    def seconds(self, link_bytes_per_second: float | None) -> float:
        """Return the least seconds of the phase; a rate of None means that the link was not measured."""
        wire = self.wire_bytes / link_bytes_per_second if link_bytes_per_second else 0.0
        return max(self.kernel_seconds, wire)


def roofline_seconds(
    phases: Iterable[PhaseWork],
    link_bytes_per_second: float | None,
    disk_seconds: float = 0.0,
) -> float:
    """Return the least seconds of a step with these phases.

    ``link_bytes_per_second``: the rate of copies from pinned memory; None if it was not measured.
    ``disk_seconds``: the seconds that the step's disk reads take at the drive's rate. They bound the step as a whole,
    because reads that begin in the forward continue in the backward.
    """
    return max(sum(phase.seconds(link_bytes_per_second) for phase in phases), disk_seconds)
