"""`PoolMemory`: the device memory of a session's units: which chunks there are, and which slots were made in them.

A unit is a group of weights that cross to the device together. A slot is the range of device memory that holds a unit.
A chunk is one allocation. The first chunk is the *region*, through which streamed units pass. Each cached unit of 10 MiB
or more has a chunk of its own, and smaller ones share one: torch serves smaller allocations from segments that many
tensors share, which could not be given back. `Pool` (pool.py) decides when memory comes and goes; nothing here reads or
changes a slot's state. An extent says which slot was copied last over some bytes of a chunk; the functions over extents
change nothing.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from ..plan.region import ALIGN
from ..plan.residency import round_up
from .engine import Engine
from .slot import NO_MEMORY, Slot, SlotUnit

# Bytes. torch's CUDA allocator gives requests of at least this much segments of their own.
OWN_CHUNK = 10 << 20


class Chunk:
    """One allocation of ``nbytes``. ``extents``: which slot was copied last over which bytes.

    ``reserved``: the slots of the cached units for which the memory was allocated. Other units may lie there too. ``slots``:
    all slots that were made in the chunk and are referenced still. ``lossy``: whether other programs may take its pages
    while no one uses them (a VBAR). There each unit has a place of its own, and whoever made the slot gives it memory.
    """

    __slots__ = ("memory", "nbytes", "extents", "reserved", "slots", "lossy", "__weakref__")

    def __init__(self, memory: torch.Tensor, lossy: bool = False) -> None:
        self.memory, self.lossy = memory, lossy
        self.nbytes = memory.numel()
        self.extents: Extents = ()
        self.reserved: tuple[Slot, ...] = ()
        self.slots: weakref.WeakSet[Slot] = weakref.WeakSet()


class Place(NamedTuple):
    """An address in the pool."""

    chunk: Chunk
    offset: int


class PoolMemory:
    """The chunks of one pool. ``source``: where they come from.

    ``chunks``: the region first, then those of cached units in the order of `reserve`. Replaced in one assignment.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.chunks: tuple[Chunk, ...] = (Chunk(NO_MEMORY),)
        # The chunks for which `_addresses` was made, so that an interrupt cannot leave it outdated.
        self._indexed: tuple[Chunk, ...] = ()
        self._addresses: list[tuple[int, Chunk]] = []

    @property
    def region(self) -> Chunk:
        """The chunk of streamed units."""
        return self.chunks[0]

    @property
    def nbytes(self) -> int:
        """Device memory in bytes, rounded up as the device's allocator does."""
        return sum(round_up(chunk.nbytes, self._engine.grain) for chunk in self.chunks)

    def slots(self) -> Iterator[Slot]:
        """Return the slots that lie somewhere, those that were overwritten in part included."""
        for chunk in self.chunks:
            for extent in chunk.extents:
                yield extent.slot

    def slot_at(self, address: int) -> Slot | None:
        """Return the slot to which the byte at ``address`` belongs, None if no copy was issued over the byte."""
        if self._indexed is not self.chunks:
            self._addresses = sorted(
                ((chunk.memory.data_ptr(), chunk) for chunk in self.chunks), key=itemgetter(0)
            )
            self._indexed = self.chunks
        place = bisect_right(self._addresses, address, key=itemgetter(0)) - 1
        if place < 0:
            return None
        low, chunk = self._addresses[place]
        extents, offset = chunk.extents, address - low
        place = bisect_right(extents, offset, key=itemgetter(0)) - 1
        return extents[place].slot if place >= 0 and offset < extents[place].end else None

    def make_slot(self, unit: SlotUnit, chunk: Chunk, offset: int) -> Slot:
        """Return a new slot for ``unit`` at ``offset`` in ``chunk``. It holds the unit only after `Pool.issue`."""
        with torch.inference_mode(False), torch.no_grad():
            slot = Slot(unit, chunk, offset, self._engine.alias(chunk.memory, offset, unit.nbytes))
        chunk.slots.add(slot)
        return slot

    def slot_for(self, unit: SlotUnit, place: Place, last: Slot | None) -> Slot:
        """Return ``last`` if it is the unit's slot at ``place``, else a new slot."""
        if last is not None and not last.gone and (last.chunk, last.offset) == place:
            return last
        return self.make_slot(unit, *place)

    def reserve(self, units: Sequence[SlotUnit]) -> list[Slot]:
        """Allocate memory for ``units``, which are to be cached, and return their slots in this order.

        `Pool.fault` gives the last ones up first, small ones before large ones. All memory is allocated or none. Waits for
        the device. Raises torch.OutOfMemoryError. Must be called outside passes.
        """
        chunks: list[Chunk] = []
        try:
            for group in _groups(units):
                chunk, offset = self._new_chunk(sum(round_up(unit.nbytes, ALIGN) for unit in group)), 0
                chunks.append(chunk)
                slots: list[Slot] = []
                for unit in group:
                    slots.append(self.make_slot(unit, chunk, offset))
                    offset += round_up(unit.nbytes, ALIGN)
                chunk.extents = tuple(Extent(slot.offset, slot.end, slot) for slot in slots)
                chunk.reserved = tuple(slots)
        except BaseException:
            self.give_back(chunks)  # the error's traceback refers to them
            raise
        self._engine.synchronize()  # P7
        self.chunks = (*self.chunks, *chunks)
        found = {slot.unit: slot for chunk in chunks for slot in chunk.reserved}
        return [found[unit] for unit in units]

    def add_chunk(self, nbytes: int) -> None:
        """Allocate a chunk of ``nbytes`` beside those of cached units. Waits for the device."""
        chunk = self._new_chunk(nbytes)
        self._engine.synchronize()  # P7
        self.chunks = (*self.chunks, chunk)

    def set_region(self, nbytes: int) -> None:
        """Give the region back and allocate one of ``nbytes``. Waits for the device. Raises torch.OutOfMemoryError.

        After an error there is a region of 0 bytes.
        """
        self.give_back((self.region,))
        if nbytes:
            region = self._new_chunk(nbytes)
            self._engine.synchronize()  # P7
            self.chunks = (region, *self.chunks[1:])

    def set_ranges(self, region: torch.Tensor, lossy: torch.Tensor) -> Chunk:
        """Take ``region`` as the region, and ``lossy`` as a chunk whose pages may be taken away; return that chunk. Both are
        memory that exists already. Waits for the device. Must be called before any slot was made.
        """
        self._engine.synchronize()  # P7
        chunk = Chunk(lossy, lossy=True)
        self.chunks = (Chunk(region), chunk)
        return chunk

    def give_back(self, chunks: Sequence[Chunk]) -> None:
        """Give ``chunks`` back to the device. Waits for the device."""
        self._engine.synchronize()  # P7
        for chunk in chunks:
            chunk.nbytes = 0  # first: from now on `Pool.issue` refuses the chunk's slots
            for slot in list(chunk.slots):
                slot.forget_memory()
            chunk.memory = NO_MEMORY
        gone = set(chunks)
        empty = (Chunk(NO_MEMORY),) if self.region in gone else ()
        self.chunks = (*empty, *(chunk for chunk in self.chunks if chunk not in gone))
        # torch's allocator keeps the memory, and a larger chunk could not use it: both would count against the budget.
        self._engine.trim()

    def _new_chunk(self, nbytes: int) -> Chunk:
        """Return a new chunk. Kernels of other streams may still read the memory: the allocator hands it out again as
        soon as the stream that allocated it is done with it (hence P7).
        """
        return Chunk(self._engine.allocate(nbytes))


