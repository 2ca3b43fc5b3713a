"""A switch: a session is parked and returns to the layout that was there before. What crosses and what is planned,
counted."""

from __future__ import annotations

import mmap
import time
from dataclasses import dataclass, field

import carom
import pytest
import torch
from carom.core.device.simulated import SimulatedEngine
from carom.core.host.arena import HostArena
from carom.core.placement import host_copies, packer, placement
from carom.core.placement.packed_tensor import PackedTensor
from carom.core.session import carving_cache
from tests_inside import inside
from tests_limits import units_apart_from
from tests_residual import Residual as Net
from tests_residual import size
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

WIDTH = 192
CODECS = ["raw", "lossless"]
X = torch.linspace(-1, 1, 2 * WIDTH).reshape(2, WIDTH).to(torch.bfloat16)


def run(net):
    with torch.no_grad():
        return net(X)


def streamed(net, share, codec="raw", **options):
    options = {"device": carom.SimulatedDevice(), "granularity": "layer"} | options
    return carom.stream(net, vram=int(share * size(net)), codec=codec, **options)


@pytest.fixture
def carved(monkeypatch):
    """The divisions of a module into units that were made."""
    made: list[object] = []
    carve = carving_cache.carve
    monkeypatch.setattr(carving_cache, "carve", lambda *a, **k: (made.append(1), carve(*a, **k))[1])
    return made


@pytest.mark.parametrize("codec", CODECS)
def test_an_unchanged_module_is_not_divided_anew_whatever_its_budget(carved, codec):
    net = Net()
    expected = run(net)
    with streamed(net, 0.7, codec) as session:
        plan = session.plan
        least = inside(session).manager.ledger.least_bytes
        carved.clear()
        for keep in (True, False):
            session.park(keep=keep)
            session.set_budget(vram=int(0.7 * size(net)))
            session.unpark()
            assert session.plan.resident == plan.resident
            assert torch.equal(run(net), expected)
        session.set_budget(vram=int(0.5 * size(net)))
        fallen = session.plan.resident
        session.park(keep=True)
        session.set_budget(vram=int(0.5 * size(net)))
        session.unpark()
        assert session.plan.resident == fallen, "the residents that a fall of the budget left"
        session.set_budget(vram=int(0.6 * size(net)))
        assert torch.equal(run(net), expected)
        assert inside(session).manager.ledger.least_bytes == least and not carved


@pytest.mark.parametrize("change", ["weight", "module", "strides", "gradient"])
def test_a_module_that_changed_meanwhile_is_divided_anew(carved, change):
    net = Net()
    with streamed(net, 0.7) as session:
        run(net)
        session.park(keep=True)
        carved.clear()
        linear = net.blocks[2][0]
        if change == "weight":
            linear.weight = nn.Parameter(torch.zeros_like(linear.weight), requires_grad=False)
        elif change == "module":
            net.blocks.append(nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16).requires_grad_(False))
        elif change == "strides":
            linear.weight.data = linear.weight.data.t().contiguous().t()
        else:
            linear.weight.requires_grad_(True)
        expected = run(net)
        assert carved and not session.parked
    assert torch.equal(run(net), expected)


@dataclass
class Crossings:
    """What crosses the link and what is encoded."""

    out: int = 0  # bytes from device to host
    moved: int = 0  # tensors that cross one by one
    into: list[int] = field(default_factory=list)  # bytes of each copy from host to device
    encoded: int = 0  # weights
    decoded: list[int] = field(default_factory=list)  # weights that were decoded one by one

    def clear(self):
        self.__init__()


@pytest.fixture
def crossings(monkeypatch):
    found = Crossings()
    copy_in, copy_out, move = SimulatedEngine.copy_in, SimulatedEngine.copy_out, SimulatedEngine.move
    pack, value = packer.pack, placement.HostStore.value

    def counting_in(self, target, source, after, timed):
        found.into.append(source.numel())
        return copy_in(self, target, source, after, timed)

    def counting_out(self, target, source):
        found.out += source.numel() * source.element_size()
        return copy_out(self, target, source)

    def counting_move(self, tensor, to):
        if self.locate(tensor) != to:
            found.moved += 1
        return move(self, tensor, to)

    def counting_pack(*args):
        found.encoded += 1
        return pack(*args)

    def counting_value(self, tensor, device):
        found.moved += 1
        return value(self, tensor, device)

    monkeypatch.setattr(SimulatedEngine, "copy_in", counting_in)
    monkeypatch.setattr(SimulatedEngine, "copy_out", counting_out)
    monkeypatch.setattr(SimulatedEngine, "move", counting_move)
    monkeypatch.setattr(placement.HostStore, "value", counting_value)
    monkeypatch.setattr(packer, "pack", counting_pack)
    decode = PackedTensor.value
    monkeypatch.setattr(PackedTensor, "value", lambda *a: (found.decoded.append(1), decode(*a))[1])
    return found


