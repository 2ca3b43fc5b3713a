"""Values that are written to weights of a file: within `ram` at every moment, refused in words where they do not fit, never lost."""

# mypy: disable-error-code="union-attr,arg-type,operator,index"

from __future__ import annotations

import copy
import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import carom
import pytest
import torch
from carom.core.device.simulated import SimulatedDevice
from carom.core.host.arena import HostArena
from carom.core.placement.bound_checkpoint import FileTensor
from safetensors.torch import load_file, save_file
from tests_inside import inside
from tests_pairwise import each, pairwise
from torch import nn

SIDE = 160
MATRIX = SIDE * SIDE * 4  # 25 pages
COUNT = 12
X = torch.ones(2, SIDE)


def pair(folder: Path) -> tuple[nn.Sequential, nn.Sequential, Path]:
    """A module, the same on meta, and a file of its weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        loaded = nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(COUNT)))
    loaded.requires_grad_(False)
    with torch.device("meta"):
        empty = nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(COUNT)))
    save_file(loaded.state_dict(), folder / "m.safetensors")
    return loaded, empty.requires_grad_(False), folder / "m.safetensors"


@pytest.fixture
def held(monkeypatch):
    """Bytes of the host's blocks, now and at most."""
    gc.collect()
    found, allocate = {"now": 0, "peak": 0}, HostArena.allocate
    counting = threading.RLock()  # threads that read allocate too, and a finalizer may run within any line

    def gone(nbytes: int) -> None:
        with counting:
            found["now"] -= nbytes

    def counted(self: Any, nbytes: int) -> Any:
        block = allocate(self, nbytes)
        with counting:
            found["now"] += nbytes
            found["peak"] = max(found["peak"], found["now"])
        weakref.finalize(block, gone, nbytes)
        return block

    monkeypatch.setattr(HostArena, "allocate", counted)
    return found


def write(session: Any, loaded: nn.Module, index: int, factor: float = 2.0) -> None:
    """Both get another value; where it is refused, neither."""
    value = loaded[index].weight * factor
    session.write(f"{index}.weight", value)
    loaded[index].weight.copy_(value)


DEVICES = {"cpu": "cpu", "late": SimulatedDevice(timing="late"), "random": SimulatedDevice(timing="random")}
devices = pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)


@pairwise(
    device=DEVICES, passes={"before a pass": 0, "after one": 1, "after three": 3}, ram=[3.5, 6.5, 9.5, 14.5]
)
def test_memory_is_within_ram_whenever_a_value_is_written_and_the_report_says_what_it_was(
    tmp_path, held, device, passes, ram
):
    loaded, empty, path = pair(tmp_path)
    budget = int(ram * MATRIX)
    with (
        torch.no_grad(),
        carom.stream(empty, device=device, vram=6 * MATRIX, weights=path, ram=budget) as session,
    ):
        for _ in range(passes):
            assert torch.equal(empty(X), loaded(X))
        names = [int(name.split(".")[0]) for unit in inside(session).streamed for name in unit.weights]
        for index in names:
            try:
                write(session, loaded, index)
            except carom.BudgetError as error:
                assert f"{index}.weight" in str(error) and error.least_bytes > budget
                break
            assert held["peak"] <= budget
        assert torch.equal(empty(X), loaded(X))
        assert torch.equal(empty(X), loaded(X))
        report = session.report()
        assert held["peak"] <= budget
        assert report.ram_peak_bytes <= budget == report.ram_budget_bytes
    for index, (one, other) in enumerate(zip(empty, loaded, strict=True)):
        assert one.weight.is_meta or torch.equal(one.weight, other.weight), index


@devices
def test_what_is_written_while_parked_is_refused_where_the_next_layout_could_not_be(tmp_path, device):
    loaded, empty, path = pair(tmp_path)
    ram = int(4.5 * MATRIX)
    with (
        torch.no_grad(),
        carom.stream(empty, device=device, vram=6 * MATRIX, weights=path, ram=ram) as session,
    ):
        assert torch.equal(empty(X), loaded(X))
        session.park()
        for index in range(4):
            write(session, loaded, index)
        write(session, loaded, 3)  # once more: it takes no more
        with pytest.raises(carom.BudgetError, match=r"9\.weight.*ram") as refused:
            write(session, loaded, 9)
        assert torch.equal(session.read("9.weight"), loaded[9].weight)
        assert torch.equal(session.read("3.weight"), loaded[3].weight)
        assert torch.equal(empty(X), loaded(X))
        session.park()
        session.set_budget(ram=refused.value.least_bytes)
        write(session, loaded, 9)
        assert torch.equal(empty(X), loaded(X))
        report = session.report()
        assert report.ram_peak_bytes <= report.ram_budget_bytes
    assert torch.equal(empty[9].weight, loaded[9].weight)


