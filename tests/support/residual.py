"""A frozen model of residual blocks, each of two linear layers: many units of equal sizes."""

from __future__ import annotations

import torch
from torch import nn


class Residual(nn.Module):
    """``depth`` blocks, whose first layers are ``wide`` times as wide as ``width``; the weights are those of ``seed``."""

    def __init__(
        self,
        depth: int = 6,
        width: int = 192,
        wide: int = 2,
        dtype: torch.dtype = torch.bfloat16,
        seed: int = 0,
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, wide * width), nn.ReLU(), nn.Linear(wide * width, width))
            for _ in range(depth)
        )
        self.to(dtype).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def size(net: nn.Module) -> int:
    """Return the bytes of the parameters."""
    return sum(p.numel() * p.element_size() for p in net.parameters())
