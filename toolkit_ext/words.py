"""PURE. What a job's log says of Carom: one line at the start of a model's streaming, one at each sample."""

from __future__ import annotations

from ..core.report import Report, format_seconds
from ..core.sizes import format_size

NOTICEABLE = 0.02  # of a step: stalls below it are not worth a word of advice


def start(name: str, report: Report) -> str:
    """What stays and what streams, for the line when ``name`` begins."""
    need = (
        f" ({format_size(sum(p.nbytes for p in report.resident_by_need))} of it by need)"
        if report.resident_by_need
        else ""
    )
    budget = f"budget {format_size(report.vram_budget_bytes)}"
    if not report.streamed_bytes:
        return f"{name}: all {format_size(report.resident_bytes)} stay on {report.device}; {budget}"
    return (
        f"{name}: {format_size(report.resident_bytes)} stay on {report.device}{need}, "
        f"{format_size(report.streamed_bytes)} stream through {format_size(report.slot_bytes)} of slots; {budget}"
    )


def progress(name: str, report: Report) -> str:
    """Residency, stall per step and what would help, for the line at a sample."""
    places = f"{name}: {format_size(report.resident_bytes)} resident, {format_size(report.streamed_bytes)} streamed"
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
