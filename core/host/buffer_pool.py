"""Defines `BufferPool`: the RAM buffers of a host cache, which piece each holds, and which one is overwritten next.

A buffer is allocated when it is first needed. All buffers together never exceed the bound, because new reads reuse
buffers. A buffer is overwritten only when no copy to the device reads it any more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .arena import HostArena
from .cache_buffer import Buffer, Totals
from .cache_pieces import LEAST_BUFFERS, BufferPlan, CachePiece
from .eviction import EvictionPolicy
from .kept_pieces import KeptPiece, KeptPieces
from .next_use import NEVER, UseOrder


class BufferPool:
    """The buffers that ``plan`` allows for ``total`` pieces of weights. The cache calls all methods with its lock held.

    ``use_order``: when each piece is used next. ``copy_is_done``: tells whether a copy's event has completed.
    ``eviction``: the name of the policy. ``kept``: pieces of the session's former cache, which give way to new buffers.
    ``totals``: the cache's totals, in which the bytes of the buffers are counted.

    ``buffers``: all buffers. ``holding``: {rank of a piece: the buffer that holds it or that it is being read into}.
    """

    def __init__(
        self, plan: BufferPlan, total: int, arena: HostArena, use_order: UseOrder, copy_is_done: Callable[[Any], bool],
        eviction: str, kept: KeptPieces, totals: Totals,
    ) -> None:  # fmt: skip
        self.plan, self._arena, self._use_order, self._copy_is_done = plan, arena, use_order, copy_is_done
        self._kept, self._totals = kept, totals
        self.eviction = EvictionPolicy(eviction, plan.count - plan.rotating, total)
        self.buffers: list[Buffer] = []
        self.holding: dict[int, Buffer] = {}
        self._arrivals = 0
        self._limit = plan.count
        self._held_back = 0  # buffers that the limit allows but that must not be allocated yet

    @property
    def may_grow(self) -> bool:
        """Whether another buffer may be allocated."""
        return len(self.buffers) < self._limit - self._held_back

    @property
    def above_limit(self) -> bool:
        """Whether buffers have to be freed after `lower_limit`."""
        return len(self.buffers) > self._limit

    def buffer_bytes(self, piece: CachePiece) -> int:
        """Return the bytes of a new buffer for ``piece``."""
        return piece.nbytes if self.plan.whole else self.plan.nbytes

    def next_use(self, rank: int) -> float:
        """Return the number of accesses until the piece with rank ``rank`` is used next, NEVER if it is not
        in RAM.
        """
        buffer = self.holding.get(rank)
        piece = buffer.piece if buffer is not None else None
        return NEVER if piece is None else self._use_order.distance(piece)

    def record_use(self, piece: CachePiece) -> None:
        """Let the eviction policy know that ``piece`` was used."""
        if not self.plan.whole:
            self.eviction.record_use(piece.rank, self.next_use)

    # -- the bound

    def hold_back(self, nbytes: int) -> None:
        """Leave ``nbytes`` of the bound unallocated for now, rounded up to whole buffers."""
        self._held_back = -(-nbytes // self.plan.nbytes)

    def lower_limit(self, nbytes: int) -> None:
        """Lower the bound by ``nbytes``, rounded up to whole buffers; at least two remain."""
        count = max(LEAST_BUFFERS, self.plan.count - -(-nbytes // self.plan.nbytes))
        self._limit = min(self._limit, count)
        self.plan = replace(self.plan, count=count)
        self.eviction.room = max(0, count - self.plan.rotating)

    def least_needed(self) -> Buffer | None:
        """Return the buffer to free first, None while all are in use or being read into."""
        unused = [
            b for b in self.buffers if (b.ready or b.piece is None) and not b.in_use and not b.pending_reads
        ]
        return max(
            unused, key=lambda b: NEVER if b.piece is None else self.next_use(b.piece.rank), default=None
        )

    def free(self, buffer: Buffer) -> None:
        """Free the memory of ``buffer``. Copies from it must be over."""
        if buffer.piece is not None:
            self.evict(buffer)
        self.buffers.remove(buffer)
        self._totals.held_bytes -= self.plan.nbytes
        self._kept.unreserve(self.plan.nbytes)
        buffer.block.unpin()

    # -- the choice of a buffer

    def find(self, piece: CachePiece, when: float, demanded: bool = False) -> Buffer | None:
        """Return a buffer that may be overwritten for ``piece``, which is needed in ``when`` accesses; None
        if there is none yet.

        ``demanded``: the piece is needed now, so kept pieces may be evicted as well. Raises MemoryError if no buffer can
        be allocated and none that exists is large enough for a demanded piece.
        """
        none_fits = demanded and all(b.block.data.numel() < piece.nbytes for b in self.buffers)
        # Reads that are under way may copy from the kept pieces, so these are released only after the reads.
        release_kept = none_fits or not self._totals.reading
        if self.may_grow or none_fits:
            if self._kept.reserve(self.buffer_bytes(piece), release_kept):
                try:
                    return self._allocate(piece)
                except MemoryError:
                    self._kept.unreserve(self.buffer_bytes(piece))
                    if none_fits:
                        raise
                    # The system has no more memory: continue with the buffers that exist.
                    self._limit = len(self.buffers)
            elif self.plan.whole or not demanded:
                # The kept pieces give way as soon as the reads end. To evict a piece now would cause a read more.
                return None
        return self._overwritable(piece, when, demanded)

    def _overwritable(self, piece: CachePiece, when: float, demanded: bool) -> Buffer | None:
        """Return an existing buffer for ``piece`` and evict what it holds; None if there is none yet."""
        evictable: dict[int, Buffer] = {}
        kept_buffers: dict[int, Buffer] = {}  # buffers of kept pieces, which only a demanded piece may take
        for buffer in self.buffers:
            if buffer.block.data.numel() < piece.nbytes:
                continue
            if buffer.piece is None:
                if buffer.pending_reads == 0 and not buffer.in_use and self._idle(buffer):
                    return buffer
                continue
            if not buffer.ready or buffer.in_use:
                continue
            rank = buffer.piece.rank
            kept = rank in self.eviction.kept or (buffer.unused and self.eviction.eviction == "fifo")
            if kept and not demanded:  # tested first, because with much RAM it excludes most buffers
                continue
            if self.next_use(rank) <= when or not self._idle(buffer):
                continue
            (kept_buffers if kept else evictable)[rank] = buffer
        if not evictable and demanded:
            evictable = kept_buffers
        if not evictable:
            return None
        rank = self.eviction.choose_victim(evictable, self.next_use, lambda r: evictable[r].arrival)
        buffer = evictable[rank]
        self.evict(buffer)
        return buffer

    def _idle(self, buffer: Buffer) -> bool:
        """Return whether no copy to the device reads the buffer any more."""
        if buffer.copy_event is not None and self._copy_is_done(buffer.copy_event):
            buffer.copy_event = None
        return buffer.copy_event is None

    def _allocate(self, piece: CachePiece) -> Buffer:
        """Allocate a buffer that is large enough for ``piece``."""
        buffer = Buffer(self._arena.allocate(self.buffer_bytes(piece)), self._arrivals)
        self.buffers.append(buffer)
        self._totals.held_bytes += self.buffer_bytes(piece)
        return buffer

    # -- what the buffers hold

    def assign(self, piece: CachePiece, buffer: Buffer) -> None:
        """Record that ``piece`` is being read into ``buffer``."""
        self._arrivals += 1
        buffer.piece, buffer.ready, buffer.unused, buffer.error, buffer.inspection = (
            piece,
            False,
            True,
            None,
            None,
        )
        buffer.arrival, buffer.pending_reads, buffer.handles = self._arrivals, max(1, len(piece.reads)), []
        self.holding[piece.rank] = buffer

    def adopt(self, piece: CachePiece) -> Buffer | None:
        """Return a new buffer that is the memory of a kept piece equal to ``piece``, None if there is none."""
        kept = self._kept.take(piece, self.buffer_bytes(piece))
        if kept is None:
            return None
        self._arrivals += 1
        buffer = Buffer(kept.block, self._arrivals, piece, pinned=True)
        self.buffers.append(buffer)
        self.holding[piece.rank] = buffer
        self._totals.held_bytes += kept.block.data.numel()
        if not self.plan.whole:
            self.eviction.adopt(piece.rank, kept.favoured)
        return buffer

    def evict(self, buffer: Buffer) -> None:
        """Evict the buffer's piece."""
        assert buffer.piece is not None
        self.holding.pop(buffer.piece.rank, None)  # an interrupted call may have removed it
        self.eviction.remove(buffer.piece.rank)
        buffer.piece, buffer.ready = None, False

    def recover(self) -> list[Buffer]:
        """Count anew after an interrupt, and drop the buffers whose piece is not in RAM yet, whatever state their reads
        are in. Return these. No buffer may be in use, and copies from buffers must be over.
        """
        dropped = [b for b in self.buffers if b.pending_reads or (b.piece is not None and not b.ready)]
        for buffer in dropped:
            buffer.dropped = True
        self.buffers = [b for b in self.buffers if not b.dropped]
        for buffer in self.buffers:
            buffer.in_use, buffer.copy_event = False, None
        self.holding = {b.piece.rank: b for b in self.buffers if b.piece is not None}
        self.eviction.kept.intersection_update(self.holding)
        held = sum(b.block.data.numel() for b in self.buffers)
        self._totals.restart(held)
        self._kept.recover(held)
        return dropped

    def close(self, in_model_order: bool) -> None:
        """Pass the pieces that are in RAM to the kept pieces, and free the other buffers. Reads and copies must be over.

        ``in_model_order``: whether the next layout uses the pieces in the order of their ranks. Otherwise it follows the
        order of use. The pieces that are used last are the first that it releases if memory is short.
        """
        self.buffers.sort(
            key=lambda b: (
                NEVER if b.piece is None
                else b.piece.rank if in_model_order
                else self.next_use(b.piece.rank)
            )
        )  # fmt: skip
        for buffer in self.buffers:
            if buffer.piece is not None and buffer.ready:
                favoured = buffer.piece.rank in self.eviction.kept
                self._kept.keep(KeptPiece(buffer.piece, buffer.block, favoured))
            else:
                self._kept.unreserve(buffer.block.data.numel())
                buffer.block.unpin()
            # Handles of cancelled reads refer to the buffer. Drop them, so that the memory is freed
            # without the garbage collector.
            buffer.error, buffer.handles = None, []
        self.buffers.clear()
        self.holding.clear()
        self._totals.held_bytes = 0
