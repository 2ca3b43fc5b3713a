"""Modules whose weights have no shape yet are refused with what to do."""

from __future__ import annotations

import carom
import pytest
import torch
from tests_inside import inside
from torch import nn


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.inner = nn.Sequential(nn.LazyLinear(32), nn.LazyBatchNorm1d(), nn.Linear(32, 32))

    def forward(self, x):
        return self.inner(self.first(x))


@pytest.mark.parametrize("settings", [{}, {"codec": "lossless"}, {"training": "stream"}])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: nn.LazyLinear(8), "weight of LazyLinear"),
        (Nested, "inner.0.weight of LazyLinear"),
        (
            lambda: nn.Sequential(nn.Linear(8, 8), nn.LazyBatchNorm1d(affine=False)),
            "1.running_mean of LazyBatch",
        ),
    ],
    ids=["root", "nested", "buffer"],
)
def test_a_lazy_module_is_refused_until_it_ran_once(make, name, settings):
    with pytest.raises(carom.UnsupportedError, match=f"^{name}.*has no shape yet: run one forward"):
        carom.stream(make(), device="cpu", vram=20_000, **settings)


def test_after_a_dry_run_it_streams():
    model, x = Nested().eval(), torch.randn(4, 32)
    model(x)
    want = model.requires_grad_(False)(x)
    with carom.stream(model, device="cpu", vram=9_000) as session:
        assert inside(session).streamed and torch.equal(model(x), want)


def test_a_lazy_module_that_came_while_it_streams_is_refused_by_name():
    model, x = nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)]), torch.randn(4, 32)
    with carom.stream(model, device="cpu", vram=9_000, training="stream"):
        model(x)
        model.append(nn.LazyLinear(4))
        with pytest.raises(carom.UnsupportedError, match="4.weight of LazyLinear has no shape yet"):
            model(x)
        del model[4]
        model(x)
