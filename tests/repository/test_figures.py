"""No measured figure stands in README.md or docs/ without its record or its source."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
GENERATED = "docs/performance.md"  # another test compares it with the records
PAGES = ["README.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]
PAGES.remove(GENERATED)

_NUMBER = r"(?<![\w.])\d+(?:[.,]\d+)*"
_SECONDS = {"s": 1.0, "seconds": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}
_RATE = r"[MGT]i?B/s"
_SPEED = r"(?:as (?:fast|slow|long)|faster|slower|longer)"
FIGURES = (
    rf"{_NUMBER}\s?(?:{'|'.join(_SECONDS)}|{_RATE})(?![\w/])",
    rf"{_NUMBER}(?:\s?x|\s?×|\stimes) {_SPEED}\b",
    rf"\b(?:twice|half|(?:two|three|four|five|ten|twenty|thirty) times) {_SPEED}\b",
)
FIGURE = re.compile("|".join(FIGURES))
# A column of figures without units has the unit in its head, as in "decoded output, GB/s".
HEAD = re.compile(rf"(?:^|[\s,(|])(?:ms|us|µs|s|seconds|{_RATE})(?=\s*[,()|])", re.I)
TIME = re.compile(rf"({_NUMBER})\s?({'|'.join(_SECONDS)})(?![\w/])")
RECORD = re.compile(r"\]\((?:\.\./)?benchmarks/records/([^)#\s]+)\)")
OTHER_SOURCE = re.compile(r"\]\(https?://|\bpublished\s+note\b")


@dataclass(frozen=True)
class Block:
    """A paragraph, list item or table of a page. ``near``: the text in which its source may stand: for a table and
    the paragraphs beside it, all of them; else the block itself.
    """

    text: str
    near: str

    @property
    def figures(self) -> list[str]:
        """The measured figures of the block, or the heads of a table's columns of figures. Code spans and the targets
        of links have none.
        """
        found = [found.group() for found in FIGURE.finditer(_prose(self.text))]
        head, *rows = self.text.splitlines()
        if _table(head) and re.search(r"\d", _prose("".join(rows))):
            found += [match.group().strip(" ,(|") for match in HEAD.finditer(_prose(head))]
        return found

    @property
    def records(self) -> list[str]:
        """The file names of the linked records."""
        return RECORD.findall(self.near)


def blocks(page: str) -> list[Block]:
    """Return the blocks of a Markdown text outside code blocks and outside generated parts."""
    page = re.sub(r"<!-- bench:start -->.*?<!-- bench:end -->", "", page, flags=re.S)
    page = re.sub(r"^(```|~~~).*?^\1[^\n]*$", "", page, flags=re.S | re.M)
    texts = list(_texts(page))
    found = []
    for place, text in enumerate(texts):
        near = [text]
        for step in (-1, 1):
            beside = texts[place + step : place + step + 1] if place + step >= 0 else []
            near += [other for other in beside if _table(text) or _table(other)]
        found.append(Block(text, "\n".join(near)))
    return found


def without_source(page: str, known: set[str]) -> list[str]:
    """Return the figures of a page that stand in a block without a source, each with its block.

    ``known``: the file names of the records in the index.
    """
    return [
        f"{figure!r} in: {block.text}"
        for block in blocks(page)
        for figure in block.figures
        if not known.intersection(block.records) and not OTHER_SOURCE.search(block.near)
    ]


def not_in_record(page: str, cells: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Return the times of a page that no linked record of their block holds, rounded to the digits shown.

    ``cells``: the cells of each record, by file name.
    """
    missing = []
    for block in blocks(page):
        seconds = [
            value * _SECONDS[cell["unit"]]
            for record in block.records
            for cell in cells.get(record, ())
            for value in (cell.get("value"), cell.get("base"))
            if value is not None and cell["unit"] in _SECONDS
        ]
        for number, unit in TIME.findall(_prose(block.text)):
            digits = len(number.partition(".")[2])
            if not any(f"{value / _SECONDS[unit]:.{digits}f}" == number for value in seconds):
                missing.append(f"{number} {unit} in: {block.text}")
    return missing


def _prose(text: str) -> str:
    """Return a block on one line, without code spans and without the targets of its links."""
    text = re.sub(r"`[^`]*`", "``", text)
    return re.sub(r"\s+", " ", re.sub(r"\]\([^)]*\)", "]", text))


def _table(text: str) -> bool:
    return text.lstrip().startswith("|")


def _texts(page: str) -> Iterator[str]:
    """Yield paragraphs, list items and tables. A block of lines that begins with four spaces is code, except in a
    list.
    """
    lines: list[str] = []
    listed = False  # whether the block above belongs to a list
    for line in [*page.splitlines(), ""]:
        item = re.match(r"\s*(?:[-*]|\d+\.)\s", line) is not None
        if lines and (not line.strip() or item or _table(line) != _table(lines[-1])):
            yield "\n".join(lines)
            lines = []
        if not line.strip():
            continue
        if not lines:
            if line.startswith("    ") and not item and not listed:
                continue
            listed = item or (listed and line.startswith(" "))
        lines.append(line)


