"""Law 2: the budget is a promise, on the device and in pinned host memory."""

from __future__ import annotations

import copy
import logging

import carom
import pytest
import tests_harness as harness
import tests_models as models
import torch
from carom.core.device.cpu_engine import PlainEngine
from carom.core.device.simulated import SimulatedEngine
from tests_harness import EVERYWHERE, on_every_device, place, streamed
from tests_inside import inside
from tests_pairwise import each

LATE = carom.SimulatedDevice()
PAGE = 4096


def frozen(name: str, checkpoint: str = "none"):
    case = models.CASES[name]
    return case, case.build(checkpoint).requires_grad_(False)


class Ledger:
    """Device memory that engines hand out, alive at the same time."""

    def __init__(self, monkeypatch) -> None:
        import weakref

        self.now = self.peak = 0

        def counting(real):
            def allocate(engine, nbytes):
                buffer = real(engine, nbytes)
                self.now += nbytes
                self.peak = max(self.peak, self.now)
                weakref.finalize(buffer.untyped_storage(), self.give_back, nbytes)
                return buffer

            return allocate

        for kind in (PlainEngine, SimulatedEngine):
            monkeypatch.setattr(kind, "allocate", counting(kind.allocate))

    def give_back(self, nbytes: int) -> None:
        self.now -= nbytes


NAMES = ["stack", "heterogeneous", "conv2d", "attention", "tied", "nested", "buffers"]


@pytest.mark.parametrize(
    ("name", "granularity"),
    [(n, g) for i, n in enumerate(NAMES) for g in ("auto", ("block", "phase", "layer")[i % 3])],
)
def test_peak_is_within_every_budget(name, granularity, monkeypatch):
    case, model = frozen(name)
    least = harness.least_vram(model, "cpu", granularity)
    most = harness.everything_vram(model)
    with torch.no_grad():
        expected = copy.deepcopy(model)(case.inputs())
        for step in range(7):
            budget = least + (most - least) * step // 6
            ledger = Ledger(monkeypatch)
            with carom.stream(
                copy.deepcopy(model), device="cpu", vram=budget, granularity=granularity
            ) as session:
                assert torch.equal(session.module(case.inputs()), expected)
                session.module(case.inputs(1))
                report = session.report()
            monkeypatch.undo()
            assert report.vram_budget_bytes == budget
            assert report.resident_bytes + report.slot_bytes <= report.vram_peak_bytes <= budget
            assert ledger.peak <= budget, "more was allocated than the report owns to"


@each(granularity=["auto", "block", "phase", "layer"], device=EVERYWHERE)
def test_a_refused_budget_names_unit_and_remedy_and_the_least_works(granularity, device):
    case, model = frozen("stack")
    expected = copy.deepcopy(model).to(place(device))(case.inputs(0, place(device)))
    before = {name: (id(p), p.detach().clone()) for name, p in model.named_parameters()}
    with pytest.raises(carom.BudgetError) as refused:
        carom.stream(model, device=device, vram=1000, granularity=granularity)
    error = refused.value
    assert str(error.least_bytes) in str(error)
    assert any(name in str(error) for name in ("blocks.", "stem", "head")), "no unit is named"
    assert all(id(p) == before[n][0] and torch.equal(p, before[n][1]) for n, p in model.named_parameters())
    with pytest.raises(carom.BudgetError):
        carom.stream(model, device=device, vram=error.least_bytes - 1, granularity=granularity)
    with torch.no_grad(), carom.stream(model, device=device, vram=error.least_bytes, granularity=granularity):
        for _ in range(2):
            assert torch.equal(model(case.inputs(0, place(device))), expected)


def test_auto_granularity_splits_what_blocks_do_not_fit():
    _, model = frozen("stack")
    assert harness.least_vram(model, "cpu", "auto") < harness.least_vram(model, "cpu", "block")


@on_every_device
def test_everything_stays_where_everything_fits(device):
    case, model = frozen("stack")
    with torch.no_grad(), carom.stream(model, device=device, vram=harness.everything_vram(model)) as session:
        model(case.inputs(0, place(device)))
        report = session.report()
    assert report.slot_bytes == 0 and report.transfers_per_weight == 0 and report.pinned_bytes == 0
    assert report.resident_bytes >= models.weight_bytes(model)


