"""What a session learns from its first steps: predicted and simulated steps agree, and a better layout is taken once."""

from __future__ import annotations

import dataclasses

import carom
import pytest
import torch
from carom.core.common.sizes import MIB
from carom.core.metrics.meter import Meter
from carom.core.plan.predict import Link
from carom.core.plan.profile import ForwardTiming, StepProfile, TensorTimes, UnitTensors, UnitTiming, learn
from carom.core.session import measured_planner as replan
from carom.core.session import rule_planner as planner
from carom.core.session.layout_manager import LayoutManager, OutOfMemory
from carom.core.session.policies.replan import Replan
from tests_inside import inside
from tests_pairwise import pairwise
from tests_uneven import WIDTH, Net, device, size, step, uneven
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


def test_a_session_takes_a_faster_layout_by_itself_once_it_pays(monkeypatch):
    net, simulated, vram = uneven()
    resident = [step(net, False) for _ in range(1)][0]
    laid_out = []
    change = LayoutManager.change
    monkeypatch.setattr(
        LayoutManager, "change", lambda self, *a, **how: (laid_out.append(1), change(self, *a, **how))[1]
    )
    with carom.stream(net, device=simulated, vram=vram, granularity="block") as session:
        session.report()
        for _ in range(6):
            assert torch.equal(step(net, False), resident)
        before, held = session.report().step_seconds, session.plan
        for _ in range(40):
            assert torch.equal(step(net, False), resident)
        after = session.report()
        assert laid_out == [1], "once, and only once"
        assert after.step_seconds < 0.9 * before
        assert after.vram_peak_bytes <= vram
        assert session.plan != held and after.predicted_seconds == pytest.approx(after.step_seconds, rel=0.03)


def test_what_was_found_is_not_searched_for_again_when_it_is_taken(monkeypatch):
    net, simulated, vram = uneven()
    searches = []
    search = replan.decide_with
    monkeypatch.setattr(replan, "decide_with", lambda *given: (searches.append(1), search(*given))[1])
    with carom.stream(net, device=simulated, vram=vram, granularity="block") as session:
        for _ in range(8):
            step(net, False)
        searches.clear()
        assert session.tune() and searches == [1]


def test_what_has_not_paid_yet_is_not_searched_for_again_when_it_has(monkeypatch):
    net, simulated, vram = uneven()
    monkeypatch.setattr(replan, "HOSTING", 1e10)  # so that it takes a while
    searches, taken = [], []
    search, take = replan.decide_with, Replan._take_advice
    monkeypatch.setattr(replan, "decide_with", lambda *given: (searches.append(1), search(*given))[1])
    monkeypatch.setattr(
        Replan, "_take_advice", lambda self, *a: (taken.append(len(searches)), take(self, *a))[1]
    )
    with carom.stream(net, device=simulated, vram=vram, granularity="block") as session:
        counts: list[int] = []
        for _ in range(400):
            step(net, False)
            counts.append(len(searches))
            if taken:
                break
        assert taken == [1] and session.plan.predicted_seconds
        assert counts.index(1) < len(counts) - 2, "it was found before it was taken"


def test_a_change_counts_what_it_brings_to_the_host():
    """Residents that leave, and what is cut otherwise: in memory that was never used and is pinned for the first time."""
    net, simulated, vram = uneven()
    with carom.stream(net, device=simulated, vram=vram, granularity="block") as session:
        for _ in range(8):
            step(net, False)
        advice = inside(session).advice()
        before, after = session.plan, advice.plan
        leaving = [unit for unit in before.resident if unit not in after.resident]
        nbytes = sum(
            entry.nbytes for unit in leaving for entry in inside(session).carving.units[unit].entries
        )
        assert leaving and replan._leaving(inside(session).carving, before, advice.carving, after) == nbytes
        assert advice.move > nbytes / replan.HOSTING
        # The same weights cut into parts: all that streams gets another place.
        parts = planner.cut(
            net, dataclasses.replace(inside(session).settings(measured=True), granularity="phase"), None
        )
        streamed = [
            unit for index, unit in enumerate(inside(session).carving.units) if index not in before.resident
        ]
        none = dataclasses.replace(before, resident={})
        moved = replan._leaving(inside(session).carving, before, parts, none)
        assert moved >= 0.9 * sum(unit.nbytes for unit in streamed)


