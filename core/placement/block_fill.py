"""Defines `BlockFill`: the copy of a unit's tensors into the host block from which the unit will be streamed.

A unit is a group of tensors that are copied to the device together. A block is one range of host memory.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..device.engine import Engine
from ..host.arena import Block, HostArena, fill, prefault, storage_bytes, typed_view
from ..host.page_release import MappedFiles

if TYPE_CHECKING:
    from .pinned_tier import PinnedBacking


@dataclass(eq=False)
class BlockFill:
    """A running copy of a unit into ``block``.

    ``views``: the unit's tensors in the block, in the order of the unit's entries.
    """

    backing: PinnedBacking
    block: Block
    views: list[torch.Tensor]
    _copy_jobs: list[Future[Any]]

    @classmethod
    def begin(
        cls,
        backing: PinnedBacking,
        engine: Engine,
        arena: HostArena,
        pool: ThreadPoolExecutor,
        mapped: MappedFiles,
    ) -> BlockFill:
        """Allocate a block and begin to copy the unit's tensors: those in host memory by threads of ``pool``,
        those on the device immediately."""
        unit = backing.unit
        block = arena.allocate(unit.nbytes)
        locate = engine.locate
        if any(locate(entry.tensor).type != "cpu" for entry in unit.entries):
            # Copies from the device run at the link's full rate only into pinned memory. Pinning is fast once
            # the pages have been touched, so touch them first.
            for job in prefault(block.data, pool):
                job.result()
            arena.pin(block)
        pieces = []
        views = []
        for entry in unit.entries:
            tensor = entry.tensor
            piece = block.data[entry.offset : entry.offset + entry.nbytes]
            with torch.inference_mode(False), torch.no_grad():
                view = typed_view(piece, tensor)
                if locate(tensor).type == "cpu":
                    pieces.append((piece, storage_bytes(tensor)))
                else:
                    view.copy_(tensor.detach())
            views.append(view)
        return cls(backing, block, views, fill(pieces, pool, mapped))

    def finish(self) -> None:
        """Wait until all bytes are in the block. Raises the errors of the copies."""
        for job in self._copy_jobs:
            job.result()
        self._copy_jobs.clear()
