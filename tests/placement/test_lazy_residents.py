"""Resident weights of a file: the session is ready before they are read, and nobody sees them before they are."""

from __future__ import annotations

import copy
import gc
import io
import threading
import time
from typing import Any

import carom
import pytest
import tests_models as models
import torch
from carom.core.host.host_cache import HostCache
from carom.tools.pack.writer import pack
from tests_disk_harness import Faults, on_meta, save, some_vram, uniform, within_ram
from tests_harness import on_some_devices, place
from tests_inside import inside
from tests_limits import units_apart_from
from torch import nn

CASES = models.CASES
BLOCK = 32768  # bytes of a block of `uniform`


@pytest.fixture(autouse=True)
def units_of_any_size_have_memory_of_their_own(monkeypatch):
    """As the units of real models have: small ones lie together, and come together."""
    units_apart_from(monkeypatch, 1024)


class Gate:
    """A drive on which reads at or beyond byte ``at`` of a file wait until the gate is open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int = 0) -> None:
        self.at, self.open, self.reads = at, threading.Event(), 0
        Faults(monkeypatch, self._play)

    def _play(self, offset: int) -> None:
        self.reads += 1
        if offset >= self.at:
            assert self.open.wait(60), "nobody opened the gate"


@pytest.mark.parametrize("resident", [0.4, 2.0], ids=["some", "all"])
@on_some_devices
def test_a_session_is_ready_while_no_read_has_ended(tmp_path, monkeypatch, device, resident):
    gate = Gate(monkeypatch)
    loaded, empty, path, nbytes = uniform(tmp_path)
    where = place(device)
    x = torch.ones(1, 64, device=where)
    with carom.stream(empty, device=device, vram=int(resident * nbytes), weights=path, ram="1MiB") as session:
        assert session.report().resident_bytes > 0.2 * nbytes
        gate.open.set()
        with torch.no_grad():
            expected = loaded.to(where)(x)
            for _ in range(3):
                assert torch.equal(empty(x), expected)
        within_ram(session)


def test_earlier_units_compute_while_later_ones_are_read(tmp_path, monkeypatch):
    loaded, empty, path, nbytes = uniform(tmp_path)
    pack(path, tmp_path / "packed.safetensors")  # there blocks lie in the order of use
    path = tmp_path / "packed.safetensors"
    gate = Gate(monkeypatch, at=14 * BLOCK)
    x = torch.ones(1, 64)
    empty.blocks[5].register_forward_hook(lambda *_: gate.open.set())
    with carom.stream(empty, device="cpu", vram=2 * nbytes, weights=path, ram="100KiB"), torch.no_grad():
        assert torch.equal(empty(x), loaded(x))
    assert gate.open.is_set()


def test_the_drive_reads_nothing_for_the_next_pass_before_the_first_has_its_residents(tmp_path):
    loaded, empty, path, nbytes = uniform(tmp_path)
    x, found = torch.ones(1, 64), []
    with (
        carom.stream(
            empty, device="cpu", vram=int(0.6 * nbytes), weights=path, ram=nbytes // 3, granularity="block"
        ) as session,
        torch.no_grad(),
    ):
        streamed = {unit.name for unit in inside(session).streamed}
        last = max(i for i in range(20) if f"blocks.{i}" not in streamed)
        assert streamed and last > 10

        def look(*_: Any) -> None:
            time.sleep(0.3)  # what is read ahead is read by then
            found.append(inside(session).placement.tier.reads.total_read())

        hook = empty.blocks[last].register_forward_pre_hook(look)
        assert torch.equal(empty(x), loaded(x))
        hook.remove()
        assert nbytes // 2 < found[0] <= nbytes
        for _ in range(3):
            assert torch.equal(empty(x), loaded(x))
        assert inside(session).placement.tier.reads.total_read() > nbytes  # it goes on with the next ones


def test_what_a_pass_does_not_use_is_not_read_for_it(tmp_path, monkeypatch):
    loaded, empty, path, nbytes = uniform(tmp_path)
    gate = Gate(monkeypatch, at=1 << 40)  # never closed: it counts
    x = torch.ones(1, 64)
    with carom.stream(empty, device="cpu", vram=2 * nbytes, weights=path, ram="100KiB"), torch.no_grad():
        part = empty.blocks[3]
        assert torch.equal(part(x), loaded.blocks[3](x))  # not through the root
        few = gate.reads
        assert torch.equal(empty(x), loaded(x))
        assert few < gate.reads


READERS: dict[str, Any] = {
    "state dict": lambda s, m: m.state_dict()["blocks.3.0.weight"],
    "detach": lambda s, m: m.blocks[3][0].weight.detach(),
    "data": lambda s, m: m.blocks[3][0].weight.data,
    "operator": lambda s, m: m.blocks[3][0].weight * 1.0,
    "index": lambda s, m: m.blocks[3][0].weight[:],
    "read": lambda s, m: s.read("blocks.3.0.weight"),
    "deepcopy": lambda s, m: copy.deepcopy(m.blocks[3][0].weight),
    "numpy": lambda s, m: torch.from_numpy(m.blocks[3][0].weight.detach().numpy()),
    "saved": lambda s, m: _saved(m.blocks[3][0].weight),
    "with a streamed one": lambda s, m: m.blocks[3][0].weight + 0 * m.get_parameter(_streamed(s)),
    "streamed first": lambda s, m: 0 * m.get_parameter(_streamed(s)) + m.blocks[3][0].weight,
    "written": lambda s, m: _written(s),
    "in place": lambda s, m: m.blocks[3][0].weight.mul_(2) / 2,
}


def _saved(tensor: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _streamed(session: Any) -> str:
    return inside(session).streamed[0].weights[0]


def _written(session: Any) -> torch.Tensor:
    value = session.read("blocks.5.0.weight")
    session.write("blocks.3.0.weight", value)
    found = session.read("blocks.3.0.weight")
    assert torch.equal(found, value)
    return inside(session).checkpoint.read(inside(session).checkpoint.of(session.module.blocks[3][0].weight))


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_values_asked_for_before_the_first_pass_are_true(tmp_path, reader):
    loaded, empty, path, nbytes = uniform(tmp_path)
    with (
        carom.stream(empty, device="cpu", vram=int(0.9 * nbytes), weights=path, ram="1MiB") as session,
        torch.no_grad(),
    ):
        weight = empty.blocks[3][0].weight
        assert not weight.is_meta and type(weight) is not nn.Parameter  # resident, and not here yet
        assert (weight.shape, weight.dtype, weight.requires_grad) == ((64, 64), torch.float32, False)
        assert type(weight) is not nn.Parameter  # asking for these reads nothing
        assert torch.equal(reader(session, empty), loaded.blocks[3][0].weight)
        assert type(weight) is nn.Parameter


def test_a_value_written_before_the_first_pass_is_computed_with_and_kept(tmp_path):
    loaded, empty, path, nbytes = uniform(tmp_path)
    x = torch.ones(1, 64)
    with (
        carom.stream(empty, device="cpu", vram=2 * nbytes, weights=path, ram="1MiB") as session,
        torch.no_grad(),
    ):
        value = 2 * loaded.blocks[3][0].weight
        session.write("blocks.3.0.weight", value)
        loaded.blocks[3][0].weight.copy_(value)
        assert torch.equal(empty(x), loaded(x))
        session.set_budget(vram=6 * BLOCK)  # laid out anew: a resident may stream now
        assert torch.equal(empty(x), loaded(x))
    assert torch.equal(empty.blocks[3][0].weight, value)
    assert empty.blocks[4][0].weight.is_meta


@pytest.mark.parametrize("how", ["module", "block", "after"])
def test_a_compiled_module_sees_plain_weights(tmp_path, how):
    loaded, empty, path, nbytes = uniform(tmp_path)
    x = torch.ones(1, 64)
    run: Any = empty
    if how == "module":
        empty.compile(backend="eager")
    elif how == "block":
        empty.blocks[2].compile(backend="eager")
    with carom.stream(empty, device="cpu", vram=int(0.8 * nbytes), weights=path, ram="1MiB"), torch.no_grad():
        if how == "after":
            run = torch.compile(empty, backend="eager")
        for _ in range(3):
            assert torch.equal(run(x), loaded(x))
    torch._dynamo.reset()


def test_an_interrupt_while_residents_are_read_leaves_a_session_that_works(tmp_path, monkeypatch):
    loaded, empty, path, nbytes = uniform(tmp_path)
    x = torch.ones(1, 64)
    acquire, release, calls = HostCache.acquire, HostCache.release, {"n": 0}

    def before(self: Any, pieces: Any) -> Any:
        calls["n"] += 1
        if calls["n"] in (1, 7):
            raise KeyboardInterrupt
        return acquire(self, pieces)

    def after(self: Any, pieces: Any, copies: Any) -> None:
        release(self, pieces, copies)
        if calls["n"] == 12:
            raise KeyboardInterrupt

    with carom.stream(empty, device="cpu", vram=2 * nbytes, weights=path, ram="100KiB"), torch.no_grad():
        monkeypatch.setattr(HostCache, "acquire", before)
        monkeypatch.setattr(HostCache, "release", after)
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                empty(x)
        for _ in range(2):
            assert torch.equal(empty(x), loaded(x))


@on_some_devices
def test_two_threads_begin_at_once(tmp_path, device):
    case, where = CASES["stack"], place(device)
    model = case.build().eval()
    path = save(model, tmp_path)
    empty = on_meta(case).eval()
    model = model.to(where)
    results: list[bool] = []
    vram = some_vram(empty, path, 0.6, slots=4)
    with carom.stream(empty, device=device, vram=vram, weights=path, ram="200KiB"):

        def work(seed: int) -> None:
            with torch.no_grad():
                for step in range(4):
                    x = case.inputs(seed + step, where)
                    results.append(torch.equal(empty(x), model(x)))

        threads = [threading.Thread(target=work, args=(seed,)) for seed in (0, 100)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == [True] * 8


def test_reads_and_waits_of_residents_are_in_the_report(tmp_path):
    loaded, empty, path, nbytes = uniform(tmp_path)
    with carom.stream(empty, device="cpu", vram=2 * nbytes, weights=path, ram="1MiB") as session:
        assert "forward" in vars(empty.blocks[0])
        empty(torch.ones(1, 64))
        report = session.report()
        assert report.disk_bytes_per_step == nbytes
        assert report.disk_bytes_per_second and report.disk_bytes_per_second > 0
        assert 0 < report.ram_peak_bytes <= report.ram_budget_bytes
        assert not any("forward" in vars(m) for m in empty.blocks.modules())  # nothing is left to wait for


@pytest.fixture
def no_collector():
    """Device memory must come back by reference counts alone: nobody knows when the collector comes by."""
    warm = nn.Linear(64, 64).requires_grad_(False)
    with carom.stream(warm, device=carom.SimulatedDevice(), vram="1MiB"):
        warm(torch.ones(1, 64))  # torch's first use of a dispatch mode leaves cycles
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_a_first_pass_that_runs_out_of_memory_runs_again_with_less_on_the_device(tmp_path, no_collector):
    loaded, empty, path, nbytes = uniform(tmp_path)
    x, memory, failed = torch.ones(1, 64), 2 << 30, []
    device = carom.SimulatedDevice(seed=1, timing="random", memory_bytes=memory)

    def runs_out(*_: Any) -> None:  # when all residents are there
        if not failed:
            failed.append(session.report().resident_bytes)
            inside(session).engine.ledger.others = memory - inside(session).engine.allocated
            raise torch.OutOfMemoryError("injected")

    empty.blocks[19].register_forward_hook(runs_out)
    with (
        carom.stream(empty, device=device, vram="auto", weights=path, ram="1MiB") as session,
        torch.no_grad(),
    ):
        assert torch.equal(empty(x), loaded(x)), "it ran again with less weights on the device"
        assert failed and session.report().resident_bytes < failed[0]
        assert torch.equal(empty(x), loaded(x))
        assert session.report().ram_peak_bytes <= session.report().ram_budget_bytes
