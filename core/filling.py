"""A unit's bytes on their way into the block of host memory from which they are to stream."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from .store.arena import Block, HostArena, fill, own_view, storage_bytes, touch
from .store.mapped import Mapped
from .streamed import Streamed


@dataclass(eq=False)
class Filling:
    """A unit on its way into its block: ``views`` match its entries."""

    streamed: Streamed
    block: Block
    views: list[torch.Tensor]
    _jobs: list[Future[Any]]

    @classmethod
    def begin(cls, streamed: Streamed, arena: HostArena, pool: ThreadPoolExecutor, mapped: Mapped) -> Filling:
        """Copy the unit's tensors to a new block: those on the host by ``pool``, those on the device at once."""
        unit = streamed.unit
        block = arena.allocate(unit.nbytes)
        locate = streamed.streamer.engine.locate
        if any(locate(entry.tensor).type != "cpu" for entry in unit.entries):
            # Copied at the link's rate where the memory is pinned, which is fast once it was touched.
            for job in touch(block.data, pool):
                job.result()
            arena.pin(block)
        pieces = []
        views = []
        for entry in unit.entries:
            tensor = entry.tensor
            piece = block.data[entry.offset : entry.offset + entry.nbytes]
            with torch.inference_mode(False), torch.no_grad():
                view = own_view(piece, tensor)
                if locate(tensor).type == "cpu":
                    pieces.append((piece, storage_bytes(tensor)))
                else:
                    view.copy_(tensor.detach())
            views.append(view)
        return cls(streamed, block, views, fill(pieces, pool, mapped))

    def finish(self) -> None:
        """Wait until all bytes are there."""
        for job in self._jobs:
            job.result()
        self._jobs.clear()
