"""benchmarks/records/index.json says what the kept records say, and names commits that exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from carom.benchmarks.results import index as module
from carom.benchmarks.results.supersede import cell_keys, citations, prunable, supersedes

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "benchmarks" / "records"
INDEX = json.loads((RECORDS / "index.json").read_text())
HERE, GONE = INDEX["records"], INDEX["removed"]


def test_it_lists_the_files_of_the_folder():
    assert [one["file"] for one in HERE] == sorted(
        path.name for path in RECORDS.iterdir() if path.name != "index.json"
    )
    assert not {one["file"] for one in HERE} & {one["file"] for one in GONE}


def test_what_is_derived_is_up_to_date():
    assert (RECORDS / "index.json").read_text() == module.text(module.build(RECORDS, INDEX)), (
        "run `carom bench --write-docs`"
    )


@pytest.mark.parametrize("one", [*HERE, *GONE], ids=lambda one: one["file"])
def test_an_entry_is_complete(one):
    if one["kind"] == "archive":
        assert one["accompanies"] in {other["file"] for other in [*HERE, *GONE]}
        return
    assert re.match(r"20\d\d-\d\d-\d\d", one["date"]) and one["commit"]
    assert {
        "cpu_model",
        "memory_bytes",
        "accelerator",
        "link_bytes_per_second",
        "python_loop_seconds",
    } <= set(one["machine"])
    # Since records have a provenance, the host is known.
    if one["date"] >= "2026-11-25" or one["machine"]["cpu_model"]:
        assert (
            one["machine"]["python_loop_seconds"] > 0
            and one["machine"]["memory_bytes"]
            and one["versions"]["torch"]
        )
    for cell in one["cells"]:
        assert cell["unit"] and isinstance(cell["value"], (int, float))
    for mark in one["disturbed"]:
        assert mark["why"] and (
            not mark["group"] or any(mark["group"] in cell["group"] for cell in one["cells"])
        )


def test_commits_exist():
    shallow = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--is-shallow-repository"], capture_output=True, text=True
    )
    if shallow.returncode or shallow.stdout.strip() != "false":
        pytest.skip("no git history here")
    assert module.unknown_commits(INDEX) == []


def test_superseded_names_exist_or_are_removed():
    known = {one["file"] for one in [*HERE, *GONE]}
    for one in HERE:
        assert set(one["supersedes"]) <= known
    for one in GONE:
        assert (
            set(one["superseded_by"]) & {other["file"] for other in HERE}
            or set(one["superseded_by"]) <= known
        )
        assert one["superseded_by"], one["file"]


def test_nothing_cites_a_removed_record():
    assert citations(ROOT, [one["file"] for one in GONE]) == set()


# ---- the rules, on made entries


def entry(file: str, cases: str, kind: str = "engines", card: str = "A", **more) -> dict:
    cells = [{"group": "g", "case": case, "metric": "step", "unit": "ms", "value": 1.0} for case in cases]
    return {"file": file, "kind": kind, "date": file[:10], "machine": {"accelerator": card}, "disturbed": [],
            "cells": cells, **more}  # fmt: skip


def test_a_record_supersedes_older_ones_whose_cells_it_has():
    new = entry("2026-01-03-a.json", "xyz")
    others = [
        entry("2026-01-01-part.json", "xy"),
        entry("2026-01-01-more.json", "xw"),
        entry("2026-01-01-kind.json", "x", kind="auto"),
        entry("2026-01-01-card.json", "x", card="B"),
        entry("2026-01-02-failed.json", ""),
        entry("2026-01-04-newer.json", "x"),
    ]
    assert supersedes(new, others) == ["2026-01-01-part.json", "2026-01-02-failed.json"]
    assert supersedes({**new, "disturbed": [{"group": "", "why": "?"}]}, others) == []
    assert cell_keys(new) == {("g", case, "step", "ms") for case in "xyz"}


def test_what_is_cited_or_not_superseded_is_kept():
    entries = [entry(f"2026-01-0{n}-r.json", cases) for n, cases in enumerate(("x", "xy", "xyz", "w"), 1)]
    for one in entries:
        one["supersedes"] = supersedes(one, entries)
    assert prunable(entries, set()) == {
        "2026-01-01-r.json": ["2026-01-03-r.json"],
        "2026-01-02-r.json": ["2026-01-03-r.json"],
    }
    assert prunable(entries, {"2026-01-02-r.json"}) == {
        "2026-01-01-r.json": ["2026-01-02-r.json", "2026-01-03-r.json"]
    }


def test_citations_are_whole_names(tmp_path):
    (tmp_path / "page.md").write_text("see [a](records/2026-01-01-a-1.json) and 2026-01-01-b")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "performance.md").write_text("2026-01-01-c.json")
    files = ["2026-01-01-a.json", "2026-01-01-a-1.json", "2026-01-01-b.json", "2026-01-01-c.json"]
    assert citations(tmp_path, files) == {"2026-01-01-a-1.json", "2026-01-01-b.json"}


@pytest.fixture
def folder(tmp_path):
    """A folder with copies of two records of one kind, of which the newer supersedes the older."""
    newer = [one for one in HERE if one["kind"] == "codec"][-1]
    shutil.copy(RECORDS / newer["file"], tmp_path / "2026-11-29-h200-codec.json")
    found = json.loads((RECORDS / newer["file"]).read_text())
    older = {**found, "rows": found["rows"][:2], "commit": "in words", "date": "2026-01-01"}
    (tmp_path / "2026-11-28-h200-codec.json").write_text(json.dumps(older))
    return tmp_path


def test_a_commit_in_words_is_an_error_until_one_is_written_by_hand(folder):
    with pytest.raises(ValueError, match="2026-11-28-h200-codec.json: None.*Write the commit"):
        module.update(folder=folder)
    index = module.load(folder)
    head = next(one["commit"] for one in HERE if one["commit"])
    for one in index["records"]:
        one |= {"commit": head, "remarks": "kept"}
    module.write(index, folder)
    try:
        again = module.update(folder=folder)
    except ValueError:
        pytest.skip("no git history here")
    assert [one["remarks"] for one in again["records"]] == ["kept", "kept"]
    assert again["records"][0]["recorded_commit"] == "in words"


def test_pruning_keeps_the_cells_in_the_index(folder, tmp_path_factory):
    with pytest.raises(ValueError, match="Write the commit"):
        module.update(prune=True, folder=folder, root=tmp_path_factory.mktemp("empty"))
    index = module.load(folder)
    assert [one["file"] for one in index["records"]] == ["2026-11-29-h200-codec.json"]
    assert not (folder / "2026-11-28-h200-codec.json").exists()
    (gone,) = index["removed"]
    assert gone["superseded_by"] == ["2026-11-29-h200-codec.json"] and len(gone["cells"]) == 2
