"""Defines `FileHome`, the home of a weight that streams from a file.

A home is the object that reads and writes a weight's value while the value is not in device memory. Outside a
step (a forward or backward pass), the value is read from disk for each operator. In-place operators on the
weight raise UnsupportedError, except ``copy_``, which replaces the value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ..common.errors import UnsupportedError
from ..model import managed_tensor
from ..model.elsewhere_tensor import ElsewhereHome
from ..model.home import ManagedUnit
from ..model.units import Entry
from ..model.unread_tensor import Snapshot

if TYPE_CHECKING:
    from .bound_checkpoint import Checkpoint, FileTensor


class FileHome(ElsewhereHome):
    """The home of a streamed weight whose bytes are in a weights file."""

    __slots__ = ("checkpoint", "file_tensor", "write")
    keeps_writes = False

    def __init__(
        self,
        unit: ManagedUnit,
        entry: Entry,
        checkpoint: Checkpoint,
        file_tensor: FileTensor,
        write: Callable[[FileTensor, torch.Tensor], None],
    ) -> None:
        super().__init__(unit, entry, managed_tensor.plain(torch.Tensor.detach, (entry.tensor,), {}))
        self.checkpoint, self.file_tensor, self.write = checkpoint, file_tensor, write

    def set_trainable(self, trainable: bool) -> None:
        """Raise UnsupportedError if ``trainable``, because weights that stream from a file are frozen."""
        if trainable:
            raise UnsupportedError(
                f"{self.entry.name} streams from a file and cannot be trained; train adapters, or stream it "
                "from RAM (without weights= and disk=)"
            )

    def read(self) -> torch.Tensor:
        """Return the current value as a new CPU tensor, read from the file or from host memory if it was
        replaced.
        """
        return self.checkpoint.read(self.file_tensor)

    def snapshot(self) -> Snapshot | None:
        """Return the file's value, to be read later, or None if another value was written, which may be overwritten."""
        checkpoint, file_tensor = self.checkpoint, self.file_tensor
        if file_tensor.changed is not None:
            return None
        return Snapshot(
            self.host,
            lambda: checkpoint.read_file(file_tensor),
            lambda: file_tensor.changed is None,
            checkpoint.unread,
        )

    def replace(self, value: torch.Tensor) -> None:
        """Store ``value`` in host memory as the weight's value. The file is not changed."""
        self.write(self.file_tensor, value)

    def change(self, func: Callable, args: tuple, kwargs: dict) -> None:
        """Raise UnsupportedError, because an in-place operator cannot change a weight in a file."""
        raise UnsupportedError(
            f"{getattr(func, '__name__', func)} on {self.entry.name}, which streams from a file: read it with "
            "session.read(), change the copy, and give it back with session.write(), or stream it from "
            "RAM (without weights= and disk=)"
        )
