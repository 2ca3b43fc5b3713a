"""Memory under WDDM: what DXGI says bounds pins and the card's memory, and an overrun of the card is reported."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from carom.core.common.memory_snapshot import Memory
from carom.core.common.sizes import GIB, MIB
from carom.core.device import dxgi, stream_engine, system_pinner, video_memory, wddm
from carom.core.device.stream_engine import StreamEngine
from carom.core.device.wddm import SHARED_LEFT, Segment
from carom.core.host.arena import HostArena, Pinner
from carom.core.host.pin_limit import ALL_PINNED
from carom.core.session import settings
from carom.tools.doctor import hardware
from tests_fake_dxgi import Card, FakeDxgi

DEVICE = torch.device("cuda", 0)
NAME = "NVIDIA GeForce RTX 4090"


@pytest.fixture
def windows(monkeypatch):
    """Let this be Windows with one card, which torch calls `NAME`. Returns a function that takes the cards of DXGI."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(name=NAME))
    for module in (video_memory, system_pinner, stream_engine, settings):
        monkeypatch.setattr(module, "on_windows", lambda: True)

    def machine(*cards: Card) -> FakeDxgi:
        video_memory._find.cache_clear()
        fake = FakeDxgi(list(cards))
        monkeypatch.setattr(ctypes, "WinDLL", fake.library, raising=False)
        return fake

    yield machine
    video_memory._find.cache_clear()


# -- the rules


@pytest.mark.parametrize(
    ("shared", "pinned", "physical", "most"),
    [
        (None, 0, 64 * GIB, int(0.4 * 64 * GIB)),
        (None, 9 * GIB, 64 * GIB, int(0.4 * 64 * GIB)),
        (Segment(0, 0), 0, 64 * GIB, int(0.4 * 64 * GIB)),
        (Segment(31 * GIB, 0), 0, 64 * GIB, 31 * GIB - SHARED_LEFT),
        (Segment(31 * GIB, 11 * GIB), 10 * GIB, 64 * GIB, 30 * GIB - SHARED_LEFT),
        (Segment(31 * GIB, 0), 10 * GIB, 64 * GIB, 31 * GIB - SHARED_LEFT),
        (Segment(5 * GIB, 11 * GIB), 10 * GIB, 64 * GIB, 4 * GIB - SHARED_LEFT),
        (Segment(5 * GIB, 11 * GIB), 1 * GIB, 64 * GIB, 0),
    ],
    ids=[
        "DXGI is silent", "DXGI is silent, pinned", "an integrated GPU", "at first", "pins and other bytes in use",
        "a driver that does not count pins", "the budget fell", "the budget fell below what others use",
    ],
)  # fmt: skip
def test_the_limit_of_pins_is_what_windows_lends_now(shared, pinned, physical, most):
    assert wddm.pin_limit(shared, pinned, physical).nbytes == most


@pytest.mark.parametrize(
    ("free", "local", "room"),
    [(6 * GIB, None, 6 * GIB), (6 * GIB, Segment(7 * GIB, 2 * GIB), 5 * GIB), (1 * GIB, Segment(7 * GIB, 2 * GIB), 1 * GIB),
     (6 * GIB, Segment(1 * GIB, 2 * GIB), 0)],
)  # fmt: skip
def test_the_card_has_as_much_room_as_the_desktop_leaves(free, local, room):
    assert wddm.room(free, local) == room


@pytest.mark.parametrize("free", [0, 1, 500 * MIB, GIB, 8 * GIB, 24 * GIB])
def test_weights_leave_the_desktop_some_of_the_card(free):
    room = wddm.weights_room(free)
    assert free // 2 <= room <= 0.95 * free + 1
    if free >= 2 * wddm.DESKTOP:
        assert free - room >= wddm.DESKTOP


@pytest.mark.parametrize(
    ("reserved", "local", "found"),
    [
        (6 * GIB, None, 0),
        (6 * GIB, Segment(7 * GIB, 0), 0),
        (6 * GIB, Segment(7 * GIB, 6 * GIB + 400 * MIB), 0),
        (9 * GIB, Segment(7 * GIB, 7 * GIB), 2 * GIB),
    ],
    ids=["DXGI is silent", "a driver that counts nothing", "all on the card", "beyond the card"],
)
def test_device_memory_that_the_cards_usage_does_not_contain_lies_in_host_memory(reserved, local, found):
    assert wddm.in_host_memory(reserved, local) == found


# -- what is read from Windows


def test_the_memory_of_each_adapter_is_read_and_what_is_not_kept_is_released(windows):
    fake = windows(
        Card("AMD Radeon(TM) Graphics", dedicated=512 * MIB, luid=b"abcdefgh"),
        Card(NAME, 24 * GIB, (23 * GIB, 2 * GIB), (31 * GIB, 5 * GIB), b"12345678"),
        Card("Microsoft Basic Render Driver", windows_10=False),
    )
    found = dxgi.adapters()
    assert [(one.name, one.dedicated, one.luid) for one in found] == [
        ("AMD Radeon(TM) Graphics", 512 * MIB, b"abcdefgh"),
        (NAME, 24 * GIB, b"12345678"),
    ]
    assert fake.references == len(found)
    assert found[1].local() == Segment(23 * GIB, 2 * GIB) and found[1].shared() == Segment(31 * GIB, 5 * GIB)


