"""Where the parts of a session meet: host copies, residents that give way, packed weights, budgets."""

from __future__ import annotations

import carom
import pytest
import torch
from carom.core import attach, on_device
from carom.core.host_copies import fingerprint
from carom.core.on_device import OnDevice
from carom.core.packed_placement import PackedPlacement
from carom.core.sizes import MIB
from carom.core.store.arena import HostArena
from torch import nn

WIDTH = 192
CODECS = ["raw", "lossless"]
X = torch.linspace(-1, 1, 2 * WIDTH).reshape(2, WIDTH).to(torch.bfloat16)
FAILS: set[int] = set()  # blocks that run out of memory at their next forward


class Block(nn.Sequential):
    def __init__(self, number):
        super().__init__(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))
        self.number = number

    def forward(self, x):
        found = x + super().forward(x)
        if self.number in FAILS:
            FAILS.remove(self.number)
            raise torch.OutOfMemoryError("injected")
        return found


class Net(nn.Module):
    def __init__(self, seed=0, depth=8):
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(Block(number) for number in range(depth))
        self.to(torch.bfloat16).requires_grad_(False)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x * 1.0


def size(net):
    return sum(p.numel() * p.element_size() for p in net.parameters())


def run(net):
    with torch.no_grad():
        return net(X)


def streamed(net, codec, share):
    return carom.stream(
        net, device=carom.SimulatedDevice(), vram=int(share * size(net)), granularity="layer", codec=codec
    )


def auto(net, share=0.8):
    """Whose residents may give way; what it holds changes only where a test makes it."""
    device = carom.SimulatedDevice(timing="random", memory_bytes=64 * MIB)
    session = carom.stream(net, device=device, vram="auto", granularity="block", codec="raw")
    session._governor.read = lambda *given, **named: None
    session._governor.yielded = lambda *given: None
    session._vram = int(share * size(net))
    session._again()
    assert session._reruns is not None and len(session._reruns._residents) >= 3
    return session


@pytest.fixture(autouse=True)
def own_memory(monkeypatch):
    """Units of these models lie apart on the device, as those of real ones do."""
    monkeypatch.setattr(on_device, "SMALL_UNIT", 1)
    FAILS.clear()


def differs(before, change):
    after = before.clone()
    change(after)
    assert not torch.equal(before.view(torch.uint8), after.view(torch.uint8))
    return not torch.equal(fingerprint([before]), fingerprint([after]))


def swap(t, a, b):
    t[[a, b]] = t[[b, a]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64], ids=str)
def test_fingerprints_differ_where_signs_flip(dtype):
    torch.manual_seed(0)
    like = (torch.randn(256, 256) * 100).to(dtype)
    if dtype.is_floating_point:
        assert differs(like, lambda t: t.neg_())
        assert differs(like, lambda t: t[3].neg_())
        assert differs(like, lambda t: t[2:6].neg_())
        assert differs(torch.zeros_like(like), lambda t: t.neg_())
        assert differs(torch.zeros_like(like), lambda t: t[7].neg_())
    last = 8 // like.element_size() - 1
    for one, other in (((0, last), (0, last + 8)), ((0, last), (5, last)), ((0, last), (9, last + 16))):

        def flip(t, places=(one, other)):
            bits = t.view(torch.uint8).view(256, 256, -1)  # the last byte has the sign
            for place in places:
                bits[place[0], place[1], -1] ^= 128

        assert differs(like, flip)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [64, 128, 256, 512, 1024])
def test_fingerprints_differ_where_rows_of_sparse_weights_are_swapped(dtype, width):
    eye = torch.eye(width, dtype=dtype)
    for a, b in ((0, 2), (1, 3), (0, 4), (5, 37), (0, 63), (0, 32), (16, 48)):
        assert differs(eye, lambda t, a=a, b=b: swap(t, a, b)), (a, b)
    assert differs(eye, lambda t: t.copy_(t.roll(8, 0)))
    assert differs(eye, lambda t: t.copy_(t.flip(0)))


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("share", [0.3, 0.8])
def test_what_is_written_while_parked_is_what_runs_afterwards(codec, keep, share):
    net, other = Net(), Net()
    with streamed(net, codec, share) as session:
        run(net)
        session.park(keep=keep)
        with torch.no_grad():
            for mine, its in zip(net.parameters(), other.parameters(), strict=True):
                mine.mul_(2)
                its.mul_(2)
        assert torch.equal(run(net), run(other))
        session.set_budget(vram=int(0.5 * size(net)))
        assert torch.equal(run(net), run(other))
    assert torch.equal(run(net), run(other))


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("codec", CODECS)
def test_a_state_that_is_loaded_while_parked_is_what_runs_afterwards(codec, keep):
    net, other = Net(), Net(seed=1)
    with streamed(net, codec, 0.5) as session:
        run(net)
        session.park(keep=keep)
        net.load_state_dict(other.state_dict())
        assert torch.equal(run(net), run(other))
    assert torch.equal(run(net), run(other))


def test_a_resident_that_was_away_and_is_written_through_its_data_keeps_what_was_written():
    net, other = Net(), Net()
    run(other)
    expected = run(other)
    with auto(net) as session:
        run(net)
        FAILS.add(session._reruns._residents[0].unit.modules[0].number)
        assert torch.equal(run(net), expected)
        away = [r for r in session._reruns._residents if r.host is not None]
        assert away
        for r in away:
            for model in (net, other):
                number = r.unit.modules[0].number
                model.blocks[number][2].weight.data.mul_(2)
        want = run(other)
        assert torch.equal(run(net), want)
        assert torch.equal(run(net), want)
    assert torch.equal(run(net), want)


