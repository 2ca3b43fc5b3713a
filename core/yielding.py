"""Resident units that leave the device within a pass, because something else needs their memory now.

Between passes a change of layout makes room. Within one, a resident unit's tensors can go to the host as they are: until they
are back they wear a class that brings them when an operator is given one of them. That is for the rest of a pass; then the
session lays its weights out anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from . import ops, pending
from .attach import Placement
from .host import host_memory
from .host_copies import fingerprint
from .on_device import Lot, Moved
from .pending import PendingParameter, PendingTensor, unwear
from .slots import ALIGN
from .transfer import Engine
from .units import Unit


class Brings(Protocol):
    """Who brings a resident back that is needed."""

    engine: Engine

    def bring(self, resident: Resident) -> None:
        """Have it on the device again."""


class Resident:
    """A unit with device memory of its own. Everything here runs under the streamer's lock."""

    def __init__(self, unit: Unit, brings: Brings, placement: Placement) -> None:
        self.unit = unit
        self._brings, self._placement = brings, placement
        self.depth = 0  # of its modules' forwards that run now
        self.used = 0  # when one of them ran last, as a number that rises
        self.away = False
        self.host: list[torch.Tensor] | None = None  # its values, from when it left first
        self._seen: torch.Tensor | None = None  # fingerprint of its tensors, when these values were theirs
        self._moved: list[Moved] = []  # what the placement knows of it, while it is away

    @property
    def _tensors(self) -> list[torch.Tensor]:
        return [entry.tensor for entry in self.unit.entries]

    def leave(self) -> int:
        """Go to the host; returns the bytes of the device that were given up, 0 where it has to stay.

        The device must be idle: nothing is read any more of what is given up.
        """
        engine, tensors = self._brings.engine, self._tensors
        if self.away or self.depth or not all(_can_leave(tensor, engine) for tensor in tensors):
            return 0
        if self.host is None and host_memory().free < self.unit.nbytes:
            return 0
        with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
            if not self._copied(tensors):
                return 0
            assert self.host is not None
            moved = self._placement.let_go(tensors, self.unit.nbytes)
            if moved is None:
                return 0
            self._moved = moved
            for tensor, value in zip(tensors, self.host, strict=True):
                tensor.data = value
                tensor._pending = (self._brings, self)  # type: ignore[attr-defined]
                is_parameter = isinstance(tensor, nn.Parameter)
                tensor.__class__ = YieldedParameter if is_parameter else YieldedTensor
        self.away = True
        return self.unit.nbytes

    def _copied(self, tensors: list[torch.Tensor]) -> bool:
        """Have the values on the host, False where they do not fit there. Versions would not tell whether those of
        the last time still hold: what is written through ``.data`` counts nowhere."""
        try:
            seen = fingerprint(tensors)
        except RuntimeError:  # the device has no room even for that
            seen = None
        if (
            self.host is not None
            and seen is not None
            and self._seen is not None
            and torch.equal(seen, self._seen)
        ):
            return True
        self.host, self._seen = None, seen
        try:
            self.host = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
        except (RuntimeError, MemoryError):
            return False
        return True

    def come(self) -> None:
        """Be on the device again. Raises torch.OutOfMemoryError where there is no room."""
        engine, host = self._brings.engine, self.host
        assert self.away and host is not None
        with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
            buffer = engine.allocate(self.unit.nbytes)
            at = 0
            for tensor, value in zip(self._tensors, host, strict=True):
                nbytes = value.numel() * value.element_size()
                piece = engine.alias(buffer, at, nbytes).view(value.dtype)
                view = piece.as_strided(value.shape, value.stride(), piece.storage_offset())
                view.copy_(value)
                unwear(tensor)
                tensor.data = view
                at += -(-nbytes // ALIGN) * ALIGN
            self._placement.take_back(self._moved, Lot(buffer.data_ptr(), self.unit.nbytes), self.unit.nbytes)
        self.away = False

    def close(self) -> None:
        """Its tensors are plain ones where they are now: on the host, where it is away. Idempotent."""
        if self.away:
            for tensor in self._tensors:
                unwear(tensor)
        self.away, self.host, self._moved = False, None, []


def _can_leave(tensor: torch.Tensor, engine: Engine) -> bool:
    plain = type(tensor) in (nn.Parameter, torch.Tensor) and not tensor.is_inference()
    return plain and tensor.device == engine.device and not tensor.requires_grad and tensor.is_leaf


def _function(cls: type, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
    if func in (ops._GET_DEVICE, ops._GET_IS_CUDA):  # hosts place inputs by where the weights are
        device = args[0]._pending[0].engine.device
        return device if func == ops._GET_DEVICE else device.type == "cuda"
    return pending._function(cls, func, types, args, kwargs)


class YieldedParameter(PendingParameter):
    """The class that a Parameter of a resident unit wears while it is away."""

    __torch_function__: Any = classmethod(_function)


class YieldedTensor(PendingTensor):
    """The same for buffers."""

    __torch_function__: Any = classmethod(_function)
