"""What the RAM cache holds of a file stays in RAM while a session lays its weights out anew, and is not read again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import carom
import pytest
import torch
from carom.core.host.arena import HostArena
from tests_disk_harness import Drive, Faults, on_meta, save, some_vram, uniform, within_ram
from tests_inside import inside
from tests_limits import units_apart_from

BLOCK = 32768  # bytes of one of the twenty blocks of `uniform`
X = torch.linspace(-1, 1, 64).reshape(1, 64)


@pytest.fixture
def drive(monkeypatch) -> Drive:
    return Drive(monkeypatch)


@pytest.fixture
def model(tmp_path) -> tuple[torch.nn.Module, torch.nn.Module, Path, int]:
    """(loaded, on meta, packed file, bytes): in a packed file every tensor begins at a page, so bytes read are exact."""
    loaded, empty, _, nbytes = uniform(tmp_path)
    return loaded, empty, save(loaded, tmp_path, packed=True), nbytes


def settle(session: Any, passes: Callable[[], object]) -> None:
    """Run until the drive is idle: everything that stays in RAM is there."""
    for _ in range(4):
        passes()
    reads = inside(session).placement.tier.reads
    with reads.cache._cond:
        reads.cache._cond.wait_for(lambda: not reads.cache._totals.reading, timeout=10)


CHANGES = {
    "less VRAM": lambda session: session.set_budget(vram=3 * BLOCK),
    "more VRAM": lambda session: session.set_budget(vram=12 * BLOCK),
    "more RAM": lambda session: session.set_budget(ram=40 * BLOCK),
    "parked": lambda session: session.park(),
    "parked, then more VRAM": lambda session: (session.park(), session.set_budget(vram=12 * BLOCK)),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("device", ["cpu", "simulated"])
def test_what_ram_or_the_device_holds_is_not_read_again(model, drive, device, change, monkeypatch):
    units_apart_from(monkeypatch, 1024)
    loaded, empty, path, nbytes = model
    where = carom.SimulatedDevice(timing="random") if device == "simulated" else device
    with (
        torch.no_grad(),
        carom.stream(empty, device=where, vram=6 * BLOCK, ram=24 * BLOCK, weights=path, granularity="block") as session,
    ):  # fmt: skip
        expected = loaded(X)
        settle(session, lambda: empty(X))
        drive.fresh()
        assert torch.equal(empty(X), expected)
        assert drive.fresh() == 0, "a steady step"
        in_ram = {unit.name: unit.wire_bytes for unit in inside(session).streamed}
        assert 0 < sum(in_ram.values()) < nbytes
        CHANGES[change](session)
        for _ in range(3):
            assert torch.equal(empty(X), expected)
        if "parked" in change:
            needed = nbytes - sum(in_ram.values())  # the weights that were on the device
        else:
            now = {unit.name: unit.wire_bytes for unit in inside(session).streamed}
            needed = sum(size for name, size in now.items() if name not in in_ram)
        assert drive.fresh() == needed, "the weights that have left the device, and nothing else"
        read = session.report().disk_bytes_per_second
        assert read is not None or not needed
        within_ram(session)


def test_a_cache_that_holds_a_part_is_taken_over_and_the_rest_is_read(model, drive):
    loaded, empty, path, nbytes = model
    with (
        torch.no_grad(),
        carom.stream(empty, device="cpu", vram=4 * BLOCK, ram=10 * BLOCK, weights=path, granularity="block") as session,
    ):  # fmt: skip
        expected = loaded(X)
        settle(session, lambda: empty(X))
        per_pass = []
        expected = loaded(X)
        for vram in (3 * BLOCK, 4 * BLOCK, 5 * BLOCK, 4 * BLOCK):
            cache = inside(session).placement.tier.reads.cache
            kept = len(cache.pool.eviction.kept) * cache.buffers.nbytes
            drive.fresh()
            session.set_budget(vram=vram)
            assert torch.equal(empty(X), expected)
            first = drive.fresh()
            settle(session, lambda: empty(X))
            drive.fresh()
            for _ in range(4):
                assert torch.equal(empty(X), expected)
            per_pass.append(drive.fresh() / 4)
            assert first <= nbytes - kept + inside(session).placement.tier.reads.cache.limit_bytes
            within_ram(session)
        assert per_pass[1] == pytest.approx(per_pass[3], abs=BLOCK), "as good as before, layout after layout"


def test_pieces_that_are_cut_anew_are_copied_within_ram(model, drive, monkeypatch):
    """From buffers for everything to a few equal ones and back: the pieces differ, so their bytes are copied in RAM."""
    held = {"now": 0, "peak": 0}
    allocate = HostArena.allocate

    def counted(self: Any, nbytes: int) -> Any:
        import weakref

        block = allocate(self, nbytes)
        held["now"] += nbytes
        held["peak"] = max(held["peak"], held["now"])
        weakref.finalize(block, lambda: held.__setitem__("now", held["now"] - nbytes))
        return block

    monkeypatch.setattr(HostArena, "allocate", counted)
    loaded, empty, path, nbytes = model
    with (
        torch.no_grad(),
        carom.stream(empty, device="cpu", vram=4 * BLOCK, ram=24 * BLOCK, weights=path, granularity="block") as session,
    ):  # fmt: skip
        expected = loaded(X)
        settle(session, lambda: empty(X))
        for ram in (12 * BLOCK, 7 * BLOCK, 24 * BLOCK):
            before = inside(session).placement.tier.reads.cache
            mine = before.figures().held_bytes
            held["peak"] = held["now"]
            drive.fresh()
            session.set_budget(ram=ram)
            cache = inside(session).placement.tier.reads.cache
            assert [p.nbytes for u in cache._units for p in u] != [p.nbytes for u in before._units for p in u]
            if ram == 24 * BLOCK:
                settle(session, lambda: empty(X))
                assert drive.fresh() <= nbytes - mine + 4096, "all but what is in RAM"
                assert cache.complete
            for _ in range(3):
                assert torch.equal(empty(X), expected)
            assert held["peak"] <= max(ram, mine) and held["now"] <= ram
            within_ram(session)
            settle(session, lambda: empty(X))


@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_packed_weights_are_taken_over_and_checked_again(tmp_path, drive, codec):
    import tests_models as models
    from carom.tools.pack.writer import pack

    case = models.CASES["stack"]
    model = case.build().eval().to(torch.bfloat16)
    plain = save(model, tmp_path)
    path = tmp_path / "packed.safetensors"
    pack(plain, path, codec=codec)
    empty = on_meta(case).eval().to(torch.bfloat16)
    device = carom.SimulatedDevice()
    x = case.inputs(0, torch.device("cpu"))
    x = x.to(torch.bfloat16) if torch.is_tensor(x) and x.is_floating_point() else x
    with torch.no_grad():
        expected = model(x)
        vram = some_vram(empty, path, 0.3)
        with carom.stream(empty, device=device, vram=vram, ram="1MiB", weights=path) as session:
            settle(session, lambda: empty(x))
            drive.fresh()
            assert torch.equal(empty(x), expected) and drive.fresh() == 0
            held = sum(unit.wire_bytes for unit in inside(session).streamed)
            whole = sum(p.nbytes for p in model.parameters())
            session.park()
            assert torch.equal(empty(x), expected)
            settle(session, lambda: empty(x))
            assert drive.fresh() <= whole - held + 64 * 4096
            assert torch.equal(empty(x), expected)


def test_a_closed_session_holds_nothing(model):
    _, empty, path, _ = model
    session = carom.stream(empty, device="cpu", vram=6 * BLOCK, ram=24 * BLOCK, weights=path)
    with torch.no_grad():
        empty(X)
    kept = inside(session).manager.host.kept
    session.park()
    assert kept.nbytes > 0, "the next forward finds it"
    session.close()
    assert kept.nbytes == 0


def test_a_file_that_was_replaced_is_noticed_by_the_next_layout(model, tmp_path):
    """Bytes in RAM are those of the former file: they are never mixed with bytes of another one."""
    loaded, empty, path, _ = model
    with (
        torch.no_grad(),
        carom.stream(empty, device="cpu", vram=6 * BLOCK, ram=24 * BLOCK, weights=path) as session,
    ):
        settle(session, lambda: empty(X))
        session.park()
        other = tmp_path / "other"
        other.write_bytes(path.read_bytes())
        other.replace(path)
        for _ in range(2):
            with pytest.raises(carom.WeightsError, match="packed.safetensors.*replaced"):
                empty(X)


def test_a_drive_that_fails_in_the_middle_loses_nothing_that_ram_holds(model, monkeypatch):
    failing = {"from": None}

    def play(offset: int) -> OSError | None:
        return (
            OSError(5, "Input/output error")
            if failing["from"] is not None and offset >= failing["from"]
            else None
        )

    loaded, empty, path, nbytes = model
    Faults(monkeypatch, play)
    with (
        torch.no_grad(),
        carom.stream(empty, device="cpu", vram=6 * BLOCK, ram=24 * BLOCK, weights=path) as session,
    ):
        expected = loaded(X)
        settle(session, lambda: empty(X))
        failing["from"] = nbytes // 2
        session.set_budget(vram=3 * BLOCK)
        with pytest.raises(
            carom.WeightsError, match="packed.safetensors.*blocks.*Input/output.*[Cc]heck the drive"
        ):
            for _ in range(2):
                empty(X)
        failing["from"] = None
        assert torch.equal(empty(X), expected)
        within_ram(session)
