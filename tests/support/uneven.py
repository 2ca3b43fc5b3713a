"""A model whose blocks may take different times to compute, on a simulated device."""

from __future__ import annotations

import carom
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, DEPTH = 48, 12


class Block(nn.Module):
    def __init__(self, width: int, extra: int = 0) -> None:
        super().__init__()
        self.extra = extra
        self.mix = nn.Linear(width, 6 * width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        x = x + self.mix(x)[:, : x.shape[1]]
        for _ in range(self.extra):
            x = torch.tanh(x)
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self, checkpointed: bool = False, extra: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(WIDTH, extra * (n >= DEPTH // 2)) for n in range(DEPTH))
        self.checkpointed = checkpointed
        self.requires_grad_(False)

    def forward(self, x):
        for block in self.blocks:
            if self.checkpointed and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return x


def size(net):
    return sum(p.numel() * p.element_size() for p in net.parameters())


def device(net, ratio):
    """Return a simulated device whose link copies the weights in 1/ratio of the time of a pass (42 us a block)."""
    return carom.SimulatedDevice(
        timing="early", link_bytes_per_second=size(net) / (DEPTH * 42e-6) * ratio, copy_latency_seconds=1e-6,
        flops=1e15, kernel_seconds=7e-6,
    )  # fmt: skip


def step(net, train):
    x = torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH).requires_grad_(train)
    if not train:
        with torch.no_grad():
            return net(x)
    net(x).sum().backward()
    return x.grad


def uneven():
    """Return (model, device, budget in bytes) with a model of which half of the blocks compute long enough to hide
    their copies.

    The other blocks should be resident, which no fixed rule can know.
    """
    net = Net(extra=18)
    return net, device(net, 0.25), int(size(net) * 0.5)
