"""Defines `Load`: tensors of a file that stay on the device and are loaded together, into one device buffer.

A load may cross to the device packed. Its bytes are then decoded when they arrive, or stay packed on the device if the load
is a streamed unit that is decoded at each use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..device.engine import Engine
from ..host.blob_checksums import Blob
from ..host.cache_pieces import PlacedTensor
from .wire_format import WireFormat


@dataclass(eq=False)
class Load:
    """Tensors that are loaded together into one device ``buffer`` of ``nbytes`` bytes.

    ``modules``: the modules whose forward needs the tensors; empty if any forward may.
    ``arrived``: called once the bytes are on the device.
    ``wire``: the packed byte layout of the load, None if it cannot be copied packed.
    ``stays_packed``: whether the bytes of ``wire`` are the contents of ``buffer``, and are not decoded.
    ``engine``: of the device of ``buffer``, if that is not the session's device.
    ``issued``: whether the copies were issued. ``copied``: the event at their end, None once the host knows that it passed.
    """

    name: str
    buffer: torch.Tensor
    nbytes: int
    fresh: list[PlacedTensor]  # the tensors of the buffer that are read from the file
    tensors: list[torch.Tensor]
    modules: list[nn.Module]
    arrived: Callable[[], None]
    wire: WireFormat | None = None
    stays_packed: bool = False
    engine: Engine | None = None
    loaded: bool = False
    issued: bool = False
    copied: Any = None

    def fit(self, staging_bytes: int) -> None:
        """Let the host decode the tensors if their packed bytes do not fit into ``staging_bytes`` of device memory."""
        if self.wire is not None and not self.stays_packed and self.wire.nbytes > staging_bytes:
            self.wire = None

    @property
    def decodes(self) -> bool:
        """Whether the bytes are decoded on the device when they arrive."""
        return self.wire is not None and self.wire.decoder is not None and not self.stays_packed

    @property
    def read(self) -> tuple[int, Sequence[PlacedTensor]]:
        """The bytes that are read and copied, as (their number, the tensors that fill them)."""
        if self.wire is not None:
            return self.wire.nbytes, self.wire.placed
        return (self.nbytes, self.fresh) if self.fresh else (0, ())

    @property
    def blobs(self) -> Sequence[Blob]:
        """The packed tensors, whose checksums are verified before they are decoded."""
        return () if self.wire is None or self.wire.decoder is None else self.wire.blobs
