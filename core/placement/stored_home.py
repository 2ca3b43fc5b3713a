"""Defines `StoredHome`: reads and writes the value of a frozen weight that lies in a `Store`.

A home is the object that reads and writes a weight's value while the value is not in a slot (device memory).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ..common.errors import UnsupportedError
from ..model import managed_tensor
from ..model.elsewhere_tensor import ElsewhereHome, LazyTensor
from ..model.home import ManagedUnit
from ..model.units import Entry

if TYPE_CHECKING:
    from .stored_tier import StoredTier


class StoredHome(ElsewhereHome):
    """The home of a frozen weight in the store of ``tier``. The model's tensor has no bytes meanwhile."""

    __slots__ = ("_tier",)

    def __init__(self, unit: ManagedUnit, entry: Entry, tier: StoredTier) -> None:
        super().__init__(unit, entry, entry.tensor.detach().to("meta"))
        self._tier = tier

    def read(self) -> torch.Tensor:
        """Return the weight's value from the store."""
        return self._tier.store.read(self)

    def replace(self, value: torch.Tensor) -> None:
        """Write ``value`` to the store. Raises UnsupportedError for another shape or dtype."""
        self.refuse_other_layout(value)
        with torch.inference_mode(False), torch.no_grad():
            laid_out = torch.empty_strided(self.host.shape, self.host.stride(), dtype=self.host.dtype)
            laid_out.copy_(value.detach())
            with self.runtime.lock:  # T2
                # T7: first, so that an interrupt cannot leave a slot that counts as current although the value is new.
                self.unit.epoch += 1
                self._tier.store.write(self, laid_out)

    def keep(self, value: torch.Tensor) -> None:
        """Store ``value``, which the model wrote to the weight in a slot."""
        self.replace(value)

    def change(self, func: Callable, args: tuple, kwargs: dict) -> None:
        """Run the in-place operator ``func`` on a copy of the weight, and store the result."""
        leaves = [leaf for leaf in (*args[1:], *kwargs.values()) if isinstance(leaf, LazyTensor)]
        args, kwargs = managed_tensor.substitute(
            args[1:], kwargs, {id(leaf): leaf._carom.read() for leaf in leaves}
        )
        value = self.read().clone()
        func(value, *args, **kwargs)
        self.replace(value)

    def set_trainable(self, trainable: bool) -> None:
        """Raise UnsupportedError if ``trainable``, because a weight without bytes of its own is frozen.

        A weight that required a gradient when the layout was made may do so again: the first pass that records
        gradients changes the layout.
        """
        if trainable and not self.entry.untrained:
            raise UnsupportedError(
                f"{self.entry.name} lies in a store and cannot be trained; set requires_grad before streaming"
            )
        super().set_trainable(trainable)
