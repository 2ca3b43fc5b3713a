"""`carom.stream(peers=)`: streamed units wait in the memory of other devices (simulated ones, here)."""

from __future__ import annotations

import copy
import dataclasses
import gc
import itertools

import carom
import pytest
import tests_aimdo_stand_in as aimdo
import tests_disk_harness as disk
import torch
from carom.core.common.errors import BudgetError, UnsupportedError, WeightsError
from carom.core.device.peer_link import PeerLink
from carom.core.device.simulated import SimulatedRaceError
from carom.core.device.simulated_links import SimulatedHost
from carom.core.placement import packed_residents
from carom.core.placement.peer_memory import PeerCopy
from carom.core.session.planner import Planner
from carom.tools.pack.writer import pack
from tests_inside import inside
from tests_limits import pack_small_weights
from tests_models import WideModel, wide_inputs
from torch import nn

WIDTH, DEPTH = 128, 8
WEIGHT = WIDTH * WIDTH * 4 + WIDTH * 4  # bytes of one layer
TIMINGS = ("late", "early", "random")
timings = pytest.mark.parametrize("timing", TIMINGS)


def devices(timing: str = "late", **settings) -> tuple[carom.SimulatedDevice, carom.SimulatedDevice]:
    first = carom.SimulatedDevice(seed=1, timing=timing, **settings)
    return first, carom.SimulatedDevice(seed=2, timing=timing, **settings)


class Layer(nn.Module):
    """A frozen layer with an adapter that `adapt` adds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.adapter = nn.Linear(WIDTH, WIDTH), None

    def forward(self, x):
        y = x + torch.tanh(self.linear(x))
        return y if self.adapter is None else y + self.adapter(x)


def make(dtype=torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(DEPTH))).to(dtype).requires_grad_(False)


def adapt(model: nn.Module, device) -> nn.Module:
    torch.manual_seed(1)
    for layer in model:
        layer.adapter = nn.Sequential(nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False))
        layer.adapter.to(device)
    return model


def infer(model, device, dtype=torch.float32, steps: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        inputs = [torch.randn(3, WIDTH, generator=generator).to(device, dtype) for _ in range(steps)]
        return [model(x).cpu() for x in inputs]


def train(model, device, steps: int = 4) -> list[torch.Tensor]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    found, generator = [], torch.Generator().manual_seed(7)
    for _ in range(steps):
        x = torch.randn(3, WIDTH, generator=generator).to(device).requires_grad_()
        loss = model(x).square().mean()
        loss.backward()
        found += [loss.detach().cpu(), x.grad.cpu()]
        optimizer.step()
        optimizer.zero_grad()
    return found + [parameter.detach().cpu() for parameter in trained]


def same(mine, theirs) -> bool:
    return len(mine) == len(theirs) and all(map(torch.equal, mine, theirs))


def stream(model, device, peers, **settings):
    return carom.stream(
        model, device=device, peers=peers, **{"vram": 3 * WEIGHT, "granularity": "layer", **settings}
    )


@pytest.fixture
def small(monkeypatch):
    """Lets the tests' small tensors be packed."""
    pack_small_weights(monkeypatch)


def engines(session):
    """The engines of the session's device and of its first peer."""
    found = inside(session)
    return found.engine, found.manager.host.peers.peers[0].engine


# -- exactness, and bytes by link


@timings
@pytest.mark.parametrize("job", [infer, train])
def test_a_session_with_a_peer_computes_what_resident_weights_compute(job, timing):
    first, second = devices(timing)
    twin, model = make(), make()
    if job is train:
        adapt(twin, "cpu")
    expected = job(twin, "cpu")
    with stream(model, first, [(second, "1GiB")]) as session:
        if job is train:
            adapt(model, session.device)
        assert same(job(model, session.device), expected)
        report = session.report()
        assert 0 < report.peer_bytes < report.streamed_bytes
        assert second.ledger.allocated == report.peer_bytes
    assert second.ledger.allocated == 0
    assert same([p.cpu() for p in model.parameters()], list(twin.parameters()))


