"""Defines `Apply`: what ``.to()`` and similar methods of a session's root module do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from ..common.errors import UnsupportedError
from ..model.managed_tensor import waits_elsewhere


class Movable(Protocol):
    """The interface of a session that is used by ``.to()`` and similar methods of the root module."""

    @property
    def module(self) -> nn.Module:
        """The root."""

    @property
    def device(self) -> torch.device:
        """The device on which the module computes."""

    @property
    def put_aside(self) -> bool:
        """Whether the session is parked with host copies of all weights, for a quick return to the device."""

    def dtypes(self) -> set[torch.dtype]:
        """Return the dtypes of the module's tensors."""

    def park(self) -> None:
        """Release the device memory of the session."""

    def unpark(self) -> None:
        """Move the weights to the device again."""


def _memory_format(function: Callable) -> torch.memory_format | None:
    """Return the memory format to which ``function``, an argument of ``_apply``, converts; None if it keeps formats."""
    for layout, dims in ((torch.channels_last, 4), (torch.channels_last_3d, 5)):
        rows = torch.empty((2,) * dims)
        try:
            from_rows, from_layout = function(rows), function(rows.to(memory_format=layout))
        except RuntimeError:  # torch has each format for one number of dimensions
            continue
        if from_rows.stride() != rows.stride():
            return layout
        if from_layout.stride() == rows.stride():
            return torch.contiguous_format
    return None


class Apply:
    """The replacement of the root's ``_apply``, which .to(), .cuda(), .half() and similar methods call.

    A move to the CPU parks the session (it then uses no device memory), and a move to the session's device
    moves the weights to the device again. A memory format is applied to the weights while the session is parked, so
    that the next layout has it. Raises UnsupportedError for another dtype or another device, and for a memory format of
    weights that stream packed or from a file.
    """

    def __init__(self, session: Movable) -> None:
        self._session = session

    def __call__(self, function: Callable, recurse: bool = True) -> nn.Module:
        session = self._session
        device, own = None, session.device
        for dtype in session.dtypes():
            after = function(torch.empty(0, dtype=dtype))
            if after.dtype != dtype:
                raise UnsupportedError(
                    f"a streamed module cannot become {after.dtype}; close the session, convert, and stream again"
                )
            device = after.device
        layout = _memory_format(function)
        if layout is not None:
            self._change_format(layout, recurse)
        if session.put_aside and device is not None and device.type == "cpu":
            return session.module
        if device is None or device == own or (device.type, device.index) == (own.type, None):
            session.unpark()
        elif device.type == "cpu":
            session.park()
        else:
            raise UnsupportedError(
                f"the module streams on {own}; it cannot move to {device}: close the session first"
            )
        return session.module

    def _change_format(self, layout: torch.memory_format, recurse: bool) -> None:
        """Give the module's tensors of four and five dimensions the memory format ``layout``."""
        module = self._session.module
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if tensor.dim() in (4, 5) and waits_elsewhere(tensor):
                raise UnsupportedError(
                    f"{name} streams packed or from a file, so its memory format cannot change to {layout}: close the "
                    "session, convert, and stream again, or stream with codec='raw' from memory"
                )
        self._session.park()

        def convert(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(memory_format=layout) if tensor.dim() in (4, 5) else tensor

        type(module)._apply(module, convert, recurse)

    def __deepcopy__(self, memo: dict) -> Any:
        copy: Any = memo.get(id(self._session.module))
        return functools.partial(type(copy)._apply, copy)
