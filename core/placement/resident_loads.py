"""Defines `Load` and `PackedLoad`.

A `Load` is a group of tensors of a file that stay on the device and are loaded together, into one device
buffer. A `PackedLoad` is the state of a load that is copied to the device packed. Its bytes are decoded when they
arrive, or stay packed on the device if the load is a streamed unit that is decoded at each use.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..codec.unit_decoder import UnitDecoder
from ..device.engine import Engine
from ..host.blob_checksums import BlobChecks, PieceChecksums
from ..host.cache_pieces import CachePiece, PlacedTensor, cut
from .wire_format import WireFormat


@dataclass(eq=False)
class Load:
    """Tensors that are loaded together into one device ``buffer`` of ``nbytes`` bytes.

    ``modules``: the modules whose forward needs the tensors; empty if any forward may.
    ``arrived``: called once the bytes are on the device.
    ``stays_packed``: whether the bytes of ``wire`` are the contents of ``buffer``, and are not decoded.
    ``engine``: of the device of ``buffer``, if that is not the session's device.
    """

    name: str
    buffer: torch.Tensor
    nbytes: int
    fresh: list[PlacedTensor]  # the tensors of the buffer that are read from the file
    tensors: list[torch.Tensor]
    modules: list[nn.Module]
    arrived: Callable[[], None]
    pieces: deque[CachePiece] = field(default_factory=deque)  # pieces whose reads are not submitted yet
    whole: tuple[CachePiece, ...] = ()  # all pieces
    pieces_left: int = 0  # number of pieces that are not on the device yet
    loaded: bool = False
    wire: WireFormat | None = None  # the packed byte layout of the load, None if it cannot be copied packed
    stays_packed: bool = False
    engine: Engine | None = None
    packed: PackedLoad | None = None  # set if the load is copied packed

    def cut(self, size: int, staging_bytes: int) -> None:
        """Divide the load into pieces of at most ``size`` bytes. The pieces are packed if the load stays
        packed, or if all of them fit in ``staging_bytes`` of device memory.
        """
        wire = self.wire
        if wire is not None and not self.stays_packed and wire.nbytes > staging_bytes:
            wire = None  # too large for staging memory: the host decodes the tensors
        whole = (self.nbytes, self.fresh) if wire is None else (wire.nbytes, wire.placed)
        pieces = [piece for piece in cut([whole], size)[0] if piece.reads]
        if wire is not None and wire.decoder is not None:
            decoder = None if self.stays_packed else wire.decoder
            self.packed = PackedLoad(decoder, wire.nbytes, pieces, BlobChecks([pieces], [wire.blobs]))
        self.restart(pieces)

    def restart(self, pieces: Sequence[CachePiece] | None = None) -> None:
        """Begin with the first piece. ``pieces``: those into which the load is cut, by default the present ones."""
        self.whole = self.whole if pieces is None else tuple(pieces)
        self.pieces, self.pieces_left = deque(self.whole), len(self.whole)


@dataclass(eq=False)
class PackedLoad:
    """The state of a load whose packed pieces are copied to the device, all in one call of
    `ResidentLoader.load`.

    ``decoder``: decodes the pieces from staging memory into the load's buffer. None if they stay packed; they
    are then copied to the buffer itself.
    """

    decoder: UnitDecoder | None
    nbytes: int
    pieces: list[CachePiece]
    checks: BlobChecks
    # checksums of the copied pieces, by the piece's number
    found: dict[int, PieceChecksums] = field(default_factory=dict)
    landing: torch.Tensor | None = None
    after: list[Any] = field(default_factory=list)  # events that the next copy to ``landing`` has to wait for