def _groups(units: Sequence[SlotUnit]) -> list[list[SlotUnit]]:
    """Return the units of each chunk: large units alone, and all small ones together.

    One chunk for all small ones takes the bytes that `resident_cost` counts for them. With several, each would be rounded
    up, and the units would take more than the plan says.
    """
    small = [unit for unit in units if unit.nbytes < OWN_CHUNK]
    return [[unit] for unit in units if unit.nbytes >= OWN_CHUNK] + ([small] if small else [])


class Extent(NamedTuple):
    """Bytes ``begin`` to ``end`` of a chunk, and the slot whose copy was the last one over these bytes."""

    begin: int
    end: int
    slot: Any


Extents = tuple[Extent, ...]  # sorted by `begin`, without overlap
_begin = itemgetter(0)


def extents_over(extents: Extents, begin: int, end: int) -> Extents:
    """Return the extents that have bytes in common with [``begin``, ``end``)."""
    first = bisect_right(extents, begin, key=_begin)
    if first and extents[first - 1].end > begin:
        first -= 1
    return extents[first : bisect_left(extents, end, key=_begin)]


def put_slot(extents: Extents, begin: int, end: int, slot: Any) -> Extents:
    """Return ``extents`` after a copy of ``slot`` over [``begin``, ``end``).

    The parts of earlier extents that the copy leaves keep their slots: a later copy over them still has to wait for the
    events of these slots.
    """
    first, last = bisect_right(extents, begin, key=_begin), bisect_left(extents, end, key=_begin)
    if first and extents[first - 1].end > begin:
        first -= 1
    new = Extent(begin, end, slot)
    over = extents[first:last]
    if len(over) == 1 and over[0].begin == begin and over[0].end == end:
        return extents if over[0].slot is slot else (*extents[:first], new, *extents[last:])
    left = (Extent(over[0].begin, begin, over[0].slot),) if over and over[0].begin < begin else ()
    right = (Extent(end, over[-1].end, over[-1].slot),) if over and over[-1].end > end else ()
    return (*extents[:first], *left, new, *right, *extents[last:])


def find_offset(
    extents: Extents, capacity: int, nbytes: int, loss: Callable[[Any], int | None]
) -> int | None:
    """Return the offset in a chunk of ``capacity`` bytes at which ``nbytes`` overwrite the least; None without room.

    ``loss``: returns how many bytes are lost if a slot is overwritten, or None for a slot that has to stay. Of equally
    good offsets the lowest is returned.
    """
    losses: dict[int, int | None] = {id(extent.slot): loss(extent.slot) for extent in extents}
    best: tuple[int, int] | None = None
    # It suffices to try offset 0 and the ends of extents. From any other offset, the place can be moved down to the next of
    # these without overlapping a further extent.
    for end in (0, *(extent.end for extent in extents)):
        offset = -(-end // ALIGN) * ALIGN
        if offset + nbytes > capacity:
            continue
        lost = _total_loss(losses, extents_over(extents, offset, offset + nbytes))
        if lost is not None and (best is None or (lost, offset) < best):
            best = lost, offset
    return None if best is None else best[1]


def _total_loss(losses: dict[int, int | None], over: Sequence[Extent]) -> int | None:
    """Return the bytes lost with the slots of the extents ``over``; None if one of the slots has to stay."""
    total = 0
    for slot in {id(extent.slot) for extent in over}:
        lost = losses[slot]
        if lost is None:
            return None
        total += lost
    return total
