"""`PeerLink`: copies from the memory of a second device (the *peer*) to the device that computes, beside the copies
from host memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .stream_engine import StreamEngine


class PeerLink:
    """The copies from the device of ``peer`` to that of ``engine``, on streams that no other work uses.

    ``direct``: whether the devices reach each other's memory (P2P). Otherwise the driver copies through pinned host
    memory, over the links of both devices.
    """

    def __init__(self, engine: StreamEngine, peer: StreamEngine) -> None:
        self._engine = engine
        self.direct = engine.reaches(peer)
        self._stream, self._peer_stream = engine.new_copy_stream(), peer.new_copy_stream()

    def copy(
        self, target: torch.Tensor, source: torch.Tensor, after: Iterable[Any], timed: bool
    ) -> tuple[Any, Any]:
        """Copy ``source`` on the peer to ``target`` on the device, after the events ``after`` of either device.

        Both are uint8 tensors of the same size. Returns as `Engine.copy_in` does.
        """
        return self._engine.copy_from_peer(self._stream, self._peer_stream, target, source, after, timed)
