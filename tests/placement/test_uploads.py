"""Large tensors are copied to the device by several threads through pinned buffers, with the bytes of a plain copy."""

from __future__ import annotations

import threading

import carom
import pytest
import torch
from carom.core.host.arena import HostArena, Pinner
from carom.core.placement import resident_placer
from carom.core.placement import uploads as module
from carom.core.placement.uploads import Uploads
from torch import nn

CHUNK = 1 << 16


class Device:
    """An engine of a device whose copies run when they are waited for: a buffer that is filled too soon shows."""

    def __init__(self) -> None:
        self.device = torch.device("meta")  # any that is not the CPU: the tests give the target
        self.copies: list[str] = []
        self.fails_at, self.waited = -1, False
        self._copying = threading.Lock()

    def stream(self) -> str:
        return "stream"

    def record(self, stream: str) -> list:
        return []

    def synchronize(self, event: list | None = None) -> None:
        if event is None:
            self.waited = True
            return
        with self._copying:  # a second caller waits until the copy has ended, as on a device
            for target, source in event:
                target.copy_(source)
            event.clear()

    def copy_in(self, target, source, after, timed):
        self.copies.append(threading.current_thread().name)
        if len(self.copies) == self.fails_at:
            raise RuntimeError("the device is lost")
        return [(target, source)], None


@pytest.fixture
def parts(monkeypatch):
    monkeypatch.setattr(module, "CHUNK", CHUNK)
    monkeypatch.setattr(module, "THREADS", 3)
    monkeypatch.setattr(module, "workers", lambda: 3)
    pins: dict[int, int] = {}
    pinner = Pinner(lambda at, size: pins.update({at: size}), lambda at: pins.pop(at))
    engine, arena = Device(), HostArena(pinner, 100 * CHUNK)
    return engine, arena, Uploads(engine, arena)


def weight(numel: int = 20 * CHUNK + 77) -> torch.Tensor:
    return torch.randint(0, 256, (numel,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_the_bytes_are_those_of_a_plain_copy_and_the_buffers_are_pinned_only_meanwhile(parts):
    engine, arena, uploads = parts
    value = weight(20 * CHUNK).view(torch.bfloat16).view(640, -1).t()
    target = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    with uploads.running(0):
        assert arena.pinned_bytes == 3 * CHUNK
        for _ in range(3):
            target.zero_()
            uploads.copy(target, value)
            assert torch.equal(target.view(torch.int16), value.view(torch.int16))
    assert len(engine.copies) == 60 and all(name.startswith("carom-upload") for name in engine.copies)
    assert arena.pinned_bytes == 0 and arena.pinned_peak_bytes == 3 * CHUNK


def test_small_tensors_and_tensors_with_gaps_are_copied_by_the_driver(parts):
    engine, _, uploads = parts
    with uploads.running(0):
        for value in (weight(CHUNK), weight(8 * CHUNK).view(2, -1)[:, : 3 * CHUNK]):
            target = torch.zeros_like(value)
            uploads.copy(target, value)
            assert torch.equal(target, value)
    assert engine.copies == []


def test_pins_that_others_need_are_left_to_them(parts):
    engine, arena, uploads = parts
    value = weight()
    target = torch.zeros_like(value)
    with uploads.running(98 * CHUNK):
        assert arena.pinned_bytes == 0
        uploads.copy(target, value)
    assert torch.equal(target, value) and engine.copies == [] and arena.notes == []


def test_after_an_error_no_thread_writes_to_the_target(parts):
    engine, arena, uploads = parts
    value = weight()
    engine.fails_at = 4
    with pytest.raises(RuntimeError, match="the device is lost"), uploads.running(0):
        uploads.copy(torch.zeros_like(value), value)
    assert len(engine.copies) <= 21 and arena.pinned_bytes == 0 and engine.waited
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("carom-upload")]
    target = torch.zeros_like(value)
    with uploads.running(0):  # the buffers of an interrupted copy are usable again
        uploads.copy(target, value)
    assert torch.equal(target, value)


@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_only_the_first_layout_copies_through_the_buffers(codec, monkeypatch):
    rooms: list[int] = []
    monkeypatch.setattr(resident_placer, "CHUNK", 1 << 10)
    running = Uploads.running
    monkeypatch.setattr(Uploads, "running", lambda self, room: rooms.append(room) or running(self, room))
    model = nn.Sequential(*[nn.Linear(256, 256, dtype=torch.bfloat16) for _ in range(6)]).requires_grad_(
        False
    )
    nbytes = sum(p.nbytes for p in model.parameters())
    with carom.stream(model, device=carom.SimulatedDevice(), vram=nbytes // 2, codec=codec) as session:
        x = torch.ones(1, 256, dtype=torch.bfloat16)
        model(x)
        session.set_budget(vram=nbytes // 3)
        model(x)
        session.park(keep=True)
        model(x)
    (room,) = rooms
    assert 0 < room < nbytes
