"""Adapters merged into frozen weights while they stream, with gradients recorded: as `fuse_lora` of diffusers does."""

from __future__ import annotations

import carom
import pytest
import torch
from torch import nn

D = 256


def add(weight, delta):
    weight.data += delta


def subtract(weight, delta):
    weight.data -= delta


def multiply(weight, delta):
    weight.data *= delta[:, :1] + 1


def replace(weight, delta):
    weight.data = weight.data + delta


def add_under_no_grad(weight, delta):
    with torch.no_grad():
        weight += delta


MERGES = [
    add, subtract, multiply, replace, add_under_no_grad,
    lambda weight, delta: weight.data.add_(delta, alpha=0.5),
    lambda weight, delta: weight.data.lerp_(delta, 0.1),
    lambda weight, delta: weight.data.copy_(delta),
    lambda weight, delta: weight.detach().add_(delta),
]  # fmt: skip


def net():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(D, D) for _ in range(4))).to(torch.bfloat16).requires_grad_(False)


@pytest.mark.parametrize("merge", MERGES)
@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_a_delta_that_requires_gradients_is_merged_into_a_weight_that_streams(merge, codec):
    plain, model = net(), net()
    factors = [nn.Parameter(torch.randn(*shape) * 0.1) for shape in ((D, 4), (4, D))]
    x = torch.linspace(-1, 1, D, dtype=torch.bfloat16)[None]
    with carom.stream(model, vram=400_000, device="cpu", codec=codec) as session:
        assert session.report().streamed_bytes > 0
        for module in (plain, model):
            for layer in module:
                merge(layer.weight, (factors[0] @ factors[1]).to(torch.bfloat16))
        assert not any(p.requires_grad for p in model.parameters())
        with torch.no_grad():
            assert torch.equal(model(x), plain(x))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


def test_a_packed_weight_itself_does_not_become_part_of_a_graph():
    model = net()
    delta = nn.Parameter(torch.zeros(D, D, dtype=torch.bfloat16))
    with (
        carom.stream(model, vram=400_000, device="cpu", codec="lossless"),
        pytest.raises(carom.UnsupportedError, match=r"weight\.data"),
    ):
        model[0].weight.add_(delta)
