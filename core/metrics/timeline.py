"""Functions that draw a `Report` as a picture (PNG, SVG) or write it as Chrome trace events (JSON).

The picture shows the timeline of one step, and which units stay on the device.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common.held_files import write_atomically
from ..common.sizes import format_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .report import Report, Span

# Colours of the palette of Okabe and Ito (2008), which colour-blind readers can distinguish too.
COLOURS = {
    "compute": "#0072B2", "link": "#E69F00", "peer": "#CC79A7", "stall": "#D55E00", "disk": "#009E73"
}  # fmt: skip
MEANING = {
    "compute": "computing", "link": "weights cross", "peer": "from devices", "stall": "waiting", "disk": "disk reads"
}  # fmt: skip
_IF_USED = ("peer", "disk")  # lanes that are drawn only if they have spans
CHOSEN, NEEDED, STREAMED = "#0072B2", "#56B4E9", "#E69F00"
INK, FAINT = "#24292f", "#8c959f"
WIDTH_INCHES, DPI = 10.0, 160


def plot(report: Report, path: str | os.PathLike[str]) -> None:
    """Draw the timeline of the last timed step and a map of all units to the file ``path``; see
    `Report.plot`.
    """
    target = Path(path)
    kind = target.suffix.lower().lstrip(".")
    if kind not in ("png", "svg"):
        raise ValueError(f"cannot draw to {target.name!r}: the suffix must be .png or .svg")
    from matplotlib.figure import Figure  # pyplot is not used, because it would change global state

    used = {span.lane for span in report.spans}
    lanes = [lane for lane in COLOURS if lane not in _IF_USED or lane in used]
    height = 2.1 + 0.42 * len(lanes)
    figure = Figure(figsize=(WIDTH_INCHES, height), dpi=DPI, facecolor="white")
    figure.text(0.015, 1 - 0.12 / height, _title(report), size=13, weight="bold", color=INK, va="top")
    figure.text(0.015, 1 - 0.41 / height, _subtitle(report), size=10, color="#57606a", va="top")
    left, width = 0.115, 0.86
    _draw_lanes(
        figure.add_axes((left, 1.28 / height, width, 0.42 * len(lanes) / height)), report.spans, lanes
    )
    _draw_unit_map(figure.add_axes((left, 0.36 / height, width, 0.26 / height)), report)
    metadata = {"Date": None} if kind == "svg" else {}
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, lambda temporary: figure.savefig(temporary, format=kind, metadata=metadata))


def trace(report: Report, path: str | os.PathLike[str]) -> None:
    """Write the timeline to the file ``path`` as Chrome trace events; see `Report.trace`.

    The format is the "Trace Event Format" of the Chromium project: complete events ("X") with times in
    microseconds. Overlapping spans of a lane go to separate tracks, because viewers stack the events of one
    track.
    """
    work = "training step" if report.kind == "train" else "inference step"
    events: list[dict[str, Any]] = [
        _metadata("process_name", 0, f"Carom: one {work} ({report.device or 'device'})")
    ]
    thread = 0
    for lane in COLOURS:
        for number, track in enumerate(_tracks([s for s in report.spans if s.lane == lane])):
            thread += 1
            events.append(_metadata("thread_name", thread, lane if number == 0 else f"{lane} {number + 1}"))
            events.append({**_metadata("thread_sort_index", thread, ""), "args": {"sort_index": thread}})
            for span in track:
                event = {"ph": "X", "pid": 1, "tid": thread, "cat": lane, "name": span.name}
                event |= {"ts": span.start * 1e6, "dur": max(span.end - span.start, 0.0) * 1e6}
                events.append({**event, "args": {"bytes": span.nbytes}})
    text = json.dumps(
        {"traceEvents": events, "displayTimeUnit": "ms", "otherData": report.to_dict()}, allow_nan=False
    )
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, lambda temporary: temporary.write_text(text, "utf-8"))


def _title(report: Report) -> str:
    """Return the picture's title."""
    weights = report.weight_bytes
    work = "One training step" if report.kind == "train" else "One inference step"
    if not weights:
        return work
    return f"{work}: {format_size(weights)} of weights in {format_size(report.vram_peak_bytes)} on the device"


def _subtitle(report: Report) -> str:
    """Return the line of figures below the title."""
    from .report import format_rate, format_seconds

    parts = [f"budget {format_size(report.vram_budget_bytes)}"]
    if report.step_seconds is not None:
        parts.append(f"step {format_seconds(report.step_seconds)}")
    if report.stall_seconds is not None:
        parts.append(f"stall {format_seconds(report.stall_seconds)}")
    parts.append(f"{report.transfers_per_weight:.2f} transfers per weight")
    if report.link_bytes_per_second is not None:
        parts.append(f"link {format_rate(report.link_bytes_per_second)}")
    if report.disk_bytes_per_second is not None:
        parts.append(
            f"disk {format_rate(report.disk_bytes_per_second)}, {report.bound_by or 'nothing'} binds"
        )
    return "   |   ".join([*parts, *([report.device] if report.device else [])])


