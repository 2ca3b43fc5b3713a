"""The report: the contract's keys, a table people can read, pictures and traces that other tools open."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import FrozenInstanceError, replace

import pytest
from carom.core.metrics.report import Report, Span, UnitPlace, format_rate, format_seconds

MIB = 1 << 20
CONTRACT = [
    "vram_budget_bytes",
    "vram_peak_bytes",
    "resident_bytes",
    "slot_bytes",
    "pinned_bytes",
    "pinned_peak_bytes",
    "raw_bytes_per_step",
    "wire_bytes_per_step",
    "transfers_per_weight",
    "step_seconds",
    "compute_seconds",
    "stall_seconds",
    "roofline_seconds",
    "hidden_fraction",
    "link_bytes_per_second",
    "disk_bytes_per_second",
    "units",
    "resident_by_choice",
    "resident_by_need",
]


def sample() -> Report:
    spans = [Span("link", "blocks.0", 0.0, 0.010, 20 * MIB), Span("stall", "blocks.0", 0.0, 0.010)]
    for i in range(4):
        spans.append(Span("compute", f"blocks.{i}", 0.010 + 0.012 * i, 0.022 + 0.012 * i))
        spans.append(Span("link", f"blocks.{i + 1}", 0.010 + 0.012 * i, 0.020 + 0.012 * i, 20 * MIB))
    spans.append(Span("disk", "blocks.4", 0.0, 0.03, 20 * MIB))
    embed = UnitPlace("embed", 10 * MIB, True, "small: kept by choice")
    norm = UnitPlace("norm", 4096, True, "used outside its module's forward")
    streamed = tuple(UnitPlace(f"blocks.{i}", 20 * MIB, False) for i in range(5))
    return Report(
        vram_budget_bytes=60 * MIB, vram_peak_bytes=50 * MIB, resident_bytes=10 * MIB + 4096,
        slot_bytes=40 * MIB, pinned_bytes=100 * MIB, pinned_peak_bytes=110 * MIB,
        raw_bytes_per_step=100.0 * MIB, wire_bytes_per_step=75.0 * MIB, transfers_per_weight=1.75,
        step_seconds=0.058, compute_seconds=0.048, stall_seconds=0.010, roofline_seconds=0.050,
        hidden_fraction=0.8, link_bytes_per_second=2.0 * 1024 * MIB, units=6,
        resident_by_choice=(embed,), resident_by_need=(norm,), adapter_bytes=MIB, streamed_bytes=100 * MIB,
        steps=3, device="cpu", kind="train", notes=("pinning was refused",),
        spans=tuple(spans), places=(embed, *streamed, norm),
    )  # fmt: skip


def test_the_dict_has_the_contract_keys_first_and_in_order():
    assert list(sample().to_dict())[: len(CONTRACT)] == CONTRACT
    assert not {"spans", "places"} & set(sample().to_dict())


def test_the_dict_survives_json_and_lists_residents_by_name_bytes_and_reason():
    figures = json.loads(json.dumps(sample().to_dict(), allow_nan=False))
    assert figures == sample().to_dict()
    assert figures["resident_by_choice"] == [
        {"name": "embed", "bytes": 10 * MIB, "reason": "small: kept by choice"}
    ]
    assert figures["resident_by_need"][0]["name"] == "norm"
    assert figures["disk_bytes_per_second"] is None
    assert figures["notes"] == ["pinning was refused"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_figures_json_does_not_know_become_null(value):
    assert replace(sample(), link_bytes_per_second=value).to_dict()["link_bytes_per_second"] is None


def test_a_report_cannot_be_changed_and_a_span_needs_a_known_lane():
    with pytest.raises(FrozenInstanceError):
        sample().units = 3  # type: ignore[misc]
    with pytest.raises(ValueError, match="gpu"):
        Span("gpu", "blocks.0", 0.0, 1.0)


def test_the_table_says_the_figures_in_words():
    table = sample().table()
    for words in (
        "60.00 MiB  54.5 % of the weights", "50.00 MiB  within the budget", "75.0 % of the raw size", "1.75",
        "One training step (median of 3)", "10 ms  17.2 % of the step", "the step takes 1.16x", "80.0 %",
        "2.00 GiB/s", "5 streamed, 1 resident by choice, beside them 1 by need", "used outside its module's forward",
        "pinning was refused", "adapters and other weights that train",
    ):  # fmt: skip
        assert words in table
    assert "disk rate" not in table
    assert all(line == line.rstrip() for line in table.splitlines())


def test_the_table_aligns_its_figures():
    rows = [line for line in sample().table().splitlines() if "MiB  " in line]
    assert len(rows) > 5
    assert len({line.index("MiB  ") for line in rows}) == 1


def test_the_table_shouts_when_the_budget_is_broken():
    assert "OVER THE BUDGET by 5.00 MiB" in replace(sample(), vram_peak_bytes=65 * MIB).table()


def test_an_empty_report_still_prints_and_says_what_was_not_measured():
    table = Report().table()
    assert "not measured" in table
    assert "nan" not in table.lower().split()


def test_the_table_of_many_residents_stays_short_and_says_what_it_left_out():
    many = tuple(UnitPlace(f"experts.{i}", 1000 + i, True, "odd") for i in range(500))
    table = replace(sample(), resident_by_need=many, units=506).table()
    assert "and 492 more" in table
    assert "experts.499" in table and "experts.3 " not in table
    assert len(table.splitlines()) < 60


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "not measured"), (2.5, "2.5 s"), (0.0123, "12.3 ms"), (4.2e-5, "42 us"), (0, "0 us")],
)
def test_seconds_for_people(seconds, text):
    assert format_seconds(seconds) == text


def test_rates_for_people():
    assert format_rate(None) == "not measured"
    assert format_rate(51.7 * 2**30) == "51.70 GiB/s"


def test_a_png_is_drawn_at_readme_width(tmp_path):
    sample().plot(tmp_path / "deep" / "timeline.png")
    data = (tmp_path / "deep" / "timeline.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width == 1600 and 400 < height < 900
    assert len(list((tmp_path / "deep").iterdir())) == 1


def test_the_picture_shows_every_lane_that_has_spans(tmp_path):
    sample().plot(tmp_path / "with.svg")
    replace(sample(), spans=tuple(s for s in sample().spans if s.lane != "disk")).plot(
        tmp_path / "without.svg"
    )
    for name in ("with.svg", "without.svg"):
        assert ElementTree.parse(tmp_path / name).getroot().tag.endswith("svg")
    # matplotlib keeps each text as a comment beside its glyphs
    drawn, without = (tmp_path / "with.svg").read_text("utf-8"), (tmp_path / "without.svg").read_text("utf-8")
    for words in (
        "computing",
        "weights cross",
        "waiting",
        "disk reads",
        "streamed: 100.00 MiB",
        "by need: 4.00 KiB",
    ):
        assert words in drawn
    assert "disk reads" not in without


def test_an_empty_report_and_a_thousand_spans_can_be_drawn(tmp_path):
    Report().plot(tmp_path / "empty.svg")
    assert "no step was timed" in (tmp_path / "empty.svg").read_text("utf-8")
    crowd = tuple(Span("compute", f"layers.{i}", i * 1e-3, (i + 1) * 1e-3) for i in range(1000))
    replace(sample(), spans=crowd).plot(tmp_path / "crowd.png")
    assert (tmp_path / "crowd.png").stat().st_size > 1000


def test_what_is_far_below_a_pixel_is_not_drawn_as_one():
    from carom.core.metrics.timeline import _visible

    spans = [Span("compute", "compute", 0.0, 0.5), Span("compute", "compute", 0.500001, 1.0)]
    assert _visible(spans, 1.0) == [Span("compute", "compute", 0.0, 1.0)]
    assert len(_visible([spans[0], replace(spans[1], name="other")], 1.0)) == 2
    assert len(_visible([spans[0], replace(spans[1], start=0.51)], 1.0)) == 2
    assert _visible([Span("stall", "blocks.0", 0.5, 0.500001)], 1.0) == []


def test_a_suffix_that_cannot_be_drawn_is_named_and_leaves_nothing(tmp_path):
    with pytest.raises(ValueError, match=r"timeline\.gif.*\.png or \.svg"):
        sample().plot(tmp_path / "timeline.gif")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["timeline.png", "trace.json"])
def test_a_failed_write_keeps_the_old_file_and_leaves_nothing_else(tmp_path, monkeypatch, name):
    target = tmp_path / name
    target.write_text("old")

    def refuse(*_args, **_kwargs):
        raise OSError("disk full")

    monkeypatch.setattr("carom.core.metrics.timeline.os.replace", refuse)
    with pytest.raises(OSError, match="disk full"):
        (sample().plot if name.endswith("png") else sample().trace)(target)
    assert target.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_drawing_leaves_matplotlib_as_it_was(package):
    code = (
        "import sys, pathlib, tempfile; sys.path.insert(0, sys.argv[1])\n"
        "from carom.core.metrics.report import Report\n"
        "assert 'matplotlib' not in sys.modules\n"
        "Report().table()\n"
        "assert 'matplotlib' not in sys.modules\n"
        "import matplotlib; before = matplotlib.rcParams.copy()\n"
        "with tempfile.TemporaryDirectory() as d: Report().plot(pathlib.Path(d) / 't.png')\n"
        "assert matplotlib.rcParams.copy() == before\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(package)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_the_trace_has_one_named_track_per_lane_in_microseconds(tmp_path):
    sample().trace(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text("utf-8"))
    tracks = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert list(tracks.values()) == ["compute", "link", "stall", "disk"]
    events = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert len(events) == len(sample().spans)
    assert all(tracks[e["tid"]] == e["cat"] for e in events)
    first = next(e for e in events if e["cat"] == "link")
    assert (first["ts"], first["dur"], first["args"]["bytes"]) == (0.0, pytest.approx(1e4), 20 * MIB)
    assert trace["otherData"]["units"] == 6


def test_overlapping_spans_of_a_lane_go_to_a_second_track(tmp_path):
    spans = (Span("link", "a", 0, 2), Span("link", "b", 1, 3), Span("link", "c", 2, 4))
    replace(sample(), spans=spans).trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text("utf-8"))["traceEvents"]
    track = {e["name"]: e["tid"] for e in events if e["ph"] == "X"}
    assert track["a"] == track["c"] != track["b"]
    assert [e["args"]["name"] for e in events if e["name"] == "thread_name"] == ["link", "link 2"]


def test_what_stays_packed_counts_by_what_it_unpacks_to():
    report = Report(
        resident_bytes=100, resident_packed_bytes=40, resident_packed_raw_bytes=60, streamed_bytes=10
    )
    assert report.weight_bytes == 130
