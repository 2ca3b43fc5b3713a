"""What the host cache knows of one of its buffers, and its totals."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .arena import Block
from .handle import SubmittedRead
from .pieces import Piece


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