def _draw_lanes(axes: Axes, spans: Sequence[Span], lanes: Sequence[str]) -> None:
    """Draw one row of bars for each of ``lanes``, over time."""
    end = max((s.end for s in spans), default=0.0) or 1.0
    scale, unit = (1.0, "s") if end >= 10 else (1e3, "ms") if end >= 1e-3 else (1e6, "us")
    wide = 0.003 * end  # in seconds; narrower bars are drawn without a white edge, which would hide them
    for row, lane in enumerate(lanes):
        y = len(lanes) - 1 - row
        own = _visible([s for s in spans if s.lane == lane], end)
        bars = [(s.start * scale, max(s.end - s.start, 0.0) * scale) for s in own]
        edges = ["white" if s.end - s.start > wide else COLOURS[lane] for s in own]
        axes.broken_barh(bars, (y + 0.12, 0.76), facecolors=COLOURS[lane], edgecolors=edges, linewidth=0.5)
        axes.axhline(y + 0.5, color="#eaeef2", linewidth=0.8, zorder=0)
        if lane != "stall":
            _label_bars(axes, own, y + 0.49, scale, end * scale)
    axes.set_ylim(0, len(lanes))
    axes.set_xlim(0, end * scale)
    axes.set_yticks([len(lanes) - 0.5 - i for i in range(len(lanes))], [MEANING[lane] for lane in lanes])
    axes.tick_params(axis="y", length=0, labelsize=10, labelcolor=INK)
    axes.tick_params(axis="x", labelsize=9, labelcolor=INK, color=FAINT)
    axes.set_xlabel(f"time in {unit}", size=9, color=INK, labelpad=2)
    if not spans:
        axes.set_xticks([])
        axes.text(
            0.5, 0.5, "no step was timed", transform=axes.transAxes, ha="center", va="center", color=FAINT
        )
    _hide_frame(axes)


def _visible(spans: Sequence[Span], end: float) -> list[Span]:
    """Merge or drop spans and gaps that are far narrower than a pixel. Otherwise each would be drawn a whole
    pixel wide.

    ``end``: seconds of the whole timeline.
    """
    shown: list[Span] = []
    for span in sorted(spans, key=lambda s: s.start):
        last = shown[-1] if shown else None
        if last and last.name == span.name and 0 <= span.start - last.end < end / 5000:
            shown[-1] = replace(last, end=span.end, nbytes=last.nbytes + span.nbytes)
        else:
            shown.append(span)
    return [span for span in shown if span.end - span.start > end / 5000]


def _label_bars(axes: Axes, spans: Sequence[Span], y: float, scale: float, end: float) -> None:
    """Write the short name of the unit into each bar that is wide enough for the text."""
    ink = INK if spans and spans[0].lane == "link" else "white"
    inches = WIDTH_INCHES * 0.86
    for span in spans:
        label = "" if span.name == span.lane else short_name(span.name)
        width = (span.end - span.start) * scale / end * inches
        if label and width > 0.085 * len(label) + 0.06:
            axes.text(
                (span.start + span.end) / 2 * scale,
                y,
                label,
                ha="center",
                va="center",
                size=8.5,
                color=ink,
            )


def _draw_unit_map(axes: Axes, report: Report) -> None:
    """Draw a box for each unit, in order, and a legend below. The width of a box is proportional to the
    unit's bytes.
    """
    total = sum(p.nbytes for p in report.places) or 1
    needed = {p.name for p in report.resident_by_need}
    start = 0.0
    used: dict[str, tuple[str, int]] = {}  # by legend text: (colour, bytes)
    for place in report.places:
        by_need = place.resident and place.name in needed
        colour = NEEDED if by_need else CHOSEN if place.resident else STREAMED
        words = "stays, by need" if by_need else "stays on the device" if place.resident else "streamed"
        used[words] = (colour, used.get(words, (colour, 0))[1] + place.nbytes)
        width = place.nbytes / total
        axes.broken_barh([(start, width)], (0, 1), color=colour, edgecolor="white", linewidth=0.8)
        start += width
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.set_xticks([])
    axes.set_yticks([0.5], ["weights"])
    axes.tick_params(axis="y", length=0, labelsize=10, labelcolor=INK)
    x = 0.0
    for words, (colour, nbytes) in used.items():
        label = f"{words}: {format_size(nbytes)}"
        axes.text(x, -0.62, "\u25a0", color=colour, size=11, va="center", transform=axes.transAxes)
        axes.text(x + 0.02, -0.62, label, color=INK, size=9, va="center", transform=axes.transAxes)
        x += 0.045 + 0.0098 * len(label)
    _hide_frame(axes)


def _hide_frame(axes: Axes) -> None:
    """Hide the frame around ``axes``."""
    for side in axes.spines.values():
        side.set_visible(False)


def short_name(name: str) -> str:
    """Return the last number in a dotted name, or the last part of a name without numbers: a text short
    enough for a bar.
    """
    parts = [part for part in name.split(".") if part]
    numbers = [part for part in parts if part.isdigit()]
    return numbers[-1] if numbers else parts[-1] if parts else ""


def _tracks(spans: Sequence[Span]) -> list[list[Span]]:
    """Distribute ``spans`` over as few tracks as possible. Within a track, spans overlap by at most a
    nanosecond.
    """
    tracks: list[list[Span]] = []
    for span in sorted(spans, key=lambda s: (s.start, s.end)):
        free = next((t for t in tracks if t[-1].end <= span.start + 1e-9), None)
        if free is None:
            tracks.append([span])
        else:
            free.append(span)
    return tracks


def _metadata(name: str, thread: int, value: str) -> dict[str, Any]:
    """Return a metadata event, which names a process or a track."""
    return {"ph": "M", "pid": 1, "tid": thread, "name": name, "args": {"name": value}}