def test_a_change_waits_until_it_has_paid_for_itself(monkeypatch):
    net, simulated, vram = uneven()
    moved = []
    monkeypatch.setattr(Replan, "_take_advice", lambda self, advice, *_: moved.append(advice))
    with carom.stream(net, device=simulated, vram=vram, granularity="block") as session:
        count = 0
        while not moved and count < 200:
            step(net, False)
            count += 1
        assert moved and count >= moved[0].steps > 6
        assert inside(session).replan.at > 1e9


def test_the_layout_does_not_change_under_a_graph_that_is_still_wanted():
    net, simulated, vram = uneven()
    with carom.stream(net, device=simulated, vram=vram, granularity="block") as session:
        kept = torch.randn(4, WIDTH, requires_grad=True)
        wanted = net(kept).sum()
        for _ in range(40):
            step(net, False)
        assert not session.tune()
        wanted.backward()  # asks for units as they were at its forward
        assert kept.grad is not None
        del wanted
        for _ in range(10):
            step(net, False)
        assert inside(session).profile is not None, "and is taken as soon as nobody wants it"


@pytest.mark.parametrize("distributed", [False, True])
def test_trainable_weights_of_a_distributed_job_do_not_move_unasked(monkeypatch, distributed):
    """Who averages gradients hangs onto accumulators that a move would replace."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: distributed)
    net, simulated, vram = uneven()
    net.register_parameter("scale", nn.Parameter(torch.ones(1)))
    with carom.stream(net, device=simulated, vram=vram, granularity="block") as session:
        for _ in range(40):
            step(net, False)
        assert (inside(session).profile is None) is distributed


def test_an_explicit_granularity_is_kept():
    for granularity in ("block", "layer"):
        net = Net()
        with carom.stream(
            net, device=device(net, 0.7), vram=int(size(net) * 0.3), granularity=granularity
        ) as session:
            for _ in range(10):
                step(net, False)
            names = [unit.name for unit in inside(session).carving.units]
            session.tune()
            assert [unit.name for unit in inside(session).carving.units] == names


def test_a_budget_set_later_is_planned_with_what_was_learnt():
    net, simulated, vram = uneven()
    with carom.stream(net, device=simulated, vram=vram, granularity="block") as session:
        for _ in range(10):
            step(net, False)
        assert session.tune()
        session.set_budget(vram=2 * vram)
        for _ in range(8):
            step(net, False)
        report = session.report()
        assert report.predicted_seconds == pytest.approx(report.step_seconds, rel=0.03)
        assert report.vram_peak_bytes <= 2 * vram


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


def waiting(closes: tuple[bool, bool], use: float = 2.0):
    """A forward of 12 s in which two units' turns end while the device is right behind the host, or not."""
    whole = [UnitTensors("b.0", {"p": 10}), UnitTensors("c.0", {"q": 30}), UnitTensors("c.1", {"r": 30})]
    turns = (UnitTiming("b.0", 0, 0, 4, closes[0]), UnitTiming("c.0", 4, 4, 8, closes[1]))
    shown = StepProfile(False, 12.0, (12.0, 0.0), 100.0, (ForwardTiming(turns, 12.0, 0.0, use),))
    learnt = learn(whole, [0, 1], [(0, False), (1, False)], shown)
    assert learnt is not None and not learnt.host_bound
    return whole, learnt


def test_seconds_in_which_a_use_waits_for_the_host_are_apart_from_computing():
    units, learnt = waiting((True, False))
    assert learnt.workload(units).forward == pytest.approx((4, 4, 4)) and learnt.host_waits(units) == [
        0,
        0,
        0,
    ]
    apart = learnt.without_host_waits()
    assert apart.workload(units).forward == pytest.approx((2, 4, 4))
    assert apart.host_waits(units) == pytest.approx([2, 0, 0])
    # A part of such a unit costs the host as much as the whole.
    assert apart.host_waits([UnitTensors("b.0.p", {"p": 5})]) == pytest.approx([2])


