"""Defines `PackedHome`, which reads and replaces the value of a weight that is packed (losslessly compressed)
in host memory.

A home is the object that reads and writes a weight's value while the value is not in a slot (device memory).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ..common.errors import UnsupportedError
from ..model import managed_tensor
from ..model.elsewhere_tensor import ElsewhereHome, LazyTensor
from ..model.units import Entry
from ..model.unread_tensor import Snapshot
from .packed_tensor import PackedTensor

if TYPE_CHECKING:
    from .packed_backing import PackedBacking
    from .packed_tier import PackedTier


class PackedHome(ElsewhereHome):
    """The home of a weight whose bytes are packed in host memory."""

    __slots__ = ("packed", "_tier")

    def __init__(
        self,
        unit: PackedBacking,
        entry: Entry,
        packed: PackedTensor,
        tier: PackedTier,
    ) -> None:
        super().__init__(unit, entry, packed.layout)
        self.packed, self._tier = packed, tier

    def forget(self) -> None:
        super().forget()
        self.packed.tensor = self.packed.layout

    def read(self) -> torch.Tensor:
        """Return the weight's value, decoded, as a new CPU tensor."""
        return self.packed.value()

    def snapshot(self) -> Snapshot:
        """Return the present value, which the packed bytes keep: a write then makes new ones."""
        packed = self.packed
        header, blob = packed.header, packed.blob
        kept = PackedTensor(packed.layout, packed.layout, packed.origin, header, blob)
        packed.snapshots.add(kept)

        def current() -> bool:
            return packed.header is header and (header is not None or packed.blob is blob)

        return Snapshot(self.host, kept.value, current)

    def replace(self, value: torch.Tensor) -> None:
        """Pack ``value`` and store it as the weight's value. Raises UnsupportedError for another shape or
        dtype.
        """
        self.refuse_other_layout(value)
        self._tier.replace(self, value)

    def keep(self, value: torch.Tensor) -> None:
        """Store ``value``, which the model wrote to the weight in a slot."""
        self.replace(value)

    def change(self, func: Callable, args: tuple, kwargs: dict) -> None:
        """Run the in-place operator ``func`` on a decoded copy of the weight, and store the result."""
        leaves = [leaf for leaf in (*args[1:], *kwargs.values()) if isinstance(leaf, torch.Tensor)]
        devices = [leaf.device for leaf in leaves if leaf.dim() > 0 and not isinstance(leaf, LazyTensor)]
        value = self.read().to(next((device for device in devices if device.type != "cpu"), "cpu"))
        args, kwargs = managed_tensor.substitute(
            args[1:], kwargs, {id(v): v._carom.read() for v in leaves if isinstance(v, LazyTensor)}
        )
        func(value, *args, **kwargs)
        self.replace(value)

    def set_trainable(self, trainable: bool) -> None:
        """Raise UnsupportedError if ``trainable``, because packed weights are frozen.

        A weight that required a gradient when the layout was made may do so again: the first pass that records
        gradients changes the layout.
        """
        if trainable and not self.entry.untrained:
            raise UnsupportedError(
                f"{self.entry.name} waits packed and cannot be trained; set requires_grad before streaming, or stream "
                "with codec='raw'"
            )
        super().set_trainable(trainable)
