"""Where tensors live on the simulated device: what should have moved and did not, or did not come home, is found."""

from __future__ import annotations

import carom
import pytest
import tests_harness as harness
import tests_models as models
import torch
import torch.nn.functional as F
from carom.core.device.simulated import SimulatedEngine, SimulatedPlaceError
from carom.core.host.arena import HostArena
from tests_inside import inside
from tests_limits import units_apart_from
from torch import nn

CASE = models.CASES["stack"]


class Uneven(nn.Module):
    """Frozen layers of eight widths: another budget keeps other layers on the device."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(32, width) for width in (32, 48, 64, 96, 160, 224, 64, 32))
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x).mean()
        return x


X = torch.linspace(-1, 1, 64).reshape(2, 32)


def size(net: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in net.parameters())


def on_device(device: carom.SimulatedDevice, net: nn.Module) -> list[str]:
    """Names of what lives on the device, gradients included."""
    named = [(name, t) for name, t in (*net.named_parameters(), *net.named_buffers())]
    named += [(f"{name}.grad", p.grad) for name, p in net.named_parameters() if p.grad is not None]
    return [name for name, tensor in named if device.holds(tensor)]


@pytest.fixture
def large(monkeypatch):
    """Units of these models lie apart on the device, as those of real ones do."""
    units_apart_from(monkeypatch)


# -- the device by itself


def test_what_an_engine_allocates_moves_or_computes_lives_on_the_device():
    device = carom.SimulatedDevice()
    engine = SimulatedEngine(device)
    mine, memory = torch.ones(4), engine.allocate(64)
    assert device.holds(memory) and device.holds(engine.alias(memory, 16, 16)) and device.holds(memory[8:])
    moved = engine.move(mine, engine.location)
    assert device.holds(moved) and engine.locate(moved) == engine.location and moved.device.type == "cpu"
    with engine.step():
        computed = moved + mine  # neutral: the user's
        neutral = mine * 2
    assert device.holds(computed) and not device.holds(neutral) and not device.holds(mine)
    home = engine.move(computed, torch.device("cpu"))
    assert torch.equal(home, computed) and not device.holds(home)
    assert engine.move(home, torch.device("cpu")) is home and engine.move(moved, engine.location) is moved
    assert engine.name.startswith("simulated") and engine.location.type != "cpu"


def test_an_operator_that_mixes_host_and_device_names_both_tensors():
    engine = SimulatedEngine(carom.SimulatedDevice())
    weight, other = engine.move(torch.ones(4, 4), engine.location), torch.ones(3, 4)
    engine.belongs_to_host(other, "blocks.3.weight")
    with engine.step():
        with pytest.raises(
            SimulatedPlaceError, match=r"\(4, 4\).*on the device.*\(3, 4\) \(blocks\.3\.weight\)"
        ):
            F.linear(other, weight)
        assert torch.equal(F.linear(torch.ones(3, 4), weight), torch.full((3, 4), 4.0))
        number = torch.tensor(2.0)
        engine.belongs_to_host(number, "scale")
        assert torch.equal(weight * number, torch.full((4, 4), 2.0))  # as torch does


def test_a_copy_with_an_end_on_the_wrong_side_is_refused():
    engine = SimulatedEngine(carom.SimulatedDevice())
    memory, block = engine.allocate(512), HostArena(engine.pinner, None).allocate(512)
    engine.belongs_to_host(block.data, "a block")
    for copy in (
        lambda: engine.copy_in(block.data, torch.zeros(512, dtype=torch.uint8), (), False),
        lambda: engine.copy_in(memory, engine.allocate(512), (), False),
        lambda: engine.copy_out(engine.allocate(512), memory),
        lambda: engine.copy_out(torch.empty(512, dtype=torch.uint8), block.data),
    ):
        with pytest.raises(SimulatedPlaceError, match="mixes up its ends"):
            copy()


def test_tags_go_with_the_memory_they_are_of():
    device = carom.SimulatedDevice()
    engine = SimulatedEngine(device)
    weight = engine.move(torch.ones(4), engine.location)
    with engine.step():
        for _ in range(5000):
            weight + 1
    assert len(device.ledger.places._tags) < 3000
    assert not any(device.holds(torch.empty(4)) for _ in range(100))


# -- sessions


def test_a_weight_that_was_left_on_the_host_is_found(monkeypatch):
    model = CASE.build().requires_grad_(False)
    model.head.requires_grad_(True)  # stays, and goes to the device alone
    monkeypatch.setattr("carom.core.placement.residents.DeviceTensors.move_in", lambda self, tensor: None)
    device = carom.SimulatedDevice()
    vram = harness.least_vram(model, device, "block")
    with (
        carom.stream(model, device=device, vram=vram, granularity="block"),
        pytest.raises(SimulatedPlaceError, match=r"head\."),
    ):
        model(CASE.inputs())


def test_everything_is_home_after_a_session_and_the_rest_was_there():
    model = CASE.build().requires_grad_(False)
    model.head.requires_grad_(True)
    device = carom.SimulatedDevice()
    vram = harness.some_vram(model, device, 0.4, granularity="block")
    with carom.stream(model, device=device, vram=vram, granularity="block") as session:
        away = {name for unit in inside(session).streamed for name in unit.weights}
        assert away and set(on_device(device, model)) == {n for n, _ in model.named_parameters()} - away
    assert on_device(device, model) == [] and device.ledger.allocated == 0


def test_a_gradient_goes_with_its_tensor_there_and_back():
    """on_device.relocate"""
    model = CASE.build().requires_grad_(False)
    model.head.requires_grad_(True)
    model.head.weight.grad, before = torch.ones_like(model.head.weight), model.head.weight.detach().clone()
    device = carom.SimulatedDevice()
    vram = harness.least_vram(model, device, "block")
    with carom.stream(model, device=device, vram=vram, granularity="block"):
        assert "head.weight.grad" in on_device(device, model)
    assert on_device(device, model) == []
    assert torch.equal(model.head.weight, before) and torch.equal(
        model.head.weight.grad, torch.ones_like(before)
    )


def test_what_was_to_stream_from_the_device_comes_home_where_the_layout_fails(monkeypatch, large):
    """DeviceTensors.undo"""
    net = Uneven()
    expected, device = net(X), carom.SimulatedDevice()
    session = carom.stream(net, device=device, vram=int(0.9 * size(net)), granularity="layer")
    assert on_device(device, net)

    def refused(self, nbytes):
        raise MemoryError("the host has no memory")

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(HostArena, "allocate", refused)
        with pytest.raises(MemoryError):
            session.set_budget(vram=int(0.5 * size(net)))
    assert on_device(device, net) == [] and torch.equal(net(X), expected)


def test_memory_is_given_back_before_what_comes_takes_its_place(large):
    """ResidentPlacer.place_deferred: else the allocator keeps what left beside what came, and more than the budget is taken."""
    for before, after in ((82416, 86512), (90608, 82416), (98800, 66032)):
        net, device = Uneven(), carom.SimulatedDevice()
        with carom.stream(net, device=device, vram=before, granularity="layer") as session, torch.no_grad():
            here = on_device(device, net)
            net(X)
            reserve = inside(session).engine.reserve
            reserve.peak = 0
            session.set_budget(vram=after)
            there = on_device(device, net)
            assert set(here) != set(there) and len(here) + len(there) > 2
            assert 0 < reserve.peak <= max(before, after)


def test_a_module_that_came_on_the_device_is_left_where_its_first_layout_put_it():
    """Adapts._movable: it would return there whole on the way to another layout."""
    net = Uneven()
    expected, whole = net(X), size(net)
    device = carom.SimulatedDevice(memory_bytes=2 * whole)
    for parameter in net.parameters():
        parameter.data = device.put(parameter.data)
    device.ledger.others = int(1.4 * whole)
    session = carom.stream(net, device=device, vram="auto", granularity="layer")
    try:
        assert inside(session).placement.came_on_device
        plan, crossed = session.plan, inside(session).engine.copies
        device.ledger.others = 0  # there is room for all of it now
        with torch.no_grad():
            for _ in range(30):
                assert torch.equal(net(X), expected)
        assert session.plan is plan and inside(session).engine.copies > crossed
    finally:
        session.close()
    assert len(on_device(device, net)) == 16 and torch.equal(net(X), expected)


def test_a_failed_forward_keeps_nothing_of_the_weights_that_leave():
    """Adapts._gives_way: the frames of the failed pass refer to them."""
    fails: list[bool] = []

    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(12))
            self.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            stay = [block.weight for block in self.blocks if type(block.weight) is nn.Parameter]
            kept = [weight.detach() for weight in stay if fails]  # views of residents
            for block in self.blocks:
                x = torch.tanh(block(x))
            if fails:
                fails.clear()
                raise torch.OutOfMemoryError(f"after {len(kept)} blocks")
            return x

    net, x = Holds(), torch.linspace(-1, 1, 128).reshape(2, 64)
    expected, memory = net(x), int(1.3 * size(net))
    device = carom.SimulatedDevice(memory_bytes=memory)
    with carom.stream(net, device=device, vram="auto", granularity="layer") as session, torch.no_grad():
        for _ in range(8):
            net(x)
        held = inside(session).held_bytes
        layouts: list[int] = []
        allocate = inside(session).engine.allocate
        inside(session).engine.allocate = lambda n: (layouts.append(device.ledger.allocated), allocate(n))[1]
        fails.append(True)
        inside(session).memory.asked.clear()  # a pass whose inputs have a new size may run again
        assert torch.equal(net(x), expected)
        assert layouts and inside(session).held_bytes < held
        assert max(layouts) <= inside(session).held_bytes