@timings
def test_each_unit_crosses_one_link_and_both_links_carry_their_share(timing):
    first, second = devices(timing)
    model = make()
    with stream(model, first, [(second, "1GiB")]) as session:
        infer(model, session.device)
        engine, _ = engines(session)
        before = engine.bytes_in, engine.peer_bytes_in
        infer(model, session.device, steps=3)
        report = session.report()
        from_host, from_peer = engine.bytes_in - before[0], engine.peer_bytes_in - before[1]
    streamed = DEPTH - len(report.resident_by_choice)
    assert from_host + from_peer == 3 * streamed * WEIGHT
    assert abs(from_host - from_peer) <= 3 * WEIGHT  # links of equal rates
    assert report.wire_bytes_per_step == from_host / 3
    assert report.peer_wire_bytes_per_step == from_peer / 3
    assert report.transfers_per_weight == 1.0


def test_two_links_take_about_half_the_time_of_one():
    seconds = {}
    for peers in (False, True):
        first, second = devices(link_bytes_per_second=1e8, peer_bytes_per_second=1e8)
        model = make()
        with stream(model, first, [(second, "1GiB")] if peers else ()) as session:
            infer(model, session.device, steps=6)
            seconds[peers] = session.report().step_seconds
    assert seconds[True] < 0.65 * seconds[False]


def test_each_link_has_a_copy_under_way_while_a_unit_is_used():
    rate = 1e8
    seconds = WEIGHT / rate  # of a unit over either link
    settings = {
        "link_bytes_per_second": rate, "peer_bytes_per_second": rate, "kernel_seconds": 0.0,
        "flops": 2 * 3 * WIDTH * WIDTH / (0.5 * seconds),  # a unit is used for half of that time
    }  # fmt: skip
    first, second = devices(**settings)
    model = nn.Sequential(*(layer.linear for layer in make()))
    with stream(model, first, [(second, "1GiB")], vram=4 * WEIGHT) as session:
        infer(model, session.device, steps=6)
        report = session.report()
        assert session.plan.slots == 3
        assert report.step_seconds < 1.1 * DEPTH * 0.5 * seconds


def test_a_link_that_is_much_faster_than_the_hosts_is_not_held_up_by_it():
    rate = 2e8
    first, second = devices(link_bytes_per_second=rate / 6, peer_bytes_per_second=rate, kernel_seconds=0.0)
    with stream(make(), first, [(second, "1GiB")]) as session:
        model = session.module
        infer(model, session.device, steps=6)
        report = session.report()
        assert report.step_seconds < 1.1 * report.raw_bytes_per_step / rate


def test_the_rate_of_host_memory_that_cards_share_leaves_more_to_a_peer():
    held = []
    for host in (SimulatedHost(), SimulatedHost(8e9)):
        first = carom.SimulatedDevice(host=host)
        with stream(make(), first, [(carom.SimulatedDevice(seed=2, host=host), "1GiB")]) as session:
            held.append(session.report().peer_bytes)
    assert 0 < held[0] < held[1]


def test_two_peers_hold_weights_together():
    first, second = devices()
    third = carom.SimulatedDevice(seed=3)
    expected, model = infer(make(), "cpu"), make()
    with stream(model, first, [(second, "1GiB"), (third, 2 * WEIGHT)]) as session:
        assert same(infer(model, session.device), expected)
        held = second.ledger.allocated, third.ledger.allocated
        assert held[0] >= 2 * WEIGHT and 0 < held[1] <= 2 * WEIGHT
        assert session.report().peer_bytes == sum(held)


def test_every_kind_of_timing_of_one_device_goes_with_every_kind_of_the_other():
    expected = infer(make(), "cpu")
    for mine, other in itertools.permutations(TIMINGS, 2):
        first, second = carom.SimulatedDevice(timing=mine), carom.SimulatedDevice(timing=other)
        model = make()
        with stream(model, first, [(second, "1GiB")]) as session:
            assert same(infer(model, session.device), expected)


# -- which weights wait on a peer


def test_without_p2p_weights_stay_in_pinned_memory_and_the_report_says_why():
    host = SimulatedHost(50e9)
    first = carom.SimulatedDevice(p2p=False, host=host)
    second = carom.SimulatedDevice(p2p=False, host=host)
    model = make()
    with stream(model, first, [(second, "1GiB")]) as session:
        assert session.report().peer_bytes == 0
        assert any("stay on the host" in note for note in session.report().notes)
    assert second.ledger.allocated == 0


