"""A unit's forward that runs out of memory in inference: others give way, it runs again, and nothing is computed otherwise."""

from __future__ import annotations

import copy
import gc
import logging
import weakref

import carom
import pytest
import torch
from carom.core import rerun
from carom.core.hooks import Wrapped
from carom.core.sizes import MIB
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
    monkeypatch.setattr("carom.core.on_device.SMALL_UNIT", 1)
    TROUBLE.__init__()


class Block(nn.Module):
    def __init__(self, number, width):
        super().__init__()
        self.number = number
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.3)
        self.register_buffer("seen", torch.zeros(1))

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


def auto(net, share=0.8, granularity="block", least=3):
    """Its first guess of a budget is all it gets: what it holds falls only where a test makes it."""
    device = carom.SimulatedDevice(timing="random", memory_bytes=64 * MIB)
    session = carom.stream(net, device=device, vram="auto", granularity=granularity)
    session._governor.read = lambda *given, **named: None
    session._vram = int(share * size(net))
    session._again()
    assert session._reruns is not None and len(session._reruns._residents) >= least
    return session


def resident(session):
    """Numbers of the blocks that stay on the device."""
    return sorted(r.unit.modules[0].number for r in session._reruns._residents)


def streamed(session):
    return sorted(unit.unit.modules[0].number for unit in session._placement.streamed)


STEADY = pytest.mark.parametrize("passes", [0, 1, 20], ids=["first", "second", "steady"])


@STEADY
@pytest.mark.parametrize("kind", ["resident", "streamed"])
@pytest.mark.parametrize("drops", [False, True])
def test_a_unit_that_ran_out_of_memory_runs_again_and_the_result_is_the_same(kind, drops, passes):
    net = Net().train(drops)
    expected = run(net)
    with auto(net) as session:
        for _ in range(passes):
            assert torch.equal(run(net), expected)
        block = {"resident": resident, "streamed": streamed}[kind](session)[-1]
        held, again = session._held_bytes(), session._reruns
        TROUBLE.at(block)
        assert torch.equal(run(net), expected), "dropout's numbers too"
        assert TROUBLE.seen.count(block) == 2 and len(TROUBLE.seen) == 9, "no other ran again"
        assert again.again == 1 and session._reruns is not again
        assert session._held_bytes() < held, "and it holds less from now on"
        now = session._held_bytes()
        for _ in range(3):
            assert torch.equal(run(net), expected)
        assert session._held_bytes() == now
        assert session._engine.allocated == now - STATE
    assert torch.equal(run(net), expected)
    assert all(type(p) is nn.Parameter for p in net.parameters())
    assert all("forward" not in vars(module) for module in net.modules())


@STEADY
def test_what_runs_between_the_parts_of_a_block_runs_again_with_its_block(passes):
    net = Net()
    expected = run(net)
    with auto(net, granularity="layer", least=1) as session:
        for _ in range(passes):
            assert torch.equal(run(net), expected)
        reruns = session._reruns
        TROUBLE.at(5)
        assert torch.equal(run(net), expected)
        assert TROUBLE.seen.count(5) == 2 and len(TROUBLE.seen) == 9 and reruns.again == 1
        assert torch.equal(run(net), expected)
    assert all("forward" not in vars(module) for module in net.modules())


