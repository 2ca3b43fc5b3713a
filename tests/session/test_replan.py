"""What a session learns from its first steps: predicted and simulated steps agree, and a better layout is taken once."""

from __future__ import annotations

import dataclasses
from functools import partial
from types import SimpleNamespace
from typing import Any

import carom
import pytest
import torch
from carom.benchmarks.engines import codec_choice
from carom.core.model.units import Carving, carve
from carom.core.placement.packer import Packing
from carom.core.plan.predict import Link
from carom.core.plan.profile import ForwardTiming, StepProfile, UnitTensors, UnitTiming, learn
from carom.core.plan.residency import Plan
from carom.core.session import rule_planner as planner
from carom.core.session.layout import Wanted
from carom.core.session.layout_manager import LayoutManager, OutOfMemory
from carom.core.session.measured_planner import HOSTING, Priced, advise, choose
from carom.core.session.policies.replan import Replan
from tests_inside import inside
from tests_pairwise import pairwise
from tests_uneven import Net, device, size, step
from tests_watch import watch_changes
from torch import nn


@pairwise(granularity=["block", "phase"], train=[False, True], budget=["0.1 0.6", "0.5 0.6", "0.5 1.5"])
def test_predicted_and_simulated_steps_of_a_session_agree(granularity, train, budget):
    share, ratio = map(float, budget.split())  # of the weights; of the link's time to computing's
    net = Net(train)
    with carom.stream(
        net, device=device(net, ratio), vram=int(size(net) * share), granularity=granularity
    ) as session:
        for _ in range(8):
            step(net, train)
        session.tune()
        for _ in range(5):
            step(net, train)
        predicted = session.report().predicted_seconds
        assert predicted == pytest.approx(session.report().step_seconds, rel=0.03)


def test_steps_that_train_what_is_elsewhere_have_a_session_laid_out_for_training():
    net = Net(True)
    with carom.stream(net, device=device(net, 0.6), vram=int(size(net) * 0.4)) as session:
        for _ in range(4):
            step(net, False)
        session.tune()
        assert not inside(session).trains
        for _ in range(4):
            step(net, True)
        session.tune()
        assert inside(session).trains and inside(session).settings().trains


