"""The state of one buffer of the host cache, and the cache's totals."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

from ..checkpoint.file_read import ReadTarget
from ..checkpoint.read_handle import SubmittedRead
from .arena import Block
from .cache_pieces import CachePiece

_SPANS = 4096  # the number of latest reads that are kept for the timeline
_NOTHING = torch.empty(0, dtype=torch.uint8)


@dataclass(eq=False)
class Buffer:
    """A RAM buffer of the host cache, together with the piece of a unit's weights that it holds."""

    block: Block
    target: ReadTarget  # the bytes of `block`, as the reader fills them
    arrival: int  # the sequence number of the current piece's read
    piece: CachePiece | None = None
    data: torch.Tensor = _NOTHING  # the bytes of the piece, once they have been read
    ready: bool = False  # all bytes of the piece have been read
    unused: bool = False  # the piece was read and has not been used yet
    in_use: bool = False  # the caller of `acquire` is using the bytes
    pending_reads: int = 0  # the number of reads that are not finished
    error: BaseException | None = None
    handles: list[SubmittedRead] = field(default_factory=list)
    # The event after the last copy to the device that reads the buffer; copies complete in order.
    copy_event: Any = None
    inspection: Any = None  # the result of inspecting the piece's bytes
    read_began: float = 0.0
    pinned: bool = False  # pinning was tried, which is done once, whether it succeeded or not
    dropped: bool = False  # the cache has dropped the buffer, and ignores the ends of its reads


@dataclass(frozen=True)
class CacheFigures:
    """Totals of a host cache since it was made.

    ``late_seconds``: time in which a host thread waited for a read. ``held_bytes``: host memory of the buffers.
    """

    read_bytes: int = 0
    late_seconds: float = 0.0
    held_bytes: int = 0


class Totals:
    """The running totals of the cache's reads.

    Times are seconds of the host's clock (perf_counter). The cache's lock protects the object.
    """

    def __init__(self) -> None:
        self.reading = 0  # the number of buffers that are being read into
        self.read_bytes, self.late_seconds, self.held_bytes = 0, 0.0, 0
        self.spans: deque[tuple[str, float, float, int]] = deque(maxlen=_SPANS)

    def restart(self, held_bytes: int) -> None:
        """Count anew: nothing is being read, and the buffers take ``held_bytes``."""
        self.reading, self.held_bytes = 0, held_bytes

    def record_read(self, piece: CachePiece, began: float, now: float, from_memory: int = 0) -> None:
        """Record that the piece was read between ``began`` and ``now``.

        ``from_memory``: bytes of the piece that were in RAM already.
        """
        nbytes = sum(read.disk_bytes for read in piece.reads) - from_memory
        self.read_bytes += nbytes
        if nbytes:
            self.spans.append((piece.reads[0].label, began, now, nbytes))

    def figures(self) -> CacheFigures:
        """Return a frozen copy of the totals so far."""
        return CacheFigures(self.read_bytes, self.late_seconds, self.held_bytes)
