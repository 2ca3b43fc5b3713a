"""The layout of units in a VBAR (without side effects).

A VBAR is a range of device addresses from comfy-aimdo whose pages can be taken away and given back. A unit is a
module whose weights are copied to the device together. A unit is *resident* if it stays on the device at its
place in the VBAR; other units are streamed through *slots* (ranges of device memory) in the region.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from . import vbar


@dataclass(frozen=True)
class VbarRanges:
    """The layout of a VBAR: slots for streaming first, then a fixed place for each unit.

    ``region_bytes``: bytes for slots, at the beginning. ``begin``: the offset of the first unit's place.
    ``places``: (start, end) in bytes by unit. ``later``: whether the slots get memory only once a unit has to
    be streamed, because all units may stay.
    """

    region_bytes: int
    begin: int
    places: dict[int, tuple[int, int]]
    later: bool

    @property
    def nbytes(self) -> int:
        """The number of bytes of the whole layout."""
        return max((end for _, end in self.places.values()), default=self.begin)


def spread(units: Sequence[int]) -> list[int]:
    """Return ``units`` reordered so that every prefix of the result is spread evenly over them (bit-reversed
    order).
    """
    bits = max(1, (len(units) - 1).bit_length())
    turned = (int(f"{number:0{bits}b}"[::-1], 2) for number in range(1 << bits))
    return [units[number] for number in turned if number < len(units)]


def lay_out(sizes: Sequence[int], resident: Sequence[int], region_bytes: int, room: int) -> VbarRanges | None:
    """Return the places for units of ``sizes`` bytes, the ``resident`` units first; None if ``room`` is too
    small for a slot.

    ``room``: bytes that the VBAR's pages may take at once. ``region_bytes``: bytes wanted for slots, 0 if all
    units are resident.
    """
    room = room // vbar.PAGE * vbar.PAGE
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
    at = begin = -(-region // vbar.PAGE) * vbar.PAGE if later else region
    places = {}
    for index in order:
        places[index] = at, at + sizes[index]
        at += sizes[index]
    return VbarRanges(region, begin, places, later)
