"""What a streamed parameter of a file is while attached: its value is read from disk for each operator outside a step.

Operators that would write to it are refused, but for ``copy_``, which replaces its value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from . import ops
from .away import AwayOwner, AwayParameter, AwayTensor
from .errors import UnsupportedError
from .streamed import Streamed
from .units import Entry

if TYPE_CHECKING:
    from .checkpoint import Checkpoint, Stand
    from .streamer import Streamer


class DiskOwner(AwayOwner):
    """An owner whose bytes are in a file."""

    __slots__ = ("checkpoint", "stand", "write")
    keeps_writes = False

    def __init__(
        self,
        streamer: Streamer,
        unit: Streamed,
        entry: Entry,
        checkpoint: Checkpoint,
        stand: Stand,
        write: Callable[[Stand, torch.Tensor], None],
    ) -> None:
        super().__init__(streamer, unit, entry, ops.plain(torch.Tensor.detach, (entry.tensor,), {}))
        self.checkpoint, self.stand, self.write = checkpoint, stand, write

    def set_trainable(self, trainable: bool) -> None:
        if trainable:
            raise UnsupportedError(
                f"{self.entry.name} streams from a file and cannot be trained; train adapters, or load the module first"
            )

    def read(self) -> torch.Tensor:
        """The true value, a CPU tensor of its own."""
        return self.checkpoint.read(self.stand)

    def replace(self, value: torch.Tensor) -> None:
        self.write(self.stand, value)

    def change(self, func: Callable, args: tuple, kwargs: dict) -> None:
        raise UnsupportedError(
            f"{getattr(func, '__name__', func)} on {self.entry.name}, which streams from a file: read it with "
            "session.read(), change the copy, and give it back with session.write(), or load the module first and "
            "stream it without weights="
        )


DiskParameter, DiskTensor = AwayParameter, AwayTensor
