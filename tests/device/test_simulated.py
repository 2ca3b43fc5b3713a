"""The simulated device finds what is broken: with any one wait left out, some legal timing fails a test.

Each test breaks the engine on purpose and demands a `SimulatedRaceError`, or a result that differs.
"""

from __future__ import annotations

import carom
import pytest
import tests_harness as harness
import tests_models as models
import torch
import torch.nn.functional as F
from carom.core.device.pool import Pool
from carom.core.device.simulated import SimulatedDevice, SimulatedEngine, SimulatedRaceError
from carom.core.streaming.forwards import Forwards
from carom.core.streaming.unit import StreamedUnit
from tests_inside import inside

CASE = models.CASES["stack"]
TIMINGS = ("late", "early", "random")


def inference(model):
    with torch.no_grad():
        return [model(CASE.inputs(seed)) for seed in range(4)]


def training(model):
    seen = []
    for seed in range(3):
        x = CASE.inputs(seed).requires_grad_()
        y = model(x)
        harness.loss_of(y).backward()
        seen += [y.detach(), x.grad]
    return seen


RUNS = {
    "inference": ("none", inference),
    "training": ("none", training),
    "checkpointed": ("non-reentrant", training),
}
on_every_run = pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)


def outcome(run, timing: str, slots: int = 2, seed: int = 0) -> str:
    """ "right", "wrong" (a result differs), "race" (the device says so) or "refused" (the engine does)."""
    checkpoint, steps = run
    model = CASE.build(checkpoint).requires_grad_(False)
    expected = steps(CASE.build(checkpoint).requires_grad_(False))
    device = carom.SimulatedDevice(seed=seed, timing=timing)
    vram = harness.least_vram(model, device, "block") * slots
    session = carom.stream(model, device=device, vram=vram, granularity="block")
    try:
        found = steps(model)
    except SimulatedRaceError:
        return "race"
    except carom.CaromError:
        return "refused"
    finally:
        session.close()
    return "right" if all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)) else "wrong"


def outcomes(run, **settings) -> set[str]:
    """Of each timing, at random by three seeds: the others know of none."""
    drawn = [("late", 0), ("early", 0), *(("random", seed) for seed in range(3))]
    return {outcome(run, timing, seed=seed, **settings) for timing, seed in drawn}


@on_every_run
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_the_engine_as_it_is_is_right_under_every_timing(run, slots):
    assert outcomes(run, slots=slots) == {"right"}


# -- broken on purpose


@on_every_run
def test_a_missing_wait_for_the_copy_is_found(run, monkeypatch):
    monkeypatch.setattr(SimulatedEngine, "wait", lambda self, event: None)
    assert outcome(run, "late") in ("race", "wrong")


@on_every_run
def test_a_wait_for_the_wrong_event_is_found(run, monkeypatch):
    """Waiting for the copy's start instead of its end."""
    real = SimulatedEngine.copy_in

    def early(self, *args):
        _, (started, done) = real(self, *args)
        return started, (started, done)

    monkeypatch.setattr(SimulatedEngine, "copy_in", early)
    assert outcome(run, "late") in ("race", "wrong")


@on_every_run
@pytest.mark.parametrize("timing", TIMINGS)
def test_an_overwrite_that_waits_for_no_reader_is_found_under_any_timing(run, timing, monkeypatch):
    real = SimulatedEngine.copy_in
    monkeypatch.setattr(
        SimulatedEngine, "copy_in", lambda self, to, source, after, *rest: real(self, to, source, (), *rest)
    )
    assert outcome(run, timing) == "race"


@on_every_run
def test_an_overwrite_that_waits_for_an_earlier_read_only_is_found(run, monkeypatch):
    """The event of the last read is taken before the read instead of after it."""
    enter, leave, too_early = Pool.enter, Pool.leave, {}

    def early(self, unit, version, user):
        slot = enter(self, unit, version, user)
        too_early[user] = self._engine.record(user.stream)
        return slot

    def late(self, slot, user, held=False):
        leave(self, slot, user, held)
        if user in too_early:
            slot.now = slot.now._replace(reads=dict.fromkeys(slot.now.reads, too_early[user]))

    monkeypatch.setattr(Pool, "enter", early)
    monkeypatch.setattr(Pool, "leave", late)
    assert outcome(run, "late", slots=1) == "race"


