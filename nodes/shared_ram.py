"""The models of this process that Carom streams, and how they share RAM and pinned memory.

`host_share.py` has the rules for RAM. ComfyUI has the limit for pinned memory.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from ..core.device.system_pinner import pins_left
from . import comfyui_api
from .host_share import Holder, Share, divide

if TYPE_CHECKING:
    from .streaming import Streaming

# Models that ComfyUI unloaded and whose sessions are suspended, the longest unused first.
suspended_models: weakref.WeakKeyDictionary[Streaming, None] = weakref.WeakKeyDictionary()
# Models that exist.
all_models: weakref.WeakSet[Streaming] = weakref.WeakSet()
# Models that have a session.
open_models: weakref.WeakSet[Streaming] = weakref.WeakSet()


def take_share(model: Streaming, need: int, streams: int, many_passes: bool, ram: str) -> Share:
    """Return the share of RAM of ``model``, which begins to run, and let other models give up RAM for it.

    ``need``: bytes of its weights; ``streams``: of those that do not stay on the device; ``many_passes``: whether it reads
    these many times in a prompt; ``ram``: the value of its ``ram`` widget.
    """
    others = [one for one in suspended_models if one is not model]
    others += [one for one in open_models if one is not model and one not in suspended_models]
    holders = [Holder(one.ram, one.suspended or one.from_disk, one.from_disk) for one in others]
    limit = comfyui_api.ram_limit(ram, sum(one.ram_now() for one in (model, *others)))
    share = divide(limit, need, streams, many_passes, holders)
    for other, nbytes in zip(others, share.keeps, strict=True):
        if nbytes < other.ram:
            other.give_up_ram(nbytes)
    return share


def free_ram(value: str) -> int:
    """Return the bytes of RAM that a widget ``ram`` with ``value`` leaves for the weights of one more model."""
    held = sum(one.in_memory() for one in list(all_models))
    return max(0, comfyui_api.ram_limit(value, held) - held)


def make_pin_room(nbytes: int, device: torch.device) -> None:
    """Unpin suspended models until the limits of ComfyUI and of the system allow to pin ``nbytes`` for ``device``, on
    which a model is about to run.
    """
    for model in list(suspended_models):
        left = pins_left(device)
        if comfyui_api.pin_room() >= nbytes and (left is None or left >= nbytes):
            return
        model.give_up_pins()
