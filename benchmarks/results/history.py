"""The cells of all records: the newest measurement of each, and the range over all of them with the hosts' speed.

A disturbed measurement is shown only where there is no other one, and is marked; it does not count in the range.
The module is pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Measurement:
    """One cell of one record. ``removed``: the record was deleted, since newer ones have all its cells."""

    entry: dict[str, Any]
    cell: dict[str, Any]
    removed: bool

    @property
    def value(self) -> float:
        return self.cell["value"]

    @property
    def disturbed(self) -> str | None:
        """Why the measurement is disturbed, or None."""
        return next(
            (mark["why"] for mark in self.entry["disturbed"] if mark["group"] in self.cell["group"]), None
        )

    @property
    def base(self) -> float | None:
        """The value of the base case in the same record."""
        return self.cell.get("base")

    @property
    def python_loop_seconds(self) -> float | None:
        return self.entry["machine"]["python_loop_seconds"]


@dataclass
class Cell:
    """All measurements of one cell on one accelerator, the oldest first."""

    kind: str
    accelerator: str | None
    group: str
    case: str
    metric: str
    unit: str
    runs: list[Measurement] = field(default_factory=list)

    @property
    def newest(self) -> Measurement:
        """The newest measurement that is not disturbed and whose record is kept; else the newest one."""
        there = [run for run in self.runs if not run.removed] or self.runs
        return ([run for run in there if not run.disturbed] or there)[-1]

    @property
    def range(self) -> tuple[Measurement, Measurement]:
        """The measurements with the least and the greatest value, without disturbed ones unless all are."""
        runs = [run for run in self.runs if not run.disturbed] or self.runs
        return min(runs, key=lambda run: run.value), max(runs, key=lambda run: run.value)

    @property
    def counted(self) -> int:
        """The number of measurements in the range."""
        return len([run for run in self.runs if not run.disturbed]) or len(self.runs)


def cells(index: dict[str, Any]) -> list[Cell]:
    """Return the cells of an index, in the order in which their records first have them."""
    entries = [(one, False) for one in index["records"]] + [(one, True) for one in index["removed"]]
    entries = [(one, removed) for one, removed in entries if one["kind"] != "archive"]
    found: dict[tuple[str | None, ...], Cell] = {}
    for one, removed in sorted(entries, key=lambda pair: (pair[0]["date"], pair[0]["file"])):
        for cell in one["cells"]:
            name = (
                one["kind"],
                one["machine"]["accelerator"],
                *(cell[k] for k in ("group", "case", "metric", "unit")),
            )
            if name not in found:
                found[name] = Cell(*name)  # type: ignore[arg-type]
            found[name].runs.append(Measurement(one, cell, removed))
    return list(found.values())
