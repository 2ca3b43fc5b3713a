"""The table and the chart of rows: one printer and one drawing for every kind of record. GB are 10^9 bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .rows import Row

NOTE = 90  # characters of a note that a text table shows; Markdown and the record have all of it
PER_PANEL = 14  # bars in a panel of the chart


def table(rows: Sequence[Row], markdown: bool = False) -> str:
    """Return the rows as text or Markdown, below a line for each group. Columns that are empty are left out."""
    heads = ("case", "what", "median", "quartiles", "n", "x base", "x roofline", "device GB", "host GB", "same bits",
             "kernels, ms", "note")  # fmt: skip
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    lines: list[tuple[str, ...] | str] = []
    for group, members in groups.items():
        bases = sorted({row.base_case for row in members if row.base_case})
        lines.append(group + (f" (base: {', '.join(bases)})" if bases else ""))
        lines += [_cells(row) for row in members]
    whole = [line for line in lines if not isinstance(line, str)]
    kept = [i for i in range(len(heads)) if any(line[i] for line in whole)]
    head = tuple(heads[i] for i in kept)
    body = [line if isinstance(line, str) else tuple(line[i] for i in kept) for line in lines]
    return _markdown(head, body) if markdown else _text(head, body)


def _cells(row: Row) -> tuple[str, ...]:
    spread = "" if row.quartiles is None else f"{number(row.quartiles[0])} to {number(row.quartiles[1])}"
    count = str(row.samples) if row.samples else ""
    if row.processes > 1:
        count = f"{count} in {row.processes} runs" if count else f"{row.processes} runs"
    return (
        row.case,
        row.metric,
        "" if row.value is None else f"{number(row.value)} {row.unit}",
        spread,
        count,
        number(row.ratio),
        number(row.value / row.floor if row.value and row.floor else None),
        number(None if row.device_bytes is None else row.device_bytes / 1e9),
        number(None if row.host_bytes is None else row.host_bytes / 1e9),
        {True: "yes", False: "NO", None: ""}[row.same_bits],
        ", ".join(f"{name} {number(ms)}" for name, ms in row.kernels),
        row.note,
    )


def number(value: float | None) -> str:
    """Return a value with three significant digits or more, without an exponent; "" for None."""
    if value is None:
        return ""
    if abs(value) >= 1000:
        return f"{value:.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.3f}"


def _text(head: tuple[str, ...], body: Sequence[tuple[str, ...] | str]) -> str:
    lines = [head, *(line for line in body if not isinstance(line, str))]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    if head[-1] == "note":
        widths[-1] = 0

    def joined(line: tuple[str, ...]) -> str:
        cut = (*line[:-1], line[-1][:NOTE]) if head[-1] == "note" else line
        return "  " + "  ".join(cell.ljust(width) for cell, width in zip(cut, widths, strict=True)).rstrip()

    return "\n".join([joined(head), *(line if isinstance(line, str) else joined(line) for line in body)])


def _markdown(head: tuple[str, ...], body: Sequence[tuple[str, ...] | str]) -> str:
    lines = [markdown_line(head), markdown_line(["---"] * len(head))]
    for line in body:
        if isinstance(line, str):
            lines.append(markdown_line([f"**{line}**", *[""] * (len(head) - 1)]))
        else:
            lines.append(markdown_line(line))
    return "\n".join(lines)


def markdown_line(cells: Sequence[str]) -> str:
    """Return a line of a Markdown table. Bars and line ends in a cell do not end it."""
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def chart(rows: Sequence[Row], path: Path) -> None:
    """Draw a panel of bars for each group, metric and unit to ``path``, with quartiles as error bars.

    The format is the file's suffix. The file gets a temporary name first and is then renamed. Raises ValueError if no
    row has a value.
    """
    from matplotlib.figure import Figure

    panels: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if row.value is not None:
            panels.setdefault((row.group, row.metric, row.unit), []).append(row)
    if not panels:
        raise ValueError("nothing to draw: no case of this record has a value")
    parts = [
        (key, members[start : start + PER_PANEL])
        for key, members in panels.items()
        for start in range(0, len(members), PER_PANEL)
    ]
    columns = min(2, len(parts))
    lines = -(-len(parts) // columns)
    figure = Figure(figsize=(6.4 * columns, 2.9 * lines), layout="constrained")
    for index, ((group, metric, unit), members) in enumerate(parts, 1):
        axes = figure.add_subplot(lines, columns, index)
        _bars(axes, members)
        axes.set_title(group, fontsize=7)
        axes.set_xlabel(f"{metric}, {unit}", fontsize=7)
    save(figure, path)


def _bars(axes: Any, members: Sequence[Row]) -> None:
    values = [row.value or 0.0 for row in members]
    colours = ["#c2452d" if row.case.startswith("Carom") else "#9aa5ad" for row in members]
    cuts = [row.quartiles or (value, value) for row, value in zip(members, values, strict=True)]
    errors = [
        [max(0.0, value - cut[0]) for value, cut in zip(values, cuts, strict=True)],
        [max(0.0, cut[1] - value) for value, cut in zip(values, cuts, strict=True)],
    ]
    bars = axes.barh(range(len(members)), values, xerr=errors, color=colours, error_kw={"linewidth": 0.8})
    axes.set_yticks(range(len(members)), [row.case for row in members], fontsize=6)
    words = [
        number(row.value) + (f", {row.device_bytes / 1e9:.1f} GB" if row.device_bytes else "")
        for row in members
    ]
    axes.bar_label(bars, words, fontsize=6, padding=2)
    axes.tick_params(axis="x", labelsize=6)
    axes.margins(x=0.3)
    axes.invert_yaxis()


def save(figure: Any, path: Path) -> None:
    """Write a figure to ``path``: to a temporary name first, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    figure.savefig(temporary, format=path.suffix.lstrip(".") or "png", dpi=130)
    temporary.replace(path)
