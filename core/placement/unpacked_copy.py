"""Defines `Unpacker`: copies the decoded bytes of a packed unit to a host block.

The unit is decoded on the device, which is faster, or on the host if that fails.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

from ..device.engine import Engine
from ..host.arena import Block, HostArena, host_bytes, prefault, storage_bytes
from .packed_backing import PackedBacking
from .tier import SlotReader

logger = logging.getLogger("carom")


class Unpacker:
    """Decodes units to host blocks, between passes. The packed and the plain block of a unit are never pinned
    at the same time.
    """

    def __init__(self, engine: Engine, arena: HostArena) -> None:
        self._engine, self._arena = engine, arena

    def block(self, reader: SlotReader, backing: PackedBacking, pin: bool, pool: ThreadPoolExecutor) -> Block:
        """Return a new block with the unit's decoded bytes. If ``pin``, the new block is pinned and the old
        block is unpinned.

        A failure, which is mostly lack of memory, leaves everything unchanged.
        """
        pinned = backing.block.pinned
        block = self._arena.allocate(backing.nbytes)
        try:
            self._fill(reader, backing, block, pin, pool)
        except BaseException:
            self._exchange(block, backing.block, pinned)
            raise
        return block

    def _fill(
        self, reader: SlotReader, backing: PackedBacking, block: Block, pin: bool, pool: ThreadPoolExecutor
    ) -> None:
        """Decode the unit on the device and copy it to ``block``. After an error, decode it on the host."""
        if pin:
            for job in prefault(block.data, pool):
                job.result()
        decoded_on_device = False
        try:
            reader.read_back(backing, block, lambda: self._exchange(backing.block, block, pin))
            decoded_on_device = True
        except Exception as error:
            logger.info("carom: unit %r is decoded on the host: %s", backing.name, str(error))
            self._exchange(backing.block, block, pin)
        for entry, packed in zip(backing.unit.entries, backing.tensors, strict=True):
            piece = block.data[entry.offset : entry.offset + entry.nbytes]
            if packed is None:
                piece.copy_(host_bytes(entry.tensor))
            elif not decoded_on_device:
                piece.copy_(storage_bytes(packed.value()))

    def _exchange(self, old: Block, new: Block, pin: bool) -> None:
        """Unpin ``old``, then pin ``new`` if ``pin``. Pinning both at once could exceed the budget."""
        old.unpin()
        if pin and not new.pinned:
            self._arena.pin(new)
