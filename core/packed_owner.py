"""What leads from a parameter that waits packed to its bytes: its value for who asks, another value for who writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from . import ops
from .away import AwayOwner, LazyTensor
from .errors import UnsupportedError
from .packed_tensors import PackedTensor
from .streamed import Streamed
from .units import Entry

if TYPE_CHECKING:
    from .packed_placement import PackedPlacement
    from .streamer import Streamer


class PackedOwner(AwayOwner):
    """An owner whose bytes are packed in host memory."""

    __slots__ = ("packed", "placement")

    def __init__(
        self,
        streamer: Streamer,
        unit: Streamed,
        entry: Entry,
        packed: PackedTensor,
        placement: PackedPlacement,
    ) -> None:
        super().__init__(streamer, unit, entry, packed.layout)
        self.packed, self.placement = packed, placement

    def read(self) -> torch.Tensor:
        return self.packed.value()

    def replace(self, value: torch.Tensor) -> None:
        if value.shape != self.host.shape or value.dtype != self.host.dtype:
            raise UnsupportedError(
                f"{self.entry.name} is streamed as {self.host.dtype} {tuple(self.host.shape)}; it cannot become "
                f"{value.dtype} {tuple(value.shape)} while attached: close the session first"
            )
        self.placement.replace(self, value)

    def keep(self, value: torch.Tensor) -> None:
        self.replace(value)

    def change(self, func: Callable, args: tuple, kwargs: dict) -> None:
        leaves = [leaf for leaf in (*args[1:], *kwargs.values()) if isinstance(leaf, torch.Tensor)]
        devices = [leaf.device for leaf in leaves if leaf.dim() > 0 and not isinstance(leaf, LazyTensor)]
        value = self.read().to(next((device for device in devices if device.type != "cpu"), "cpu"))
        args, kwargs = ops.substitute(
            args[1:], kwargs, {id(v): v._carom.read() for v in leaves if isinstance(v, LazyTensor)}
        )
        func(value, *args, **kwargs)
        self.replace(value)

    def set_trainable(self, trainable: bool) -> None:
        if trainable:
            raise UnsupportedError(
                f"{self.entry.name} waits packed and cannot be trained; set requires_grad before streaming, or stream "
                "with codec='raw'"
            )
