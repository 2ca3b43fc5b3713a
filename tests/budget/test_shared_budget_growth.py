"""A shared budget that grows: a guess at first, then what passes leave of the device, divided by size."""

from __future__ import annotations

import contextlib
import random
import threading

import carom
import pytest
import tests_aimdo_stand_in as aimdo
import torch
from carom.core.budget.device_governor import Governor
from carom.core.device.simulated import Ledger
from carom.core.session.layout_manager import LayoutManager
from tests_inside import inside
from tests_models import Chain

KB = 1024
X = torch.linspace(-1, 1, 64).reshape(2, 32)


@pytest.fixture(autouse=True)
def looking(monkeypatch):
    """Memory is looked at before every step."""
    monkeypatch.setattr("carom.core.session.policies.device_memory._SECONDS", 0.0)


def size(net):
    return sum(p.numel() * p.element_size() for p in net.parameters())


class Net(Chain):
    def __init__(self, depth, seed=0):
        super().__init__(depth, seed=seed)
        self.expected = run(self)


def run(net):
    with torch.no_grad():
        return net(X)


class Card:
    """A device of ``memory`` bytes on which passes take ``activations`` beside the weights."""

    def __init__(self, memory, activations=0):
        self.memory, self.ledger, self.activations = memory, Ledger(), activations

    def session(self, net, budget, activations=None, pool="auto"):
        device = carom.SimulatedDevice(
            timing="random", memory_bytes=self.memory, ledger=self.ledger,
            activation_bytes=self.activations if activations is None else activations,
        )  # fmt: skip
        return carom.stream(net, device=device, vram=budget, granularity="layer", pool=pool)

    def left(self, *sessions):
        """Bytes that nobody uses, not even passes."""
        return inside(sessions[0]).engine.memory().free


def held(*sessions):
    return [inside(session).held_bytes for session in sessions]


def turns(nets, rounds):
    for _ in range(rounds):
        for net in nets:
            assert torch.equal(run(net), net.expected)


