"""Budgets that a host sets before it has seen a pass: what passes leave free is taken once readings of it agree."""

from __future__ import annotations

import carom
import pytest
import torch
from carom.core.budget.budget_raise import LEAVES, READINGS, BudgetRaise
from carom.core.common.memory_snapshot import Memory
from carom.core.common.sizes import GIB, MIB
from carom.core.session.layout_manager import LayoutManager, OutOfMemory
from carom.core.streaming import pass_retry as again
from safetensors.torch import save_file
from tests_inside import inside
from tests_uneven import Net, device, size, step, uneven
from tests_watch import watch_changes

TOTAL = 6 * GIB
HEADROOM = LEAVES.of(TOTAL)


def after(
    free: int, passes: int = READINGS, room: BudgetRaise | None = None, asked: object = 1
) -> BudgetRaise:
    room = room or BudgetRaise()
    for _ in range(passes):
        room.passed(Memory(TOTAL, free), asked)
    return room


def test_what_passes_leave_is_room_but_for_a_headroom():
    assert after(GIB, READINGS + 1).spare(GIB, 0) == GIB - HEADROOM
    assert after(HEADROOM // 2, READINGS + 1).spare(GIB, 0) == 0


def test_no_room_is_seen_before_readings_agree():
    room = after(GIB, READINGS - 1)
    assert not room.spare(0, 0)
    room.passed(Memory(TOTAL, GIB // 2), 1)
    assert not room.spare(0, 0), "it moved"
    assert after(GIB // 2, READINGS - 1, room).spare(0, 0) == GIB // 2 - HEADROOM


def test_inputs_of_another_size_may_need_more():
    room = after(GIB)
    room.passed(Memory(TOTAL, GIB), "larger")
    assert not room.spare(0, 0)
    assert after(GIB, READINGS - 1, room=room, asked="larger").spare(0, 0), "both have run"
    for asked in ("larger", 1) * 2:
        room.passed(Memory(TOTAL, GIB), asked)
        assert room.spare(0, 0), "passes of two sizes take turns"


def test_what_was_asked_to_be_left_is_left_and_no_limit_is_exceeded():
    assert after(GIB, room=BudgetRaise(keep=GIB)).spare(0, 0) == 0
    assert after(GIB, room=BudgetRaise(keep=GIB // 2)).spare(0, 0) == GIB // 2
    room = after(GIB, room=BudgetRaise(most=2 * GIB))
    assert room.spare(2 * GIB - MIB, 0) == MIB and room.spare(2 * GIB, 0) == room.spare(3 * GIB, 0) == 0


def test_what_is_allowed_and_not_held_is_no_room_once_more():
    assert after(GIB).spare(GIB, 0, unused=100 * MIB) == GIB - HEADROOM - 100 * MIB
    assert after(GIB).spare(GIB, 0, unused=GIB) == 0


def test_no_room_is_left_once_memory_ran_out():
    room = after(GIB)
    room.none = True
    assert not room.spare(0, 0)
    room.begin_anew()
    assert not after(GIB, room=room).spare(0, 0)


def test_after_a_pass_that_ran_out_of_memory_half_as_much_is_tried_then_none():
    room = after(GIB)
    room.failed(400 * MIB)
    assert room.spare(2 * GIB, 2 * GIB) == 200 * MIB and room.spare(2 * GIB + 150 * MIB, 2 * GIB) == 50 * MIB
    room.failed(200 * MIB)
    assert room.none and not room.spare(2 * GIB, 2 * GIB)


# -- sessions


def card(more: float):
    """A net, its device with room for ``more`` of its bytes beyond the budget and a headroom, and the budget."""
    net, device, vram = uneven()
    activations = MIB
    memory = LEAVES.least + vram + activations + int(more * size(net))
    return net, carom.SimulatedDevice(
        timing="early", link_bytes_per_second=device.link_bytes_per_second, copy_latency_seconds=1e-6, flops=1e15,
        kernel_seconds=7e-6, memory_bytes=memory, activation_bytes=activations,
    ), vram  # fmt: skip


def test_a_session_takes_what_passes_left_once_readings_agree():
    net, device, vram = card(0.25)
    expected = step(net, False)
    with carom.stream(net, device=device, vram=vram, granularity="block") as session:
        session.follow_room()
        for _ in range(READINGS - 1):
            assert torch.equal(step(net, False), expected)
        before = session.report()
        assert before.vram_budget_bytes == vram and not session.spare
        for _ in range(4):
            assert torch.equal(step(net, False), expected)
        assert vram < session.vram <= vram + 0.25 * size(net), "no review of the layout is needed for it"
        for _ in range(60):
            assert torch.equal(step(net, False), expected)
        after = session.report()
        assert vram < after.vram_peak_bytes <= session.vram <= vram + 0.25 * size(net)
        assert after.wire_bytes_per_step < before.wire_bytes_per_step
        assert inside(session).engine.memory().free >= LEAVES.least, "the headroom is left"


def test_a_budget_does_not_creep_past_what_passes_left():
    net, device, vram = card(0.3)
    with carom.stream(net, device=device, vram=vram, granularity="block") as session:
        session.follow_room()
        for _ in range(8):
            for _ in range(6):
                step(net, False)
            session.set_budget(vram=session.vram + session.spare)
            session.follow_room(vram)
            assert session.vram <= vram + 0.3 * size(net)


def test_the_budget_of_a_session_that_was_not_told_to_follow_never_rises():
    net, device, vram = card(0.25)
    with carom.stream(net, device=device, vram=vram, granularity="block") as session:
        for _ in range(60):
            step(net, False)
        assert session.vram == vram and session.spare == 0
        assert session.report().vram_peak_bytes <= vram


def test_no_more_is_taken_than_the_limit_allows():
    net, device, vram = card(0.25)
    most = vram + int(0.1 * size(net))
    with carom.stream(net, device=device, vram=vram, granularity="block") as session:
        session.follow_room(most=most)
        for _ in range(60):
            step(net, False)
        assert vram < session.vram <= most


def test_room_that_is_gone_before_readings_agree_is_not_taken():
    net, device, vram = card(0.25)
    with carom.stream(net, device=device, vram=vram, granularity="block") as session:
        session.follow_room()
        for _ in range(READINGS - 1):
            step(net, False)
        device.ledger.others += int(0.25 * size(net))  # another program takes it
        for _ in range(60):
            step(net, False)
        assert session.vram == vram and inside(session).engine.memory().free >= LEAVES.least // 2


def test_room_costs_one_change_of_layout_beside_the_review(monkeypatch):
    net, device, vram = card(0.25)
    with carom.stream(net, device=device, vram=vram, granularity="block") as session:
        session.follow_room()
        laid_out = watch_changes(monkeypatch)
        for _ in range(60):
            step(net, False)
        assert session.vram > vram and len(laid_out) <= 2


@pytest.mark.parametrize("weights", ["memory", "file"])
def test_room_is_taken_where_no_review_is_made(weights, tmp_path):
    """Weights of a file are not reviewed by measured times."""
    net, device, vram = card(0.25)
    expected, options = step(net, False), {}
    if weights == "file":
        save_file(net.state_dict(), tmp_path / "net.safetensors")
        options["weights"] = tmp_path / "net.safetensors"
    with carom.stream(net, device=device, vram=vram, granularity="block", codec="raw", **options) as session:
        session.follow_room()
        for _ in range(12):
            assert torch.equal(step(net, False), expected)
        assert session.vram > vram


def test_room_that_shows_after_a_better_layout_was_taken_is_taken_too():
    net, device, vram = card(0.25)
    device.ledger.others += int(0.25 * size(net))
    with carom.stream(net, device=device, vram=vram, granularity="block") as session:
        session.follow_room()
        for _ in range(60):
            step(net, False)
        assert session.vram == vram and inside(session).replan.at == float("inf")
        device.ledger.others = 0  # another program ended
        for _ in range(60):
            step(net, False)
        assert session.vram > vram


def test_a_layout_with_more_room_that_does_not_fit_leaves_the_budget_as_it_was(monkeypatch):
    net, device, vram = card(0.25)
    expected = step(net, False)
    with carom.stream(net, device=device, vram=vram, granularity="block") as session:
        session.follow_room()
        attach, tried = LayoutManager._attach, []

        def fails_with_more(self, wanted):
            if wanted.vram > vram:
                tried.append(wanted.vram)
                raise OutOfMemory("as if")
            attach(self, wanted)

        monkeypatch.setattr(LayoutManager, "_attach", fails_with_more)
        for _ in range(20):
            assert torch.equal(step(net, False), expected)
        assert len(tried) == 1 and session.vram == vram and not session.spare and not session.beyond
        assert torch.equal(step(net, False), expected)


def grown(session, net):
    """Steps until more is taken."""
    session.follow_room()
    before = session.vram
    while session.vram == before:
        step(net, False)


def test_a_pass_that_runs_out_of_memory_beyond_the_hosts_budget_runs_again_within_it(caplog):
    net, device, vram = card(0.25)
    expected = step(net, False)
    with carom.stream(net, device=device, vram=vram, granularity="block") as session:
        grown(session, net)
        engine, taken = inside(session).engine, session.vram
        engine.activations += LEAVES.least + size(net) // 20  # an allocator that uses memory badly
        with caplog.at_level("INFO", "carom"):
            assert torch.equal(step(net, False), expected)
        assert session.vram == vram and "back to" in caplog.text
        engine.activations -= LEAVES.least + size(net) // 20
        for _ in range(120):
            assert torch.equal(step(net, False), expected)
        assert vram <= session.vram <= vram + (taken - vram) // 2, "half as much at most"


def test_the_first_pass_of_a_run_may_fail_too():
    net, device, vram = card(0.25)
    expected = step(net, False)
    with carom.stream(net, device=device, vram=vram, granularity="block") as session:
        grown(session, net)
        for _ in range(20):
            step(net, False)
        inside(session).engine.activations += LEAVES.least + size(net) // 20
        session.expect_anew()
        assert torch.equal(step(net, False), expected) and session.vram == vram


def test_what_the_hosts_own_budget_leaves_no_room_for_fails_as_before():
    net, device, vram = card(0.25)
    with carom.stream(net, device=device, vram=vram, granularity="block") as session:
        grown(session, net)
        inside(session).engine.activations *= 1000
        with pytest.raises(OutOfMemory):
            step(net, False)
        inside(session).engine.activations //= 1000
        for _ in range(60):
            step(net, False)
        assert session.vram == vram and not session.spare


def test_a_pass_that_the_hosts_own_budget_leaves_no_room_for_runs_again_with_less_where_the_host_says_so():
    net, device, vram = card(0.25)
    expected = step(net, False)
    with carom.stream(net, device=device, vram=vram, granularity="block") as session:
        engine, less = inside(session).engine, inside(session).least_bytes
        session.follow_room(least=less)
        assert torch.equal(step(net, False), expected) and session.vram == vram
        session.expect_anew(more=True)
        engine.activations += engine.memory().free + (vram - less) // 2
        assert torch.equal(step(net, False), expected) and session.vram == less and not session.spare
        engine.activations += engine.memory().free + vram
        session.expect_anew()
        with pytest.raises(OutOfMemory):
            step(net, False)


@pytest.mark.parametrize("more", [False, True])
def test_readings_do_not_count_where_passes_need_more_from_now_on(more):
    net, device, vram = card(0.25)
    with carom.stream(net, device=device, vram=vram, granularity="block") as session:
        session.follow_room()
        for _ in range(READINGS):
            step(net, False)
        assert session.spare and session.vram == vram, "the next pass takes it"
        session.expect_anew(more=more)
        step(net, False)
        assert (session.vram > vram) is not more


def test_the_room_is_that_of_the_size_that_leaves_least():
    room = after(GIB, asked="large")
    room.begin_anew()  # the weights were laid out again
    room = after(3 * GIB, room=room, asked="small")
    assert room.spare(0, 0) == GIB - HEADROOM, "the large size has not run since"
    room.forget_other_sizes()
    assert room.spare(0, 0) == 3 * GIB - HEADROOM
    held = BudgetRaise()
    for _ in range(READINGS):
        held.passed(Memory(TOTAL, GIB), 1, held=GIB)
    assert held.spare(GIB, 0, held=GIB) == GIB - HEADROOM and not held.spare(2 * GIB, 0, held=2 * GIB)


def test_the_budget_rises_once_for_a_run_of_the_host():
    net, device, vram = card(0.6)
    taken = device.ledger.others = int(0.4 * size(net))
    with carom.stream(net, device=device, vram=vram, granularity="block") as session:
        grown(session, net)
        first = session.vram
        device.ledger.others -= taken  # another program ends
        for _ in range(40):
            step(net, False)
        assert session.vram == first
        session.expect_anew()
        for _ in range(8):
            step(net, False)
        assert session.vram > first


def test_a_pass_of_another_size_runs_again_after_the_budget_rose():
    """A size that had run under a smaller budget has to be watched again."""
    net, device, vram = card(0.25)

    def larger():
        with torch.no_grad():
            return net(torch.linspace(-1, 1, 8 * 48).reshape(8, 48))

    expected = larger()
    with carom.stream(net, device=device, vram=vram, granularity="block") as session:
        session.follow_room()
        assert torch.equal(larger(), expected)
        grown(session, net)
        for _ in range(12):
            step(net, False)
        inside(session).engine.activations += LEAVES.least + size(net) // 20
        assert torch.equal(larger(), expected) and session.vram == vram


def test_the_budget_does_not_rise_before_the_forward_of_a_part():
    """It could not run again."""
    net, device, vram = card(0.25)
    with carom.stream(net, device=device, vram=vram, granularity="block") as session, torch.no_grad():
        session.follow_room()
        for _ in range(READINGS):
            step(net, False)
        assert session.spare
        net.blocks[0](torch.ones(4, 48))
        assert session.vram == vram
        step(net, False)
        assert session.vram > vram


def test_room_for_less_than_a_unit_changes_no_layout(monkeypatch):
    net, device, vram = card(0.04)
    with carom.stream(net, device=device, vram=vram, granularity="block") as session:
        session.follow_room()
        laid_out, before = watch_changes(monkeypatch), inside(session).resident_names
        for _ in range(30):
            step(net, False)
        assert not laid_out or inside(session).resident_names != before


class Odd:
    """Of which nobody knows what a second pass would do with it."""


def test_no_room_is_taken_where_a_pass_could_not_run_again():
    net, device, vram = card(0.25)
    with carom.stream(net, device=device, vram=vram, granularity="block") as session:
        session.follow_room(given=lambda args, kwargs: ((*args, Odd()), kwargs))
        for _ in range(60):
            step(net, False)
        assert session.vram == vram and not session.spare


def test_room_is_given_up_before_a_pass_that_could_not_run_again():
    net, device, vram = card(0.25)
    expected = step(net, False)
    with carom.stream(net, device=device, vram=vram, granularity="block") as session:
        grown(session, net)
        session.follow_room(vram, given=lambda args, kwargs: ((*args, Odd()), kwargs))
        session.expect_anew()
        assert torch.equal(step(net, False), expected) and session.vram == vram


def test_after_a_budget_that_fell_a_better_layout_is_taken_all_the_same():
    """A budget that falls keeps units of those that were there, whichever they are."""
    net = Net()
    with carom.stream(
        net, device=device(net, 0.8), vram=int(0.6 * size(net)), granularity="block"
    ) as session:
        units = [unit.name for unit in inside(session).units]
        inside(session).relay(residents_among=frozenset(units[:6]))
        fell = inside(session).resident_names
        for _ in range(40):
            step(net, False)
        assert len(fell) >= 5 and set(fell) <= set(units[:6])
        assert not set(inside(session).resident_names) <= set(units[:6])
        report = session.report()
        assert report.predicted_seconds == pytest.approx(report.step_seconds, rel=0.03)


def test_the_pass_that_takes_room_may_run_again_too(caplog):
    net, device, vram = card(0.25)
    expected = step(net, False)
    with carom.stream(net, device=device, vram=vram, granularity="block") as session:
        session.follow_room()
        raises = inside(session).raise_budget
        take = raises.took

        def takes(outcome):
            take(outcome)
            inside(session).engine.activations += LEAVES.least + size(net) // 20

        raises.took = takes
        with caplog.at_level("INFO", "carom"):
            for _ in range(60):
                assert torch.equal(step(net, False), expected)
                if "back to" in caplog.text:
                    break
        assert "back to" in caplog.text and session.vram == vram


class Pops(torch.nn.Module):
    """Takes from a list that it was given, as ComfyUI's UNet does with what a ControlNet says, and notes in a dict."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x, control=None, options=None):
        options["seen"] = options.get("seen", 0) + 1
        for block in self.net.blocks:
            x = block(x) * options["seen"]
            if control["output"]:
                x = x + control["output"].pop()
        return x


def test_a_pass_that_runs_again_finds_lists_and_dicts_as_the_first_time():
    net, device, vram = card(0.25)
    pops = Pops(net)

    def run():
        x = torch.linspace(-1, 1, 4 * 48).reshape(4, 48)
        control, options = {"output": [torch.full((1,), n / 4) for n in range(6)]}, {"objects": object()}
        with torch.no_grad():
            y = pops(x, control=control, options=options)
        assert not control["output"] and options["seen"] == 1
        return y

    expected = run()
    with carom.stream(pops, device=device, vram=vram, granularity="block") as session:
        session.follow_room(given=lambda args, kwargs: (args, {"control": kwargs["control"]}))
        while session.vram == vram:
            assert torch.equal(run(), expected)
        inside(session).engine.activations += LEAVES.least + size(net) // 20
        session.expect_anew()
        assert torch.equal(run(), expected) and session.vram == vram


def test_the_hosts_budget_may_be_less_than_what_works():
    """Where a host offers less than the least, the least is taken: there is nothing to go back to."""
    net, device, vram = card(0.25)
    expected = step(net, False)
    with carom.stream(net, device=device, vram=vram, granularity="block") as session:
        least = inside(session).least_bytes
        session.set_budget(vram=least)
        session.follow_room(least // 2, given=lambda args, kwargs: ((*args, Odd()), kwargs))
        assert torch.equal(step(net, False), expected) and session.vram == least
        session.follow_room(least // 2)
        inside(session).engine.activations *= 1000
        with pytest.raises(OutOfMemory):
            step(net, False)
        inside(session).engine.activations //= 1000
        assert torch.equal(step(net, False), expected) and session.vram == least


def test_passes_that_could_not_run_again_do_not_cost_a_layout_each_time(monkeypatch):
    net, device, vram = card(0.25)
    with carom.stream(net, device=device, vram=vram, granularity="block") as session:
        grown(session, net)
        more, laid_out = session.vram, watch_changes(monkeypatch)
        for turn in range(20):  # prompts with a ControlNet's objects, and without
            session.follow_room(vram, given=lambda a, k, odd=turn % 2: ((*a, Odd()) if odd else a, k))
            session.expect_anew()
            for _ in range(8):
                step(net, False)
            if session.vram == vram and session.beyond >= more - vram:
                session.set_budget(vram=more)
                session.follow_room(vram)
        assert len(laid_out) <= 6


def test_room_is_given_up_before_a_pass_with_gradients_or_with_inputs_too_large_to_be_kept(monkeypatch):
    for kind in ("gradients", "large"):
        net, device, vram = card(0.25)
        with carom.stream(net, device=device, vram=vram, granularity="block") as session:
            grown(session, net)
            for _ in range(6):
                step(net, False)
            if kind == "gradients":
                step(net, True)
            else:
                session.expect_anew()
                monkeypatch.setattr(again, "LIMIT", 1)
                with torch.inference_mode():
                    net(torch.linspace(-1, 1, 4 * 48).reshape(4, 48))
            assert session.vram == vram


def test_sizes_of_inputs_are_not_remembered_without_end():
    net, device, vram = card(0.25)
    with carom.stream(net, device=device, vram=vram, granularity="block") as session:
        grown(session, net)
        with torch.no_grad():
            for rows in range(1, 100):
                net(torch.ones(rows, 48))
        assert len(inside(session).memory.asked) <= 64


def test_the_module_is_recorded_once_for_a_layout(monkeypatch):
    """Recording the state of 1,000 modules takes about 20 ms, and each return to the device makes a new layout."""
    made: list[object] = []
    init = again.ModuleState.__init__
    monkeypatch.setattr(again.ModuleState, "__init__", lambda *a: (made.append(a[0]), init(*a))[1])
    net, device, vram = card(0.25)
    expected = step(net, False)
    with carom.stream(net, device=device, vram=vram, granularity="block") as session:
        grown(session, net)
        made.clear()
        for _ in range(2):
            session.park(keep=True)
            session.expect_anew()
            assert all(torch.equal(step(net, False), expected) for _ in range(8))
        assert len(made) == 2