@each(device=DEVICES, how=["park", "layout", "adapter"])
def test_residents_that_were_changed_beyond_ram_outlive_every_layout(tmp_path, device, how):
    """On the device they took none of it. They have no other place than host memory on the way: it is said, not refused."""
    loaded, empty, path = pair(tmp_path)
    with (
        torch.no_grad(),
        carom.stream(empty, device=device, vram=9 * MATRIX, weights=path, ram=2 * MATRIX) as session,
    ):
        assert torch.equal(empty(X), loaded(X))
        stay = [index for index in range(COUNT) if not empty[index].weight.is_meta]
        assert len(stay) >= 4
        for index in stay:
            write(session, loaded, index)
        for _ in range(2):
            if how == "park":
                session.park()
            elif how == "layout":
                session.set_budget(vram=8 * MATRIX)
            else:
                inside(session).relay()
            assert torch.equal(empty(X), loaded(X))
        for index in range(COUNT):
            assert torch.equal(session.read(f"{index}.weight"), loaded[index].weight)
        # An adapter moves none of them, so they still take no host memory.
        said = any("ram" in note and "changed" in note for note in session.report().notes)
        assert said == (how != "adapter")
        if said:
            with pytest.raises(carom.BudgetError):
                session.set_budget(ram=MATRIX)
        assert torch.equal(empty(X), loaded(X))
    assert all(torch.equal(empty[index].weight, loaded[index].weight) for index in stay)


def test_a_value_that_finds_no_memory_leaves_a_working_session(tmp_path, monkeypatch):
    loaded, empty, path = pair(tmp_path)

    def refuses(self: Any, value: Any) -> Any:
        raise MemoryError("injected")

    with (
        torch.no_grad(),
        carom.stream(empty, device="cpu", vram=6 * MATRIX, weights=path, ram=6 * MATRIX) as session,
    ):
        assert torch.equal(empty(X), loaded(X))
        index = next(i for i in range(COUNT) if empty[i].weight.is_meta)
        for parked in (False, True):
            if parked:
                session.park()
            with monkeypatch.context() as patch:
                patch.setattr(FileTensor, "copy_of", refuses)
                with pytest.raises(MemoryError):
                    write(session, loaded, index)
            assert torch.equal(empty(X), loaded(X))


@pytest.mark.parametrize("device", ["cpu", "simulated"])
@pytest.mark.parametrize("source", ["spilled", "mapped", "file"])
def test_weights_that_are_assigned_stream_too(tmp_path, source, device):
    """``load_state_dict(assign=True)`` puts other Parameters in the module. They are in no file, or in another one."""
    loaded, empty, path = pair(tmp_path)
    size, generator = COUNT * MATRIX, torch.Generator().manual_seed(1)
    state = {name: torch.randn(SIDE, SIDE, generator=generator) for name in loaded.state_dict()}
    other = copy.deepcopy(loaded)
    other.load_state_dict(state)
    if source == "mapped":
        save_file(state, tmp_path / "other.safetensors")
        state = load_file(tmp_path / "other.safetensors")
    model = empty if source == "file" else copy.deepcopy(loaded).requires_grad_(False)
    where = carom.SimulatedDevice(timing="random") if device == "simulated" else device
    options = {"weights": path} if source == "file" else {"disk": tmp_path / "spill"}
    x = X
    with torch.no_grad():
        expected, before = other(x), loaded(x)
        with carom.stream(model, device=where, vram=size // 4, ram=size // 4, **options) as session:
            assert torch.equal(model(x), before)
            model.load_state_dict(state, assign=True)
            if source == "file":
                for _ in range(2):
                    with pytest.raises(
                        carom.BudgetError, match=r"ram=.*assign=True.*Raise ram to"
                    ) as refused:
                        model(x)
                session.set_budget(ram=refused.value.least_bytes)
            for _ in range(2):
                assert torch.equal(model(x), expected)
            session.set_budget(vram=size // 3)
            assert torch.equal(model(x), expected)
            for name, value in state.items():
                assert torch.equal(session.read(name), value), name
            if source == "mapped":
                files = list((tmp_path / "spill").glob("carom-spill-*"))
                assert sum(file.stat().st_size for file in files) <= 1.2 * size, (
                    "the other file is read itself"
                )
        assert torch.equal(model(x), expected)
    assert not any(parameter.requires_grad for parameter in model.parameters())
