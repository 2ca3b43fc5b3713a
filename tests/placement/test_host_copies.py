"""A changed budget moves the boundary of what stays, and nothing else: counted, on the host and on the link."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import carom
import pytest
import torch
from carom.core.device.make_engine import make_engine
from carom.core.host import arena
from carom.core.host.arena import HostArena
from carom.core.model.units import carve
from carom.core.placement import block_fill, placement
from carom.core.placement.host_copies import HostStore, fingerprint
from carom.core.placement.pinned_tier import PinnedTier
from carom.core.placement.resident_placer import ResidentPlacer
from hypothesis import given, settings
from hypothesis import strategies as st
from tests_inside import inside
from tests_limits import units_apart_from
from tests_residual import Residual as Net
from tests_residual import size
from torch import nn

WIDTH = 192
CODECS = ["raw", "lossless"]


X = torch.linspace(-1, 1, 2 * WIDTH).reshape(2, WIDTH).to(torch.bfloat16)


def run(net):
    with torch.no_grad():
        return net(X)


@dataclass
class Count:
    """Bytes of host blocks made, bytes registered with the driver, bytes brought to the device for residents."""

    made: int = 0
    pinned: int = 0
    loaded: int = 0

    def __sub__(self, other):
        return Count(self.made - other.made, self.pinned - other.pinned, self.loaded - other.loaded)

    def copy(self):
        return Count(self.made, self.pinned, self.loaded)


@pytest.fixture
def count(monkeypatch):
    """Units of these models lie apart on the device, as those of real ones do."""
    units_apart_from(monkeypatch)
    counted = Count()
    allocate, pin, settled = arena.HostArena.allocate, arena.HostArena.pin, placement.Placement.settled

    def counting_allocate(self, nbytes):
        counted.made += nbytes
        return allocate(self, nbytes)

    def counting_pin(self, block):
        before = block.pinned
        done = pin(self, block)
        counted.pinned += block.data.numel() if done and not before else 0
        return done

    def counting_settled(self):
        counted.loaded += self.loaded_bytes
        settled(self)

    monkeypatch.setattr(arena.HostArena, "allocate", counting_allocate)
    monkeypatch.setattr(arena.HostArena, "pin", counting_pin)
    monkeypatch.setattr(placement.Placement, "settled", counting_settled)
    return counted


def residents(session):
    return {
        unit.name: unit.nbytes
        for index, unit in enumerate(inside(session).units)
        if index in session.plan.resident
    }


def streamed(net, codec, share, **options):
    return carom.stream(
        net, device=carom.SimulatedDevice(), vram=int(share * size(net)), granularity="layer", codec=codec, **options
    )  # fmt: skip


@pytest.mark.parametrize("codec", CODECS)
def test_a_budget_that_comes_and_goes_copies_what_becomes_resident_and_nothing_on_the_host(count, codec):
    net = Net()
    expected = run(net)
    with streamed(net, codec, 0.8) as session:
        for share in (0.6, 0.8, 0.5, 0.8):  # once each: residents of the start had no host copy yet
            session.set_budget(vram=int(share * size(net)))
            assert torch.equal(run(net), expected)
        for share in (0.5, 0.8, 0.6, 0.8):
            before, were = count.copy(), residents(session)
            session.set_budget(vram=int(share * size(net)))
            cost, fresh = count - before, residents(session).keys() - were.keys()
            assert cost.made == 0 and cost.pinned == 0
            assert cost.loaded <= sum(residents(session)[name] for name in fresh) + 1024
            assert bool(fresh) == (cost.loaded > 0) == (share == 0.8), "a budget that falls brings nothing"
            assert torch.equal(run(net), expected)
        pinned = session.report().pinned_bytes
        assert pinned <= (1.05 if codec == "raw" else 0.9) * size(net) + 12 * arena.PAGE
    assert torch.equal(run(net), expected) and inside(session).pinned_bytes == 0


@pytest.mark.parametrize("codec", CODECS)
def test_giving_back_for_the_first_time_copies_only_what_leaves_the_device(count, codec):
    net = Net()
    expected = run(net)
    with streamed(net, codec, 0.8) as session:
        before, were = count.copy(), residents(session)
        session.set_budget(vram=int(0.5 * size(net)))
        left = sum(were[name] for name in were.keys() - residents(session).keys())
        cost = count - before
        assert 0 < cost.made <= left and cost.pinned == cost.made
        assert torch.equal(run(net), expected)


@pytest.mark.parametrize("codec", CODECS)
def test_a_session_put_aside_comes_back_for_what_has_to_cross(count, codec):
    net = Net()
    expected = run(net)
    with streamed(net, codec, 0.7) as session:
        before = count.copy()
        session.park(keep=True)
        assert session.parked and inside(session).engine.allocated == 0
        assert (count - before).made <= sum(residents(session).values()), "what streams has its block"
        assert torch.equal(session.read("blocks.1.0.weight"), Net().blocks[1][0].weight)
        net.to("cpu")  # it is there: neither brought back nor unpinned
        assert session.parked and session.report().pinned_bytes > 0
        for share in (0.7, 0.5, 0.7):
            before, were = count.copy(), residents(session)
            session.set_budget(vram=int(share * size(net)))
            assert session.parked
            assert torch.equal(run(net), expected) and not session.parked
            cost = count - before
            # What was put aside as it was on the device is packed when it streams for the first time.
            leaves = sum(were[name] for name in were.keys() - residents(session).keys())
            assert cost.made <= (leaves if codec == "lossless" else 0) and cost.pinned == cost.made
            assert bool(cost.made) == (codec == "lossless" and share == 0.5)
            assert cost.loaded <= sum(residents(session).values()) + 1024
            before = count.copy()
            session.park(keep=True)
        assert (count - before).made == 0
        session.unpin()
        assert session.report().pinned_bytes == 0
        before = count.copy()
        assert torch.equal(run(net), expected)
        assert (count - before).made == 0 < (count - before).pinned
        session.park(keep=True)
    assert torch.equal(run(net), expected)
    assert all(type(p) is nn.Parameter and p.device.type == "cpu" for p in net.parameters())


@pytest.mark.usefixtures("count")
def test_pinned_memory_is_not_taken_from_a_resident_that_is_being_copied(monkeypatch):
    """Another session may ask for pinned memory while residents return to the device."""
    net = Net()
    expected = run(net)
    with streamed(net, "raw", 0.7) as session:
        for _ in range(2):
            session.park(keep=True)
            assert torch.equal(run(net), expected)
        session.park(keep=True)
        engine, copies = inside(session).engine, inside(session).copies
        copy_in, synchronize, running = engine.copy_in, engine.synchronize, []

        def begin(target, source, *rest):
            running.append(source.data_ptr())
            result = copy_in(target, source, *rest)
            copies.unpin_resident_copies(1 << 60)
            blocks = [copy.block for copy in copies._copies.values()]
            assert set(running) <= {block.data.data_ptr() for block in blocks if block.pinned}
            return result

        def end(*args):
            running.clear()
            synchronize(*args)

        with monkeypatch.context() as patch:
            patch.setattr(engine, "copy_in", begin)
            patch.setattr(engine, "synchronize", end)
            session.unpark()
        assert torch.equal(run(net), expected)


@pytest.mark.usefixtures("count")
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("way", ["budget", "park"])
def test_a_resident_that_was_written_to_unseen_keeps_its_value(codec, way):
    net, twin = Net(), Net()
    with streamed(net, codec, 0.8) as session:
        for share in (0.4, 0.8):
            session.set_budget(vram=int(share * size(net)))
        name = sorted(residents(session))[1]
        with torch.no_grad():
            net.get_submodule(name).weight.data[3, 4:6] += 0.5  # changes neither version nor pointer
            twin.get_submodule(name).weight[3, 4:6] += 0.5
        if way == "park":
            session.park(keep=True)
        session.set_budget(vram=int(0.4 * size(net)))
        assert torch.equal(run(net), run(twin))
        session.set_budget(vram=int(0.8 * size(net)))
        assert torch.equal(run(net), run(twin))
    assert torch.equal(run(net), run(twin))


@pytest.mark.parametrize("codec", CODECS)
def test_pinned_memory_keeps_to_its_budget_and_what_streams_comes_before_what_waits(count, codec):
    net = Net()
    expected, limit = run(net), int(0.5 * size(net))
    with streamed(net, codec, 0.8, ram=limit) as session:
        for share in (0.4, 0.8, 0.6, 0.4, 0.8):
            session.set_budget(vram=int(share * size(net)))
            report = session.report()
            assert report.pinned_bytes <= report.pinned_peak_bytes <= limit
            assert torch.equal(run(net), expected)
        session.set_budget(ram=limit // 4)
        assert session.report().pinned_bytes <= limit // 4
        assert torch.equal(run(net), expected)


@pytest.mark.usefixtures("count")
@pytest.mark.parametrize("codec", CODECS)
def test_a_failure_on_the_way_leaves_the_values(codec, monkeypatch):
    net = Net()
    expected = run(net)
    session = streamed(net, codec, 0.8)
    session.set_budget(vram=int(0.4 * size(net)))
    session.set_budget(vram=int(0.8 * size(net)))

    def fails(tensors):
        raise RuntimeError("the device is lost")

    with monkeypatch.context() as broken, contextlib.suppress(RuntimeError):
        broken.setattr("carom.core.placement.host_copies.fingerprint", fails)
        session.set_budget(vram=int(0.4 * size(net)))
    session.close()
    assert torch.equal(run(net), expected)
    assert inside(session).pinned_bytes == 0


def test_weights_are_gone_through_in_the_order_in_which_they_lie(monkeypatch):
    """What stays and what streams, in one go: a mapped file is read from the front to the back."""
    units_apart_from(monkeypatch)
    net = Net()
    whole = torch.empty(size(net) // 2, dtype=torch.bfloat16)
    at, places = 0, {}
    for name in sorted(dict(net.named_parameters()), reverse=True):  # not as the model has them
        tensor = net.get_parameter(name)
        place = whole[at : at + tensor.numel()].view(tensor.shape)
        tensor.data = place.copy_(tensor)
        places[tensor.data_ptr()], at = name, at + tensor.numel()
    seen: list[int] = []
    together, fill = ResidentPlacer._move_into_shared_buffer, block_fill.fill

    def watch_together(self, entries, modules):
        seen.extend(sorted(entry.tensor.data_ptr() for entry in entries))
        return together(self, entries, modules)

    def watch_fill(pieces, pool, mapped=None):
        pieces = list(pieces)
        seen.extend(sorted(source.data_ptr() for _, source in pieces))
        return fill(pieces, pool, mapped)

    monkeypatch.setattr(ResidentPlacer, "_move_into_shared_buffer", watch_together)
    monkeypatch.setattr(block_fill, "fill", watch_fill)
    expected = run(net)
    with streamed(net, "raw", 0.6) as session:
        assert len(residents(session)) >= 2 and len(seen) == len(places)
        assert seen == sorted(seen)
        assert torch.equal(run(net), expected)


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_no_change_of_bytes_has_the_same_fingerprint(data):
    numel = data.draw(st.integers(1, 3000))
    before = torch.randint(0, 4, (numel,), generator=torch.Generator().manual_seed(numel)).to(torch.int8)
    tensors = [before.clone(), torch.zeros(7, dtype=torch.float32)]
    found = fingerprint(tensors)
    assert torch.equal(found, fingerprint([tensor.clone() for tensor in tensors]))
    a, b = data.draw(st.integers(0, numel - 1)), data.draw(st.integers(0, numel - 1))
    way = data.draw(st.sampled_from(["swap", "add", "two", "rotate"]))
    changed = before.clone()
    if way == "swap":
        changed[[a, b]] = changed[[b, a]]
    elif way == "rotate":
        changed = changed.roll(a)
    else:
        changed[a] += 1
        changed[b] += 1 if way == "add" else -1
    same = torch.equal(changed, before)
    assert torch.equal(fingerprint([changed, tensors[1]]), found) == same


def test_what_lies_together_with_others_goes_home_at_once():
    """The memory of small residents is one buffer: it is free only when all of them have gone."""
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).requires_grad_(False)
    units = carve(net, granularity="layer", stream_trainable=True).units
    engine = make_engine(carom.SimulatedDevice())
    store = HostStore(HostArena(None, None), None, {})
    before = placement.Placement(engine, store, PinnedTier(engine, store))
    before.keep(units, [])
    before.undo_keeping_residents()
    after = placement.Placement(engine, store, PinnedTier(engine, store))
    after.device_tensors.take_over(before.device_tensors.hand_over())
    after.keep_matching_residents([], [], [], units[:1])
    assert not after.device_tensors.leaving and not after.device_tensors.moved
