"""A pass that runs out of memory in inference: it runs again with fewer weights on the device, and its result is the same."""

from __future__ import annotations

import gc
import random
import weakref
from types import SimpleNamespace

import carom
import pytest
import torch
from carom.core.common.sizes import MIB
from carom.core.model.interpose import Wrapped
from carom.core.streaming.runner import Use
from tests_inside import inside
from tests_limits import units_apart_from
from torch import nn


class Trouble:
    """Where a forward runs out of memory: ``block``, so many times; ``seen``: forwards that were begun, by block."""

    def __init__(self):
        self.block, self.left, self.seen, self.message = None, 0, [], "injected"
        self.inside = lambda block, x: None

    def at(self, block, times=1, message="injected"):
        self.block, self.left, self.message = block, times, message
        self.seen.clear()

    def strikes(self, block, x):
        self.seen.append(block.number)
        self.inside(block, x)
        if block.number == self.block and self.left:
            self.left -= 1
            raise torch.OutOfMemoryError(self.message)


TROUBLE = Trouble()


@pytest.fixture(autouse=True)
def own_memory(monkeypatch):
    """Units of these models lie apart on the device, as those of real ones do."""
    units_apart_from(monkeypatch)
    TROUBLE.__init__()


class Block(nn.Module):
    def __init__(self, number, width):
        super().__init__()
        self.number = number
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.3)
        self.register_buffer("seen", torch.zeros(1))
        self.cache, self.nested, self.total = SimpleNamespace(items=[]), {0: []}, torch.zeros(1)

    def forward(self, x):
        found = x + self.down(self.dropout(torch.relu(self.up(x))))
        TROUBLE.strikes(self, x)
        return found


class Net(nn.Module):
    def __init__(self, depth=8, width=32):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(number, width) for number in range(depth))
        self.requires_grad_(False)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x * 1.0


def size(net):
    return sum(p.numel() * p.element_size() for p in net.parameters())


STATE = 8 * 4  # bytes of small buffers, which the simulated device has where they were
X = torch.linspace(-1, 1, 64).reshape(2, 32)


def run(net, mode=torch.no_grad, x=X, seed=7):
    torch.manual_seed(seed)
    with mode():
        return net(x.clone())


def auto(net, share=0.8, granularity="block"):
    """Its first guess of a budget is all it gets: what it holds falls only where a test makes it."""
    device = carom.SimulatedDevice(timing="random", memory_bytes=64 * MIB)
    session = carom.stream(net, device=device, vram="auto", granularity=granularity)
    inside(session).governor.read = lambda *given, **named: None
    inside(session).ledger.set(int(share * size(net)))
    inside(session).relay()
    return session


def resident(session):
    """Numbers of the blocks that stay on the device."""
    gone = streamed(session)
    return [block.number for block in session.module.blocks if block.number not in gone]


def streamed(session):
    return sorted(int(unit.name.split(".")[1]) for unit in inside(session).streamed)


STEADY = pytest.mark.parametrize("passes", [0, 1, 20], ids=["first", "second", "steady"])


@STEADY
@pytest.mark.parametrize("kind", [resident, streamed])
@pytest.mark.parametrize("drops", [False, True])
def test_a_pass_that_ran_out_of_memory_runs_again_and_the_result_is_the_same(kind, drops, passes):
    net = Net().train(drops)
    expected = run(net)
    with auto(net) as session:
        for _ in range(passes):
            assert torch.equal(run(net), expected)
        held = inside(session).held_bytes
        TROUBLE.at(kind(session)[-1])
        assert torch.equal(run(net), expected), "dropout's numbers too"
        assert TROUBLE.seen.count(TROUBLE.block) == TROUBLE.seen.count(0) == 2
        assert inside(session).held_bytes < held, "and it holds less from now on"
        now = inside(session).held_bytes
        for _ in range(3):
            assert torch.equal(run(net), expected)
        assert inside(session).held_bytes == now
        assert inside(session).engine.allocated == now - STATE
    assert torch.equal(run(net), expected)
    assert all(type(p) is nn.Parameter for p in net.parameters())
    assert all("forward" not in vars(module) for module in net.modules())


