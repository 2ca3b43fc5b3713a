"""`carom bench --show`: every kept record of every kind as a table and a chart; broken files as clear errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from carom.benchmarks.engines.case import Case
from carom.benchmarks.results import render_engines, render_hosts
from carom.benchmarks.results.render import RecordError, read
from carom.benchmarks.results.rows import Row, pooled
from carom.benchmarks.results.table import chart, number, table
from carom.cli.main import main

RECORDS = Path(__file__).resolve().parents[2] / "benchmarks" / "records"
KEPT = sorted(path for path in RECORDS.iterdir() if path.name != "index.json")


def kept(kind: str) -> list[Path]:
    return [path for path in KEPT if path.suffix == ".json" and read(path).kind == kind]


def newest(kind: str) -> Path:
    return kept(kind)[-1]


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.name)
def test_every_kept_record_prints_a_table(path, capsys):
    assert main(["bench", "--show", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    rendered = read(path)
    assert len(lines) >= 3 and lines[0].split()[0] == "case"
    for row in rendered.rows:
        assert row.value is not None or row.note, f"{row.case}: neither a value nor a reason"
    assert any(row.value is not None for row in rendered.rows) or "failed" in rendered.rows[0].note


@pytest.mark.parametrize("kind", sorted({read(path).kind for path in KEPT if path.suffix == ".json"}))
def test_every_kind_is_drawn(kind, tmp_path):
    chart(read(newest(kind)).rows, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob("*.tmp"))


def test_json_and_markdown(capsys):
    path = newest("comfyui")
    assert main(["bench", "--show", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tool"] == "comfy_gpu"
    assert main(["bench", "--show", str(path), "--markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("| case |") and len({line.count(" | ") for line in lines}) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("not json", "not JSON"),
        ("{}", "no record of a known kind"),
        ("[]", "no record of a known kind"),
        ("3", "no record of a known kind"),
        ('{"tool": "unheard of", "cases": []}', "no record of a known kind"),
        ('{"tool": "comfy_gpu"}', "broken record of the kind 'comfyui'.*runs"),
        ('{"tool": "comfy_gpu", "runs": []}', "without any case"),
        ('{"tool": "carom bench", "cases": [{"key": "a", "case": {}, "result": {}}]}', "broken record"),
        ('{"tool": "disk_gpu", "result": {}}', "without any case"),
    ],
)
def test_a_file_that_is_no_record_is_an_error(text, words, tmp_path, capsys):
    path = tmp_path / "file.json"
    path.write_text(text)
    with pytest.raises(RecordError, match=words):
        read(path)
    assert main(["bench", "--show", str(path)]) == 2
    assert "file.json" in capsys.readouterr().err


def test_a_missing_file_and_a_broken_archive(tmp_path):
    with pytest.raises(RecordError, match="cannot be read.*No such file"):
        read(tmp_path / "none.json")
    (tmp_path / "broken.tgz").write_bytes(b"abc")
    with pytest.raises(RecordError, match="cannot be read"):
        read(tmp_path / "broken.tgz")


def test_processes_of_a_case_are_pooled_from_their_samples():
    assert pooled([10.0, 30.0]) == {"value": 20.0, "samples": 0, "processes": 2}
    found = pooled([10.0, 30.0], [10, 10, 10, 10, 11, 30])
    assert found["value"] == 10.0 and found["samples"] == 6 and found["processes"] == 2
    assert found["quartiles"] == (10.0, 10.75)
    assert pooled([10.0], (), [[9.0, 12.0]])["quartiles"] == (9.0, 12.0)


def _suite(*results: tuple[str, float, dict]) -> dict:
    base = Case(d=64, depth=4, tokens=16, steps=4, device="cuda").to_dict()
    entries = [
        {"key": engine, "process": number, "case": {**base, "engine": engine},
         "result": {"status": "ok", "ms_per_step": ms, **more}}
        for number, (engine, ms, more) in enumerate(results)
    ]  # fmt: skip
    return {"tool": "carom bench", "cases": entries, "rooflines": {"carom": {"ms": 8.0}}}


def test_samples_kernels_and_processes_of_a_new_record(tmp_path):
    more = {"samples_ms": [9.0, 10.0, 11.0, 12.0], "kernel_ms": {"forward": 7.5}, "quartiles_ms": [9.5, 11.5]}
    print_ = {"fingerprint": {"output": {"sha256": "a", "sample": [1.0]}}}
    path = tmp_path / "r.json"
    path.write_text(
        json.dumps(
            _suite(
                ("none", 5.0, print_),
                ("carom", 10.5, {**more, **print_}),
                ("none", 7.0, print_),
                ("carom", 10.5, more),
            )
        )
    )
    none, carom = read(path).rows
    assert (none.value, none.processes, none.samples) == (6.0, 2, 0)
    assert (carom.value, carom.processes, carom.samples) == (10.5, 2, 8)
    assert carom.base == 6.0 and carom.ratio == 1.75 and carom.same_bits is True and carom.floor == 8.0
    assert carom.kernels == (("forward", 7.5),)
    shown = table([none, carom])
    assert "8 in 2 runs" in shown and "forward 7.50" in shown and "1.31" in shown


def test_both_layouts_of_a_comfyui_run_stand_apart():
    metrics = ("iteration, 2nd prompt", "iteration, settled layout")
    both = [
        (group, case)
        for path in kept("comfyui")
        for group, case in {(row.group, row.case) for row in read(path).rows}
        if [r.metric for r in read(path).rows if (r.group, r.case) == (group, case) and r.metric in metrics]
        == list(metrics)
    ]
    assert any(case == "Carom, raw" for _, case in both)


def test_disk_is_compared_with_the_best_plain_rate_of_the_run():
    for path in kept("disk"):
        rendered = read(path)
        result = rendered.record["result"]
        if "first_output" in result:
            best = max(one["bytes_per_second"] for one in result["raw"]["sweep"])
            row = next(row for row in rendered.rows if row.metric.startswith("first output"))
            least = row.value * best / result["make"]["weights_bytes"]
            assert row.ratio >= least * (1 - 1e-9) and least >= result["first_output"]["first_output_of_raw"]


def test_the_roofline_comes_from_kernels_alone():
    link = {"key": "link", "case": {**Case(d=64, depth=4, kind="link").to_dict()},
            "result": {"status": "ok", "link_bytes_per_second": 1e9}}  # fmt: skip
    phases = {"phases_ms": {"forward": 5.0}, "host_ms_per_step": 1.0}
    record = _suite(("none", 5.0, phases), ("carom", 10.0, {}))
    record["cases"].append(link)
    del record["rooflines"]
    assert render_engines.rows(record)[1].floor is None
    record["cases"][0]["result"]["kernel_ms"] = {"forward": 4.0}
    assert render_engines.rows(record)[1].floor == pytest.approx(4.0)  # more than the bytes take
    record["cases"][0]["result"]["host_ms_per_step"] = 5.0
    late = render_engines.rows(record)[1]
    assert late.floor is None and "the host limits" in late.note
    record["cases"][0]["result"]["host_ms_per_step"] = 1.0
    record["cases"][1]["case"]["device"] = "cpu"  # it has no link
    assert render_engines.rows(record)[1].floor is None


def test_samples_and_kernels_of_a_new_comfyui_record():
    prompt = {
        "hash": "a",
        "wall_s": 9.0,
        "iterations_s": [0.5, 0.2, 0.2],
        "report": {"step_seconds": 0.2, "stall_seconds": 0.02},
    }
    run = {"limit": None, "loader": "stock", "status": "ok", "first": prompt, "second": prompt, "s_per_iteration": 0.2,
           "host": {"before": {"resident_bytes": 1}, "peak": {"resident_bytes": 3}}}  # fmt: skip
    shape = {"double": 1, "single": 2, "hidden": 8}
    record = {"tool": "comfy_gpu", "arguments": [], "shape": shape, "file_bytes": 10, "runs": [run]}
    (iteration, first) = render_hosts.comfy_rows(record)
    assert (iteration.samples, first.samples) == (2, 0)  # an older record: its first iteration prepares
    assert iteration.note == "waits for weights 10.0 % of a step"
    new = {**run, "samples_s": [0.1, 0.2, 0.3, 0.4], "profile": {"kernel_ms": 90.0}}
    record["runs"] = [new, new]
    (iteration, first) = render_hosts.comfy_rows(record)
    assert (iteration.value, iteration.samples, iteration.processes) == (0.25, 8, 2)
    assert iteration.kernels == (("iteration", 90.0),) and first.kernels == ()


def test_comfyuis_ratio_is_of_two_pooled_medians():
    def run(loader: str, samples: list[float]) -> dict:
        prompt = {"hash": "a", "wall_s": 9.0}
        return {"limit": None, "loader": loader, "status": "ok", "first": prompt, "second": prompt, "samples_s": samples,
                "s_per_iteration": sorted(samples)[len(samples) // 2],
                "host": {"before": {"resident_bytes": 1}, "peak": {"resident_bytes": 3}}}  # fmt: skip

    # The median of the two medians is 0.25, that of all eight samples 0.4.
    stock = [run("stock", [0.1, 0.1, 0.1]), run("stock", [0.4] * 5)]
    record = {"tool": "comfy_gpu", "arguments": [], "shape": {"double": 1, "single": 2, "hidden": 8}, "file_bytes": 10,
              "runs": [*stock, run("auto", [0.2])]}  # fmt: skip
    rows = {(row.case, row.metric): row for row in render_hosts.comfy_rows(record)}
    base = rows["stock", "iteration, 2nd prompt"]
    assert base.value == 0.4
    assert rows["Carom, auto", "iteration, 2nd prompt"].base == base.value


def test_configurations_of_ai_toolkit_in_words():
    record = {"layers": 2, "rank": 16, "arguments": ["--limit", "fit"]}
    for word, case in {
        "plain#100": "no offloading",
        "stock": "ai-toolkit's layer_offloading",
        "stock50": "ai-toolkit's layer_offloading, 50 % of the layers",
        "float8-half/auto": "Carom, half of no offloading's memory, auto",
        "auto/raw@64": "Carom, budget auto, raw, just enough of the card free",
    }.items():
        run = {
            "config": word,
            "status": "ok",
            "s_per_step": 1.0,
            "peak_reserved_bytes": 1,
            "samples_ms": [1.0, 3.0],
        }
        (row,) = render_hosts.aitoolkit_rows({**record, "runs": [run]})
        assert row.case == case and row.value == 0.002
        assert ("float8" in row.group, "rank 64" in row.group) == ("float8" in word, "@64" in word)


def test_a_skipped_case_has_its_reason_and_no_value():
    skipped = [row for path in kept("engines") for row in read(path).rows if row.value is None]
    assert skipped and all(row.note.partition(": ")[0] in ("skipped", "failed", "timeout") for row in skipped)


def test_cells_of_a_table():
    row = Row("model", "a | b", "step", "ms", 12.345, note="line\nbreak", same_bits=False)
    shown = table([row], markdown=True)
    assert "a \\| b" in shown and "12.3 ms" in shown and "NO" in shown and "line break" in shown
    assert [number(x) for x in (None, 0.01234, 1.234, 12.34, 12345.6)] == [
        "",
        "0.012",
        "1.23",
        "12.3",
        "12346",
    ]


def test_records_of_several_gpus(tmp_path):
    def rank(seconds: float, ranks: int, wire: float) -> dict:
        return {
            "weights_bytes": 8e9, "median_step_seconds": seconds, "seconds": [seconds] * 4, "wire_bytes_per_step": wire,
            "samples_per_second": ranks / seconds, "vram_peak_bytes": 3e9, "host_memory": {"own_bytes": 1e9, "shared_bytes": 4e9},
        }  # fmt: skip

    result = {
        "arguments": {"blocks": "2"}, "ranks": 2, "alone": [rank(0.4, 1, 1e10)], "gather": [rank(0.25, 2, 5e9), rank(0.2, 2, 5e9)],
        "gather_bit_exact": [True, True],
    }  # fmt: skip
    path = tmp_path / "group.json"
    path.write_text(json.dumps({"tool": "group_gpu", "result": result}))
    alone, _, both, wire = read(path).rows
    assert (
        both.value == 8.0 and both.ratio == pytest.approx(3.2) and both.same_bits and both.host_bytes == 10e9
    )
    assert alone.ratio == 1 and wire.value == 5.0 and wire.unit == "GB"
    cases = {
        "infer, host": {"seconds": [0.3] * 4, "median_step_seconds": 0.3, "bit_exact": True},
        "infer, peer": {"seconds": [0.15] * 4, "median_step_seconds": 0.15, "bit_exact": True},
    }
    path.write_text(
        json.dumps({"tool": "peers_gpu", "result": {"arguments": {"tokens": "9"}, "cases": cases}})
    )
    assert [row.ratio for row in read(path).rows] == [1, 0.5]


def test_the_kept_table_of_codec_choices_is_within_three_percent_and_tells():
    record = next(
        found.record
        for found in map(read, reversed(kept("codec choice")))
        if "simulated" in found.record["device"]
    )
    rows = record["rows"]
    assert len({(row["model"], row["budget"], row["mode"]) for row in rows}) == len(rows) == 36
    assert max(row["ratio"] for row in rows) <= 1.03
    assert sum(row["spread"] > 1.03 for row in rows) >= 30
    for row in rows:
        assert len(row["slow_hosts"]) == 3 and set(row["slow_hosts"].values()) == {row["chosen"]}
    assert {row["best"] for row in rows} == {"raw", "lossless"}
