"""The benchmark's figures: each is computed from named results of one run and compared with its target.

Cases have the keys that `suite.py` gives them. GB are 10^9 bytes, GiB 2^30. The module is pure: it touches no device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .case import Case
from .case_rows import exactness
from .roofline import Roofline, roofline

GIB = 1 << 30


class Missing(Exception):
    """Raised if a result that a figure needs does not exist; the message names the result and the reason."""


@dataclass(frozen=True)
class Figure:
    """A figure with a target, reached if `value <= target` (or `>=` if ``at_least``).

    ``measure``: returns the value from the results; ``unit``: text after the value.
    """

    name: str
    target: float
    measure: Callable[[Results], float]
    at_least: bool = False
    unit: str = ""

    def judge(self, results: Results) -> dict[str, Any]:
        """Return the name, the target, the measured value and whether the target is reached.

        The last two are None if the figure cannot be measured; the entry then has the reason.
        """
        words = f"{'>=' if self.at_least else '<='} {self.target:g}{self.unit}"
        try:
            value = self.measure(results)
        except Missing as missing:
            return {
                "figure": self.name,
                "target": words,
                "measured": None,
                "reached": None,
                "reason": str(missing),
            }
        reached = value >= self.target if self.at_least else value <= self.target
        return {
            "figure": self.name,
            "target": words,
            "measured": value,
            "reached": reached,
            "unit": self.unit,
        }


class Results:
    """The cases of a run and their results, by key."""

    def __init__(self, cases: dict[str, Case], results: dict[str, dict[str, Any]]) -> None:
        self.cases = cases
        self.results = results

    def get(self, key: str) -> dict[str, Any]:
        """Return the result of `key`. Raises Missing unless its status is ok."""
        result = self.results.get(key)
        if result is None:
            raise Missing(f"{key}: not run")
        if result["status"] != "ok":
            raise Missing(f"{key}: {result['status']}: {result.get('reason', '')}")
        return result

    def ms(self, key: str) -> float:
        return self.get(key)["ms_per_step"]

    def reserved(self, key: str) -> int:
        value = self.get(key).get("peak_reserved_bytes")
        if value is None:
            raise Missing(f"{key}: no device allocator to ask")
        return value

    def link(self) -> float:
        return self.get("link")["link_bytes_per_second"]

    def roofline(self, key: str, base: str) -> Roofline:
        """Return the least possible time of case `key`, from the resident run `base` and the measured link."""
        return roofline(self.cases[key], self.get(base), self.link(), self.get(key).get("report"))


def ratio(results: Results, key: str, to: str) -> float:
    """Return the step time of case `key` divided by the step time of case `to`."""
    return results.ms(key) / results.ms(to)


def reserved_gb(results: Results, key: str) -> float:
    """Return the peak device memory reserved during the steps, in GB."""
    return results.reserved(key) / 1e9


def link_share(results: Results, key: str) -> float:
    """Return the bytes copied in a step, divided by the bytes that the link can carry in the step's time."""
    result = results.get(key)
    crossed = (result.get("report") or {}).get("wire_bytes_per_step")
    if crossed is None:
        case = results.cases[key]
        crossed = case.streamed * case.block_bytes
    return crossed / (1e-3 * result["ms_per_step"]) / results.link()


def wire_share(results: Results, key: str) -> float:
    """Return the wire bytes of a step divided by the raw bytes of the same weights."""
    report = results.get(key)["report"]
    return report["wire_bytes_per_step"] / report["raw_bytes_per_step"]


def effective_share(results: Results, key: str) -> float:
    """Return the raw bytes of weights brought per second, divided by the link's rate."""
    result = results.get(key)
    return result["report"]["raw_bytes_per_step"] / (1e-3 * result["ms_per_step"]) / results.link()


def stayed_packed(results: Results, key: str) -> float:
    """Return the number of units that stay packed on the device, in the layout of the last steps."""
    report = results.get(key).get("report") or {}
    if report.get("resident_packed_units") is None:
        raise Missing(f"{key}: the report has no resident_packed_units")
    return float(report["resident_packed_units"])


def of_best(results: Results, key: str, others: list[str]) -> float:
    """Return the step time of ``key`` divided by the shortest step time among the ``others`` that ran."""
    times = []
    for other in others:
        try:
            times.append(results.ms(other))
        except Missing:
            continue
    if not times:
        raise Missing("no peer ran")
    return results.ms(key) / min(times)


