"""Weights of a file that stay on the device under two layouts stay where they are when one follows the other."""

from __future__ import annotations

from typing import Any

import carom
import pytest
import torch
from carom.core.streaming.streamer import Streamer
from tests_disk_harness import Drive, uniform
from tests_harness import on_some_devices, place
from tests_interrupts import InterruptAt, Interrupts
from tests_limits import units_apart_from

BLOCK = 32768  # bytes of one of the twenty blocks of `uniform`


@pytest.fixture(autouse=True)
def units_of_any_size_have_memory_of_their_own(monkeypatch):
    """As the units of real models have."""
    units_apart_from(monkeypatch, 1024)


def on_device(model: torch.nn.Module) -> dict[str, tuple[torch.nn.Parameter, int]]:
    """Return the weights that stay on the device, each with its address."""
    return {name: (p, p.data_ptr()) for name, p in model.named_parameters() if type(p) is torch.nn.Parameter and not p.is_meta}  # fmt: skip


@on_some_devices
def test_another_budget_reads_nothing_and_moves_no_resident_that_may_stay(tmp_path, monkeypatch, device):
    drive = Drive(monkeypatch)
    loaded, empty, path, nbytes = uniform(tmp_path)
    x = torch.ones(1, 64, device=place(device))
    with (
        carom.stream(
            empty, device=device, vram=12 * BLOCK, weights=path, ram=nbytes, granularity="block"
        ) as session,
        torch.no_grad(),
    ):
        expected = loaded.to(x.device)(x)
        for _ in range(3):
            assert torch.equal(empty(x), expected)
        before = on_device(empty)
        assert len(before) >= 4
        for vram in (9 * BLOCK, 12 * BLOCK, 6 * BLOCK, 14 * BLOCK):
            session.set_budget(vram=vram)
            for _ in range(3):
                assert torch.equal(empty(x), expected)
            now = on_device(empty)
            both = now.keys() & before.keys()
            assert len(both) == min(len(now), len(before)), (
                "a smaller budget adds none, a larger one drops none"
            )
            assert all(now[name][0] is before[name][0] and now[name][1] == before[name][1] for name in both)
            before = now
        drive.fresh()
        session.set_budget(vram=12 * BLOCK)
        session.set_budget(vram=14 * BLOCK)
        assert torch.equal(empty(x), expected)
        assert drive.fresh() <= 2 * BLOCK, "what has left the device"


@on_some_devices
def test_what_was_written_to_a_resident_outlives_budgets(tmp_path, device):
    """By an operator, which the version counter shows, and through ``.data``, which it does not."""
    loaded, empty, path, nbytes = uniform(tmp_path)
    x = torch.ones(1, 64, device=place(device))
    with (
        carom.stream(empty, device=device, vram=12 * BLOCK, weights=path, ram=2 * nbytes) as session,
        torch.no_grad(),
    ):
        empty(x)
        names = list(on_device(empty))
        for place_, name in enumerate(names):
            for model in (loaded, empty):
                weight = model.get_parameter(name)
                (weight.data if place_ % 2 else weight).add_(1)
        expected = loaded.to(x.device)(x)
        for vram in (9 * BLOCK, 14 * BLOCK, 4 * BLOCK, 12 * BLOCK):
            session.set_budget(vram=vram)
            assert torch.equal(empty(x), expected)
        session.park()
        assert torch.equal(empty(x), expected)
    assert all(torch.equal(empty.get_parameter(n).cpu(), loaded.get_parameter(n).cpu()) for n in names)


@pytest.mark.parametrize("device", ["simulated"])
def test_a_budget_that_does_not_fit_leaves_the_module_whole(tmp_path, monkeypatch, device):
    """The next layout fails on its way, after it has taken over residents of the last one."""
    loaded, empty, path, nbytes = uniform(tmp_path)
    where = carom.SimulatedDevice(timing="random")
    with (
        carom.stream(empty, device=where, vram=12 * BLOCK, weights=path, ram=2 * nbytes) as session,
        torch.no_grad(),
    ):
        x = torch.ones(1, 64)
        empty(x)
        name = next(iter(on_device(empty)))
        for model in (loaded, empty):
            model.get_parameter(name).data.add_(1)
        expected = loaded(x)

        def fails(*args: Any) -> Any:
            raise MemoryError("injected")

        with monkeypatch.context() as patch:
            patch.setattr(Streamer, "start", fails)
            with pytest.raises(MemoryError):
                session.set_budget(vram=9 * BLOCK)
        assert session.parked
        assert torch.equal(empty(x), expected)


def test_an_interrupt_at_any_line_of_what_stays_loses_no_value(tmp_path):
    """At each line of `FileResidents` and `FileTier` that a change of the budget runs, in both directions."""
    loaded, empty, path, nbytes = uniform(tmp_path)
    x = torch.ones(1, 64)
    with (
        carom.stream(empty, device="cpu", vram=12 * BLOCK, weights=path, ram=2 * nbytes) as session,
        torch.no_grad(),
    ):
        empty(x)
        name = next(iter(on_device(empty)))
        for model in (loaded, empty):
            model.get_parameter(name).data.add_(1)
        expected, budgets = loaded(x), (9 * BLOCK, 12 * BLOCK)
        files = ("placement/file_residents.py", "placement/file_tier.py")
        seen: dict[str, None] = {}
        for vram in budgets:
            with Interrupts(files=files) as found:
                session.set_budget(vram=vram)
            seen.update(dict.fromkeys(found.places))
            assert torch.equal(empty(x), expected)
        assert len(seen) > 40
        for place_ in seen:
            for vram in budgets:
                name = next(iter(on_device(empty)))
                for model in (loaded, empty):  # a value that only the device has
                    model.get_parameter(name).data.add_(1)
                expected = loaded(x)
                with InterruptAt(place_):
                    session.set_budget(vram=vram)
                assert torch.equal(empty(x), expected), place_
                assert torch.equal(session.read(name), loaded.get_parameter(name)), place_
    assert torch.equal(empty.get_parameter(name), loaded.get_parameter(name))
