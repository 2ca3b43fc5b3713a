"""docs/architecture.md lists every lock of `core/`, and threads take locks in the order of that list."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from tests_lock_recorder import locks_of

# Tests in which sessions share budgets, and use threads, files and packed weights.
SCENARIOS = (
    "tests/budget/test_sharing.py",
    "tests/placement/test_train_from_disk.py",
    "tests/streaming/test_threads.py",
)
LAYOUT = "session/layout_manager.py:lock"


@pytest.fixture(scope="module")
def order(root) -> list[str]:
    """The locks that the page lists, the one that is taken first before the others."""
    page = (root / "docs" / "architecture.md").read_text("utf-8")
    section = page.split("## Locks\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `([\w/]+\.py:\w+)` \|", section, re.M)


def test_the_page_lists_every_lock(root, order):
    assert len(order) == len(set(order))
    assert set(order) == locks_of(root / "core")


def out_of_order(order: list[str], pairs: dict[tuple[str, str], set[str]]) -> list[tuple[str, str]]:
    """The pairs (outer, inner) against ``order``. A pair does no harm where the layout lock was taken before it and before its
    reverse whenever they occurred: two threads then never have one lock each."""

    def gated(pair: tuple[str, str]) -> bool:
        return pair not in pairs or LAYOUT in pairs[pair]

    return [
        (outer, inner)
        for outer, inner in pairs
        if order.index(outer) >= order.index(inner) and not (gated((outer, inner)) and gated((inner, outer)))
    ]


def test_two_locks_in_both_orders_are_found():
    assert out_of_order(["a", "b"], {("a", "b"): set()}) == []
    assert out_of_order(["a", "b"], {("a", "b"): set(), ("b", "a"): {LAYOUT}}) == [("b", "a")]
    assert out_of_order(["a", "b"], {("a", "b"): {LAYOUT}, ("b", "a"): {LAYOUT}}) == []
    assert out_of_order(["a"], {("a", "a"): set()}) == [("a", "a")]


def test_threads_take_locks_in_the_order_of_the_page(root, order, tmp_path):
    environment = {**os.environ, "CAROM_RECORD_LOCKS": str(tmp_path), "PYTEST_ADDOPTS": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *SCENARIOS]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    seen = [line.split() for path in tmp_path.glob("*.txt") for line in path.read_text("utf-8").splitlines()]
    assert {line[0] for line in seen} <= set(order)
    pairs: dict[tuple[str, str], set[str]] = {}
    for outer, inner, gates in (line for line in seen if len(line) == 3):
        pairs.setdefault((outer, inner), set(gates.split(","))).intersection_update(gates.split(","))
    assert (LAYOUT, "streaming/streamer.py:lock") in pairs
    assert ("host/host_cache.py:_cond", "checkpoint/disk_reader.py:lock") in pairs
    assert out_of_order(order, pairs) == []
