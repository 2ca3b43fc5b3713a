"""Before an optimizer's first step vram="auto" makes room for the state that the step makes."""

from __future__ import annotations

import copy
import gc
import sys
import weakref

import carom
import pytest
import torch
import torch._dynamo
from carom.core.budget import optimizer_reserve
from carom.core.budget.device_governor import Governor
from carom.core.budget.optimizer_reserve import Needs, fresh_in, needs, reserved
from carom.core.common.memory_snapshot import Memory
from carom.core.common.sizes import GIB, MIB
from carom.core.model.managed_tensor import HostParameter
from tests_inside import inside
from torch import nn
from torch.utils.checkpoint import checkpoint

CPU = torch.device("cpu")
WIDTH, DEPTH = 64, 12
ACTIVATIONS = 16 * 1024


class Adapted(nn.Module):
    """A frozen layer and its low-rank adapter."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, WIDTH) / WIDTH)
        self.up = nn.Parameter(torch.randn(WIDTH, rank) / rank)

    def forward(self, x):
        y = x + torch.tanh(self.base(x))
        return y if self.down is None else y + x @ self.down.T @ self.up.T


class Net(nn.Module):
    def __init__(self, rank: int = 8, reentrant: bool | None = None, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(Adapted(rank) for _ in range(DEPTH))
        self.reentrant = reentrant

    def forward(self, x):
        for block in self.blocks:
            if self.reentrant is None or not torch.is_grad_enabled():
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def trained(net):
    return [p for p in net.parameters() if p.requires_grad]


def nbytes(parameters):
    return sum(p.numel() * p.element_size() for p in parameters)


def size(net):
    return nbytes(p for p in net.parameters() if not p.requires_grad)


def inputs(seed):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_()


class Card:
    """A simulated device that also knows adapters, their gradients and what an optimizer keeps: plain torch makes them."""

    def __init__(self, memory: int) -> None:
        self.device = carom.SimulatedDevice(
            memory_bytes=memory, activation_bytes=ACTIVATIONS, timing="random"
        )
        self.ledger = self.device.ledger

    def stream(self, net, vram="auto", **settings):
        return carom.stream(net, device=self.device, vram=vram, granularity="layer", **settings)

    @property
    def free(self):
        return self.device.memory_bytes - self.ledger.allocated - self.ledger.others

    def holds(self, amount):
        """Plain torch makes ``amount`` bytes; OutOfMemoryError where they are not there."""
        if amount > self.free:
            raise torch.OutOfMemoryError(f"{amount} bytes are needed and {self.free} are free")
        self.ledger.others += amount

    def steps(self, optimizer, values=2):
        """From now on ``optimizer`` has its state here: made in its step, behind hooks that torch calls first."""
        known = set()

        def make(*_):
            state = optimizer.state
            new = [
                p for group in optimizer.param_groups for p in group["params"]
                if p.grad is not None and p not in state and id(p) not in known
                and not isinstance(p, HostParameter)
            ]  # fmt: skip
            self.holds(values * nbytes(new))
            known.update(map(id, new))

        optimizer.register_step_pre_hook(make)
        return optimizer


def loss_of(net, seed):
    return net(inputs(seed)).pow(2).mean()


def train(net, optimizer, steps=4, accumulate=1, gradients=lambda amount: None):
    """Losses; ``gradients`` is told of their bytes where there were none."""
    seen = []
    for step in range(steps):
        for part in range(accumulate):
            loss = loss_of(net, 10 * step + part)
            had = any(p.grad is not None for p in trained(net))
            loss.backward()
            if not had:
                gradients(nbytes(trained(net)))
            seen.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)  # their memory stays taken
    return seen


def adamw(net):
    return torch.optim.AdamW(trained(net), lr=1e-2)


def expected(net, **how):
    plain = copy.deepcopy(net)
    return train(plain, adamw(plain), **how), [p.detach().clone() for p in plain.parameters()]


def settle(net, session):
    """As a host that samples before it trains: the session grows into all there is."""
    for seed in range(12):
        with torch.no_grad():
            net(inputs(seed))
    assert session.plan.all_resident


def tight(net, share=0.25):
    """A card for the weights, the adapters, their gradients, a step, and a ``share`` of the optimizer's state."""
    return Card(int(1.06 * (size(net) + (2 + 2 * share) * nbytes(trained(net)) + ACTIVATIONS)))


