"""Weights that are views of one tensor that other code keeps, as those of optimizers with a flat parameter."""

from __future__ import annotations

import carom
import pytest
import torch
from torch import nn


def blocks(trains: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(6))).requires_grad_(trains)


def flatten(model: nn.Module) -> torch.Tensor:
    """Make the parameters views of one tensor, and return it."""
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    start = 0
    for parameter in model.parameters():
        parameter.data = flat[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    return flat


def flat_notes(session) -> list[str]:
    return [note for note in session.report().notes if "views of a tensor that other code keeps" in note]


@pytest.mark.parametrize("codec", ["raw", "lossless"])
@pytest.mark.parametrize("device", ["cpu", carom.SimulatedDevice()], ids=["cpu", "simulated"])
def test_they_are_views_again_after_close_and_a_note_says_what_happens_meanwhile(device, codec):
    model = blocks()
    flat = flatten(model)
    values = flat.clone()
    with carom.stream(model, vram=20_000, device=device, codec=codec) as session:
        assert len(flat_notes(session)) == 1 and "0.weight" in flat_notes(session)[0]
        with torch.no_grad():
            model(torch.ones(1, 32))
            model[2].bias.fill_(3.0)
    start = 0
    for name, parameter in model.named_parameters():
        want = torch.full((32,), 3.0) if name == "2.bias" else values[start : start + parameter.numel()]
        assert torch.equal(parameter.reshape(-1), want), name
        start += parameter.numel()
    flat.zero_()
    assert not any(parameter.any() for parameter in model.parameters())


def test_a_flat_tensor_that_nobody_keeps_is_not_kept():
    model = blocks()
    flatten(model)
    with carom.stream(model, vram=20_000, device="cpu") as session:
        assert not flat_notes(session)


def test_parameters_made_of_slices_that_nobody_keeps_are_ordinary_ones():
    model = blocks(trains=True)
    for layer in model:
        made = torch.randn(33, 32)
        layer.weight, layer.bias = nn.Parameter(made[:32]), nn.Parameter(made[32])
    del made
    with carom.stream(model, vram=20_000, device="cpu", training="stream") as session:
        assert not flat_notes(session)


def test_streamed_training_is_refused_as_a_step_on_the_flat_tensor_would_train_nothing():
    model = blocks(trains=True)
    flat = flatten(model)
    with pytest.raises(carom.UnsupportedError, match=r"0\.weight is a view .*clone"):
        carom.stream(model, vram=20_000, device="cpu", training="stream")
    flat.zero_()
    assert not any(parameter.any() for parameter in model.parameters())
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    carom.stream(model, vram=20_000, device="cpu", training="stream").close()