def test_the_present_step_waits_for_the_host_at_each_use_of_what_streams():
    net = Net()
    settings = planner.Settings(int(size(net) * 0.5), "block", None, {})
    carving, plan = planner.decide(net, settings, 512)
    names = [entry.name for unit in carving.units for entry in unit.entries]

    def now(use: float) -> float:
        learnt = TensorTimes(
            False, Link(1e15, 0.0), dict.fromkeys(names, 1e-3), {}, {name: place for place, name in enumerate(names)},
            frozenset(), frozenset(), {}, 1.0, 1.0, host_bound_share=dict.fromkeys(names, 1.0), use_seconds=use, excludes_host_waits=True,
        )  # fmt: skip
        return replan.advise(net, settings, 512, learnt, carving, plan).now

    streamed = len(carving.units) - len(plan.resident)
    assert 0 < streamed < len(carving.units)
    assert now(1e-4) - now(0.0) == pytest.approx(streamed * 1e-4, rel=1e-3)


def test_no_unit_waits_longer_for_the_host_than_it_takes():
    units, learnt = waiting((True, True), use=5.0)
    apart = learnt.without_host_waits()
    assert apart.workload(units).forward == pytest.approx((0, 0, 4))  # a resident waits for nothing
    assert apart.host_waits(units) == pytest.approx([4, 4, 4])


def test_residents_wait_for_the_host_as_the_streamed_of_their_kind_do():
    units, learnt = waiting((False, True))
    assert learnt.without_host_waits().host_waits(units) == pytest.approx([0, 2, 2])


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


def test_auto_granularity_lets_blocks_and_parts_compete(monkeypatch):
    """Whichever is predicted to be faster; parts only where they are faster by more than they cost the host."""
    from dataclasses import replace

    from carom.core.session import measured_planner as replan
    from carom.core.session import rule_planner as planner

    monkeypatch.setattr(planner, "PART", 64 << 10)  # the block is 126 KiB
    chosen = set()
    for ratio, share in ((0.5, 0.3), (2.0, 0.5)):
        net = Net()
        simulated = device(net, ratio)
        with carom.stream(net, device=simulated, vram=int(size(net) * share)) as session:
            for _ in range(8):
                step(net, False)
            looked = inside(session)
            looked.advice()
            learnt, settings = looked.learnt, looked.settings()
            found = {}
            for granularity in ("auto", "block", "phase"):
                asked = replace(settings, granularity=granularity)
                carving, plan = replan.decide_with(net, asked, 512, learnt)
                found[granularity] = plan.predicted_seconds
                if granularity == "auto":
                    chosen.add(carving.units[0].kind)
        assert found["auto"] <= min(found["block"], found["phase"]) / replan.FINER
    assert chosen == {"phase", "block"}


def test_a_change_that_finds_no_memory_takes_the_layout_before(monkeypatch):
    net, simulated, vram = uneven()
    resident = step(net, False)
    with carom.stream(net, device=simulated, vram=vram, granularity="block") as session:
        for _ in range(6):
            step(net, False)
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
        assert torch.equal(step(net, False), resident)


@pytest.mark.parametrize(("ratio", "bound"), [(3.0, True), (0.25, False)])
def test_a_session_knows_when_the_host_binds(monkeypatch, ratio, bound):
    """The simulated device is always right behind the host: then only waiting for weights speaks against it."""
    begin = Meter.__init__
    monkeypatch.setattr(
        Meter, "__init__", lambda self, engine: (begin(self, engine), setattr(self, "watches_host", True))[0]
    )
    monkeypatch.setattr(Meter, "add_host_seconds", lambda self, seconds: None)  # not of the virtual clock
    net = Net()
    with carom.stream(
        net, device=device(net, ratio), vram=int(size(net) * 0.5), granularity="block"
    ) as session:
        for _ in range(8):
            step(net, False)
        report, advice = session.report(), inside(session).advice()
        assert (report.bound_by == "host") is bound
        assert (advice.reason == replan.HOST) is bound and advice.understood
        assert ("waits for Python" in report.table()) is bound


def test_a_device_that_lags_behind_the_host_is_not_said_to_wait_for_it():
    turns = (UnitTiming("a", 0.0, 0.0, 1.0),)

    def profile(close, compute=1.0):
        return StepProfile(False, 1.0, (compute, 0.0), 1e9, (ForwardTiming(turns, 1.0, close),))

    assert profile(1.0).host_bound and not profile(0.4).host_bound
    assert not profile(1.0, compute=0.8).host_bound, "it waits for weights"
    assert not StepProfile(False, 1.0, (1.0, 0.0), 1e9, ()).host_bound, "nothing was seen"


