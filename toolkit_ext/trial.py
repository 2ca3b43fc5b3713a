"""A small model streamed and trained on the device a job will use: whether bouncing works there at all."""

from __future__ import annotations

import torch
from torch import nn

from ..core.errors import CaromError
from ..core.session import stream

WIDTH = 1024  # 4 MiB a layer in float32: more than allocators' grain, so that something really streams


def works(device: torch.device) -> None:
    """Return when three layers stream through two slots and give the exact gradient; no random number is drawn.

    Raises CaromError, or what torch raises where streams, events or pinned memory are unusable.
    """
    from .job import engine_device

    layers = [nn.utils.skip_init(nn.Linear, WIDTH, WIDTH, bias=False) for _ in range(3)]
    model = nn.Sequential(*layers).requires_grad_(False)
    for layer in layers:
        nn.init.eye_(layer.weight)
    x = torch.ones(1, WIDTH, device=device, requires_grad=True)
    with stream(model, device=engine_device(device), vram=2 * WIDTH * WIDTH * 4 + (2 << 20)):
        model(x).sum().backward()
    if x.grad is None or not bool((x.grad == 1).all()):
        raise CaromError("a streamed model gave a wrong gradient; please report this with `carom doctor`")