def resident_bytes(session):
    units = inside(session).units
    return sorted(units[index].nbytes for index in session.plan.resident)


@pytest.fixture(params=[1, 8 << 20], ids=["apart", "small"])
def small_unit(request, monkeypatch):
    """Whether each resident unit has a buffer of its own, or all share one."""
    units_apart_from(monkeypatch, request.param)
    return request.param


@pytest.mark.parametrize("share", [0.7, 1.5])
@pytest.mark.parametrize("codec", CODECS)
def test_a_clean_park_copies_nothing_and_a_return_copies_each_unit_once(
    crossings, small_unit, codec, share, monkeypatch
):
    net = Net()
    expected = run(net)
    trimmed: list[object] = []
    monkeypatch.setattr(placement, "return_freed_memory", lambda: trimmed.append(1))
    with streamed(net, share, codec) as session:
        assert torch.equal(run(net), expected) and trimmed
        resident = resident_bytes(session)
        crossings.clear()
        session.park(keep=True)
        assert inside(session).engine.allocated == 0
        assert crossings.out == sum(resident) and not crossings.encoded and not crossings.moved, (
            "put aside as they are"
        )
        for _ in range(3):
            crossings.clear()
            trimmed.clear()
            session.unpark()
            assert not trimmed, "the C allocator is searched for free memory only where some was freed"
            assert sorted(crossings.into) == (resident if small_unit == 1 else [sum(resident)])
            assert not (crossings.moved or crossings.encoded or crossings.decoded or crossings.out)
            assert torch.equal(run(net), expected)
            crossings.clear()
            session.park(keep=True)
            assert crossings == Crossings(), "a clean park"
            assert inside(session).engine.allocated == 0
            assert torch.equal(net.blocks[3][0].weight.clone(), Net().blocks[3][0].weight)
    assert torch.equal(run(net), expected)
    assert inside(session).pinned_bytes == 0


@pytest.mark.parametrize("codec", CODECS)
def test_what_streamed_before_it_became_resident_is_put_aside_and_returns_from_the_block_it_streamed_from(
    crossings, codec, monkeypatch
):
    units_apart_from(monkeypatch)
    net = Net()
    expected = run(net)
    with streamed(net, 0.5, codec) as session:
        session.set_budget(vram=int(0.8 * size(net)))
        resident = resident_bytes(session)
        session.park(keep=True)
        for _ in range(2):
            crossings.clear()
            session.unpark()
            assert len(crossings.into) == len(resident)
            assert not (crossings.moved or crossings.encoded or crossings.decoded or crossings.out)
            assert sum(crossings.into) <= (1 if codec == "raw" else 0.95) * sum(resident)
            assert torch.equal(run(net), expected)
            crossings.clear()
            session.park(keep=True)
            assert crossings == Crossings()
    assert torch.equal(run(net), expected)


@pytest.mark.parametrize("parked", [True, False])
@pytest.mark.parametrize("codec", CODECS)
def test_a_larger_budget_keeps_all_residents_and_copies_those_that_come_and_no_other(
    crossings, codec, parked, monkeypatch
):
    units_apart_from(monkeypatch)
    net = Net(8)
    expected = run(net)
    with streamed(net, 0.5, codec) as session:
        run(net)
        session.park(keep=True)
        session.unpark()
        before = session.plan.resident.keys()
        for share in (0.62, 0.74):
            if parked:
                session.park(keep=True)
            crossings.clear()
            session.set_budget(vram=int(share * size(net)))
            session.unpark()
            assert session.plan.resident.keys() > before and not crossings.encoded and not crossings.out
            assert len(crossings.into) == len(session.plan.resident) - (0 if parked else len(before))
            assert torch.equal(run(net), expected)
            before = session.plan.resident.keys()
    assert torch.equal(run(net), expected)


@pytest.mark.parametrize("codec", CODECS)
def test_a_resident_that_was_written_to_unseen_is_copied_again_and_no_other(crossings, small_unit, codec):
    net, twin = Net(), Net()
    with streamed(net, 0.7, codec) as session:
        run(net)
        for _ in range(2):
            session.park(keep=True)
            session.unpark()
        units = inside(session).units
        unit = units[sorted(session.plan.resident)[1]]
        with torch.no_grad():
            for model in (net, twin):
                model.get_submodule(unit.name).weight.data[3, 4:6] += (
                    0.5  # changes neither version nor pointer
                )
        crossings.clear()
        session.park(keep=True)
        assert crossings.out == (unit.nbytes if small_unit == 1 else sum(resident_bytes(session)))
        assert torch.equal(run(net), run(twin))
        with torch.no_grad():
            for model in (net, twin):
                model.get_submodule(unit.name).weight.data[5] -= 1
        session.park(keep=True)
        for model in (net, twin):  # while it waits on the host
            model.get_submodule(unit.name).weight.data[7] *= 2
        assert torch.equal(run(net), run(twin))
        session.park(keep=True)
        assert torch.equal(run(net), run(twin))
    assert torch.equal(run(net), run(twin))