def test_without_p2p_the_peer_takes_what_the_ram_budget_does_not_hold():
    first, second = devices(p2p=False)
    expected, model = infer(make(), "cpu"), make()
    with stream(model, first, [(second, "1GiB")], ram=2 * WEIGHT) as session:
        assert session.report().peer_bytes > 3 * WEIGHT
        assert same(infer(model, session.device), expected)


@pytest.mark.parametrize("ram, some", [(3, True), (50, False)])
def test_without_p2p_the_peer_takes_what_the_cache_of_a_file_does_not_hold(tmp_path, ram, some):
    first, second = devices(p2p=False)
    path, model = disk.save(make(), tmp_path), make().to("meta")
    with stream(model, first, [(second, "1GiB")], weights=path, ram=ram * WEIGHT) as session:
        assert (session.report().peer_bytes > 0) == some


def test_a_slow_peer_gets_fewer_weights():
    held = []
    for rate in (25e9, 5e9):
        first, second = devices(peer_bytes_per_second=rate)
        with stream(make(), first, [(second, "1GiB")]) as session:
            held.append(session.report().peer_bytes)
    assert 0 < held[1] < held[0]


def test_units_of_a_peer_are_not_pinned_and_make_room_for_others():
    first, second = devices()
    ram = 6 * (WEIGHT + 4096)  # pages are pinned as a whole
    with stream(make(), first, (), ram=ram) as session:
        assert session.report().pageable_bytes > 0
    with stream(make(), first, [(second, 2 * WEIGHT)], ram=ram) as session:
        report = session.report()
        assert report.peer_bytes == 2 * WEIGHT
        assert report.pageable_bytes == 0
        assert report.pinned_bytes <= ram
        assert not any("pinning" in note for note in report.notes)


def test_if_ram_is_a_little_short_the_host_still_has_its_share():
    first, second = devices()
    ram = 6 * (WEIGHT + 4096)
    with stream(make(), first, [(second, "1GiB")], ram=ram) as session:
        report = session.report()
        assert report.pageable_bytes == 0
        assert report.pinned_bytes >= 3 * WEIGHT and report.peer_bytes >= 3 * WEIGHT


def test_a_peer_that_runs_out_of_memory_gets_fewer_units():
    first, _ = devices()
    second = carom.SimulatedDevice(seed=2, memory_bytes=1 << 30)
    expected, model = infer(make(), "cpu"), make()
    # the memory is free when the links are measured, and another program takes it afterwards
    session = stream(model, first, [(second, "90%")])
    with session:
        session.park()
        second.ledger.others = (1 << 30) - WEIGHT - 4096
        session.unpark()
        assert session.report().peer_bytes == WEIGHT
        assert any("had memory for" in note for note in session.report().notes)
        assert same(infer(model, session.device), expected)


@pytest.mark.parametrize("size", [2 * WEIGHT, f"{2 * WEIGHT}", "50%", "auto"])
def test_a_peer_holds_at_most_the_bytes_that_were_named(size):
    first, _ = devices()
    second = carom.SimulatedDevice(seed=2, memory_bytes=4 * WEIGHT if size == "50%" else 1 << 30)
    model = make()
    with stream(model, first, [(second, size)]) as session:
        held = session.report().peer_bytes
        assert held == 2 * WEIGHT if size != "auto" else held > 2 * WEIGHT


def test_trainable_weights_never_wait_on_a_peer():
    first, second = devices()
    twin, model = make().requires_grad_(True), make().requires_grad_(True)
    expected = train(twin, "cpu")
    with stream(model, first, [(second, "1GiB")], training="stream") as session:
        assert session.report().peer_bytes == 0
        assert any("require gradients" in note for note in session.report().notes)
        assert same(train(model, session.device), expected)


def test_weights_that_begin_to_train_leave_the_peer():
    first, second = devices()
    twin, model = make(), make()
    with stream(model, first, [(second, "1GiB")]) as session:
        infer(model, session.device)
        engine, _ = engines(session)
        for each in (model, twin):
            each.requires_grad_(True)
        infer(model, session.device)
        before = engine.peer_bytes_in
        assert same(infer(model, session.device), infer(twin, "cpu"))
        assert engine.peer_bytes_in == before


