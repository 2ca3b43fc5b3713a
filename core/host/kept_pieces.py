"""Pieces of weights that stay in RAM while a session lays its weights out anew: what the host cache of one
layout held, for the next layout.

A piece is a range of a unit's bytes (a unit is a module whose weights are copied to the device together) and
is identified by the file ranges that fill it. The cache of the next layout takes a piece over as it is if it
has a piece of the same ranges and length. All other reads of the next layout (pieces that are cut differently,
weights that stay on the device from now on) copy from RAM what is there, and read the rest from disk: see
`DiskReader`.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from bisect import bisect_left, insort
from collections.abc import Hashable
from dataclasses import dataclass

from ..checkpoint.index import SourceFile
from .arena import Block
from .cache_pieces import CachePiece


@dataclass(eq=False)
class KeptPiece:
    """The bytes of one piece in ``block``.

    ``favoured``: whether the eviction policy of the former cache kept the piece after its use. ``left``: bytes
    that were not copied out yet.
    """

    piece: CachePiece
    block: Block
    favoured: bool
    left: int = 0

    def __post_init__(self) -> None:
        self.left = sum(read.nbytes for read in self.piece.reads)


def _key(piece: CachePiece) -> Hashable:
    """Return what makes two pieces equal: their length, and which file range lies where in them."""
    return piece.nbytes, tuple((read.file, read.offset, read.nbytes, read.at) for read in piece.reads)


def _place(entry: tuple[int, int, int, KeptPiece]) -> tuple[int, int, int]:
    """Return the part of a range's entry by which the ranges of a file are sorted."""
    return entry[:3]


