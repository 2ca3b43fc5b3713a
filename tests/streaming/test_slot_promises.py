"""What a slot promises beyond one run: bytes that are kept, brought in time, brought once; to every thread."""

from __future__ import annotations

import functools
import threading

import carom
import pytest
import torch
from carom.core.device.simulated import SimulatedEngine
from tests_inside import inside
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.timeout(60)
WIDTH = 32
X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.b(F.gelu(self.a(x)))


class Model(nn.Module):
    def __init__(self, count: int = 6, block: type[nn.Module] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(block() for _ in range(count))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def least(model: nn.Module, **settings) -> int:
    with pytest.raises(carom.BudgetError) as refused:
        carom.stream(model, device=carom.SimulatedDevice(), vram=0, granularity="block", **settings)
    return refused.value.least_bytes


def stream(model: nn.Module, slots: int = 1, timing: str = "late", device=None, **settings):
    device = device or carom.SimulatedDevice(timing=timing)
    least_bytes = least(model, **{key: value for key, value in settings.items() if key == "training"})
    return carom.stream(model, device=device, vram=slots * least_bytes, granularity="block", **settings)


def infer(model: nn.Module, x=X):
    with torch.no_grad():
        return model(x)


def sgd(model: nn.Module, steps: int) -> None:
    # (torch.optim imports the compiler, which takes seconds.)
    for _ in range(steps):
        model(X).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.1 * parameter.grad)
                parameter.grad = None


def held(module: nn.Module) -> tuple[threading.Event, threading.Event]:
    """Forwards of the block ``module`` say that they are inside, and wait until they may go on."""
    inside, go_on = threading.Event(), threading.Event()

    def stop(*_):
        inside.set()
        assert go_on.wait(20)

    module.a.register_forward_pre_hook(stop)
    return inside, go_on


def threads(*functions) -> tuple[list[threading.Thread], list[BaseException]]:
    errors: list[BaseException] = []

    def guarded(function):
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - raised by `ends`
            errors.append(error)

    started = [threading.Thread(target=guarded, args=(one,), daemon=True) for one in functions]
    for thread in started:
        thread.start()
    return started, errors


def ends(started: list[threading.Thread], errors: list[BaseException]) -> None:
    for thread in started:
        thread.join(20)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in started), "a thread hangs"


# -- in time


def told(function, notice):
    def call(*args, **kwargs):
        notice()
        return function(*args, **kwargs)

    return call


@pytest.mark.parametrize("training", [False, True], ids=["inference", "full fine-tuning"])
def test_weights_are_on_their_way_before_their_block_begins(training, monkeypatch):
    model, copies, late = Model(), [0], []
    monkeypatch.setattr(SimulatedEngine, "copy_in", told(SimulatedEngine.copy_in, lambda: copies.append(1)))
    for block in model.blocks:
        # A block's own hooks come before its unit is entered, those of its parts after.
        block.register_forward_pre_hook(lambda *_: copies.clear())
        block.a.register_forward_pre_hook(lambda *_: late.append(bool(copies)))
    with stream(model, 2, training="stream" if training else None):
        for step in range(6):
            late.clear()
            sgd(model, 1) if training else infer(model)
            # After an optimizer's step the first one has to come anew.
            assert step < 2 or sum(late) <= training, f"step {step}: {sum(late)} of {len(late)} come late"


def test_the_region_is_nobodys_any_more_when_the_first_copy_comes(monkeypatch):
    """What the allocator hands out may still be in use by streams that it was not told of."""
    calls: list[str] = []
    for name in ("allocate", "synchronize", "copy_in"):
        function = getattr(SimulatedEngine, name)
        monkeypatch.setattr(SimulatedEngine, name, told(function, functools.partial(calls.append, name)))
    with stream(Model(), 2) as session:
        infer(session.module)
    until = calls.index("copy_in")
    assert "synchronize" in calls[max(i for i in range(until) if calls[i] == "allocate") : until]


@pytest.mark.parametrize("timing", ["late", "early"])
def test_weights_written_between_passes_are_brought_anew(timing):
    model, twin = Model(4), Model(4)
    with stream(model, 3, timing):
        for _ in range(3):
            assert torch.equal(infer(model), infer(twin))
            with torch.no_grad():
                for weight in [*model.parameters(), *twin.parameters()]:
                    weight.mul_(0.9)


# -- kept


def test_a_state_dict_taken_inside_a_forward_stays_true_when_the_model_runs_on():
    model, twin, device = Model(), Model(), carom.SimulatedDevice()
    taken: list[dict] = []
    model.blocks[2].a.register_forward_hook(lambda *_: taken.append(model.state_dict()))
    with stream(model, device=device):
        for _ in range(3):
            infer(model)
        for state in taken:
            for name, tensor in twin.state_dict().items():
                assert torch.equal(state[name], tensor), name
                assert not device.holds(state[name]), f"{name} keeps a slot"
    assert len(taken) == 3


