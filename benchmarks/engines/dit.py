"""The synthetic diffusion transformer (DiT) of the benchmark: 18 d^2 bfloat16 weights a block, with LoRA on four
linears.

With d=3072 and 20 blocks the weights take 6.8 GB. Weights are random, seeded, equal for every engine, and written at
the speed of memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from .case import CHANNELS, Case

DTYPE = torch.bfloat16
POOL = 16_777_213  # count of normals, drawn once; a prime, so that no row length divides the period


class LoraAdapter(nn.Module):
    """A linear layer with a low-rank adapter, y = base(x) + up(down(x)), written by hand as in trainers. The base is
    frozen.
    """

    def __init__(self, base: nn.Linear, rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.empty(rank, base.in_features, dtype=dtype))
        self.up = nn.Parameter(torch.empty(base.out_features, rank, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        delta = F.linear(F.linear(x.to(self.down.dtype), self.down), self.up)
        return self.base(x) + delta.to(x.dtype)


class Attention(nn.Module):
    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv: nn.Module = nn.Linear(d, 3 * d, bias=False, dtype=DTYPE)
        self.proj: nn.Module = nn.Linear(d, d, bias=False, dtype=DTYPE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v)
        return self.proj(out.transpose(1, 2).reshape(b, t, d))


class FeedForward(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.fc1: nn.Module = nn.Linear(d, 4 * d, bias=False, dtype=DTYPE)
        self.fc2: nn.Module = nn.Linear(4 * d, d, bias=False, dtype=DTYPE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class Block(nn.Module):
    """A transformer block: attention and feed-forward, each modulated by the conditioning (adaLN-Zero of DiT, arXiv
    2212.09748).
    """

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.d = d
        self.inner_checkpoint = False
        self.modulation = nn.Linear(d, 6 * d, bias=False, dtype=DTYPE)
        self.attn = Attention(d, heads)
        self.mlp = FeedForward(d)

    def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        if self.inner_checkpoint and torch.is_grad_enabled():
            return checkpoint(self.run, x, c, use_reentrant=False)
        return self.run(x, c)

    def run(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        s1, b1, g1, s2, b2, g2 = self.modulation(F.silu(c)).unsqueeze(1).chunk(6, dim=-1)
        x = x + g1 * self.attn(F.layer_norm(x, (self.d,)) * (1 + s1) + b1)
        return x + g2 * self.mlp(F.layer_norm(x, (self.d,)) * (1 + s2) + b2)


class Dit(nn.Module):
    """The model: x (batch, tokens, 64) and c (batch, d), both bfloat16, to an output (batch, tokens, 64).

    `repeat`: how often each block is called in a row. With checkpointing "outside" the call of each block is
    checkpointed, with "inside" the body of each block is (module hooks then run once).
    """

    def __init__(self, d: int, depth: int, heads: int) -> None:
        super().__init__()
        self.outer_checkpoint = False
        self.repeat = 1  # calls of each block in a row
        self.embed = nn.Linear(CHANNELS, d, bias=False, dtype=DTYPE)
        self.blocks = nn.ModuleList(Block(d, heads) for _ in range(depth))
        self.head = nn.Linear(d, CHANNELS, bias=False, dtype=DTYPE)

    def set_checkpointing(self, where: str) -> None:
        """Set where non-reentrant checkpointing is applied: "outside" or "inside" each block, or "off"."""
        self.outer_checkpoint = where == "outside"
        for block in self.blocks:
            block.inner_checkpoint = where == "inside"  # type: ignore[assignment]

    def adapters(self) -> list[tuple[str, nn.Parameter]]:
        """Return the trainable parameters with their names, in the model's order."""
        return [(name, p) for name, p in self.named_parameters() if p.requires_grad]

    def run_block(self, block: nn.Module, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        if self.outer_checkpoint and torch.is_grad_enabled():
            return checkpoint(block, x, c, use_reentrant=False)
        return block(x, c)

    def finish(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.layer_norm(x, x.shape[-1:]))

    def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            for _ in range(self.repeat):
                x = self.run_block(block, x, c)
        return self.finish(x)


def build(case: Case) -> Dit:
    """Return the model of `case` on the host: frozen, with trainable adapters when training.

    In inference the adapters are taken as merged into the weights.
    """
    with torch.device("meta"):
        model = Dit(case.d, case.depth, case.head_count)
        model.requires_grad_(False)
        if case.mode == "train":
            for block in model.blocks:
                _adapt(block, case.rank, getattr(torch, case.adapter_dtype))
    model.repeat = case.repeat
    model.set_checkpointing(case.checkpoint if case.mode == "train" else "off")
    _fill(model, case.seed)
    return model.train(case.mode == "train")


def make_inputs(case: Case, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x, c and the training target, seeded, on `device`."""
    generator = torch.Generator().manual_seed(case.seed + 1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DTYPE).to(device)

    return (
        normal(case.batch, case.tokens, CHANNELS),
        normal(case.batch, case.d),
        normal(case.batch, case.tokens, CHANNELS),
    )


def _adapt(block: nn.Module, rank: int, dtype: torch.dtype) -> None:
    for owner, name in ((block.attn, "qkv"), (block.attn, "proj"), (block.mlp, "fc1"), (block.mlp, "fc2")):
        setattr(owner, name, LoraAdapter(getattr(owner, name), rank, dtype))


def _owners(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            yield module, name, parameter


def _fill(model: nn.Module, seed: int) -> None:
    """Replace every meta parameter by seeded values: slices of one pool of normals, scaled by 1/sqrt(fan-in)."""
    sizes = sum(p.numel() for p in model.parameters())
    pool = torch.randn(min(POOL, max(4099, sizes)), generator=torch.Generator().manual_seed(seed)).to(DTYPE)
    offset = 0
    for module, name, meta in _owners(model):
        value = host_empty(meta.shape, meta.dtype)
        # With a small `up`, adapters do not dominate the output. With a zero `up`, `down` would get no gradient.
        scale = (0.02 if name == "up" else 1.0) / math.sqrt(meta.shape[-1])
        flat, position = value.view(-1), 0
        while position < flat.numel():
            count = min(flat.numel() - position, pool.numel() - offset)
            torch.mul(pool[offset : offset + count], scale, out=flat[position : position + count])
            position += count
            offset = (offset + count) % pool.numel()
        offset = (offset + 7919) % pool.numel()
        setattr(module, name, nn.Parameter(value, requires_grad=meta.requires_grad))


def host_empty(shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised host tensor from NumPy's allocator.

    NumPy asks for huge pages, which makes the first access much faster.
    """
    count = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.empty(max(count, 1), dtype=np.uint8))[:count].view(dtype).view(shape)
