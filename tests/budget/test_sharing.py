"""Several sessions with vram="auto" on one device: the newest first, no storms, and as few bytes as a fixed split."""

from __future__ import annotations

import contextlib

import carom
import pytest
import torch
from carom.core.budget.priority import LEAD, PriorityOrder
from tests_inside import inside
from tests_limits import units_apart_from
from tests_models import Chain as Net

KB = 1024


def size(net):
    return sum(p.numel() * p.element_size() for p in net.parameters())


X = torch.linspace(-1, 1, 64).reshape(2, 32)


def run(net):
    with torch.no_grad():
        return net(X)


# -- the rule alone


def test_models_that_alternate_are_left_as_they_are():
    shares = PriorityOrder()
    shares.join(1)
    shares.join(2)
    for _ in range(1000):
        assert shares.used(1, True, {2: 100}) is None
        assert shares.used(2, True, {1: 100}) is None


def test_a_model_that_runs_alone_gets_what_the_other_holds_after_a_few_steps():
    shares = PriorityOrder()
    shares.join(1)
    shares.join(2)
    given = [shares.used(1, True, {2: 100}) for _ in range(LEAD)]
    assert given == [None] * (LEAD - 1) + [2]
    assert shares.used(1, False, {2: 100}) is None, "not while all of it is there"


def test_bursts_settle():
    shares, moves = PriorityOrder(), 0
    shares.join(1)
    shares.join(2)
    for burst in range(200):
        mine, other = (1, 2) if burst % 2 else (2, 1)
        for _ in range(20):
            moves += shares.used(mine, True, {other: 100}) is not None
    assert moves <= 6


def test_the_least_used_gives_way_to_a_new_one_first():
    shares = PriorityOrder()
    for key in (1, 2, 3):
        shares.join(key)
    shares.used(1, False, {})
    shares.used(3, False, {})
    assert shares.givers(9) == [2, 1, 3]
    shares.leave(2)
    assert shares.givers(9) == [1, 3]


# -- sessions


def auto(net, device):
    return carom.stream(net, device=device, vram="auto", granularity="layer")


def test_an_older_session_gives_way_to_a_new_one_and_both_stay_exact():
    a, b = Net(), Net(seed=1)
    expected = run(a), run(b)
    device = carom.SimulatedDevice(memory_bytes=int(1.5 * size(a)))
    first = auto(a, device)
    for _ in range(12):
        run(a)
    assert first.plan.all_resident
    with auto(b, device) as second:
        for _ in range(12):
            assert torch.equal(run(b), expected[1])
        assert second.plan.all_resident, "the newest comes first"
        assert not first.plan.all_resident
        assert device.ledger.allocated <= device.memory_bytes
        assert torch.equal(run(a), expected[0])
    for _ in range(200):
        assert torch.equal(run(a), expected[0])
        if first.plan.all_resident:
            break
    assert first.plan.all_resident, "and it grows back when the other has ended"
    first.close()
    assert device.ledger.allocated == 0


class Wire:
    """All bytes that cross to a device: slots filled, and residents loaded by every layout."""

    def __init__(self, monkeypatch):
        self.loaded = 0
        settled = carom.core.placement.placement.Placement.settled

        def counted(placement):
            settled(placement)
            self.loaded += placement.loaded_bytes

        monkeypatch.setattr(carom.core.placement.placement.Placement, "settled", counted)

    def all(self, *sessions):
        return self.loaded + sum(inside(session).engine.bytes_in for session in sessions)


def alternate(nets, sessions, rounds, expected):
    for _ in range(rounds):
        for net, right in zip(nets, expected, strict=True):
            assert torch.equal(run(net), right)
    return sessions


ROUNDS = 40