def test_a_card_is_found_by_its_luid_else_by_its_name(windows):
    windows(Card(NAME, luid=b"12345678"), Card(NAME, luid=b"87654321"), Card("Intel(R) UHD Graphics"))
    found = dxgi.adapters()
    assert dxgi.matching(found, NAME, b"87654321") == found[1]
    assert dxgi.matching(found, NAME, None) == found[0]
    assert dxgi.matching(found, NAME, b"abcdefgh") is None and dxgi.matching(found, "NVIDIA L4", None) is None


@pytest.mark.parametrize("cards", [(), (Card("Intel(R) UHD Graphics"),), (Card(NAME, windows_10=False),)])
def test_without_an_answer_of_dxgi_40_percent_are_the_limit(windows, cards):
    windows(*cards)
    limit = system_pinner.windows_limit(DEVICE, 0)
    assert limit.nbytes == pytest.approx(0.4 * wddm_total(), abs=1) and "40 %" in limit.reason


def wddm_total() -> int:
    return system_pinner.psutil.virtual_memory().total


def test_on_other_systems_nothing_is_asked_and_no_pin_is_limited(monkeypatch):
    for module in (video_memory, system_pinner):
        monkeypatch.setattr(module, "on_windows", lambda: False)
    monkeypatch.setattr(system_pinner, "is_wsl", lambda: False)
    monkeypatch.setattr(dxgi, "adapters", lambda: pytest.fail("asked"))
    registering = Pinner(lambda address, size: None, lambda address: None)
    assert video_memory.local_memory(DEVICE) is None
    assert system_pinner.system_pinner(registering, DEVICE, lambda: None) is registering


def test_the_limit_is_read_again_for_each_pin(windows, monkeypatch):
    card = Card(NAME, shared=(SHARED_LEFT, 0))
    windows(card)
    monkeypatch.setattr(system_pinner, "_ways", {})
    monkeypatch.setattr(system_pinner, "runtime_library", lambda: None)
    registered: set[int] = set()
    registering = Pinner(lambda address, size: registered.add(address), registered.discard)
    arena = HostArena(system_pinner.system_pinner(registering, DEVICE, lambda: None), None)
    block = arena.allocate(1 << 20)
    assert (
        not arena.pin(block) and "shared GPU memory" in arena.notes[0] and "RAM budget" not in arena.notes[0]
    )
    card.shared = (SHARED_LEFT + ALL_PINNED.nbytes + (1 << 20), ALL_PINNED.nbytes)
    assert arena.pin(block) and registered == {block.data.data_ptr()}


def engine_of(reserved: int, free: int, total: int) -> Any:
    """A `StreamEngine` over a stand-in of torch.cuda."""
    engine: Any = object.__new__(StreamEngine)
    engine.device, engine.shares_host = DEVICE, False
    stats = {"reserved_bytes.all.current": reserved, "allocated_bytes.all.current": reserved}
    engine._api = SimpleNamespace(
        mem_get_info=lambda device: (free, total), memory_reserved=lambda device: reserved,
        memory_allocated=lambda device: reserved, memory_stats=lambda device: stats,
    )  # fmt: skip
    return engine


def test_free_memory_of_the_card_is_what_windows_leaves_to_this_process(windows):
    # Another program has taken 3 GiB since, which the driver does not report.
    windows(Card(NAME, 8 * GIB, local=(4 * GIB, 1 * GIB)))
    engine = engine_of(GIB, 6 * GIB, 8 * GIB)
    assert engine.free_bytes() == 3 * GIB
    memory = engine.memory()
    assert (memory.free, memory.total, memory.in_host_memory) == (3 * GIB, 4 * GIB, 0)
    assert hardware.room_on_card(DEVICE, 6 * GIB) == 3 * GIB


def test_memory_of_the_card_is_not_free_while_bytes_in_host_memory_have_to_return_there(windows):
    windows(Card(NAME, 8 * GIB, local=(7 * GIB, 6 * GIB)))
    memory = engine_of(7 * GIB, 2 * GIB, 8 * GIB).memory()
    assert (memory.free, memory.in_host_memory) == (0, GIB)


def test_an_integrated_gpu_uses_shared_memory_as_its_own(windows, monkeypatch):
    windows(Card(NAME, 512 * MIB, local=(400 * MIB, 100 * MIB), shared=(16 * GIB, GIB)))
    monkeypatch.setattr(torch.version, "hip", "7.2")
    host = SimpleNamespace(free=20 * GIB, usable=14 * GIB)
    monkeypatch.setattr(stream_engine, "host_memory", lambda: host)
    engine = engine_of(GIB, 18 * GIB, 20 * GIB)
    engine.shares_host = True
    assert engine.free_bytes() == 15 * GIB + 300 * MIB
    memory = engine.memory()
    assert (memory.free, memory.in_host_memory) == (14 * GIB, 0)


def test_the_report_says_when_device_memory_lies_in_host_memory(windows):
    card = Card(NAME, 8 * GIB, local=(7 * GIB, 7 * GIB), shared=(16 * GIB, 4 * GIB))
    windows(card)
    (note,) = settings.full_device_notes(engine_of(10 * GIB, 0, 8 * GIB))
    assert "3.00 GiB" in note and "host's memory" in note
    card.local = (7 * GIB, 6 * GIB)
    assert settings.full_device_notes(engine_of(5 * GIB, GIB, 8 * GIB)) == ()
    engine: Any = SimpleNamespace(memory=lambda: Memory(1, 1))
    assert settings.full_device_notes(engine) == ()