def same(run, net, found):
    losses, weights = run
    assert all(torch.equal(a, b) for a, b in zip(losses, found, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(weights, net.parameters(), strict=True))


# -- sessions


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_weights_give_way_before_the_state_is_made_and_nothing_else_changes(reentrant, accumulate):
    net = Net(reentrant=reentrant)
    right = expected(net, accumulate=accumulate)
    card = tight(net)
    card.holds(nbytes(trained(net)))
    with card.stream(net) as session:
        settle(net, session)
        optimizer = card.steps(adamw(net))
        found = train(net, optimizer, accumulate=accumulate, gradients=lambda n: card.holds(n))
        assert inside(session).streamed and len(optimizer.state) == len(trained(net))
        assert inside(session).engine._ooms == 0
    same(right, net, found)


def test_it_would_have_run_out_of_memory_otherwise(monkeypatch):
    monkeypatch.setattr(optimizer_reserve, "_register", None)
    net = Net()
    card = tight(net)
    card.holds(nbytes(trained(net)))
    with card.stream(net) as session:
        settle(net, session)
        with pytest.raises(torch.OutOfMemoryError):
            train(net, card.steps(adamw(net)), gradients=lambda n: card.holds(n))


def test_more_gives_way_where_what_gave_way_lies_in_pieces():
    net = Net()
    right = expected(net)
    card = tight(net)
    card.holds(nbytes(trained(net)))
    with card.stream(net) as session:
        settle(net, session)
        given, inner = [], inside(session).ledger.release

        def half_of_it_is_of_use(nbytes, of_device=False):
            given.append(inner(nbytes))
            card.ledger.others += given[-1] // 2
            return given[-1]

        inside(session).ledger.release = half_of_it_is_of_use
        optimizer = card.steps(adamw(net))
        found = train(net, optimizer, gradients=lambda n: card.holds(n))
        assert len(given) > 1 and len(optimizer.state) == len(trained(net))
        assert inside(session).engine._ooms == 0
    same(right, net, found)


def test_the_room_is_not_taken_back_and_the_layout_keeps_still():
    net = Net()
    card = tight(net)
    card.holds(nbytes(trained(net)))
    with card.stream(net) as session:
        settle(net, session)
        optimizer = card.steps(adamw(net))
        layouts = []
        for _ in range(40):
            train(net, optimizer, 1, gradients=lambda n: card.holds(n) if not optimizer.state else None)
            if inside(session).arrangement not in layouts:
                layouts.append(inside(session).arrangement)
        assert inside(session).engine._ooms == 0 and card.free - inside(session).engine._cached > 0
        assert len(layouts) <= 3, "smaller before the step; after it at most what an estimate left"


def test_adapters_larger_than_what_is_left_for_weights_stay_on_the_device():
    """Their optimizer's state is there."""
    net = Net(rank=32)
    right = expected(net, steps=12)
    card = tight(net, 0.6)
    card.holds(nbytes(trained(net)))
    with card.stream(net) as session:
        settle(net, session)
        found = train(net, card.steps(adamw(net)), 12, gradients=lambda n: card.holds(n))
        assert inside(session).capacity < nbytes(trained(net))
        assert not any(isinstance(p, HostParameter) for p in trained(net))
    same(right, net, found)


def test_adapters_that_come_later_stay_on_the_device_too_whatever_is_left_for_weights():
    net = Net(rank=32)
    adapters = [(block.down, block.up) for block in net.blocks]
    for block in net.blocks:
        block.down = block.up = None
    card = Card(size(net))
    with card.stream(net) as session:
        with torch.no_grad():
            net(inputs(0))
        for block, (down, up) in zip(net.blocks, adapters, strict=True):
            block.down, block.up = down, up
        loss_of(net, 0)
        assert inside(session).capacity < nbytes(trained(net))
        for _ in range(3):
            inside(session).memory.resize(inside(session).capacity)
            assert not any(isinstance(p, HostParameter) for p in trained(net))


def test_trainable_weights_that_stream_have_their_state_on_the_host_and_want_no_room():
    net = Net(rank=32)
    right = expected(net, steps=1)
    card = tight(net)
    with card.stream(net, vram=size(net) // 2, training="stream"):
        optimizer = adamw(net)
        loss = loss_of(net, 0)
        loss.backward()
        away = [p for p in trained(net) if isinstance(p, HostParameter)]
        assert away
        found = needs(optimizer, {id(p) for p in trained(net)}, CPU, 512)
        assert found.state == 2 * (nbytes(trained(net)) - nbytes(away))
        optimizer.step()
    same(right, net, [loss.detach()])


def test_a_layout_between_backward_and_step_leaves_gradients_that_landed_on_the_host():
    net = Net(rank=32)
    right = expected(net)
    card = tight(net)
    with card.stream(net, training="stream") as session:
        for _ in range(12):
            with torch.no_grad():
                net(inputs(0))
        optimizer, gave = adamw(net), []
        optimizer.register_step_pre_hook(
            lambda *_: gave.append(inside(session).ledger.release(size(net) // 4))
        )
        found = train(net, optimizer)
        assert sum(gave) > 0
    same(right, net, found)


def test_an_optimizer_in_backward_finds_room_for_its_state_and_asks_nobody_within_it():
    net = Net()
    right = expected(net)
    card = tight(net, 0)
    card.holds(nbytes(trained(net)))
    with card.stream(net) as session:
        settle(net, session)
        assert card.free < 2 * nbytes(trained(net))
        optimizer = carom.OptimizerInBackward(trained(net), lambda ps: torch.optim.AdamW(ps, lr=1e-2))
        assert card.free >= 2 * nbytes(trained(net))
        asked, inner = [], inside(session).ledger.release
        inside(session).ledger.release = lambda n: asked.append(n) or inner(n)
        card.holds(card.free - 2 * inside(session).engine.activations)  # it would be asked now
        found = train(net, optimizer, 1)
        assert not asked
        found += [loss.detach() for loss in _rest(net, optimizer)]
    same(right, net, found)


def test_optimizers_that_others_step_within_a_backward_ask_nobody():
    net = Net()
    card = tight(net, 0)
    with card.stream(net) as session:
        settle(net, session)
        asked = []
        inside(session).ledger.release = lambda n: asked.append(n) or 0
        own = {id(p): torch.optim.AdamW([p]) for p in trained(net)}
        for p in trained(net):
            p.register_post_accumulate_grad_hook(lambda p: own[id(p)].step())
        loss = loss_of(net, 0)
        card.holds(card.free - inside(session).engine.activations)
        loss.backward()
        assert not asked and all(optimizer.state for optimizer in own.values())


def _rest(net, optimizer):
    for step in range(1, 4):
        loss = loss_of(net, 10 * step)
        loss.backward()
        optimizer.step()
        yield loss


def test_an_optimizer_of_another_model_gets_room_too():
    net, other = Net(), nn.Linear(WIDTH, 128)
    card = tight(net)
    card.holds(nbytes(trained(net)))
    with card.stream(net) as session:
        settle(net, session)
        card.holds(card.free - inside(session).engine._cached - 1024)
        optimizer = card.steps(torch.optim.AdamW(other.parameters()))
        other(inputs(0)).sum().backward()
        optimizer.step()
        assert inside(session).streamed
        assert torch.equal(*[net(inputs(0)).detach() for _ in range(2)])


@pytest.mark.parametrize("shared", [False, True])
def test_of_several_sessions_the_one_used_least_gives_first(shared):
    net, other = Net(), Net(seed=1)
    need = size(net) + size(other) + 2.5 * nbytes(trained(net)) + nbytes(trained(other))
    card = Card(int(1.06 * (need + ACTIVATIONS)))
    card.holds(nbytes(trained(net)) + nbytes(trained(other)))
    vram = carom.SharedBudget(2 * size(net) + 64 * 1024) if shared else "auto"
    with card.stream(other, vram) as unused, card.stream(net, vram) as session:
        for seed in range(20):
            with torch.no_grad():
                net(inputs(seed)), other(inputs(seed))
        for seed in range(3):
            with torch.no_grad():
                net(inputs(seed))
        assert session.plan.all_resident and unused.plan.all_resident
        train(net, card.steps(adamw(net)), 2, gradients=lambda n: card.holds(n))
        assert inside(unused).streamed and session.plan.all_resident
        assert inside(session).engine._ooms == 0


@pytest.mark.parametrize("busy", ["graph", "pass", "parked"])
def test_a_session_in_the_middle_of_something_is_left_alone(busy):
    net = Net()
    card = tight(net)
    with card.stream(net) as session:
        settle(net, session)
        optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(WIDTH, 512))])
        optimizer.param_groups[0]["params"][0].grad = torch.zeros(WIDTH, 512)
        card.holds(card.free - inside(session).engine._cached)
        if busy == "graph":
            wanted = loss_of(net, 0)
        elif busy == "pass":
            inside(session).begin_pass()
        else:
            session.park()
        held = inside(session).arrangement
        optimizer.step()
        assert inside(session).arrangement is held and len(optimizer.state) == 1
        if busy == "graph":
            wanted.backward()
        elif busy == "pass":
            inside(session).end_pass()


def test_a_budget_in_bytes_gives_nothing_and_torch_is_not_asked_to_tell():
    net = Net()
    card = Card(4 * GIB)
    with card.stream(net, vram=size(net)) as session:
        assert optimizer_reserve._hook is None
        session.set_budget(vram="auto")
        assert optimizer_reserve._hook is not None
        session.set_budget(vram=size(net))
        assert optimizer_reserve._hook is None


def test_torch_tells_of_steps_only_while_somebody_listens():
    hooks = sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks
    before = len(hooks)
    first, second = (Card(1 << 20).stream(Net()) for _ in range(2))
    assert len(hooks) == before + 1
    first.close()
    assert len(hooks) == before + 1
    second.close()
    assert len(hooks) == before
    dropped = weakref.ref(Card(1 << 20).stream(Net()))
    gc.collect()
    assert dropped() is None
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.SGD([parameter]).step()
    assert len(hooks) == before


def test_where_torch_has_no_such_hook_everything_else_works(monkeypatch):
    monkeypatch.setattr(optimizer_reserve, "_register", None)
    net = Net()
    right = expected(net)
    with Card(1 << 24).stream(net):
        assert optimizer_reserve._hook is None
        found = train(net, adamw(net))
    same(right, net, found)


def test_an_optimizer_that_cannot_be_understood_steps_all_the_same(monkeypatch, caplog):
    monkeypatch.setattr(optimizer_reserve, "needs", lambda *_: 1 / 0)
    net = Net()
    right = expected(net, steps=1)
    with Card(1 << 24).stream(net):
        found = train(net, adamw(net), 1)
    same(right, net, found)
    assert "is not known" in caplog.text


def compiled_step():
    """What a compiled step made of ones, and how often its graph was broken up."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    parameter = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    parameter.grad = torch.ones(4)
    torch.compile(optimizer.step, backend="eager")()
    return parameter.tolist(), sum(torch._dynamo.utils.counters["graph_break"].values())


def test_a_compiled_step_is_not_broken_up_further():
    right = compiled_step()
    with Card(1 << 24).stream(Net()):
        assert compiled_step() == right
    assert right[0] == [0.5] * 4


# -- what an optimizer's step newly needs


def parameters(*shapes, dtype=torch.float32, gradients=True):
    made = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    for parameter in made if gradients else ():
        parameter.grad = torch.zeros_like(parameter)
    return made


def taken(optimizer, grain=512, **how):
    return needs(optimizer, fresh_in(optimizer, **how), CPU, grain, **how)


def test_adam_keeps_two_values_of_each_and_one_more_with_amsgrad():
    ps = parameters((64, 64), (128,))
    whole = nbytes(ps)
    assert taken(torch.optim.AdamW(ps)).state == 2 * whole
    assert taken(torch.optim.AdamW(ps, amsgrad=True)).state == 3 * whole
    assert taken(torch.optim.Adam(parameters((64, 64), dtype=torch.bfloat16))).state == 2 * 64 * 64 * 2


def test_what_is_expected_is_what_torch_makes():
    for make in (
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Adamax,
    ):
        for dtype in (torch.float32, torch.bfloat16):
            optimizer = make(parameters((64, 64), (256,), dtype=dtype))
            expect = taken(optimizer)
            optimizer.step()
            kept = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
            assert expect.state == nbytes(v for v in kept if v.dim())


def test_a_step_at_once_holds_another_copy_of_its_largest_group():
    small, large = parameters((64,)), parameters((64, 64), (64, 64))
    for how, passing in (
        ({"foreach": True}, nbytes(large)),
        ({"foreach": False}, nbytes(large[:1])),
        ({"fused": True}, 0),
        ({}, nbytes(large[:1])),  # on the CPU torch steps one by one unless told otherwise
    ):
        assert taken(torch.optim.AdamW([{"params": small}, {"params": large}], **how)).passing == passing, how


class Foreign(torch.optim.Optimizer):
    """Not torch's: what it keeps is not known."""

    def __init__(self, params, **defaults):
        super().__init__(params, defaults)

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["one"] = torch.zeros_like(p)


def test_of_optimizers_that_are_not_torchs_full_precision_is_expected():
    ps = parameters((64, 64), dtype=torch.bfloat16)
    assert taken(Foreign(ps, lr=1.0)).state == 2 * 4 * 64 * 64
    assert taken(Foreign(ps, lr=1.0, d=1e-6)).state == 4 * 4 * 64 * 64, (
        "as Prodigy, which finds its step's size"
    )


def test_an_8_bit_optimizer_that_says_so_is_expected_to_keep_bytes():
    optimizer = Foreign(parameters((64, 64)), lr=1.0)
    optimizer.args = type("Args", (), {"optim_bits": 8})()
    assert taken(optimizer).state == 2 * 64 * 64


def test_a_parameter_counts_once_when_its_gradient_comes():
    early, late = parameters((64,), (128,))
    late.grad = None
    optimizer = torch.optim.AdamW([early, late])
    assert taken(optimizer).state == 2 * 512
    optimizer.step()
    assert taken(optimizer).state == 0
    late.grad = torch.zeros(128)
    assert taken(optimizer).state == 2 * 512
    optimizer.step()
    assert taken(optimizer).state == 0
    optimizer.add_param_group({"params": parameters((256,))})
    assert taken(optimizer).state == 2 * 1024


def test_an_optimizer_that_keeps_nothing_is_asked_once():
    optimizer = torch.optim.SGD(parameters((64,)), lr=0.1)
    taken(optimizer)
    optimizer.step()
    assert fresh_in(optimizer) == set()


def test_a_state_that_was_loaded_is_there_and_one_that_was_dropped_comes_again():
    ps = parameters((64,))
    first, second = torch.optim.AdamW(ps), torch.optim.AdamW(ps)
    first.step()
    second.load_state_dict(first.state_dict())
    assert fresh_in(second) == set()
    assert fresh_in(first) == set()
    first.state.clear()
    assert len(fresh_in(first)) == 1


def test_later_steps_look_at_no_parameter():
    class Watched(list):
        looked = 0

        def __iter__(self):
            Watched.looked += 1
            return super().__iter__()

    optimizer = torch.optim.AdamW(parameters((64,), (64,)))
    fresh_in(optimizer)
    optimizer.step()
    fresh_in(optimizer)
    optimizer.param_groups[0]["params"] = Watched(optimizer.param_groups[0]["params"])
    assert fresh_in(optimizer) == set() and Watched.looked == 0


def test_what_the_allocator_reserves_is_what_counts():
    grain = 2 * MIB
    assert reserved(700, grain) == 1024
    assert reserved(3 * MIB, grain) == 20 * MIB // 6, "six share a segment"
    assert reserved(11 * MIB, grain) == 12 * MIB
    assert reserved(11 * MIB, 512) == 11 * MIB


def test_state_wants_free_memory_and_what_passes_may_use_what_activations_left():
    roomy = Memory(16 * GIB, 6 * GIB)
    headroom = Governor.headroom(roomy)
    assert Needs(2 * GIB, GIB).missing(roomy, activations=2 * GIB) == 0
    assert Needs(4 * GIB, GIB).missing(roomy, activations=2 * GIB) == headroom, (
        "the next step wants them again"
    )
    assert Needs(4 * GIB, 3 * GIB).missing(roomy, activations=2 * GIB) == headroom + GIB
    assert Needs(0, 8 * GIB).missing(roomy) == 0, "no state: as every step before"


class InPieces:
    """A device whose allocator keeps ``cached`` bytes, of which ``pieces`` are of no use to anybody; and a session on it."""

    device = CPU
    grain = 512
    key = 0

    def __init__(self, free, cached, pieces, held, scattered=0.0):
        self.free, self.cached, self.pieces, self.held = free, cached, pieces, held
        self.scattered = scattered  # of what gives way: left in pieces

    def memory(self):
        return Memory(16 * GIB, self.free, self.cached)

    def trim(self):
        self.free, self.cached = self.free + self.cached - self.pieces, self.pieces

    def uses(self, key):
        return 0

    def release(self, nbytes, of_device=False):
        given = min(nbytes, self.held)
        self.held -= given
        self.free += given - int(self.scattered * given)
        self.cached += int(self.scattered * given)
        return given


def test_pieces_of_what_gave_way_are_no_room_for_activations():
    place = InPieces(free=GIB, cached=3 * GIB, pieces=GIB // 2, held=16 * GIB, scattered=0.3)
    wanted = Needs(state=4 * GIB)
    optimizer_reserve._give([(place, optimizer_reserve._Member(place, 0, place))], wanted)
    activations = 5 * GIB // 2  # what trimming gave back
    assert place.free >= wanted.state + activations + optimizer_reserve.LOW * Governor.headroom(
        place.memory()
    )


@pytest.mark.parametrize("pieces", [0, GIB // 2, GIB])
def test_what_lies_in_pieces_is_no_room_for_what_passes(pieces):
    """As with AdamW's copy of all adapters of rank 1024: half a gigabyte of the cache was of no use, and three steps failed."""
    place = InPieces(free=GIB, cached=GIB, pieces=pieces, held=8 * GIB)
    wanted = Needs(state=4 * GIB, passing=2 * GIB)
    optimizer_reserve._give([(place, optimizer_reserve._Member(place, 0, place))], wanted)
    headroom = Governor.headroom(place.memory())
    assert place.free == wanted.state + wanted.passing + headroom
    assert place.held == 8 * GIB - (4 * GIB + pieces + headroom), (
        "what the cache gave back did not have to be given"
    )
    roomy = InPieces(free=7 * GIB, cached=GIB, pieces=pieces, held=8 * GIB)
    optimizer_reserve._give([(roomy, optimizer_reserve._Member(roomy, 0, roomy))], wanted)
    assert roomy.cached == GIB and roomy.held == 8 * GIB, "left alone"
