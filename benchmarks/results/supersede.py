"""Which kept record supersedes which, and which of them may be deleted.

A record supersedes an older one of the same kind and accelerator if it measured every cell of the older one. A record
is data: it may be deleted only if another supersedes it and no page or source file cites it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

GENERATED = (
    "docs/performance.md",
)  # cites the newest record of each cell, so it keeps nothing that is superseded


def cell_keys(entry: dict[str, Any]) -> set[tuple[str, ...]]:
    """Return what identifies the cells of an entry."""
    return {(cell["group"], cell["case"], cell["metric"], cell["unit"]) for cell in entry["cells"]}


def supersedes(entry: dict[str, Any], entries: Iterable[dict[str, Any]]) -> list[str]:
    """Return the files of older entries whose every cell ``entry`` measured too, in order.

    An entry without a cell, such as a run that failed, is superseded by each newer one. A disturbed record
    supersedes nothing, an archive neither supersedes nor is superseded.
    """
    if entry["kind"] == "archive" or entry["disturbed"]:
        return []
    mine = cell_keys(entry)
    return sorted(
        other["file"]
        for other in entries
        if other["kind"] == entry["kind"]
        and other["machine"]["accelerator"] == entry["machine"]["accelerator"]
        and _order(other) < _order(entry)
        and cell_keys(other) <= mine
    )


def prunable(entries: Sequence[dict[str, Any]], cited: set[str]) -> dict[str, list[str]]:
    """Return the files that may be deleted, each with the files that supersede it and stay.

    An archive goes with the record that it accompanies, unless it is cited itself.
    """
    by: dict[str, list[str]] = {}
    for entry in entries:
        for file in entry.get("supersedes", ()):
            by.setdefault(file, []).append(entry["file"])
    found: dict[str, list[str]] = {}
    kept_by_archive = {
        entry["accompanies"] for entry in entries if entry["kind"] == "archive" and entry["file"] in cited
    }
    for entry in sorted((one for one in entries if one["kind"] != "archive"), key=_order):
        file = entry["file"]
        if file in by and file not in cited and file not in kept_by_archive:
            found[file] = by[file]
    # What supersedes may go as well: then those that supersede it remain, as the relation is transitive.
    found = {file: [other for other in others if other not in found] for file, others in found.items()}
    for entry in entries:
        if entry["kind"] == "archive" and entry["accompanies"] in found:
            found[entry["file"]] = found[entry["accompanies"]]
    return found


def citations(root: Path, files: Iterable[str]) -> set[str]:
    """Return which of the record ``files`` a page or a source file below `root` names, with or without the suffix."""
    names = {file: re.compile(rf"(?<![\w-]){re.escape(file.rpartition('.')[0])}(?![\w-])") for file in files}
    found: set[str] = set()
    for path in sorted(root.rglob("*")):
        place = path.relative_to(root)
        hidden = any(part.startswith(".") for part in place.parts)
        if hidden or path.suffix not in (".md", ".py", ".toml") or place.as_posix() in GENERATED:
            continue
        words = path.read_text("utf-8", errors="replace")
        found |= {file for file, pattern in names.items() if pattern.search(words)}
    return found


def _order(entry: dict[str, Any]) -> tuple[str, str]:
    return entry["date"], entry["file"]
