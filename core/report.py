"""What a session did, in figures: the public contract of `Session.report()`, and its table for people.

Pure data: built by the session from its counters and events, it touches no device. Pictures and
traces of the same figures are drawn by `timeline.py`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from .sizes import format_size

LANES = ("compute", "link", "stall", "disk")
NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Span:
    """One stretch on the timeline, in seconds from the timeline's start; ``lane`` is one of LANES."""

    lane: str
    name: str
    start: float
    end: float
    nbytes: int = 0

    def __post_init__(self) -> None:
        if self.lane not in LANES:
            raise ValueError(f"span lane {self.lane!r} is none of {', '.join(LANES)}")


@dataclass(frozen=True)
class UnitPlace:
    """Where a unit lives, and why it is resident ("" for a streamed one)."""

    name: str
    nbytes: int
    resident: bool
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """{name, bytes, reason}, as the report lists residents."""
        return {"name": self.name, "bytes": self.nbytes, "reason": self.reason}


@dataclass(frozen=True)
class Report:
    """Figures of a session: bytes, seconds, bytes per second; None where nothing was measured.

    Per-step figures are medians over steps. A step is one root forward or, when training, everything
    from the first forward after a backward to that backward's end. ``vram_*`` count parameters,
    buffers, slots and scratch held by Carom on the device, the peak since the budget last fell; ``adapter_bytes``
    (trainable) lie apart.
    """

    vram_budget_bytes: int = 0
    vram_peak_bytes: int = 0
    resident_bytes: int = 0
    slot_bytes: int = 0
    pinned_bytes: int = 0
    pinned_peak_bytes: int = 0
    raw_bytes_per_step: float = 0.0
    wire_bytes_per_step: float = 0.0
    transfers_per_weight: float = 0.0
    step_seconds: float | None = None
    compute_seconds: float | None = None
    stall_seconds: float | None = None
    roofline_seconds: float | None = None
    hidden_fraction: float | None = None
    link_bytes_per_second: float | None = None
    disk_bytes_per_second: float | None = None
    units: int = 0
    resident_by_choice: tuple[UnitPlace, ...] = ()
    resident_by_need: tuple[UnitPlace, ...] = ()
    # beyond the contract
    predicted_seconds: float | None = None
    adapter_bytes: int = 0
    streamed_bytes: int = 0
    waiting_bytes: int = 0  # of streamed weights on the host as they wait to cross, packed or plain
    packed_units: int = 0  # streamed units that cross packed
    staging_bytes: int = 0  # where packed bytes land on the device
    resident_packed_bytes: int = (
        0  # of `resident_bytes`: units that stay packed; what they unpack to, how many they are
    )
    resident_packed_raw_bytes: int = 0
    resident_packed_units: int = 0
    decode_seconds: float = 0.0  # of a step, in which the device unpacks
    effective_link_bytes_per_second: float | None = None  # raw bytes brought per second of copying
    ram_budget_bytes: int = 0  # of the host cache; these are zero where weights do not come from disk
    ram_peak_bytes: int = 0
    disk_bytes_per_step: float = 0.0
    link_seconds: float | None = None  # what a step's bytes take on the link alone, and from the disk alone
    disk_seconds: float | None = None
    bound_by: str = (
        ""  # the stage that takes longest of a step, were it alone: "compute", "link", "disk", or "host"
    )
    disk_wait_seconds: float = 0.0  # in all, of host threads for reads that were late
    pageable_bytes: int = 0
    steps: int = 0
    device: str = ""
    pool: str = "torch"  # whose memory the weights on the device are in: "torch" or "aimdo"
    pool_reason: str = ""  # why that one
    kind: str = "infer"  # of the last step: "infer" or "train"
    notes: tuple[str, ...] = ()
    # drawn, not listed
    spans: tuple[Span, ...] = ()
    places: tuple[UnitPlace, ...] = ()  # every unit, in order

    @property
    def weight_bytes(self) -> int:
        """Of all weights, as they are unpacked."""
        packed = self.resident_packed_raw_bytes - self.resident_packed_bytes
        return self.resident_bytes + packed + self.streamed_bytes

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready figures, the contract's keys first and in its order; spans and places left out."""
        return {
            f.name: _plain(getattr(self, f.name)) for f in fields(self) if f.name not in ("spans", "places")
        }

    def table(self) -> str:
        """The figures as an aligned text table for people (ASCII but for names; no trailing newline)."""
        return "\n".join(_layout(self._rows()))

    def listing(self) -> str:
        """The figures as lists in Markdown, a line each, for pages that show text in a proportional font.

        What was not measured is left out.
        """
        lines: list[str] = []
        for row in self._rows():
            if len(row) == 1:
                lines += [""] * bool(lines) + [row[0]]
            elif row[1] != NOT_MEASURED:
                name, figure, remark = (part.strip() for part in row)
                told = f"{figure} ({remark})" if figure and remark else figure or remark
                lines.append(f"- {name}: {told}" if name else f"- {told}")
        return "\n".join(lines)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the timeline of one step and the residency map to ``path`` (.png or .svg, by suffix).

        Raises ValueError for another suffix and OSError where the file cannot be written.
        """
        from .timeline import plot  # matplotlib takes half a second: only who draws pays

        plot(self, path)

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Write the spans as Chrome trace events, one track per lane (open in ui.perfetto.dev)."""
        from .timeline import trace

        trace(self, path)

    def _rows(self) -> list[tuple[str, ...]]:
        """(section,) or (label, figure, remark) rows of the table."""
        work = "training" if self.kind == "train" else "inference"
        rows: list[tuple[str, ...]] = [
            (f"Memory on the device ({self.device})" if self.device else "Memory on the device",),
            ("budget for weights", format_size(self.vram_budget_bytes), self._budget_share()),
            ("peak held by Carom", format_size(self.vram_peak_bytes), self._budget_verdict()),
            ("  resident weights", format_size(self.resident_bytes), "stay on the device"),
        ]  # fmt: skip
        if self.resident_packed_units:
            packed = (
                f"of them: {format_size(self.resident_packed_raw_bytes)} of weights, unpacked at each use"
            )
            rows.append(("    packed", format_size(self.resident_packed_bytes), packed))
        rows.append(("  slots", format_size(self.slot_bytes), "streamed weights pass through these"))
        if self.staging_bytes:
            rows.append(
                ("  staging", format_size(self.staging_bytes), "packed weights land here, to be unpacked")
            )
        if self.pool_reason:
            rows.append(("pool", self.pool, self.pool_reason))
        if self.adapter_bytes:
            rows.append(
                ("adapters", format_size(self.adapter_bytes), "trainable, on the device, counted apart")
            )
        rows += [("Memory on the host",)]
        if self.ram_budget_bytes:
            within = (
                "within the budget" if self.ram_peak_bytes <= self.ram_budget_bytes else "OVER THE BUDGET"
            )
            rows += [
                ("streamed weights", format_size(self.streamed_bytes), "wait on disk"),
                ("budget for them in RAM", format_size(self.ram_budget_bytes), ""),
                ("peak held by Carom", format_size(self.ram_peak_bytes), within),
            ]
        elif self.packed_units:
            packed = _share(self.waiting_bytes, self.streamed_bytes, "of their raw size")
            rows.append(("streamed weights", format_size(self.waiting_bytes), f"wait here packed, {packed}"))
        else:
            rows.append(("streamed weights", format_size(self.streamed_bytes), "wait here for their turn"))
        rows += [
            ("pinned", format_size(self.pinned_bytes), f"peak {format_size(self.pinned_peak_bytes)}"),
        ]
        if self.pageable_bytes:
            rows.append(("not pinned", format_size(self.pageable_bytes), "crosses more slowly"))
        rows += [
            (f"One {work} step (median of {self.steps})" if self.steps else f"One {work} step",),
            ("weights moved", format_size(self.raw_bytes_per_step), "their raw size"),
            ("crossed the link", format_size(self.wire_bytes_per_step), _share(self.wire_bytes_per_step, self.raw_bytes_per_step, "of the raw size")),
            ("transfers per weight", f"{self.transfers_per_weight:.2f}", "mean over streamed units"),
            ("step time", format_seconds(self.step_seconds), ""),
            ("  computing", format_seconds(self.compute_seconds), _share(self.compute_seconds, self.step_seconds, "of the step")),
            ("  waiting for weights", format_seconds(self.stall_seconds), _share(self.stall_seconds, self.step_seconds, "of the step (stall)")),
            ("  best possible", format_seconds(self.roofline_seconds), self._roofline_verdict()),
            ("  predicted", format_seconds(self.predicted_seconds), "by the planner, from the first steps"),
            ("transfers hidden", _percent(self.hidden_fraction if self.raw_bytes_per_step else None), "behind computing"),
            ("link rate", format_rate(self.link_bytes_per_second), "host to device"),
        ]  # fmt: skip
        if self.packed_units:
            rows.append(
                (
                    "  of raw bytes",
                    format_rate(self.effective_link_bytes_per_second),
                    "what packing makes of it",
                )
            )
            rows.append(("unpacking", format_seconds(self.decode_seconds), "beside the rest"))
        if self.ram_budget_bytes:
            rows.append(("read from disk", format_size(self.disk_bytes_per_step), "a step"))
            rows.append(("waited for the disk", format_seconds(self.disk_wait_seconds), "in all"))
        if self.disk_bytes_per_second is not None:
            rows.append(("disk rate", format_rate(self.disk_bytes_per_second), "disk to host"))
        if self.bound_by:
            rows.append(("bound by", self.bound_by, self._stages()))
        rows += [("Where the weights live",), ("units", str(self.units), self._places_summary())]
        rows += [
            (f"  {p.name or '(root)'}", format_size(p.nbytes), p.reason) for p in _most(self.resident_by_need)
        ]
        left_out = len(self.resident_by_need) - len(_most(self.resident_by_need))
        if left_out:
            rows.append((f"  and {left_out} more", "", "resident by need; all are in to_dict()"))
        if self.notes:
            rows.append(("Notes",))
            rows += [("", "", note) for note in self.notes]
        return rows

    def _budget_share(self) -> str:
        if 0 < self.weight_bytes <= self.vram_budget_bytes:
            return "all of the weights fit"
        return _share(self.vram_budget_bytes, self.weight_bytes, "of the weights")

    def _budget_verdict(self) -> str:
        if self.vram_peak_bytes <= self.vram_budget_bytes:
            return "within the budget"
        return f"OVER THE BUDGET by {format_size(self.vram_peak_bytes - self.vram_budget_bytes)}"

    def _stages(self) -> str:
        """What each stage would take alone."""
        stages = ("computing", self.compute_seconds), ("link", self.link_seconds), ("disk", self.disk_seconds)
        known = [f"{name} {format_seconds(seconds)}" for name, seconds in stages if seconds is not None]
        if self.bound_by == "host":
            return "the device waits for Python to issue its work: more tokens a step, or torch.compile, use it better"
        return f"a step alone: {', '.join(known)}"

    def _roofline_verdict(self) -> str:
        if not self.roofline_seconds or self.step_seconds is None:
            return "roofline"
        return f"roofline; the step takes {self.step_seconds / self.roofline_seconds:.2f}x"

    def _places_summary(self) -> str:
        choice, need = len(self.resident_by_choice), len(self.resident_by_need)
        # What stays by need was left out of the units when the module was carved.
        parts = [f"{self.units - choice} streamed", f"{choice} resident by choice"]
        return ", ".join(parts + ([f"beside them {need} by need:"] if need else []))


