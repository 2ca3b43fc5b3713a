"""Defines `SpareBlocks`: pinned blocks of host memory that are made in the background, before they are needed.

Memory that was just allocated is pinned at a fraction of the link's rate, because the system first has to provide its
pages. A session that will release the device soon can therefore ask for the blocks while the device computes.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
from collections import deque
from collections.abc import Iterable

from ..common.background import BackgroundThread
from ..common.huge_pages import PAGE
from .arena import Block, HostArena, workers
from .probe import host_memory

logger = logging.getLogger("carom")
_THREADS = 3  # few, so that processors are left to the program


class _Order:
    """Blocks that were asked for together. Steps of its deques are single steps of Python, so it needs no lock.

    ``sizes``: of blocks that were not begun yet; ``blocks``: those that are ready.
    """

    def __init__(self, sizes: Iterable[int] = ()) -> None:
        self.sizes = deque(sizes)
        self.blocks: deque[Block] = deque()
        self.threads: list[BackgroundThread] = []


class SpareBlocks:
    """Pinned blocks of one arena that nothing uses yet. One thread at a time calls the methods, but for `clear`."""

    def __init__(self, arena: HostArena) -> None:
        self._arena = arena
        self._order = _Order()

    def prepare(self, sizes: Iterable[int], room: float) -> None:
        """Begin to make a pinned block for each of ``sizes``, in this order, as far as ``room`` bytes, the memory
        that is free now, and the limit of pinned memory allow.

        Does nothing while earlier blocks are being made, or are left.
        """
        if self.busy or self._order.blocks or not self._arena.can_pin:
            return
        room = min(room, host_memory().usable)
        asked = list(sizes)
        while asked:
            total = sum(asked) + len(asked) * PAGE
            if total <= room and self._arena.has_room(total):
                break
            asked.pop()
        order = self._order = _Order(asked)
        count = min(len(order.sizes), max(1, min(_THREADS, workers() - 1)))
        with contextlib.suppress(
            RuntimeError
        ):  # the system refuses threads: parks make the blocks that are missing
            for _ in range(count):
                thread = BackgroundThread(_make, "carom-spare", order.sizes.clear, (self._arena, order))
                thread.start()
                order.threads.append(thread)

    @property
    def busy(self) -> bool:
        """Whether blocks are being made."""
        return any(thread.is_alive() for thread in self._order.threads)

    def take(self, nbytes: int) -> Block | None:
        """Return a block of exactly ``nbytes``, which is the caller's from then on; None if none is ready.

        The caller then makes the block itself, and none is made here in its place.
        """
        order = self._order
        for block in list(order.blocks):
            if block.data.numel() == nbytes:
                with contextlib.suppress(ValueError):  # another thread has cleared the blocks
                    order.blocks.remove(block)
                    return block
        with contextlib.suppress(ValueError):
            order.sizes.remove(nbytes)
        return None

    def clear(self) -> int:
        """Make no more blocks, and unpin and free those that nothing has taken. Return the bytes that were unpinned.

        Waits for the blocks that are being made, at most one of each thread.
        """
        order, self._order = self._order, _Order()
        order.sizes.clear()
        for thread in order.threads:
            thread.join()
        freed = 0
        while order.blocks:
            block = order.blocks.popleft()
            freed += block.registered_bytes
            block.unpin()
        return freed


def _make(arena: HostArena, order: _Order) -> None:
    """Make blocks of ``order.sizes`` until none is left, or the limit of pinned memory is reached."""
    try:
        while order.sizes:
            nbytes = order.sizes.popleft()
            block = arena.allocate(nbytes)
            ctypes.memset(block.data.data_ptr(), 0, nbytes)  # releases the GIL
            if not arena.pin(block, spare=True):
                return
            order.blocks.append(block)
            del block
    except IndexError:  # another thread took the last size
        return
    except Exception as error:  # the blocks are then made when they are needed
        logger.debug("carom: no host memory was prepared: %s", str(error))
