"""Several threads and one model: results as without Carom, nothing lost, nothing left in use."""

from __future__ import annotations

import contextlib
import threading
import time

import carom
import pytest
import torch
from carom.core.device.slot import User
from carom.core.session.layout_manager import LayoutManager
from carom.core.streaming.forwards import Forwards
from safetensors.torch import save_file
from tests_inside import inside
from tests_pairwise import pairwise
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.timeout(60)
WIDTH = 32
X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n, self.a, self.b = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.b(F.gelu(self.a(self.n(x))))


class Model(nn.Module):
    """``kind``: None, or use_reentrant of the checkpoint around each block."""

    def __init__(self, kind: bool | None = None, across: bool = False) -> None:
        super().__init__()
        self.e, self.h = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kind, self.across = kind, across
        self.blocks = nn.ModuleList(Block() for _ in range(8))

    def forward(self, x):
        x = self.e(x)
        for block in self.blocks:
            x = block(x) if self.kind is None else checkpoint(block, x, use_reentrant=self.kind)
        if self.across:  # a unit's weight used from outside the unit
            x = F.linear(x, self.blocks[0].b.weight[:, :WIDTH])
        return self.h(x)


KINDS: dict[str, bool | None] = {"plain": None, "non-reentrant": False, "reentrant": True}
TRAINING = {"adapters": False, "full": True}
training = pytest.mark.parametrize("full", TRAINING.values(), ids=TRAINING)
DEVICES = {
    "cpu": "cpu",
    "late": carom.SimulatedDevice(timing="late"),
    "random": carom.SimulatedDevice(timing="random"),
}


@pytest.fixture(params=DEVICES)
def device(request):
    return DEVICES[request.param]


def pair(trainable: bool = False, **settings):
    """A model and its twin that is never streamed."""
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(Model(**settings).requires_grad_(trainable))
    return made


def part(model: nn.Module, fraction: float) -> int:
    return int(fraction * sum(p.numel() * p.element_size() for p in model.parameters()))


def step(model: nn.Module, x=X, parameters=None) -> list:
    """Output and gradients. ``parameters``: taken beforehand, while no other thread is inside a unit."""
    parameters = list(model.parameters()) if parameters is None else parameters
    for parameter in parameters:
        parameter.grad = None
    x = x.clone().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *[p.grad for p in parameters]]


def infer(model: nn.Module, x=X):
    with torch.no_grad():
        return model(x)


def assert_equal(got: list, want: list) -> None:
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        assert (a is None) == (b is None), f"item {index}: {'missing' if a is None else 'unexpected'}"
        assert a is None or torch.equal(a, b), f"item {index} differs"


def assert_idle(live) -> None:
    found = inside(live)
    found.end_finished_uses()
    assert not [slot for slot in found.slots if slot.users], "slots still in use"
    assert not found.units_in_modules, "slot views still stand"
    assert not found.computing
    assert inside(live).held_bytes <= inside(live).capacity


def together(*functions, seconds: float = 20) -> None:
    """Run every function in a thread of its own; raise the first error of any."""
    errors: list[BaseException] = []

    def guarded(function) -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - handed to the caller below
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(one,), daemon=True) for one in functions]
    for thread in threads:
        thread.start()
    limit = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, limit - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    if errors:
        raise errors[0]


class Inside:
    """Stops another thread than the test's inside a module's forward until told to go on."""

    def __init__(self, module: nn.Module) -> None:
        self.entered, self.go, self._mine = threading.Event(), threading.Event(), threading.get_ident()
        module.register_forward_pre_hook(self._hook)

    def _hook(self, *_):
        if threading.get_ident() != self._mine:
            self.entered.set()
            assert self.go.wait(20)

    @contextlib.contextmanager
    def held(self, function):
        thread = threading.Thread(target=function, daemon=True)
        thread.start()
        assert self.entered.wait(20)
        try:
            yield
        finally:
            self.go.set()
            thread.join(20)
            assert not thread.is_alive()


def test_threads_that_infer_at_once_get_their_own_results(device):
    model, twin = pair()
    inputs = [X, 2 * X, 3 * X]
    wanted = [infer(twin, x) for x in inputs]
    with carom.stream(model, device=device, vram=part(model, 0.7)) as live:

        def worker(x, want):
            def run():
                for _ in range(10):
                    assert torch.equal(infer(model, x), want)

            return run

        arrangement = inside(live).arrangement
        together(*(worker(x, want) for x, want in zip(inputs, wanted, strict=True)))
        assert inside(live).arrangement is arrangement, "laid out anew for nothing"
        assert_idle(live)


