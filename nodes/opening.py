"""`open_session`: opens a session for a model with the device memory, pinned memory and RAM that it may take."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..core.common.errors import BudgetError
from ..core.session.session import Session
from ..core.session.stream_settings import StreamSettings
from . import comfyui_api
from .host_allocator import give_large_blocks_back
from .host_share import Share
from .node_settings import Settings, parse_peers
from .shared_ram import make_pin_room


def open_session(
    root: nn.Module,
    device: torch.device,
    bound: int,
    limit: float,
    share: Share,
    total: int,
    settings: Settings,
    compiled: bool = False,
) -> tuple[Session, int]:
    """Return a session for ``root`` and its budget: ``bound`` bytes of ``device``, or the least that works if that is
    more.

    ``limit``: the user's own limit in bytes; ``share``: the RAM for the weights; ``total``: bytes of the whole model;
    ``compiled``: whether a compile node wrapped the model. Raises BudgetError if the least budget exceeds ``limit``, or another CaromError.
    """
    try:
        return _stream(root, device, bound, share, total, settings, compiled), bound
    except BudgetError as error:
        if error.least_bytes is None or error.least_bytes > limit:
            raise
        # The model cannot run with less. ComfyUI's estimate has reserves that cover the difference.
        return _stream(root, device, error.least_bytes, share, total, settings, compiled), error.least_bytes


def _stream(
    root: nn.Module,
    device: torch.device,
    budget: int,
    share: Share,
    total: int,
    settings: Settings,
    compiled: bool,
) -> Session:
    make_pin_room(comfyui_api.module_bytes(root), device)
    options: dict[str, Any] = {
        "device": device, "vram": budget, "granularity": settings.granularity, "codec": settings.codec,
        "peers": peers_of(settings, device), "compiled": compiled,
    }  # fmt: skip
    if share.whole:
        return stream(root, ram=share.nbytes, pins=comfyui_api.pin_room(), **options)
    if device.type == "cpu":
        give_large_blocks_back()  # else what computing takes beside the weights exceeds any bound
    # With less RAM than streams at least, the weights stream from disk also where the cache then holds all of them:
    # a cache can be divided between models.
    small = max(1, min(share.nbytes, (total - min(budget, total)) // 2))
    disk = comfyui_api.spill_folder(total)
    session = stream(root, ram=small, disk=disk, **options)
    if small < share.nbytes:
        try:
            session.set_budget(ram=share.nbytes)
        except BaseException:
            session.close()
            raise
    return session


def stream(root: nn.Module, **options: Any) -> Session:
    """Return a session for ``root``. ``options``: fields of `StreamSettings`, more than `carom.stream` has."""
    return Session(root, StreamSettings(**options))


def peers_of(settings: Settings, device: torch.device) -> list[tuple[Any, str]]:
    """Return the pairs (device, size) for ``peers`` of `carom.stream`, for a model that computes on ``device``."""
    named = parse_peers(settings.peers)
    if named is None:
        return [(name, "auto") for name in comfyui_api.other_gpus(device)]
    # ComfyUI's own name of a GPU is "gpu:1".
    return [
        (comfyui_api.chosen_device(name)[0] if name.startswith("gpu:") else name, size)
        for name, size in named
    ]
