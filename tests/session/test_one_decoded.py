"""A region with room for one decoded unit: taken where the link binds a step, by measured times, and given up where the
module needs more.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import carom
import pytest
import torch
from carom.benchmarks.engines.codec_choice import Shape, simulated
from carom.core.model.units import carve
from carom.core.plan.profile import ForwardTiming, StepProfile, UnitTensors, UnitTiming, learn
from carom.core.session import rule_planner as planner
from carom.core.session.policies.replan import Replan
from tests_inside import inside
from tests_watch import watch_changes
from torch import nn

UNITS = 8
BINDS, BALANCE, COMPUTES = (
    Shape(name, ((256,),) * UNITS, ratio, 10.0) for name, ratio in (("link", 6.0), ("both", 2.0), ("computing", 1.0))
)  # fmt: skip


def inputs(shape: Shape = BINDS, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape.tokens, shape.width, generator=torch.Generator().manual_seed(seed)).bfloat16()


def stream(
    model: nn.Module, shape: Shape = BINDS, budget: float = 0.5, timing: str = "early", **asked: Any
) -> Any:
    device = dataclasses.replace(simulated(shape), timing=timing, seed=3)
    return carom.stream(
        model, device=device, vram=int(budget * shape.nbytes), **{"codec": "lossless", **asked}
    )


def one_decoded(session: Any) -> bool:
    """Return whether the region has room for one decoded unit only."""
    return inside(session).layout.one_decoded and session.plan.slots == 1


def review(session: Any, model: nn.Module, shape: Shape = BINDS, count: int = 7) -> None:
    """Run ``count`` steps, which measure the times, and let the session choose."""
    inside(session).replan.at = float("inf")
    with torch.no_grad():
        for _ in range(count):
            model(inputs(shape))
    session.tune()


def take_one_decoded(session: Any) -> None:
    """Have the session take the way whatever it costs."""
    manager, replan = inside(session).manager, inside(session).replan
    replan.at, wanted = float("inf"), manager.present()
    packing = dataclasses.replace(wanted.packing, one_decoded=True, auto=False)
    manager.change(dataclasses.replace(wanted, packing=packing), replan.fallback)


# -- the choice


@pytest.mark.parametrize("codec", ["auto", "lossless"])
@pytest.mark.parametrize(
    ("shape", "budget", "taken"), [(BINDS, 0.4, True), (BINDS, 0.6, True), (COMPUTES, 0.4, False)],
    ids=["link-small", "link", "computing"],
)  # fmt: skip
def test_one_decoded_unit_is_chosen_where_the_link_binds_and_not_where_computing_does(
    codec, shape, budget, taken
):
    model = shape.model(train=False)
    with torch.no_grad(), stream(model, shape, budget, codec=codec) as session:
        review(session, model, shape)
        for _ in range(5):
            model(inputs(shape))
        report, plan = session.report(), session.plan
        assert one_decoded(session) is taken
        assert report.predicted_seconds == pytest.approx(report.step_seconds, rel=0.03)
        if taken:
            assert plan.staging_bytes and plan.region_bytes == max(
                unit.nbytes for unit in inside(session).units
            )
        assert report.vram_peak_bytes <= report.vram_budget_bytes


def test_the_memory_of_a_decoded_unit_keeps_one_more_and_the_step_is_shorter_by_it():
    model = BINDS.model(train=False)
    with torch.no_grad(), stream(model) as session:
        for _ in range(7):
            model(inputs())
        two, wire, stay = (
            session.report(),
            session.report().wire_bytes_per_step,
            inside(session).resident_names,
        )
        review(session, model, count=0)
        for _ in range(6):
            model(inputs())
        assert one_decoded(session)
        one = session.report()
        now = inside(session).resident_names
        assert stay < now and len(now) == len(stay) + 1, "what was there stays there"
        assert one.step_seconds / two.step_seconds == pytest.approx(one.wire_bytes_per_step / wire, rel=0.01)


@pytest.mark.parametrize("shape", [BINDS, BALANCE, COMPUTES], ids=lambda shape: shape.name)
def test_a_step_with_one_decoded_unit_is_predicted_as_the_device_runs_it(shape):
    """Where neither binds alone, a decoding that waits for the unit before it delays the step."""
    model = shape.model(train=False)
    with torch.no_grad(), stream(model, shape) as session:
        take_one_decoded(session)
        for _ in range(8):
            model(inputs(shape))
        session.tune()  # notes what the present layout is predicted to take
        manager = inside(session).manager
        advice = manager.planner.advise(manager.layout, manager.present(), True)
        assert advice.now == pytest.approx(session.report().step_seconds, rel=0.01)
        assert advice.best.wanted.packing.one_decoded is (shape is BINDS), "a review prices both again"


def test_residents_are_spread_anew_where_only_that_makes_the_step_shorter():
    """Near the balance, a unit that joins those that stay is of use only where the copies before it are late."""
    shape = Shape("near", ((512,),) * 12, 2.4, 10.0)
    model = shape.model(train=False)
    with torch.no_grad(), stream(model, shape) as session:
        for _ in range(7):
            model(inputs(shape))
        two, stay = session.report().step_seconds, inside(session).resident_names
        review(session, model, shape, count=0)
        for _ in range(5):
            model(inputs(shape))
        assert one_decoded(session) and not stay <= inside(session).resident_names
        assert session.report().step_seconds < 0.95 * two


def test_what_unpacking_adds_to_the_time_of_residents_belongs_to_the_unit_before_them():
    units = [UnitTensors(name, {f"{name}.weight": 10}) for name in ("a.0", "c.0", "a.1")]
    turns = (UnitTiming("a.0", 0.0, 0.0, 3.0), UnitTiming("a.1", 5.0, 5.0, 8.0))
    shown = StepProfile(False, 8.0, (8.0, 0.0), 100.0, (ForwardTiming(turns, 8.0),))
    learnt = learn(units, [0, 2], [(0, False), (1, False)], shown, unpacking={"a.0": 0.5, "a.1": 0.5})
    assert learnt is not None
    assert learnt.workload(units).forward == pytest.approx((3.5, 1.5, 3.0))
    assert learnt.workload(units).held == pytest.approx((3 / 3.5, 1.0, 1.0))
    plain = learnt.without_unpacking(20.0, [units[0]], learnt.link).workload(units)
    assert plain.forward == pytest.approx((3.0, 1.5, 3.0)) and plain.held == pytest.approx((1.0, 1.0, 1.0))


def test_the_change_is_made_once_when_it_has_paid_for_itself_and_never_back(monkeypatch):
    model, count = BINDS.model(train=False), 0
    moved = watch_changes(monkeypatch, lambda: count)
    advised, advise = [], Replan._advise
    monkeypatch.setattr(Replan, "_advise", lambda *a: (advised.append(advise(*a)), advised[-1])[1])
    monkeypatch.setattr("carom.core.session.measured_planner.SETTLING", 5e-3)  # steps take milliseconds here
    with torch.no_grad(), stream(model) as session:
        moved.clear()
        for count in range(30):  # noqa: B007 - `moved` gets it
            model(inputs())
        assert one_decoded(session) and len(moved) == 1 and moved[0] >= advised[0].steps > 4
        session.tune()
        assert one_decoded(session) and len(moved) == 1


# -- exactness and transfers


@pytest.mark.parametrize("codec", ["auto", "lossless"])
@pytest.mark.parametrize("timing", ["late", "random"])
def test_the_bits_are_those_of_the_resident_model_under_any_timing(timing, codec):
    model = BINDS.model(train=False)
    expected = [model(inputs(seed=seed)) for seed in range(4)]
    with torch.no_grad(), stream(model, timing=timing, codec=codec) as session:
        review(session, model)
        assert one_decoded(session)
        for _ in range(2):
            for seed, want in enumerate(expected):
                assert torch.equal(model(inputs(seed=seed)), want)
        for name, value in BINDS.model(train=False).named_parameters():
            assert torch.equal(session.read(name), value)


def test_each_packed_unit_crosses_once_a_step_and_residents_do_not():
    model = BINDS.model(train=False)
    with torch.no_grad(), stream(model) as session:
        take_one_decoded(session)
        for _ in range(4):
            model(inputs())
        engine, streamed = inside(session).engine, inside(session).streamed
        begin = engine.bytes_in
        for _ in range(3):
            model(inputs())
        assert 0 < len(streamed) < UNITS and all(unit.packed for unit in streamed)
        report, packed = session.report(), sum(unit.wire_bytes for unit in streamed)
        assert engine.bytes_in - begin == 3 * report.wire_bytes_per_step
        assert packed - 512 * len(streamed) < report.wire_bytes_per_step <= packed, (
            "without the gaps in between"
        )
        assert report.transfers_per_weight == 1
        assert report.raw_bytes_per_step == sum(unit.nbytes for unit in streamed)


# -- modules that need more


class Together(nn.Module):
    """Blocks; while ``together``, an operator takes weights of two of them at once."""

    def __init__(self, model: Any, together: bool) -> None:
        super().__init__()
        self.blocks, self.together = model.blocks, together

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        if self.together:
            weights = [self.blocks[at].parts[0].up.weight for at in (0, 3, 6)]
            x = x + torch.nn.functional.linear(x, torch.stack(weights).sum(0))
        return x


def test_a_module_that_uses_units_at_once_in_its_measured_steps_is_not_offered_it():
    model = Together(BINDS.model(train=False), True).requires_grad_(False)
    expected = model(inputs())
    with torch.no_grad(), stream(model) as session:
        review(session, model)
        assert session.report().packed_units and not one_decoded(session)
        assert inside(session).learn().at_once
        assert torch.equal(model(inputs()), expected)


@pytest.mark.parametrize("asked", [True, False], ids=["on-request", "by-itself"])
def test_the_first_pass_that_needs_more_runs_again_with_a_larger_region_for_good(asked, monkeypatch):
    monkeypatch.setattr("carom.core.session.measured_planner.SETTLING", 0.0)
    model = Together(BINDS.model(train=False), True).requires_grad_(False)
    expected = model(inputs())
    model.together = False
    moved = watch_changes(monkeypatch)
    with torch.no_grad(), stream(model, timing="random") as session:
        if asked:
            review(session, model)
            assert one_decoded(session)
        else:
            while not inside(session).replan.due_now:
                model(inputs())
        moved.clear()
        model.together = True
        for _ in range(12):
            assert torch.equal(model(inputs()), expected)
        session.tune()
        assert len(moved) == (1 if asked else 2), "to the larger region, and not to and fro"
        assert not one_decoded(session) and session.plan.slots >= 2 and session.report().packed_units


def test_a_later_pass_that_needs_more_names_the_units_and_the_next_one_has_room():
    model = Together(BINDS.model(train=False), True).requires_grad_(False)
    expected = model(inputs())
    model.together = False
    with torch.no_grad(), stream(model) as session:
        review(session, model)
        for _ in range(3):
            model(inputs())
        model.together = True
        with pytest.raises(carom.BudgetError, match="no room on the device for 'blocks"):
            model(inputs())
        for _ in range(2):
            assert torch.equal(model(inputs()), expected)
        assert not one_decoded(session)


def test_a_forward_that_records_gradients_finds_room_for_two_units_and_stays_so():
    model = BINDS.model(train=False)

    def gradient() -> Any:
        x = inputs().requires_grad_()
        model(x).float().sum().backward()
        return x.grad

    expected = gradient()
    with stream(model) as session:
        review(session, model)
        assert one_decoded(session)
        before = inside(session).resident_names
        for _ in range(3):
            assert torch.equal(gradient(), expected)
            assert inside(session).resident_names < before
            assert session.plan.slots >= 2 and not inside(session).layout.one_decoded
        review(session, model)
        assert not inside(session).layout.one_decoded


def test_steps_that_record_gradients_do_not_choose_it():
    model = BINDS.model(train=False)
    with stream(model) as session:
        inside(session).replan.at = float("inf")
        for _ in range(7):
            model(inputs())
        session.tune()
        assert session.report().packed_units and not inside(session).layout.one_decoded


# -- the plan


def decide(budget: float, **kinds: Any) -> Any:
    model = BINDS.model(train=kinds.pop("train", False))
    unit = kinds.pop("granularity", "auto")
    settings = planner.Settings(
        int(budget * BINDS.nbytes), unit, None, {}, packs=True, gradients=False, **kinds
    )
    return planner.decide(partial(carve, model), settings, 512)[1]


def test_a_plan_with_one_decoded_unit_gives_the_memory_of_the_other_to_residents():
    two, one = decide(0.5), decide(0.5, one_decoded=True)
    assert (two.slots, one.slots) == (2, 1) and one.staging_bytes == two.staging_bytes > 0
    assert len(one.resident) == len(two.resident) + 1
    assert decide(0.5, train=True, one_decoded=True).slots == decide(0.5, train=True).slots >= 2


def test_a_budget_without_memory_for_packed_bytes_beside_one_decoded_unit_gives_the_plan_of_raw_ones():
    small, larger = ({"budget": units / UNITS, "granularity": "block"} for units in (1.5, 2.02))
    assert decide(**small, one_decoded=True) == decide(**small) and decide(**small).staging_bytes == 0
    two, one = decide(**larger), decide(**larger, one_decoded=True)
    assert (two.slots, two.staging_bytes) == (2, 0) and one.slots == 1 and one.staging_bytes > 0