def test_where_nothing_helps_the_error_is_raised_and_the_model_is_whole():
    net = Net()
    expected = run(net)
    with auto(net) as session:
        for _ in range(20):
            run(net)
        held = inside(session).held_bytes
        TROUBLE.at(2, times=1000)
        with pytest.raises(torch.OutOfMemoryError) as failed:
            run(net)
        assert any("carom held" in note for note in getattr(failed.value, "__notes__", ["carom held"]))
        del failed
        TROUBLE.left = 0
        for _ in range(3):
            assert torch.equal(run(net), expected)
        assert inside(session).held_bytes < held
        assert inside(session).engine.allocated == inside(session).held_bytes - STATE
    assert torch.equal(run(net), expected)


@STEADY
@pytest.mark.parametrize(
    "change",
    [
        lambda block: block.seen.add_(1),
        lambda block: block.up.bias.add_(1),
        lambda block: setattr(block, "count", getattr(block, "count", 0) + 1),
        lambda block: setattr(block, "seen", block.seen + 1),
        lambda block: block.cache.items.append(1),
        lambda block: block.nested[0].append(1),
        lambda block: block.total.add_(1),
    ],
    ids=["buffer", "weight", "attribute", "replaced", "object", "nested list", "tensor that is no buffer"],
)
def test_a_pass_that_changed_something_is_not_run_again(change, passes):
    """Also one that did so before it failed for the first time."""
    net = Net()
    with auto(net) as session:
        for _ in range(passes):
            run(net)
        number = resident(session)[-1]
        TROUBLE.at(number)
        TROUBLE.inside = lambda block, x: change(block) if block.number == number else None
        with pytest.raises(torch.OutOfMemoryError):
            run(net)
        assert TROUBLE.seen.count(0) == TROUBLE.seen.count(number) == 1


def test_inputs_made_in_inference_mode_are_put_back_where_their_size_is_new():
    net = Net()
    x = torch.linspace(-1, 1, 128).reshape(4, 32)
    TROUBLE.inside = lambda block, x: x.add_(1)
    expected, other = run(net, torch.inference_mode), run(net, torch.inference_mode, x)
    with auto(net) as session:
        for _ in range(20):
            assert torch.equal(run(net, torch.inference_mode), expected)
        TROUBLE.at(resident(session)[1])
        assert torch.equal(run(net, torch.inference_mode, x), other)
        assert TROUBLE.seen.count(0) == 2


def test_training_is_not_run_again():
    net = Net()
    net.register_parameter("scale", nn.Parameter(torch.ones(32)))

    def train():
        torch.manual_seed(7)
        net.scale.grad = None
        net(X * net.scale).sum().backward()
        return net.scale.grad.clone()

    expected = train()
    with auto(net) as session:
        for _ in range(3):
            assert torch.equal(train(), expected)
        held = inside(session).held_bytes
        TROUBLE.at(resident(session)[1])
        with pytest.raises(torch.OutOfMemoryError) as failed:
            train()
        del failed
        assert TROUBLE.seen.count(0) == 1 and inside(session).held_bytes == held
        assert torch.equal(net.scale.detach(), torch.ones(32))
        gc.collect()  # the failed step's graph, which would have wanted today's units
        assert torch.equal(train(), expected)
        assert inside(session).held_bytes < held, "smaller before the next step"


def test_a_forward_whose_backward_never_runs_leaves_nothing_behind():
    """ReLU keeps its own result: with its history that would be a cycle through autograd, which nobody collects."""
    net = Net()
    net.register_parameter("scale", nn.Parameter(torch.ones(32)))
    with auto(net) as session:
        train = net(X * net.scale).sum()
        train.backward()
        del train
        before = sum(type(one) is torch.Tensor and one.grad_fn is not None for one in gc.get_objects())
        for _ in range(3):
            net(X * net.scale)
        after = sum(type(one) is torch.Tensor and one.grad_fn is not None for one in gc.get_objects())
        assert after == before
        assert not inside(session).streamer.in_use(Use.GRAPH)