def test_with_peers_weights_are_in_torchs_memory_and_not_in_a_vbar(monkeypatch):
    first, second = devices()
    aimdo.install(monkeypatch, aimdo.Driver(first, "cuda"))
    with stream(make(), first, ()) as session:
        assert session.report().pool == "aimdo"
    expected, model = infer(make(), "cpu"), make()
    with stream(model, first, [(second, "1GiB")]) as session:
        report = session.report()
        assert report.pool == "torch" and "other devices" in report.pool_reason
        assert report.peer_bytes > 0
        assert same(infer(model, session.device), expected)


# -- values


@timings
def test_values_that_are_written_arrive(timing):
    first, second = devices(timing)
    twin, model = make(), make()
    with stream(model, first, [(second, "1GiB")]) as session:
        infer(model, session.device)
        for number, name in enumerate(dict(twin.named_parameters())):
            value = torch.full_like(twin.get_parameter(name), 0.01 * number)
            twin.get_parameter(name).copy_(value)
            session.write(name, value)
            assert torch.equal(session.read(name), value)
        assert same(infer(model, session.device), infer(twin, "cpu"))
        with torch.no_grad():
            for layer, other in zip(model, twin, strict=True):
                layer.linear.weight.mul_(0.5)
                other.linear.weight.mul_(0.5)
        session.refresh()
        for _ in range(2):
            assert same(infer(model, session.device), infer(twin, "cpu"))
        assert session.report().peer_bytes > 0
        state = model.state_dict()
        assert all(torch.equal(state[name].cpu(), value) for name, value in twin.state_dict().items())
    assert same([p.cpu() for p in model.parameters()], list(twin.parameters()))


def test_changed_values_are_fetched_from_the_peer_again():
    first, second = devices()
    model = make()
    with stream(model, first, [(second, "1GiB")]) as session:
        infer(model, session.device)
        engine, peer = engines(session)
        session.refresh()
        uploads, before = peer.bytes_in, engine.peer_bytes_in
        infer(model, session.device, steps=2)
        held = session.report().peer_bytes
        assert peer.bytes_in - uploads == held  # once, not once a step
        assert abs(engine.peer_bytes_in - before - 2 * held) <= 2 * WEIGHT  # units are fetched ahead


def test_a_change_of_layout_gives_memory_back_and_takes_it_again():
    first, second = devices()
    expected, model = infer(make(), "cpu"), make()
    with stream(model, first, [(second, "1GiB")]) as session:
        held = second.ledger.allocated
        assert same(infer(model, session.device), expected)
        session.set_budget(vram="1GiB")
        assert second.ledger.allocated == 0
        assert same(infer(model, session.device), expected)
        session.set_budget(vram=3 * WEIGHT)
        assert second.ledger.allocated == held
        assert same(infer(model, session.device), expected)
        for keep in (False, True):
            session.park(keep)
            assert second.ledger.allocated == 0
            assert same(infer(model, session.device), expected)
            assert second.ledger.allocated == held
    assert second.ledger.allocated == 0


def test_a_session_that_is_dropped_gives_the_memory_of_the_peer_back():
    first, second = devices()
    model = make()
    session = stream(model, first, [(second, "1GiB")])
    infer(model, session.device)
    session.close(discard=True)
    del session, model
    gc.collect()
    assert second.ledger.allocated == 0


# -- packed weights, and weights from a file


