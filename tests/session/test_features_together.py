"""Where the parts of a session meet: host copies, packed weights, budgets."""

from __future__ import annotations

import carom
import pytest
import torch
from carom.core.common.sizes import MIB
from carom.core.host.arena import HostArena
from carom.core.placement import placement as attach
from carom.core.placement.host_copies import HostStore, fingerprint
from carom.core.placement.pinned_tier import PinnedTier
from carom.core.placement.residents import DeviceTensors
from tests_inside import inside
from tests_limits import units_apart_from
from torch import nn

WIDTH = 192
CODECS = ["raw", "lossless"]
X = torch.linspace(-1, 1, 2 * WIDTH).reshape(2, WIDTH).to(torch.bfloat16)


class Block(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x):
        return x + super().forward(x)


class Net(nn.Module):
    def __init__(self, seed=0, depth=8):
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
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


@pytest.fixture(autouse=True)
def own_memory(monkeypatch):
    """Units of these models lie apart on the device, as those of real ones do."""
    units_apart_from(monkeypatch)


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


def test_a_budget_that_is_refused_leaves_auto_as_it_was():
    net = Net()
    device = carom.SimulatedDevice(timing="random", memory_bytes=64 * MIB)
    with carom.stream(net, device=device, vram="auto", granularity="block", codec="raw") as session:
        run(net)
        governor, shares = inside(session).governor, inside(session).mates
        with pytest.raises(carom.BudgetError):
            session.set_budget(vram=1)
        assert inside(session).governor is governor and inside(session).mates is shares
        run(net)


@pytest.mark.parametrize("codec", CODECS)
def test_a_resident_that_became_trainable_does_not_return_to_its_host_copy(codec):
    net = Net()
    with streamed(net, codec, 0.4) as session:
        run(net)
        session.set_budget(vram=int(0.8 * size(net)))
        run(net)
        lots = [
            m.tensor
            for m in inside(session).placement.device_tensors.moved
            if m.shared_buffer is not None and m.shared_buffer.copy is not None
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
        assert left[0] < 0 and session.parked and not inside(session).pinned_bytes
        for mine, its in zip(net.state_dict().values(), other.parameters(), strict=True):
            assert torch.equal(mine, its)
        assert torch.equal(run(net), expected)
    assert torch.equal(run(net), expected)


def test_packed_weights_that_were_on_their_way_when_something_failed_have_their_bytes():
    net = Net()
    with streamed(net, "lossless", 0.7) as session:
        run(net)
        session.park()
        assert inside(session).placement.tier.packs
        names = [name for name, p in net.named_parameters() if id(p) in inside(session).shelf]
        tensor = net.get_parameter(names[0])
        tensor.__class__ = nn.Parameter  # as where a budget fell, and memory ran out before the unit's turn
        del tensor._carom
        inside(session).placement.tier.dress()
        assert torch.equal(tensor, Net().get_parameter(names[0]))


def test_a_budget_of_ram_that_is_set_while_parked_ends_what_followed_the_host():
    net = Net()
    with streamed(net, "raw", 0.5) as session:
        assert inside(session).host_memory.governor is not None
        session.park()
        session.set_budget(ram=size(net))
        assert inside(session).host_memory.governor is None


def test_a_gradient_goes_home_with_a_tensor_that_leaves_for_its_block(monkeypatch):
    net = Net()
    with streamed(net, "raw", 0.9) as session:
        tensors = [moved.tensor for moved in inside(session).placement.device_tensors.moved]
        assert len(tensors) > 2
        for tensor in tensors:
            tensor.requires_grad_(True).grad = torch.ones_like(tensor)
        home, bring = [], DeviceTensors._return_to_origin

        def brings(self, moved):
            home.append(moved.tensor)
            bring(self, moved)

        monkeypatch.setattr(DeviceTensors, "_return_to_origin", brings)
        session.set_budget(vram=int(0.3 * size(net)))
        now = {id(net.get_parameter(name)) for unit in inside(session).streamed for name in unit.weights}
        left = [tensor for tensor in tensors if id(tensor) in now]
        assert left and {id(t) for t in left} <= {id(t) for t in home}


def test_what_was_on_the_device_goes_home_though_comparing_it_with_its_copy_failed(monkeypatch):
    net = Net()
    with streamed(net, "raw", 0.3) as session:
        session.set_budget(vram=int(0.9 * size(net)))
        run(net)

        def fails(tensors):
            raise RuntimeError("injected")

        store = HostStore(inside(session).arena, inside(session).copies, {})
        placement = attach.Placement(inside(session).engine, store, PinnedTier(inside(session).engine, store))
        inside(session).manager._take_down(reuse=True, keep=True)
        left = inside(session).placement.device_tensors.hand_over()
        placement.device_tensors.take_over(list(left))
        with monkeypatch.context() as patch:
            patch.setattr("carom.core.placement.host_copies.fingerprint", fails)
            with pytest.raises(RuntimeError, match="injected"):
                placement.keep_matching_residents([], [], [], inside(session).carving.units)
        known = {
            id(moved)
            for moved in (*placement.device_tensors.moved, *placement.device_tensors.leaving.values())
        }
        assert known >= {id(moved) for moved in left}
        placement.undo()
    for mine, its in zip(net.parameters(), Net().parameters(), strict=True):
        assert torch.equal(mine, its)
