"""Units that are used at once: an operator with weights of several units, views that the model keeps, operators on lists."""

from __future__ import annotations

import copy
import threading
import time

import carom
import pytest
import torch
import torch.nn.functional as F
from carom.core.device.slot import SlotState
from tests_inside import inside
from torch import nn

WIDTH = 32
UNIT = 4 * WIDTH * WIDTH  # bytes of one layer
X = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(1))


class Layers(nn.Module):
    """Twelve layers, the weights of ``together`` of which one operator takes after them."""

    def __init__(self, together: int = 5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.together = together
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.linear(x, torch.cat([layer.weight for layer in self.layers[:: 12 // self.together]]))


class Keeping(nn.Linear):
    def forward(self, x: torch.Tensor, kept: list[torch.Tensor]) -> torch.Tensor:
        kept.append(self.weight)
        return super().forward(x)


class Keeps(Layers):
    """Keeps views of six weights until its forward ends."""

    def __init__(self) -> None:
        super().__init__()
        for index in range(0, 12, 2):
            self.layers[index] = Keeping(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept: list[torch.Tensor] = []
        for index, layer in enumerate(self.layers):
            x = torch.tanh(layer(x) if index % 2 else layer(x, kept))
        return x + sum(weight.sum() for weight in kept)


def stream(model: nn.Module, slots: float, device=None, **options) -> carom.Session:
    device = device or carom.SimulatedDevice(timing="random", seed=2)
    return carom.stream(
        model, device=device, vram=int(slots * UNIT), granularity="layer", codec="raw", **options
    )


@pytest.mark.parametrize("kind", [Layers, Keeps])
def test_a_forward_whose_units_find_no_room_runs_again_with_a_larger_region_and_fewer_residents(kind):
    model = kind().requires_grad_(False)
    want = copy.deepcopy(model)(X)
    with torch.no_grad(), stream(model, 8) as session:
        before = session.report()
        for _ in range(3):
            assert torch.equal(model(X), want)
        after = session.report()
    assert 0 < before.slot_bytes < after.slot_bytes
    assert after.vram_peak_bytes <= after.vram_budget_bytes == 8 * UNIT


def test_a_step_that_records_gradients_names_the_units_and_the_next_one_has_room():
    model = Layers().requires_grad_(False)
    plain = copy.deepcopy(model)

    def gradient(one: nn.Module) -> torch.Tensor:
        x = X.clone().requires_grad_()
        one(x).sum().backward()
        return x.grad

    with stream(model, 8) as session:
        with pytest.raises(
            carom.BudgetError, match=r"no room on the device for 'layers\.\d+'.*'layers\.0'.*in use"
        ) as found:
            gradient(model)
        assert found.value.least_bytes == 12 * UNIT
        for _ in range(2):
            assert torch.equal(gradient(model), gradient(plain))
        assert session.report().vram_peak_bytes <= 8 * UNIT
    with stream(model, 12):
        assert torch.equal(gradient(model), gradient(plain))


def test_a_budget_without_room_for_the_units_of_one_operator_is_refused_in_each_step_and_leaves_a_working_model():
    model = Layers().requires_grad_(False)
    with torch.no_grad(), stream(model, 4) as session:
        for _ in range(2):
            with pytest.raises(carom.BudgetError) as found:
                model(X)
            assert found.value.least_bytes == 12 * UNIT
        model.together = 1
        assert torch.equal(model(X), copy.deepcopy(model)(X))
        session.set_budget(vram=found.value.least_bytes)
        model.together = 5
        assert torch.equal(model(X), copy.deepcopy(model)(X))


class Narrow(nn.Module):
    """One operator takes the weights of twelve small layers and of one that is four times as large."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.narrow = nn.ModuleList(nn.Linear(WIDTH, WIDTH // 4, bias=False) for _ in range(12))
        self.wide = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.wide:
            x = torch.tanh(layer(x))
        x = x + sum(layer(x).sum() for layer in self.narrow)
        return F.linear(x, torch.cat([layer.weight for layer in (*self.narrow, self.wide[0])]))


def test_the_region_after_units_found_no_room_is_for_as_many_of_the_largest_if_the_budget_is():
    model = Narrow().requires_grad_(False)
    want = copy.deepcopy(model)(X)
    with torch.no_grad(), stream(model, 8) as session:
        assert session.report().slot_bytes == 2 * UNIT
        for _ in range(2):
            assert torch.equal(model(X), want)
        assert session.report().slot_bytes == 8 * UNIT


class Loose(nn.Module):
    """Weights that operators take outside any module's forward, a large and a small one at a time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        for index in range(3):
            self.register_parameter(f"small{index}", nn.Parameter(torch.randn(WIDTH)))
            self.register_parameter(f"large{index}", nn.Parameter(torch.randn(WIDTH, WIDTH)))
        self.first = nn.Parameter(torch.randn(WIDTH // 2, WIDTH))
        self.head = nn.Linear(WIDTH, WIDTH + 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in range(3):
            small, large = getattr(self, f"small{index}"), getattr(self, f"large{index}")
            x = x + self.first[index] + small  # the small one comes to lie behind what was used before it
            x = torch.tanh(F.linear(x, bias=small, weight=large))
        return self.head(x)


def test_weights_of_one_operator_that_fit_into_the_region_work_wherever_they_lay_before():
    model = Loose().requires_grad_(False)
    want = copy.deepcopy(model)(X)
    with pytest.raises(carom.BudgetError) as refused:
        stream(model, 1 / UNIT)
    assert refused.value.least_bytes == (WIDTH + 4) * WIDTH * 4
    with torch.no_grad(), stream(model, refused.value.least_bytes / UNIT) as session:
        for _ in range(3):
            assert torch.equal(model(X), want)
        assert session.report().vram_peak_bytes <= refused.value.least_bytes


def test_an_interrupt_of_another_thread_while_an_operators_weights_find_room_changes_nothing(monkeypatch):
    model = Loose().requires_grad_(False)
    want = copy.deepcopy(model)(X)
    with torch.no_grad(), stream(model, (WIDTH + 4) / WIDTH) as session:
        streamer, times = inside(session).streamer, []
        fault = streamer.pool.fault
        other = threading.Thread(target=streamer.interrupted)

        def interrupted_fault(wants, user):
            if len(wants) > 1:
                times.append(len(times))
                if len(times) == 1:
                    other.start()
                    while not streamer.torn:
                        time.sleep(0.001)
            return fault(wants, user)

        monkeypatch.setattr(streamer.pool, "fault", interrupted_fault)
        for _ in range(2):
            assert torch.equal(model(X), want)
        other.join(10)
        assert len(times) > 1


class Stop(Exception):
    pass


class Retries(Loose):
    """Repeats an operator whose weights could not be had."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return super().forward(x)
        except Stop:
            return super().forward(x)


@pytest.mark.parametrize("call", range(1, 12))
def test_a_fetch_that_fails_leaves_no_weight_of_its_operator_in_use(call, monkeypatch):
    model = Retries().requires_grad_(False)
    want = copy.deepcopy(model)(X)
    with torch.no_grad(), stream(model, (WIDTH + 4) / WIDTH) as session:
        store = inside(session).streamer.store
        fetch, calls = store.fetch, iter(range(1, 1000))

        def fails_once(*args):
            if next(calls) == call:
                raise Stop
            return fetch(*args)

        monkeypatch.setattr(store, "fetch", fails_once)
        for _ in range(2):
            assert torch.equal(model(X), want)
        assert next(calls) > call
        assert SlotState.IN_USE not in {slot.state for slot in inside(session).slots}


class Averages(Layers):
    """Operators on lists of weights within a forward, as an average of weights takes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = [layer.weight for layer in self.layers]
        norms = torch._foreach_norm(weights)
        scaled = torch._foreach_mul(weights[1:], [0.5] * 11)
        mixed = torch._foreach_add(weights[:6], weights[6:], alpha=0.5)
        torch._foreach_lerp_(weights[:3], weights[3:6], 0.25)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x + sum(map(torch.sum, (*norms, *scaled, *mixed)))


def test_operators_on_lists_take_the_room_of_one_place_of_the_lists():
    model = Averages().requires_grad_(False)
    plain = copy.deepcopy(model)
    with torch.no_grad(), stream(model, 2) as session:
        for _ in range(2):
            assert torch.equal(model(X), plain(X))
        assert session.report().vram_peak_bytes <= 2 * UNIT
        for name, value in plain.state_dict().items():
            assert torch.equal(session.read(name), value)


def test_a_pass_that_begins_while_another_thread_is_within_a_unit_keeps_none_of_its_views():
    model = Layers(together=1).requires_grad_(False)
    want = copy.deepcopy(model)(X)
    entered, go_on, got = threading.Event(), threading.Event(), []

    class Stops(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not entered.is_set():
                entered.set()
                assert go_on.wait(20)
            return super().forward(x)

    def infer() -> None:
        with torch.no_grad():
            got.append(model(X))

    for layer in model.layers:
        layer.__class__ = Stops
    device = carom.SimulatedDevice(memory_bytes=10 * UNIT)
    with carom.stream(model, device=device, vram="auto", granularity="layer", codec="raw") as session:
        threads = [threading.Thread(target=infer, daemon=True) for _ in range(2)]
        threads[0].start()
        assert entered.wait(20)
        threads[1].start()
        threads[1].join(0.3)
        go_on.set()
        for thread in threads:
            thread.join(20)
        slots = list(inside(session).slots)
        assert slots and SlotState.HELD not in {slot.state for slot in slots}
    assert len(got) == 2 and all(torch.equal(one, want) for one in got)
