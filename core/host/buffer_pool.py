"""Defines `BufferPool`: the RAM buffers of a host cache, which piece each holds, and which one is overwritten next.

A buffer is allocated when it is first needed. All buffers together never exceed the bound, because new reads reuse
buffers. A buffer is overwritten only when no copy to the device reads it any more.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

from ..checkpoint.file_read import ReadTarget
from .arena import HostArena
from .cache_buffer import Buffer, Totals
from .cache_pieces import BufferPlan, CachePiece
from .eviction import EvictionPolicy
from .kept_pieces import KeptPiece, KeptPieces
from .next_use import NEVER, UseOrder


class BufferPool:
    """The buffers that ``plan`` allows for ``total`` pieces of weights. The cache calls all methods with its lock held.

    ``use_order``: when each piece is used next (``next_use``, by its rank). ``copy_is_done``: tells whether a copy's event has completed.
    ``eviction``: the name of the policy. ``kept``: pieces of the session's former cache, which give way to new buffers.
    ``totals``: the cache's totals, in which the bytes of the buffers are counted.

    ``buffers``: all buffers. ``most``: how many of them may exist now. ``holding``: {rank of a piece: the buffer that holds
    it or that it is being read into}.
    """

    def __init__(
        self, plan: BufferPlan, total: int, arena: HostArena, use_order: UseOrder, copy_is_done: Callable[[Any], bool],
        eviction: str, kept: KeptPieces, totals: Totals,
    ) -> None:  # fmt: skip
        self.plan, self._arena, self._copy_is_done = plan, arena, copy_is_done
        self._kept, self._totals = kept, totals
        # by rank; a bound method of a dictionary, so that a call costs no frame
        self.next_use: Callable[[int], float] = use_order.distances.__getitem__
        self.eviction = EvictionPolicy(eviction, plan.count - plan.rotating, total)
        self.buffers: list[Buffer] = []
        self.holding: dict[int, Buffer] = {}
        self._arrivals = 0
        self._limit = plan.count
        self.most = self._limit  # the present limit of buffers, which `hold_back` lowers for a time

    def buffer_bytes(self, piece: CachePiece) -> int:
        """Return the bytes of a new buffer for ``piece``."""
        return piece.nbytes if self.plan.whole else self.plan.nbytes

    # -- the bound

    def hold_back(self, nbytes: int) -> None:
        """Leave ``nbytes`` of the bound unallocated for now, rounded up to whole buffers."""
        self.most = self._limit - -(-nbytes // self.plan.nbytes)

    # -- the choice of a buffer

    def spare(self, demanded: bool = False) -> list[Buffer]:
        """Return the buffers that may be overwritten for pieces that are needed sooner than what they hold: no kept ones,
        none that is in use, and none that a copy still reads. The one that is to be overwritten first is the last.

        ``demanded``: a piece is needed now. If there is no other, kept ones are returned.
        """
        policy, found, kept = self.eviction, list[tuple[float, Buffer]](), list[tuple[float, Buffer]]()
        for buffer in self.buffers:
            held = buffer.piece
            keeps = held is not None and (held.rank in policy.kept or (policy.by_arrival and buffer.unused))
            if keeps and not demanded:  # tested first, because with much RAM it excludes most buffers
                continue
            if buffer.in_use or buffer.pending_reads or (held is not None and not buffer.ready):
                continue
            if buffer.copy_event is not None and self._is_copied(buffer):
                continue
            if held is None:
                needed = NEVER
            else:
                needed = -buffer.arrival if policy.by_arrival else self.next_use(held.rank)
            (kept if keeps else found).append((needed, buffer))
        found = found or kept
        found.sort(key=itemgetter(0))
        return [buffer for _, buffer in found]

    def take(
        self, piece: CachePiece, when: float, spare: list[Buffer], demanded: bool = False
    ) -> Buffer | None:
        """Return a buffer that holds ``piece`` from now on, to be read into: a new one, or one of ``spare``, which is
        removed from that list. None if there is none yet. The piece is needed after ``when`` other pieces, and none that
        is needed sooner is evicted.

        ``demanded``: the piece is needed now. Raises MemoryError if no buffer can be allocated and none that exists is
        large enough for a demanded piece.
        """
        buffer: Buffer | None = None
        none_fits = demanded and not any(len(b.target.view) >= piece.nbytes for b in self.buffers)
        if none_fits or len(self.buffers) < self.most:
            # Reads that are under way may copy from the kept pieces, so these are released only after the reads.
            release_kept = none_fits or not self._totals.reading
            if self._kept.reserve(self.buffer_bytes(piece), release_kept):
                try:
                    buffer = self._allocate(piece)
                except MemoryError:
                    self._kept.unreserve(self.buffer_bytes(piece))
                    if none_fits:
                        raise
                    # The system has no more memory: continue with the buffers that exist.
                    self._limit = self.most = len(self.buffers)
            elif self.plan.whole or not demanded:
                # The kept pieces give way as soon as the reads end. To evict a piece now would cause a read more.
                return None
        for found in reversed(spare) if buffer is None else ():
            held = found.piece
            # A buffer of the list may have been filled since, with a piece that needs no read.
            idle = not found.pending_reads and (
                held is None or (found.ready and self.next_use(held.rank) > when)
            )
            if idle and len(found.target.view) >= piece.nbytes:
                buffer = found
                spare.remove(found)
                break
        if buffer is None:
            return None
        if buffer.piece is not None:
            self.holding.pop(buffer.piece.rank, None)  # an interrupted call may have removed it
            self.eviction.kept.discard(buffer.piece.rank)
        self._arrivals += 1
        buffer.piece, buffer.arrival, buffer.pending_reads = piece, self._arrivals, 1
        buffer.ready, buffer.unused, buffer.error, buffer.inspection = False, True, None, None
        self.holding[piece.rank] = buffer
        return buffer

    def _is_copied(self, buffer: Buffer) -> bool:
        """Return whether a copy to the device still reads the buffer."""
        if buffer.copy_event is not None and self._copy_is_done(buffer.copy_event):
            buffer.copy_event = None
        return buffer.copy_event is not None

    def _allocate(self, piece: CachePiece) -> Buffer:
        """Allocate a buffer that is large enough for ``piece``."""
        block = self._arena.allocate(self.buffer_bytes(piece))
        buffer = Buffer(block, ReadTarget.of(block.data), self._arrivals)
        self.buffers.append(buffer)
        self._totals.held_bytes += self.buffer_bytes(piece)
        return buffer

    # -- what the buffers hold

    def adopt(self, piece: CachePiece) -> Buffer | None:
        """Return a new buffer that is the memory of a kept piece equal to ``piece``, None if there is none."""
        kept = self._kept.take(piece, self.buffer_bytes(piece))
        if kept is None:
            return None
        self._arrivals += 1
        buffer = Buffer(kept.block, ReadTarget.of(kept.block.data), self._arrivals, piece, pinned=True)
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
        self.eviction.kept.discard(buffer.piece.rank)
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

    def close(self, in_model_order: bool, keep: bool) -> None:
        """Pass the pieces that are in RAM to the kept pieces, if ``keep``, and free the other buffers. Reads and copies must
        be over.

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
        self.holding.clear()
        self.buffers.reverse()
        while self.buffers:
            buffer = self.buffers.pop()
            # Handles of cancelled reads refer to the buffer. Drop them, so that the memory is freed
            # without the garbage collector.
            buffer.error, buffer.handles = None, []
            piece, nbytes = buffer.piece if buffer.ready and keep else None, buffer.block.data.numel()
            favoured = piece is not None and piece.rank in self.eviction.kept
            if piece is not None and self._kept.keep(KeptPiece(piece, buffer.block, favoured)):
                continue
            buffer.block.unpin()
            del buffer  # and its memory, before another cache of the session may count on it
            self._kept.unreserve(nbytes)
        self._totals.held_bytes = 0
