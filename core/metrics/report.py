"""The report of a session: a data class with figures of memory, transfers and times, and its conversion to
text.

`Report` is the return value of `Session.report()`, and its field names are part of the public interface. The
session fills the report from counters and device events. This module does not use a device. `timeline.py`
draws the same figures as a picture, or writes them as a trace. A unit is a group of tensors that are copied
together. It is either resident (it stays on the device) or streamed through slots, device memory that units
share in turn.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from ..common.sizes import format_size

LANES = ("compute", "link", "peer", "stall", "disk")
NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Span:
    """An interval on the timeline of a step.

    ``lane``: one of LANES.
    ``start``, ``end``: seconds since the step began.
    ``nbytes``: bytes moved, 0 if none were.

    Raises ValueError for another lane.
    """

    lane: str
    name: str
    start: float
    end: float
    nbytes: int = 0

    def __post_init__(self) -> None:
        if self.lane not in LANES:
            raise ValueError(f"span lane {self.lane!r} is not one of {', '.join(LANES)}")


@dataclass(frozen=True)
class UnitPlace:
    """The memory in which one unit (a group of tensors that are copied together) is kept.

    ``resident``: whether the unit stays on the device.
    ``reason``: why the unit stays on the device, "" for a streamed unit.
    """

    name: str
    nbytes: int
    resident: bool
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return {name, bytes, reason}, the form in which `Report.to_dict` lists resident units."""
        return {"name": self.name, "bytes": self.nbytes, "reason": self.reason}


