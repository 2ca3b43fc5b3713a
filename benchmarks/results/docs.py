"""Writes what is generated from the records: the index, `docs/performance.md`, the README's table, `docs/bench.png`."""

from __future__ import annotations

import os
from pathlib import Path

from . import curve, index
from .page import page
from .provenance import ROOT
from .readme_part import START, readme_part, replaced


def write_docs(root: Path = ROOT, readme: bool = True) -> list[str]:
    """Bring everything that is generated up to date; return a line for each file. ``readme``: the README too.

    Raises ValueError if a record cannot be rendered or names no commit of the repository.
    """
    found = index.update(folder=root / "benchmarks" / "records", root=root)
    told = [f"benchmarks/records/{index.NAME}: {len(found['records'])} records"]
    _write(root / "docs" / "performance.md", page(found))
    told.append("docs/performance.md")
    path = root / "README.md"
    text = replaced(path.read_text("utf-8"), readme_part(found))
    if not readme or text is None:
        told.append("README.md: left as it is" + ("" if text else f", because it has no line {START}"))
    else:
        _write(path, text)
        told.append("README.md: the table between the markers")
    drawn = curve.comparison(found)
    if drawn is not None:
        curve.draw(drawn, root / "docs" / "bench.png")
        told.append(f"docs/bench.png: {drawn.group}, of {drawn.entry['file']}")
    return told


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, "utf-8")
    os.replace(temporary, path)
