"""Pinned memory on Windows and WSL: ways that are tried in order, and limits that are found by a trial."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import carom
import numpy as np
import pytest
import torch
from carom.core.common.huge_pages import PAGE
from carom.core.common.sizes import MIB
from carom.core.device import pin_ways, stream_engine, system_pinner, wsl_pins
from carom.core.device.simulated import SimulatedEngine
from carom.core.host.arena import HostArena, Pinner
from carom.core.host.pin_limit import ALL_PINNED, PinLimit
from carom.nodes import shared_ram
from carom.tools.doctor import hardware

DEVICE = torch.device("cuda", 0)
NAMES = ["registration of heap memory", "registration of a section", "allocation by the driver"]


class Runtime:
    """A CUDA runtime. ``refuses``: the names of ways that it refuses."""

    def __init__(self, *refuses: str) -> None:
        self.refuses = refuses
        self.registered: set[int] = set()
        self.allocated: dict[int, Any] = {}
        self.tried: list[str] = []
        self.cleared = 0
        self.registering = Pinner(self._register, self.registered.discard)
        self._next_kind = ""

    def ways(self, library: bool = True) -> pin_ways.PinWays:
        driver = pin_ways.driver_pinner(self._library(), "cuda", self._clear) if library else None
        made = pin_ways.ways(self.registering, driver)
        return pin_ways.PinWays([self._watched(way) for way in made])

    def _watched(self, way: pin_ways.PinWay) -> pin_ways.PinWay:
        def allocate(nbytes: int) -> memoryview:
            self._next_kind = way.name
            self.tried.append(way.name)
            return made(nbytes)

        made = way.pinner.allocate
        return pin_ways.PinWay(way.name, pin_ways.replace(way.pinner, allocate=allocate))

    def _register(self, address: int, size: int) -> str | None:
        if self._next_kind in self.refuses:
            return "error 801 (cudaErrorNotSupported)"
        assert address % PAGE == 0 and size % PAGE == 0
        self.registered.add(address)
        return None

    def _clear(self) -> None:
        self.cleared += 1

    def _library(self) -> Any:
        def allocate(result: int, nbytes: int, flags: int) -> int:
            if NAMES[2] in self.refuses:
                return 2
            memory = (ctypes.c_ubyte * (nbytes + PAGE))()
            ctypes.memset(memory, 0xFF, nbytes + PAGE)
            address = ctypes.addressof(memory) + -ctypes.addressof(memory) % PAGE
            self.allocated[address] = memory
            ctypes.c_void_p.from_address(result).value = address
            return 0

        def free(address: int) -> int:
            del self.allocated[address]
            return 0

        class Function:
            def __init__(self, call: Callable[..., int]) -> None:
                self.call = call

            def __call__(self, *arguments: Any) -> int:
                return self.call(*arguments)

        return SimpleNamespace(cudaHostAlloc=Function(allocate), cudaFreeHost=Function(free))


@pytest.fixture(autouse=True)
def small_trials(monkeypatch):
    monkeypatch.setattr(pin_ways, "TRIAL_BYTES", MIB)


@pytest.mark.parametrize("works", range(3), ids=NAMES)
def test_the_first_way_that_works_is_used_and_each_is_tried_once(works):
    runtime = Runtime(*NAMES[:works])
    ways = runtime.ways()
    for _ in range(2):
        assert ways.pinner().allocates_pinned is (works == 2)
    assert runtime.tried == NAMES[: works + 1] and not runtime.registered
    trials = ways.trials()
    assert runtime.tried == NAMES and [trial.name for trial in trials] == NAMES
    assert [trial.refusal is None for trial in trials] == [index >= works for index in range(3)]
    assert all((trial.rate > 0) is (trial.refusal is None) for trial in trials)
    gc.collect()
    assert not runtime.allocated


@pytest.mark.parametrize("library", [True, False], ids=["all refuse", "the runtime is not found"])
def test_where_nothing_can_be_pinned_everything_streams_from_pageable_memory(monkeypatch, library):
    runtime, made = Runtime(*NAMES), SimulatedEngine.__init__
    pinner = runtime.ways(library).pinner()

    def without_pins(self, config) -> None:
        made(self, config)
        self.pinner = pinner

    monkeypatch.setattr(SimulatedEngine, "__init__", without_pins)
    net, x = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6))), torch.ones(2, 64)
    with torch.no_grad():
        expected = net(x)
        with carom.stream(net, device=carom.SimulatedDevice(), vram=3 * 4 * 65 * 64) as session:
            assert torch.equal(net(x), expected)
            report = session.report()
    assert report.pinned_bytes == 0 and report.pageable_bytes > 0
    (note,) = [note for note in report.notes if "pinning was refused" in note]
    assert all(name in note for name in NAMES[: 3 if library else 2]) and "pageable" in note


def test_heap_memory_is_zeroed_and_begins_at_a_page():
    for nbytes in (1, PAGE, 3 * MIB + 5):
        memory = np.frombuffer(pin_ways.allocate_heap(nbytes), np.uint8)
        assert memory.nbytes == nbytes and memory.ctypes.data % PAGE == 0 and not memory.any()


def test_memory_that_the_driver_allocates_is_counted_until_it_is_freed():
    runtime = Runtime(*NAMES[:2])
    before = ALL_PINNED.nbytes
    arena = HostArena(runtime.ways().pinner(), 3 * PAGE)
    block = arena.allocate(2 * PAGE - 7)
    assert block.data.numel() == 2 * PAGE - 7 and not block.data.any() and not block.pinned
    assert arena.pinned_bytes == 2 * PAGE, "it is pinned already"
    assert arena.pin(block) and block.registered_bytes == 2 * PAGE and arena.pinned_peak_bytes == 2 * PAGE
    beyond = arena.allocate(2 * PAGE)  # beyond the limit: pageable
    assert not arena.pin(beyond) and "RAM budget" in arena.notes[0] and arena.pinned_bytes == 2 * PAGE
    data = block.data
    block.unpin()
    assert arena.pinned_bytes == 2 * PAGE and len(runtime.allocated) == 1 and not data.any()
    del block, data
    gc.collect()
    assert arena.pinned_bytes == 0 and ALL_PINNED.nbytes == before and not runtime.allocated
    assert arena.pin(arena.allocate(2 * PAGE))
    gc.collect()
    runtime.refuses = tuple(NAMES)
    refused = arena.allocate(PAGE)
    assert arena.pinned_bytes == 0 and ALL_PINNED.nbytes == before
    assert not arena.pin(refused) and "the driver allocates no more" in arena.notes[-1]


def test_memory_of_the_driver_is_not_freed_at_exit_where_it_may_be_in_use_still(monkeypatch):
    made = []

    class Recorded(weakref.finalize):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(pin_ways.weakref, "finalize", Recorded)
    runtime = Runtime(*NAMES[:2])
    memory = runtime.ways().pinner().allocate(PAGE)
    assert made and not any(one.atexit for one in made if one.alive) and len(runtime.allocated) == 1
    del memory
    gc.collect()
    assert not runtime.allocated


def test_a_session_streams_from_memory_that_the_driver_allocates(monkeypatch):
    runtime, made = Runtime(*NAMES[:2]), SimulatedEngine.__init__
    pinner = runtime.ways().pinner()

    def with_driver_memory(self, config) -> None:
        made(self, config)
        self.pinner = pinner

    monkeypatch.setattr(SimulatedEngine, "__init__", with_driver_memory)
    net, x = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6))), torch.ones(2, 64)
    with torch.no_grad():
        expected = net(x)
        with carom.stream(net, device=carom.SimulatedDevice(), vram=3 * 4 * 65 * 64) as session:
            assert torch.equal(net(x), expected)
            report = session.report()
            assert report.pinned_bytes > 0 and report.pageable_bytes == 0
        assert torch.equal(net(x), expected)


# -- WSL


class WslDriver:
    """A driver that pins ``most`` bytes, and keeps an error after a refusal until it is cleared."""

    def __init__(self, most: int) -> None:
        self.most, self.registered, self.peak = most, dict[int, int](), 0
        self.pinner = Pinner(self._register, self.registered.pop)

    def _register(self, address: int, size: int) -> str | None:
        if sum(self.registered.values()) + size > self.most:
            return "error 2 (cudaErrorMemoryAllocation)"
        self.registered[address] = size
        self.peak = max(self.peak, sum(self.registered.values()))
        return None


@pytest.fixture
def small_steps(monkeypatch):
    monkeypatch.setattr(wsl_pins, "STEP", MIB)


@pytest.mark.parametrize(
    ("most", "room", "limit"),
    [(4.5, 100, 3), (3, 100, 2), (0, 100, 0), (6, 100, None), (4.5, 3, None)],
    ids=["between steps", "at a step", "nothing", "more than is tried", "little memory"],
)
def test_the_limit_of_wsl_is_found_by_a_trial(small_steps, most, room, limit):
    driver = WslDriver(int(most * MIB))
    found = wsl_pins.find_pin_limit(driver.pinner, room * MIB)
    assert (found and found.nbytes) == (limit if limit is None else limit * MIB)
    assert not driver.registered and driver.peak <= 6 * MIB
    assert found is None or "WSL" in found.reason


def test_on_wsl_the_trial_is_made_once_and_bounds_all_pins(small_steps, monkeypatch):
    monkeypatch.setattr(system_pinner, "on_windows", lambda: False)
    monkeypatch.setattr(system_pinner, "is_wsl", lambda: True)
    monkeypatch.setattr(system_pinner, "_wsl_limits", {})
    driver = WslDriver(3 * MIB)
    system_pinner.system_pinner(driver.pinner, DEVICE, lambda: None)
    assert driver.peak == 3 * MIB
    driver.peak = 0
    pinner = system_pinner.system_pinner(driver.pinner, DEVICE, lambda: None)
    assert driver.peak == 0
    arena = HostArena(pinner, None)
    blocks = [arena.allocate(MIB) for _ in range(3)]
    limit = 2 * MIB - ALL_PINNED.nbytes
    assert [arena.pin(block) for block in blocks] == [True] * (limit // MIB) + [False] * (3 - limit // MIB)
    assert "WSL" in arena.notes[0] and driver.peak <= 2 * MIB


def test_suspended_models_give_up_pins_where_the_system_allows_too_few(monkeypatch):
    monkeypatch.setattr(system_pinner, "on_windows", lambda: False)
    monkeypatch.setattr(system_pinner, "_wsl_limits", {DEVICE: PinLimit(ALL_PINNED.nbytes, "WSL")})

    class Suspended:
        gave = False

        def give_up_pins(self) -> None:
            self.gave = True

    model = Suspended()
    monkeypatch.setattr(shared_ram, "suspended_models", {model: None})
    monkeypatch.setattr(shared_ram.comfyui_api, "pin_room", lambda: 1 << 60)
    shared_ram.make_pin_room(MIB, torch.device("cuda", 1))
    assert not model.gave, "that device has no limit"
    shared_ram.make_pin_room(MIB, DEVICE)
    assert model.gave


def test_the_pinner_of_a_runtime_on_windows_uses_the_way_that_works(monkeypatch):
    class Cudart:
        def __init__(self) -> None:
            self.sizes: list[int] = []

        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            self.sizes.append(size)
            return 0

        def cudaHostUnregister(self, address: int) -> int:
            return 0

    runtime = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(system_pinner, "on_windows", lambda: True)
    monkeypatch.setattr(system_pinner, "_ways", {})
    monkeypatch.setattr(system_pinner, "runtime_library", lambda: None)
    monkeypatch.setattr(stream_engine, "_wait_at_exit", lambda device: None)
    for _ in range(2):
        pinner = stream_engine.runtime_pinner(DEVICE)
    assert runtime.sizes == [MIB], "one trial"
    assert pinner.allocate is pin_ways.allocate_heap
    limit = pinner.limit(0)
    assert limit is not None and "40 %" in limit.reason
    trials, limit = hardware.pinning(DEVICE)
    assert [trial.refusal for trial in trials] == [None, None] and limit is not None
    assert runtime.sizes == [MIB, MIB], "a trial of the second way, for `carom doctor`"
