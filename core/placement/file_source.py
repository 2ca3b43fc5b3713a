"""Defines `FileSource`: the weights file and the host memory budget with which a `FileTier` reads the units
of one layout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ..checkpoint.direct_io import ALIGN as PAGE
from ..checkpoint.disk_reader import DiskReader, ReaderPolicy
from ..common.sizes import MIB, format_size
from ..host.kept_pieces import KeptPieces
from ..host.shared_image import SharedImage
from .bound_checkpoint import Checkpoint, FileTensor
from .gather import Gather

_CHUNK = 4 * MIB  # largest number of bytes of one read call


@dataclass(frozen=True, eq=False)
class FileSource:
    """The weights file of one layout.

    ``ram``: bytes of host memory for the cache and changed values. ``write``: replaces the value of a
    streamed weight. ``kept``: the session's pieces of weights that are in RAM between two layouts. ``keeps_residents``:
    whether the bytes of weights that stay on the device stay in RAM too, as far as ``ram`` has room, for the return of a
    parked session. ``image``: what the ranks of this machine share of the file, None without a group. ``gather``: see
    `HostResources`.
    """

    checkpoint: Checkpoint
    ram: int
    write: Callable[[FileTensor, torch.Tensor], None]
    kept: KeptPieces = field(default_factory=KeptPieces)
    keeps_residents: bool = False
    image: SharedImage | None = None
    gather: Gather | None = None

    @property
    def cache_bytes(self) -> int:
        """Bytes of host memory for the cache."""
        return self.checkpoint.cache_bytes(self.ram)

    def budget_notes(self) -> tuple[str, ...]:
        """Return a note if changed values and the smallest possible cache together exceed ``ram``, otherwise
        nothing.
        """
        changed = self.checkpoint.changed_bytes
        if changed + self.cache_bytes <= self.ram:
            return ()
        return (
            f"weights that were changed on the device take {format_size(changed)} of host memory, more than "
            f"ram={format_size(self.ram)} allows: raise ram",
        )

    def reader(self, largest: int) -> DiskReader:
        """Return a disk reader whose chunks are at most ``largest`` bytes. The reader's own buffers then fit
        in a small budget.
        """
        chunk = min(_CHUNK, max(PAGE, largest // PAGE * PAGE))
        # What several ranks read is in the page cache after the first of them has read it.
        direct = self.image is None
        policy = ReaderPolicy(workers=self.checkpoint.settings.workers, chunk=chunk, direct=direct)
        return DiskReader(
            policy,
            path_tuner=self.checkpoint.path_tuner,
            read_limit=self.checkpoint.read_limit,
            memory=self.kept if self.image is None else self.image,
            checks=self.checkpoint.checks,
        )