@pairwise(device=DEVICES, kind=KINDS, full=TRAINING)
def test_training_in_one_thread_with_inference_in_another(device, kind, full):
    model, twin = pair(kind=kind, trainable=full)
    want, out = step(twin), infer(twin)
    mode = "stream" if full else None
    with carom.stream(model, device=device, vram=part(model, 0.7), training=mode) as live:
        parameters = list(model.parameters())

        def train():
            for _ in range(6):
                assert_equal(step(model, parameters=parameters), want)

        def sample():
            for _ in range(12):
                assert torch.equal(infer(model), out)

        together(train, sample)
        assert_idle(live)


@pytest.mark.parametrize("fails", [False, True], ids=["succeeds", "fails"])
def test_an_inference_elsewhere_during_a_backward_loses_no_gradient(device, fails):
    model, twin = pair(trainable=True)
    want = step(twin)

    def sample():
        with contextlib.suppress(RuntimeError):
            infer(model, torch.zeros(3, WIDTH + 1) if fails else X)

    def hook(module, inputs, output):
        if output.requires_grad:
            output.register_hook(lambda gradient: together(sample))

    model.blocks[3].register_forward_hook(hook)
    with carom.stream(model, device=device, vram=part(model, 0.7), training="stream") as live:
        for _ in range(2):
            assert_equal(step(model), want)
        assert_idle(live)


@pytest.mark.parametrize("fails", [False, True], ids=["succeeds", "fails"])
def test_an_inference_elsewhere_during_a_units_run_disturbs_nothing(device, fails):
    model, twin = pair()
    want = step(twin)

    def sample():
        with contextlib.suppress(RuntimeError):
            infer(model, torch.zeros(3, WIDTH + 1) if fails else X)

    mine = threading.get_ident()
    model.blocks[3].n.register_forward_pre_hook(
        lambda *_: together(sample) if threading.get_ident() == mine else None
    )
    with carom.stream(model, device=device, vram=part(model, 0.7)) as live:
        for _ in range(2):
            assert_equal(step(model), want)
        assert_idle(live)


@training
def test_training_through_a_unit_that_another_thread_runs_without_gradients(device, full):
    model, twin = pair(trainable=full)
    want = step(twin)
    inside = Inside(model.blocks[0].n)
    mode = "stream" if full else None
    with carom.stream(model, device=device, vram=part(model, 0.7), training=mode) as live:
        parameters = list(model.parameters())
        with inside.held(lambda: infer(model)):
            got = step(model, parameters=parameters)
        assert_equal(got, want)
        assert_idle(live)


@training
def test_a_weight_read_from_outside_while_another_thread_runs_its_unit(device, full):
    model, twin = pair(trainable=full, across=True)
    want = step(twin)
    inside = Inside(model.blocks[0].n)
    mode = "stream" if full else None
    with carom.stream(model, device=device, vram=part(model, 0.7), training=mode) as live:
        model.zero_grad()
        x = X.clone().requires_grad_()
        with inside.held(lambda: infer(model)):
            y = model(x)
        for _ in range(2):
            infer(model)  # whatever may be overwritten is overwritten now
        y.square().sum().backward()
        assert_equal([y.detach(), x.grad, *[p.grad for p in model.parameters()]], want)
        del y
        assert_idle(live)


def test_backward_in_another_thread_than_forward(device):
    model, twin = pair(trainable=True)
    want = step(twin)
    with carom.stream(model, device=device, vram=part(model, 0.6), training="stream") as live:
        for _ in range(2):
            model.zero_grad()
            x = X.clone().requires_grad_()
            y = model(x)
            together(y.square().sum().backward)
            assert_equal([y.detach(), x.grad, *[p.grad for p in model.parameters()]], want)
            del y
        assert_idle(live)


@pairwise(device=DEVICES, kind=KINDS)
def test_two_threads_that_train_on_inputs_of_their_own(device, kind):
    model, twin = pair(kind=kind)
    inputs = [X, 2 * X]
    wanted = [step(twin, x)[:2] for x in inputs]
    with carom.stream(model, device=device, vram=part(model, 0.8)) as live:

        def worker(x, want):
            def run():
                for _ in range(5):
                    mine = x.clone().requires_grad_()
                    y = model(mine)
                    y.square().sum().backward()
                    assert_equal([y.detach(), mine.grad], want)

            return run

        together(*(worker(x, want) for x, want in zip(inputs, wanted, strict=True)))
        assert_idle(live)


