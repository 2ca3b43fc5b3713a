"""Trials that stream a small model forward and backward on a job's device, to find out whether Carom works there."""

from __future__ import annotations

import math

import torch
from torch import nn

from ..core.common.errors import CaromError
from ..core.device import vbar
from ..core.device.make_engine import make_engine
from ..core.session.session import stream
from . import devices

# A float32 layer has 4 MiB. This is more than the granularity of allocators, so that a layer has to stream.
WIDTH = 1024
_A_PAGE = 8  # layers in a page of comfy-aimdo's pool


def works(device: torch.device) -> None:
    """Stream three layers through two slots and check for the exact gradient. No random number is drawn.

    Raises CaromError if the trial fails, or torch's exception if streams, events or pinned memory are unusable.
    """
    _try(device, 3, WIDTH, 2 * WIDTH * WIDTH * 4 + (2 << 20), "torch")


def works_in_pool(device: torch.device, *, streaming: bool = True) -> None:
    """Stream three pages of layers in comfy-aimdo's pool and check for the exact gradient.

    The budget holds two of the pages, or all three if ``streaming`` is False. Raises CaromError with the reason if the
    trial fails, or torch's exception.
    """
    found = vbar.find(make_engine(devices.engine_device(device)), asked=True)
    if isinstance(found, str):
        raise CaromError(found)
    width = max(8, math.isqrt(vbar.PAGE // _A_PAGE // 4))
    pages = 2 if streaming else 8
    _try(device, 3 * _A_PAGE, width, pages * vbar.PAGE, "aimdo")


def _try(device: torch.device, depth: int, width: int, vram: int, pool: str) -> None:
    layers = [nn.utils.skip_init(nn.Linear, width, width, bias=False) for _ in range(depth)]
    model = nn.Sequential(*layers).requires_grad_(False)
    for layer in layers:
        nn.init.eye_(layer.weight)
    x = torch.ones(1, width, device=device, requires_grad=True)
    settings = {"granularity": "layer", "codec": "raw", "pool": pool}
    with stream(model, device=devices.engine_device(device), vram=vram, **settings) as session:  # type: ignore[arg-type]
        report = session.report()
        if report.pool != pool:
            raise CaromError(report.pool_reason)
        for _ in range(2):
            model(x).sum().backward()
    if x.grad is None or not bool((x.grad == 2).all()):
        raise CaromError("a streamed model gave a wrong gradient; please report this with `carom doctor`")
