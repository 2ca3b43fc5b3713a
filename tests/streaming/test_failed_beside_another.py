"""A forward that fails ends its own thread's use of slots, and no other's."""

from __future__ import annotations

import threading

import carom
import pytest
import torch
from torch import nn

WIDTH = 16
X = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))


class Waits(nn.Linear):
    """Stops in the middle of its forward, where a test says so."""

    entered: threading.Event | None = None
    go_on: threading.Event | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight, self.bias
        if self.entered is not None and threading.current_thread() is not threading.main_thread():
            self.entered.set()
            assert self.go_on is not None and self.go_on.wait(20)
        return nn.functional.linear(x, weight, bias)


class Model(nn.Module):
    fails = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Waits(WIDTH, WIDTH) for _ in range(6)).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            if self.fails and index == 3:
                raise RuntimeError("the model failed")
            x = torch.tanh(block(x))
        return x


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
