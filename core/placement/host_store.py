"""Defines `HostStore`: the host memory of a session that is kept from one layout to the next.

It consists of an arena of pinned blocks, host copies of units, and packed weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..host.arena import HostArena
from ..host.spare_blocks import SpareBlocks
from ..model.units import Unit
from .host_copies import HostCopies, HostCopy
from .packed_tensor import PackedTensor


def _always(copy: HostCopy) -> bool:
    """Return True. The default of ``serves`` in `HostStore.reuse`: every host copy is accepted."""
    return True


@dataclass(frozen=True, eq=False)
class HostStore:
    """Host memory that the successive placements of a session share.

    ``arena``: allocates and pins blocks.
    ``copies``: host copies of units from the previous layout, None if none are kept.
    ``shelf``: packed weights, by the id of the model's tensor. While a weight is on the shelf, the model's
    tensor has no bytes of its own.
    ``spares``: pinned blocks that were made ahead for residents, None if none are.
    """

    arena: HostArena
    copies: HostCopies | None
    shelf: dict[int, PackedTensor]
    spares: SpareBlocks | None = None

    # -- packed weights

    def value(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return the value of ``tensor``: the tensor itself, or its packed weight decoded on ``device``."""
        packed = self.shelf.get(id(tensor))
        return tensor.detach() if packed is None else packed.value(device)

    def take(self, tensor: torch.Tensor) -> PackedTensor | None:
        """Remove the packed weight of ``tensor`` from the shelf and return it, or return None.

        The caller has to give the tensor its value in another form.
        """
        tensor.__dict__.pop("_carom", None)
        return self.shelf.pop(id(tensor), None)

    # -- host copies of units from the previous layout

    def find(self, unit: Unit) -> HostCopy | None:
        """Return the unit's host copy, or None."""
        return None if self.copies is None else self.copies.find(unit)

    def is_current(self, copy: HostCopy) -> bool:
        """Return whether ``copy`` holds the present values of its tensors, and none of them is on the
        device."""
        mine = all(
            packed is None or (self.shelf.get(id(tensor)) is packed and copy.has(packed.blob))
            for tensor, packed in zip(copy.tensors, copy.packed, strict=True)
        )
        return copy.device_fingerprint is None and mine and copy.lies_in_block()

    def reuse(self, unit: Unit, serves: Callable[[HostCopy], bool] = _always) -> HostCopy | None:
        """Remove the unit's host copy from the store and return it, if it is current and ``serves(copy)`` is
        true. Otherwise discard the copy and return None.
        """
        copy = self.find(unit)
        if copy is None or self.copies is None:
            return None
        if not self.is_current(copy) or not serves(copy):
            self.copies.discard(copy)
            return None
        return self.copies.take(unit)

    def attach_to_copy(self, copy: HostCopy) -> None:
        """Let the tensors of ``copy``, which were on the device, use the memory of the copy again."""
        for tensor, view, packed in zip(copy.tensors, copy.views, copy.packed, strict=True):
            if packed is None:
                assert view is not None
                tensor.data = view
            else:
                self.shelf[id(tensor)] = packed
                packed.give_up_memory()
