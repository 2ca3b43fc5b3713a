"""Devices that compute in the host's memory: one budget for both, nothing copied or kept there twice."""

# mypy: disable-error-code="attr-defined,union-attr"

from __future__ import annotations

import types
from dataclasses import replace

import carom
import pytest
import torch
from carom.core.budget.device_governor import Governor, beside, wherever
from carom.core.common.memory_snapshot import Memory, shares_host
from carom.core.common.sizes import GIB
from carom.core.device import stream_engine
from carom.core.device.simulated import SimulatedDevice, SimulatedEngine
from carom.core.device.stream_engine import StreamEngine
from carom.core.host.probe import HostMemory, host_memory
from carom.core.session import settings
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from tests_inside import inside
from tests_limits import units_apart_from
from torch import nn

# -- the rules


@pytest.mark.parametrize(
    ("total", "host_total", "shared"),
    [
        (130663006208, 130663006208, True),  # DGX Spark: the device's total is the system's, to the byte
        (62 * GIB, 125 * GIB, True),  # an APU that may take half of it
        (int(128.5 * GIB), 125 * GIB, True),  # or all of it, and a little that the firmware keeps
        (96 * GIB, 31 * GIB, False),  # an APU whose firmware keeps most of the memory for it
    ],
)
def test_an_integrated_device_that_has_more_than_the_system_has_memory_of_its_own(total, host_total, shared):
    assert shares_host(total, host_total) is shared


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 40))
def test_host_and_device_together_take_what_weights_may_take_and_an_eighth_more_at_most(whole, on_device):
    ram = beside(whole, on_device)
    assert ram >= whole // 8
    assert on_device + ram <= max(whole, on_device + whole // 8)


@given(st.integers(0, 64 * GIB), st.integers(0, 64 * GIB), st.integers(0, 64 * GIB))
def test_giving_way_within_one_memory_is_never_asked_for_and_what_waits_can_be_had(free, waiting, held):
    memory = wherever(Memory(64 * GIB, free), waiting)
    governor = Governor()
    read = [governor.read(memory, held, 0, held + waiting) for _ in range(8)]
    assert all(budget is None or budget > held for budget in read)
    if waiting > 2 * GIB:
        assert max(budget or 0 for budget in read) >= held + waiting - Governor.headroom(memory)


# -- what the engine reads


def device_of(
    monkeypatch, *, integrated: bool, hip: bool, free: int, total: int, host: HostMemory
) -> StreamEngine:
    """A `StreamEngine` over a stand-in of torch.cuda."""
    monkeypatch.setattr(stream_engine, "host_memory", lambda: host)
    monkeypatch.setattr(torch.version, "hip", "7.2" if hip else None)
    engine = object.__new__(StreamEngine)
    engine.device = torch.device("cuda", 0)
    engine._api = types.SimpleNamespace(
        get_device_properties=lambda device: types.SimpleNamespace(
            is_integrated=int(integrated), total_memory=total
        ),
        mem_get_info=lambda device: (free, total),
        memory_reserved=lambda device: 3 * GIB,
        memory_allocated=lambda device: 1 * GIB,
        memory_stats=lambda device: {
            "reserved_bytes.all.current": 3 * GIB, "allocated_bytes.all.current": 1 * GIB,
        },
    )  # fmt: skip
    engine.shares_host = engine._integrated()
    return engine


def a_host(total: int, free: int, usable: int) -> HostMemory:
    bare = replace(host_memory(), total=total, available=free, limit=total, usable=usable)
    return replace(bare, cgroup_limit=None, cgroup_used=None, commit_left=None)


@pytest.mark.parametrize(
    ("integrated", "hip", "free", "total", "shared", "could", "left"),
    [
        (False, False, 20 * GIB, 24 * GIB, False, 20 * GIB, 20 * GIB),
        # CUDA counts the page cache as used: what the system gives up at once can be had.
        (True, False, 9 * GIB, 128 * GIB, True, 100 * GIB, 88 * GIB),
        (True, True, 120 * GIB, 62 * GIB, True, 100 * GIB, 88 * GIB),
        (True, True, 30 * GIB, 62 * GIB, True, 30 * GIB, 30 * GIB),
        (True, True, 200 * GIB, 256 * GIB, False, 200 * GIB, 200 * GIB),
    ],
    ids=["a card", "NVIDIA", "an APU", "an APU with a bound", "an APU with memory of its own"],
)
def test_what_an_integrated_device_has_left_is_what_the_host_has(
    monkeypatch, integrated, hip, free, total, shared, could, left
):
    host = a_host(128 * GIB, 100 * GIB, 88 * GIB)
    engine = device_of(monkeypatch, integrated=integrated, hip=hip, free=free, total=total, host=host)
    assert engine.shares_host is shared
    assert engine.free_bytes() == could + 2 * GIB  # with what torch keeps unused
    memory = engine.memory()
    assert (memory.free, memory.cached) == (left, 2 * GIB)
    assert memory.total == min(total, left + 3 * GIB)


# -- sessions

WIDE, DEPTH = 128, 16
LAYER = WIDE * WIDE * 4  # 64 KiB
ALL = DEPTH * LAYER
X = torch.ones(2, WIDE)


@pytest.fixture
def integrated(monkeypatch):
    """Makes devices that compute in host memory. Call it with what of that is free: the module's own bytes are not."""
    return lambda free, room=None: with_memory(monkeypatch, free, room, integrated=True)


def with_memory(monkeypatch, free: int, room: int | None = None, integrated: bool = False) -> SimulatedDevice:
    """``room``: what the device can allocate, which is more than is ``free`` where weights give way to themselves."""
    monkeypatch.setattr(settings, "GIB", 0)
    monkeypatch.setattr(settings, "_available", lambda: free)
    monkeypatch.setattr(settings, "host_memory", lambda: a_host(4 * free, free, free))
    return SimulatedDevice(memory_bytes=room or free, integrated=integrated)


def net(device: str = "cpu") -> nn.Sequential:
    with torch.device(device), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = nn.Sequential(*(nn.Linear(WIDE, WIDE, bias=False) for _ in range(DEPTH)))
    return made.requires_grad_(False)


@pytest.fixture
def file(tmp_path):
    save_file(net().state_dict(), tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


def test_from_a_file_both_budgets_are_parts_of_one(integrated, file):
    free = ALL
    device = integrated(free)
    with carom.stream(net("meta"), device=device, weights=file) as session:
        report = session.report()
        assert report.streamed_bytes
        assert 0 < report.vram_budget_bytes + report.ram_budget_bytes <= 0.8 * free
        assert any("one budget" in note for note in report.notes)
        with torch.no_grad():
            assert torch.equal(session.module(X), net()(X))


def test_a_card_has_memory_of_its_own(monkeypatch, file):
    device = with_memory(monkeypatch, ALL)
    with carom.stream(net("meta"), device=device, weights=file) as session:
        report = session.report()
        assert report.vram_budget_bytes == int(0.7 * ALL) and report.ram_budget_bytes == int(0.8 * ALL)
        assert not any("one budget" in note for note in report.notes)


def test_an_explicit_budget_for_the_device_leaves_the_host_the_rest(integrated, file):
    device = integrated(2 * ALL)
    with carom.stream(net("meta"), device=device, weights=file, vram=ALL // 2) as session:
        assert session.report().ram_budget_bytes == int(0.8 * 2 * ALL) - ALL // 2
        session.set_budget(vram=ALL // 4)
        session.set_budget(ram="auto")
        held = session.report().resident_bytes + session.report().slot_bytes
        assert held <= ALL // 4
        assert session.report().ram_budget_bytes <= int(0.8 * 2 * ALL)


def test_weights_of_a_loaded_module_move_to_the_device_whose_memory_they_are_in(integrated, monkeypatch):
    """Half of them would fit beside themselves. They need not."""
    device = integrated(ALL)
    model = net()
    with torch.no_grad():
        expected = model(X)
        with carom.stream(model, device=device, granularity="layer") as session:
            report = session.report()
            assert report.streamed_bytes == 0 and report.resident_bytes >= ALL
            before = inside(session).engine.bytes_in
            assert torch.equal(model(X), expected)
            assert inside(session).engine.bytes_in == before and session.report().pinned_bytes == 0


def test_pinned_memory_counts_against_the_same_budget(integrated):
    device = integrated(ALL // 2, 2 * ALL)
    with carom.stream(net(), device=device, granularity="layer", vram=ALL) as session:
        held = session.report()
        assert held.pinned_bytes == 0
        session.set_budget(vram=ALL // 4)
        session.set_budget(ram="auto")
        report = session.report()
        assert report.streamed_bytes
        most = (
            int(0.8 * (ALL // 2)) + report.streamed_bytes
        )  # what is free, and what the weights themselves take
        assert report.resident_bytes + report.slot_bytes + report.pinned_bytes <= most


@pytest.mark.parametrize("shared", [True, False])
def test_no_host_copy_is_kept_of_what_became_resident(monkeypatch, shared):
    units_apart_from(monkeypatch)  # only large units leave copies
    model = net()
    with torch.no_grad():
        expected = model(X)
        with carom.stream(
            model,
            device=SimulatedDevice(integrated=shared),
            granularity="layer",
            vram=ALL // 2,
            ram=2 * ALL,
        ) as session:
            assert torch.equal(model(X), expected)
            pinned = session.report().pinned_bytes
            assert pinned
            session.set_budget(vram=ALL * 7 // 8)
            report = session.report()
            assert 0 < report.streamed_bytes < pinned
            assert report.pinned_bytes == (report.streamed_bytes if shared else pinned), (
                "a card's memory is another"
            )
            assert torch.equal(model(X), expected)
            session.set_budget(vram=ALL // 2)
            assert torch.equal(model(X), expected)


@pytest.mark.parametrize("shared", [True, False])
def test_a_budget_that_began_small_rises_to_all_that_waits_in_the_same_memory(monkeypatch, shared):
    """What streams lies in the memory that the device has: there is room for it, however little else is free."""
    model, little = net(), Memory(2 * ALL, LAYER)
    device = with_memory(monkeypatch, LAYER, 4 * ALL, integrated=shared)
    monkeypatch.setattr(SimulatedEngine, "memory", lambda engine: little)
    monkeypatch.setattr(settings, "waiting_bytes", lambda module: 0)  # as on a system that does not tell
    monkeypatch.setattr(SimulatedEngine, "free_bytes", lambda engine: 4 * LAYER)
    with torch.no_grad():
        expected = model(X)
        with carom.stream(model, device=device, granularity="layer") as session:
            first = session.report().streamed_bytes
            assert first
            for _ in range(12):
                assert torch.equal(model(X), expected)
            assert (session.report().streamed_bytes == 0) is shared


def test_bytes_that_move_along_are_counted_once_and_none_of_a_file():
    shared = torch.zeros(2, 1 << 14)
    module = nn.Module()
    module.a = nn.Parameter(torch.zeros(1 << 14))
    module.b, module.c = (
        nn.Parameter(shared[0]),
        nn.Parameter(shared[1]),
    )  # one storage, which stays for the other
    module.register_buffer("d", torch.zeros(1 << 14))
    module.tied = module.a
    module.register_buffer("e", torch.zeros(1 << 14, device="meta"))
    assert settings.waiting_bytes(module) == 2 * (4 << 14)


def test_bytes_of_a_mapped_file_are_the_systems_already(tmp_path):
    path = tmp_path / "w"
    path.write_bytes(bytes(1 << 16))
    module = nn.Module()
    module.a = nn.Parameter(torch.from_file(str(path), shared=False, size=1 << 14))
    assert settings.waiting_bytes(module) == 0


def test_what_is_kept_for_the_system_is_no_devices(monkeypatch):
    monkeypatch.setattr(settings, "_available", lambda: 10 * GIB)
    monkeypatch.setattr(settings, "host_memory", lambda: a_host(32 * GIB, 10 * GIB, 4 * GIB))
    engine = types.SimpleNamespace(shares_host=True, free_bytes=lambda: 10 * GIB)
    assert settings.vram_budget("auto", engine) == 4 * GIB
    assert settings.vram_budget("auto", engine, waiting=GIB) == 5 * GIB
    assert settings.ram_budget("auto", 3 * GIB) == GIB
    assert settings.ram_budget("auto", 3 * GIB, waiting=2 * GIB) == 3 * GIB, "what waits is there already"


def test_values_that_the_module_keeps_beside_the_files_stay_where_they_are(integrated, file):
    device = integrated(ALL)
    budgets = []
    for module in (net("meta"), net()):
        with carom.stream(module, device=device, weights=file) as session:
            budgets.append((session.report().vram_budget_bytes, session.report().ram_budget_bytes))
    assert budgets[0] == budgets[1]


def test_what_is_parked_counts_as_waiting(integrated):
    device = integrated(ALL // 2, 2 * ALL)
    model = net()
    with torch.no_grad(), carom.stream(model, device=device, granularity="layer", vram=ALL // 2) as session:
        assert torch.equal(model(X), net()(X))
        session.park()
        session.set_budget(vram="auto")
        assert torch.equal(model(X), net()(X))
        assert session.report().streamed_bytes == 0