def format_seconds(seconds: float | None) -> str:
    """``seconds`` for people ("12.3 ms"); "not measured" for None."""
    if seconds is None:
        return NOT_MEASURED
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= size:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def format_rate(rate: float | None) -> str:
    """``rate`` bytes per second for people ("51.70 GiB/s"); "not measured" for None."""
    return NOT_MEASURED if rate is None else f"{format_size(rate)}/s"


def _plain(value: Any) -> Any:
    """``value`` as JSON knows it; NaN and infinity, which JSON lacks, become None."""
    if isinstance(value, UnitPlace):
        return value.to_dict()
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _percent(fraction: float | None) -> str:
    return NOT_MEASURED if fraction is None else f"{100 * fraction:.1f} %"


def _share(part: float | None, whole: float | None, words: str) -> str:
    return "" if part is None or not whole else f"{_percent(part / whole)} {words}"


def _most(places: tuple[UnitPlace, ...], count: int = 8) -> tuple[UnitPlace, ...]:
    """The ``count`` largest, in their own order: a table is for reading."""
    largest = set(sorted(range(len(places)), key=lambda i: (-places[i].nbytes, i))[:count])
    return tuple(place for i, place in enumerate(places) if i in largest)


def _layout(rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Align (label, figure, remark) rows; one-element rows are section heads."""
    rows = list(rows)
    cells = [row for row in rows if len(row) == 3]
    label = min(max((len(row[0]) for row in cells), default=0), 48)
    figure = max((len(row[1]) for row in cells), default=0)
    lines: list[str] = []
    for row in rows:
        if len(row) == 1:
            lines += [""] * bool(lines) + [row[0]]
        elif not row[0] and not row[1]:
            lines.append(f"  {row[2]}")
        else:
            lines.append(f"  {row[0]:<{label}}  {row[1]:>{figure}}  {row[2]}".rstrip())
    return lines