def test_no_host_memory_while_a_resident_leaves_loses_nothing(monkeypatch):
    net = Net()
    run(net)
    expected = run(net)
    with auto(net) as session:
        run(net)
        placement = session._placement
        before, held = len(placement.here.moved), placement.resident_bytes
        resident_one = session._reruns._residents[-1]
        real = torch.Tensor.to

        def refuses(self, *args, **kwargs):
            if kwargs.get("copy"):
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
            return real(self, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "to", refuses)
            assert resident_one.leave() == 0
        assert (len(placement.here.moved), placement.resident_bytes) == (before, held)
        assert torch.equal(run(net), expected)
    assert torch.equal(run(net), expected)


def test_a_budget_that_is_refused_leaves_auto_as_it_was():
    net = Net()
    with auto(net) as session:
        run(net)
        governor, shares = session._governor, session._mates
        with pytest.raises(carom.BudgetError):
            session.set_budget(vram=1)
        assert session._governor is governor and session._mates is shares
        run(net)


@pytest.mark.parametrize("codec", CODECS)
def test_a_resident_that_became_trainable_does_not_return_to_its_host_copy(codec):
    net = Net()
    with streamed(net, codec, 0.4) as session:
        run(net)
        session.set_budget(vram=int(0.8 * size(net)))
        run(net)
        lots = [
            m.tensor for m in session._placement.here.moved if m.lot is not None and m.lot.copy is not None
        ]
        assert lots
        for t in lots:
            t.requires_grad_(True)
        session.set_budget(vram=int(0.4 * size(net)))
        x = torch.ones(2, 192, dtype=torch.bfloat16)
        net(x).sum().backward()
        assert all(t.grad is not None for t in lots)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("allocation", [0, 2])
def test_no_host_memory_while_parking_leaves_the_model_whole(codec, allocation, monkeypatch):
    net, other = Net(), Net()
    expected = run(other)
    with streamed(net, codec, 0.7) as session:
        run(net)
        allocate, left = HostArena.allocate, [allocation]

        def refuses(self, nbytes):
            left[0] -= 1
            if left[0] == -1:
                raise MemoryError("injected")
            return allocate(self, nbytes)

        with monkeypatch.context() as patch:
            patch.setattr(HostArena, "allocate", refuses)
            session.park(keep=True)
        assert left[0] < 0 and session.parked and not session._arena.pinned_bytes
        for mine, its in zip(net.state_dict().values(), other.parameters(), strict=True):
            assert torch.equal(mine, its)
        assert torch.equal(run(net), expected)
    assert torch.equal(run(net), expected)


def test_packed_weights_that_were_on_their_way_when_something_failed_have_their_bytes():
    net = Net()
    with streamed(net, "lossless", 0.7) as session:
        run(net)
        session.park()
        assert isinstance(session._placement, PackedPlacement)
        names = [name for name, p in net.named_parameters() if id(p) in session._shelf]
        tensor = net.get_parameter(names[0])
        tensor.__class__ = nn.Parameter  # as where a budget fell, and memory ran out before the unit's turn
        del tensor._carom
        session._placement.wear()
        assert torch.equal(tensor, Net().get_parameter(names[0]))


def test_a_budget_of_ram_that_is_set_while_parked_ends_what_followed_the_host():
    net = Net()
    with streamed(net, "raw", 0.5) as session:
        assert session._follower is not None
        session.park()
        session.set_budget(ram=size(net))
        assert session._follower is None


def test_a_gradient_goes_home_with_a_tensor_that_leaves_for_its_block(monkeypatch):
    net = Net()
    with streamed(net, "raw", 0.9) as session:
        tensors = [moved.tensor for moved in session._placement.here.moved]
        assert len(tensors) > 2
        for tensor in tensors:
            tensor.requires_grad_(True).grad = torch.ones_like(tensor)
        home, bring = [], OnDevice._bring_home

        def brings(self, moved):
            home.append(moved.tensor)
            bring(self, moved)

        monkeypatch.setattr(OnDevice, "_bring_home", brings)
        session.set_budget(vram=int(0.3 * size(net)))
        now = {id(unit_tensor.tensor) for u in session._placement.streamed for unit_tensor in u.unit.entries}
        left = [tensor for tensor in tensors if id(tensor) in now]
        assert left and {id(t) for t in left} <= {id(t) for t in home}


def test_what_was_on_the_device_goes_home_though_comparing_it_with_its_copy_failed(monkeypatch):
    net = Net()
    with streamed(net, "raw", 0.3) as session:
        session.set_budget(vram=int(0.9 * size(net)))
        run(net)

        def fails(tensors):
            raise RuntimeError("injected")

        placement = attach.Placement(session._engine, session._arena, session._copies)
        session._detach(leave=True, keep=True)
        left = session._placement.here.given()
        placement.here.receive(list(left))
        with monkeypatch.context() as patch:
            patch.setattr("carom.core.host_copies.fingerprint", fails)
            with pytest.raises(RuntimeError, match="injected"):
                placement.keep_received([], [], [], session._carving.units)
        known = {id(moved) for moved in (*placement.here.moved, *placement.here.leaving.values())}
        assert known >= {id(moved) for moved in left}
        placement.undo()
    for mine, its in zip(net.parameters(), Net().parameters(), strict=True):
        assert torch.equal(mine, its)