@timings
def test_packed_weights_wait_and_cross_packed(timing, small):
    first, second = devices(timing)
    expected, model = infer(make(torch.bfloat16), "cpu", torch.bfloat16), make(torch.bfloat16)
    settings = {"codec": "lossless", "vram": 4 * WEIGHT, "granularity": "block"}
    model = nn.Sequential(*(nn.Sequential(*model[at : at + 2]) for at in range(0, DEPTH, 2)))
    with stream(model, first, [(second, "1GiB")], **settings) as session:
        assert same(infer(model, session.device, torch.bfloat16), expected)
        report = session.report()
        assert report.packed_units > 0
        assert 0 < report.peer_wire_bytes_per_step == report.peer_bytes
        assert report.peer_bytes + report.waiting_bytes < 0.9 * report.streamed_bytes
        name = "3.1.linear.weight"
        value = torch.full((WIDTH, WIDTH), 0.25, dtype=torch.bfloat16)
        twin = copy.deepcopy(model.state_dict())
        session.write(name, value)
        twin[name] = value
        other = nn.Sequential(*(nn.Sequential(Layer(), Layer()) for _ in range(DEPTH // 2)))
        other.to(torch.bfloat16).load_state_dict(twin)
        wanted = infer(other, "cpu", torch.bfloat16)
        for _ in range(2):
            assert same(infer(model, session.device, torch.bfloat16), wanted)


@timings
@pytest.mark.parametrize("ram", [2, 50])
def test_weights_of_a_file_are_read_once_for_a_peer(tmp_path, timing, ram):
    first, second = devices(timing)
    twin = make()
    settings = {"weights": disk.save(twin, tmp_path), "ram": ram * WEIGHT}
    expected, model = infer(twin, "cpu"), make().to("meta")
    with stream(model, first, [(second, 3 * WEIGHT)], **settings) as session:
        infer(model, session.device, steps=3)
        engine, peer = engines(session)
        before = engine.peer_bytes_in, peer.bytes_in
        assert same(infer(model, session.device), expected)
        report = session.report()
        assert 2 * WEIGHT <= report.peer_bytes <= 3 * WEIGHT
        assert engine.peer_bytes_in - before[0] == 4 * report.peer_bytes
        assert peer.bytes_in == before[1]
        assert report.peer_wire_bytes_per_step == report.peer_bytes
        for name in dict(twin.named_parameters()) if ram > 2 else ("1.linear.bias", "2.linear.bias"):
            value = torch.rand(twin.get_parameter(name).shape)
            twin.get_parameter(name).copy_(value)
            session.write(name, value)
            assert torch.equal(session.read(name), value)
        assert same(infer(model, session.device), infer(twin, "cpu"))
        session.set_budget(vram="1GiB")
        assert second.ledger.allocated == 0
        assert same(infer(model, session.device), infer(twin, "cpu"))


@timings
def test_packed_weights_of_a_file_cross_packed(tmp_path, timing, small):
    first, second = devices(timing)
    twin = make(torch.bfloat16)
    path = tmp_path / "packed.safetensors"
    assert pack(disk.save(twin, tmp_path), path, codec="lossless").codecs["lossless"]
    expected, model = infer(twin, "cpu", torch.bfloat16), make(torch.bfloat16).to("meta")
    with stream(model, first, [(second, "1GiB")], weights=path, vram=2 * WEIGHT, ram=WEIGHT) as session:
        for _ in range(2):
            assert same(infer(model, session.device, torch.bfloat16), expected)
        report = session.report()
        assert report.packed_units > 0 and report.peer_bytes > 0
        assert 0 < report.peer_wire_bytes_per_step == report.peer_bytes
        assert report.peer_bytes < 0.9 * report.streamed_bytes
        session.set_budget(ram="1GiB")
        for name in dict(twin.named_parameters()):  # also all of a unit's
            value = torch.rand(twin.get_parameter(name).shape).to(torch.bfloat16)
            twin.get_parameter(name).copy_(value)
            session.write(name, value)
        expected = infer(twin, "cpu", torch.bfloat16)
        assert same(infer(model, session.device, torch.bfloat16), expected)


def test_units_that_stay_on_the_device_packed_take_no_memory_of_a_peer(small, monkeypatch):
    settings = Planner.settings
    monkeypatch.setattr(packed_residents, "LEAST_UNIT", 1)
    # the plan is that of a session whose first steps were measured

    def measured(self, wanted):
        packing = wanted.packing and dataclasses.replace(wanted.packing, residents=True)
        return settings(self, dataclasses.replace(wanted, packing=packing))

    monkeypatch.setattr(Planner, "settings", measured)
    first, second = devices(unpacks=True)
    torch.manual_seed(0)
    model = WideModel(8).requires_grad_(False)
    block = sum(parameter.nbytes for parameter in model.parameters()) // 8
    with torch.no_grad():
        expected = model(wide_inputs())
        settings_ = {"vram": 6 * block, "codec": "lossless", "granularity": "block"}
        with stream(model, first, [(second, "1GiB")], **settings_) as session:
            assert torch.equal(model(wide_inputs()), expected)
            report = session.report()
            assert report.resident_packed_units > 0 and report.peer_bytes > 0
            assert second.ledger.allocated == report.peer_bytes


# -- missing waits are found


@pytest.mark.parametrize("timing", TIMINGS)
def test_a_copy_that_does_not_wait_for_the_peers_memory_to_be_filled_is_found(timing, monkeypatch):
    def copy_at_once(self, target, source, after, timed):
        event, marks = self.peer.link.copy(target, source, after, timed)
        self._filled, self._read = (), (event,)
        return event, marks

    first, second = devices(timing)
    model = make()
    monkeypatch.setattr(PeerCopy, "copy", copy_at_once)
    with stream(model, first, [(second, "1GiB")]) as session:
        infer(model, session.device)
        session.refresh()
        with pytest.raises(SimulatedRaceError, match="another device's memory"):
            infer(model, session.device)


@pytest.mark.parametrize("timing", TIMINGS)
def test_a_copy_that_does_not_wait_for_the_slots_readers_is_found(timing, monkeypatch):
    def copy_at_once(self, target, source, after, timed):
        return self._engine.copy_from_peer(self._stream, self._peer_stream, target, source, (), timed)

    first, second = devices(timing)
    model = make()
    monkeypatch.setattr(PeerLink, "copy", copy_at_once)
    with (
        pytest.raises(SimulatedRaceError, match="slot is overwritten"),
        stream(model, first, [(second, "1GiB")]) as session,
    ):
        infer(model, session.device)


@pytest.mark.parametrize("timing", TIMINGS)
def test_a_fill_that_does_not_wait_for_the_last_copy_is_found(timing):
    first, second = devices(timing)
    model = make()
    with stream(model, first, [(second, "1GiB")]) as session:
        infer(model, session.device)
        for backing in inside(session).placement.streamed:
            if backing.peer is not None:
                backing.peer._read = ()
        session.refresh()
        with pytest.raises(SimulatedRaceError):
            infer(model, session.device)


# -- what is refused


def test_errors_name_what_is_wrong():
    first, second = devices()
    cases = (
        (first, [(first, "1GiB")], UnsupportedError, "session's device"),
        (first, [(second, "1GiB"), (second, "1GiB")], UnsupportedError, "named twice"),
        (first, [("cpu", "1GiB")], UnsupportedError, "wait in the memory of 'cpu' anyway"),
        (first, [("cuda:77", "1GiB")], UnsupportedError, "peers=: device='cuda:77'"),
        (first, [("nowhere", "1GiB")], UnsupportedError, "not a device torch knows"),
        (first, [(second, "much")], BudgetError, "peers='much' is not a size"),
        (first, [(second, -1)], BudgetError, "out of range"),
        (first, [(second, "150%")], BudgetError, "more than 100 %; 'auto' takes what is free"),
        (first, [second], UnsupportedError, "write peers="),
        (first, "cuda:1", UnsupportedError, "write peers="),
        ("cpu", [(second, "1GiB")], UnsupportedError, "leave peers= out"),
    )
    for device, peers, kind, words in cases:
        model = make()
        with pytest.raises(kind, match=words):
            stream(model, device, peers)
        assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    with pytest.raises(UnsupportedError, match="peers= does not go with group="):
        stream(make(), first, [(second, "1GiB")], group="world")


def test_a_file_that_cannot_be_read_is_an_error_that_names_the_weight(tmp_path, monkeypatch):
    first, second = devices()
    path = disk.save(make(), tmp_path)
    model = make().to("meta")
    half = path.stat().st_size // 2
    disk.Faults(monkeypatch, lambda offset: OSError(5, "Input/output error") if offset > half else None)
    with stream(model, first, [(second, "1GiB")], weights=path, ram=2 * WEIGHT) as session:
        for _ in range(3):
            with pytest.raises(WeightsError):
                infer(model, session.device)
    assert second.ledger.allocated == 0