def computing_binds():
    """Return (model, stream) of a model that begins packed, where raw weights spare the device the unpacking."""
    shape = codec_choice.Shape("", ((256,),) * 6, 0.4, 4.0)
    slow = dataclasses.replace(codec_choice.simulated(shape), timing="random")
    net = shape.model(train=False)
    return net, lambda: carom.stream(net, device=slow, vram=shape.nbytes // 2)


def run(net):
    with torch.no_grad():
        return net(torch.ones(16, 256, dtype=torch.bfloat16))


def test_a_session_takes_a_faster_layout_by_itself_once_it_has_paid_for_itself(monkeypatch):
    net, stream = computing_binds()
    expected, count = run(net), 0
    moved = watch_changes(monkeypatch, lambda: count)
    with stream() as session:
        advised, advise = [], Replan._advise
        monkeypatch.setattr(Replan, "_advise", lambda *a: (advised.append(advise(*a)), advised[-1])[1])
        for count in range(40):  # noqa: B007 - `moved` gets it
            assert torch.equal(run(net), expected)
        assert moved == [max(moved)], "once, and only once"
        assert moved[0] >= advised[0].steps > 6
        assert session.report().packed_units == 0 and inside(session).replan.at > 1e9
        assert session.report().predicted_seconds == pytest.approx(session.report().step_seconds, rel=0.03)


def test_a_step_is_predicted_by_the_fetches_of_its_schedule():
    """Of units of several sizes some stay in the region. A prefetcher that decides in each step fetches them each time."""
    shape = codec_choice.Shape("", tuple((128 * blocks,) for blocks in (1, 2, 1, 2, 1, 2)), 4.0, 10.0)
    cell = codec_choice.Cell(shape, 0.5, train=False)
    found = codec_choice.run(shape.model(False), cell, "raw", codec_choice.simulated(shape), 7)
    assert found["predicted_seconds"] == pytest.approx(found["seconds"], rel=0.01)


def test_a_change_counts_what_it_brings_to_the_host():
    """Residents that leave, and what is cut otherwise: in memory that was never used and is pinned for the first time."""
    net = Net()
    settings = planner.Settings(size(net) // 2, "block", None, {})
    carving, before = planner.decide(partial(carve, net), settings, 512)
    learnt: Any = SimpleNamespace(link=Link(1e18, 0.0))  # what crosses takes no time

    def brought(carving_after, plan_after):
        after = Priced(Wanted(0, 0), carving_after, plan_after, 0.5)
        return advise(carving, before, 1.0, after, learnt, copies=False, unpacks=False).move * HOSTING

    stay = dict(list(before.resident.items())[::2])
    leaving = before.resident.keys() - stay.keys()
    nbytes = sum(entry.nbytes for unit in leaving for entry in carving.units[unit].entries)
    assert nbytes and brought(carving, dataclasses.replace(before, resident=stay)) == pytest.approx(nbytes)
    assert brought(carving, before) == pytest.approx(0, abs=1)
    # The same weights cut into parts: all that streams gets another place.
    parts = planner.cut(partial(carve, net), dataclasses.replace(settings, granularity="phase"), None)
    streamed = [unit for index, unit in enumerate(carving.units) if index not in before.resident]
    moved = brought(parts, dataclasses.replace(before, resident={}))
    assert len(parts.units) > len(carving.units)
    assert moved >= 0.9 * sum(unit.nbytes for unit in streamed)


@pytest.mark.parametrize(
    ("packed", "raw", "best"),
    [((1.0, 0.98), 0.999, "raw"), ((1.0, 0.98), 1.001, 0), ((1.0, 0.96), 0.97, 1), ((1.0,), None, 0)],
)
def test_weights_cross_packed_only_where_that_is_faster(packed, raw, best):
    """What stays on the device is packed only where that saves three percent; it takes memory of the host."""
    layouts = [Priced(Wanted(0, 0), Carving([], [], []), Plan(0, 0, 0, {}, 0), seconds) for seconds in packed]
    plain = None if raw is None else dataclasses.replace(layouts[0], seconds=raw)
    assert choose(layouts, plain) is (plain if best == "raw" else layouts[best])


@pytest.mark.parametrize("unpacks", [True, False])
def test_a_small_gain_is_worth_a_change_only_where_weights_cross_raw_from_then_on(unpacks):
    net = Net()
    carving, plan = planner.decide(
        partial(carve, net), planner.Settings(size(net) // 2, "block", None, {}), 512
    )
    learnt: Any = SimpleNamespace(link=Link(1e9, 0.0))
    better = Priced(Wanted(0, 0, Packing(plain=True)), carving, plan, 0.99)
    assert advise(carving, plan, 1.0, better, learnt, copies=True, unpacks=unpacks).worthwhile is unpacks


def test_the_layout_does_not_change_under_a_graph_that_is_still_wanted():
    net, stream = computing_binds()
    with stream() as session:
        kept = torch.ones(16, 256, dtype=torch.bfloat16, requires_grad=True)
        wanted = net(kept).sum()
        for _ in range(40):
            run(net)
        assert not session.tune()
        packed = session.report().packed_units
        wanted.backward()  # asks for units as they were at its forward
        assert packed and kept.grad is not None
        del wanted
        for _ in range(20):
            run(net)
        assert session.report().packed_units == 0, "and is taken as soon as nobody wants it"


@pytest.mark.parametrize("distributed", [False, True])
def test_trainable_weights_of_a_distributed_job_do_not_move_unasked(monkeypatch, distributed):
    """Who averages gradients hangs onto accumulators that a move would replace."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: distributed)
    net, stream = computing_binds()
    net.register_parameter("scale", nn.Parameter(torch.ones(1)))
    with stream() as session:
        for _ in range(40):
            run(net)
        assert (session.report().packed_units > 0) is distributed


def test_an_explicit_granularity_is_kept():
    for granularity in ("block", "layer"):
        net = Net()
        with carom.stream(
            net, device=device(net, 0.7), vram=int(size(net) * 0.3), granularity=granularity
        ) as session:
            for _ in range(10):
                step(net, False)
            names = [unit.name for unit in inside(session).units]
            session.tune()
            assert [unit.name for unit in inside(session).units] == names


def test_a_budget_set_later_keeps_the_choice():
    net, stream = computing_binds()
    expected = run(net)
    with stream() as session:
        for _ in range(8):
            run(net)
        assert session.tune() and session.report().packed_units == 0
        more = session.vram * 3 // 2
        session.set_budget(vram=more)
        for _ in range(8):
            assert torch.equal(run(net), expected)
        report = session.report()
        assert report.packed_units == 0 and report.vram_peak_bytes <= more


def test_where_copies_block_nothing_is_predicted_and_nothing_moves():
    net = Net()
    with carom.stream(net, device="cpu", vram=int(size(net) * 0.4)) as session:
        for _ in range(10):
            step(net, False)
        assert not session.tune()
        assert session.report().predicted_seconds is None


# -- learning


def profile(turns, compute=(10.0, 0.0), train=False, turn=10.0):
    return StepProfile(train, sum(compute), compute, 100.0, (ForwardTiming(tuple(turns), turn),))


def test_a_units_turn_is_its_own_and_what_follows_belongs_to_residents_or_to_none():
    units = [
        UnitTensors("a.0", {"x": 10}),
        UnitTensors("c.0", {"y": 10}),
        UnitTensors("b.0", {"z": 20}),
        UnitTensors("a.2", {"w": 10}),
    ]
    turns = [UnitTiming("a.0", 0, 0, 3), UnitTiming("b.0", 5, 6, 12), UnitTiming("a.2", 13, 13, 14)]
    learnt = learn(units, [0, 2, 3], [(0, False), (1, False), (2, False)], profile(turns, (15.0, 0), turn=15))
    assert learnt is not None
    work = learnt.workload(units)
    assert work.order == (0, 1, 2, 3)
    # c.0 (resident) has the 2 s before b.0; b.0 6 s and 1 s after it; the last second is after a.2; 1 s was waiting
    assert work.forward == pytest.approx([15 / 14 * s for s in (3, 2, 7, 2)])
    assert work.held == pytest.approx((1, 1, 6 / 7, 1 / 2))
    assert learn(units, [0, 2, 3], [(0, False)], profile(turns, (7.5, 0), turn=15)).workload(
        units
    ).forward == pytest.approx([7.5 / 14 * s for s in (3, 2, 7, 2)])


def test_residents_between_two_turns_share_as_streamed_units_of_their_kind_do():
    units = [UnitTensors(f"{part}.{n}", {f"{part}{n}": 10}) for n in range(2) for part in ("norm", "mlp")]
    turns = [UnitTiming("norm.0", 0, 0, 1), UnitTiming("mlp.0", 1, 1, 10)]
    learnt = learn(units, [0, 1], [(0, False), (1, False)], profile(turns, (20.0, 0), turn=20.0))
    assert learnt is not None
    assert learnt.workload(units).forward == pytest.approx((1, 9, 1, 9))


def test_recomputation_is_seen_in_the_order_and_residents_do_as_their_kind_does():
    units = [UnitTensors("stem", {"s": 4}), *(UnitTensors(f"b.{n}", {f"w{n}": 8}) for n in range(4))]
    expected = [(0, False), (1, False), (2, False), (2, False), (2, True), (1, False), (1, True), (0, True)]
    learnt = learn(
        units, [0, 1, 3], expected, profile([UnitTiming("stem", 0, 0, 1)], (3.0, 8.0), train=True, turn=3.0)
    )
    assert learnt is not None and learnt.train
    assert learnt.recomputed == {"w0", "w1", "w2", "w3"}
    work = learnt.workload(units, [frozenset({f"w{n}"}) for n in range(4)])
    assert work.groups == ((1,), (2,), (3,), (4,))
    assert sum(work.phases) == pytest.approx(11.0)


def test_what_a_backward_never_uses_is_not_fetched_for_it():
    units = [UnitTensors("stem", {"s": 4}), UnitTensors("b.0", {"w": 8})]
    expected = [(0, False), (1, False), (1, True)]
    turns = [UnitTiming("stem", 0, 0, 1), UnitTiming("b.0", 1, 1, 3)]
    learnt = learn(units, [0, 1], expected, profile(turns, (3.0, 4.0), train=True, turn=3.0))
    assert learnt is not None
    assert [use.unit for use in learnt.workload(units).uses()] == [0, 1, 1]
    assert learnt.workload(units).phases == pytest.approx((3.0, 4.0))


def test_another_carving_takes_the_same_time():
    whole = [UnitTensors("b.0", {"p": 10, "q": 30}), UnitTensors("b.1", {"r": 10, "s": 30})]
    turns = [UnitTiming("b.0", 0, 0, 6), UnitTiming("b.1", 6, 6, 12)]
    learnt = learn(whole, [0, 1], [(0, False), (1, False)], profile(turns, (12.0, 0.0), turn=12))
    assert learnt is not None
    parts = [
        UnitTensors("b.0.p", {"p": 10}),
        UnitTensors("b.0.q", {"q": 30}),
        UnitTensors("b.1.r", {"r": 10}),
        UnitTensors("b.1.s", {"s": 30}),
    ]
    assert learnt.workload(parts).forward == pytest.approx((1.5, 4.5, 1.5, 4.5))


def test_nothing_is_learnt_where_nothing_was_copied():
    unit = UnitTensors("a", {"x": 1})
    assert learn([unit], [0], [], profile([])) is None
    bare = StepProfile(False, 1.0, (1.0, 0.0), None, ())
    assert learn([unit], [0], [(0, False)], bare) is None


def test_copies_of_differing_sizes_tell_what_a_copy_costs_beside_its_bytes():
    units = [UnitTensors("a", {"x": 10_000}), UnitTensors("b", {"y": 50_000})]
    copies = tuple((size, 2e-6 + size / 1e9) for size in (10_000, 50_000, 10_000, 50_000))
    shown = StepProfile(
        False, 1.0, (1.0, 0.0), 0.9e9, (ForwardTiming((UnitTiming("a", 0, 0, 1),), 1.0),), copies
    )
    learnt = learn(units, [0, 1], [(0, False), (1, False)], shown)
    assert learnt is not None
    assert learnt.link.bytes_per_second == pytest.approx(1e9, rel=1e-6)
    assert learnt.link.latency == pytest.approx(2e-6, rel=1e-6)


def test_a_change_that_finds_no_memory_takes_the_layout_before(monkeypatch):
    net, stream = computing_binds()
    expected = run(net)
    with stream() as session:
        for _ in range(6):
            run(net)
        held, attach, failed = session.plan.resident, LayoutManager._attach, []

        def short(self, wanted):
            if not failed:
                failed.append(1)
                raise OutOfMemory("injected")
            attach(self, wanted)

        monkeypatch.setattr(LayoutManager, "_attach", short)
        session.tune()
        assert failed, "nothing was to be gained: the test would show nothing"
        assert session.plan.resident == held
        assert torch.equal(run(net), expected)


@pytest.mark.parametrize(("ratio", "bound"), [(40.0, True), (0.25, False)])
def test_a_session_knows_when_the_host_binds_and_makes_its_units_fewer(monkeypatch, ratio, bound):
    monkeypatch.setattr(planner, "PART", 64 << 10)  # the block is 126 KiB
    net = Net()
    slow = dataclasses.replace(device(net, ratio), host_seconds=40e-6 if bound else 1e-7)
    with carom.stream(net, device=slow, vram=int(size(net) * 0.5)) as session:
        parts = session.report().units
        for _ in range(8):
            step(net, False)
        report = session.report()
        assert (report.bound_by == "host") is bound
        assert ("waits for Python" in report.table()) is bound
        assert session.tune() is bound
        assert (session.report().units < parts) is bound
        step(net, False)


def test_a_device_that_lags_behind_the_host_is_not_said_to_wait_for_it():
    turns = (UnitTiming("a", 0.0, 0.0, 1.0),)

    def profile(close, compute=1.0, held=False):
        timing = ForwardTiming(turns, 1.0, close, held)
        return StepProfile(False, 1.0, (compute, 0.0), 1e9, (timing,), stalled=1.0 - compute)

    assert profile(1.0).host_bound and not profile(0.4).host_bound
    assert not profile(1.0, compute=0.8).host_bound, "it waits for weights"
    assert not profile(1.0, held=True).host_bound, "the device was held back"
    assert not StepProfile(False, 1.0, (1.0, 0.0), 1e9, ()).host_bound, "nothing was seen"


def test_where_the_host_is_not_on_the_clock_it_is_not_watched():
    net = Net()
    with carom.stream(net, device=device(net, 3.0), vram=int(size(net) * 0.5)) as session:
        for _ in range(8):
            step(net, False)
        assert not inside(session).meter.watches_host and session.report().bound_by != "host"