@pytest.mark.parametrize("other", ["drops", "takes"])
def test_a_view_that_another_thread_drops_or_takes_while_one_is_made_is_counted_right(device, other):
    model, _ = pair()
    with carom.stream(model, device=device, vram=part(model, 0.7)) as live:
        infer(model)
        inner = inside(live).streamer
        slot = inner.slot_at(inner.low)
        views = inner.run.slots.views(slot)
        elsewhere = [views.base.detach()] if other == "drops" else []

        class AnotherThread(TorchDispatchMode):
            """At work between the two halves of making a view, as autograd's kernels are: they hold no lock of Python's."""

            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                made = func(*args, **(kwargs or {}))
                if func is torch.ops.aten.as_strided.default:
                    if other == "drops":
                        elsewhere.clear()
                    else:
                        elsewhere.append(views.base.detach())
                return made

        with AnotherThread():
            views.view((torch.float32, (4, 4), (4, 1), 0))
        assert views.kept_elsewhere() == bool(elsewhere) == (other == "takes")
        elsewhere.clear()
        assert not views.kept_elsewhere()


def test_a_session_that_closes_while_a_thread_waits_for_a_slot_tells_it(device):
    model, twin = pair()
    want, errors = infer(twin), []

    def sample():
        with pytest.raises(carom.CaromError, match="closed") as caught:
            infer(model)
        errors.append(caught.value)

    with carom.stream(model, device=device, vram=part(model, 0.7)) as live:
        infer(model)
        inner = inside(live).streamer
        slots, user = [], User(threading.get_ident(), inner.engine.stream())
        named = {unit.name: unit for unit in inner.units}
        while unused := [slot for slot in inside(live).slots if not slot.users]:
            slots.append(inner.run.acquire(named[unused[0].unit], user))
        thread = threading.Thread(target=sample, daemon=True)
        thread.start()
        limit = time.monotonic() + 20
        while not inner.slot_waiters.asleep and time.monotonic() < limit:
            time.sleep(0.001)
        assert inner.slot_waiters.asleep
        live.close()
        for slot in slots:  # what that thread waited for
            inner.run.release(slot, (user,))
        thread.join(10)
        assert not thread.is_alive() and len(errors) == 1
    assert torch.equal(infer(model), want)


def test_a_session_that_closes_within_the_forward_of_a_unit_restores_its_weights(device):
    model, twin = pair()
    true, inside_block, taken, errors = (
        dict(model.named_parameters()),
        threading.Event(),
        threading.Event(),
        [],
    )

    def use_other(*_):  # waits for a slot while views of another slot stand in the block
        inside_block.set()
        assert taken.wait(20)
        model.get_submodule(last).a.weight.sum()

    def sample():
        with pytest.raises(carom.CaromError, match="closed") as caught:
            infer(model)
        errors.append(caught.value)

    with carom.stream(model, device=device, vram=part(model, 0.5), granularity="block") as live:
        infer(model)
        block, *_, last = [unit.name for unit in inside(live).streamed if unit.name.startswith("blocks")]
        hook = model.get_submodule(f"{block}.n").register_forward_hook(use_other)
        inner = inside(live).streamer
        thread = threading.Thread(target=sample, daemon=True)
        thread.start()
        weight = f"{block}.a.weight"
        assert inside_block.wait(20) and model.get_parameter(weight) is not true[weight]
        slots, user = [], User(threading.get_ident(), inner.engine.stream())
        named = {unit.name: unit for unit in inner.units}
        while unused := [slot for slot in inside(live).slots if not slot.users]:
            slots.append(inner.run.acquire(named[unused[0].unit], user))
        taken.set()
        limit = time.monotonic() + 20
        while not inner.slot_waiters.asleep and time.monotonic() < limit:
            time.sleep(0.001)
        assert inner.slot_waiters.asleep
        live.close()
        assert all(model.get_parameter(name) is parameter for name, parameter in true.items())
        for slot in slots:
            inner.run.release(slot, (user,))
        thread.join(10)
        assert not thread.is_alive() and len(errors) == 1
    hook.remove()
    assert all(model.get_parameter(name) is parameter for name, parameter in true.items())
    assert torch.equal(infer(model), infer(twin))


def test_a_state_dict_taken_while_another_thread_infers_has_true_values(device):
    model, twin = pair()
    true, over = twin.state_dict(), threading.Event()
    with carom.stream(model, device=device, vram=part(model, 0.7)) as live:

        def sample():
            try:
                for _ in range(15):
                    infer(model)
            finally:
                over.set()

        def save():
            while not over.is_set():
                state = model.state_dict()
                for name, tensor in true.items():
                    assert torch.equal(state[name], tensor), name

        together(sample, save)
        assert_idle(live)


def test_reports_and_refreshes_from_another_thread_disturb_nothing(device):
    model, twin = pair()
    want, over = infer(twin), threading.Event()
    with carom.stream(model, device=device, vram=part(model, 0.7)) as live:

        def sample():
            try:
                for _ in range(15):
                    assert torch.equal(infer(model), want)
            finally:
                over.set()

        def look():
            while not over.is_set():
                time.sleep(
                    0.001
                )  # a busy loop would keep the lock from the other thread, as Python's locks are unfair
                live.report()
                live.refresh()
                live.read("blocks.3.a.weight")

        together(sample, look)
        assert_idle(live)


