"""A further kind of store is one class and one row: tests/support/toy_store.py streams exactly, in every kind of step."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Iterator
from typing import Any

import carom
import pytest
import torch
from carom.core.common.errors import UnsupportedError, WeightsError
from carom.core.metrics.meter import Meter
from carom.core.model.elsewhere_tensor import AwayParameter
from carom.core.placement import store_kinds
from carom.core.session.session import Session
from carom.core.session.stream_settings import StreamSettings
from tests_harness import on_every_device
from tests_interrupts import Interrupts
from tests_toy_store import ToyStore
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, DEPTH, RANK = 96, 6, 4


class Block(nn.Module):
    """Two layers around a low-rank adapter."""

    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.a, self.b = nn.Linear(WIDTH, RANK, bias=False), nn.Linear(RANK, WIDTH, bias=False)
        self.checkpoints = checkpoints

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x) + self.b(self.a(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.compute, x, use_reentrant=False) if self.checkpoints else self.compute(x)


def make_model(trains: str = "nothing", checkpoints: bool = False) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(*(Block(checkpoints) for _ in range(DEPTH)))
    for name, parameter in net.named_parameters():
        adapter = ".a." in name or ".b." in name
        parameter.requires_grad_(trains == "all" or (trains == "adapters" and adapter))
    return net


def weight_bytes(net: nn.Module) -> int:
    return sum(parameter.numel() * 4 for parameter in net.parameters())


def open_session(net: nn.Module, device: Any, **settings: Any) -> Session:
    """A session that streams about half of the weights from the toy store."""
    settings = {"vram": weight_bytes(net) // 2, "store": "toy", **settings}
    return Session(net, StreamSettings(device=device, **settings))


def run(net: nn.Module, device: Any, steps: int = 4) -> list[torch.Tensor]:
    """The outputs of some steps, with updates of what requires a gradient."""
    generator = torch.Generator().manual_seed(0)
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2) if trained else None
    found = []
    for _ in range(steps):
        x = torch.randn(5, WIDTH, generator=generator).to(device)
        with torch.set_grad_enabled(optimizer is not None):
            y = net(x)
        if optimizer is not None:
            y.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(y.detach().cpu())
    return found


def assert_equal_models(net: nn.Module, twin: nn.Module) -> None:
    theirs = dict(twin.state_dict())
    for name, value in net.state_dict().items():
        torch.testing.assert_close(value.cpu() + 0, theirs[name], rtol=0, atol=0, msg=name)


@pytest.fixture
def stores(monkeypatch) -> Iterator[list[ToyStore]]:
    """The toy stores that sessions make."""
    made: list[ToyStore] = []

    def make(wish: Any) -> ToyStore:
        made.append(ToyStore())
        return made[-1]

    monkeypatch.setitem(store_kinds._MAKES, "toy", make)
    yield made
    made.clear()


# -- exactness


@on_every_device
@pytest.mark.parametrize(
    ("trains", "checkpoints"),
    [("nothing", False), ("adapters", False), ("adapters", True), ("all", False), ("all", True)],
)
def test_steps_equal_those_of_the_resident_model(device, trains, checkpoints):
    net, twin = make_model(trains, checkpoints), make_model(trains, checkpoints)
    expected = run(twin, "cpu")
    with open_session(net, device, training="stream" if trains == "all" else None) as session:
        assert session.report().streamed_bytes > 0
        frozen = [parameter for parameter in net.parameters() if isinstance(parameter, AwayParameter)]
        # The store has the only copy of a frozen weight.
        assert bool(frozen) == (trains != "all")
        assert all(parameter.untyped_storage().nbytes() < 8 for parameter in frozen)
        found = run(net, session.device)
        assert session.report().transfers_per_weight > 0
        assert_equal_models(net, twin)
    assert all(map(torch.equal, found, expected))
    assert all(type(parameter) is nn.Parameter for parameter in net.parameters())
    assert_equal_models(net, twin)


@on_every_device
def test_budgets_park_and_values_by_name(device):
    net, twin = make_model(), make_model()
    size, x = weight_bytes(net), torch.ones(3, WIDTH)
    with open_session(net, device) as session, torch.no_grad():
        for budget in (2 * size, size // 2):  # laid out again, all of it resident, and back
            session.set_budget(vram=budget)
            assert torch.equal(net(x.to(session.device)).cpu(), twin(x))
        net.to("cpu")
        assert torch.equal(net(x.to(session.device)).cpu(), twin(x))
        for name, parameter in twin.named_parameters():
            session.write(name, parameter * 1.5)
        for parameter in twin.parameters():
            parameter.mul_(1.5)
        assert torch.equal(net(x.to(session.device)).cpu(), twin(x))
        for name, value in twin.state_dict().items():
            assert torch.equal(session.read(name).cpu(), value)
        # In-place operators outside a step, as a merge of adapters uses them.
        for model in (net, twin):
            model[0].up.weight.add_(1.0)
            model[-1].down.weight.data.mul_(0.5)
        assert torch.equal(net(x.to(session.device)).cpu(), twin(x))
    assert_equal_models(net, twin)


def test_trained_weights_come_home_before_the_next_fetch(stores):
    net, twin = make_model("all"), make_model("all")
    run(twin, "cpu", 2)
    with open_session(net, carom.SimulatedDevice(timing="late"), training="stream") as session:
        run(net, session.device, 2)
        with torch.no_grad():
            net(torch.ones(3, WIDTH).to(session.device))  # fetches every unit
        (store,) = stores
        for name, parameter in twin.named_parameters():
            if name in store.values:
                assert torch.equal(store.values[name], parameter), name
        assert store.values.keys() & dict(twin.named_parameters()).keys()


# -- what a session promises the store, and the store a session


class WatchedStore(ToyStore):
    """Checks the rules that a session keeps. ``fails``: called before each fetch, and may raise."""

    def __init__(self, fails: Any = lambda: None) -> None:
        super().__init__()
        self.fails, self.lock = fails, None
        self.calls: list[str] = []
        self.interrupted = False

    def note(self, name: str, unit: Any = None) -> None:
        self.lock = self.lock or unit.runtime.lock
        self.calls.append(name)
        assert self.lock._is_owned(), "T2"
        assert not self.interrupted or name == "recover", "T9"

    def read_ahead(self, upcoming):
        upcoming = list(upcoming)
        self.note("read_ahead")
        assert all(home.entry.name in self.values for unit in upcoming for home in unit.homes), "T1"
        super().read_ahead(upcoming)

    def ready(self, unit):
        self.note("ready")
        return super().ready(unit)

    def fetch(self, unit, target, after, transfer):
        assert "read_ahead" in self.calls, "T4"
        self.note("fetch")
        assert target.numel() == unit.nbytes and target.dtype == torch.uint8
        event = super().fetch(unit, target, after, transfer)
        try:
            self.fails()
        except BaseException as error:
            self.interrupted = not isinstance(error, Exception)
            raise
        return event

    def write(self, weight, value):
        self.note("write", weight)
        assert (value.shape, value.dtype, value.stride()) == (
            weight.host.shape, weight.host.dtype, weight.host.stride(),
        )  # fmt: skip
        super().write(weight, value)

    def recover(self):
        self.interrupted = False
        self.note("recover")
        super().recover()

    def close(self):
        self.calls.append("close")
        super().close()


@pytest.fixture
def watched(monkeypatch) -> list[WatchedStore]:
    """The watched stores that sessions make."""
    made: list[WatchedStore] = []

    def make(wish: Any) -> WatchedStore:
        made.append(WatchedStore())
        return made[-1]

    monkeypatch.setitem(store_kinds._MAKES, "toy", make)
    return made


@pytest.mark.parametrize("trains", ["nothing", "adapters", "all"])
@pytest.mark.parametrize("timing", ["late", "early", "random"])
def test_a_session_keeps_the_rules_of_the_interface(trains, timing, watched):
    net = make_model(trains)
    device = carom.SimulatedDevice(seed=3, timing=timing)
    with open_session(net, device, training="stream" if trains == "all" else None) as session:
        (store,) = watched
        run(net, session.device)
        assert {"write", "read_ahead", "ready", "fetch"} == set(store.calls)
    assert store.calls[-1] == "close"


def test_a_store_that_is_complete_is_not_told_what_comes(watched, monkeypatch):
    monkeypatch.setattr(WatchedStore, "complete", True)
    monkeypatch.setattr(WatchedStore, "fetch", ToyStore.fetch)
    net, twin = make_model(), make_model()
    with open_session(net, carom.SimulatedDevice()) as session:
        assert all(map(torch.equal, run(net, session.device), run(twin, "cpu")))
        assert set(watched[0].calls) == {"write", "ready"}


def test_a_unit_that_is_not_ready_is_fetched_only_when_it_is_needed(stores, monkeypatch):
    net, early, entered = make_model(), [], [""]
    for name, block in net.named_children():
        # A block's own hooks come before its unit is entered.
        block.register_forward_pre_hook(lambda *_, name=name: entered.append(name))
    fetch = ToyStore.fetch

    def note(store, unit, target, after, transfer):
        early.append(unit.homes[0].entry.name.split(".")[0] != entered[-1])
        return fetch(store, unit, target, after, transfer)

    monkeypatch.setattr(ToyStore, "fetch", note)
    with open_session(net, carom.SimulatedDevice()) as session:
        monkeypatch.setattr(ToyStore, "ready", lambda store, unit: False)
        run(net, session.device)
        assert early and not any(early)
        monkeypatch.setattr(ToyStore, "ready", lambda store, unit: True)
        run(net, session.device)
        assert any(early)


def step(net: nn.Module, device: Any, number: int) -> list[torch.Tensor]:
    """The output of one step and its gradients, if there are any."""
    x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(number)).to(device)
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.grad = None
    with torch.set_grad_enabled(bool(trained)):
        y = net(x)
    if trained:
        y.square().mean().backward()
    return [y.detach().cpu(), *(parameter.grad.cpu() for parameter in trained)]


@on_every_device
@pytest.mark.parametrize("trains", ["nothing", "adapters", "all"])
@pytest.mark.parametrize("error", [WeightsError, KeyboardInterrupt, OSError])
def test_a_fetch_that_fails_leaves_the_next_step_right(device, trains, error, watched):
    net, twin, which = make_model(trains), make_model(trains), random.Random(1)
    left = 0

    def fails() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise error("the bytes of a weight are gone")

    with open_session(net, device, training="stream" if trains == "all" else None) as session:
        (store,) = watched
        store.fails = fails
        step(net, session.device, 0)
        for number in range(1, 6):
            left = which.randint(1, 8)
            with pytest.raises(error, match="gone"):
                step(net, session.device, number)
                step(net, session.device, number)
                step(net, session.device, number)
            left = 0
            found = step(net, session.device, number)
            assert all(map(torch.equal, found, step(twin, "cpu", number)))
        assert (store.calls.count("recover") > 0) == (error is KeyboardInterrupt)


@pytest.mark.parametrize("trains", ["nothing", "all"])
def test_an_interrupt_at_any_line_leaves_the_next_step_right(trains, watched):
    net, twin, which = make_model(trains), make_model(trains), random.Random(2)
    files = ("stores/", "placement/stored_")
    with open_session(
        net, carom.SimulatedDevice(timing="random"), training="stream" if trains == "all" else None
    ) as session:
        step(net, session.device, 0)
        with Interrupts(files=files) as counted:
            step(net, session.device, 0)
        assert counted.count > 20
        for number in range(1, 7):
            # The delays vary, and with them the lines of a step: the first half of them runs in each.
            with Interrupts(which.randint(1, counted.count // 2), files) as interrupted:
                step(net, session.device, number)
            assert interrupted.place
            found = step(net, session.device, number)
            assert all(map(torch.equal, found, step(twin, "cpu", number)))


class Drifting(nn.Linear):
    """A layer that changes its bias at each use."""

    def forward(self, x):
        self.bias.add_(x.detach().mean(0))
        return super().forward(x)


def test_what_a_forward_writes_to_a_weight_goes_to_the_store(watched):
    torch.manual_seed(0)
    net, twin = (nn.Sequential(*(Drifting(WIDTH, WIDTH) for _ in range(DEPTH))) for _ in range(2))
    twin.load_state_dict(net.state_dict())
    with open_session(net, carom.SimulatedDevice(timing="late")) as session, torch.no_grad():
        streamed = [name for name in watched[0].values if name.endswith("bias")]
        assert streamed
        x = torch.ones(3, WIDTH)
        assert torch.equal(net(x.to(session.device)).cpu(), twin(x))
        assert all(torch.equal(watched[0].values[name], twin.get_parameter(name)) for name in streamed)
        assert torch.equal(net(x.to(session.device)).cpu(), twin(x))
    assert_equal_models(net, twin)


def test_a_closed_session_drops_its_store(stores):
    net = make_model()
    with open_session(net, "cpu") as session:
        run(net, session.device, 1)
    store = weakref.ref(stores.pop())
    gc.collect()
    assert store() is None


# -- names


def test_a_store_is_found_by_its_name_only():
    with pytest.raises(UnsupportedError, match="'file', 'packed', 'pinned', 'toy'"):
        open_session(make_model(), "cpu", store="no such store")
    with pytest.raises(ValueError, match="registered as 'toy' already"):
        store_kinds.register_store("toy", lambda wish: ToyStore())


@pytest.mark.parametrize(
    "other", [{"disk": "auto"}, {"weights": "x"}, {"codec": "lossless"}, {"pool": "aimdo"}]
)
def test_a_store_does_not_go_with_a_setting_that_asks_for_another(other):
    net = make_model()
    with pytest.raises(UnsupportedError, match="'toy' does not go with"):
        open_session(net, "cpu", **other)
    assert_equal_models(net, make_model())


# -- values


def test_a_trained_weight_is_written_only_after_a_change(watched):
    net, twin = make_model("all"), make_model("all")
    with open_session(net, carom.SimulatedDevice(), training="stream") as session:
        (store,) = watched
        run(net, session.device, 2), run(twin, "cpu", 2)
        step(net, session.device, 0)  # fetches what the optimizer has changed
        written = store.calls.count("write")
        with torch.no_grad():
            net(torch.ones(3, WIDTH).to(session.device))
        assert store.calls.count("write") == written
        for model in (net, twin):
            for parameter in model.parameters():
                parameter.data.mul_(0.5)  # raises no version
        session.refresh()
        assert all(map(torch.equal, step(net, session.device, 1), step(twin, "cpu", 1)))
        assert store.calls.count("write") > written


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_write_that_fails_is_repeated_before_the_next_fetch(error, watched, monkeypatch):
    net, twin = make_model("all"), make_model("all")
    write, left = WatchedStore.write, 0

    def fails(self: WatchedStore, weight: Any, value: torch.Tensor) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            self.interrupted = error is KeyboardInterrupt
            raise error("no room")
        write(self, weight, value)

    with open_session(net, carom.SimulatedDevice(timing="late"), training="stream") as session:
        run(net, session.device, 2), run(twin, "cpu", 2)
        monkeypatch.setattr(WatchedStore, "write", fails)
        left = 3
        with pytest.raises(error, match="no room"):
            step(net, session.device, 0)
        assert all(map(torch.equal, step(net, session.device, 1), step(twin, "cpu", 1)))


def test_operators_change_a_weight_in_the_store_by_a_new_value(stores):
    net, twin = make_model(), make_model()
    with open_session(net, "cpu") as session, torch.no_grad():
        (store,) = stores
        name = next(name for name in store.values if name.endswith("up.weight"))
        other = next(one for one in store.values if one.endswith("down.weight"))
        before = store.values[name]
        copy = before.clone()
        for model in (net, twin):
            model.get_parameter(name).add_(model.state_dict()[other], alpha=2.0)
        assert torch.equal(before, copy)  # what was read from a store is not written to
        assert torch.equal(store.values[name], twin.get_parameter(name))
        assert torch.equal(session.read(name), twin.get_parameter(name))
        weight = net.get_parameter(name)
        with pytest.raises(UnsupportedError, match="cannot become"):
            weight.data = torch.zeros(2, 2)
        with pytest.raises(UnsupportedError, match="cannot be trained"):
            weight.requires_grad_(True)
    assert_equal_models(net, twin)


@pytest.mark.parametrize("device", ["cpu", carom.SimulatedDevice()], ids=["cpu", "simulated"])
def test_copies_are_counted_as_those_from_host_memory(device, monkeypatch):
    monkeypatch.setattr(ToyStore, "ready", lambda self, unit: True)  # no fetch is left for later
    reports = []
    for store in ("toy", "pinned"):
        net = make_model()
        with open_session(net, device, store=store) as session:
            run(net, session.device)
            reports.append(session.report())
    toy, pinned = reports
    assert toy.transfers_per_weight == pinned.transfers_per_weight == 1
    assert toy.raw_bytes_per_step == pinned.raw_bytes_per_step > 0
    # Padding between weights is not copied.
    assert 0.9 * pinned.wire_bytes_per_step < toy.wire_bytes_per_step <= pinned.wire_bytes_per_step
    assert device != "cpu" or toy.stall_seconds > 0


def test_a_copy_that_blocks_the_host_is_a_wait_of_the_step(monkeypatch):
    copied, waited = [], []
    monkeypatch.setattr(Meter, "copied", lambda self, name, marks, *args: copied.append(marks))
    monkeypatch.setattr(Meter, "waited", lambda self, before, after, *args: waited.append((before, after)))
    net = make_model()
    with open_session(net, "cpu"):
        run(net, "cpu")
    timed = [marks for marks in copied if marks is not None]
    assert timed and set(timed) <= set(waited)
