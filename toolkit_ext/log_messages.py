"""PURE. What a job's log says of Carom: one line at the start of a model's streaming, one at each sample."""

from __future__ import annotations

from ..core.common.sizes import format_size
from ..core.metrics.report import Report, format_seconds

NOTICEABLE = 0.02  # of a step: stalls below it are not worth a word of advice


def start(name: str, report: Report) -> str:
    """What stays and what streams, for the line when ``name`` begins."""
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
    return (
        f"{name}: {format_size(stay)} stay on {report.device}{need}, "
        f"{format_size(stream)} stream through {format_size(report.slot_bytes)} of slots; {budget}"
    )


def _places(report: Report) -> tuple[int, int]:
    """Bytes that stay, bytes that stream. In a pool all wait on the host too, and what has a home comes when it is used."""
    if report.pool != "aimdo":
        return report.weight_bytes - report.streamed_bytes, report.streamed_bytes
    stay = sum(place.nbytes for place in (*report.resident_by_need, *report.resident_by_choice))
    return stay, sum(place.nbytes for place in report.places if not place.resident)


def progress(name: str, report: Report, parked: bool = False) -> str:
    """Residency, stall per step and what would help, for the line at a sample."""
    if parked:
        return f"{name}: parked, all of it waits on the host"
    stay, stream = _places(report)
    places = f"{name}: {format_size(stay)} resident, {format_size(stream)} streamed"
    if report.step_seconds is None or report.stall_seconds is None:
        return f"{places}, no step measured yet"
    waits = f"waits {format_seconds(report.stall_seconds)} of {format_seconds(report.step_seconds)} per step"
    return f"{places}, {waits}, {advice(report)}"


def advice(report: Report) -> str:
    """What would take the stalls away: bytes that no longer stream take their share of the link's time with them."""
    step, stall = report.step_seconds or 0.0, report.stall_seconds or 0.0
    if stall <= NOTICEABLE * step:
        return "nothing to gain"
    passes, link = report.transfers_per_weight, report.link_bytes_per_second
    if not link or not passes:
        return "more vram would help"
    more = min(stall * link / passes, float(report.streamed_bytes))
    return f"about {format_size(more)} more vram would hide it"
