"""PURE. The lines for a job's log: one at the start of a model's streaming, and one at each sample."""

from __future__ import annotations

from ..core.common.sizes import format_size
from ..core.metrics.report import Report, format_seconds

NOTICEABLE = 0.02  # share of a step: for shorter stalls the log gives no advice


def start(name: str, report: Report) -> str:
    """Return the line for the start of the model ``name``: the bytes that stay, the bytes that stream, the budget."""
    need = (
        f" ({format_size(sum(p.nbytes for p in report.resident_by_need))} of it by need)"
        if report.resident_by_need
        else ""
    )
    budget = f"budget {format_size(report.vram_budget_bytes)}"
    if report.pool == "aimdo":
        budget += ", in comfy-aimdo's pool"
    stay, stream = _places(report)
    if not stream:
        return f"{name}: all {format_size(stay)} stay on {report.device}; {budget}"
    disk = (
        f" from disk, with {format_size(report.ram_budget_bytes)} of RAM as cache"
        if report.ram_budget_bytes
        else ""
    )
    return (
        f"{name}: {format_size(stay)} stay on {report.device}{need}, "
        f"{format_size(stream)} stream through {format_size(report.slot_bytes)} of slots{disk}; {budget}"
    )


def _places(report: Report) -> tuple[int, int]:
    """Return (bytes that stay, bytes that stream).

    In comfy-aimdo's pool all weights have host copies, so the streamed bytes alone do not give the division.
    """
    if report.pool != "aimdo":
        return report.weight_bytes - report.streamed_bytes, report.streamed_bytes
    stay = sum(place.nbytes for place in (*report.resident_by_need, *report.resident_by_choice))
    return stay, sum(place.nbytes for place in report.places if not place.resident)


def progress(name: str, report: Report, parked: bool = False) -> str:
    """Return the line for a sample: the model's residency, its stall per step, and advice."""
    if parked:
        return f"{name}: parked, all of it waits on the host"
    stay, stream = _places(report)
    places = f"{name}: {format_size(stay)} resident, {format_size(stream)} streamed"
    if report.step_seconds is None or report.stall_seconds is None:
        return f"{places}, no step measured yet"
    waits = f"waits {format_seconds(report.stall_seconds)} of {format_seconds(report.step_seconds)} per step"
    return f"{places}, {waits}, {advice(report)}"


def advice(report: Report) -> str:
    """Return advice on the additional VRAM that would remove the stalls.

    The estimate: each byte that no longer streams saves its time on the link.
    """
    if report.bound_by == "disk" and report.stall_seconds:
        return "the drive limits it: more ram would help"
    step, stall = report.step_seconds or 0.0, report.stall_seconds or 0.0
    if stall <= NOTICEABLE * step:
        return "nothing to gain"
    passes, link = report.transfers_per_weight, report.link_bytes_per_second
    if not link or not passes:
        return "more vram would help"
    more = min(stall * link / passes, float(report.streamed_bytes))
    return f"about {format_size(more)} more vram would hide it"
