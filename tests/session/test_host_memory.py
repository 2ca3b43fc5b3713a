"""ram="auto" with weights from files: the cache gives way when host memory runs short, comes back, and never changes a result."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import carom
import pytest
import tests_disk_harness as disk
import torch
from carom.core.budget.host_governor import QUIET
from carom.core.budget.host_governor import HostGovernor as Follower
from carom.core.checkpoint import spill_file
from carom.core.host import probe
from carom.core.session import settings as settings_of_sessions
from carom.core.session.policies import host_memory
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tests_inside import inside
from tests_limits import pack_small_weights, units_apart_from
from torch import nn

GB = 10**9


def test_it_gives_way_at_once_and_rises_after_quiet_readings_only():
    follower = Follower(first=10 * GB, keep=2 * GB)
    assert follower.read(2 * GB, 10 * GB, 10 * GB, GB) is None, "as it began"
    assert follower.read(GB // 2, 10 * GB, 10 * GB, GB) == 10 * GB - 2 * GB + GB // 2
    seen = [follower.read(6 * GB, 8 * GB, 8 * GB, GB) for _ in range(2 * QUIET)]
    assert seen[:-1] == [None] * (2 * QUIET - 1) and seen[-1] == 10 * GB, "to what it began with, no further"


def test_pressure_that_comes_and_goes_makes_it_settle():
    follower, budget, rises = Follower(10 * GB, 2 * GB), 10 * GB, 0
    for _ in range(2000):
        found = follower.read(6 * GB, budget, budget, GB)
        if found is not None:
            rises += found > budget
            budget = found
            if rises:
                budget = follower.read(0, budget, budget, GB) or budget
        elif budget == 10 * GB:
            budget = follower.read(0, budget, budget, GB) or budget
    assert 0 < rises <= 8


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 40), max_size=80), st.integers(0, 8), st.integers(1, 12))
def test_a_budget_stays_between_the_least_and_the_first(readings, keep, least):
    first = 20
    follower, budget = Follower(first, keep), first
    for free in readings:
        found = follower.read(free, budget, budget, least)
        if found is not None:
            assert least <= found <= first
            assert found < budget or found - budget <= free - keep, "rises only into what is free"
            budget = found


@pytest.fixture
def memory(monkeypatch):
    """Host memory as the test says."""
    found = SimpleNamespace(free=100 * GB, keep=0)
    whole = probe.host_memory()
    monkeypatch.setattr(host_memory, "_SECONDS", 0.0)
    monkeypatch.setattr("carom.core.session.policies.host_memory._STEPS", 0)
    monkeypatch.setattr(host_memory.probe, "host_memory", lambda: found)
    found.usable, found.limit = whole.usable, whole.limit
    return found


@pytest.mark.parametrize("device", ["cpu", "simulated"])
def test_under_pressure_weights_in_memory_move_to_disk(tmp_path, monkeypatch, memory, device):
    loaded, _, _, size = disk.uniform(tmp_path)
    model = copy.deepcopy(loaded).requires_grad_(False)
    folder = tmp_path / "spill"
    monkeypatch.setattr("carom.core.session.settings.ram_budget", lambda value, *_: size)
    memory.keep, memory.free = size // 2, 2 * size
    where = carom.SimulatedDevice() if device == "simulated" else device
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = loaded(x)
        with carom.stream(model, device=where, vram=size // 4, ram="auto", disk=folder) as session:
            for _ in range(3):
                assert torch.equal(model(x), expected)
            assert not folder.exists()
            memory.free = 0  # another program
            for _ in range(3):
                assert torch.equal(model(x), expected)
            report = session.report()
            assert (
                list(folder.glob("carom-spill-*")) and report.ram_peak_bytes <= report.ram_budget_bytes < size
            )
        assert torch.equal(model(x), expected)


def test_under_pressure_with_a_full_disk_weights_stay_in_memory(tmp_path, monkeypatch, memory, caplog):
    loaded, _, _, size = disk.uniform(tmp_path)
    model = copy.deepcopy(loaded).requires_grad_(False)
    monkeypatch.setattr("carom.core.session.settings.ram_budget", lambda value, *_: size)
    monkeypatch.setattr(spill_file.shutil, "disk_usage", lambda folder: SimpleNamespace(free=0))
    memory.keep, memory.free = size // 2, 2 * size
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = loaded(x)
        with carom.stream(model, device="cpu", vram=size // 4, ram="auto", disk=tmp_path / "full") as session:
            for _ in range(3):
                assert torch.equal(model(x), expected)
            memory.free = 0  # another program
            for _ in range(3):
                assert torch.equal(model(x), expected)
            assert inside(session).ram == size
            assert caplog.text.count("cannot move to disk") == 1
            assert not list((tmp_path / "full").iterdir())


@pytest.mark.parametrize("device", ["cpu", "simulated"])
def test_the_cache_of_a_session_gives_way_and_comes_back(tmp_path, monkeypatch, memory, device):
    loaded, empty, path, size = disk.uniform(tmp_path)
    monkeypatch.setattr("carom.core.session.settings.ram_budget", lambda value, *_: size)
    memory.keep = size
    memory.free = 2 * size  # as much again as the budget
    where = carom.SimulatedDevice() if device == "simulated" else device
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = loaded(x)
        with carom.stream(empty, device=where, vram=size // 4, ram="auto", weights=path) as session:
            for _ in range(3):
                assert torch.equal(empty(x), expected)
            assert inside(session).ram == size
            memory.free = size // 4  # another program
            assert torch.equal(empty(x), expected)
            memory.free = size  # what the cache gave is there again
            for _ in range(2):
                assert torch.equal(empty(x), expected)
            report = session.report()
            assert (
                report.ram_budget_bytes < size // 2 and 0 < report.ram_peak_bytes <= report.ram_budget_bytes
            )
            memory.free = 3 * size
            for _ in range(6 * QUIET):
                assert torch.equal(empty(x), expected)
            assert inside(session).ram == size
            session.set_budget(ram=size // 2)
            memory.free = 0
            for _ in range(3):
                assert torch.equal(empty(x), expected)
            assert inside(session).host_memory.governor is None, "a budget in bytes follows nothing"


def test_however_short_memory_is_the_cache_keeps_pieces_that_are_worth_reading(tmp_path, monkeypatch, memory):
    """A cache of two pages reads a model in pages, and describes more pieces than it has bytes."""
    loaded, empty, path, size = disk.uniform(tmp_path)
    monkeypatch.setattr("carom.core.session.settings.ram_budget", lambda value, *_: size)
    memory.keep, memory.free = size, 2 * size
    x = torch.ones(2, 64)
    with torch.no_grad():
        expected = loaded(x)
        with carom.stream(empty, device="cpu", vram=size // 4, ram="auto", weights=path) as session:
            for _ in range(2):
                assert torch.equal(empty(x), expected)
            memory.free = 0
            for _ in range(3):
                assert torch.equal(empty(x), expected)
            report = session.report()
            streamed = sum(unit.wire_bytes for unit in inside(session).streamed)
            assert report.ram_budget_bytes == streamed // 32


def test_under_pressure_the_cache_keeps_what_its_smaller_budget_holds(tmp_path, monkeypatch, memory):
    loaded, empty, _, size = disk.uniform(tmp_path)
    path = disk.save(loaded, tmp_path, packed=True)
    drive = disk.Drive(monkeypatch)
    monkeypatch.setattr("carom.core.session.settings.ram_budget", lambda value, *_: size)
    memory.keep, memory.free = size, 2 * size
    x = torch.ones(1, 64)
    with torch.no_grad():
        expected = loaded(x)
        with carom.stream(empty, device="cpu", vram=size // 4, ram="auto", weights=path) as session:
            for _ in range(3):
                assert torch.equal(empty(x), expected)
            streamed = sum(unit.wire_bytes for unit in inside(session).streamed)
            drive.fresh()
            memory.free = int(0.45 * size)  # another program takes memory between two steps
            assert torch.equal(empty(x), expected)
            memory.free = size
            ram = inside(session).ram
            assert ram < size // 2
            drive.fresh()
            reader = inside(session).placement.tier.reads.cache._reader
            assert reader.stats().from_memory >= ram // 2, "what RAM still held is not read again"
            assert torch.equal(empty(x), expected)
            assert drive.fresh() >= (streamed - ram) // 2, "now the drive is needed in every pass"
            memory.free = 3 * size
            for _ in range(6 * QUIET):
                assert torch.equal(empty(x), expected)
            assert inside(session).ram == size
            drive.fresh()
            assert torch.equal(empty(x), expected) and drive.fresh() == 0, "all of it is back in RAM"


def test_what_a_parked_session_keeps_goes_before_the_cache_in_use(tmp_path, monkeypatch, memory):
    loaded, empty, path, size = disk.uniform(tmp_path)
    with torch.device("meta"):
        other = type(empty)()
    monkeypatch.setattr("carom.core.session.settings.ram_budget", lambda value, *_: size)
    memory.keep, memory.free = size, 3 * size
    x = torch.ones(1, 64)
    with torch.no_grad():
        expected = loaded(x)
        with (
            carom.stream(other, device="cpu", vram=size // 4, ram="auto", weights=path) as parked,
            carom.stream(empty, device="cpu", vram=size // 4, ram="auto", weights=path) as session,
        ):
            for model in (other, empty):
                for _ in range(3):
                    assert torch.equal(model(x), expected)
            parked.park()
            kept = inside(parked).manager.host.kept
            assert kept.nbytes > 0
            memory.free = size // 4
            assert torch.equal(empty(x), expected)
            assert kept.nbytes < size // 2
            assert inside(session).ram == size
            memory.free = 3 * size
            assert torch.equal(other(x), expected)


def test_weights_that_are_in_host_memory_alone_follow_nothing():
    with carom.stream(torch.nn.Linear(8, 8), device="cpu", vram=0 + 4096, ram="auto") as session:
        assert inside(session).host_memory.governor is None


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(128, 128) for _ in range(8))
        self.requires_grad_(False)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


UNIT = 68 << 10  # bytes of a block, pinned
X = torch.linspace(-1, 1, 256).reshape(2, 128)


def run(net):
    with torch.no_grad():
        return net(X)


def test_copies_of_what_is_resident_go_and_what_streams_stays_pinned(monkeypatch, memory):
    net, size = Net(), 12 * UNIT
    expected = run(net)
    monkeypatch.setattr("carom.core.session.settings.ram_budget", lambda value, *_: size)
    units_apart_from(monkeypatch)
    memory.keep, memory.free = 4 * UNIT, 8 * UNIT
    with carom.stream(
        net, device=carom.SimulatedDevice(timing="random"), vram=3 * UNIT, granularity="layer"
    ) as session:
        run(net)
        session.set_budget(vram=5 * UNIT)
        kept = inside(session).pinned_bytes
        streams = sum(unit.block.registered_bytes for unit in inside(session).placement.streamed)
        assert kept > streams, "units that came to stay have copies on the host"
        memory.free = 0
        for _ in range(3):
            assert torch.equal(run(net), expected)
        assert inside(session).pinned_bytes == streams
        assert all(unit.block.pinned for unit in inside(session).placement.streamed)
        session.set_budget(vram=3 * UNIT)
        assert torch.equal(run(net), expected)
    assert torch.equal(run(net), expected)


def test_a_packed_copy_beside_plain_weights_goes(monkeypatch, memory):
    net, size = Net().to(torch.bfloat16), 8 * UNIT
    x = X.to(torch.bfloat16)
    with torch.no_grad():
        expected = net(x)
    monkeypatch.setattr("carom.core.session.settings.ram_budget", lambda value, *_: size)
    pack_small_weights(monkeypatch, 1024, ratio=None)
    memory.keep, memory.free = 4 * UNIT, 8 * UNIT
    with torch.no_grad(), carom.stream(
        net, device=carom.SimulatedDevice(), vram=3 * UNIT, codec="lossless", host="raw"
    ) as session:  # fmt: skip
        assert torch.equal(net(x), expected)
        assert any(unit.packed for unit in inside(session).streamed)
        memory.free = UNIT
        assert torch.equal(net(x), expected)
        assert not any(unit.packed for unit in inside(session).streamed)
        assert torch.equal(net(x), expected)


def test_a_container_counts():
    one = probe.HostMemory(
        64 * GB, 60 * GB, 8 * GB, "the cgroup", 0, 8 * GB, 7 * GB, None, 0, 0, False, False
    )  # fmt: skip
    assert one.free == GB and one.keep == max(probe.KEEP_LEAST, int(0.8 * GB))


@pytest.mark.parametrize("follows", [False, True], ids=["fixed vram", "vram that follows what passes leave"])
def test_host_memory_is_looked_at_whatever_else_a_session_follows(monkeypatch, follows):
    monkeypatch.setattr("carom.core.session.policies.host_memory._SECONDS", 0.0)
    looked, read = [], probe.host_memory
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))).requires_grad_(False)
    with carom.stream(net, device=carom.SimulatedDevice(), vram=3 * 64 * 65 * 4, codec="raw") as session:
        if follows:
            session.follow_room()
        monkeypatch.setattr(probe, "host_memory", lambda: looked.append(1) or read())
        with torch.no_grad():
            for _ in range(60):
                net(torch.ones(1, 64))
    # Every 16 steps, and where the other policy changes the layout, too.
    assert 2 <= len(looked) <= (8 if follows else 6)


@pytest.mark.parametrize("device", ["cpu", "simulated"])
def test_auto_counts_the_modules_own_weights(tmp_path, monkeypatch, device):
    """A model that fills the memory is not moved to disk: pinned memory replaces what it has already."""
    loaded, _, _, size = disk.uniform(tmp_path)
    model, folder = copy.deepcopy(loaded).requires_grad_(False), tmp_path / "spill"
    free = SimpleNamespace(free=size // 8, usable=size // 8, keep=0, limit=2 * size)
    monkeypatch.setattr(settings_of_sessions, "host_memory", lambda: free)
    where = carom.SimulatedDevice() if device == "simulated" else device
    with torch.no_grad(), carom.stream(model, device=where, vram=size // 4, disk=folder) as session:
        report = session.report()
        assert not folder.exists() and report.waiting_bytes > 0.7 * size
        if device == "simulated":
            assert report.pinned_bytes >= report.waiting_bytes
        for _ in range(2):  # in the session the weights are there still
            session.set_budget(ram="auto")
            assert not folder.exists()
            assert inside(session).ram >= report.waiting_bytes
        model(torch.randn(2, 64))
        session.park()
        session.set_budget(ram="auto")
        assert inside(session).ram >= 0.8 * size


def test_auto_again_leaves_the_cache_of_a_file_what_it_has(tmp_path, monkeypatch):
    loaded, empty, path, size = disk.uniform(tmp_path)
    free = SimpleNamespace(free=size // 2, usable=size // 2, keep=0, limit=2 * size)
    monkeypatch.setattr(settings_of_sessions, "host_memory", lambda: free)
    with torch.no_grad(), carom.stream(empty, device="cpu", vram=size // 4, weights=path) as session:
        session.module(torch.randn(2, 64))
        held = session.report().ram_peak_bytes
        assert held > size // 4
        free.free = free.usable = size // 2 - held
        session.set_budget(ram="auto")
        assert inside(session).ram >= held


def test_auto_does_not_count_views_of_a_file(tmp_path, monkeypatch):
    """The system has their memory available already."""
    loaded, empty, path, size = disk.uniform(tmp_path)
    empty.load_state_dict(load_file(path), assign=True)
    free = SimpleNamespace(free=size // 2, usable=size // 2, keep=0, limit=2 * size)
    monkeypatch.setattr(settings_of_sessions, "host_memory", lambda: free)
    with torch.no_grad(), carom.stream(empty.requires_grad_(False), device="cpu", vram=size // 4) as session:
        assert inside(session).ram <= size // 2
