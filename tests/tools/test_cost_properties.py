"""Properties of the cost model and the paper plan: better hardware never makes anything worse."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from carom.core.common.errors import BudgetError
from carom.tools.planner import cost_model, estimate, presets
from carom.tools.planner.estimate import Job, Machine
from carom.tools.planner.shapes import Group, Shape
from hypothesis import given, settings
from hypothesis import strategies as st

rate = st.floats(1e6, 1e15)
modes = st.sampled_from(["infer", "train"])


@st.composite
def works(draw):
    streamed = draw(st.floats(0, 1e12))
    return cost_model.Work(
        active_params=draw(st.floats(1e3, 1e12)),
        streamed_bytes=streamed,
        cached_bytes=streamed * draw(st.floats(0, 1)),
        kept_bytes=streamed * draw(st.floats(0, 1)),
        attention_per_token=draw(st.floats(0, 1e9)),
        device_bytes=draw(st.floats(0, 1e12)),
        decoded_bytes=draw(st.floats(0, 1e12)),
    )


@st.composite
def rates(draw):
    optional = st.one_of(st.none(), rate)
    return cost_model.Rates(
        draw(rate), draw(rate), draw(rate), draw(st.booleans()), draw(optional), draw(optional)
    )


factor = st.floats(1, 1000)
SLACK = 1 + 1e-9


@given(works(), rates(), modes, st.integers(1, 1 << 20), factor)
def test_more_bandwidth_never_makes_a_step_or_its_overhead_worse(work, rates, mode, tokens, more):
    before = cost_model.step_time(tokens, work, rates, mode)
    for better in (
        replace(rates, link=rates.link * more),
        replace(rates, disk=rates.disk * more),
        replace(rates, link=rates.link * more, disk=rates.disk * more),
    ):
        after = cost_model.step_time(tokens, work, better, mode)
        assert after.seconds <= before.seconds * SLACK
        assert 1 + after.overhead <= (1 + before.overhead) * SLACK


@given(works(), rates(), modes, st.integers(1, 1 << 20), st.integers(0, 1 << 20))
def test_more_tokens_never_make_the_overhead_worse(work, rates, mode, tokens, more):
    before = cost_model.step_time(tokens, work, rates, mode)
    after = cost_model.step_time(tokens + more, work, rates, mode)
    assert 1 + after.overhead <= (1 + before.overhead) * SLACK
    assert after.seconds * SLACK >= before.seconds


@given(works(), rates(), modes, st.integers(1, 1 << 20), st.floats(0, 1))
def test_less_streamed_never_makes_a_step_worse(work, rates, mode, tokens, share):
    less = replace(work, streamed_bytes=work.streamed_bytes * share, cached_bytes=min(work.cached_bytes, work.streamed_bytes * share))  # fmt: skip
    less = replace(
        less,
        cached_bytes=max(less.cached_bytes, less.streamed_bytes - (work.streamed_bytes - work.cached_bytes)),
    )
    if rates.gds:  # there a byte of RAM moves to the link: only the drive's share is compared
        return
    assert (
        cost_model.step_time(tokens, less, rates, mode).seconds
        <= cost_model.step_time(tokens, work, rates, mode).seconds * SLACK
    )


@given(works(), rates(), modes, st.integers(1, 1 << 20))
def test_a_step_is_never_shorter_than_its_compute_or_its_wire(work, rates, mode, tokens):
    step = cost_model.step_time(tokens, work, rates, mode)
    assert step.overhead >= -1e-12
    assert step.seconds >= sum(phase.wire for phase in step.phases) / SLACK


@given(works(), rates(), modes)
def test_the_threshold_by_phase_is_the_first_number_of_tokens_without_overhead(work, rates, mode):
    work = replace(work, decoded_bytes=0.0, device_bytes=0.0)
    found = cost_model.zero_overhead_tokens_by_phase(work, rates, mode)
    if found == float("inf"):
        assert cost_model.step_time(cost_model.MAX_TOKENS, work, rates, mode).bound_by != "compute"
    elif found > 0:
        assert cost_model.step_time(found, work, rates, mode).overhead == pytest.approx(0, abs=1e-9)
        if found > 1:
            assert any(
                p.bound_by != "compute" for p in cost_model.step_time(found - 1, work, rates, mode).phases
            )


@given(works(), rates())
def test_the_threshold_by_phase_is_at_least_the_published_rule_without_a_cache(work, rates):
    plain = replace(work, cached_bytes=0.0, kept_bytes=0.0, attention_per_token=0.0, device_bytes=0.0)
    rule = cost_model.zero_overhead_tokens(
        plain.streamed_bytes,
        plain.active_params,
        rates.compute,
        cost_model.effective_bandwidth(rates.link, rates.disk, rates.gds),
    )
    assert cost_model.zero_overhead_tokens_by_phase(plain, rates, "train") >= rule / SLACK


def test_without_a_drive_what_ram_cannot_hold_takes_for_ever():
    work = cost_model.Work(1e9, streamed_bytes=10e9, cached_bytes=9e9)
    step = cost_model.step_time(100, work, cost_model.Rates(1e12, 1e10), "infer")
    assert step.seconds == float("inf")
    assert step.bound_by == "disk"


@pytest.mark.parametrize(
    "bad", [{"compute": 0}, {"link": -1}, {"disk": float("nan")}, {"memory": float("inf")}]
)
def test_a_rate_that_is_not_positive_and_finite_is_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        cost_model.Rates(**{"compute": 1e12, "link": 1e9, **bad})


@st.composite
def small_shapes(draw):
    groups = []
    for number in range(draw(st.integers(1, 4))):
        params = draw(st.integers(1_000, 500_000_000))
        groups.append(
            Group(f"g{number}", draw(st.integers(1, 30)), params, draw(st.integers(1, params)), attention_width=64,
                  live_width=512, saved_width=2048, adapter_width=1024, repeated=number == 0 or draw(st.booleans()))
        )  # fmt: skip
    return Shape("s", "S", "drawn", "diffusion", tuple(groups), 512, 1024, "sample")


CARD = presets.CARDS["rtx4090"]


def tried(shape, machine, job, tokens):
    try:
        return estimate.evaluate(shape, machine, job, tokens)
    except BudgetError:
        return None


@settings(max_examples=150)
@given(
    small_shapes(),
    modes,
    st.integers(int(1e9), int(40e9)),
    st.integers(0, int(20e9)),
    st.sampled_from(["raw", "lossless"]),
    st.integers(1, 1 << 15),
)
def test_more_vram_never_makes_a_plan_worse(shape, mode, vram, more, codec, tokens):
    job = Job(mode, codec=codec)
    small = tried(shape, Machine(replace(CARD, vram=vram), disk=7e9, ram=32 << 30), job, tokens)
    large = tried(shape, Machine(replace(CARD, vram=vram + more), disk=7e9, ram=32 << 30), job, tokens)
    if small is not None:
        assert large is not None
        assert large.step.seconds <= small.step.seconds * SLACK
        assert large.placement.resident_bytes >= small.placement.resident_bytes or codec == "lossless"


@settings(max_examples=100)
@given(small_shapes(), modes, st.integers(int(2e9), int(40e9)), st.integers(1, 1 << 15), factor)
def test_more_ram_a_faster_drive_or_link_never_makes_a_plan_worse(shape, mode, vram, tokens, more):
    card = replace(CARD, vram=vram)
    machine = Machine(card, disk=3.5e9, ram=16 << 30)
    before = tried(shape, machine, Job(mode), tokens)
    for better in (
        replace(machine, ram=int(machine.ram * more)),
        replace(machine, disk=machine.disk * more),
        replace(machine, card=replace(card, link=card.link * more)),
    ):
        after = tried(shape, better, Job(mode), tokens)
        assert (after is None) == (before is None)
        if before is not None:
            assert after.step.seconds <= before.step.seconds * SLACK


@settings(max_examples=150)
@given(small_shapes(), st.integers(0, int(20e9)))
def test_a_placement_never_exceeds_its_budget_and_exists_from_the_least_on(shape, budget):
    job = Job()
    placement = estimate.place(shape, job, budget)
    least = estimate.least_weight_budget(shape, job)
    assert (placement is not None) == (budget >= least)
    if placement is not None:
        assert placement.resident_bytes + placement.slot_bytes <= budget
        sizes = [group.bytes_in(None) for group in shape.groups]
        resident = sum(n * size for n, size in zip(placement.resident, sizes, strict=True))
        assert resident == placement.resident_bytes
        assert resident + placement.streamed_wire == shape.bytes_in(None)
        streams = [s for n, s, g in zip(placement.resident, sizes, shape.groups, strict=True) if n < g.count]
        assert placement.slot_bytes >= estimate.SLOTS * max(streams, default=0)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 40)), min_size=1, max_size=3), st.integers(0, 400)
)
def test_a_placement_keeps_as_much_as_brute_force_less_one_small_layer(sizes, budget):
    """Filling largest first may miss the best packing, by less than the largest layer that streams."""
    groups = tuple(
        Group(str(i), n, size, size, live_width=1, saved_width=1) for i, (n, size) in enumerate(sizes)
    )
    shape = Shape("s", "S", "drawn", "diffusion", groups, 1, 1, "sample")
    best = -1
    counts = [[]]
    for group in groups:
        counts = [[*c, n] for c in counts for n in range(group.count + 1)]
    for choice in counts:
        left = [2 * g.params for n, g in zip(choice, groups, strict=True) if n < g.count]
        used = sum(n * 2 * g.params for n, g in zip(choice, groups, strict=True))
        if used + estimate.SLOTS * max(left, default=0) <= budget:
            best = max(best, used)
    placement = estimate.place(shape, Job(), budget)
    assert (placement is None) == (best < 0)
    if placement is not None:
        largest = max(
            (2 * g.params for n, g in zip(placement.resident, groups, strict=True) if n < g.count), default=0
        )
        assert best - placement.resident_bytes <= largest


def test_the_same_question_has_the_same_answer():
    from carom.tools.planner import model_plan, shapes

    machine = Machine(CARD, ram=32 << 30, disk=7e9)
    asked = (shapes.find_shape("flux2-dev"), machine, Job("train", quant=presets.find_quant("fp8")))
    assert model_plan.to_dict(model_plan.plan(*asked)) == model_plan.to_dict(model_plan.plan(*asked))


@given(works(), rates(), modes, st.integers(1, 1 << 20), st.integers(1, 200), st.integers(0, 200))
def test_the_host_binds_only_where_it_takes_longest_and_more_tokens_never_make_that_worse(
    work, given_rates, mode, tokens, layers, uses
):
    work = replace(work, layers=layers, uses=min(uses, layers))
    given_rates = replace(given_rates, layer=5e-4, use=2e-4, decode=None)
    step, more = (cost_model.step_time(n, work, given_rates, mode) for n in (tokens, 2 * tokens))
    for phase in step.phases:
        assert phase.seconds >= max(phase.host, phase.wire, phase.compute)
        assert (phase.bound_by == "host") == (phase.host > max(phase.wire, phase.compute + phase.decode))
        assert phase.plain <= phase.host
    if math.isfinite(step.seconds):
        assert more.overhead <= step.overhead * (1 + 1e-9) + 1e-9