def test_while_a_graph_wants_the_present_layout_the_error_is_raised():
    net = Net()
    net.register_parameter("scale", nn.Parameter(torch.ones(32)))
    expected = run(net)
    with auto(net) as session:
        for _ in range(2):
            run(net)
        loss = net(X * net.scale).sum()  # its backward is still to come: no new layout
        arrangement = inside(session).arrangement
        TROUBLE.at(resident(session)[-1])
        with pytest.raises(torch.OutOfMemoryError) as failed:
            run(net)
        del failed
        assert inside(session).arrangement is arrangement
        loss.backward()
        gradient, net.scale.grad = net.scale.grad, None
        net(X * net.scale).sum().backward()
        assert torch.equal(gradient, net.scale.grad)
        assert torch.equal(run(net), expected)
        assert inside(session).arrangement is not arrangement


def test_a_front_that_is_undone_before_the_one_outside_it_leaves_nothing():
    module, inner, outer = nn.Linear(2, 2), Wrapped(), Wrapped()
    for wrapped in (inner, outer):
        wrapped.forward(module, lambda below: lambda *args: below(*args))
    inner.undo()
    module(torch.zeros(1, 2))
    outer.undo()
    assert "forward" not in vars(module)


@pytest.mark.parametrize("share", [None, 0.8], ids=["auto", "bytes"])
def test_nothing_stands_in_front_of_resident_units(share):
    net = Net()
    if share is None:
        session = auto(net)
    else:
        vram = int(share * size(net))
        session = carom.stream(net, device=carom.SimulatedDevice(), vram=vram, granularity="block")
    with session:
        assert resident(session)
        run(net)  # in the first pass, resident units are wrapped to learn the order
        wrapped = [block.number for block in net.blocks if "forward" in vars(block)]
        assert wrapped == streamed(session)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("seed", range(4))
def test_memory_that_another_program_takes_within_a_pass_ends_no_inference(mode, seed):
    """125 times for each seed and mode, at any unit of a pass: 1000 in all."""
    rng, net = random.Random(seed), Net(depth=4)
    expected = run(net)
    memory = 2 * size(net)
    device = carom.SimulatedDevice(seed=seed, timing="random", memory_bytes=memory)
    with carom.stream(net, device=device, vram="auto", granularity="block") as session:
        engine = inside(session).engine

        def takes(block, x):
            if block.number == TROUBLE.block:
                engine.ledger.others = most
            engine._need(1024)  # for what it computes

        for _ in range(125):
            TROUBLE.inside, engine.ledger.others = lambda block, x: None, 0
            for _ in range(rng.randrange(1, 14)):
                run(net, mode)
            most = rng.randrange(memory // 8, int(0.7 * memory))
            TROUBLE.at(rng.randrange(4), times=0)
            TROUBLE.inside = takes
            for _ in range(2):
                assert torch.equal(run(net, mode), expected)
        assert engine._ooms >= 3


class Activation:
    """What the failed run's frame holds."""


def test_nothing_is_kept_of_the_failed_run_when_memory_is_given_back(monkeypatch):
    net = Net()
    kept, found = [], []

    def fail(block, x):
        if block.number == TROUBLE.block and TROUBLE.left:
            TROUBLE.left -= 1
            activation = Activation()
            kept.append(weakref.ref(activation))
            raise torch.OutOfMemoryError("injected")

    with auto(net) as session:
        run(net)
        trim = inside(session).engine.trim
        monkeypatch.setattr(
            inside(session).engine, "trim", lambda: (found.append([one() for one in kept]), trim())
        )
        TROUBLE.at(resident(session)[-1])
        TROUBLE.inside = fail
        run(net)
    assert found[0] == [None]