def test_what_is_needed_last_gives_way_first_and_what_is_in_use_stays():
    net = Net()
    with auto(net) as session:
        for _ in range(3):
            run(net)
        there, residents = resident(session), session._reruns._residents
        failing = there[len(there) // 2]
        left = []
        for one in residents:
            leave = one.leave

            def noted(one=one, leave=leave):
                freed = leave()
                if freed:
                    left.append(one.unit.modules[0].number)
                return freed

            one.leave = noted
        TROUBLE.at(failing, times=3)
        run(net)
        before = [number for number in there if number < failing]
        after = [number for number in there if number > failing]
        order = before[::-1] + after[::-1]
        first = left[: len(set(left))]
        assert first == order[: len(first)] and len(first) >= 2
        assert failing not in left


def test_a_message_that_says_how_much_was_wanted_is_heeded():
    net = Net()
    with auto(net) as session:
        run(net)
        unit = session._reruns._residents[0].unit.nbytes
        for wanted, gone in ((1, 1), (2 * unit - 1, 2), (2 * unit + 1, 3)):
            reruns = session._reruns
            with session._streamer.lock:
                assert reruns._evict(wanted) == gone * unit
            session._again()
        assert (
            rerun._asked(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0"))
            == 3 << 29
        )
        assert rerun._asked(torch.OutOfMemoryError("something else")) == 0


def test_it_is_tried_a_few_times_and_then_the_whole_forward_is():
    net = Net()
    expected = run(net)
    with auto(net) as session:
        for _ in range(2):
            run(net)
        block = streamed(session)[-1]
        TROUBLE.at(block, times=rerun.TRIES + 1)
        assert torch.equal(run(net), expected), "these are among the passes that may run again as a whole"
        assert TROUBLE.seen.count(block) == rerun.TRIES + 2
        assert TROUBLE.seen.count(0) == 2


def test_where_nothing_helps_the_error_is_raised_and_the_model_is_whole():
    net = Net()
    expected = run(net)
    with auto(net) as session:
        for _ in range(20):
            run(net)
        held = session._held_bytes()
        TROUBLE.at(2, times=1000)
        with pytest.raises(torch.OutOfMemoryError) as failed:
            run(net)
        assert any("carom held" in note for note in getattr(failed.value, "__notes__", ["carom held"]))
        assert TROUBLE.seen.count(2) <= rerun.TRIES + 1
        del failed
        TROUBLE.left = 0
        for _ in range(3):
            assert torch.equal(run(net), expected)
        assert session._held_bytes() < held
        assert session._engine.allocated == session._held_bytes() - STATE
    assert torch.equal(run(net), expected)


@STEADY
@pytest.mark.parametrize(
    "change",
    [
        lambda block, x: x.add_(1),
        lambda block, x: block.seen.add_(1),
        lambda block, x: block.up.bias.add_(1),
        lambda block, x: setattr(block, "count", getattr(block, "count", 0) + 1),
        lambda block, x: setattr(block, "seen", block.seen + 1),
    ],
    ids=["input", "buffer", "weight", "attribute", "replaced"],
)
def test_a_unit_that_changed_something_is_not_run_again(change, passes):
    """Also one that did so before it failed for the first time."""
    net = Net()
    block = net.blocks[5]
    with auto(net) as session:
        for _ in range(passes):
            run(net)
        if block.number not in resident(session):
            pytest.skip("it has to be one that stays")
        TROUBLE.at(5)
        TROUBLE.inside = lambda at, x: change(at, x) if at is block else None
        if passes == 20:
            with pytest.raises(torch.OutOfMemoryError):
                run(net)
            assert TROUBLE.seen.count(5) == 1
            return
        reruns = session._reruns
        try:
            run(net)
        except torch.OutOfMemoryError:
            assert TROUBLE.seen.count(5) == 1
        else:
            assert TROUBLE.seen.count(0) == 2, "the whole forward did: its own input was as it was"
        assert reruns.again == 0


def test_a_unit_that_draws_for_the_first_time_when_it_fails_is_not_run_again():
    """Where its numbers came from in the generator nobody noted."""
    net = Net()
    with auto(net) as session:
        for _ in range(20):
            run(net.eval())
        TROUBLE.at(resident(session)[1])
        TROUBLE.inside = lambda block, x: torch.rand(1) if TROUBLE.left else None
        with pytest.raises(torch.OutOfMemoryError):
            run(net)
        assert TROUBLE.seen.count(TROUBLE.block) == 1


def test_inputs_made_in_inference_mode_are_put_back_where_their_size_is_new():
    net = Net()
    x = torch.linspace(-1, 1, 128).reshape(4, 32)
    TROUBLE.inside = lambda block, x: x.add_(1)
    expected, other = run(net, torch.inference_mode), run(net, torch.inference_mode, x)
    with auto(net) as session:
        for _ in range(20):
            assert torch.equal(run(net, torch.inference_mode), expected)
        reruns = session._reruns
        TROUBLE.at(resident(session)[1])
        assert torch.equal(run(net, torch.inference_mode, x), other)
        assert reruns.again == 1 and len(TROUBLE.seen) == 9
        TROUBLE.at(resident(session)[1])
        with pytest.raises(torch.OutOfMemoryError):
            for _ in range(20):
                TROUBLE.left = 1 if _ == 19 else 0
                run(net, torch.inference_mode, x)


def test_units_that_are_needed_again_in_the_same_pass_come_back_for_as_long_as_they_run():
    net = Net()
    expected = run(net)
    with auto(net) as session:
        for _ in range(3):
            run(net)
        reruns = session._reruns
        first = resident(session)[0]
        TROUBLE.at(first, times=3)  # all that gives way is needed after it
        assert torch.equal(run(net), expected)
        assert reruns.again == 3
        assert session._engine.allocated == session._held_bytes() - STATE


def test_a_weight_that_is_away_is_brought_by_an_operator_outside_its_own_forward():
    net = Net()
    with auto(net) as session:
        run(net)
        reruns, weight = session._reruns, net.blocks[resident(session)[0]].up.weight
        expected = weight.detach().clone()
        with session._streamer.lock:
            reruns._evict(size(net))
        assert all(one.away for one in reruns._residents)
        assert weight.device == session._engine.device and isinstance(weight, nn.Parameter)
        held, known = session._engine.allocated, session.report().resident_bytes
        assert torch.equal(weight * 1.0, expected)
        came = session._engine.allocated - held
        assert came > 0 and session.report().resident_bytes == known + came and type(weight) is nn.Parameter
        assert torch.equal(net.state_dict()["blocks.0.up.weight"], net.blocks[0].up.weight)
    assert torch.equal(weight, expected) and session._engine.allocated == 0


class Options:
    """As hosts hand them on to every block."""


class WithOptions(Net):
    def forward(self, x):
        for block in self.blocks:
            x = block(x, Options())
        return x


class Takes(Block):
    def forward(self, x, options):
        return super().forward(x)


def test_a_unit_that_is_given_objects_is_not_run_again_and_costs_no_look_at_them(monkeypatch):
    net = WithOptions()
    net.blocks = nn.ModuleList(Takes(number, 32) for number in range(8)).requires_grad_(False)
    with auto(net) as session:
        for _ in range(20):
            run(net)
        looked = []
        monkeypatch.setattr(rerun, "_versions", lambda *given: looked.append(given))
        run(net)
        assert not looked
        TROUBLE.at(resident(session)[1])
        with pytest.raises(torch.OutOfMemoryError):
            run(net)
        assert TROUBLE.seen.count(TROUBLE.block) == 1


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
        held, reruns = session._held_bytes(), session._reruns
        TROUBLE.at(resident(session)[1])
        with pytest.raises(torch.OutOfMemoryError) as failed:
            train()
        del failed
        assert reruns.again == 0 and session._held_bytes() == held
        assert torch.equal(net.scale.detach(), torch.ones(32))
        gc.collect()  # the failed step's graph, which would have wanted today's units
        assert torch.equal(train(), expected)
        assert session._held_bytes() < held, "smaller before the next step"


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
        assert session._streamer.unreferenced


def test_after_a_graph_that_is_still_wanted_what_gave_way_comes_as_it_is_needed():
    net = Net()
    net.register_parameter("scale", nn.Parameter(torch.ones(32)))
    expected = run(net)
    with auto(net) as session:
        for _ in range(2):
            run(net)
        loss = net(X * net.scale).sum()  # its backward is still to come: no new layout
        placement = session._placement
        TROUBLE.at(resident(session)[-1])
        assert torch.equal(run(net), expected)
        assert session._placement is placement and any(one.away for one in session._reruns._residents)
        loss.backward()
        gradient, net.scale.grad = net.scale.grad, None
        net(X * net.scale).sum().backward()
        assert torch.equal(gradient, net.scale.grad)
        assert torch.equal(run(net), expected)
        assert session._placement is not placement


def test_a_copy_of_the_model_has_nothing_of_the_session_in_front():
    net = Net()
    expected = run(net)
    with auto(net) as session:
        run(net)
        other = copy.deepcopy(net)
        blocks = [net.blocks[number] for number in resident(session)]
        assert all("forward" in vars(block) for block in blocks)
        seen = session._reruns._count()
        assert torch.equal(run(other), expected)
        assert session._reruns._count() == seen + 1, "no unit of the session ran"


def test_a_front_that_is_undone_before_the_one_outside_it_leaves_nothing():
    module, inner, outer = nn.Linear(2, 2), Wrapped(), Wrapped()
    for wrapped in (inner, outer):
        wrapped.forward(module, lambda below: lambda *args: below(*args))
    inner.undo()
    module(torch.zeros(1, 2))
    outer.undo()
    assert "forward" not in vars(module)


def test_a_budget_in_bytes_puts_nothing_in_front_of_resident_units():
    net = Net()
    with carom.stream(
        net, device=carom.SimulatedDevice(), vram=int(0.8 * size(net)), granularity="block"
    ) as session:
        assert session._reruns is None
        wrapped = [block.number for block in net.blocks if "forward" in vars(block)]
        assert wrapped == streamed(session)


def test_a_model_that_is_compiled_later_loses_no_graph_to_resident_units():
    net = Net()
    with auto(net) as session:
        run(net)
        stay = resident(session)
        assert all("forward" in vars(net.blocks[number]) for number in stay)
        session._begin(True)
        session._streamer.runs.root_ends(False)
        assert not any("forward" in vars(net.blocks[number]) for number in stay)
        run(net)


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
        trim = session._engine.trim
        monkeypatch.setattr(session._engine, "trim", lambda: (found.append([one() for one in kept]), trim()))
        TROUBLE.at(resident(session)[-1])
        TROUBLE.inside = fail
        run(net)
    assert found[0] == [None]


def test_it_is_said_in_the_log(caplog):
    net = Net()
    with auto(net) as session, caplog.at_level(logging.INFO, "carom"):
        run(net)
        TROUBLE.at(resident(session)[-1])
        run(net)
    assert "gave way, it runs again" in caplog.text