@pytest.fixture(scope="module")
def records() -> dict[str, list[dict[str, Any]]]:
    index = json.loads((ROOT / "benchmarks" / "records" / "index.json").read_text("utf-8"))
    return {entry["file"]: entry["cells"] for entry in index["records"]}


@pytest.mark.parametrize("page", PAGES)
def test_every_figure_has_a_record_or_a_source(page: str, records: dict[str, list[dict[str, Any]]]):
    assert without_source((ROOT / page).read_text("utf-8"), set(records)) == []


def test_times_in_the_readme_are_those_of_the_linked_record(records: dict[str, list[dict[str, Any]]]):
    text = (ROOT / "README.md").read_text("utf-8")
    assert TIME.search("\n".join(_prose(block.text) for block in blocks(text)))
    assert not_in_record(text, records) == []


LINK = "[record](../benchmarks/records/known.json)"


@pytest.mark.parametrize(
    ("page", "figures"),
    [
        ("A step takes 0.25 s.", ["0.25 s"]),
        ("A step takes 12 ms,\nor 850 µs, or 9us.", ["12 ms", "850 µs", "9us"]),
        ("The link copies 55.5\nGB/s, the drive 3.5 GiB/s or 900 MB/s.", ["55.5 GB/s", "3.5 GiB/s", "900 MB/s"]),
        ("The decoder writes 1.96 TB/s.", ["1.96 TB/s"]),
        ("It is 1.4 times as fast, or 2x faster.", ["1.4 times as fast", "2x faster"]),
        ("It is twice as fast, and thirty times as slow.", ["twice as fast", "thirty times as slow"]),
        (f"[12 ms](../benchmarks/records/known.json).\n\nAnother paragraph: {LINK}, 3 s.\n\n4 s", ["4 s"]),
        (f"- 1 s\n- 2 s {LINK}\n  and 3 s\n- 4 s", ["1 s", "4 s"]),
        ("1. 1 s\n2. no figure", ["1 s"]),
        (f"Before.\n\n| a | b |\n|---|---|\n| 1 s | 2 s |\n\nAfter.\n\n{LINK}", ["1 s", "2 s"]),
        ("5 s [record](../benchmarks/records/unknown.json)", ["5 s"]),
        ("5 s [page](other.md)", ["5 s"]),
        ("It takes 3 seconds.", ["3 seconds"]),
        ("| codec | rate, GB/s | Seconds | ms (median) |\n|---|---|---|---|\n| a | 1 | 2 | 3 |", ["GB/s", "Seconds", "ms"]),
        ("- An item.\n\n    6 s, a paragraph of the item.", ["6 s"]),
    ],
)  # fmt: skip
def test_figures_without_a_source_are_found(page: str, figures: list[str]):
    found = without_source(page, {"known.json"})
    assert [entry.split(" in: ")[0].strip("'") for entry in found] == figures


@pytest.mark.parametrize(
    "page",
    [
        f"A step takes 0.25 s ({LINK}).",
        "A step takes\n0.25 s ([record](benchmarks/records/known.json)).",
        "The link copies [55.5 of 63.0\nGB/s](../benchmarks/records/known.json).",
        "NF4 takes 3 ms ([paper](https://arxiv.org/abs/2305.14314)).",
        "The published\nnote gives 22 GB/s.",
        f"Before: {LINK}.\n\n| a |\n|---|\n| 1 s |",
        f"| a |\n|---|\n| 1 s |\n\nAfter: {LINK}.",
        f"1 s in:\n\n| a |\n|---|\n| 2 s {LINK} |",
        "Wait `0.25 s`, or set `--link 22GB/s`.",
        "```sh\nsleep 5 s\n```\n\n~~~\n5 s\n~~~",
        "The formula:\n\n    10 s of kernels\n    20 s of copies",
        "4 slots, 340 MB, 20 blocks, 3 steps, 95 %, H200 SXM, v2.3, PCIe 4.0 x16, 1.4 times as many",
        "| s | the rate (GB/s) |\n|---|---|\n| slow | fast |",
        "| columns | what it says |\n|---|---|\n| 1 | 2 |",
        f"| ms | GB/s |\n|---|---|\n| 1 | 2 |\n\n{LINK}",
        "<!-- bench:start -->\n| 1 s |\n<!-- bench:end -->",
    ],
)
def test_blocks_with_a_source_and_text_without_figures_pass(page: str):
    assert without_source(page, {"known.json"}) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("0.253 s", True),
        ("0.25 s", True),
        ("253 ms", True),
        ("0.371 s", True),  # the base case
        ("9 ms", True),  # the record has this cell in ms
        ("0.254 s", False),
        ("0.3 ms", False),
        ("12 s", False),  # a rate in the record is no time
    ],
)
def test_times_are_compared_as_far_as_they_are_shown(text: str, found: bool):
    cells = [
        {"unit": "s", "value": 0.2531, "base": 0.3711},
        {"unit": "ms", "value": 9.04},
        {"unit": "GB/s", "value": 12.0},
        {"unit": "s", "value": None, "base": None},
    ]
    missing = not_in_record(
        f"It takes {text} ({LINK}).", {"known.json": cells, "other.json": [{"unit": "s", "value": 12.0}]}
    )
    assert missing == ([] if found else [f"{text} in: It takes {text} ({LINK})."])