class Keeps(Block):
    """Keeps a view of its weight beyond its run."""

    kept: torch.Tensor | None = None

    def forward(self, x):
        self.kept = self.a.weight.detach()[:3]
        return super().forward(x)


def test_a_view_kept_beyond_its_run_keeps_its_bytes_while_others_run():
    model = Model(4)
    torch.manual_seed(1)
    model.blocks[0] = Keeps()
    with stream(model, 3):
        want = model.blocks[0].a.weight.detach()[:3].clone()
        infer(model)
        kept, model.blocks[0].kept = model.blocks[0].kept, None
        for _ in range(3):
            for block in model.blocks[1:]:
                infer(block)
            assert torch.equal(kept, want)
        del kept
        infer(model)


def test_a_view_kept_beyond_a_backward_of_all_weights_keeps_its_bytes():
    model = Model(5)
    model.blocks[2] = Keeps()
    with stream(model, 3, training="stream"):
        want = model.blocks[2].a.weight.detach()[:3].clone()
        for _ in range(3):
            model(X).square().mean().backward()
            assert torch.equal(model.blocks[2].kept, want)
            model.blocks[2].kept = None


class UsesKept(Block):
    """Reads the view that another block kept, lets it go, and calls a third one."""

    others: tuple = ()  # no modules of its own

    def forward(self, x):
        keeps, calls = self.others
        x = super().forward(x) + keeps.kept.sum()
        keeps.kept = None
        return calls(x)


class KeptForLater(Model):
    def __init__(self) -> None:
        super().__init__(3)
        self.blocks[0], self.blocks[1] = Keeps(), UsesKept()
        self.blocks[1].others = self.blocks[0], self.blocks[2]

    def forward(self, x):
        return self.blocks[1](self.blocks[0](x))


def test_what_reads_a_kept_view_is_over_before_its_slot_is_another_units():
    model, twin = KeptForLater(), KeptForLater()
    twin.load_state_dict(model.state_dict())
    with stream(model, 2):
        for _ in range(4):
            assert torch.equal(infer(model), infer(twin))


class Again(Block):
    """Calls itself, after somebody said that its weights changed."""

    changed = staticmethod(lambda: None)

    def forward(self, x, again: bool = True):
        y = self.a(x)
        if again:
            self.changed()
            y = self(y, False)
        return x + self.b(y)


@pytest.mark.parametrize("timing", ["late", "early"])
def test_weights_refreshed_while_their_unit_runs_leave_the_run_its_slot(timing):
    model, twin = Model(4, Again), Model(4, Again)
    want = infer(twin)
    with stream(model, 3, timing) as session:
        for block in model.blocks:
            block.changed = session.refresh
        for _ in range(3):
            assert torch.equal(infer(model), want)


@pytest.mark.parametrize("replaces", [False, True], ids=["in place", "data replaced"])
def test_a_value_written_in_a_forward_is_used_by_the_next_one(replaces):
    class Writes(Block):
        def forward(self, x):
            with torch.no_grad():
                if replaces:
                    self.a.weight.data = self.a.weight.data * 0.5
                else:
                    self.a.weight.mul_(0.5)
            return super().forward(x)

    model, twin = Model(4, Writes), Model(4, Writes)
    with stream(model, 2):
        for _ in range(3):
            assert torch.equal(infer(model), infer(twin))
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)


class Products(Model):
    """Autograd nodes that save weights of two units each."""

    def forward(self, x):
        for one, other in zip(self.blocks, self.blocks[1:], strict=False):
            x = torch.tanh(x @ (one.a.weight @ other.b.weight))
        return x


def test_a_slot_stays_while_an_autograd_node_reads_it_beside_another():
    model, twin = Products(), Products()
    with stream(model, 2, training="stream"):
        for _ in range(3):
            for one in (model, twin):
                one(X).sum().backward()
            for a, b in zip(model.parameters(), twin.parameters(), strict=True):
                assert (a.grad is None) == (b.grad is None)
                assert a.grad is None or torch.equal(a.grad, b.grad)


def test_hooks_of_gradients_see_the_hosts_weights_and_passes_the_slots():
    def steps(parameter):
        parameter.data.sub_(0.1 * parameter.grad)

    model, twin = Products(), Products()
    for one in (model, twin):
        for parameter in one.parameters():
            parameter.register_post_accumulate_grad_hook(steps)
    with stream(model, 2, training="stream"):
        for _ in range(3):
            for one in (model, twin):
                one.zero_grad()
                one(X).sum().backward()
            assert torch.equal(infer(model), infer(twin))
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)


# -- to every thread