def test_two_models_that_alternate_copy_little_more_than_the_best_fixed_split(monkeypatch):
    """A budget that holds one and a half: the total within 1.1x, and settled: nothing moves any more."""
    a, b = Net(), Net(seed=1)
    expected = run(a), run(b)
    whole, memory = size(a), int(1.5 * size(a))
    fixed = []
    with monkeypatch.context() as patch:
        for share in (0.5, 0.65, 0.8):
            wire = Wire(patch)
            vrams = int(share * memory), int((1 - share) * memory)
            sessions = [
                carom.stream(
                    net, device=carom.SimulatedDevice(), vram=min(whole + 4 * KB, vram), granularity="layer"
                )
                for net, vram in zip((a, b), vrams, strict=True)
            ]
            alternate((a, b), sessions, ROUNDS, expected)
            fixed.append(wire.all(*sessions))
            for session in sessions:
                session.close()
    wire = Wire(monkeypatch)
    device = carom.SimulatedDevice(memory_bytes=memory)
    sessions = [auto(a, device), auto(b, device)]
    layouts = []
    for number in range(ROUNDS):
        alternate((a, b), sessions, 1, expected)
        assert device.ledger.allocated <= memory
        if number >= ROUNDS // 2:
            layouts.append([id(inside(session).arrangement) for session in sessions])
    total = wire.all(*sessions)
    for session in sessions:
        session.close()
    assert total <= 1.1 * min(fixed), (total, fixed)
    assert all(layout == layouts[0] for layout in layouts), "a model settles"


def test_no_step_reloads_what_it_evicted(monkeypatch):
    """Two models alternate where both do not fit: a unit crosses once a forward, and a new layout loads only what was not there."""
    units_apart_from(monkeypatch)  # units lie apart on the device, as those of real models do
    a, b = Net(), Net(depth=6, seed=1)
    device = carom.SimulatedDevice(memory_bytes=int(1.3 * size(a)))
    crossed: list[int] = []
    copy_in = carom.core.device.simulated.SimulatedEngine.copy_in
    monkeypatch.setattr(
        carom.core.device.simulated.SimulatedEngine, "copy_in",
        lambda self, target, source, *more: (crossed.append(source.data_ptr()), copy_in(self, target, source, *more))[1],
    )  # fmt: skip
    loads = []
    settled = carom.core.placement.placement.Placement.settled

    def counted(placement):
        loads.append(
            (placement.loaded_bytes, placement.resident_bytes, bool(placement.device_tensors.received))
        )
        settled(placement)

    monkeypatch.setattr(carom.core.placement.placement.Placement, "settled", counted)
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(auto(a, device))
        for _ in range(12):
            run(a)
        second = stack.enter_context(auto(b, device))
        for number in range(40):
            for net, session in ((a, first), (b, second)):
                crossed.clear()
                layout = inside(session).arrangement
                run(net)
                if inside(session).arrangement is layout and number > 3:
                    assert len(crossed) == len(set(crossed)), "no unit crosses twice in a forward"
        assert any(held for *_, held in loads), "layouts did change while weights were there"
        for loaded, resident, held in loads:
            assert not held or loaded < resident, "what stays on the device is not loaded again"


def test_a_session_that_is_used_alone_gets_the_others_room():
    a, b = Net(), Net(seed=1)
    device = carom.SimulatedDevice(memory_bytes=int(1.5 * size(a)))
    with auto(a, device) as first, auto(b, device) as second:
        for _ in range(12):
            run(b)
        assert second.plan.all_resident and not first.plan.all_resident
        for _ in range(60):
            run(a)
        assert first.plan.all_resident and not second.plan.all_resident


@pytest.mark.parametrize("busy", ["locked", "graph"])
def test_who_is_in_the_middle_of_something_gives_nothing(busy):
    a, b = Net(), Net(seed=1)
    device = carom.SimulatedDevice(memory_bytes=int(1.6 * size(a)))
    with auto(a, device) as first:
        for _ in range(12):
            run(a)
        arrangement = inside(first).arrangement
        if busy == "graph":
            wanted = a(X.clone().requires_grad_(True)).sum()
        else:
            inside(first).begin_pass()
        with auto(b, device):
            assert inside(first).arrangement is arrangement
            run(b)
        if busy == "graph":
            wanted.backward()
        else:
            inside(first).end_pass()


# -- one given budget


PLACES = pytest.mark.parametrize("where", ["simulated", "cpu"])


def shared(net, budget, where):
    device = carom.SimulatedDevice() if where == "simulated" else "cpu"
    return carom.stream(net, device=device, vram=budget, granularity="layer")


def held(*sessions):
    return sum(inside(session).held_bytes for session in sessions)


@PLACES
def test_sessions_under_one_budget_never_hold_more_together_and_the_newest_comes_first(where):
    a, b = Net(), Net(seed=1)
    expected = run(a), run(b)
    budget = carom.SharedBudget(int(1.5 * size(a)))
    first = shared(a, budget, where)
    for _ in range(8):
        assert torch.equal(run(a), expected[0])
    assert first.plan.all_resident
    with shared(b, budget, where) as second:
        for _ in range(8):
            assert torch.equal(run(b), expected[1])
            assert torch.equal(run(a), expected[0])
            assert held(first, second) <= budget.nbytes
        assert second.plan.all_resident and not first.plan.all_resident
        assert budget.held_bytes == held(first, second)
    for _ in range(40):
        run(a)
    assert first.plan.all_resident, "what a session leaves another takes"
    first.close()
    assert budget.free_bytes == budget.nbytes


