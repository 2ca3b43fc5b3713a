"""A KeyboardInterrupt at any line of a step: the next step is right and waits for nothing, and no hook, counter or slot is left."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import carom
import pytest
import torch
from safetensors.torch import save_file
from tests_inside import inside
from tests_interrupts import Interrupts
from tests_limits import pack_small_weights
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

PATIENCE = 5  # seconds; a thread that waits for a slot that nobody gives back waits for 20


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(
        self, width: int = 32, dtype: torch.dtype = torch.float32, checkpoints: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.checkpoints = checkpoints
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.head = nn.Linear(width, width)
        self.to(dtype).requires_grad_(False)

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return self.head(x)


def batch(model: nn.Module, number: int) -> torch.Tensor:
    weight = next(model.parameters())
    x = torch.randn(4, weight.shape[1], generator=torch.Generator().manual_seed(number))
    return x.to(weight.dtype)


def infer(model: nn.Module, number: int) -> list[torch.Tensor]:
    with torch.no_grad():
        return [model(batch(model, number))]


def train(model: nn.Module, number: int) -> list[torch.Tensor]:
    model.zero_grad()
    x = batch(model, number).requires_grad_()
    model(x).square().mean().backward()
    return [x.grad, *(p.grad for p in model.parameters() if p.requires_grad)]


@dataclass(frozen=True)
class Kind:
    """Steps of one kind: the model, one step, and the settings of its session.

    ``disk``: "spill" writes the weights of the module to a file, "file" streams a module of meta tensors from one. The
    RAM cache holds a part of them.
    """

    step: Callable[[nn.Module, int], list[torch.Tensor]] = infer
    make: Callable[[], nn.Module] = Model
    trains: bool = False
    disk: str = ""
    codec: str = "raw"
    simulated: bool = False
    room: int = 1  # of the least budget; packed units need room beside the slots

    def model(self) -> nn.Module:
        return self.make().requires_grad_(self.trains)

    def settings(self, folder: Path) -> dict[str, Any]:
        settings: dict[str, Any] = {"codec": self.codec, "granularity": "block"}
        settings["device"] = carom.SimulatedDevice(seed=3, timing="random") if self.simulated else "cpu"
        if self.trains:
            settings["training"] = "stream"
        if self.disk:
            settings["ram"] = 48 << 10
        if self.disk == "spill":
            settings["disk"] = folder
        if self.disk == "file":
            settings["weights"] = folder / "weights.safetensors"
        return settings

    def streamed(self, folder: Path) -> nn.Module:
        """Return a model to stream."""
        if self.disk != "file":
            return self.model()
        save_file(dict(self.model().state_dict()), folder / "weights.safetensors")
        with torch.device("meta"):
            return self.model()


KINDS = {
    "inference": Kind(),
    "gradients of inputs": Kind(train),
    "training": Kind(train, trains=True),
    "training with checkpoints": Kind(train, lambda: Model(checkpoints=True), trains=True),
    "packed": Kind(make=lambda: Model(128, torch.bfloat16), codec="lossless", room=3),
    "spilled to disk": Kind(disk="spill"),
    "from a file": Kind(disk="file"),
    "backward from disk": Kind(train, lambda: Model(checkpoints=True), disk="spill"),
    "simulated device": Kind(train, lambda: Model(checkpoints=True), trains=True, simulated=True),
}


def no_hooks() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is None


@pytest.fixture(autouse=True)
def small_tensors_pack(monkeypatch):
    pack_small_weights(monkeypatch)


def interrupt_steps(kind: Kind, folder: Path, times: int) -> None:
    """Interrupt ``times`` steps of one session at random lines, each followed by two steps that must be right."""
    model, twin = kind.streamed(folder), kind.model()
    settings = kind.settings(folder)
    with pytest.raises(carom.BudgetError) as refused:
        carom.stream(model, vram=1, **settings)
    objects = list(map(id, model.parameters()))
    wanted = [kind.step(twin, number) for number in range(3)]
    seeded = random.Random(39)
    with carom.stream(model, vram=kind.room * refused.value.least_bytes, **settings) as session:
        packs = [unit.packed for unit in inside(session).streamed]
        assert packs and any(packs) == (kind.codec == "lossless"), "the test needs streamed weights"
        kind.step(model, 0)
        kind.step(model, 0)
        attached = list(map(id, model.parameters()))
        counted = Interrupts()
        with counted:
            kind.step(model, 0)
        for _ in range(times):
            lines = Interrupts(seeded.randint(1, counted.count))
            with lines:
                kind.step(model, 0)
            assert no_hooks(), f"saved-tensor hooks stay on the thread: {lines.place}"
            assert list(map(id, model.parameters())) == attached, f"slot views stay: {lines.place}"
            began = time.monotonic()
            for number in (1, 2):
                got = kind.step(model, number)
                assert len(got) == len(wanted[number]), lines.place
                assert all(map(torch.equal, got, wanted[number])), f"wrong after {lines.place}"
            assert time.monotonic() - began < PATIENCE, f"the step after {lines.place} waits"
        assert not any(slot.users for slot in inside(session).slots)
    assert list(map(id, model.parameters())) == objects
    if kind.disk != "file":
        assert all(map(torch.equal, model.parameters(), twin.parameters()))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_after_an_interrupt_at_any_line_is_right_and_waits_for_nothing(kind, tmp_path):
    interrupt_steps(KINDS[kind], tmp_path, 8)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
def test_steps_after_300_interrupts_are_right_and_wait_for_nothing(kind, tmp_path):
    interrupt_steps(KINDS[kind], tmp_path, 300)