def of_roofline(results: Results, key: str, base: str) -> float:
    """Return the step time of case `key` divided by its roofline time."""
    return results.ms(key) / results.roofline(key, base).ms


def transfers_over_ideal(results: Results, key: str) -> float:
    """Return the report's transfers per weight minus the ideal: two a step, minus the weights that the slots hold at
    both turns.
    """
    report = results.get(key).get("report") or {}
    case = results.cases[key]
    if report.get("transfers_per_weight") is None:
        raise Missing(f"{key}: the report has no transfers_per_weight")
    ideal = 2 * max(0, case.streamed - case.slots) / case.streamed
    return report["transfers_per_weight"] - ideal


def reserved_over_promise(results: Results, pairs: dict[str, str]) -> float:
    """Return the largest ratio of reserved bytes to promised bytes over `pairs` (case: resident run).

    The promise is the budget plus the activations of the resident run.
    """
    worst = []
    for key, base in pairs.items():
        try:
            own = results.reserved(base) - results.cases[base].weight_bytes
            worst.append(results.reserved(key) / (results.cases[key].budget_bytes + own))
        except Missing:
            continue
    if not worst:
        raise Missing("no case of Carom and its resident run are both there")
    return max(worst)


def growth(results: Results, key: str) -> float:
    """Return the growth of reserved memory from step 50 to the last step, in MB."""
    result = results.get(key)
    if result.get("held_at_step_50_bytes") is None:
        raise Missing(f"{key}: fewer than 50 steps")
    return (result["held_at_end_bytes"] - result["held_at_step_50_bytes"]) / 1e6


def host_share(results: Results, key: str) -> float:
    """Return the host memory that building and attaching took, divided by the bytes of the weights.

    The host memory is the resident memory of the process. If pinned memory is not counted in that, the decrease of
    the machine's available memory is used instead, which is coarser.
    """
    result = results.get(key)
    charged = result["host_attached_rss_bytes"] - result["host_base_rss_bytes"]
    if charged < 0.9 * result["weight_bytes"]:
        charged = max(charged, result["host_available_drop_bytes"])
    return charged / result["weight_bytes"]


def attach_rate(results: Results, key: str) -> float:
    """Return the rate at which weights were placed, in GiB/s."""
    result = results.get(key)
    return result["weight_bytes"] / result["attach_seconds"] / GIB


def host_added(results: Results, key: str) -> float:
    """Return the microseconds of wall time that Carom adds to a call of a block if the host limits the speed."""
    return results.get(key)["added_us"]


def within_memory(results: Results, keys: list[str], base: str, limit_bytes: float) -> float:
    """Return the shortest step time of the `keys` that reserve at most `limit_bytes`, divided by that of the resident
    run `base`.
    """
    fitting = []
    for key in keys:
        try:
            if results.reserved(key) <= limit_bytes:
                fitting.append(ratio(results, key, base))
        except Missing:
            continue
    if not fitting:
        raise Missing(f"no case reserves {limit_bytes / 1e9:.2f} GB or less")
    return min(fitting)


def within_memory_of(results: Results, keys: list[str], base: str, other: str) -> float:
    """Return `within_memory` with the bytes that case `other` reserved in this run as the limit."""
    return within_memory(results, keys, base, results.reserved(other))


def differing(results: Results, pairs: dict[str, str]) -> float:
    """Return the number of Carom's cases that differ in any bit from their resident runs; ``pairs``: case -> resident
    run.
    """
    verdicts = []
    for key, base in pairs.items():
        try:
            verdicts.append(exactness(results.get(key), results.get(base)))
        except Missing:
            continue
    known = [verdict for verdict in verdicts if verdict is not None]
    if not known:
        raise Missing("nothing to compare")
    return float(sum(not verdict for verdict in known))


def render(judged: list[dict[str, Any]]) -> str:
    """Return a short table of targets and measured values; figures whose cases did not run are counted below it."""
    lines = [("figure", "target", "measured", "")]
    missing = sum(row["measured"] is None for row in judged)
    for row in judged:
        if row["measured"] is not None:
            lines.append(
                (
                    row["figure"],
                    row["target"],
                    f"{row['measured']:.3f}{row['unit']}",
                    "ok" if row["reached"] else "MISSED",
                )
            )
    widths = [max(len(line[i]) for line in lines) for i in range(3)]
    shown = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[3]]).rstrip()
        for line in lines
    ]
    if missing:
        shown.append(f"{missing} more figures: their cases did not run (the record has the reasons)")
    return "\n".join(shown)
