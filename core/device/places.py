"""Address arithmetic of the pool: which slots lie over a range of bytes, and where there is room for a unit.

A chunk is one allocation of device memory. A slot is a range of a chunk that holds one unit (weights that cross to the
device together). The functions work with offsets only and change nothing.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from ..plan.region import ALIGN


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
    if over == (new,):  # as for each cached unit
        return extents
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
    # A place that can be moved down without touching another extent loses no more there, so the ends are enough.
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
