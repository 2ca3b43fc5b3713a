"""Trainable streamed weights that are arguments of custom autograd functions outside their module's forward."""

from __future__ import annotations

import copy

import carom
import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytestmark = pytest.mark.timeout(60)
WIDTH, WORDS = 16, 20


class Product(torch.autograd.Function):
    """A head's product, as fused losses compute it."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.flatten(0, -2).t() @ x.flatten(0, -2)


class Language(nn.Module):
    def __init__(self, tied: bool = False, chunks: int = 1, lookups: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.chunks, self.lookups = chunks, lookups

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = sum(self.embed(words) for _ in range(self.lookups))
        for block in self.blocks:
            x = x + block(x)
        scores = torch.cat([Product.apply(part, self.head.weight) for part in x.chunk(self.chunks, 1)], 1)
        return F.cross_entropy(scores.flatten(0, 1), words.flatten())


def words(seed: int) -> torch.Tensor:
    return torch.randint(0, WORDS, (2, 9), generator=torch.Generator().manual_seed(seed))


def streamed(model: nn.Module, simulated: bool) -> carom.Session:
    options = {"device": carom.SimulatedDevice() if simulated else "cpu", "training": "stream"}
    with pytest.raises(carom.BudgetError) as refused:
        carom.stream(model, vram=1, **options)
    return carom.stream(model, vram=2 * refused.value.least_bytes, **options)


@pytest.mark.parametrize("simulated", [False, True])
@pytest.mark.parametrize(("tied", "chunks"), [(False, 1), (False, 3), (True, 1), (True, 3)])
def test_gradients_have_the_bits_of_the_resident_model(tied, chunks, simulated):
    model = Language(tied, chunks)
    plain = copy.deepcopy(model)
    with streamed(model, simulated):
        for seed in range(3):  # gradients accumulate
            plain(words(seed)).backward()
            model(words(seed)).backward()
            for got, want in zip(model.parameters(), plain.parameters(), strict=True):
                assert torch.equal(got.grad, want.grad)


@pytest.mark.parametrize("simulated", [False, True])
def test_hooks_run_once_and_may_step(simulated):
    def train(module: nn.Module) -> list[str]:
        called = []

        def step(name, parameter):
            called.append(name)
            with torch.no_grad():
                parameter.sub_(0.1 * parameter.grad)
            parameter.grad = None

        for name, parameter in module.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: step(name, p))
        for seed in range(3):
            module(words(seed)).backward()
        return sorted(called)

    model = Language()
    plain = copy.deepcopy(model)
    with streamed(model, simulated):
        assert train(model) == train(plain)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_uses_whose_sum_would_have_another_order_are_refused():
    model = Language(tied=True, chunks=2, lookups=2)
    with streamed(model, False), pytest.raises(carom.UnsupportedError, match=r"embed\.weight.*another order"):
        model(words(0)).backward()


def test_without_gradients_the_function_runs_and_after_close_autograd_accumulates():
    model = Language()
    plain = copy.deepcopy(model)
    with streamed(model, True):
        model(words(0)).backward()
        with torch.no_grad():
            assert torch.equal(model(words(1)), plain(words(1)))
    model.zero_grad()
    for module in (model, plain):
        module(words(2)).backward()
    assert all(
        torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    )


def test_a_product_under_no_grad_takes_the_kernel_of_the_resident_model():
    """For an operand of more than two dimensions a product chooses by the other's requires_grad."""

    class Peeks(Language):
        def forward(self, words: torch.Tensor) -> torch.Tensor:
            x = self.embed(words)
            with torch.no_grad():
                return x[:, :3] @ self.head.weight.t()

    model = Peeks()
    plain = copy.deepcopy(model)
    with streamed(model, True):
        assert torch.equal(model(words(0)), plain(words(0)))