def test_adapters_are_listed_apart_from_the_budget():
    model = models.freeze(models.CASES["stack"].build())
    adapters = sum(p.numel() * 4 for p in model.parameters() if p.requires_grad)
    with streamed(model, "cpu", harness.some_vram(model, "cpu", 0.2)) as session:
        report = session.report()
    assert report.adapter_bytes == adapters
    assert report.vram_peak_bytes <= report.vram_budget_bytes


@pytest.mark.parametrize("vram", [-1, float("nan"), "8 apples", "", "1e400GiB", "150%", True, 1 << 62])
def test_nonsense_budgets_are_refused(vram):
    _, model = frozen("stack")
    with pytest.raises(carom.BudgetError, match="vram"):
        carom.stream(model, device="cpu", vram=vram)


def test_budgets_in_words_and_percent():
    _, model = frozen("stack")
    device = carom.SimulatedDevice(memory_bytes=64 << 10)
    with carom.stream(model, device=device, vram="50%") as session:
        assert session.report().vram_budget_bytes == 32 << 10
    with carom.stream(model, device=device, vram="48KiB") as session:
        assert session.report().vram_budget_bytes == 48 << 10


@on_every_device
def test_attaching_again_under_many_budgets_is_exact(device):
    case, model = frozen("stack")
    x = case.inputs(0, place(device))
    expected = copy.deepcopy(model).to(place(device))(x)
    least, most = harness.least_vram(model, device), harness.everything_vram(model)
    with torch.no_grad(), carom.stream(model, device=device, vram=most) as session:
        for vram in (least, (least + most) // 2, most, least, most):
            session.set_budget(vram=vram)
            assert torch.equal(model(x), expected)
            assert session.report().vram_budget_bytes == vram
            assert inside(session).held_bytes <= vram
        with pytest.raises(carom.BudgetError):
            session.set_budget(vram=1)
        assert session.report().vram_budget_bytes == most
        assert torch.equal(model(x), expected)


# -- pinned host memory


def test_pinned_memory_is_exact_to_the_page():
    _, model = frozen("stack")
    with streamed(model, LATE, harness.some_vram(model, LATE, 0.1)) as session:
        pages = sum(-(-unit.nbytes // PAGE) * PAGE for unit in inside(session).streamed)
        report = session.report()
        assert report.pinned_bytes == report.pinned_peak_bytes == pages
        assert report.pageable_bytes == 0
    assert inside(session).pinned_bytes == 0, "pinned memory was not given back"


@pytest.mark.parametrize("pages", [0, 1, 3, 7, 10, 100])
def test_pinned_bytes_stay_within_the_ram_budget(pages, caplog):
    case, model = frozen("stack", "non-reentrant")
    model.requires_grad_(True)  # gradients need pinned memory too
    plain = copy.deepcopy(model)
    with caplog.at_level(logging.WARNING, "carom"):
        vram = harness.some_vram(model, LATE, 0.1, training="stream")
        with streamed(model, LATE, vram, ram=pages * PAGE, training="stream") as session:
            for seed in range(3):
                harness.loss_of(model(case.inputs(seed))).backward()
                harness.loss_of(plain(case.inputs(seed))).backward()
            report = session.report()
    harness.assert_same([p.grad for p in plain.parameters()], [p.grad for p in model.parameters()])
    assert report.pinned_peak_bytes <= pages * PAGE
    if pages * PAGE < report.streamed_bytes:
        assert report.pageable_bytes > 0 and report.notes
        assert any("RAM budget" in note for note in report.notes)
        assert len(caplog.records) == len(report.notes), "one warning for each reason"


@pytest.mark.parametrize("timing", ["late", "early", "random"])
def test_refused_pinning_falls_back_to_pageable_memory(timing, caplog):
    device = carom.SimulatedDevice(seed=1, timing=timing, refuse_pinning=True)
    case, model = frozen("stack")
    expected = harness.infer(copy.deepcopy(model), case, torch.device("cpu"))
    with (
        caplog.at_level(logging.WARNING, "carom"),
        streamed(model, device, harness.some_vram(model, device, 0.1)) as s,
    ):
        harness.assert_same(expected, harness.infer(model, case, torch.device("cpu")))
        report = s.report()
    assert report.pinned_peak_bytes == 0
    assert report.pageable_bytes == report.streamed_bytes > 0
    assert any("pinning was refused" in note for note in report.notes)
    assert len(caplog.records) == 1


@pytest.mark.parametrize(("name", "all_pageable"), [("xpu:0", True), ("cpu", False), ("mps", False)])
def test_memory_that_nothing_pins_is_reported_as_pageable_where_it_is_copied(name, all_pageable, monkeypatch):
    """An engine like that of torch's XPU, which has no function that pins memory in use."""
    made = SimulatedEngine.__init__

    def without_pinner(self, config) -> None:
        made(self, config)
        self.pinner, self.name = None, name

    monkeypatch.setattr(SimulatedEngine, "__init__", without_pinner)
    case, model = frozen("stack")
    with streamed(model, LATE, harness.some_vram(model, LATE, 0.1)) as s:
        harness.infer(model, case, torch.device("cpu"))
        report = s.report()
    assert report.streamed_bytes > 0 and report.pinned_peak_bytes == 0
    assert report.pageable_bytes == (report.streamed_bytes if all_pageable else 0)
    assert ("copied more slowly" in report.table()) is all_pageable


def test_a_budget_with_no_ram_at_all_still_runs():
    case, model = frozen("stack")
    expected = harness.infer(copy.deepcopy(model), case, torch.device("cpu"))
    with streamed(model, LATE, harness.some_vram(model, LATE, 0.1), ram=0) as session:
        harness.assert_same(expected, harness.infer(model, case, torch.device("cpu")))
        assert session.report().pinned_peak_bytes == 0


# -- parking


@on_every_device
def test_parking_releases_the_device_and_the_next_forward_brings_it_back(device):
    case, model = frozen("stack")
    x = case.inputs(0, place(device))
    with torch.no_grad(), streamed(model, device, harness.some_vram(model, device, 0.4)) as session:
        expected = model(x)
        assert model.to("cpu") is model
        if place(device).type != "cpu":
            assert all(p.device.type == "cpu" for p in model.parameters())
        session.park()
        report = session.report()
        assert report.resident_bytes == 0 and report.slot_bytes == 0 and report.pinned_bytes == 0
        assert all(type(p) is torch.nn.Parameter for p in model.parameters())
        assert torch.equal(model(x), expected)
        assert session.report().slot_bytes > 0
        session.park()
        session.park()
        session.unpark()
        session.unpark()
        assert session.report().slot_bytes > 0
        assert torch.equal(model(x), expected)


def test_a_parked_session_closes():
    case, model = frozen("stack")
    session = carom.stream(model, device=LATE, vram=harness.some_vram(model, LATE, 0.4))
    expected = model(case.inputs())
    session.park()
    session.close()
    assert torch.equal(model(case.inputs()), expected)
    assert "forward" not in model.__dict__ and "_apply" not in model.__dict__


def test_weights_changed_while_parked_are_seen():
    case, model = frozen("stack")
    plain = copy.deepcopy(model)
    with torch.no_grad(), streamed(model, LATE, harness.some_vram(model, LATE, 0.4)) as session:
        model(case.inputs())
        session.park()
        for net in (model, plain):
            net.blocks[1].up.weight.mul_(2)
        assert torch.equal(model(case.inputs()), plain(case.inputs()))


def test_set_budget_while_parked_takes_effect_later():
    case, model = frozen("stack")
    least = harness.least_vram(model, LATE)
    with torch.no_grad(), carom.stream(model, device=LATE, vram=harness.everything_vram(model)) as session:
        expected = model(case.inputs())
        session.park()
        session.set_budget(vram=least)
        assert torch.equal(model(case.inputs()), expected)
        assert inside(session).held_bytes <= least


def test_ram_auto_counts_a_containers_limit(monkeypatch):
    from carom.core.session import settings

    class Memory:
        usable, free = 3 << 30, 20 << 30

    monkeypatch.setattr(settings, "host_memory", lambda: Memory)
    assert settings.ram_budget("auto") == 5 << 30, "a quarter of what is free, where little more may be used"
    Memory.usable, Memory.free = 3 << 30, 4 << 30
    assert settings.ram_budget("auto") == 3 << 30
    Memory.usable, Memory.free = 0, 4 << 30
    assert settings.ram_budget("auto") == 1 << 30
    Memory.usable, Memory.free = 3 << 30, 3 << 30
    assert settings.ram_budget("auto") == int(0.8 * (3 << 30))
