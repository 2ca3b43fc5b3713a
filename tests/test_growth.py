"""A shared budget that grows: a guess at first, then what passes leave of the device, divided by size."""

from __future__ import annotations

import carom
import pytest
import torch
from carom.core.auto import Governor
from carom.core.simulated import Ledger
from tests_models import Chain

KB = 1024
X = torch.linspace(-1, 1, 64).reshape(2, 32)


@pytest.fixture(autouse=True)
def looking(monkeypatch):
    """Memory is looked at before every step."""
    monkeypatch.setattr("carom.core.adapt._LOOKS", 0.0)


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

    def session(self, net, budget, activations=None):
        device = carom.SimulatedDevice(
            timing="random", memory_bytes=self.memory, ledger=self.ledger,
            activation_bytes=self.activations if activations is None else activations,
        )  # fmt: skip
        return carom.stream(net, device=device, vram=budget, granularity="layer")

    def left(self, *sessions):
        """Bytes that nobody uses, not even passes."""
        return sessions[0]._engine.memory().free


def held(*sessions):
    return [session._held_bytes() for session in sessions]


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
        assert card.left(first) >= Governor.headroom(first._engine.memory())
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
        assert card.left(session) - Governor.headroom(session._engine.memory()) >= budget.later
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
        first._failed = True
        turns((net, other), 8)
        now = held(first, second)
        assert now[0] < before[0] and now[1] <= max(before[1], budget.nbytes // 2)
        assert sum(held(first, second)) <= budget.nbytes
