"""Which units a file's reads bring next, while tensors that stay on the device are still being loaded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from carom.core.placement.file_reads import FileReads


class Cache:
    """Records what it is told to read. ``present``: the units that are in it."""

    complete = False

    def __init__(self) -> None:
        self.told: list[list[int]] = []
        self.present: set[int] = set()

    def has(self, unit: int) -> bool:
        return unit in self.present

    def expect(self, upcoming: list[int]) -> None:
        self.told.append(list(upcoming))


def reads_of_units(count: int, waiting: bool) -> Any:
    nothing: Any = None
    residents: Any = SimpleNamespace(waiting=waiting)
    reads: Any = FileReads(nothing, nothing, nothing, residents)
    reads.cache, reads._pieces = Cache(), [[] for _ in range(count)]
    return reads


def test_a_unit_that_was_used_is_read_again_only_when_it_is_fetched():
    reads = reads_of_units(6, waiting=True)
    reads.pieces(3)
    reads.expect([4, 3, 5, 2])
    assert reads.cache.told.pop() == [4, 5, 2]
    reads.expect_now(3)
    assert reads.cache.told.pop() == [3, 4, 5, 2]
    reads.expect_now(5)
    assert reads.cache.told.pop() == [5, 4, 2]
    reads.cache.present = {4}
    reads.expect_now(4)  # nothing is waited for
    assert reads.cache.told == []


def test_once_all_is_loaded_units_are_read_in_the_order_of_fetches():
    reads = reads_of_units(6, waiting=False)
    reads.pieces(3)
    reads.expect([4, 3, 5])
    assert reads.cache.told == [[4, 3, 5]]
