"""Uses that begin and end while Carom issues a copy: the garbage collector and signals call code of the user at any line."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import carom
import pytest
import torch
from carom.core.placement import store_kinds
from carom.core.session.session import Session
from carom.core.session.stream_settings import StreamSettings
from tests_toy_store import ToyStore
from torch import nn

WIDTH, DEPTH = 32, 6


class WatchedStore(ToyStore):
    """Calls ``during`` within each fetch. ``nested``: the calls that began within another one, which T2 forbids."""

    def __init__(self) -> None:
        super().__init__()
        self.fetches, self.fetching, self.nested = 0, False, []
        self.during: Callable[[], None] = lambda: None

    def ready(self, unit: Any) -> bool:
        return True

    def read_ahead(self, upcoming: Any) -> None:
        if self.fetching:
            self.nested.append("read_ahead")
        super().read_ahead(upcoming)

    def fetch(self, *args: Any) -> Any:
        if self.fetching:
            self.nested.append("fetch")
        self.fetching, self.fetches = True, self.fetches + 1
        try:
            self.during()
            return super().fetch(*args)
        finally:
            self.fetching = False


class Garbage:
    """Refers to itself, so that only the garbage collector ends it. It calls ``last`` then."""

    def __init__(self, last: Callable[[], None]) -> None:
        self.last, self.me = last, self

    def __del__(self) -> None:
        self.last()


class Block(nn.Linear):
    """Notes its index when it runs."""

    def __init__(self, index: int, begun: list[int]) -> None:
        super().__init__(WIDTH, WIDTH)
        self.index, self.begun = index, begun

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.begun.append(self.index)
        return super().forward(x)


@pytest.mark.parametrize("times", [1, 2], ids=["once", "twice"])
def test_code_that_the_garbage_collector_calls_may_compute_with_the_next_units_weights(monkeypatch, times):
    """The first use is the expected one, the second is not."""
    store = WatchedStore()
    monkeypatch.setitem(store_kinds._MAKES, "watched", lambda wish: store)
    torch.manual_seed(0)
    begun, found, x = [], [], torch.ones(2, WIDTH)
    net = nn.Sequential(*(Block(index, begun) for index in range(DEPTH)))
    sums = [block.bias.sum().item() for block in net]
    vram = 2 * (WIDTH + 1) * WIDTH * 4 + 1024  # two blocks: none stays
    settings = StreamSettings(device=carom.SimulatedDevice(), vram=vram, store="watched", granularity="block")

    def use() -> None:
        index = (begun[-1] + 1) % DEPTH
        found.extend((index, net[index].bias.sum().item()) for _ in range(times))

    def collect() -> None:
        if store.fetches == chosen:
            Garbage(use)
            gc.collect()

    chosen, store.during = 0, collect
    with torch.no_grad():
        expected = net(x)
        with Session(net, settings) as session:
            x = x.to(session.device)
            assert session.report().resident_bytes == 0
            for _ in range(3):
                for _ in range(3):
                    assert torch.equal(net(x).cpu(), expected)
                chosen = store.fetches + 2
                assert torch.equal(net(x).cpu(), expected)
    assert [(index, sums[index]) for index, _ in found] == found and len(found) == 3 * times
    assert not store.nested
