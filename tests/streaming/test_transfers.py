"""Laws 5 and 6: as few transfers as can be, counted; the order is learnt, and a surprise costs a stall at most."""

from __future__ import annotations

import carom
import pytest
import tests_harness as harness
import tests_models as models
import torch
from carom.core.session.session import Session
from carom.core.session.stream_settings import StreamSettings
from tests_harness import on_simulated_devices, streamed
from tests_inside import inside
from tests_pairwise import each, pairwise

on_cpu_and_simulated = pytest.mark.parametrize("device", harness.DEVICES.values(), ids=harness.DEVICES)


def stack(depth: int = 8, checkpoint: str = "none", kind: type = models.Stack):
    """Equal frozen blocks; everything else is small."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind(depth)
    model.checkpoint = checkpoint
    return model.requires_grad_(False)


def slots_vram(model, slots: int) -> int:
    """A budget under which every block streams through that many slots, and the rest stays resident."""
    probe = carom.stream(model, device="cpu", vram=10**9, granularity="block")
    units = inside(probe).units
    probe.close()
    block = max(unit.nbytes for unit in units)
    return sum(unit.nbytes for unit in units if unit.kind != "block") + slots * block


def counted(session, run) -> int:
    """Transfers that ``run`` causes, as the simulated engine counts them."""
    before = inside(session).engine.copies
    run()
    return inside(session).engine.copies - before


@on_simulated_devices
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_inference_takes_one_transfer_per_streamed_unit_less_what_is_kept(slots, device):
    model = stack()
    x = torch.randn(2, models.D)
    with torch.no_grad(), streamed(model, device, slots_vram(model, slots), granularity="block") as session:
        count = len(inside(session).streamed)
        streamed_bytes = sum(unit.nbytes for unit in inside(session).streamed)
        slots = session.plan.slots
        assert count >= 7 and slots >= 1
        for _ in range(3):
            model(x)
        steady = [counted(session, lambda: model(x)) for _ in range(6)]
        report = session.report()
    assert max(steady) <= count
    # Belady keeps at most what fits beside the slot in use.
    assert min(steady) >= count - slots
    assert report.transfers_per_weight == pytest.approx(sorted(steady)[3] / count, abs=1 / count)
    assert report.wire_bytes_per_step <= streamed_bytes


@on_simulated_devices
def test_the_very_first_pass_takes_one_transfer_per_unit_and_what_it_fetches_for_the_next(device):
    model = stack()
    with torch.no_grad(), streamed(model, device, slots_vram(model, 3), granularity="block") as session:
        copies = counted(session, lambda: model(torch.randn(2, models.D)))
        assert copies <= len(inside(session).streamed) + session.plan.slots


@on_simulated_devices
def test_a_frozen_model_called_with_gradients_on_takes_a_step_a_forward(device):
    model = stack().requires_grad_(False)
    with streamed(model, device, slots_vram(model, 3), granularity="block") as session:
        for _ in range(6):
            model(torch.randn(2, models.D))
        report = session.report()
    assert report.kind == "infer" and report.steps > 1
    assert report.transfers_per_weight <= 1


@on_simulated_devices
def test_a_backward_through_others_adapters_is_waited_for_though_the_result_is_not_looked_into(device):
    model = stack().requires_grad_(False)
    scale = torch.ones(1, requires_grad=True)

    class Result:
        def __init__(self, sample):
            self.sample = sample

    class Adapted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            return Result(self.inner(x * scale))

    asked = StreamSettings(
        device=device,
        vram=slots_vram(model, 3),
        granularity="block",
        codec="raw",
        pool="torch",
        backward=True,
    )
    with Session(Adapted(), asked) as session:
        for _ in range(4):
            harness.loss_of(session.module(torch.randn(2, models.D)).sample).backward()
        report = session.report()
    assert report.kind == "train" and scale.grad is not None


@on_simulated_devices
def test_a_loss_that_is_kept_aside_is_waited_for(device):
    model = stack()
    kept = []

    class Aside(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            kept.append(harness.loss_of(self.inner(x)))
            return kept[-1].detach()

    with streamed(Aside(), device, slots_vram(model, 3), granularity="block") as session:
        for _ in range(4):
            session.module(torch.randn(2, models.D, requires_grad=True))
            assert inside(session).meter.awaiting
            kept.pop().backward()
        assert session.report().kind == "train"


@pairwise(checkpoint=["non-reentrant", "reentrant"], slots=[1, 2, 3, 4], device=harness.SIMULATED)
def test_a_training_step_takes_two_transfers_per_unit_less_the_turns(slots, checkpoint, device):
    model = stack(8, checkpoint)
    x = torch.randn(2, models.D, requires_grad=True)
    with streamed(model, device, slots_vram(model, slots), granularity="block") as session:
        count, slots = len(inside(session).streamed), session.plan.slots
        assert count > 2 * slots - 1
        step = lambda: harness.loss_of(model(x)).backward()  # noqa: E731
        for _ in range(4):
            step()
        steady = [counted(session, step) for _ in range(5)]
        report = session.report()
    # Per step: N forward and N backward, less the S units that each turn finds in the slots.
    assert steady == [2 * count - 2 * slots] * 5
    assert report.kind == "train"
    assert report.transfers_per_weight == pytest.approx(2 - 2 * slots / count)


@on_simulated_devices
def test_training_without_checkpointing_takes_no_more(device):
    model = stack()
    x = torch.randn(2, models.D, requires_grad=True)
    with streamed(model, device, slots_vram(model, 3), granularity="block") as session:
        count = len(inside(session).streamed)
        for _ in range(4):
            harness.loss_of(model(x)).backward()
        step = lambda: harness.loss_of(model(x)).backward()  # noqa: E731
        assert counted(session, step) == 2 * count - 2 * session.plan.slots


@on_simulated_devices
def test_resident_units_are_never_transferred(device):
    model = stack(8)
    vram = slots_vram(model, 5)
    with torch.no_grad(), streamed(model, device, vram) as session:
        assert session.plan.resident
        streamed_bytes = sum(unit.nbytes for unit in inside(session).streamed)
        for _ in range(3):
            model(torch.randn(2, models.D))
        before = inside(session).engine.bytes_in
        model(torch.randn(2, models.D))
        assert 0 < inside(session).engine.bytes_in - before <= streamed_bytes


@each(checkpoint=["none", "non-reentrant", "reentrant"], device=harness.SIMULATED)
def test_frozen_weights_are_never_copied_back_and_get_no_gradient(checkpoint, device, monkeypatch):
    model = stack(6, checkpoint)
    model.norm.requires_grad_(True)
    with streamed(model, device, slots_vram(model, 2)) as session:
        monkeypatch.setattr(inside(session).engine, "copy_out", lambda *_: pytest.fail("a copy to the host"))
        for _ in range(3):
            harness.loss_of(model(torch.randn(2, models.D, requires_grad=True))).backward()
            with torch.no_grad():
                model(torch.randn(2, models.D))
        assert all(p.grad is None for p in model.blocks.parameters())


@on_simulated_devices
def test_only_trainable_weights_are_copied_back_once_a_backward(device, monkeypatch):
    model = stack(6, "non-reentrant")
    trained = [block.up.weight for block in model.blocks]
    for weight in trained:
        weight.requires_grad_(True)
    vram = harness.some_vram(model, device, 0.1, training="stream")
    with streamed(model, device, vram, training="stream") as session:
        shapes = []
        real = inside(session).engine.copy_out
        monkeypatch.setattr(
            inside(session).engine, "copy_out", lambda t, s: (shapes.append(tuple(s.shape)), real(t, s))[1]
        )
        streaming = [w for w in trained if getattr(w, "_carom", None) is not None]
        assert streaming
        for _ in range(2):
            harness.loss_of(model(torch.randn(2, models.D))).backward()
        assert shapes == [tuple(trained[0].shape)] * (2 * len(streaming))


# -- the order


ROUTES = {
    "skips blocks": [0, 2, 5],
    "calls one twice": [0, 1, 1, 2, 3, 4, 5],
    "calls the list twice": [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5],
    "runs backwards": [5, 4, 3, 2, 1, 0],
    "runs one alone": [3],
    "runs none": [],
}


@pairwise(route=ROUTES, checkpoint=["inference", "none", "non-reentrant"], device=harness.DEVICES)
def test_another_order_is_exact_and_learnt_again(route, checkpoint, device):
    plain = stack(6, "none" if checkpoint == "inference" else checkpoint, models.Steered)
    model = stack(6, plain.checkpoint, models.Steered)

    def step(net, seed):
        x = models.CASES["stack"].inputs(seed)
        if checkpoint == "inference":
            with torch.no_grad():
                return net(x), None
        x.requires_grad_()
        y = net(x)
        harness.loss_of(y).backward()
        return y.detach(), x.grad

    with streamed(model, device, slots_vram(model, 2), granularity="block") as session:
        for seed, order in enumerate([list(range(6))] * 4 + [route] * 5 + [list(range(6))] * 8):
            plain.route = model.route = order
            harness.assert_same(list(step(plain, seed)), list(step(model, seed)))
            if seed == 7:
                learnt = inside(session).surprises
            if seed == 8:
                assert inside(session).surprises == learnt, "a repeated order still surprises"
            if seed == 14:
                learnt = inside(session).surprises
        assert inside(session).surprises == learnt, "the old order was not learnt again"


@on_simulated_devices
def test_a_random_order_every_pass_is_exact(device):
    plain = stack(6, "non-reentrant", models.Steered)
    model = stack(6, "non-reentrant", models.Steered)
    generator = torch.Generator().manual_seed(3)
    with streamed(model, device, slots_vram(model, 2), granularity="block"):
        for seed in range(12):
            length = int(torch.randint(1, 9, (), generator=generator))
            plain.route = model.route = torch.randint(0, 6, (length,), generator=generator).tolist()
            results = []
            for net in (plain, model):
                x = models.CASES["stack"].inputs(seed).requires_grad_()
                y = net(x)
                harness.loss_of(y).backward()
                results.append([y.detach(), x.grad])
            harness.assert_same(*results)


@on_simulated_devices
def test_repeated_calls_of_a_sampler_look_ahead_across_calls(device):
    """cond and uncond, step after step: nothing surprises, and each call takes N less the kept."""
    model = stack(8)
    with torch.no_grad(), streamed(model, device, slots_vram(model, 3), granularity="block") as session:
        for _ in range(4):
            model(torch.randn(2, models.D))
        surprises = inside(session).surprises
        copies = counted(session, lambda: [model(torch.randn(2, models.D)) for _ in range(8)])
        assert inside(session).surprises == surprises
        assert copies <= 8 * 8


@on_simulated_devices
def test_training_and_sampling_by_turns_are_learnt(device):
    model = stack(8, "non-reentrant")
    x = torch.randn(2, models.D, requires_grad=True)

    def turn():
        harness.loss_of(model(x)).backward()
        with torch.no_grad():
            model(x)
            model(x)

    with streamed(model, device, slots_vram(model, 2), granularity="block") as session:
        for _ in range(4):
            turn()
        surprises = inside(session).surprises
        steady = [counted(session, turn) for _ in range(4)]
        assert inside(session).surprises == surprises
        # 4 passes over 8 units; one turn finds 2 units in the slots, passes begin with what was foreseen.
        assert max(steady) <= 4 * 8 - 2


@on_simulated_devices
def test_accumulation_is_learnt(device):
    model = stack(8, "non-reentrant")
    x = torch.randn(2, models.D, requires_grad=True)

    def forwards():
        (harness.loss_of(model(x)) + harness.loss_of(model(x))).backward()

    with streamed(model, device, slots_vram(model, 2), granularity="block") as session:
        for _ in range(4):
            forwards()
        surprises = inside(session).surprises
        assert counted(session, forwards) <= 4 * 8 - 2
        assert inside(session).surprises == surprises


@on_simulated_devices
def test_a_steady_state_allocates_nothing_of_a_unit_size(device, monkeypatch):
    model = stack(8, "non-reentrant")
    x = torch.randn(2, models.D, requires_grad=True)
    with streamed(model, device, slots_vram(model, 2), granularity="block") as session:
        for _ in range(3):
            harness.loss_of(model(x)).backward()
        monkeypatch.setattr(
            inside(session).engine, "allocate", lambda n: pytest.fail(f"{n} bytes allocated in a step")
        )
        monkeypatch.setattr(
            inside(session).engine, "synchronize", lambda *_: pytest.fail("the host waits in a step")
        )
        harness.loss_of(model(x)).backward()
        with torch.no_grad():
            model(x)
        monkeypatch.undo()


@pytest.mark.parametrize("slots", [2, 3])
def test_look_ahead_hides_transfers_behind_computing(slots):
    """On a simulated device whose link keeps up, a warm pass stalls for a part of the copying time only."""
    device = carom.SimulatedDevice(link_bytes_per_second=25e9, flops=1e9, copy_latency_seconds=1e-6)
    model = stack(8)
    with torch.no_grad(), streamed(model, device, slots_vram(model, slots), granularity="block") as session:
        for _ in range(6):
            model(torch.randn(64, models.D))
        report = session.report()
    assert report.hidden_fraction is not None and report.hidden_fraction > 0.95
    assert report.step_seconds <= 1.05 * report.roofline_seconds


def test_a_link_that_binds_is_kept_busy():
    device = carom.SimulatedDevice(link_bytes_per_second=1e6, flops=1e12, copy_latency_seconds=0.0)
    model = stack(8)
    with torch.no_grad(), streamed(model, device, slots_vram(model, 3), granularity="block") as session:
        for _ in range(8):
            model(torch.randn(2, models.D))
        report = session.report()
    assert report.step_seconds == pytest.approx(report.wire_bytes_per_step / 1e6, rel=0.05)


@each(
    mode={"no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "enable_grad": torch.enable_grad},
    device=harness.DEVICES,
)
def test_weights_that_are_only_read_are_never_written_back(mode, device, monkeypatch):
    model = stack(6)
    with streamed(model, device, slots_vram(model, 2), granularity="block") as session:
        monkeypatch.setattr(inside(session).engine, "copy_out", lambda *_: pytest.fail("a copy to the host"))
        before = session.plan
        with mode():
            for _ in range(3):
                model(torch.randn(2, models.D))
        assert session.plan is before, "the model was laid out anew"


@on_cpu_and_simulated
def test_a_view_kept_over_many_runs_is_looked_after_once(device):
    """A model that keeps a weight's slot view: the streamer's care for it does not grow with every run."""
    model = stack(4)
    kept = []
    keep = lambda layer, args: None if kept else kept.append(layer.weight)  # noqa: E731
    hook = model.blocks[1].up.register_forward_pre_hook(keep)
    with torch.no_grad(), streamed(model, device, slots_vram(model, 3), granularity="block") as session:
        for _ in range(20):
            model(torch.randn(2, models.D))
        assert len(inside(session).held_slots) == 1
        hook.remove()
        kept.clear()
        model(torch.randn(2, models.D))
        inside(session).end_finished_uses()
        assert not inside(session).held_slots
