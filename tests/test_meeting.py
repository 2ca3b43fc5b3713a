"""Where the parts of a session meet: host copies, residents that give way, packed weights, budgets."""

from __future__ import annotations

import carom
import pytest
import torch
from carom.core import attach
from carom.core.host_copies import fingerprint

from .test_host_copies import CODECS, Net, run, size, streamed
from .test_rerun import TROUBLE, auto, resident
from .test_rerun import Net as Blocks
from .test_rerun import run as run_blocks


@pytest.fixture(autouse=True)
def own_memory(monkeypatch):
    """Units of these models lie apart on the device, as those of real ones do."""
    monkeypatch.setattr(attach, "SMALL_UNIT", 1)
    TROUBLE.__init__()


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
    net, other = Blocks(), Blocks()
    run_blocks(other)
    expected = run_blocks(other)
    with auto(net) as session:
        run_blocks(net)
        session._governor.yielded = lambda *given: None  # nothing is laid out anew: it goes and comes
        TROUBLE.at(resident(session)[0])
        assert torch.equal(run_blocks(net), expected)
        away = [r for r in session._reruns._residents if r.host is not None]
        assert away
        for r in away:
            for model in (net, other):
                number = r.unit.modules[0].number
                model.blocks[number].down.weight.data.mul_(2)
        want = run_blocks(other)
        assert torch.equal(run_blocks(net), want)
        assert torch.equal(run_blocks(net), want)
    assert torch.equal(run_blocks(net), want)


def test_no_host_memory_while_a_resident_leaves_loses_nothing(monkeypatch):
    net = Blocks()
    run_blocks(net)
    expected = run_blocks(net)
    with auto(net) as session:
        run_blocks(net)
        placement = session._placement
        before, held = len(placement._moved), placement.resident_bytes
        resident_one = session._reruns._residents[-1]
        real = torch.Tensor.to

        def refuses(self, *args, **kwargs):
            if kwargs.get("copy"):
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
            return real(self, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "to", refuses)
            assert resident_one.leave() == 0
        assert (len(placement._moved), placement.resident_bytes) == (before, held)
        assert torch.equal(run_blocks(net), expected)
    assert torch.equal(run_blocks(net), expected)


def test_a_budget_that_is_refused_leaves_auto_as_it_was():
    net = Blocks()
    with auto(net) as session:
        run_blocks(net)
        governor, shares = session._governor, session._device
        with pytest.raises(carom.BudgetError):
            session.set_budget(vram=1)
        assert session._governor is governor and session._device is shares
        run_blocks(net)


@pytest.mark.parametrize("codec", CODECS)
def test_a_resident_that_became_trainable_does_not_return_to_its_host_copy(codec):
    net = Net()
    with streamed(net, codec, 0.4) as session:
        run(net)
        session.set_budget(vram=int(0.8 * size(net)))
        run(net)
        lots = [m.tensor for m in session._placement._moved if m.lot is not None and m.lot.copy is not None]
        assert lots
        for t in lots:
            t.requires_grad_(True)
        session.set_budget(vram=int(0.4 * size(net)))
        x = torch.ones(2, 192, dtype=torch.bfloat16)
        net(x).sum().backward()
        assert all(t.grad is not None for t in lots)
