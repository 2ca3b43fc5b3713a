"""What of a file goes to the device as one: a stretch of memory there, its tensors, and the pieces that are read of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .codec.unit import UnitDecoder
from .disk_wire import Wire
from .store.blob_check import BlobChecks, Sums
from .store.pieces import Piece, Placed, cut


@dataclass(eq=False)
class Load:
    """A stretch of device memory and its tensors. ``modules``: whose forward needs them; none: any forward does."""

    name: str
    buffer: torch.Tensor
    nbytes: int
    fresh: list[Placed]  # what is read of it
    tensors: list[torch.Tensor]
    modules: list[nn.Module]
    arrived: Callable[[], None]
    pieces: deque[Piece] = field(default_factory=deque)  # not asked for yet
    left: int = 0  # pieces that are not on the device yet
    here: bool = False
    wire: Wire | None = None  # how its bytes cross packed, where they can
    packed: PackedLoad | None = None  # set where they do

    def cut(self, size: int, staging_bytes: int) -> None:
        """Into pieces of at most ``size`` bytes; packed ones, where ``staging_bytes`` of the device hold them all."""
        wire = self.wire
        if wire is not None and wire.nbytes > staging_bytes:
            wire = None  # the host decodes
        whole = (self.nbytes, self.fresh) if wire is None else (wire.nbytes, wire.placed)
        pieces = [piece for piece in cut([whole], size)[0] if piece.reads]
        self.pieces.extend(pieces)
        if wire is not None and wire.decoder is not None:
            self.packed = PackedLoad(wire.decoder, wire.nbytes, pieces, BlobChecks([pieces], [wire.blobs]))
        self.left = len(self.pieces)


@dataclass(eq=False)
class PackedLoad:
    """A load whose pieces land on the device packed, all of them in one `Residents.bring`, and are unpacked from there."""

    decoder: UnitDecoder
    nbytes: int
    pieces: list[Piece]
    checks: BlobChecks
    found: dict[int, Sums] = field(default_factory=dict)  # of the pieces that have landed, by rank
    landing: torch.Tensor | None = None
    after: list[Any] = field(default_factory=list)  # what the next copy there has to wait for
