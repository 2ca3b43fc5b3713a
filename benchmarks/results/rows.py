"""A row of a record's table: one measured case with its value, and what it is compared with in the same record.

Every kind of record is rendered as a list of these rows. The module is pure.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """One case of a record.

    ``group``: the model, the job and the sizes; ratios are formed within a group only. ``case``: the engine or host
    loader with its settings. ``metric``: what was timed ("step", "first image", ...). ``value``: the median in
    ``unit``, or None where the case did not run; ``note`` then has the reason. ``quartiles``: the first and the third
    quartile of the samples, or of the processes. ``samples``, ``processes``: how many there are of each; 0 samples
    means that the record kept the median alone.

    ``base``: the value of the case ``base_case`` of the same record and group, in the same unit. ``floor``: the
    roofline of the case in the same unit, as the record has it. ``device_bytes``, ``host_bytes``: peaks.
    ``same_bits``: whether the outputs, or loss and gradients, equal those of the base case bit for bit; None where
    they were not compared. ``kernels``: milliseconds of kernels by phase.
    """

    group: str
    case: str
    metric: str
    unit: str
    value: float | None = None
    quartiles: tuple[float, float] | None = None
    samples: int = 0
    processes: int = 1
    base: float | None = None
    base_case: str | None = None
    floor: float | None = None
    device_bytes: int | None = None
    host_bytes: int | None = None
    same_bits: bool | None = None
    kernels: tuple[tuple[str, float], ...] = ()
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """The value divided by that of the base case; None without a base case."""
        return None if self.value is None or not self.base else self.value / self.base

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What identifies the measurement in every record of the kind on the same accelerator."""
        return self.group, self.case, self.metric, self.unit


def split(report: Mapping[str, Any] | None) -> str:
    """Return in words what a step of a session's report spends on waiting, "" where the report does not say."""
    parts = []
    if report and report.get("step_seconds"):
        for key, words in (("stall_seconds", "waits for weights"), ("host_late_seconds", "host late")):
            if report.get(key) is not None:
                parts.append(f"{words} {100 * report[key] / report['step_seconds']:.1f} %")
    return ", ".join(parts) + (" of a step" if parts else "")


def pooled(
    medians: Sequence[float], samples: Sequence[float] = (), quartiles: Sequence[Sequence[float]] = ()
) -> dict[str, Any]:
    """Return `value`, `quartiles`, `samples` and `processes` of a `Row` from the results of one or more processes.

    ``medians``: one for each process. ``samples``: the samples of all processes; where a process kept none, the median
    of the medians is the value. ``quartiles``: those that each process kept; they are used for a single process
    without samples. Quartiles over fewer than four values are not formed.
    """
    values = list(samples) or list(medians)
    found: dict[str, Any] = {
        "value": statistics.median(values),
        "samples": len(samples),
        "processes": len(medians),
    }
    if len(values) >= 4:
        cut = statistics.quantiles(values, n=4, method="inclusive")
        found["quartiles"] = (cut[0], cut[2])
    elif len(medians) == 1 and quartiles:
        found["quartiles"] = (quartiles[0][0], quartiles[0][1])
    return found
