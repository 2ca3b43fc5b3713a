"""A packed unit's bytes as they are, in a block of their own: by the device, which unpacks faster, else on the host."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

from .store.arena import Block, HostArena, host_bytes, storage_bytes, touch
from .streamed import Streamed
from .streamer import Streamer
from .transfer import Engine

logger = logging.getLogger("carom")


class Unpacker:
    """Makes such blocks, between passes; at no time are a unit's blocks pinned both ways."""

    def __init__(self, engine: Engine, arena: HostArena) -> None:
        self._engine, self._arena = engine, arena

    def block(self, streamer: Streamer, unit: Streamed, pin: bool, pool: ThreadPoolExecutor) -> Block:
        """The unit's bytes as they lie in a slot; with ``pin`` pinned, in the stead of the block that it still has.

        Where that fails, for want of memory mostly, nothing was changed.
        """
        pinned = unit.block.pinned
        block = self._arena.allocate(unit.nbytes)
        try:
            self._fill(streamer, unit, block, pin, pool)
        except BaseException:
            self._exchange(block, unit.block, pinned)
            raise
        return block

    def _fill(
        self, streamer: Streamer, unit: Streamed, block: Block, pin: bool, pool: ThreadPoolExecutor
    ) -> None:
        if pin:
            for job in touch(block.data, pool):
                job.result()
        there = False
        try:
            slot = streamer.acquire(unit)
            try:
                self._engine.synchronize()
                self._exchange(unit.block, block, pin)
                self._engine.synchronize(
                    self._engine.copy_out(block.data, streamer.views(slot).base.detach())
                )
                there = True
            finally:
                streamer.release(slot)
        except Exception as error:
            logger.info("carom: unit %r is decoded on the host: %s", unit.name, str(error))
            self._exchange(unit.block, block, pin)
        for entry, packed in zip(unit.unit.entries, unit.packed, strict=True):
            piece = block.data[entry.offset : entry.offset + entry.nbytes]
            if packed is None:
                piece.copy_(host_bytes(entry.tensor))
            elif not there:
                piece.copy_(storage_bytes(packed.value()))

    def _exchange(self, old: Block, new: Block, pin: bool) -> None:
        """``new`` is pinned in the stead of ``old``: never both, within a budget."""
        old.unpin()
        if pin and not new.pinned:
            self._arena.pin(new)
