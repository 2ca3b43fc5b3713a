"""On a GPU: what finds no room in the region is read from pinned host memory, where the device addresses it."""

from __future__ import annotations

import copy

import carom
import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device")
WIDTH = 1024  # a weight is 4 MiB: copies take their time


class Pooled(nn.Module):
    """An attention pool over four linear layers' weights, and a view of a weight that is kept while all blocks run."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.position = nn.Parameter(torch.randn(1, 64, WIDTH))
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.q, self.k, self.v, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        position = self.position.expand(x.shape[0], -1, -1)
        x = x + position
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        x = (x + position).transpose(0, 1)
        return F.multi_head_attention_forward(
            x[:1], x, x, WIDTH, 8, None, torch.cat([self.q.bias, self.k.bias, self.v.bias]), None, None, False, 0.0,
            self.c.weight, self.c.bias, training=self.training, need_weights=False, use_separate_proj_weight=True,
            q_proj_weight=self.q.weight, k_proj_weight=self.k.weight, v_proj_weight=self.v.weight,
        )[0]  # fmt: skip


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        yield
    torch.use_deterministic_algorithms(before)


def least(model: nn.Module, **options) -> int:
    with pytest.raises(carom.BudgetError) as refused:
        carom.stream(model, vram=1, device="cuda", **options)
    return refused.value.least_bytes


@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_inference_at_the_least_budget_is_exact_and_within_it(codec):
    model = Pooled().bfloat16().requires_grad_(False)
    plain = copy.deepcopy(model).cuda()
    x = torch.randn(2, 64, WIDTH, dtype=torch.bfloat16, device="cuda")
    options = {"codec": codec, "pool": "torch"}
    vram = least(model, **options)
    with pytest.raises(carom.BudgetError):
        carom.stream(model, vram=vram - 1, device="cuda", **options)
    with torch.no_grad(), carom.stream(model, vram=vram, device="cuda", **options) as session:
        for _ in range(3):
            assert torch.equal(model(x), plain(x))
        assert session.report().vram_peak_bytes <= vram


def test_training_at_the_least_budget_is_exact():
    model = Pooled()
    plain = copy.deepcopy(model).cuda()
    options = {"training": "stream", "pool": "torch", "granularity": "layer"}
    with carom.stream(model, vram=least(model, **options), device="cuda", **options):
        for step in range(3):
            x = torch.randn(2, 64, WIDTH, device="cuda")
            for one in (plain, model):
                one(x * (step + 1)).square().sum().backward()
            for a, b in zip(plain.parameters(), model.parameters(), strict=True):
                assert torch.equal(a.grad.cpu(), b.grad)


def test_writes_within_a_step_reach_the_host_when_read_from_there():
    model = Pooled().requires_grad_(False)
    plain = copy.deepcopy(model).cuda()
    x = torch.randn(2, 64, WIDTH, device="cuda")
    forward = Pooled.forward

    class Writing(Pooled):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._foreach_mul_(list(self.parameters()), 0.9)
            return forward(self, x)

    model.__class__ = plain.__class__ = Writing
    vram = least(model, granularity="layer", pool="torch")
    with (
        torch.no_grad(),
        carom.stream(model, vram=vram, device="cuda", granularity="layer", pool="torch") as session,
    ):
        for _ in range(3):
            assert torch.equal(model(x), plain(x))
        for name, value in plain.state_dict().items():
            assert torch.equal(session.read(name), value.cpu())


def test_what_is_not_pinned_is_refused_with_a_budget_that_works():
    model = Pooled().requires_grad_(False)
    plain = copy.deepcopy(model).cuda()
    x = torch.randn(2, 64, WIDTH, device="cuda")
    options = {"granularity": "layer", "pool": "torch", "ram": 0, "codec": "raw"}
    with torch.no_grad():
        with (
            carom.stream(model, vram=least(model, **options), device="cuda", **options),
            pytest.raises(carom.BudgetError) as refused,
        ):
            model(x)
        for _ in range(12):
            try:
                with carom.stream(model, vram=refused.value.least_bytes, device="cuda", **options):
                    assert torch.equal(model(x), plain(x))
                break
            except carom.BudgetError as error:
                assert error.least_bytes > refused.value.least_bytes
                refused.value.least_bytes = error.least_bytes
        else:
            raise AssertionError("no budget that was named works")
