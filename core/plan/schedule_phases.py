"""Places of units for an order with phases: each phase keeps its own units in the region while it lasts.

A phase is a stretch of the order in which some units are used again and again, such as the denoising steps of one model
in a prompt. Its units are worth a place of their own in the region only during the phase. So the units of each phase are
laid out as if the region were theirs: as many as fit lie side by side and are fetched once, at the begin of the phase,
and the rest streams through a window beside them. What the next phase lays over them is fetched again in the next cycle.

Every second phase begins at the other end of the region. So phases that do not fill the region overlap as little as
possible, and what does not overlap stays over all phases.

The module imports no torch and has no side effects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from .schedule import UseOrder
from .schedule_region import Visit, place_units
from .schedule_ways import bit_reversed

WINDOW = 2  # bytes of the window of a phase, in multiples of the largest unit that streams through it


def place_by_phase(
    order: UseOrder,
    visits: Sequence[Visit],
    sizes: Mapping[int, int],
    room: tuple[int, int],
) -> dict[int, int]:
    """Return the offset of each unit of ``visits``.

    ``sizes``: bytes by unit. ``room``: the first byte of the region for them, and its end; multiples of `ALIGN`.
    """
    low, high = room
    offsets: dict[int, int] = {}
    for index, sequence in enumerate(_sequences(order, visits)):
        new = [unit for unit in dict.fromkeys(sequence) if unit not in offsets]
        if not new:
            continue
        if len(new) < len(set(sequence)):
            # Others have their places from an earlier phase, and lie anywhere.
            offsets.update(place_units(sequence, sizes, room, offsets))
            continue
        kept = _kept_units(sequence, new, sizes, high - low)
        places, end = dict[int, int](), low
        for unit in new:
            if unit in kept:
                places[unit] = end
                end += sizes[unit]
        places.update(place_units([unit for unit in sequence if unit not in kept], sizes, (end, high)))
        if index % 2:
            places = {unit: low + high - offset - sizes[unit] for unit, offset in places.items()}
        offsets.update(places)
    return offsets


def _sequences(order: UseOrder, visits: Sequence[Visit]) -> list[list[int]]:
    """Return the units of ``visits`` by phase."""
    found: list[list[int]] = [[] for _ in order.phases]
    phase = 0
    for visit in visits:
        while phase + 1 < len(order.phases) and order.phases[phase + 1] <= visit.begin:
            phase += 1
        found[phase].append(visit.unit)
    return found


def _kept_units(
    sequence: Sequence[int], units: Sequence[int], sizes: Mapping[int, int], room: int
) -> set[int]:
    """Return those of ``units`` that lie side by side in ``room`` bytes while the phase lasts.

    They leave a window for the others. All units stay if they fit. None does if
    ``sequence`` uses each unit once only, because nothing is gained by that.
    """
    if sum(sizes[unit] for unit in units) <= room:
        return set(units)
    if len(sequence) == len(units):
        return set()
    permutation = [units[index] for index in bit_reversed(len(units))]
    taken = accumulate((sizes[unit] for unit in permutation), initial=0)
    largest = list(accumulate((sizes[unit] for unit in reversed(permutation)), max, initial=0))[::-1]
    fits = [nbytes + WINDOW * others <= room for nbytes, others in zip(taken, largest, strict=True)]
    return set(permutation[: max((length for length, fit in enumerate(fits) if fit), default=0)])
