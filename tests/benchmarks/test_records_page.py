"""docs/performance.md, the README's table and docs/bench.png are what the records say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from carom.benchmarks.results import curve, docs, index
from carom.benchmarks.results.history import cells
from carom.benchmarks.results.page import page
from carom.benchmarks.results.readme_part import END, GENERATED, START, readme_part, replaced
from carom.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
INDEX = json.loads((ROOT / "benchmarks" / "records" / "index.json").read_text("utf-8"))


def test_the_committed_page_is_the_generated_one():
    assert (ROOT / "docs" / "performance.md").read_text("utf-8") == page(INDEX), (
        "run `carom bench --write-docs`"
    )


def test_the_table_in_the_readme_is_the_generated_one():
    readme = (ROOT / "README.md").read_text("utf-8")
    if GENERATED not in readme:
        pytest.skip("the README has no generated table yet")
    assert replaced(readme, readme_part(INDEX)) == readme, "run `carom bench --write-docs`"


def test_every_link_of_the_page_leads_to_a_record():
    text = (ROOT / "docs" / "performance.md").read_text("utf-8")
    links = re.findall(r"\]\((\.\./[^)]+)\)", text)
    assert len(links) > 50
    for link in set(links):
        assert (ROOT / "docs" / link).resolve().exists(), link


def test_the_readme_part_is_short_and_every_row_has_figures():
    lines = readme_part(INDEX).splitlines()
    table = [line for line in lines if line.startswith("| ") and not line.startswith(("| VRAM", "| ---"))]
    assert 1 <= len(table) <= 12 and lines[0] == GENERATED
    for line in table:
        times = 1 if "does not fit" in line else 2
        assert len(re.findall(r"\d\.\d+ s\b", line)) == times, line


# ---- the rules, on made records


def record(
    day: int, *values: tuple[str, float], base: float | None = None, loop: float | None = None, **more
) -> dict:
    common = {"group": "model", "metric": "step", "unit": "ms"}
    return {
        "file": f"2026-01-0{day}-r.json", "kind": "engines", "date": f"2026-01-0{day}", "commit": "0123abc", "remarks": "",
        "versions": {"torch": "2"}, "disturbed": [],
        "machine": {"cpu_model": None, "cores": 1, "memory_bytes": 1e9, "accelerator": "A", "link_bytes_per_second": None,
                    "python_loop_seconds": loop},
        "cells": [{**common, "case": case, "value": value, **({"base": base, "base_case": "no offloading"} if base else {})}
                  for case, value in values],
        **more,
    }  # fmt: skip


def made(*records: dict, removed: tuple[dict, ...] = ()) -> dict:
    return {"schema": 1, "records": list(records), "removed": list(removed)}


def test_a_cell_shows_the_newest_value_and_the_range_with_the_hosts():
    index = made(
        record(3, ("Carom", 30.0), base=15.0, loop=0.04),
        record(1, ("Carom", 20.0), base=10.0),
        removed=(record(2, ("Carom", 50.0), base=40.0),),
    )
    (cell,) = cells(index)
    assert cell.newest.value == 30.0 and [run.value for run in cell.range] == [20.0, 50.0]
    (row,) = [line for line in page(index).splitlines() if line.startswith("| Carom |")]
    assert "| 30.0 ms | 2.00 |" in row and "20.0 (10.0) to 50.0 (40.0), 3 records" in row and "01-03-r" in row
    index["removed"] = []
    assert "20.0 (10.0) to 30.0 (15.0, loop 40 ms), 2 records" in page(index)


def test_accelerators_and_units_are_cells_of_their_own():
    other = record(2, ("Carom", 9.0))
    other["machine"]["accelerator"] = "B"
    assert [
        (cell.accelerator, cell.newest.value) for cell in cells(made(record(1, ("Carom", 5.0)), other))
    ] == [
        ("A", 5.0),
        ("B", 9.0),
    ]


def test_a_disturbed_run_is_marked_and_does_not_count():
    why = [{"group": "model", "why": "a profiler looked on"}]
    index = made(record(1, ("Carom", 20.0)), record(2, ("Carom", 10.0), disturbed=why))
    (cell,) = cells(index)
    assert cell.newest.value == 20.0 and cell.counted == 1 and "10.0 ms" not in page(index)
    alone = page(made(record(2, ("Carom", 10.0), disturbed=why)))
    assert "10.0 ms †" in alone and "† a profiler looked on" in alone


def test_what_no_cell_shows_is_listed_below():
    index = made(record(1, ("Carom", 20.0)), record(2, ("Carom", 10.0)))
    assert "## Other records" in page(index)
    assert "2026-01-01-r.json" in page(index).partition("## Other records")[2]


def comfy(group: str, case: str, metric: str, value: float, **more) -> dict:
    return {"group": group, "case": case, "metric": metric, "unit": "s", "value": value, **more}


def test_the_readme_takes_the_settled_layout_and_the_default_codec():
    group = "Flux-shaped, 10.1 GB (8+16 blocks of width 3072), 6 GiB free"
    base = {"base": 0.2, "base_case": "stock", "same_bits": True, "host_bytes": 7e9}
    one = record(1) | {"kind": "comfyui"}
    one["cells"] = [
        comfy(group, "Carom, raw", "iteration, settled layout", 0.13, **base),
        comfy(group, "Carom, auto", "iteration, 2nd prompt", 0.15, **base),
        comfy(group, "Carom, auto", "iteration, settled layout", 0.12, **base),
    ]
    (row,) = [line for line in readme_part(made(one)).splitlines() if line.startswith("| 6 GiB")]
    assert row.startswith("| 6 GiB, emulated | Flux-shaped, 10.1 GB | 0.200 s | 0.120 s |")
    assert "7.00 GB | yes" in row


def test_the_readme_shows_whole_prompts_first(tmp_path):
    def prompts(loader: str, *seconds: float) -> dict:
        told = [
            {"prompt": number, "wall_s": wall, "parts_s": {"other steps": 0.9 * wall}, "read_bytes": {"storage": 0},
             "memory": {"sum_bytes": 9e9}, "results": {"latent_0": {"hash": "a", "finite": True}}}
            for number, wall in enumerate(seconds)
        ]  # fmt: skip
        return {"case": "one-model", "limit": 6 << 30, "cache": "cold", "loader": loader, "round": 0, "link": False,
                "status": "ok", "prompts": told}  # fmt: skip

    runs = [prompts("stock", 20.0, 4.0, 4.0, 6.0), prompts("carom", 21.0, 3.5, 3.0, 3.0)]
    counted = prompts("carom", 30.0, 9.0, 9.0) | {"link": True, "cache": "warm"}
    counted["prompts"][2]["link_bytes"] = {"to_device": 12e9, "from_device": 0}
    runs.append(counted)
    made_record = {
        "tool": "prompts", "date": "2026-01-01", "commit": "0123abc", "sizes": {"steps": 20}, "file_bytes": {"model": 10e9},
        "machine": {"accelerator": {"name": "A"}}, "runs": runs,
    }  # fmt: skip
    (tmp_path / "2026-01-01-a-prompts.json").write_text(json.dumps(made_record))
    found = index.build(tmp_path, {})
    lines = [line for line in readme_part(found).splitlines() if line.startswith("| 6")]
    assert lines[:1] == [
        "| 6 GiB | one model of 10.0 GB | 20.0, 4.00, 5.00 s | 21.0, 3.50, 3.00 s | 9.00 | 9.00 | yes |"
    ]
    later = [line for line in page(found).splitlines() if line.startswith("| Carom | later prompts |")]
    assert "| 3.00 s | 0.600 |" in later[0] and "other steps 2.70; 12.0 GB to the device" in later[0]


def test_the_part_of_a_readme_between_its_markers_is_replaced():
    readme = f"a\n{START}\nold\n{END}\nb\n"
    assert replaced(readme, "new") == f"a\n{START}\nnew\n{END}\nb\n"
    assert replaced("no markers", "new") is None


def test_the_newest_comparison_with_enough_points_is_drawn(tmp_path):
    def cases(*names: str) -> list[dict]:
        return [{"group": "model", "case": name, "metric": "step", "unit": "ms", "value": 10.0 + i, "device_bytes": 1e9 * (i + 1),
                 "same_bits": (True, False, None)[i % 3]} for i, name in enumerate(names)]  # fmt: skip

    full = (
        "no offloading",
        "Carom, a, raw",
        "Carom, b, raw",
        "Carom, c, lossless",
        "musubi",
        "ramtorch, 0 of 2",
    )
    old, good, few = (record(day) for day in (1, 2, 3))
    old["cells"], good["cells"], few["cells"] = cases(*full, "diffusers"), cases(*full), cases(*full[:3])
    chosen = curve.comparison(made(old, good, few))
    assert chosen is not None and chosen.entry is good
    curve.draw(chosen, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert curve.comparison(made(few)).entry is few and curve.comparison(made()) is None


def test_write_docs_writes_all_of_it(tmp_path, monkeypatch, capsys):
    for folder in ("docs", "benchmarks/records"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "README.md").write_text(f"x\n{START}\n{END}\n")
    monkeypatch.setattr(docs.index, "update", lambda folder, root: INDEX)
    told = docs.write_docs(tmp_path)
    assert (tmp_path / "docs" / "performance.md").read_text("utf-8") == page(INDEX)
    assert (
        GENERATED in (tmp_path / "README.md").read_text("utf-8")
        and (tmp_path / "docs" / "bench.png").exists()
    )
    assert len(told) == 4
    monkeypatch.setattr(docs, "write_docs", lambda: ["docs/performance.md"])
    assert main(["bench", "--write-docs", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"written": ["docs/performance.md"]}
