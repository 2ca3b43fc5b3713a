"""What the host cache knows of one of its buffers, and its totals."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from .arena import Block
from .handle import SubmittedRead
from .pieces import Piece

_SPANS = 4096  # reads remembered for the timeline


@dataclass(eq=False)
class Buffer:
    """One buffer of the cache, and the piece in it."""

    block: Block
    arrival: int  # when its piece was asked for
    piece: Piece | None = None
    ready: bool = False  # its piece's bytes are all there
    fresh: bool = False  # and have not been used since
    busy: bool = False  # its bytes are being handed out
    left: int = 0  # reads outstanding
    error: BaseException | None = None
    handles: list[SubmittedRead] = field(default_factory=list)
    copied: Any = (
        None  # reached when the last copy to the device that reads it is over; copies are made in order
    )
    found: Any = None  # what inspecting its piece's bytes gave
    began: float = 0.0
    pinned: bool = False  # or it was refused: tried once


@dataclass(frozen=True)
class CacheFigures:
    """Totals since the cache was made. ``reading_seconds``: while at least one read was under way; ``late_seconds``:
    while a host thread waited for one; ``held_bytes``: host memory of the buffers, which is never given back before
    the end."""

    read_bytes: int = 0
    reading_seconds: float = 0.0
    late_seconds: float = 0.0
    held_bytes: int = 0


class Totals:
    """The cache's count of what it reads. Times are the host clock's (perf_counter). Not locked: the cache's lock is."""

    def __init__(self) -> None:
        self.reading = 0  # buffers
        self.read_bytes, self.late_seconds, self.held_bytes = 0, 0.0, 0
        self._seconds, self._since = 0.0, 0.0
        self.spans: deque[tuple[str, float, float, int]] = deque(maxlen=_SPANS)

    def begins(self, now: float) -> None:
        """One more buffer is read into."""
        if self.reading == 0:
            self._since = now
        self.reading += 1

    def ends(self, now: float) -> None:
        """One of them is over, for better or worse."""
        self.reading -= 1
        if self.reading == 0:
            self._seconds += now - self._since

    def came(self, piece: Piece, began: float, now: float) -> None:
        """The piece was read, between ``began`` and ``now``."""
        nbytes = sum(read.disk_bytes for read in piece.reads)
        self.read_bytes += nbytes
        if piece.reads:
            self.spans.append((piece.reads[0].what, began, now, nbytes))

    def figures(self) -> CacheFigures:
        seconds = self._seconds
        if self.reading:
            seconds += time.perf_counter() - self._since
        return CacheFigures(self.read_bytes, seconds, self.late_seconds, self.held_bytes)
