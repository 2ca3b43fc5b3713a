"""Defines `AttachedTensors`, which records tensors whose Python class was replaced by a managed-tensor class,
and restores them.

A managed tensor is a tensor of the model whose value Carom keeps elsewhere, in a home (the object that reads
and writes the value). A tier is the store of the streamed units of a layout (pinned host memory, packed host
memory, or a file).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from ..common.run_all import run_all
from ..device.engine import Engine
from ..model.gradient_hooks import delay_hooks, restore_hooks
from ..model.home import Home
from .residents import replace


class AttachedTensors:
    """The tensors of a module that a tier turned into managed tensors, each with its original class and
    device.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._before: list[tuple[torch.Tensor, type, torch.device]] = []

    def remember(self, tensor: torch.Tensor, came_from: torch.device) -> None:
        """Record the present class of ``tensor``. To be called before a tier changes the tensor.

        ``came_from``: the device to which `undo` moves the value.
        """
        self._before.append((tensor, type(tensor), came_from))

    @property
    def came_from(self) -> set[torch.device]:
        """The set of devices to which `undo` moves values."""
        return {device for _, _, device in self._before}

    def undo(self) -> None:
        """Restore every tensor's class, and move values that came from an accelerator back to that device.

        After a failure, the other tensors are restored nevertheless, and the call may be repeated.
        """
        run_all(*(partial(self._restore, record) for record in reversed(self._before)))
        self._before.clear()

    def _restore(self, record: tuple[torch.Tensor, type, torch.device]) -> None:
        """Restore one tensor."""
        tensor, before, came_from = record
        tensor.__class__ = before
        tensor.__dict__.pop("_carom", None)
        restore_hooks(tensor)
        if came_from.type != "cpu":
            replace(tensor, self._engine.move(tensor.detach(), came_from))

    @property
    def empty(self) -> bool:
        """Whether no tensor is left to be restored."""
        return not self._before


def attach(home: Home, parameter: type, tensor: type) -> None:
    """Turn the model's tensor into a managed tensor that reads and writes its value through ``home``.

    A Parameter gets the class ``parameter``; a buffer gets the class ``tensor``. Both classes are
    managed-tensor classes of `model`.
    """
    found = home.tensor
    found._carom = home  # type: ignore[attr-defined]
    found.__class__ = parameter if isinstance(found, nn.Parameter) else tensor
    if home.trainable:
        delay_hooks(found)
