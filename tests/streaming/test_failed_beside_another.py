"""A forward that fails ends its own thread's use of slots, and no other's."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import carom
import pytest
import torch
from carom.core.streaming.runner import Use
from tests_inside import inside
from torch import nn

WIDTH = 16
X = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))


class Waits(nn.Linear):
    """Stops in the middle of its forward, where a test says so."""

    inner: tuple[nn.Module, ...] = ()
    entered: threading.Event | None = None
    go_on: threading.Event | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight, self.bias
        if self.entered is not None and threading.current_thread() is not threading.main_thread():
            self.entered.set()
            assert self.go_on is not None and self.go_on.wait(20)
        x = nn.functional.linear(x, weight, bias)
        for block in self.inner:
            x = block(x)
        return x


class Stop(Exception):
    pass


class Model(nn.Module):
    """``first``: called at the begin of its forward, if a test has set it."""

    fails = False
    first: Callable[[], object] | None = None

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Waits(WIDTH, WIDTH) for _ in range(6)).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first is not None:
            self.first()
        for index, block in enumerate(self.blocks):
            if self.fails and index == 3:
                raise RuntimeError("the model failed")
            x = torch.tanh(block(x))
        return x


def with_no_grad(call: Callable[[], object]) -> Callable[[], object]:
    """Return ``call`` for a thread of its own, which records gradients otherwise."""
    return torch.no_grad()(call)


@pytest.mark.parametrize("timing", ["late", "early"])
def test_a_root_forward_that_fails_leaves_the_unit_that_another_thread_runs(timing):
    plain, model = Model(), Model()
    with torch.no_grad(), carom.stream(
        model, vram=4096, device=carom.SimulatedDevice(timing=timing), granularity="layer"
    ):  # fmt: skip
        model(X)
        block = model.blocks[5]
        block.entered, block.go_on = threading.Event(), threading.Event()
        found: list = []

        def outside_a_root() -> None:  # as a VAE's decode is called
            with torch.no_grad():
                found.append(block(X))

        thread = threading.Thread(target=outside_a_root)
        thread.start()
        assert block.entered.wait(20)
        model.fails = True
        for _ in range(2):
            with pytest.raises(RuntimeError, match="the model failed"):
                model(X)
        model.fails = False
        assert torch.equal(model(X), plain(X))  # the others' slots come and go meanwhile
        block.go_on.set()
        thread.join(20)
        assert torch.equal(found[0], plain.blocks[5](X))
        block.entered = None
        for _ in range(2):
            assert torch.equal(model(X), plain(X))


@pytest.mark.parametrize("copies", range(4))
def test_after_an_interrupt_beside_another_thread_any_thread_brings_the_slots_into_order(monkeypatch, copies):
    """Also the place that the interrupted thread was about to fill, for the present use or for a later one."""
    plain, model = Model(), Model()
    with torch.no_grad(), carom.stream(
        model, vram=4096, device=carom.SimulatedDevice(), granularity="layer"
    ) as session:  # fmt: skip
        for _ in range(3):
            model(X)
        block, store = model.blocks[5], inside(session).streamer.store
        block.entered, block.go_on = threading.Event(), threading.Event()
        found: list = []
        outside_a_root = threading.Thread(target=with_no_grad(lambda: found.append(block(X))))
        outside_a_root.start()
        assert block.entered.wait(20)

        fetch, left = store.fetch, iter(range(copies))

        def interrupted_fetch(*args: Any) -> Any:
            if next(left, None) is None:
                monkeypatch.undo()
                raise KeyboardInterrupt
            return fetch(*args)

        monkeypatch.setattr(store, "fetch", interrupted_fetch)
        with pytest.raises(KeyboardInterrupt):
            model(X)
        with pytest.raises(carom.CaromError, match="interrupted .* while another thread's was running"):
            model(X)
        block.go_on.set()
        outside_a_root.join(20)
        block.entered = None
        next_pass = threading.Thread(target=with_no_grad(lambda: found.append(model(X))))
        next_pass.start()
        next_pass.join(20)
        assert torch.equal(found[0], plain.blocks[5](X)) and torch.equal(found[1], plain(X))


def test_a_thread_that_brings_the_slots_into_order_within_a_unit_leaves_none_of_its_views_in_the_module():
    plain, model = Model(), Model()
    for net in (plain, model):
        net.blocks[1].inner = (net.blocks[4],)
    with torch.no_grad(), carom.stream(model, vram=4096, device=carom.SimulatedDevice(), granularity="layer"):
        model(X)
        weights, block = [block.weight for block in model.blocks], model.blocks[1]
        block.entered, block.go_on = threading.Event(), threading.Event()
        found: list = []
        outside_a_root = threading.Thread(target=with_no_grad(lambda: found.append(block(X))))
        outside_a_root.start()
        assert block.entered.wait(20)

        def interrupt(*args: Any) -> None:
            raise KeyboardInterrupt

        hook = model.blocks[0].register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(X)
        hook.remove()
        block.go_on.set()
        outside_a_root.join(20)
        block.entered = None
        assert torch.equal(found[0], plain.blocks[1](X)) and torch.equal(model(X), plain(X))
        assert all(block.weight is weight for block, weight in zip(model.blocks, weights, strict=True))


class Calls(nn.Linear):
    """Calls ``first`` within its forward, if a test has set that."""

    first: Callable[[], object] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first is not None:
            self.first()
        return super().forward(x)


@pytest.mark.parametrize(("blocks", "count"), [(1, 1), (4, 2)])
def test_a_thread_that_waits_for_room_goes_on_at_once_when_the_other_is_interrupted(blocks, count):
    """``count``: the number of units that one operator of the waiting thread takes."""
    plain, model = Model(), Model()
    for block in (*plain.blocks, *model.blocks):
        block.__class__ = Calls
    with torch.no_grad(), carom.stream(
        model, vram=blocks * 1536, device=carom.SimulatedDevice(), granularity="layer"
    ) as session:  # fmt: skip
        model(X)
        names = [unit.name for unit in inside(session).streamed][-count:]
        found: list = []

        def use(net: Model) -> None:
            with contextlib.suppress(Stop):
                net(X)

        def several(net: Model) -> None:
            found.append(torch.cat([net.get_submodule(name).weight for name in names]) @ X[0])
            raise Stop

        other = threading.Thread(target=with_no_grad(lambda: use(model)))

        def interrupt() -> None:
            model.first = lambda: several(model)
            other.start()
            until = time.monotonic() + 10
            while not inside(session).streamer.in_use(Use.WAIT) and time.monotonic() < until:
                time.sleep(0.001)
            raise KeyboardInterrupt

        model.blocks[0].first = interrupt
        with pytest.raises(KeyboardInterrupt):
            model(X)
        other.join(10)  # a thread gives up after 20 seconds
        plain.first = lambda: several(plain)
        use(plain)
        assert torch.equal(*found)
        model.blocks[0].first = model.first = plain.first = None
        for _ in range(2):
            assert torch.equal(model(X), plain(X))