class KeptPieces:
    """The pieces in RAM that no cache owns at the moment. All methods are thread-safe.

    ``budget``: bytes of host memory that the kept pieces and the buffers of the cache may take together.
    """

    def __init__(self) -> None:
        self.budget = 0
        self._lock = threading.Lock()
        self._pieces: dict[Hashable, KeptPiece] = {}
        # {file: (start, end, address, piece) of each range in RAM, sorted}, and the bytes of the longest range
        self._ranges: dict[SourceFile, list[tuple[int, int, int, KeptPiece]]] = {}
        self._longest = 0
        self._nbytes = 0
        self._beside = 0  # bytes of the cache's buffers
        with _ALL_LOCK:
            _ALL.add(self)

    @property
    def idle(self) -> bool:
        """Whether no cache has buffers beside the kept pieces, as in a parked session."""
        return self._beside == 0

    @property
    def nbytes(self) -> int:
        """Bytes of host memory of the kept pieces."""
        return self._nbytes

    def set_budget(self, nbytes: int) -> None:
        """Set ``budget``, and release kept pieces, last first, until they and the cache fit into it."""
        with self._lock:
            self.budget = nbytes
            self._shrink(nbytes - self._beside)

    def yield_bytes(self, nbytes: int) -> None:
        """Lower ``budget`` by ``nbytes``, which other host memory is about to take."""
        self.set_budget(self.budget - nbytes)

    def reserve(self, nbytes: int, force: bool) -> bool:
        """Count ``nbytes`` for a new buffer of the cache; return False if kept pieces leave no room for it.

        Pieces that were copied out are released for it. ``force``: others too, last first.
        """
        with self._lock:
            room = self.budget - self._beside - nbytes
            self._shrink(room, everything=force)
            if self._nbytes > max(0, room):
                return False
            self._beside += nbytes
            return True

    def unreserve(self, nbytes: int) -> None:
        """Subtract ``nbytes`` of a buffer that the cache has freed."""
        with self._lock:
            self._beside -= nbytes

    def keep(self, kept: KeptPiece) -> bool:
        """Own the bytes of a piece from now on. The cache's buffer becomes a kept piece, so the sum of both
        does not change. Returns False, and owns nothing, if the bytes are kept already, or if the piece is only padding.
        """
        with self._lock:
            if _key(kept.piece) in self._pieces or not kept.piece.reads:
                return False
            self._beside -= kept.block.data.numel()
            self._add(kept)
            return True

    def take(self, piece: CachePiece, block_bytes: int) -> KeptPiece | None:
        """Remove and return the bytes of ``piece`` as a buffer of the cache; None if they are not kept in a
        block of exactly ``block_bytes``.
        """
        with self._lock:
            key = _key(piece)
            kept = self._pieces.get(key)
            if kept is None or kept.block.data.numel() != block_bytes:
                return None
            self._remove(key)
            self._beside += block_bytes
            return kept

    def copy_range(self, file: SourceFile, offset: int, nbytes: int, address: int) -> list[tuple[int, int]]:
        """Copy those of the ``nbytes`` bytes at ``offset`` of ``file`` that are in RAM to the memory at
        ``address``. Return the other file ranges, as (start, end), in order.

        The lock is held meanwhile, so no block is freed or reused while it is read.
        """
        end = offset + nbytes
        if not self._ranges:
            return [(offset, end)]
        missing: list[tuple[int, int]] = []
        with self._lock:
            ranges = self._ranges.get(file, [])
            first = bisect_left(ranges, (offset - self._longest, 0, 0), key=_place)
            last = bisect_left(ranges, (end, 0, 0), key=_place)
            at, kept = offset, None
            for start, stop, source, kept in ranges[first:last]:
                low, high = max(start, at), min(stop, end)
                if low >= high:
                    continue
                if low > at:
                    missing.append((at, low))
                ctypes.memmove(address + low - offset, source + low - start, high - low)
                kept.left -= high - low
                at = high
            # This frame must not keep the memory of a piece that is released from now on: it counts as free then.
            kept = None
        if at < end:
            missing.append((at, end))
        return missing

    def release(self, nbytes: int) -> int:
        """Release kept pieces of at least ``nbytes``, or all of them; return the bytes that were released."""
        with self._lock:
            before = self._nbytes
            self._shrink(before - nbytes)
            return before - self._nbytes

    def clear(self) -> None:
        """Release all kept pieces."""
        self.release(self._nbytes)

    def recover(self, beside: int) -> None:
        """Count anew after an interrupt. ``beside``: bytes of the cache's buffers."""
        with self._lock:
            pieces, self._pieces, self._ranges, self._nbytes = self._pieces, {}, {}, 0
            for kept in pieces.values():
                self._add(kept)
            self._beside = beside

    # -- called with the lock held

    def _add(self, kept: KeptPiece) -> None:
        """Record a kept piece and its ranges."""
        self._pieces[_key(kept.piece)] = kept
        self._nbytes += kept.block.data.numel()
        address = kept.block.data.data_ptr()
        for read in kept.piece.reads:
            entry = (read.offset, read.offset + read.nbytes, address + read.at, kept)
            insort(self._ranges.setdefault(read.file, []), entry, key=_place)
            self._longest = max(self._longest, read.nbytes)

    def _shrink(self, nbytes: int, everything: bool = True) -> None:
        """Release kept pieces until they take at most ``nbytes``: those that were copied out and, if ``everything``,
        the others, the last one first.
        """
        if self._nbytes <= max(0, nbytes):
            return
        spent = {key: None for key, kept in self._pieces.items() if kept.left <= 0}
        others = [key for key in reversed(list(self._pieces)) if key not in spent] if everything else []
        for key in (*spent, *others):
            if self._nbytes <= max(0, nbytes):
                return
            self._remove(key).block.unpin()

    def _remove(self, key: Hashable) -> KeptPiece:
        """Forget the piece of ``key`` and its ranges, and return it."""
        kept = self._pieces.pop(key)
        self._nbytes -= kept.block.data.numel()
        address = kept.block.data.data_ptr()
        for read in kept.piece.reads:
            ranges = self._ranges.get(read.file, [])
            place = bisect_left(
                ranges, (read.offset, read.offset + read.nbytes, address + read.at), key=_place
            )
            if place < len(ranges) and ranges[place][3] is kept:  # else an interrupt came before it was added
                del ranges[place]
            if not ranges:
                self._ranges.pop(read.file, None)
        return kept


_ALL: weakref.WeakSet[KeptPieces] = weakref.WeakSet()  # of all sessions of the process
_ALL_LOCK = threading.Lock()  # a WeakSet must not grow while another thread iterates over it


def release_idle(nbytes: int | None = None) -> int:
    """Release pieces that sessions without an open cache keep (parked ones, for instance), at least ``nbytes`` of them
    (None: all). Return the bytes that were released.
    """
    with _ALL_LOCK:
        everything = list(_ALL)
    released = 0
    for kept in everything:
        if kept.idle and (nbytes is None or released < nbytes):
            released += kept.release(kept.nbytes if nbytes is None else nbytes - released)
    return released