@dataclass(frozen=True)
class Report:
    """The figures of a session in bytes, seconds and bytes per second. None where nothing was measured.

    Figures of a step are medians over steps. A step is one forward of the root module or, in training,
    everything from the first forward after a backward to the end of the next backward. ``vram_*`` count
    parameters, buffers, slots and scratch memory that Carom holds on the device. The peak is the highest
    value since the budget was last lowered. ``adapter_bytes`` are the bytes of trainable weights on the
    device, which ``vram_*`` do not count.
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
    # The fields above are those of the first version's interface, which cannot change. Those below were added
    # later.
    predicted_seconds: float | None = None
    adapter_bytes: int = 0
    streamed_bytes: int = 0
    # Bytes of streamed weights in host memory, in the form in which they are copied (packed or not).
    waiting_bytes: int = 0
    # Bytes of streamed weights in the memory of other devices (``peers``), in the form in which they are copied.
    peer_bytes: int = 0
    peer_wire_bytes_per_step: float = 0.0  # bytes that were copied from there; not in `wire_bytes_per_step`
    packed_units: int = 0  # number of streamed units that are copied packed
    staging_bytes: int = 0  # device buffer to which packed bytes are copied before they are unpacked
    # the part of `resident_bytes` that units take which stay on the device packed
    resident_packed_bytes: int = 0
    resident_packed_raw_bytes: int = 0  # bytes of these units when unpacked
    resident_packed_units: int = 0  # number of these units
    decode_seconds: float = 0.0  # seconds of a step in which the device unpacks weights
    # Unpacked bytes of the copied weights per second of copying.
    effective_link_bytes_per_second: float | None = None
    # Budget of the host cache. This field and the next two are 0 if weights do not come from disk.
    ram_budget_bytes: int = 0
    ram_peak_bytes: int = 0
    disk_bytes_per_step: float = 0.0
    link_seconds: float | None = None  # seconds that the copies of a step take if nothing else runs
    disk_seconds: float | None = None  # seconds that the disk reads of a step take if nothing else runs
    # The part of the machine that limits the speed of a step: "compute", "link", "disk" or "host".
    bound_by: str = ""
    disk_wait_seconds: float = 0.0  # total seconds that host threads have waited for disk reads
    # The parts of a step besides `stall_seconds` (see core/metrics/kernel_times.py): the model's kernels, the
    # device's idle time because the host was late, the gaps between kernels that were launched in time, and the
    # part of `kernel_seconds` that unpacking beside the kernels has added.
    kernel_seconds: float | None = None
    host_late_seconds: float | None = None
    gap_seconds: float | None = None
    decode_contention_seconds: float | None = None
    kernel_source: str = ""  # how these were measured: "profiler", "events", "clock" or ""
    pageable_bytes: int = 0  # bytes of streamed weights in host memory that is not pinned
    steps: int = 0
    device: str = ""
    pool: str = "torch"  # allocator of the weights on the device: "torch" or "aimdo"
    pool_reason: str = ""  # why this allocator is used
    kind: str = "infer"  # kind of the last step: "infer" or "train"
    notes: tuple[str, ...] = ()
    # The fields below are used for pictures and traces; `to_dict` leaves them out.
    spans: tuple[Span, ...] = ()
    places: tuple[UnitPlace, ...] = ()  # every unit, in the order of the module

    @property
    def weight_bytes(self) -> int:
        """The bytes of all weights when unpacked."""
        packed = self.resident_packed_raw_bytes - self.resident_packed_bytes
        return self.resident_bytes + packed + self.streamed_bytes

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as JSON-ready values by field name, without ``spans`` and ``places``; NaN
        becomes None.
        """
        return {
            f.name: _json_value(getattr(self, f.name))
            for f in fields(self)
            if f.name not in ("spans", "places")
        }

    def table(self) -> str:
        """Return the figures as a text table with aligned columns, without a trailing newline (ASCII except
        for names).
        """
        return "\n".join(_align(self._rows()))

    def listing(self) -> str:
        """Return the figures as Markdown lists, one figure a line, for display in a proportional font.

        Figures that were not measured are left out.
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
        """Draw the timeline of one step and a map of resident and streamed units to the file ``path`` (.png
        or .svg).

        Raises ValueError for another suffix and OSError where the file cannot be written.
        """
        from .timeline import plot  # imported here because importing matplotlib takes half a second

        plot(self, path)

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline to the file ``path`` as Chrome trace events, one track for each lane (see
        ui.perfetto.dev).
        """
        from .timeline import trace

        trace(self, path)

    def _rows(self) -> list[tuple[str, ...]]:
        """Return the rows of the table: (heading,) or (label, figure, remark)."""
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
                (
                    "  staging",
                    format_size(self.staging_bytes),
                    "packed weights are copied here, then unpacked",
                )
            )
        if self.pool_reason:
            rows.append(("pool", self.pool, self.pool_reason))
        if self.adapter_bytes:
            rows.append(
                (
                    "trainable",
                    format_size(self.adapter_bytes),
                    "adapters and other weights that train, on the device, not counted in the budget",
                )
            )
        rows += [("Memory on the host",)]
        if self.ram_budget_bytes:
            within = (
                "within the budget" if self.ram_peak_bytes <= self.ram_budget_bytes else "OVER THE BUDGET"
            )
            rows += [
                ("streamed weights", format_size(self.streamed_bytes), "kept on disk"),
                ("budget for them in RAM", format_size(self.ram_budget_bytes), ""),
                ("peak held by Carom", format_size(self.ram_peak_bytes), within),
            ]
        elif self.packed_units:
            packed = _share(self.waiting_bytes, self.streamed_bytes, "of their raw size")
            rows.append(("streamed weights", format_size(self.waiting_bytes), f"kept here packed, {packed}"))
        else:
            rows.append(
                ("streamed weights", format_size(self.streamed_bytes), "kept here until they are copied")
            )
        rows += [
            ("pinned", format_size(self.pinned_bytes), f"peak {format_size(self.pinned_peak_bytes)}"),
        ]
        if self.pageable_bytes:
            rows.append(("not pinned", format_size(self.pageable_bytes), "copied more slowly"))
        if self.peer_bytes:
            rows.append(("on other devices", format_size(self.peer_bytes), "weights that wait there (peers)"))
        rows += [
            (f"One {work} step (median of {self.steps})" if self.steps else f"One {work} step",),
            ("weights moved", format_size(self.raw_bytes_per_step), "their raw size"),
            ("crossed the link", format_size(self.wire_bytes_per_step), _share(self.wire_bytes_per_step, self.raw_bytes_per_step, "of the raw size")),
            *self._peer_row(),
            ("transfers per weight", f"{self.transfers_per_weight:.2f}", "mean over streamed units"),
            ("step time", format_seconds(self.step_seconds), ""),
            ("  kernels", format_seconds(self.kernel_seconds), self._kernels_remark()),
            ("  waiting for weights", format_seconds(self.stall_seconds), _share(self.stall_seconds, self.step_seconds, "of the step (stall)")),
            ("  host late", format_seconds(self.host_late_seconds), _share(self.host_late_seconds, self.step_seconds, "of the step")),
            *self._gaps_row(),
            ("  best possible", format_seconds(self.roofline_seconds), self._roofline_verdict()),
            ("  predicted", format_seconds(self.predicted_seconds), "by the planner, without the host's delays"),
            ("transfers hidden", _percent(self.hidden_fraction if self.raw_bytes_per_step else None), "behind computing"),
            ("link rate", format_rate(self.link_bytes_per_second), "host to device"),
        ]  # fmt: skip
        if self.packed_units:
            rows.append(
                (
                    "  of raw bytes",
                    format_rate(self.effective_link_bytes_per_second),
                    "counted in unpacked bytes",
                )
            )
            rows.append(("unpacking", format_seconds(self.decode_seconds), "within the step"))
        if self.ram_budget_bytes:
            rows.append(("read from disk", format_size(self.disk_bytes_per_step), "a step"))
            rows.append(("waited for the disk", format_seconds(self.disk_wait_seconds), "in all"))
        if self.disk_bytes_per_second is not None:
            rows.append(("disk rate", format_rate(self.disk_bytes_per_second), "disk to host"))
        if self.bound_by:
            rows.append(("bound by", self.bound_by, self._stages()))
        rows += [("Where the weights live",), ("units", str(self.units), self._places_summary())]
        rows += [
            (f"  {p.name or '(root)'}", format_size(p.nbytes), p.reason)
            for p in _largest(self.resident_by_need)
        ]
        left_out = len(self.resident_by_need) - len(_largest(self.resident_by_need))
        if left_out:
            rows.append((f"  and {left_out} more", "", "resident by need; all are in to_dict()"))
        if self.notes:
            rows.append(("Notes",))
            rows += [("", "", note) for note in self.notes]
        return rows

    def _peer_row(self) -> list[tuple[str, str, str]]:
        """Return the row of the bytes that came from other devices, if any did."""
        if not self.peer_wire_bytes_per_step:
            return []
        return [
            ("from other devices", format_size(self.peer_wire_bytes_per_step), "beside the link to the host")
        ]

    def _budget_share(self) -> str:
        """Return the remark that compares the budget with the bytes of all weights."""
        if 0 < self.weight_bytes <= self.vram_budget_bytes:
            return "all of the weights fit"
        return _share(self.vram_budget_bytes, self.weight_bytes, "of the weights")

    def _budget_verdict(self) -> str:
        """Return the remark that says whether the peak exceeded the budget."""
        if self.vram_peak_bytes <= self.vram_budget_bytes:
            return "within the budget"
        return f"OVER THE BUDGET by {format_size(self.vram_peak_bytes - self.vram_budget_bytes)}"

    def _stages(self) -> str:
        """Return the remark that gives, for each stage of a step, the seconds that it would take if nothing
        else ran.
        """
        stages = ("computing", self.compute_seconds), ("link", self.link_seconds), ("disk", self.disk_seconds)
        known = [f"{name} {format_seconds(seconds)}" for name, seconds in stages if seconds is not None]
        if self.bound_by == "host":
            return "the device waits for Python to issue its work: more tokens a step, or torch.compile, use it better"
        return f"a step alone: {', '.join(known)}"

    def _roofline_verdict(self) -> str:
        """Return the remark that compares the step's seconds with the roofline (the seconds with perfect
        overlap).
        """
        if not self.roofline_seconds or self.step_seconds is None:
            return "roofline"
        return f"roofline; the step takes {self.step_seconds / self.roofline_seconds:.2f}x"

    def _gaps_row(self) -> list[tuple[str, ...]]:
        """Return the row of the gaps between kernels; none where only a profiler could tell them."""
        if self.gap_seconds is None:
            return []
        share = _share(self.gap_seconds, self.step_seconds, "of the step")
        return [("  gaps between kernels", format_seconds(self.gap_seconds), share)]

    def _kernels_remark(self) -> str:
        """Return the remark on the kernels' seconds: their share, how they were measured, and contention."""
        share = _share(self.kernel_seconds, self.step_seconds, "of the step")
        if self.kernel_source == "events":
            share += " at most (events around units)"
        if self.decode_contention_seconds:
            share += f", {format_seconds(self.decode_contention_seconds)} of it because of unpacking"
        return share

    def _places_summary(self) -> str:
        """Return the remark that counts streamed and resident units."""
        choice, need = len(self.resident_by_choice), len(self.resident_by_need)
        # `units` does not count weights that have to stay on the device, because they belong to no unit.
        parts = [f"{self.units - choice} streamed", f"{choice} resident by choice"]
        return ", ".join(parts + ([f"beside them {need} by need:"] if need else []))


