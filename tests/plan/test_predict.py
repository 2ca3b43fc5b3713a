"""Predicted steps against the real streamer on the simulated device, and what must hold of any prediction."""

from __future__ import annotations

import threading

import pytest
import torch
from carom.core.device.simulated import SimulatedDevice, SimulatedEngine
from carom.core.device.slot import User
from carom.core.host.arena import HostArena
from carom.core.metrics.meter import Meter
from carom.core.model import managed_tensor
from carom.core.model.units import Unit
from carom.core.placement.host_copies import HostStore
from carom.core.placement.pinned_tier import PinnedBacking, PinnedTier
from carom.core.plan.predict import Fetches, LaunchSeconds, Link, Workload, predict
from carom.core.plan.residency import resident_cost
from carom.core.streaming import run
from carom.core.streaming import streamer as streamers
from carom.core.streaming import unit as unit_file
from carom.core.streaming.unit import Views
from hypothesis import given, settings
from hypothesis import strategies as st
from tests_schedule_cases import predicted

RATE, LATENCY = 1e9, 12e-6


def simulated_steps(monkeypatch, sizes, resident, region, workload, steps=9, skip=4):
    """Mean seconds and copies of a step when the real streamer runs it on the simulated device, and what predicts them."""
    engine = SimulatedEngine(
        SimulatedDevice(
            timing="early",
            link_bytes_per_second=RATE,
            copy_latency_seconds=LATENCY,
        )
    )

    # These units have bytes, and no tensors.
    monkeypatch.setattr(unit_file, "make_views", lambda unit, base: Views(base, base, [], None))
    arena = HostArena(engine.pinner, None)
    tier = PinnedTier(engine, HostStore(arena, None, {}))
    streamer = streamers.Streamer(engine, region, Meter(engine), tier)
    streamer.meter.timing = False
    places = {}
    for index, size in enumerate(sizes):
        if index not in resident:
            unit = Unit(str(index), "block", [])
            unit.nbytes = unit.raw_bytes = size
            places[index] = len(tier.backings)
            tier.backings.append(PinnedBacking(unit, streamer, places[index], arena.allocate(size)))
    streamer.start(arena)
    streamed = {index: streamer.units[place] for index, place in places.items()}
    compute = engine._streams["compute"]
    phase = [False]
    monkeypatch.setattr(managed_tensor, "in_backward", lambda: phase[0])
    monkeypatch.setattr(run, "_graph_task", lambda: 0 if phase[0] else -1)
    user = User(threading.get_ident(), engine.stream())
    count = len(sizes)
    uses = workload.uses()
    half = len(workload.order)
    times = []
    for _ in range(steps):
        begin, copies = compute.clock, engine.copies
        phase[0] = False
        streamer.follower.expect_pass()
        for place, use in enumerate(uses):
            phase[0] = use.backward
            if use.unit not in streamed:
                compute.clock += use.seconds
                continue
            # In the backward a unit's last use is autograd's, what comes before it recomputation.
            again = place >= half and use.unit in {u.unit for u in uses[place + 1 : place + 1 + count]}
            slot = streamer.run.acquire(streamed[use.unit], user, use.backward and not again)
            compute.clock += use.seconds
            streamer.run.release(slot, (user,))
        times.append((compute.clock - begin, engine.copies - copies))
    kept = times[skip:]
    means = sum(t for t, _ in kept) / len(kept), sum(c for _, c in kept) / len(kept)
    schedule, fetches = streamer.follower.schedule, Fetches()
    if schedule is not None:
        index = {place: index for index, place in places.items()}
        units = [index[place] for place in schedule.unit_of]
        fetches = Fetches(schedule.order.uses, schedule.after, schedule.before, units, schedule.laps)
    return *means, predict(sizes, resident, region, workload, Link(RATE, LATENCY), fetches)


KB = 1024


