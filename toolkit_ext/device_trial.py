"""Small models streamed and trained on the device a job will use: what of Carom works there at all."""

from __future__ import annotations

import math

import torch
from torch import nn

from ..core.common.errors import CaromError
from ..core.device import vbar
from ..core.device.make_engine import make_engine
from ..core.session.session import stream

WIDTH = 1024  # 4 MiB a layer in float32: more than allocators' grain, so that something really streams
_A_PAGE = 8  # layers in a page of the native pool


def works(device: torch.device) -> None:
    """Return when three layers stream through two slots and give the exact gradient; no random number is drawn.

    Raises CaromError, or what torch raises where streams, events or pinned memory are unusable.
    """
    _try(device, 3, WIDTH, 2 * WIDTH * WIDTH * 4 + (2 << 20), "torch")


def works_in_pool(device: torch.device, *, streaming: bool = True) -> None:
    """The same in comfy-aimdo's pool: three pages of layers, of which two stay, or all where nothing is to stream.

    Raises CaromError with the reason, or what torch raises.
    """
    from .job import engine_device

    found = vbar.find(make_engine(engine_device(device)), asked=True)
    if isinstance(found, str):
        raise CaromError(found)
    width = max(8, math.isqrt(vbar.PAGE // _A_PAGE // 4))
    pages = 2 if streaming else 8
    _try(device, 3 * _A_PAGE, width, pages * vbar.PAGE, "aimdo")


def _try(device: torch.device, depth: int, width: int, vram: int, pool: str) -> None:
    from .job import engine_device

    layers = [nn.utils.skip_init(nn.Linear, width, width, bias=False) for _ in range(depth)]
    model = nn.Sequential(*layers).requires_grad_(False)
    for layer in layers:
        nn.init.eye_(layer.weight)
    x = torch.ones(1, width, device=device, requires_grad=True)
    settings = {"granularity": "layer", "codec": "raw", "pool": pool}
    with stream(model, device=engine_device(device), vram=vram, **settings) as session:  # type: ignore[arg-type]
        report = session.report()
        if report.pool != pool:
            raise CaromError(report.pool_reason)
        for _ in range(2):
            model(x).sum().backward()
    if x.grad is None or not bool((x.grad == 2).all()):
        raise CaromError("a streamed model gave a wrong gradient; please report this with `carom doctor`")
