"""RAM on Windows is bounded by what is available and by the commit limit, never by the limit of pinned memory."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import sys
from collections.abc import Callable
from typing import Any

import carom
import pytest
import torch
from carom.core.common import commit_memory
from carom.core.common.sizes import GIB
from carom.core.device.simulated import SimulatedEngine
from carom.core.host import probe
from carom.core.host.arena import HostArena, Pinner
from carom.core.host.pin_limit import ALL_PINNED, PinLimit
from carom.core.session import settings
from carom.core.session.session import Session
from carom.core.session.stream_settings import StreamSettings

PAGE = 1 << 16


@pytest.fixture
def windows(monkeypatch) -> Callable[..., None]:
    """Let GlobalMemoryStatusEx answer as on a Windows machine."""

    def answer(total: float, available: float, commit_left: float, pagefile: float = 8 * GIB) -> None:
        class Kernel32:
            @staticmethod
            def GlobalMemoryStatusEx(reference: Any) -> int:
                status = reference._obj
                assert status.dwLength == 64, "Windows refuses a structure of another size"
                status.ullTotalPhys, status.ullAvailPhys = int(total), int(available)
                status.ullTotalPageFile, status.ullAvailPageFile = int(total + pagefile), int(commit_left)
                return 1

        memory = probe.psutil.virtual_memory()._replace(total=int(total), available=int(available))
        monkeypatch.setattr(ctypes, "WinDLL", lambda name, **_: Kernel32, raising=False)
        monkeypatch.setattr(probe.psutil, "virtual_memory", lambda: memory)
        monkeypatch.setattr(probe, "on_windows", lambda: True)
        monkeypatch.setattr(probe, "cgroup_memory", lambda: (None, None))

    return answer


@pytest.mark.parametrize(
    ("total", "available", "commit_left"),
    [(16, 11, 14), (32, 25, 27), (64, 56, 60), (16, 11, 10.5)],
    ids=["16 GiB", "32 GiB", "64 GiB", "a small page file"],
)
def test_auto_takes_what_it_takes_on_linux(windows, total, available, commit_left):
    linux = probe.usable_memory(total * GIB, available * GIB, None, None)[2]
    on_linux = min(int(0.8 * available * GIB), linux)
    windows(total * GIB, available * GIB, commit_left * GIB)
    assert settings.ram_budget("auto") == pytest.approx(on_linux, rel=0.1)


@pytest.mark.parametrize("commit_left", [0, 1, 3, 8], ids="{} GiB".format)
def test_no_more_is_taken_than_the_commit_limit_leaves(windows, commit_left):
    windows(32 * GIB, 25 * GIB, commit_left * GIB)
    memory = probe.host_memory()
    assert settings.ram_budget("auto") <= commit_left * GIB
    assert memory.free == commit_left * GIB and memory.usable <= memory.free
    assert (memory.commit_limit, memory.commit_left) == (40 * GIB, commit_left * GIB)


def test_disabled_performance_counters_do_not_matter(windows, monkeypatch):
    def refuse() -> None:
        raise RuntimeError("PdhAddEnglishCounterW failed. Performance counters may be disabled.")

    windows(32 * GIB, 25 * GIB, 20 * GIB)
    monkeypatch.setattr(probe.psutil, "swap_memory", refuse)
    memory = probe.host_memory()
    assert (memory.swap_total, memory.swap_used) == (8 * GIB, 0)


def test_without_an_answer_of_windows_the_available_memory_counts(windows, monkeypatch):
    windows(32 * GIB, 25 * GIB, 1 * GIB)
    monkeypatch.delattr(ctypes, "WinDLL")
    assert commit_memory.read_commit() is None
    assert probe.host_memory().free == 25 * GIB


# -- the limit of pins


class Driver:
    """A driver on a system that allows ``most`` pinned bytes."""

    def __init__(self, most: int) -> None:
        self.pinned: dict[int, int] = {}
        self.asked: list[int] = []
        others = ALL_PINNED.nbytes  # tests before this one
        self.most = most
        self.pinner = Pinner(
            lambda address, size: self.pinned.update({address: size}),
            self.pinned.pop,
            lambda pinned: PinLimit(others + self.most, "the system's limit"),
        )


def test_the_limit_of_pins_holds_for_all_arenas_together():
    driver = Driver(5 * PAGE)
    first, second = HostArena(driver.pinner, 4 * PAGE), HostArena(driver.pinner, None)
    blocks = [arena.allocate(2 * PAGE) for arena in (first, first, second, second)]
    assert [first.pin(blocks[0]), second.pin(blocks[2]), first.pin(blocks[1])] == [True, True, False]
    assert not second.has_room(2 * PAGE) and second.has_room(PAGE)
    assert sum(driver.pinned.values()) == 4 * PAGE
    blocks[0].unpin()
    assert second.pin(blocks[3]) and second.pinned_bytes == 4 * PAGE and first.pinned_bytes == 0


def test_a_refused_pin_names_the_limit_that_refused_it():
    driver = Driver(PAGE)
    arena = HostArena(driver.pinner, 8 * PAGE)
    block = arena.allocate(2 * PAGE)
    assert not arena.pin(block)
    (note,) = arena.notes
    assert "the system's limit" in note and "RAM budget" not in note
    arena.begin_layout(PAGE)
    assert not arena.pin(block) and "the RAM budget of" in arena.notes[0]
    arena.begin_layout(PAGE, "the host program's limit of pinned memory")
    assert not arena.pin(block) and "RAM budget" not in arena.notes[0]


def test_a_limit_that_rises_is_followed_and_one_that_falls_frees_other_blocks():
    driver = Driver(PAGE)
    arena = HostArena(driver.pinner, None)
    kept, new = arena.allocate(PAGE), arena.allocate(PAGE)
    assert arena.pin(kept) and not arena.pin(new)
    driver.most = 2 * PAGE
    assert arena.pin(new)
    new.unpin()
    driver.most = PAGE
    asked = []
    arena.reclaim = lambda nbytes: (asked.append(nbytes), kept.unpin())
    assert arena.pin(new) and asked == [PAGE]


def test_a_pin_that_the_driver_refuses_is_not_counted():
    arena = HostArena(Pinner(lambda address, size: "no", lambda address: None), None)
    before = ALL_PINNED.nbytes
    assert not arena.pin(arena.allocate(PAGE)) and ALL_PINNED.nbytes == before


def test_what_may_not_be_pinned_waits_in_pageable_memory(monkeypatch):
    made = SimulatedEngine.__init__

    def limited(self, config) -> None:
        made(self, config)
        most = ALL_PINNED.nbytes + 2 * PAGE
        self.pinner = dataclasses.replace(
            self.pinner, limit=lambda pinned: PinLimit(most, "the system's limit")
        )

    monkeypatch.setattr(SimulatedEngine, "__init__", limited)
    net, x = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(6))), torch.ones(2, 128)
    with torch.no_grad():
        expected = net(x)
        with carom.stream(net, device=carom.SimulatedDevice(), vram=3 * 4 * 129 * 128, ram="1GiB") as session:
            assert torch.equal(net(x), expected)
            report = session.report()
    assert 0 < report.pinned_bytes <= 2 * PAGE and report.pageable_bytes > 0
    assert any("the system's limit" in note for note in report.notes)
    assert not any("RAM budget" in note for note in report.notes)


def test_the_limit_of_a_host_program_bounds_pins_and_not_the_ram():
    net, x = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(6))), torch.ones(2, 128)
    asked = StreamSettings(
        device=carom.SimulatedDevice(), vram=3 * 4 * 129 * 128, ram="1GiB", pins=2 * PAGE, codec="raw"
    )
    with torch.no_grad(), Session(net, asked) as session:
        net(x)
        report = session.report()
    assert 0 < report.pinned_bytes <= 2 * PAGE and report.pageable_bytes > 0
    assert any("the host program's limit of pinned memory" in note for note in report.notes)
    assert not any("RAM budget" in note for note in report.notes)


IN_THE_SHAPE = """
import json, sys, torch, carom
from carom.core.session import settings
from carom.core.host import probe
from carom.nodes import comfyui_api
from safetensors.torch import load_file, save_file