@pytest.mark.parametrize("codec", CODECS)
def test_residents_are_put_aside_as_they_are_only_as_far_as_ram_allows(crossings, small_unit, codec):
    net = Net()
    expected = run(net)
    with streamed(net, 0.7, codec) as session:
        ram = session.report().pinned_bytes + sum(resident_bytes(session)) // 2
    with streamed(net, 0.7, codec, ram=ram) as session:
        for _ in range(3):
            session.park(keep=True)
            assert session.report().pinned_bytes <= session.report().pinned_peak_bytes <= ram
            assert inside(session).engine.allocated == 0
            assert torch.equal(run(net), expected)
            assert session.report().pinned_bytes <= session.report().pinned_peak_bytes <= ram
    assert torch.equal(run(net), expected)


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_the_proof_that_a_resident_did_not_change_takes_few_operators_whatever_its_tensors(monkeypatch):
    units_apart_from(monkeypatch)
    counted = []
    fingerprint = host_copies.fingerprint

    def counting(tensors):
        with Operators() as operators:
            found = fingerprint(tensors)
        counted.append(operators.count)
        return found

    monkeypatch.setattr(host_copies, "fingerprint", counting)
    net = Net()
    with streamed(net, 0.8, granularity="block") as session:
        run(net)
        session.park(keep=True)
        session.unpark()
        session.park(keep=True)
        counted.clear()
        session.unpark()
        session.park(keep=True)
        assert len(counted) == len(session.plan.resident) >= 2, "one proof for each unit of four tensors"
        assert max(counted) <= 36


def wait_for_spares(session):
    spares = inside(session).manager.host.spares
    while spares.busy:
        time.sleep(0.001)


@pytest.mark.parametrize("codec", CODECS)
def test_the_first_park_pins_nothing_where_its_memory_was_prepared_during_the_steps(
    crossings, small_unit, codec, monkeypatch
):
    net = Net()
    expected = run(net)
    with streamed(net, 0.7, codec) as session:
        before = session.report().pinned_bytes
        session.prepare_park()
        wait_for_spares(session)
        resident = sum(resident_bytes(session))
        prepared = session.report().pinned_bytes - before
        assert resident <= prepared <= resident + len(session.plan.resident) * mmap.PAGESIZE
        session.prepare_park()
        wait_for_spares(session)
        assert session.report().pinned_bytes == before + prepared, "once"
        assert torch.equal(run(net), expected)
        pinned: list[object] = []
        pin = HostArena.pin
        monkeypatch.setattr(HostArena, "pin", lambda *a: (pinned.append(a[1]), pin(*a))[1])
        session.park(keep=True)
        assert not [block for block in pinned if not block.pinned] and len(pinned) == 0
        assert crossings.out == resident and session.report().pinned_bytes == before + prepared
        session.unpark()
        session.prepare_park()
        wait_for_spares(session)
        assert session.report().pinned_bytes == before + prepared, "all residents have copies"
        assert torch.equal(run(net), expected)
    assert inside(session).pinned_bytes == 0


def test_a_park_is_prepared_in_the_room_that_the_caller_has(small_unit):
    net = Net()
    with streamed(net, 0.7) as session:
        run(net)
        before = session.report().pinned_bytes
        session.prepare_park(room=1000)  # less than any unit takes
        wait_for_spares(session)
        assert session.report().pinned_bytes == before
        session.prepare_park()
        session.set_budget(vram=int(0.4 * size(net)))
        assert not inside(session).manager.host.spares.busy, "a layout waits for blocks that are being made"


def test_memory_that_was_prepared_for_a_park_gives_way_to_streamed_weights_and_ends_with_the_session(
    small_unit,
):
    net = Net()
    expected = run(net)
    with streamed(net, 0.7) as session:
        ram = session.report().pinned_bytes + sum(resident_bytes(session)) + (1 << 14)
    with streamed(net, 0.7, ram=ram) as session:
        session.prepare_park()
        wait_for_spares(session)
        assert session.report().pinned_bytes <= ram
        session.set_budget(vram=int(0.4 * size(net)))
        assert session.report().pageable_bytes == 0 and session.report().pinned_bytes <= ram
        assert torch.equal(run(net), expected)
        session.prepare_park()
    wait_for_spares(session)
    assert inside(session).pinned_bytes == 0
