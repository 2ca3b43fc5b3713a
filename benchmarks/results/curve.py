"""The chart `docs/bench.png`: seconds a step over device memory, for all engines of one comparison in one record."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .table import save

NO_OFFLOADING = "no offloading"
_MARKERS = {True: "o", False: "X", None: "s"}
_WORDS = {True: "same bits as without offloading", False: "other bits", None: "bits not compared"}


_PEER_COLOURS = ("#3b6ea5", "#4f9d69", "#8c6bb1", "#9a8f2f", "#7d8a94")


@dataclass(frozen=True)
class Comparison:
    """The cells of one group in one record that have a time and a size of device memory."""

    entry: dict[str, Any]
    group: str
    cells: tuple[dict[str, Any], ...]

    @property
    def carom(self) -> list[dict[str, Any]]:
        return [cell for cell in self.cells if cell["case"].startswith("Carom")]

    @property
    def peers(self) -> list[dict[str, Any]]:
        return [cell for cell in self.cells if cell not in self.carom and cell["case"] != NO_OFFLOADING]

    @property
    def enough(self) -> bool:
        """Whether there are at least three budgets of Carom's, two kinds of peers and the run without offloading."""
        base = any(cell["case"] == NO_OFFLOADING for cell in self.cells)
        kinds = {_engine(cell) for cell in self.peers}
        return base and len(self.carom) >= 3 and len(kinds) >= 2


def comparison(index: dict[str, Any]) -> Comparison | None:
    """Return the comparison to draw: with enough points that of the newest day, else the one with the most points; None
    without any.

    Of several the one with the most points is taken.
    """
    found = []
    for entry in index["records"]:
        if entry["kind"] != "engines":
            continue
        groups: dict[str, list[dict[str, Any]]] = {}
        for cell in entry["cells"]:
            if cell["metric"] == "step" and "device_bytes" in cell and cell["group"] not in _marked(entry):
                groups.setdefault(cell["group"], []).append(cell)
        found += [Comparison(entry, group, tuple(cells)) for group, cells in groups.items()]
    found = [one for one in found if one.carom]
    return max(
        found,
        key=lambda one: (
            one.enough,
            one.entry["date"][:10] if one.enough else "",
            len(one.cells),
            one.entry["date"],
        ),
        default=None,
    )


def _marked(entry: dict[str, Any]) -> set[str]:
    """Return the groups of a record that are marked as disturbed."""
    return {
        cell["group"]
        for cell in entry["cells"]
        for mark in entry["disturbed"]
        if mark["group"] in cell["group"]
    }


def draw(one: Comparison, path: Path) -> None:
    """Draw a comparison to ``path``: Carom's budgets as a curve for each codec, all else as points."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(8.4, 4.8), layout="constrained")
    axes = figure.add_subplot()
    curves: dict[str, list[dict[str, Any]]] = {}
    for cell in one.carom:
        curves.setdefault(_codec(cell), []).append(cell)
    colours = {"lossless": "#c2452d", "raw": "#e08a3c", "auto": "#8c2d60"}
    for codec, cells in curves.items():
        cells.sort(key=lambda cell: cell["device_bytes"])
        xs, ys = [c["device_bytes"] / 1e9 for c in cells], [c["value"] / 1e3 for c in cells]
        axes.plot(xs, ys, color=colours.get(codec, "#c2452d"), linewidth=1.6, label=f"Carom, {codec}")
        for x, y, cell in zip(xs, ys, cells, strict=True):
            axes.plot(
                x, y, _MARKERS[cell.get("same_bits")], color=colours.get(codec, "#c2452d"), markersize=7
            )
    others = sorted(
        (cell for cell in one.cells if cell not in one.carom), key=lambda cell: cell["device_bytes"]
    )
    engines = list(dict.fromkeys(_engine(cell) for cell in others if cell["case"] != NO_OFFLOADING))
    colour_of = dict(zip(engines, _PEER_COLOURS, strict=False)) | {NO_OFFLOADING: "black"}
    for cell in others:
        x, y = cell["device_bytes"] / 1e9, cell["value"] / 1e3
        same = True if cell["case"] == NO_OFFLOADING else cell.get("same_bits")
        axes.plot(x, y, _MARKERS[same], color=colour_of.get(_engine(cell), "#7d8a94"), markersize=7)
    there = {True if cell["case"] == NO_OFFLOADING else cell.get("same_bits") for cell in one.cells}
    handles, _ = axes.get_legend_handles_labels()
    handles += [
        Line2D([], [], marker="o", color=colour, linestyle="", label=engine)
        for engine, colour in colour_of.items()
    ]
    handles += [
        Line2D([], [], marker=_MARKERS[same], color="#555555", linestyle="", label=_WORDS[same])
        for same in (True, False, None)
        if same in there
    ]
    axes.legend(handles=handles, fontsize=8)
    card = one.entry["machine"]["accelerator"] or "CPU"
    axes.set_title(f"{one.group}, {card}\n{one.entry['file']}", fontsize=9)
    axes.set_xlabel("device memory reserved, GB (10^9 bytes)")
    axes.set_ylabel("seconds a step")
    axes.set_xlim(0, 1.2 * max(cell["device_bytes"] for cell in one.cells) / 1e9)
    axes.set_ylim(0, 1.15 * max(cell["value"] for cell in one.cells) / 1e3)
    axes.grid(alpha=0.25)
    save(figure, path)


def _codec(cell: dict[str, Any]) -> str:
    return next((word for word in cell["case"].split(", ") if word in ("raw", "lossless", "auto")), "raw")


def _engine(cell: dict[str, Any]) -> str:
    return cell["case"].partition(", ")[0]