@pytest.mark.parametrize("change", ["close", "set_budget", "park"])
def test_a_session_changed_during_another_threads_run_gives_right_results_or_a_clear_error(device, change):
    model, twin = pair()
    want = infer(twin)
    for delay in (0.0, 0.002, 0.01):
        live = carom.stream(model, device=device, vram=part(model, 0.7))

        def sample():
            for _ in range(10):
                with contextlib.suppress(carom.CaromError):
                    assert torch.equal(infer(model), want)

        def alter(live=live, delay=delay):
            time.sleep(delay)
            if change == "close":
                live.close()
            elif change == "park":
                live.park()
            else:
                live.set_budget(vram=part(model, 0.5))

        together(sample, alter)
        assert torch.equal(infer(model), want)
        live.close()
        assert torch.equal(infer(model), want)
        assert all(type(p) is nn.Parameter for p in model.parameters())
        assert inside(live).pinned_bytes == 0


def test_sessions_of_two_models_in_two_threads(device):
    first, twin = pair()
    second, _ = pair()
    want = step(twin)

    def worker(model):
        def run():
            for fraction in (0.7, 0.5):
                with carom.stream(model, device=device, vram=part(model, fraction)) as live:
                    for _ in range(3):
                        assert_equal(step(model), want)
                    assert_idle(live)

        return run

    together(worker(first), worker(second))


# -- a model that is parked, or laid out anew


@pairwise(
    device=DEVICES,
    fetched=["before", "meanwhile"],
    how=["unpark", "layout"],
    stored={"module": False, "file": True},
)
def test_a_call_waits_while_another_thread_brings_the_weights(
    tmp_path, monkeypatch, device, how, stored, fetched
):
    model, plain = pair()
    options = {"device": device, "vram": part(model, 0.5)}
    if stored:
        save_file(plain.state_dict(), tmp_path / "m.safetensors")
        model = Model().to("meta").requires_grad_(False)
        options |= {"weights": tmp_path / "m.safetensors", "ram": part(plain, 0.7)}
    expected, found, here, begun = plain(X), [], threading.Event(), []
    with torch.no_grad(), carom.stream(model, **options) as session:
        assert torch.equal(model(X), expected)
        if how == "unpark":
            session.park()
        attach, root_begins = LayoutManager._attach, Forwards.root_begins
        stale = model.forward

        def slowly(self, wanted):
            here.set()
            time.sleep(0.3)
            attach(self, wanted)

        def counted(self, part):
            begun.append(threading.get_ident())
            root_begins(self, part)

        def call(forward):
            with torch.no_grad():
                found.append(forward(X))

        monkeypatch.setattr(LayoutManager, "_attach", slowly)
        monkeypatch.setattr(Forwards, "root_begins", counted)
        target = (
            (lambda: call(model)) if how == "unpark" else (lambda: session.set_budget(vram=part(plain, 0.6)))
        )
        one = threading.Thread(target=target)
        one.start()
        assert here.wait(20)
        other = threading.Thread(target=call, args=(stale if fetched == "before" else model,))
        other.start()
        one.join(30), other.join(30)
        calls = 2 if how == "unpark" else 1
        assert len(found) == len(begun) == calls
        assert all(torch.equal(one, expected) for one in found)
    assert "forward" not in vars(model)


def test_a_call_that_waited_for_a_close_is_the_modules_own(monkeypatch):
    model, plain = pair()
    session, found, here = carom.stream(model, device="cpu", vram=part(model, 0.5)), [], threading.Event()
    take_down = LayoutManager._take_down

    def slowly(self, *args, **kwargs):
        here.set()
        time.sleep(0.2)
        take_down(self, *args, **kwargs)

    monkeypatch.setattr(LayoutManager, "_take_down", slowly)
    closing = threading.Thread(target=session.close)
    closing.start()
    assert here.wait(20)
    calling = threading.Thread(target=lambda: found.append(model(X)))
    calling.start()
    closing.join(30), calling.join(30)
    assert torch.equal(found[0], plain(X))


def test_a_front_that_somebody_stepped_before_is_not_called_twice(device):
    model, plain = pair()
    with torch.no_grad(), carom.stream(model, device=device, vram=part(model, 0.5)) as session:
        inner, calls = model.forward, []
        model.forward = lambda x: calls.append(1) or inner(x)
        for fraction in (0.4, 0.6, 0.5):
            session.set_budget(vram=part(plain, fraction))
            assert torch.equal(model(X), plain(X))
        assert len(calls) == 3
        session.park()
        assert torch.equal(model(X), plain(X)) and len(calls) == 4
    assert torch.equal(model(X), plain(X)) and len(calls) == 5
