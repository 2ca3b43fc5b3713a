"""A KeyboardInterrupt at any line of a step: the next step is right and waits for nothing, and no hook, counter or slot is left.

The tests with "at a line" take every line of `FILES` (what follows the schedule, the pool, the stores) that a step executes,
in a new session and in one that has run, and interrupt a sample of them. ``python -m pytest -m slow -k every_line
tests/streaming/test_interrupts.py`` interrupts all of them, in ten minutes.
"""

from __future__ import annotations

import gc
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import carom
import pytest
import torch
from safetensors.torch import save_file
from tests_inside import inside
from tests_interrupts import InterruptAt, Interrupts
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


class Adapted(nn.Module):
    """A frozen linear layer with a trained low-rank part."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(2, base.in_features) / 8)
        self.b = nn.Parameter(torch.randn(base.out_features, 2) / 8)

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(x, self.a), self.b)


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


class Tied(Model):
    """Uses weights of two blocks in one operator, outside the blocks' own forwards."""

    def forward(self, x):
        x = super().forward(x)
        return x + F.linear(x, torch.mm(self.blocks[0].down.weight, self.blocks[2].up.weight))


def adapt(model: nn.Module) -> nn.Module:
    """Put a low-rank part that is trained beside a layer of each block, and return ``model``."""
    torch.manual_seed(1)
    for block in model.blocks:
        block.up = Adapted(block.up)
    return model


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
    adapters: bool = False
    disk: str = ""
    codec: str = "raw"
    simulated: bool = False
    room: int = 1  # of the least budget; packed units need room beside the slots
    keeps: bool = (
        False  # whether the traceback is kept, and with it the frames of the step, as a console does
    )

    def model(self) -> nn.Module:
        model = self.make().requires_grad_(self.trains)
        return adapt(model) if self.adapters else model

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
        frozen = {name: value for name, value in self.model().named_parameters() if not value.requires_grad}
        save_file(frozen, folder / "weights.safetensors")
        with torch.device("meta"):
            model = self.make().requires_grad_(False)
        return adapt(model) if self.adapters else model


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


# -- every line

FILES = ("streaming/", "device/pool", "device/slot", "plan/schedule_follower.py", "stores/")
LINE_KINDS = {
    "inference": Kind(simulated=True),
    "LoRA": Kind(train, adapters=True, simulated=True),
    "LoRA with checkpoints": Kind(train, lambda: Model(checkpoints=True), adapters=True, simulated=True),
    "training": Kind(train, trains=True, simulated=True),
    "training with checkpoints": KINDS["simulated device"],
    "packed": Kind(make=lambda: Model(128, torch.bfloat16), codec="lossless", room=3, simulated=True),
    "from a file": Kind(disk="file", simulated=True),
    "LoRA from a file": Kind(
        train, lambda: Model(checkpoints=True), adapters=True, disk="file", simulated=True
    ),
    "kept traceback": Kind(train, trains=True, simulated=True, room=4, keeps=True),
    "two units together": Kind(make=Tied, simulated=True, room=2),
}
EVERY = 80  # in a normal run, one of so many lines is interrupted
COLD = 2  # steps of a new session