@st.composite
def problems(draw, uniform=False, most=10):
    count = draw(st.integers(2, most))
    one = draw(st.integers(4, 64)) * KB
    sizes = [one if uniform else draw(st.integers(2, 64)) * KB for _ in range(count)]
    factor = st.sampled_from([0.1, 0.4, 0.8, 1.0, 1.3, 3.0])
    forward = tuple(size / RATE * draw(factor) for size in sizes)
    kind = draw(st.sampled_from(["infer", "train", "checkpointed", "in groups"]))
    backward = () if kind == "infer" else tuple(2 * seconds for seconds in forward)
    groups = {
        "checkpointed": tuple((unit,) for unit in range(count)),
        "in groups": (tuple(range(count // 2)), tuple(range(count // 2, count))),
    }.get(kind, ())
    workload = Workload(tuple(range(count)), forward, backward, groups)
    resident = draw(st.sets(st.integers(0, count - 1), max_size=count - 1))
    streamed = [size for unit, size in enumerate(sizes) if unit not in resident]
    region = int(max(streamed) * draw(st.sampled_from([1, 1.5, 2, 2.5, 3, 4]))) // 512 * 512
    return sizes, resident, max(region, max(streamed)), workload


@pytest.mark.parametrize("kind", ["infer", "train", "checkpointed"])
@pytest.mark.parametrize("slots", [1, 1.5, 2, 3])
@pytest.mark.parametrize("share", [0, 0.5])
def test_predicted_and_simulated_steps_agree(monkeypatch, kind, slots, share):
    count, parts = 12, (6, 4, 8)
    sizes = [16 * KB * part for part in parts] * count
    forward = tuple(size / RATE * factor for size, factor in zip(sizes, (0.1, 1.9, 0.9) * count, strict=True))
    backward = () if kind == "infer" else tuple(1.4 * seconds for seconds in forward)
    groups = tuple((n, n + 1, n + 2) for n in range(0, 3 * count, 3)) if kind == "checkpointed" else ()
    workload = Workload(tuple(range(3 * count)), forward, backward, groups)
    resident = {unit for unit in range(3 * count) if share and unit % 2}
    region = int(max(sizes) * slots)
    simulated, copies, predicted = simulated_steps(monkeypatch, sizes, resident, region, workload)
    assert predicted.seconds == pytest.approx(simulated, rel=0.02)
    assert predicted.transfers == pytest.approx(copies, rel=0.06, abs=1)


@settings(deadline=None, max_examples=40)
@given(problems(uniform=True))
def test_units_of_one_size_are_predicted_exactly(problem):
    sizes, resident, region, workload = problem
    with pytest.MonkeyPatch.context() as patch:
        simulated, copies, predicted = simulated_steps(patch, sizes, resident, region, workload)
    assert predicted.seconds == pytest.approx(simulated, rel=0.03)
    assert abs(predicted.transfers - copies) <= 1


@settings(deadline=None, max_examples=100)
@given(problems())
def test_a_step_is_never_faster_than_its_computing_nor_than_its_copies(problem):
    sizes, resident, region, workload = problem
    link = Link(RATE, LATENCY)
    found = predicted(sizes, resident, region, workload, link)
    compute = sum(workload.phases)
    assert found.seconds >= compute * (1 - 1e-9)
    assert found.seconds == pytest.approx(compute + found.stall_seconds)
    available = region + resident_cost([sizes[unit] for unit in resident], 1)
    # The first copies of a step may be made in the last: what the region holds.
    wire = max(0, sum(sizes) - available) / RATE
    floor = sum(max(phase, wire) for phase in workload.phases)
    assert found.seconds >= floor * (1 - 1e-9)
    passes = 2 if workload.train else 1
    streamed = sum(size for unit, size in enumerate(sizes) if unit not in resident)
    assert found.wire_bytes >= passes * (streamed - region)
    assert sum(found.phases) == pytest.approx(found.seconds)


@settings(deadline=None, max_examples=50)
@given(problems())
def test_a_device_that_waits_for_its_copies_takes_both_times(problem):
    sizes, resident, region, workload = problem
    found = predicted(sizes, resident, region, workload, Link(RATE, LATENCY, blocking=True))
    wire = found.wire_bytes / RATE + found.transfers * LATENCY
    assert found.seconds == pytest.approx(sum(workload.phases) + wire, rel=0.01, abs=2 * LATENCY)


def test_everything_resident_takes_its_computing_and_moves_nothing():
    workload = Workload((0, 1), (1.0, 2.0), (3.0, 4.0), ((0,), (1,)))
    found = predicted([10, 20], {0, 1}, 0, workload, Link(RATE))
    assert (found.seconds, found.phases, found.wire_bytes, found.stall_seconds) == (13.0, (3.0, 10.0), 0, 0.0)


def test_a_checkpointed_group_is_recomputed_before_its_gradients():
    workload = Workload((0, 1, 2), (1.0, 2.0, 3.0), (4.0, 5.0, 6.0), ((0, 1),))
    uses = [(use.unit, use.seconds) for use in workload.uses()]
    assert uses == [(0, 1), (1, 2), (2, 3), (2, 6), (0, 1), (1, 2), (1, 5), (0, 4)]


def test_a_pause_between_steps_hides_the_first_copies():
    sizes, workload = [100 * KB] * 4, Workload((0, 1, 2, 3), (1e-5,) * 4)
    rested = Workload((0, 1, 2, 3), (1e-5,) * 4, pause=1.0)
    link = Link(RATE)
    region = 200 * KB
    busy = predicted(sizes, (), region, workload, link).seconds
    assert predicted(sizes, (), region, rested, link).seconds < 0.6 * busy


@pytest.mark.parametrize(
    "make",
    [
        lambda: Link(0.0),
        lambda: Link(float("inf")),
        lambda: Workload((0, 0), (1.0, 1.0)),
        lambda: Workload((0,), (float("nan"),)),
        lambda: Workload((0, 1), (1.0, 1.0), (1.0,)),
        lambda: Workload((0, 1), (1.0, 1.0), (1.0, 1.0), ((0, 1), (1,))),
        lambda: predict([10, 20], (), 15, Workload((0, 1), (1.0, 1.0)), Link(RATE), Fetches()),
        lambda: predict([10], (), 15, Workload((0, 1), (1.0, 1.0)), Link(RATE), Fetches()),
    ],
)
def test_what_cannot_be_predicted_is_refused(make):
    with pytest.raises(ValueError):
        make()


def test_the_predictor_needs_no_device():
    import carom.core.plan.predict as module

    assert torch not in vars(module).values()


# -- the host


STEPS = 24


def issued(streamed, resident=0.0):
    return LaunchSeconds((streamed, streamed), (resident, resident))


@settings(deadline=None, max_examples=60)
@given(problems())
def test_a_host_that_takes_no_time_changes_nothing(problem):
    sizes, resident, region, workload = problem
    link = Link(RATE, LATENCY)
    without = predicted(sizes, resident, region, workload, link)
    with_host = predicted(sizes, resident, region, workload, link, host=issued(0.0))
    assert with_host.seconds == pytest.approx(without.seconds) and not with_host.host_bound


@settings(deadline=None, max_examples=60)
@given(problems(), st.sampled_from([1e-6, 1e-5, 1e-4, 1e-2]))
def test_a_step_is_never_faster_than_the_host_issues_it_nor_made_faster_by_a_slow_one(problem, seconds):
    sizes, resident, region, workload = problem
    link = Link(RATE, LATENCY)
    without = predicted(sizes, resident, region, workload, link, steps=STEPS)
    found = predicted(sizes, resident, region, workload, link, steps=STEPS, host=issued(seconds, seconds / 2))
    uses = workload.uses()
    calls = sum(seconds / 2 if use.unit in resident else seconds for use in uses)
    assert found.host_seconds == pytest.approx(calls)
    # The device ends the step that fills the slots late, by its copies and computing, and catches up over the others.
    late = sum(link.seconds(size) for size in sizes) + without.seconds
    assert found.seconds >= max(calls, without.seconds) * (1 - 1e-9) - late / STEPS
    if seconds == 1e-2:
        assert found.host_bound and found.seconds == pytest.approx(calls, rel=0.02)


def test_a_slow_host_costs_residents_too():
    work = Workload((0, 1), (1e-5, 1e-5))
    found = predicted([512, 512], {0, 1}, 0, work, Link(RATE), host=issued(1e-3, 4e-4))
    assert found.seconds == pytest.approx(8e-4) and found.host_bound and found.transfers == 0
    fast = predicted([512, 512], {0, 1}, 0, work, Link(RATE), host=issued(1e-6, 1e-6))
    assert fast.seconds == pytest.approx(2e-5) and not fast.host_bound