@on_every_run
def test_a_slot_used_after_it_was_given_up_is_found(run, monkeypatch):
    """A unit believes that it is still in a slot that another unit has taken."""
    monkeypatch.setattr("carom.core.device.pool._unmark", lambda engine, slot: None)
    assert outcome(run, "late") != "right"


@on_every_run
def test_computing_with_the_host_copy_is_found(run, monkeypatch):
    monkeypatch.setattr(StreamedUnit, "show", lambda self, tensors: None)
    monkeypatch.setattr(Forwards, "computing", lambda self: False)
    assert outcome(run, "late") == "race"


def test_an_operator_on_a_host_copy_names_the_unit(monkeypatch):
    model = CASE.build().requires_grad_(False)
    device = carom.SimulatedDevice()
    inner, stolen = models.Block.forward, []
    steal = lambda self, x: inner(self, x) + sum(F.linear(x, weight)[..., : models.D] for weight in stolen)  # noqa: E731
    monkeypatch.setattr(models.Block, "forward", steal)
    session = carom.stream(
        model, device=device, vram=harness.least_vram(model, device, "block"), granularity="block"
    )
    stolen += [next(u for u in inside(session).placement.streamed if u.name == "blocks.2").homes[2].host]
    with torch.no_grad(), pytest.raises(SimulatedRaceError, match=r"host copy of blocks\.2"):
        model(CASE.inputs())
    session.close()


def test_a_stale_slot_is_found(monkeypatch):
    """A kept slot that survives a change of the host weights gives the old result (once its copy has landed)."""
    monkeypatch.setattr("carom.core.model.home.ManagedUnit.version", lambda self: 0)
    model, plain = CASE.build().requires_grad_(False), CASE.build().requires_grad_(False)
    device = carom.SimulatedDevice(timing="early")
    vram = harness.least_vram(model, device, "block") * 3
    with torch.no_grad(), carom.stream(model, device=device, vram=vram, granularity="block"):
        model(CASE.inputs())
        same = True
        for block in range(6):
            for net in (model, plain):
                net.blocks[block].up.weight.mul_(2)
            same = same and torch.equal(model(CASE.inputs()), plain(CASE.inputs()))
    assert not same


def test_a_slot_that_autograd_keeps_itself_is_not_overwritten(monkeypatch):
    """Without handles the views that autograd keeps hold their slots, until a unit finds none."""
    assert outcomes(RUNS["training"]) == {"right"}
    push = torch._C._autograd._push_saved_tensors_default_hooks

    def push_identity(pack, unpack):
        def identity(tensor):
            return tensor

        identity._carom = pack._carom  # by which Carom finds its own hooks when it pops them
        push(identity, identity)

    monkeypatch.setattr("carom.core.model.managed_tensor._push_hooks", push_identity)
    assert outcomes(RUNS["training"]) == {"refused"}


def test_a_handle_to_the_wrong_place_is_found(monkeypatch):
    from carom.core.model import managed_tensor

    real = managed_tensor.Handle.__init__

    def shifted(self, source, unit, token, saved, start):
        real(self, source, unit, token, saved, (start + 512) % max(512, unit.nbytes - saved.numel() * 4))

    monkeypatch.setattr(managed_tensor.Handle, "__init__", shifted)
    assert outcomes(RUNS["training"]) & {"wrong", "race"}


