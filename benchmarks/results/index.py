"""The index of the kept records, `benchmarks/records/index.json`: what each record measured, on what, and its commit.

    python -m carom.benchmarks.results.index            # bring the index up to date with the folder
    python -m carom.benchmarks.results.index --prune    # also delete records that are superseded and cited nowhere

Everything in an entry is derived from the record, but for three fields that are written by hand and kept: `commit`
where the record itself names no valid one (`recorded_commit` is what it names), `remarks`, and `disturbed`: a list of
{"group": a part of a group's name or "", "why": text} for cells whose run was disturbed. The entries of deleted records
stay under `removed`, with their cells, so that the range of a cell is over all runs that there were.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .provenance import COMMIT, ROOT
from .render import Rendered, read
from .rows import Row
from .supersede import citations, prunable, supersedes

SCHEMA = 1
FOLDER = ROOT / "benchmarks" / "records"
NAME = "index.json"
HAND_WRITTEN = ("commit", "remarks", "disturbed")
# Records of the first days do not name the card; their file name does.
_CARDS = {"h200": "NVIDIA H200", "h100": "NVIDIA H100 80GB HBM3", "cpu": None}


def build(folder: Path, old: dict[str, Any]) -> dict[str, Any]:
    """Return the index of ``folder``; ``old``: the present one, whose fields written by hand are kept.

    Raises ValueError for a record that cannot be rendered.
    """
    before = {entry["file"]: entry for entry in [*old.get("removed", ()), *old.get("records", ())]}
    entries = []
    for path in sorted(folder.iterdir()):
        if path.name == NAME or path.name.endswith(".tmp"):
            continue
        entries.append(entry(path, read(path), before.get(path.name, {})))
    commits = {one["file"]: one["commit"] for one in entries}
    for one in entries:
        if one["kind"] == "archive":
            one["commit"] = commits.get(one["accompanies"])
    there = {one["file"] for one in entries}
    removed = [one for one in old.get("removed", ()) if one["file"] not in there]
    for one in entries:
        one["supersedes"] = supersedes(one, [*entries, *removed])
    return {"schema": SCHEMA, "records": entries, "removed": removed}


def entry(path: Path, rendered: Rendered, before: dict[str, Any]) -> dict[str, Any]:
    """Return the index entry of a record; ``before``: its present entry, for the fields written by hand."""
    record = rendered.record
    found: dict[str, Any] = {"file": path.name, "kind": rendered.kind}
    if rendered.kind == "archive":
        found |= {"accompanies": path.stem.rpartition("-")[0] + ".json", "commit": None}
        return found | {"remarks": before.get("remarks", ""), "cells": []}
    recorded = record.get("commit")
    commit = recorded if recorded and COMMIT.fullmatch(recorded) else None
    found |= {
        "date": record.get("date") or path.name[:10],
        "recorded_commit": recorded,
        "commit": before.get("commit") or commit,
        "machine": fingerprint(record, path.name, rendered.rows),
        "versions": record.get("versions") or ({"torch": record["torch"]} if "torch" in record else {}),
        "remarks": before.get("remarks", ""),
        "disturbed": before.get("disturbed", []),
    }
    return found | {"cells": [cell(row) for row in rendered.rows if row.value is not None]}


def fingerprint(record: dict[str, Any], name: str, rows: Iterable[Row]) -> dict[str, Any]:
    """Return what the record says of its host; None stands for what older records did not keep."""
    machine = record.get("machine")
    machine = machine if isinstance(machine, dict) else {}
    accelerator = machine.get("accelerator") or {}
    card = next((card for word, card in _CARDS.items() if word in name.split("-")), None)
    link = next((row.value for row in rows if row.group == "link"), None)
    return {
        "cpu_model": machine.get("cpu_model"),
        "cores": machine.get("cores"),
        "memory_bytes": machine.get("memory_bytes"),
        "accelerator": accelerator.get("name") or record.get("device") or card,
        "accelerator_memory_bytes": accelerator.get("memory_bytes"),
        "link_bytes_per_second": machine.get("link_bytes_per_second")
        or (round(1e9 * link) if link else None),
        "python_loop_seconds": machine.get("python_loop_seconds"),
    }


def cell(row: Row) -> dict[str, Any]:
    """Return a row as plain data, without what is unknown; figures have six significant digits."""
    found: dict[str, Any] = {"group": row.group, "case": row.case, "metric": row.metric, "unit": row.unit}
    found["value"] = _short(row.value)
    if row.quartiles is not None:
        found["quartiles"] = [_short(value) for value in row.quartiles]
    if row.samples:
        found["samples"] = row.samples
    if row.processes > 1:
        found["processes"] = row.processes
    if row.base is not None:
        found |= {"base": _short(row.base), "base_case": row.base_case}
    if row.floor is not None:
        found["floor"] = _short(row.floor)
    for name in ("device_bytes", "host_bytes", "same_bits"):
        if getattr(row, name) is not None:
            found[name] = getattr(row, name)
    if row.kernels:
        found["kernels"] = {name: _short(ms) for name, ms in row.kernels}
    if row.note:
        found["note"] = row.note
    return found


def load(folder: Path = FOLDER) -> dict[str, Any]:
    """Return the present index; an empty one where there is none yet."""
    path = folder / NAME
    if not path.exists():
        return {"schema": SCHEMA, "records": [], "removed": []}
    return json.loads(path.read_text("utf-8"))


def write(index: dict[str, Any], folder: Path = FOLDER) -> None:
    """Write the index, a cell a line: to a temporary name first, then renamed."""
    path = folder / NAME
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text(index), "utf-8")
    os.replace(temporary, path)


def text(index: dict[str, Any]) -> str:
    """Return the index as JSON: one line for each field of an entry, and for each of its cells."""
    parts = []
    for name in ("records", "removed"):
        entries = []
        for one in index[name]:
            fields = [
                f"   {json.dumps(key)}: {json.dumps(value)}" for key, value in one.items() if key != "cells"
            ]
            cells = ",\n".join(f"    {json.dumps(cell)}" for cell in one["cells"])
            fields.append('   "cells": [' + (f"\n{cells}\n   ]" if cells else "]"))
            entries.append("  {\n" + ",\n".join(fields) + "\n  }")
        body = ",\n".join(entries)
        parts.append(f' "{name}": [' + (f"\n{body}\n ]" if body else "]"))
    return "{\n" + f' "schema": {index["schema"]},\n' + ",\n".join(parts) + "\n}\n"


def unknown_commits(index: dict[str, Any], root: Path = ROOT) -> list[str]:
    """Return "FILE: COMMIT" for each entry whose commit is no commit of the git repository `root`."""
    found, known = [], {}
    for one in [*index["records"], *index["removed"]]:
        commit = one["commit"]
        if commit not in known:
            known[commit] = bool(commit) and _exists(commit.removesuffix("+changes"), root)
        if not known[commit]:
            found.append(f"{one['file']}: {commit}")
    return found


def _exists(commit: str, root: Path) -> bool:
    done = subprocess.run(
        ["git", "-C", str(root), "cat-file", "-e", commit + "^{commit}"], capture_output=True
    )
    return done.returncode == 0


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def update(prune: bool = False, folder: Path = FOLDER, root: Path = ROOT) -> dict[str, Any]:
    """Bring the index of ``folder`` up to date, write it and return it.

    ``prune``: also delete the records that `prunable` names, and move their entries to `removed`. Raises ValueError if
    a record names no commit of the repository; its text says what to write by hand.
    """
    index = build(folder, load(folder))
    if prune:
        gone = prunable(index["records"], citations(root, [one["file"] for one in index["records"]]))
        for one in [one for one in index["records"] if one["file"] in gone]:
            (folder / one["file"]).unlink()
            index["records"].remove(one)
            index["removed"].append({**one, "superseded_by": gone[one["file"]]})
        for one in index["records"]:
            one["supersedes"] = supersedes(one, [*index["records"], *index["removed"]])
    write(index, folder)
    wrong = unknown_commits(index, root)
    if wrong:
        raise ValueError(
            f"{folder / NAME}: not a commit of this repository: {'; '.join(wrong)}. Write the commit that the record "
            "ran as `commit` of its entry, and run this again"
        )
    return index


def main(argv: list[str] | None = None) -> int:
    """Update the index; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--prune", action="store_true", help="delete records that are superseded and cited nowhere"
    )
    arguments = parser.parse_args(argv)
    try:
        index = update(arguments.prune)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{len(index['records'])} records, {len(index['removed'])} removed ones")
    return 0


if __name__ == "__main__":
    sys.exit(main())
