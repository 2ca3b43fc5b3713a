"""The first table of the README: seconds of whole prompts in ComfyUI, stock beside Carom."""

from __future__ import annotations

import re
from typing import Any

from .history import Cell, Measurement
from .render_prompts import CAROM, FIRST, LATER, SECOND, STOCK
from .table import markdown_line, number

_HEADS = ("VRAM", "prompts", "without Carom: 1st, 2nd, later", "Carom", "RAM without, GB", "RAM", "same bits")
_GROUP = re.compile(r"(.*), ([\d.]+) GiB free, files not in the page cache")

# Only these cases are shown here, because the README is short. docs/performance.md has all.
_CASE = re.compile(r"(one model|two models) of [\d.]+ GB( in turns)?")


def prompt_table(found: list[Cell]) -> str:
    """Return the table and its sentence, or "" if no record has the prompts of Carom beside those of stock."""
    rows = []
    for cell in found:
        if cell.kind == "comfyui prompts" and (cell.case, cell.metric) == (CAROM, LATER):
            place = _GROUP.fullmatch(cell.group)
            ours, theirs = _times(cell.newest, CAROM), _times(cell.newest, STOCK)
            if place is not None and _CASE.fullmatch(place[1]) and ours and theirs:
                rows.append(
                    (float(place[2]), place[1], _line(place, cell.newest, ours, theirs), cell.accelerator)
                )
    if not rows:
        return ""
    rows.sort(key=lambda row: row[:2])
    cards = " and ".join(sorted({row[3] or "" for row in rows}))
    words = (
        f"Seconds a prompt on {cards}, emulated VRAM: T5-XXL-sized fp8 encoder, Flux-shaped models in turns, 20 steps; "
        "the 1st reads uncached files."
    )
    lines = [markdown_line(_HEADS), markdown_line(["---"] * len(_HEADS)), *(row[2] for row in rows)]
    return "\n".join([*lines, "", words])


def _times(run: Measurement, case: str) -> list[dict[str, Any]]:
    """Return the cells of the first, the second and the later prompts of ``case`` in the record of ``run``; [] if one lacks."""
    same = {
        one["metric"]: one
        for one in run.entry["cells"]
        if (one["group"], one["case"]) == (run.cell["group"], case)
    }
    return [same[name] for name in (FIRST, SECOND, LATER)] if {FIRST, SECOND, LATER} <= set(same) else []


def _line(
    place: re.Match[str], run: Measurement, ours: list[dict[str, Any]], theirs: list[dict[str, Any]]
) -> str:
    def seconds(cells: list[dict[str, Any]]) -> str:
        return ", ".join(number(cell["value"]) for cell in cells) + " s"

    def ram(cells: list[dict[str, Any]]) -> str:
        return number(max(cell["host_bytes"] for cell in cells) / 1e9)

    same = all(cell.get("same_bits") for cell in ours)
    return markdown_line(
        (
            f"{place[2]} GiB",
            place[1].removesuffix(" in turns"),
            seconds(theirs),
            seconds(ours),
            ram(theirs),
            ram(ours),
            "yes" if same else "no",
        )
    )