def test_what_passes_leave_is_taken_in_parts_by_size_and_no_more_than_that():
    big, small = Net(depth=12), Net(depth=6, seed=1)
    both = size(big) + size(small)
    card = Card(both, activations=both // 8)
    budget = carom.SharedBudget(both // 3, by_size=True, grows=True)
    with card.session(big, budget) as first, card.session(small, budget) as second:
        begun = held(first, second)
        assert sum(begun) <= budget.nbytes == both // 3
        turns((big, small), 16)
        now = held(first, second)
        assert sum(now) > 1.5 * sum(begun) and now[0] > begun[0] and now[1] > begun[1]
        assert sum(now) <= budget.nbytes
        assert card.left(first) >= Governor.headroom(inside(first).engine.memory())
        assert now[1] <= 1.2 * budget.nbytes / 3


def test_one_that_does_not_grow_keeps_its_size():
    net = Net(depth=12)
    budget = carom.SharedBudget(size(net) // 3)
    with Card(2 * size(net)).session(net, budget) as session:
        turns((net,), 16)
        assert sum(held(session)) <= budget.nbytes == size(net) // 3


def test_what_others_may_hold_and_who_is_still_to_come_is_not_taken():
    net, other = Net(depth=12), Net(depth=12, seed=1)
    card = Card(int(1.2 * size(net)))
    budget = carom.SharedBudget(size(net) // 3, grows=True)
    budget.later = 9 * KB
    with card.session(net, budget) as session:
        turns((net,), 16)
        assert card.left(session) - Governor.headroom(inside(session).engine.memory()) >= budget.later
        budget.later = 0
        with card.session(other, budget) as second:
            turns((net, other), 16)
            assert sum(held(session, second)) <= budget.nbytes <= card.memory


@pytest.mark.parametrize("wanted", ["a graph", None])
def test_a_new_session_finds_the_guess_again_and_whoever_grew_gives_way_where_it_can(wanted):
    """What its passes take of the device was not seen: what the first one grew into was left by its own."""
    net, other = Net(depth=12), Net(depth=6, seed=1)
    card = Card(size(net) + 64 * KB)
    budget = carom.SharedBudget(size(net) // 3, by_size=True, grows=True)
    with card.session(net, budget) as session:
        turns((net,), 16)
        assert budget.grown > 0
        kept = net(X.clone().requires_grad_()) if wanted else None
        budget.later = 0
        if wanted:
            with pytest.raises(carom.BudgetError, match="others hold the rest"):
                card.session(other, budget)
            assert sum(held(session)) <= budget.nbytes
            kept.sum().backward()
        with card.session(other, budget) as second:
            assert budget.nbytes == budget.first and sum(held(session, second)) <= budget.first
            turns((net, other), 16)
            assert budget.grown > 0 and sum(held(session, second)) <= budget.nbytes


def test_a_new_session_gets_the_least_that_was_kept_for_it_where_nobody_can_give_way():
    net, other = Net(depth=12), Net(depth=6, seed=1)
    card = Card(size(net) + 64 * KB)
    budget = carom.SharedBudget(size(net) // 3, by_size=True, grows=True)
    budget.later = 5 * KB
    with card.session(net, budget) as session:
        turns((net,), 16)
        assert budget.grown > 0
        kept = net(X.clone().requires_grad_())
        budget.later = 0
        with card.session(other, budget) as second:
            assert sum(held(session, second)) <= budget.nbytes < budget.first + size(net)
            turns((other,), 4)
        kept.sum().backward()


def test_another_program_that_comes_is_made_room_for():
    net, other = Net(depth=12), Net(depth=12, seed=1)
    card = Card(2 * size(net))
    budget = carom.SharedBudget(size(net) // 2, by_size=True, grows=True)
    with card.session(net, budget) as first, card.session(other, budget) as second:
        turns((net, other), 16)
        before = sum(held(first, second))
        card.ledger.others = size(net)
        turns((net, other), 3)
        assert sum(held(first, second)) < before
        assert card.left(first) >= 0


def test_who_ran_out_of_memory_in_training_is_not_followed_by_who_did_not():
    """What one gave up for its own steps is not taken by the other beyond its part by size."""
    net, other = Net(depth=12), Net(depth=12, seed=1)
    card = Card(int(1.5 * size(net)))
    budget = carom.SharedBudget(size(net) // 2, by_size=True, grows=True)
    with card.session(net, budget) as first, card.session(other, budget) as second:
        turns((net, other), 16)
        before = held(first, second)
        inside(first).failed = True
        turns((net, other), 8)
        now = held(first, second)
        assert now[0] < before[0] and now[1] <= max(before[1], budget.nbytes // 2)
        assert sum(held(first, second)) <= budget.nbytes


def promised(*sessions):
    return sum(inside(session).promised_bytes + inside(session).ledger.kept_bytes for session in sessions)


def grown_alone(card, budget, net):
    """A session that has grown into what its own passes leave."""
    session = card.session(net, budget)
    turns((net,), 16)
    assert budget.grown > 0
    return session


# -- those that come


def test_a_new_session_does_not_begin_with_what_one_that_has_left_grew_into():
    net, other = Net(depth=12), Net(depth=12, seed=1)
    card = Card(2 * size(net))
    budget = carom.SharedBudget(size(net) // 3, by_size=True, grows=True)
    grown_alone(card, budget, net).close()
    with card.session(other, budget) as second:
        assert sum(held(second)) <= inside(second).capacity <= budget.nbytes == budget.first


@pytest.mark.parametrize("leaves", ["park", "auto"])
def test_a_new_session_does_not_begin_with_what_one_that_is_away_grew_into(leaves):
    net, other = Net(depth=12), Net(depth=12, seed=1)
    card = Card(2 * size(net))
    budget = carom.SharedBudget(size(net) // 3, by_size=True, grows=True)
    with grown_alone(card, budget, net) as first:
        if leaves == "park":
            first.park()
        else:
            first.set_budget(vram=8 * KB)
        with card.session(other, budget) as second:
            assert inside(second).capacity <= budget.nbytes == budget.first
            turns((net, other), 8)


def test_a_new_session_gets_its_part_of_the_guess_and_leaves_the_others_theirs():
    net, other = Net(depth=12), Net(depth=12, seed=1)
    card = Card(2 * size(net))
    budget = carom.SharedBudget(size(net) // 2, by_size=True, grows=True)
    with grown_alone(card, budget, net) as first, card.session(other, budget) as second:
        assert budget.nbytes == budget.first
        assert abs(held(first)[0] - budget.first // 2) <= 5 * KB
        assert abs(held(second)[0] - budget.first // 2) <= 5 * KB


def test_who_joins_a_budget_that_has_grown_is_a_new_session_there():
    net, other = Net(depth=12), Net(depth=12, seed=1)
    card = Card(2 * size(net) + 64 * KB)
    budget = carom.SharedBudget(size(net) // 2, by_size=True, grows=True)
    with grown_alone(card, budget, net) as first, card.session(other, 8 * KB) as second:
        second.set_budget(vram=budget)
        assert budget.nbytes == budget.first
        assert promised(first, second) <= budget.nbytes
        assert min(held(first, second)) > 0.3 * budget.first
        turns((net, other), 16)
        assert budget.grown > 0 and promised(first, second) <= budget.nbytes


@pytest.mark.parametrize("joins", [False, True])
def test_after_a_pass_that_ran_out_of_memory_a_new_session_finds_its_part_of_the_guess_all_the_same(joins):
    net, other = Net(depth=12), Net(depth=12, seed=1)
    card = Card(3 * size(net))
    budget = carom.SharedBudget(size(net), by_size=True, grows=True)
    with card.session(net, budget) as first:
        turns((net,), 2)
        inside(first).failed = True
        for parameter in net.parameters():
            parameter.requires_grad_()
        inside(first).governor.short = lambda memory, held, least, training: least
        turns((net,), 1)
        assert budget.nbytes < budget.first, "what was given up is out of the sum"
        with card.session(other, 8 * KB if joins else budget) as second:
            if joins:
                second.set_budget(vram=budget)
            assert held(second)[0] > 0.4 * budget.first
            assert promised(first, second) <= budget.nbytes


# -- what others are about to hold


@pytest.mark.parametrize("how", ["returns", "is laid out anew"])
def test_what_another_one_is_about_to_lay_out_is_not_free_to_grow_into(monkeypatch, how):
    """Between its old layout and its new one the device looks free."""
    net, other = Net(depth=12), Net(depth=12, seed=1)
    card = Card(int(1.2 * size(net)))
    budget = carom.SharedBudget(size(net) // 2, grows=True)
    with card.session(net, budget) as first, card.session(other, budget) as second:
        turns((net, other), 16)
        wanted = inside(second).capacity
        if how == "returns":
            second.park()
        monkeypatch.setattr(inside(second).ledger, "release", lambda *_: 0)  # nor is it given
        thread = threading.Thread(target=turns, args=((net,), 16), daemon=True)
        build = LayoutManager._build

        def built(self, wanted):
            if self is inside(second).manager and thread.ident is None:
                thread.start()
                thread.join(1)  # as far as it comes meanwhile
            return build(self, wanted)

        monkeypatch.setattr(LayoutManager, "_build", built)
        if how == "returns":
            run(other)
        else:
            second.set_budget(ram="auto")
        thread.join(30)
        assert not thread.is_alive()
        assert inside(second).capacity >= 0.9 * wanted and promised(first, second) <= budget.nbytes
        assert card.left(first) >= Governor.headroom(inside(first).engine.memory())


def test_what_the_device_has_left_is_not_read_in_the_middle_of_another_ones_layout(monkeypatch):
    """It would be taken for free once that layout is done, and nothing of it is said to be on its way any more."""
    net, other = Net(depth=12), Net(depth=12, seed=1)
    card = Card(int(1.2 * size(net)))
    budget = carom.SharedBudget(size(net) // 2, grows=True)
    with card.session(net, budget) as first, card.session(other, budget) as second:
        turns((net, other), 16)
        second.park()
        monkeypatch.setattr(inside(second).ledger, "release", lambda *_: 0)
        thread, done = threading.Thread(target=turns, args=((net,), 16), daemon=True), threading.Event()
        build, memory = LayoutManager._build, inside(first).engine.memory

        def built(self, wanted):
            if self is inside(second).manager and thread.ident is None:
                inside(first).governor._quiet = inside(first).governor._patience  # this reading counts
                thread.start()
                thread.join(0.5)
            return build(self, wanted)

        def read():
            found = memory()
            done.wait(20)
            return found

        monkeypatch.setattr(LayoutManager, "_build", built)
        monkeypatch.setattr(inside(first).engine, "memory", read)
        run(other)
        done.set()
        thread.join(30)
        assert not thread.is_alive() and promised(first, second) <= budget.nbytes
        assert card.left(first) >= Governor.headroom(memory())


def test_what_one_that_returns_is_about_to_lay_out_is_not_free_to_grow_into(monkeypatch):
    net, other = Net(depth=12), Net(depth=12, seed=1)
    card = Card(int(1.2 * size(net)))
    budget = carom.SharedBudget(size(net) // 2, grows=True)
    with card.session(net, budget) as first, card.session(other, budget) as second:
        turns((net, other), 16)
        wanted, comes_back = inside(second).capacity, inside(second).ledger._come_back
        second.park()
        monkeypatch.setattr(inside(second).ledger, "release", lambda *_: 0)

        def between(nbytes):
            comes_back(nbytes)
            turns((net,), 16)

        monkeypatch.setattr(inside(second).ledger, "_come_back", between)
        run(other)
        assert inside(second).capacity >= 0.9 * wanted and promised(first, second) <= budget.nbytes
        assert card.left(first) >= Governor.headroom(inside(first).engine.memory())


def test_what_rises_while_another_ones_failure_is_answered_stays_in_the_sum(monkeypatch):
    net, other = Net(depth=12), Net(depth=12, seed=1)
    card = Card(2 * size(net))
    budget = carom.SharedBudget(size(net) // 2, by_size=True, grows=True)
    with card.session(net, budget) as first, card.session(other, budget) as second:
        turns((net, other), 2)
        thread = threading.Thread(target=turns, args=((other,), 16), daemon=True)
        spoken, answered = carom.SharedBudget._spoken_for, inside(first).memory._answered

        def slowly(self, session):
            found = spoken(self, session)
            if session is None and thread.ident is None:
                thread.start()
                thread.join(1)
            return found

        def fits():
            if inside(first).failed:
                inside(first).engine.activations = 0
            answered()

        monkeypatch.setattr(carom.SharedBudget, "_spoken_for", slowly)
        monkeypatch.setattr(inside(first).memory, "_answered", fits)
        inside(first).engine.activations = card.memory  # a pass without gradients fails, and runs again
        turns((net,), 1)
        thread.join(30)
        assert not thread.is_alive() and promised(first, second) <= budget.nbytes


@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_in_whatever_order_the_sum_is_kept(seed):
    drawn = random.Random(seed)
    nets = [Net(depth=drawn.choice([2, 6, 12, 20]), seed=number) for number in range(4)]
    everything = sum(map(size, nets))
    card = Card(int(everything * drawn.choice([0.6, 0.9, 1.4])), drawn.choice([0, everything // 10]))
    budget = carom.SharedBudget(int(0.3 * card.memory), by_size=seed % 2 == 0, grows=True)
    sessions = {}
    for _ in range(100):
        number = drawn.randrange(4)
        net, session = nets[number], sessions.get(number)
        weights = {"run": 9, "all": 4, "close": 1, "park": 2, "leave": 1, "join": 2, "others": 2, "fail": 1}
        action = drawn.choices(list(weights), list(weights.values()))[0]
        with contextlib.suppress(carom.BudgetError, torch.OutOfMemoryError):
            if action == "others":
                card.ledger.others = drawn.choice([0, 0, card.memory // 4, card.memory // 3])
            elif session is None:
                sessions[number] = card.session(net, budget)
            elif action == "close":
                sessions.pop(number).close()
            elif action == "park":
                session.park(keep=drawn.random() < 0.5)
            elif action in ("leave", "join"):
                session.set_budget(vram=budget if action == "join" else 8 * KB)
            else:
                inside(session).failed = action == "fail"
                turns([nets[n] for n in sessions] if action == "all" else [net], 1)
        members = list(budget.mates.members.values())
        on_device = sum(m.held_bytes for m in members if m.holder.attached)
        assert on_device <= sum(m.promised_bytes + m.kept_bytes for m in members) <= budget.nbytes
    for session in sessions.values():
        session.close()
    turns(nets, 1)


def test_a_program_that_comes_and_goes_again_and_again_is_not_followed_each_time(monkeypatch):
    nets = [Net(depth=12), Net(depth=12, seed=1)]
    card = Card(2 * size(nets[0]))
    budget = carom.SharedBudget(size(nets[0]) // 2, by_size=True, grows=True)
    layouts = []
    build = LayoutManager._build
    monkeypatch.setattr(
        LayoutManager, "_build", lambda self, wanted: (layouts.append(self), build(self, wanted))[1]
    )
    with card.session(nets[0], budget), card.session(nets[1], budget):
        counts = []
        for _ in range(14):
            before = len(layouts)
            for others in (0, size(nets[0])):
                card.ledger.others = others
                turns(nets, 6)
            counts.append(len(layouts) - before)
        assert sum(counts[8:]) <= 2, counts


def test_what_is_kept_for_one_to_come_is_left_where_the_device_has_less_than_the_sum_too():
    net = Net(depth=12)
    card = Card(int(1.2 * size(net)))
    budget = carom.SharedBudget(size(net) // 3, grows=True)
    with grown_alone(card, budget, net) as session:
        card.ledger.others = size(net) // 2
        turns((net,), 4)
        budget.later = 9 * KB
        card.ledger.others = size(net) // 4
        turns((net,), 40)
        assert budget.free_bytes > 0, "the sum was not what it was short of"
        assert card.left(session) - Governor.headroom(inside(session).engine.memory()) >= budget.later


# -- threads


def test_who_reads_who_is_there_is_not_disturbed_by_one_that_leaves():
    net, other = Net(depth=6), Net(depth=6, seed=1)
    card, budget = Card(4 * size(net)), carom.SharedBudget(size(net), grows=True)
    with card.session(net, budget) as first:
        second = card.session(other, budget)
        going = iter(budget.mates.members.values())
        assert next(going) is inside(first).ledger
        second.close()
        assert list(going) == [inside(second).ledger]


def test_what_a_pass_finds_is_noted_while_nobody_lays_it_out_anew(monkeypatch):
    net = Net(depth=6)
    before, noted = carom.core.session.policies.device_memory.PassSnapshot, []
    with Card(4 * size(net)).session(net, carom.SharedBudget(size(net))) as session:

        def noting(*args):
            noted.append(inside(session).lock._is_owned())
            return before(*args)

        monkeypatch.setattr("carom.core.session.policies.device_memory.PassSnapshot", noting)
        turns((net,), 2)
    assert noted and all(noted)


# -- pools


def test_room_that_a_pool_lost_for_a_while_is_not_taken_by_who_grows(monkeypatch):
    big, small = Net(depth=40, seed=1), Net(depth=40)
    card = Card(int(1.2 * size(big)))
    driver = aimdo.Driver(carom.SimulatedDevice(memory_bytes=card.memory, ledger=card.ledger))
    aimdo.install(monkeypatch, driver)
    budget = carom.SharedBudget(int(0.8 * size(big)), grows=True)
    with (
        card.session(small, budget, pool="torch") as plain,
        card.session(big, budget, pool="aimdo") as pooled,
    ):
        assert pooled.report().pool == "aimdo"
        turns((big, small), 4)
        room = inside(pooled).vbar.most_bytes
        taken = card.left(plain) + room // 2
        driver.pressure(taken)  # another program comes
        card.ledger.others = taken
        assert inside(pooled).vbar.held_bytes < room
        turns((small,), 2)
        card.ledger.others = 0
        monkeypatch.setattr(inside(pooled).ledger, "release", lambda *_: 0)  # nor is it given
        turns((small,), 40)
        memory = inside(plain).engine.memory()
        left = memory.free - Governor.headroom(memory)
        assert left >= inside(pooled).promised_bytes - inside(pooled).held_bytes > 0
