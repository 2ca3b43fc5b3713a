"""The record of a benchmark run: the arguments, the machine, versions, and the unedited result of every case."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..results.provenance import provenance
from .case import Case

SCHEMA = 1


def new_record(
    tool: str, argv: list[str], *, peers: Mapping[str, str] | None = None, kept: bool = True
) -> dict[str, Any]:
    """Return a record without results. `peers`: versions of programs that run from a checkout, by name.

    `kept`: whether the record is written to a file. Raises ProvenanceError if the commit of a kept record is not
    known. The `commit` of a record that is only printed is then None.
    """
    return {
        "schema": SCHEMA,
        "tool": tool,
        "arguments": argv,
        **provenance(peers=peers, kept=kept),
        "interrupted": False,
        "cases": [],
    }


def add_result(
    record: dict[str, Any], key: str, case: Case, result: dict[str, Any], process: int = 1
) -> None:
    """Append a case and its unedited result to ``record``; ``process``: the number of its process."""
    record["cases"].append({"key": key, "process": process, "case": case.to_dict(), "result": result})


def write_record(record: dict[str, Any], path: Path) -> None:
    """Write `record` as JSON to `path`: to a temporary name first, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    os.replace(temporary, path)


def read_record(path: Path) -> dict[str, Any]:
    """Return the record at `path`. Raises ValueError if the file is not a record that this version can read."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"{path} cannot be read ({why}); a record is what a run of the bench kept") from None
    try:
        record = json.loads(text)
        if record["schema"] != SCHEMA:
            raise ValueError(f"{path}: schema {record['schema']!r}; this version reads {SCHEMA}")
        for entry in record["cases"]:
            Case(**entry["case"])
            entry["key"], entry["result"]["status"]
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no record of the bench ({type(error).__name__}: {error})") from None
    return record