def learnt_of(use: float, uses: int = 40) -> TensorTimes:
    """Ten blocks of four parts in inference, bound by a host that takes ``use`` seconds for each use of a unit."""
    pieces = [
        UnitTensors(f"blocks.{b}.{p}.weight", {f"blocks.{b}.{p}.weight": MIB})
        for b in range(10)
        for p in "abcd"
    ]
    at, turns = 0.0, []
    for piece in pieces:
        turns.append(UnitTiming(piece.name, at, at, at + 1e-3))
        at += 1e-3
    forward = ForwardTiming(tuple(turns), at, 1.0, use)
    profile = StepProfile(False, at, (at, 0.0), 50e9, (forward,), ((MIB, MIB / 50e9),))
    learnt = learn(pieces, range(uses), [(unit, False) for unit in range(uses)], profile)
    assert learnt is not None
    return learnt


def test_what_the_host_takes_for_uses_is_no_computing_and_returns_with_every_use():
    learnt = learnt_of(0.25e-3)
    assert learnt.host is not None and learnt.host.use == pytest.approx(0.25e-3)
    assert learnt.host.model == pytest.approx(30e-3) and sum(learnt.forward.values()) == pytest.approx(30e-3)
    assert learnt.host_seconds(40) == pytest.approx(40e-3) and learnt.host_seconds(10) == pytest.approx(
        32.5e-3
    )
    # Of a clock that is another one: never more than there is.
    assert learnt_of(1.0).host_seconds(40) == pytest.approx(40e-3) and learnt_of(1.0).host.model > 0


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in "abcd":
            setattr(self, name, nn.Linear(512, 512, bias=False))

    def forward(self, x):
        return self.d(self.c(self.b(self.a(x))))


@pytest.mark.parametrize(("use", "coarse"), [(0.4e-3, True), (0.0, False)])
def test_where_the_host_binds_units_are_made_fewer(monkeypatch, use, coarse):
    net = nn.Sequential()
    net.blocks = nn.ModuleList(Parts() for _ in range(10))
    monkeypatch.setattr(planner, "PART", MIB)
    settings = planner.Settings(16 * MIB, "auto", None, {})
    carving, plan = planner.decide(net, settings, 512)
    assert len(carving.units) == 40, "it begins with parts"
    advice = replan.advise(net, settings, 512, learnt_of(use), carving, plan)
    assert advice.understood
    if coarse:
        assert advice.reason == "" and len(advice.carving.units) == 10
        assert (
            advice.saves == pytest.approx(advice.now - advice.plan.predicted_seconds) and advice.saves > 5e-3
        )
    else:
        assert advice.reason == replan.HOST


def test_a_layout_in_which_packed_weights_cannot_be_unpacked_is_taken_only_where_there_is_no_other(
    monkeypatch,
):
    """Fewer units spare the host, but blocks leave no room for unpacking: plain bytes cross slower than was measured."""
    net = nn.Sequential()
    net.blocks = nn.ModuleList(Parts() for _ in range(10)).requires_grad_(False)
    monkeypatch.setattr(planner, "PART", MIB)
    block = sum(p.nbytes for p in net.blocks[0].parameters())
    settings = planner.Settings(int(2.2 * block), "auto", None, {}, packs=True)
    learnt = learnt_of(1e-3)
    _, packed = replan.decide_with(net, settings, 512, learnt)
    assert packed.staging_bytes
    carving, plain = replan.decide_with(net, dataclasses.replace(settings, packs=False), 512, learnt)
    assert len(carving.units) == 10 and plain.predicted_seconds < packed.predicted_seconds
    alone = planner.Settings(int(2.2 * block), "block", None, {}, packs=True)
    assert not replan.decide_with(net, alone, 512, learnt)[1].staging_bytes


def test_where_the_host_is_not_on_the_clock_it_is_not_watched():
    net = Net()
    with carom.stream(net, device=device(net, 3.0), vram=int(size(net) * 0.5)) as session:
        for _ in range(8):
            step(net, False)
        assert not inside(session).meter.watches_host and session.report().bound_by != "host"
