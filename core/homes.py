"""PURE. Where units live in a VBAR, and a region that knows the slots there beside its own."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from . import aimdo
from .slots import Region, Slot


@dataclass(frozen=True)
class Homes:
    """Where units live in a VBAR: ``places`` are (start, end) in bytes, by unit. ``region_bytes`` for slots come first;
    ``begin``: where homes do. ``later``: slots get memory only when something has to stream."""

    region_bytes: int
    begin: int
    places: dict[int, tuple[int, int]]
    later: bool

    @property
    def nbytes(self) -> int:
        return max((end for _, end in self.places.values()), default=self.begin)


def spread(units: Sequence[int]) -> list[int]:
    """``units`` reordered so that every beginning of the list is spread evenly over them (bit-reversed counting)."""
    bits = max(1, (len(units) - 1).bit_length())
    turned = (int(f"{number:0{bits}b}"[::-1], 2) for number in range(1 << bits))
    return [units[number] for number in turned if number < len(units)]


def lay_out(sizes: Sequence[int], resident: Sequence[int], region_bytes: int, room: int) -> Homes | None:
    """Homes for units of ``sizes`` bytes: those that are to be ``resident`` first. None where ``room`` holds no slot.

    ``room``: bytes that pages may take at once; ``region_bytes``: wanted for slots, 0 where all units are resident.
    """
    room = room // aimdo.PAGE * aimdo.PAGE
    first, largest = set(resident), max(sizes)
    order = spread(list(resident)) + spread([i for i in range(len(sizes)) if i not in first])
    later = sum(sizes) <= room and len(resident) == len(sizes)
    region = region_bytes
    if not region:
        region = min(2 * largest, sum(sizes))
    if not later:
        region = min(region, room)
    if region < largest:
        return None
    at = begin = -(-region // aimdo.PAGE) * aimdo.PAGE if later else region
    places = {}
    for index in order:
        places[index] = at, at + sizes[index]
        at += sizes[index]
    return Homes(region, begin, places, later)


class PooledRegion(Region):
    """Slots in the region, and beyond it the slots of units at home."""

    def __init__(self, nbytes: int, largest: int, starts: Sequence[int]) -> None:
        super().__init__(nbytes, largest)
        self._begins = sorted(starts)
        self.homes: dict[int, Slot] = {}  # by offset

    def at(self, offset: int) -> Slot | None:
        if offset < self.nbytes:
            return super().at(offset)
        place = bisect_right(self._begins, offset) - 1
        return self.homes.get(self._begins[place]) if place >= 0 else None

    @property
    def users(self) -> int:
        return super().users + sum(slot.users for slot in self.homes.values())

    def add(self, slot: Slot) -> None:
        if slot.offset < self.nbytes:
            super().add(slot)
        else:
            self.homes[slot.offset] = slot

    def remove(self, slot: Slot) -> None:
        if slot.offset < self.nbytes:
            super().remove(slot)
        else:
            del self.homes[slot.offset]