def test_two_models_under_one_budget_copy_little_more_than_the_best_fixed_split(monkeypatch):
    """As with ``vram="auto"``, on a device with room for much more: within 1.1x, and nothing is reloaded once settled."""
    a, b = Net(), Net(seed=1)
    expected = run(a), run(b)
    memory, fixed = int(1.5 * size(a)), []
    for share in (0.5, 0.65, 0.8):
        with monkeypatch.context() as patch:
            wire = Wire(patch)
            vrams = int(share * memory), int((1 - share) * memory)
            sessions = [
                carom.stream(
                    net, device=carom.SimulatedDevice(), vram=min(size(net) + 4 * KB, v), granularity="layer"
                )
                for net, v in zip((a, b), vrams, strict=True)
            ]
            alternate((a, b), sessions, ROUNDS, expected)
            fixed.append(wire.all(*sessions))
            for session in sessions:
                session.close()
    wire, budget = Wire(monkeypatch), carom.SharedBudget(memory)
    sessions = [shared(net, budget, "simulated") for net in (a, b)]
    layouts = []
    for number in range(ROUNDS):
        alternate((a, b), sessions, 1, expected)
        assert held(*sessions) <= memory
        if number >= ROUNDS // 2:
            layouts.append([id(inside(session).arrangement) for session in sessions])
    total = wire.all(*sessions)
    for session in sessions:
        session.close()
    assert total <= 1.1 * min(fixed), (total, fixed)
    assert all(layout == layouts[0] for layout in layouts), "a model settles"