def test_a_unit_that_two_threads_wait_for_is_brought_once_for_both():
    model = Model(4)
    first, second, wanted = model.blocks[0], model.blocks[1], model.blocks[2]
    with stream(model, 2) as session:
        gates = [held(first), held(second)]
        holders, holder_errors = threads(lambda: infer(first), lambda: infer(second))
        for inside, _ in gates:
            assert inside.wait(20)
        together = threading.Barrier(2, timeout=8)

        def meet(*_):
            together.wait()

        wanted.a.register_forward_pre_hook(meet)  # both are inside at once
        waiting, errors = threads(lambda: infer(wanted), lambda: infer(wanted))
        waiting[0].join(0.3)
        gates[1][1].set()
        ends(waiting, errors)
        gates[0][1].set()
        ends(holders, holder_errors)
        assert session.report() is not None


def test_a_thread_waits_for_views_that_another_threads_pass_keeps_for_a_moment():
    class KeepsWeight(Block):
        def forward(self, x):
            kept.append(self.a.weight)
            return super().forward(x)

    kept: list[torch.Tensor] = []
    model = Model(4)
    torch.manual_seed(0)
    model.blocks[0], model.blocks[1] = KeepsWeight(), KeepsWeight()

    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = model.blocks

        def forward(self, x):
            x = self.blocks[1](self.blocks[0](x))
            inside.set()
            assert go_on.wait(20)
            kept.clear()
            return x

    inside, go_on = threading.Event(), threading.Event()
    root = Root()
    with stream(root, 2):
        others, other_errors = threads(lambda: infer(root))
        assert inside.wait(20)
        started, errors = threads(lambda: infer(model.blocks[2]))
        started[0].join(0.3)
        go_on.set()
        ends(started, errors)
        ends(others, other_errors)


def test_a_thread_waits_for_views_that_another_threads_backward_keeps_for_a_moment():
    model = Model(3)
    model.blocks[0] = Keeps()
    inside, go_on = threading.Event(), threading.Event()

    def hook(_):
        infer(model.blocks[0])
        inside.set()
        assert go_on.wait(20)
        model.blocks[0].kept = None

    with stream(model.requires_grad_(False)):
        x = X.clone().requires_grad_()
        y = model.blocks[1](x)
        x.register_hook(hook)
        others, other_errors = threads(lambda: y.sum().backward())
        assert inside.wait(20)
        started, errors = threads(lambda: infer(model.blocks[2]))
        started[0].join(0.3)
        go_on.set()
        ends(started, errors)
        ends(others, other_errors)


def test_a_thread_that_waits_for_a_slot_goes_on_as_soon_as_one_is_released():
    model = Model(3)
    with stream(model):
        inside, go_on = held(model.blocks[0])
        others, other_errors = threads(lambda: infer(model.blocks[0]))
        assert inside.wait(20)
        started, errors = threads(lambda: infer(model.blocks[1]))
        started[0].join(0.3)
        assert started[0].is_alive(), "there is no room for another unit"
        go_on.set()
        started[0].join(5)
        assert not started[0].is_alive(), "it was not told of the release"
        ends(started + others, errors + other_errors)


def test_a_thread_that_waits_for_a_slot_is_told_of_the_close():
    model = Model(3)
    session = stream(model)
    inside, go_on = held(model.blocks[0])
    others, _ = threads(lambda: infer(model.blocks[0]))
    assert inside.wait(20)
    started, errors = threads(lambda: infer(model.blocks[1]))
    started[0].join(0.3)
    session.close()
    started[0].join(5)
    assert not started[0].is_alive(), "it was not told of the close"
    assert [type(error) for error in errors] == [carom.CaromError]
    go_on.set()
    others[0].join(20)


class Bounces(Model):
    """Uses a block's weight in an operator of its own as well."""

    def forward(self, x):
        return super().forward(F.linear(x, self.blocks[3].a.weight))


@pytest.mark.parametrize("kind", [Model, Bounces])
def test_slots_that_a_thread_used_are_not_its_own_any_more(kind):
    """A thread waits where another holds all slots, however many runs and operators of its own are over."""
    model = kind(4)
    with stream(model):
        infer(model), infer(model)
        inside, go_on = held(model.blocks[0])
        started, errors = threads(lambda: infer(model.blocks[0]))
        assert inside.wait(20)
        threading.Timer(0.2, go_on.set).start()
        infer(model.blocks[1])  # waits, instead of raising that there is no room
        ends(started, errors)


def test_weights_that_are_about_to_be_stepped_are_not_brought_ahead():
    """Between a backward and the next forward an optimizer writes to them: what was brought would cross twice."""
    model = Model()
    with stream(model, slots=3, training="stream") as session:
        sgd(model, 4)
        model(X).square().mean().backward()
        before = inside(session).engine.copies
        infer(model.blocks[2])  # looks ahead when it ends
        assert inside(session).engine.copies == before + 1
