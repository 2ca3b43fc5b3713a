"""A session with weights in a file that is parked again and again keeps all of them in RAM, where ``ram`` has room."""

from __future__ import annotations

import threading
from typing import Any

import carom
import pytest
import torch
from tests_disk_harness import Drive, uniform, within_ram
from tests_harness import on_some_devices, place
from tests_inside import inside
from tests_limits import units_apart_from

BLOCK = 32768  # bytes of one of the twenty blocks of `uniform`


@pytest.fixture(autouse=True)
def units_of_any_size_have_memory_of_their_own(monkeypatch):
    """As the units of real models have."""
    units_apart_from(monkeypatch, 1024)


@on_some_devices
@pytest.mark.parametrize("vram", [12 * BLOCK, 30 * BLOCK], ids=["some stream", "none streams"])
def test_the_second_return_reads_nothing(tmp_path, monkeypatch, device, vram):
    drive = Drive(monkeypatch)
    loaded, empty, path, nbytes = uniform(tmp_path)
    x = torch.ones(1, 64, device=place(device))
    expected = loaded.to(x.device)(x)
    read = []
    with (
        carom.stream(empty, device=device, vram=vram, weights=path, ram=2 * nbytes) as session,
        torch.no_grad(),
    ):
        for _ in range(4):
            for _ in range(3):
                assert torch.equal(empty(x), expected)
            within_ram(session)
            read.append(drive.fresh())
            session.park(keep=True)
        assert read[0] >= nbytes
        assert 0 < read[1] <= read[0], "the first park could not know that it was not the last"
        assert read[2:] == [0, 0]


@on_some_devices
def test_with_less_ram_a_part_is_read(tmp_path, monkeypatch, device):
    drive = Drive(monkeypatch)
    loaded, empty, path, nbytes = uniform(tmp_path)
    x = torch.ones(1, 64, device=place(device))
    expected = loaded.to(x.device)(x)
    read = []
    with (
        carom.stream(empty, device=device, vram=30 * BLOCK, weights=path, ram=nbytes // 2) as session,
        torch.no_grad(),
    ):
        for _ in range(5):
            for _ in range(3):
                assert torch.equal(empty(x), expected)
            within_ram(session)
            read.append(drive.fresh())
            session.park(keep=True)
    assert 0 < max(read[3:]) < 0.8 * nbytes, read


@on_some_devices
def test_a_session_that_is_never_parked_keeps_no_copies_of_residents(tmp_path, device):
    loaded, empty, path, nbytes = uniform(tmp_path)
    x = torch.ones(1, 64, device=place(device))
    with (
        carom.stream(empty, device=device, vram=30 * BLOCK, weights=path, ram=2 * nbytes) as session,
        torch.no_grad(),
    ):
        for vram in (30 * BLOCK, 12 * BLOCK, 30 * BLOCK):
            session.set_budget(vram=vram)
            assert torch.equal(empty(x), loaded.to(x.device)(x))
        assert session.report().ram_peak_bytes < nbytes


@pytest.mark.parametrize("timing", ["late", "random"])
def test_a_unit_computes_while_the_next_ones_are_copied(tmp_path, timing):
    """The host goes on: it waits for no copy before the last ones, and every kernel reads what has come."""
    loaded, empty, path, nbytes = uniform(tmp_path)
    device = carom.SimulatedDevice(timing=timing)
    x = torch.ones(1, 64)
    expected = loaded(x)
    with (
        carom.stream(empty, device=device, vram=30 * BLOCK, weights=path, ram=2 * nbytes) as session,
        torch.no_grad(),
    ):
        for _ in range(2):
            assert torch.equal(empty(x), expected)
            session.park(keep=True)
        engine = inside(session).engine
        synchronize, early = engine.synchronize, []
        session.unpark()
        residents = inside(session).placement.tier.residents

        def noted(event: Any = None) -> None:
            early.append(residents.waiting)
            synchronize(event)

        engine.synchronize = noted
        assert torch.equal(empty(x), expected)
        assert early and not any(early), (
            "the host waits once all copies are issued, and gives the buffers back"
        )
        del engine.synchronize
        other = threading.Thread(target=lambda: found.append(empty(x)))
        found: list[torch.Tensor] = []
        other.start()
        other.join()
        assert torch.equal(found[0], expected)
