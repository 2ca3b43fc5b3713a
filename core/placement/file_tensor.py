"""Defines `FileTensor`: a tensor of a weights file with its place in the module, and the value that replaces the
file's if the tensor is written to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..checkpoint.mapping import BoundTensor
from ..common.errors import WeightsError
from ..host.arena import PAGE, Block, HostArena
from ..model.units import Site
from ..plan.residency import round_up

# In bytes. Smaller written values share pageable memory; larger values get a block of pinnable memory each.
_SMALL = 64 << 10


@dataclass(frozen=True, eq=False)
class HostValue:
    """The value of a weight in host memory.

    ``block``: the pinnable memory that holds the value, None for a small value.
    """

    value: torch.Tensor
    block: Block | None = None


def no_room_needed(nbytes: int) -> None:
    """Do nothing. The default of `FileTensor.make_room` and `FileTensor.note_change`."""


@dataclass(eq=False)
class FileTensor:
    """One tensor of the weights file, and its place in the module.

    ``tensor``: the meta tensor that replaces ``original`` in the module, at ``sites``.
    ``trainable``: whether ``original`` required a gradient.
    ``changed``: the value on the CPU if it differs from the file's value, otherwise None.
    ``block``: the pinnable memory of ``changed``.
    ``mapped``: whether ``original`` is a view of a mapped file, and its bytes are read from there.
    ``make_room``: called with a number of bytes before `change` allocates them in host memory.
    ``note_change``: called with the tensor's `kept_bytes` when it gets a value of its own for the first time.
    """

    bound: BoundTensor
    tensor: torch.Tensor
    original: torch.Tensor
    sites: list[Site]
    trainable: bool
    changed: torch.Tensor | None = None
    block: Block | None = None
    mapped: bool = False
    make_room: Callable[[int], object] = no_room_needed
    note_change: Callable[[int], object] = no_room_needed

    @property
    def name(self) -> str:
        """The tensor's name in the module."""
        return self.bound.name

    @property
    def kept_bytes(self) -> int:
        """Bytes of host memory that a written value of this tensor takes."""
        return self.bound.nbytes if self.bound.nbytes < _SMALL else round_up(self.bound.nbytes, PAGE)

    def change(self, value: torch.Tensor) -> None:
        """Store a copy of ``value`` in host memory as the tensor's value from now on. Raises MemoryError if
        host memory has no room.
        """
        self.make_room(self.kept_bytes)
        self.accept(self.copy_of(value))

    def copy_of(self, value: torch.Tensor) -> HostValue:
        """Return a copy of ``value`` in host memory of its own, which is pinnable unless the value is small.
        Raises MemoryError.
        """
        bound, block = self.bound, None
        with torch.inference_mode(False), torch.no_grad():
            if bound.nbytes < _SMALL:
                own = torch.empty_strided(bound.shape, self.tensor.stride(), dtype=bound.dtype)
                return HostValue(own.copy_(value.detach()))
            block = HostArena(None, None).allocate(bound.nbytes)
            # Give the view an untyped storage of exactly its size, so that torch.save does not write the
            # padding of the block.
            flat = torch.frombuffer(block.data.numpy(), dtype=torch.uint8).view(bound.dtype)
            own = flat.as_strided(bound.shape, self.tensor.stride())
            own.copy_(value.detach())
        return HostValue(own, block)

    def accept(self, kept: HostValue) -> None:
        """Store ``kept`` (from `copy_of`) as the tensor's value. Must not be called while a copy to the
        device may still read the previous value.
        """
        if self.block is not None:
            self.block.unpin()
        if self.changed is None:
            self.note_change(self.kept_bytes)
        self.changed, self.block = kept.value, kept.block

    def check(self, value: torch.Tensor) -> None:
        """Raise WeightsError unless ``value`` has the tensor's shape and dtype and is not on the meta device."""
        if (value.shape, value.dtype) != (self.tensor.shape, self.tensor.dtype) or value.is_meta:
            raise WeightsError(
                f"{self.name} is {self.tensor.dtype} {tuple(self.tensor.shape)}; cannot write {value.dtype} "
                f"{tuple(value.shape)} on {value.device}"
            )