def test_a_session_can_join_and_leave_a_shared_budget():
    a, b = Net(), Net(seed=1)
    budget = carom.SharedBudget(f"{int(1.5 * size(a))}")
    with shared(a, budget, "cpu") as first, shared(b, size(b) // 2, "cpu") as second:
        for _ in range(8):
            run(a)
        before = budget.held_bytes
        second.set_budget(vram=budget)
        run(b)
        assert before < budget.held_bytes <= budget.nbytes
        first.park()
        assert budget.held_bytes == inside(second).held_bytes
        run(a)
        second.set_budget(vram=size(b) // 2)
        assert budget.held_bytes == inside(first).held_bytes


@PLACES
def test_new_layouts_under_a_shared_budget_never_hold_more_together(where):
    """What one may hold beyond what it holds is no other's: every layout under the same budgets keeps the sum."""
    a, b = Net(), Net(depth=9, width=32, seed=1)
    # Each place has its own of the budgets: what is promised to whom is the same on both.
    begin, every = int(0.5 * size(a)), 3 * (3 * KB - 500)
    for nbytes in range(begin + (where == "cpu") * every // 2, 2 * size(a), every):
        budget = carom.SharedBudget(nbytes, by_size=True)
        with shared(a, budget, where) as first:
            run(a)
            with shared(b, budget, where) as second:
                for session in (first, second, first):
                    run(a), run(b)
                    session.set_budget(ram="auto")
                    assert held(first, second) <= nbytes
                    assert (
                        sum(
                            min(inside(s).capacity, inside(s).ledger.everything_bytes)
                            for s in (first, second)
                        )
                        <= nbytes
                    )


def test_what_was_not_held_is_given_without_a_new_layout():
    a = Net()
    with shared(a, carom.SharedBudget(int(0.7 * size(a))), "cpu") as session:
        run(a)
        unused, layout = inside(session).ledger.unused_bytes, inside(session).arrangement
        assert unused > 100
        assert inside(session).ledger.release(100) == 100 and inside(session).arrangement is layout
        assert (
            inside(session).ledger.release(unused) > unused - 100
            and inside(session).arrangement is not layout
        )


def test_the_peak_that_is_reported_is_of_the_present_budget():
    net = Net()
    with carom.stream(net, device="cpu", vram=size(net) // 2, granularity="layer") as session:
        run(net)
        high = session.report()
        assert session.plan.slots and high.vram_peak_bytes <= high.vram_budget_bytes
        session.set_budget(vram=size(net) // 3)
        run(net)
        low = session.report()
        assert 0 < low.vram_peak_bytes <= low.vram_budget_bytes < high.vram_peak_bytes
        assert "OVER THE BUDGET" not in low.table()
        session.set_budget(vram=size(net) // 2)
        assert session.report().vram_peak_bytes >= low.vram_peak_bytes


# -- parked, and back


@pytest.fixture
def looking(monkeypatch):
    """Memory is looked at before every step, however little time has passed."""
    monkeypatch.setattr("carom.core.session.policies.device_memory._SECONDS", 0.0)


@PLACES
@pytest.mark.usefixtures("looking")
def test_a_parked_session_that_returns_finds_room_under_the_shared_budget(where):
    a, b = Net(), Net(seed=1)
    expected = run(a), run(b)
    budget = carom.SharedBudget(int(1.5 * size(a)))
    with shared(a, budget, where) as first, shared(b, budget, where) as second:
        for _ in range(20):
            run(a), run(b)
        before = inside(second).held_bytes
        assert before > budget.nbytes // 2
        for _ in range(2):
            second.park()
            for _ in range(60):
                assert torch.equal(run(a), expected[0])
            assert first.plan.all_resident, "what a parked session left another takes"
            assert torch.equal(run(b), expected[1])
            assert held(first, second) <= budget.nbytes
            assert inside(second).held_bytes == before, "who returns comes first, as a new one does"
            assert torch.equal(run(a), expected[0])


@PLACES
def test_the_least_of_a_parked_session_is_kept_for_its_return(where, monkeypatch):
    a, b = Net(), Net(seed=1)
    right = run(b)
    budget = carom.SharedBudget(int(1.1 * size(a)))
    with shared(a, budget, where) as first, shared(b, budget, where) as second:
        run(b)
        second.park()
        for _ in range(100):
            run(a)
            assert inside(first).held_bytes + inside(second).least_bytes <= budget.nbytes
        with monkeypatch.context() as patch:
            patch.setattr(inside(first).ledger, "release", lambda *_: 0)  # it is in a step of another thread
            assert torch.equal(run(b), right)
        assert held(first, second) <= budget.nbytes


def test_a_session_that_cannot_return_says_what_is_left_and_returns_later(monkeypatch):
    a, b = Net(), Net(seed=1)
    right = run(b)
    budget = carom.SharedBudget(int(1.5 * size(a)))
    with shared(a, budget, "cpu") as first, shared(b, budget, "cpu") as second:
        run(a), run(b)
        second.park()
        monkeypatch.setattr(inside(first).ledger, "release", lambda *_: 0)
        budget.later = budget.nbytes
        with pytest.raises(carom.BudgetError, match="0 B of SharedBudget.* others hold the rest") as refused:
            run(b)
        assert refused.value.least_bytes == inside(second).least_bytes and second.parked
        budget.later = 0
        assert torch.equal(run(b), right)


@pytest.mark.parametrize("activations", [0, 20 * KB])
def test_with_auto_a_parked_session_that_returns_runs_out_of_no_memory(activations):
    a, b = Net(), Net(seed=1)
    expected = run(a), run(b)
    device = carom.SimulatedDevice(
        memory_bytes=int(1.5 * size(a)) + activations, activation_bytes=activations
    )
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(auto(a, device))
        for _ in range(12):
            run(a)
        second = stack.enter_context(auto(b, device))
        for _ in range(40):
            run(a), run(b)
        before, failed = (
            inside(second).held_bytes,
            inside(second).engine.memory().ooms + inside(first).engine.memory().ooms,
        )
        second.park()
        for _ in range(150):
            assert torch.equal(run(a), expected[0])
        grown = inside(first).held_bytes
        assert grown > size(a) // 2
        assert torch.equal(run(b), expected[1])
        for _ in range(10):
            assert torch.equal(run(a), expected[0]) and torch.equal(run(b), expected[1])
        assert inside(second).held_bytes >= before // 2 and inside(first).held_bytes < grown
        assert inside(second).engine.memory().ooms + inside(first).engine.memory().ooms == failed


@pytest.mark.parametrize("keep", [False, True])
def test_a_parked_session_leaves_nothing_in_the_allocator_of_this_process(keep, monkeypatch):
    """Others see what is free on the device; what this process's allocator keeps is not."""
    net = Net()
    with carom.stream(
        net, device=carom.SimulatedDevice(), vram=size(net) // 2, granularity="layer"
    ) as session:
        run(net)
        kept = []
        monkeypatch.setattr(
            inside(session).engine, "trim", lambda: kept.append(inside(session).engine.allocated)
        )
        session.park(keep=keep)
        assert kept[-1] == 0


def test_a_parked_session_returns_with_less_where_the_device_has_less():
    """Not to the budget of a device that was emptier, at the price of a failed pass."""
    net = Net()
    right = run(net)
    device = carom.SimulatedDevice(memory_bytes=2 * size(net))
    with auto(net, device) as session:
        for _ in range(12):
            run(net)
        assert session.plan.all_resident
        session.park()
        device.ledger.others = int(1.4 * size(net))  # another program
        assert torch.equal(run(net), right)
        assert not session.plan.all_resident and inside(session).engine.memory().ooms == 0


# -- by size


@pytest.mark.usefixtures("looking")
def test_by_size_a_new_session_asks_for_its_part_and_no_more():
    a, b = Net(), Net(seed=1)
    budget = carom.SharedBudget(size(a), by_size=True)
    with shared(a, budget, "cpu") as first:
        for _ in range(8):
            run(a)
        alone = inside(first).held_bytes
        assert alone > 0.8 * budget.nbytes, "what is not held yet it may have"
        with shared(b, budget, "cpu") as second:
            layouts = set()
            for _ in range(60):
                run(a), run(b)
                assert held(first, second) <= budget.nbytes
                layouts.add((id(inside(first).arrangement), id(inside(second).arrangement)))
            assert 0.35 < inside(first).held_bytes / budget.nbytes < 0.65
            assert 0.35 < inside(second).held_bytes / budget.nbytes < 0.65
            assert len(layouts) <= 3, "by turns nothing moves"
            for _ in range(30):
                run(b)
            assert inside(second).held_bytes > 0.7 * budget.nbytes, "to who is used"


def test_what_is_kept_for_later_is_given_to_nobody():
    a, b = Net(), Net(seed=1)
    budget = carom.SharedBudget(int(1.2 * size(a)))
    budget.later = size(a) // 2
    with shared(a, budget, "cpu") as first:
        for _ in range(40):
            run(a)
            assert inside(first).held_bytes <= budget.nbytes - budget.later
        assert budget.free_bytes <= budget.nbytes - budget.later
        budget.later = 0
        with shared(b, budget, "cpu"):
            for _ in range(40):
                run(b)


def test_a_shared_budget_below_the_least_is_refused_with_it():
    net = Net()
    with pytest.raises(carom.BudgetError) as refused:
        shared(net, carom.SharedBudget(100), "cpu")
    assert refused.value.least_bytes and refused.value.least_bytes > 100
    with pytest.raises(carom.BudgetError):
        carom.SharedBudget("much")


def test_sessions_of_higher_priority_are_asked_last_and_take_at_once():
    order = PriorityOrder()
    for key in (1, 2, 3):
        order.join(key)
    order.set_priority(2, order.highest(2))
    order.set_priority(3, order.lowest(3))
    assert order.givers(2) == [3, 1] and order.givers(1) == [3] and order.givers(3) == []
    assert order.givers(3, all_of_them=True) == [1, 2]
    assert order.used(2, True, {1: 8, 3: 8}) == 3, "a session of lower priority gives way at once"
    assert order.used(2, True, {1: 8}) == 1
    for _ in range(2 * LEAD):
        assert order.used(1, True, {2: 8}) is None, "a session of higher priority does not give way to steps"
    assert order.used(2, False, {1: 8, 3: 8}) is None


def test_a_prioritised_session_gets_what_it_is_short_of_from_another_one():
    net, other = Net(), Net(seed=1)
    budget = carom.SharedBudget(int(1.2 * size(net)))
    device = carom.SimulatedDevice(memory_bytes=1 << 24)
    with (
        carom.stream(net, device=device, vram=budget) as first,
        carom.stream(other, device=device, vram=budget) as second,
    ):
        for _ in range(3):
            run(net), run(other)
        before = inside(first).held_bytes, inside(second).held_bytes
        first.prioritize()
        for _ in range(6):
            run(net), run(other)
        assert inside(first).held_bytes > before[0] and inside(second).held_bytes < before[1]
        first.deprioritize()
        for _ in range(40):
            run(net), run(other)
        assert inside(second).held_bytes > inside(first).held_bytes
