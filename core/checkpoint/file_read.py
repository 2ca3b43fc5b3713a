"""Defines `FileRead`, one range of a file and its place in memory, and `ReadTarget`, the memory that reads fill."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .index import SourceFile
from .packed_source import PackedSource


@dataclass(frozen=True, slots=True)
class FileRead:
    """A read of ``nbytes`` bytes at ``offset`` of ``file`` to byte ``at`` of the memory that it fills; ``label`` names
    the bytes in errors.
    """

    file: SourceFile
    offset: int
    nbytes: int
    at: int
    label: str

    @property
    def disk_bytes(self) -> int:
        """The number of bytes that the drive reads: for a packed tensor, this range's share of the blob."""
        if isinstance(self.file, PackedSource):
            return -(-self.nbytes * self.file.stored.nbytes // max(1, self.file.size))
        return self.nbytes


@dataclass(frozen=True, eq=False, slots=True)
class ReadTarget:
    """Writable host memory that reads fill: its bytes, and their address. Made once for memory that is filled often."""

    view: memoryview
    address: int

    @classmethod
    def of(cls, buffer: Any) -> ReadTarget:
        """Return the bytes of contiguous CPU memory (memoryview, numpy array, torch tensor, bytearray) as a target.

        Raises ValueError for any other object.
        """
        view = as_bytes(buffer)
        return cls(view, np.frombuffer(view, np.uint8).ctypes.data if len(view) else 0)


def as_bytes(buffer: Any) -> memoryview:
    """Return a writable byte view of contiguous CPU memory; raise ValueError for any other object."""
    if hasattr(buffer, "untyped_storage"):  # the object is a torch tensor
        if buffer.device.type != "cpu" or not buffer.is_contiguous() or buffer.requires_grad:
            raise ValueError(
                f"a read needs a contiguous CPU tensor without gradient, got {buffer.device}, {buffer.stride()}"
            )
        import torch

        buffer = buffer.reshape(-1).view(torch.uint8).numpy() if buffer.numel() else bytearray()
    view = memoryview(buffer)
    if view.readonly or not view.c_contiguous:
        raise ValueError("a read needs writable, contiguous memory")
    return view.cast("B") if view.nbytes else memoryview(bytearray())