save_file({"w": torch.zeros(1 << 18)}, sys.argv[1])
module = torch.nn.Linear(256, 256, bias=False)
read = torch.nn.Module()
read.w = torch.nn.Parameter(load_file(sys.argv[1])["w"])
memory = probe.host_memory()
print(json.dumps({
    "windows": memory.windows, "total": memory.total, "commit": memory.commit_left,
    "auto": settings.ram_budget("auto"), "ComfyUI": comfyui_api.ram_limit("auto", 0),
    "waiting": settings.waiting_bytes(module), "mapped": settings.waiting_bytes(read),
}))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the shape is made on Linux")
def test_the_budgets_of_a_machine_with_32_gib(windows_python, tmp_path):
    # Total, available, commit limit and what it leaves, in MiB.
    done = windows_python("-c", IN_THE_SHAPE, str(tmp_path / "w"), memory="32768,25600,40960,28672")
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["windows"] and seen["total"] == 32 * GIB and seen["commit"] <= 28 * GIB
    on_linux = probe.usable_memory(32 * GIB, 25 * GIB, None, None)[2]
    assert seen["ComfyUI"] == pytest.approx(on_linux, rel=0.1)
    assert seen["auto"] == pytest.approx(0.8 * 25 * GIB, rel=0.1)
    # What integrated GPUs may take instead: weights in private memory, not those of a mapped file.
    assert (seen["waiting"], seen["mapped"]) == (256 * 256 * 4, 0)