class Streamed:
    """A session of one kind on a simulated device of its own, and the resident twin of its model."""

    def __init__(self, kind: Kind, folder: Path, vram: int) -> None:
        self.kind, settings = kind, kind.settings(folder)
        self.device = settings["device"]
        self.model, self.twin = kind.streamed(folder), kind.model()
        self.objects = list(map(id, self.model.parameters()))
        self.session = carom.stream(self.model, vram=vram, **settings)
        self.attached = list(map(id, self.model.parameters()))

    def step(self, number: int = 0) -> list[torch.Tensor]:
        return self.kind.step(self.model, number)

    def check(self, place: str) -> None:
        """Two further steps are right, although the trained weights have changed meanwhile, and no rule is broken."""
        assert no_hooks(), f"saved-tensor hooks stay on the thread: {place}"
        assert list(map(id, self.model.parameters())) == self.attached, f"slot views stay: {place}"
        began = time.monotonic()
        for number in (1, 2):
            with torch.no_grad():
                for one in (self.model, self.twin):
                    for weight in one.parameters():
                        if weight.requires_grad:
                            weight.mul_(0.75)
            got, wanted = self.step(number), self.kind.step(self.twin, number)
            assert len(got) == len(wanted), place
            assert all(map(torch.equal, got, wanted)), f"wrong after {place}"
            inside(self.session).streamer.pool.check()
        assert time.monotonic() - began < PATIENCE, f"the step after {place} waits"

    def close(self, place: str) -> None:
        self.session.close()
        assert list(map(id, self.model.parameters())) == self.objects, f"other parameters after {place}"
        if self.kind.disk != "file":
            assert all(map(torch.equal, self.model.parameters(), self.twin.parameters())), place

    def check_freed(self, place: str) -> None:
        if self.device.ledger.allocated:
            gc.collect()
        assert not self.device.ledger.allocated, f"device memory stays after {place}"


def lines_of(begin: Callable[[], Streamed]) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Return the lines that the first steps of a session execute, and those of a later one, with the number of one
    execution: the first one, and the one in the middle.
    """
    streamed, cold, warm = begin(), Interrupts(files=FILES), Interrupts(files=FILES)
    with cold:
        for _ in range(COLD):
            streamed.step()
    streamed.step()
    with warm:
        streamed.step()
    streamed.close("")
    streamed.check_freed("")
    counted = Counter(warm.places)
    return [(place, 1) for place in sorted(set(cold.places))], [
        (place, (counted[place] + 1) // 2) for place in sorted(counted)
    ]


def interrupt_lines(kind: Kind, folder: Path, every: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Interrupt steps of sessions of ``kind`` at one of ``every`` lines; return what went wrong."""
    model = kind.streamed(folder)
    with pytest.raises(carom.BudgetError) as refused:
        carom.stream(model, vram=1, **kind.settings(folder))

    def begin() -> Streamed:
        return Streamed(kind, folder, kind.room * refused.value.least_bytes)

    lines_of(begin)  # some lines run once in a process
    cold, warm = lines_of(begin)
    wrong: list[str] = []

    def unraisable(raised: Any) -> None:
        if raised.exc_type is not KeyboardInterrupt:
            wrong.append(f"not raised: {raised.exc_value!r} in {raised.object}")

    monkeypatch.setattr(sys, "unraisablehook", unraisable)
    for number, (place, nth) in enumerate(cold[::every]):
        streamed = begin()
        with InterruptAt(place, nth, kind.keeps) as interrupt:
            for _ in range(COLD):
                streamed.step()
        try:
            assert interrupt.place, f"{place} does not run"
            if number % 2 == 0:
                streamed.check(place)
            streamed.close(place)
            interrupt.error = None
            streamed.check_freed(place)
        except Exception as error:
            wrong.append(f"cold {place}: {error!r}")
    streamed = begin()
    for place, nth in [*warm[::every], ("", 0)]:
        try:
            if not place:
                streamed.close("")
                streamed.check_freed("")
                break
            streamed.step()
            with InterruptAt(place, nth):
                streamed.step()
            streamed.check(place)
        except Exception as error:
            wrong.append(f"warm {place} ({nth}): {error!r}")
            streamed = begin()
    return wrong


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", LINE_KINDS)
def test_a_session_that_is_interrupted_at_a_line_of_its_passes_goes_on_and_closes(
    kind, tmp_path, monkeypatch
):
    assert not interrupt_lines(LINE_KINDS[kind], tmp_path, EVERY, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", LINE_KINDS)
def test_a_session_that_is_interrupted_at_every_line_of_its_passes_goes_on_and_closes(
    kind, tmp_path, monkeypatch
):
    wrong = interrupt_lines(LINE_KINDS[kind], tmp_path, 1, monkeypatch)
    assert not wrong, "\n".join(wrong)
