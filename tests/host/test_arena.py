"""The arena's count of pinned bytes, when the garbage collector or an interrupt runs in the middle of its work."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from carom.core.host.arena import Block, HostArena, Pinner

PAGE = 1 << 16


class Registered:
    """A driver that registers nothing, and the addresses that it was asked to register."""

    def __init__(self, fails: bool = False) -> None:
        self.addresses: set[int] = set()
        self.fails = fails
        self.pinner = Pinner(self._register, self.addresses.discard)

    def _register(self, address: int, size: int) -> None:
        self.addresses.add(address)
        if self.fails:
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    "work",
    [
        lambda arena, block: arena.begin_layout(1 << 30),
        lambda arena, block: arena.pin(block),
        lambda arena, block: arena.pin_anew([block]),
        lambda arena, block: arena.pinned_bytes,
    ],
)
def test_the_collector_may_free_a_pinned_block_at_any_line(work: Callable[[HostArena, Block], Any]):
    driver = Registered()
    arena = HostArena(driver.pinner, 1 << 30)
    block = arena.allocate(PAGE)
    collected: list[int] = []

    def garbage() -> None:
        cycle: list[Any] = [arena.allocate(PAGE)]
        arena.pin(cycle[0])
        cycle.append(cycle)

    def at_line(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            garbage_lines.append(frame.f_lineno)
            if len(garbage_lines) == collected[-1]:
                gc.collect()
        return at_line

    def run() -> None:
        sys.settrace(lambda frame, event, argument: at_line if frame.f_code.co_name in traced else None)
        try:
            work(arena, block)
        finally:
            sys.settrace(None)

    traced = {"begin_layout", "pin", "pin_anew", "pinned_bytes", "_count"}
    gc.collect()
    gc.freeze()  # each collection below then takes a moment
    gc.disable()
    try:
        for line in range(1, 40):
            garbage_lines: list[int] = []
            collected.append(line)
            block.unpin()
            garbage()
            thread = threading.Thread(target=run, daemon=True)
            thread.start()
            thread.join(5)
            assert not thread.is_alive(), f"the arena waits for its own lock at line {garbage_lines[-1]}"
            gc.collect()
            assert arena.pinned_bytes == PAGE * block.pinned
            if len(garbage_lines) < line:
                break
    finally:
        gc.enable()
    assert line > 1 and len(driver.addresses) == block.pinned


def test_an_interrupt_while_the_driver_pins_leaves_nothing_pinned():
    driver = Registered(fails=True)
    arena = HostArena(driver.pinner, PAGE)
    block = arena.allocate(PAGE)
    with pytest.raises(KeyboardInterrupt):
        arena.pin(block)
    assert not block.pinned and not driver.addresses and arena.pinned_bytes == 0
    driver.fails = False
    assert arena.pin(block) and arena.pinned_bytes == PAGE