def format_seconds(seconds: float | None) -> str:
    """Return ``seconds`` as text, for example "12.3 ms"; "not measured" for None."""
    if seconds is None:
        return NOT_MEASURED
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= size:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def format_rate(rate: float | None) -> str:
    """Return ``rate`` (bytes per second) as text, for example "51.70 GiB/s"; "not measured" for None."""
    return NOT_MEASURED if rate is None else f"{format_size(rate)}/s"


def _json_value(value: Any) -> Any:
    """Convert ``value`` to a type that JSON has; NaN and infinity, which JSON lacks, become None."""
    if isinstance(value, UnitPlace):
        return value.to_dict()
    if isinstance(value, tuple):
        return [_json_value(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _percent(fraction: float | None) -> str:
    """Return ``fraction`` as a percentage, for example "12.5 %"; "not measured" for None."""
    return NOT_MEASURED if fraction is None else f"{100 * fraction:.1f} %"


def _share(part: float | None, whole: float | None, words: str) -> str:
    """Return ``part`` as a percentage of ``whole``, followed by ``words``. Returns "" if either number is
    unknown or 0.
    """
    return "" if part is None or not whole else f"{_percent(part / whole)} {words}"


def _largest(places: tuple[UnitPlace, ...], count: int = 8) -> tuple[UnitPlace, ...]:
    """Return the ``count`` largest of ``places``, in their original order, to keep the table short."""
    largest = set(sorted(range(len(places)), key=lambda i: (-places[i].nbytes, i))[:count])
    return tuple(place for i, place in enumerate(places) if i in largest)


def _align(rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Return the rows (label, figure, remark) as lines with aligned columns. A row with one element is a
    heading.
    """
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
