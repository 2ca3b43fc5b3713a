"""Models whose weights require gradients: laid out and packed like frozen ones until a forward records gradients."""

from __future__ import annotations

import contextlib
import copy

import carom
import pytest
import tests_models as models
import torch
from tests_inside import inside
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def unfrozen(blocks: int = 12) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(Block() for _ in range(blocks)))


def inputs() -> torch.Tensor:
    return torch.randn(2, 256, generator=torch.Generator().manual_seed(1)).bfloat16()


def stream(net: nn.Module, **settings):
    device = carom.SimulatedDevice(seed=2, timing="random", unpacks=True)
    return carom.stream(net, device=device, vram=models.weight_bytes(net) // 2, **settings)


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize("codec", ["auto", "lossless", "raw"])
def test_without_gradients_an_unfrozen_model_has_the_layout_and_packing_of_a_frozen_one(without, codec):
    def report(net: nn.Module):
        expected = net(inputs())
        with stream(net, codec=codec) as session, without():
            for _ in range(3):
                assert torch.equal(net(inputs()), expected)
            return session.report()

    frozen, found = report(models.freeze(unfrozen())), report(unfrozen())
    assert found.wire_bytes_per_step == frozen.wire_bytes_per_step > 0
    assert found.packed_units == frozen.packed_units and (found.packed_units > 0) == (codec != "raw")
    assert (found.resident_bytes, found.slot_bytes) == (frozen.resident_bytes, frozen.slot_bytes)
    assert any("no forward has recorded any" in note for note in found.notes)


@pytest.mark.parametrize("codec", ["lossless", "raw"])
def test_the_first_forward_with_gradients_lays_the_weights_out_for_training(codec):
    net = unfrozen()
    plain = copy.deepcopy(net)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (net, plain)]
    with stream(net, codec=codec) as session:
        for gradients in (False, True, False, True):
            results = []
            with contextlib.nullcontext() if gradients else torch.no_grad():
                for each, optimizer in zip((net, plain), optimizers, strict=True):
                    results.append(each(inputs()))
                    if gradients:
                        results[-1].float().square().mean().backward()
                        optimizer.step()
                        optimizer.zero_grad()
            assert torch.equal(*results)
        assert session.report().packed_units == 0
        assert any("a forward recorded gradients" in note for note in session.report().notes)
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs) and ours.requires_grad


def test_a_parked_session_returns_laid_out_for_training_when_its_next_forward_records_gradients():
    net = unfrozen()
    plain = copy.deepcopy(net)
    with stream(net, codec="lossless") as session:
        with torch.no_grad():
            net(inputs())
        session.park()
        for each in (net, plain):
            each(inputs()).float().square().mean().backward()
        assert all(
            torch.equal(a.grad, b.grad) for a, b in zip(net.parameters(), plain.parameters(), strict=True)
        )


def test_later_inference_keeps_the_layout_for_training():
    net = unfrozen()
    with stream(net) as session:
        net(inputs()).float().square().mean().backward()
        arrangement, plan = inside(session).arrangement, session.plan
        for _ in range(2):
            with torch.no_grad():
                net(inputs())
            net(inputs()).float().square().mean().backward()
        assert inside(session).arrangement is arrangement and session.plan is plan


def test_trainable_weights_that_are_streamed_on_request_are_never_packed():
    with stream(unfrozen(), training="stream", codec="lossless") as session:
        assert session.report().packed_units == 0
        assert not any("no forward has recorded any" in note for note in session.report().notes)


def test_gradients_recorded_within_a_forward_without_them_are_refused_by_name():
    class Forces(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                return super().forward(x)

    net = Forces(*unfrozen())
    with stream(net):
        with torch.no_grad(), pytest.raises(carom.UnsupportedError, match=r"up\.weight.*training='stream'"):
            net(inputs())
        net(inputs()).float().square().mean().backward()  # and goes on where the forward itself records them


def test_a_weight_frozen_and_unfrozen_again_while_packed_trains_afterwards():
    net = unfrozen()
    with stream(net, codec="lossless"):
        weight = net[0].up.weight
        weight.requires_grad_(False)
        weight.requires_grad_(True)
        net(inputs()).float().square().mean().backward()
        assert weight.grad is not None