def test_gradients_that_are_read_before_they_landed_are_found(monkeypatch):
    """The host must wait once, at the end of a backward that produced host gradients."""
    waited = []
    real = SimulatedEngine.synchronize
    monkeypatch.setattr(
        SimulatedEngine, "synchronize", lambda self, event=None: (waited.append(event), real(self, event))[1]
    )
    model = CASE.build()
    device = carom.SimulatedDevice()
    vram = harness.some_vram(model, device, 0.2, training="stream")
    with carom.stream(model, device=device, vram=vram, training="stream") as session:
        loss = harness.loss_of(model(CASE.inputs()))
        events = []
        copy_out = inside(session).engine.copy_out
        monkeypatch.setattr(
            inside(session).engine, "copy_out", lambda t, s: (events.append(copy_out(t, s)), events[-1])[1]
        )
        del waited[:]
        loss.backward()
        assert events and all(any(e is w for w in waited) for e in events)


# -- the device by itself


def engine(timing: str = "late", **settings) -> SimulatedEngine:
    return SimulatedEngine(SimulatedDevice(timing=timing, **settings))


def copy_in(device: SimulatedEngine, target: torch.Tensor, source: torch.Tensor, after: tuple = ()):
    """(done event, (started, done) marks)."""
    return device.copy_in(target, source, after, True)


def test_a_late_copy_lands_when_its_event_is_waited_for_and_not_before():
    device = engine("late")
    target, source = device.allocate(1024), torch.arange(256).repeat(4).to(torch.uint8)
    done, _ = copy_in(device, target, source)
    assert (target == 255).all()
    with pytest.raises(SimulatedRaceError, match="before the event of the copy"):
        device.read(target)
    device.wait(done)
    device.read(target)
    assert torch.equal(target, source)


def test_an_early_copy_has_landed_at_once_and_still_must_be_waited_for_in_order():
    device = engine("early")
    target, source = device.allocate(512), torch.ones(512, dtype=torch.uint8)
    copy_in(device, target, source)
    assert torch.equal(target, source)


def test_overwriting_before_the_reader_is_done_raises_and_after_it_does_not():
    for timing in TIMINGS:
        device = engine(timing)
        target, source = device.allocate(512), torch.ones(512, dtype=torch.uint8)
        done, _ = copy_in(device, target, source)
        device.wait(done)
        device.read(target)
        with pytest.raises(SimulatedRaceError, match="overwritten before"):
            copy_in(device, target, source)
        copy_in(device, target, source, after=(device.mark(),))


def test_neighbours_do_not_disturb_each_other():
    device = engine("late")
    memory, source = device.allocate(1024), torch.ones(512, dtype=torch.uint8)
    done, _ = copy_in(device, memory[:512], source)
    copy_in(device, memory[512:], source)
    device.wait(done)
    device.read(memory[:512])
    with pytest.raises(SimulatedRaceError):
        device.read(memory[512:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_freed_memory_is_nan_in_every_float_dtype(dtype):
    device = engine()
    target = device.allocate(512)
    target.zero_()
    device.freed(target, 0, target.numel())
    assert torch.isnan(target.view(dtype)).all()


def test_random_timing_repeats_with_its_seed():
    def landed(seed: int) -> list[bool]:
        device = engine("random", seed=seed)
        source = torch.ones(512, dtype=torch.uint8)
        found = []
        for _ in range(24):
            target = device.allocate(512)
            copy_in(device, target, source)
            found.append(bool((target == 1).all()))
        return found

    assert landed(1) == landed(1)
    assert len({tuple(landed(seed)) for seed in range(5)}) > 1
    assert 0 < sum(landed(2)) < 24


def test_copies_and_bytes_are_counted_and_take_virtual_time():
    device = engine(link_bytes_per_second=1e6, copy_latency_seconds=0.5)
    target = device.allocate(2000)
    _, (started, done) = copy_in(device, target, torch.ones(2000, dtype=torch.uint8))
    assert (device.copies, device.bytes_in) == (1, 2000)
    assert device.elapsed(started, done) == pytest.approx(0.502)


def test_an_unknown_timing_is_refused():
    with pytest.raises(carom.UnsupportedError, match="timing"):
        carom.SimulatedDevice(timing="never")
