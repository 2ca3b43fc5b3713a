"""Where a fault finds room in the pool, and what it gives up for it. The functions decide and change nothing.

A fault is a use of units that are not readable on the device when they are needed. A unit is a group of weights
that cross to the device together. A slot is the range of device memory that holds a unit, a chunk one allocation of
device memory; the first chunk is the region of streamed units, the others hold cached units.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from ..common.errors import BudgetError
from ..plan.region import ALIGN
from ..plan.residency import round_up
from .pool_memory import Chunk, Extents, Place, PoolMemory, extents_over, find_offset, put_slot
from .slot import Slot, SlotState, SlotUnit

# Returns how many cached bytes are lost with a slot, None for a slot that has to stay. No slot: a unit of the same fault.
Loss = Callable[[Slot | None], int | None]


def bytes_for(units: Sequence[SlotUnit]) -> int:
    """Return the bytes in which ``units`` fit side by side."""
    return sum(round_up(unit.nbytes, ALIGN) for unit in units)


def find_places_beside(
    memory: PoolMemory, wants: Collection[SlotUnit], last: Mapping[SlotUnit, Slot], here: dict[SlotUnit, Slot]
) -> tuple[dict[SlotUnit, Slot], dict[SlotUnit, Place] | None]:
    """Return the slots of ``here`` that stay where they are, and places for the other units of ``wants``. The places are
    None if the units do not fit.

    ``here``: the slots of the units of ``wants`` that are on the device already. If the other units find no room beside these
    slots, the units of slots that nobody uses get new places too, and are copied again.
    """
    places = find_places(memory, [unit for unit in wants if unit not in here], last, here.values())
    if places is None and any(slot.state is SlotState.CACHED for slot in here.values()):
        here = {unit: slot for unit, slot in here.items() if slot.state is not SlotState.CACHED}
        places = find_places(memory, [unit for unit in wants if unit not in here], {}, here.values())
    return here, places


def find_places(
    memory: PoolMemory, units: Sequence[SlotUnit], last: Mapping[SlotUnit, Slot], stay: Collection[Slot]
) -> dict[SlotUnit, Place] | None:
    """Return places for all ``units`` at once; None if they do not fit beside the slots that have to stay.

    ``last``: the slot that each unit had last; its place is preferred, because the slot's views are made already.
    ``stay``: unused slots that have to stay too. Else the region is preferred, and there the place where the fewest
    cached bytes are overwritten; then the cached units that are to be given up first.
    """
    loss = _loss_beside(stay)

    def any_loss(slot: Slot | None) -> int | None:
        return None if loss(slot) is None else 0

    # The cheapest places may leave gaps between them that are too small. Then side by side, from the lowest offset on.
    return _pack(memory, units, last, loss) or _pack(memory, units, {}, any_loss)


def _pack(
    memory: PoolMemory, units: Sequence[SlotUnit], last: Mapping[SlotUnit, Slot], loss: Loss
) -> dict[SlotUnit, Place] | None:
    """Return a place for each of ``units``, one after the other; None if one of them finds none."""
    left: dict[Chunk, Extents] = {}
    found: dict[SlotUnit, Place] = {}
    # The largest unit first: it fits into the fewest places.
    for unit in sorted(units, key=lambda unit: -unit.nbytes):
        place = _last_place(unit, last, left, loss) or _best_place(memory, unit.nbytes, left, loss)
        if place is None:
            return None
        found[unit] = place
        chunk, offset = place
        # None stands for a unit of this fault.
        left[chunk] = put_slot(left.get(chunk, chunk.extents), offset, offset + unit.nbytes, None)
    return found


def _loss_beside(stay: Collection[Slot]) -> Loss:
    """Return the function that tells how many cached bytes are lost with a slot; None for a slot that has to stay."""

    def loss(slot: Slot | None) -> int | None:
        if slot is None or slot in stay:
            return None
        if slot.state is SlotState.FREE:
            return 0
        return slot.unit.nbytes if slot.state is SlotState.CACHED else None  # P3, P12

    return loss


def _last_place(
    unit: SlotUnit, last: Mapping[SlotUnit, Slot], left: Mapping[Chunk, Extents], loss: Loss
) -> Place | None:
    """Return the place of the unit's last slot, None if it cannot be used now."""
    slot = last.get(unit)
    if slot is None or slot.gone or slot.chunk.lossy or loss(slot) is None:  # P12
        return None
    over = extents_over(left.get(slot.chunk, slot.chunk.extents), slot.offset, slot.end)
    return Place(slot.chunk, slot.offset) if all(loss(extent.slot) is not None for extent in over) else None


def _best_place(memory: PoolMemory, nbytes: int, left: Mapping[Chunk, Extents], loss: Loss) -> Place | None:
    """Return the best place of ``nbytes``, None if there is none."""
    region, *cached = memory.chunks
    for chunk in (region, *reversed(cached)):
        if chunk.lossy:  # P12
            continue
        offset = find_offset(left.get(chunk, chunk.extents), chunk.nbytes, nbytes, loss)
        if offset is not None:
            return Place(chunk, offset)
    return None


def spare_chunks(memory: PoolMemory, nbytes: int, grain: int, stay: Collection[Slot]) -> list[Chunk] | None:
    """Return chunks of cached units that no one uses and whose memory is enough for a chunk of ``nbytes``; None if there
    are not enough.

    ``grain``: bytes; the device's allocator rounds up to a multiple of it. ``stay``: slots that have to stay.
    """
    loss = _loss_beside(stay)
    found: list[Chunk] = []
    room = -round_up(nbytes, grain)
    for chunk in reversed(memory.chunks[1:]):
        # P12: the memory of a lossy chunk is not torch's, and its pages give way by themselves.
        if not chunk.lossy and all(loss(extent.slot) is not None for extent in chunk.extents):
            found.append(chunk)
            room += round_up(chunk.nbytes, grain)
            if room >= 0:
                return found
    return None


def no_room(memory: PoolMemory, units: Sequence[SlotUnit]) -> BudgetError:
    """Return the error for ``units`` that find no room although everything unused was given up. The caller adds the remedy,
    because the pool does not know the session's budget.
    """
    taken: dict[SlotState, list[str]] = {}
    for slot in memory.slots():
        taken.setdefault(slot.state, []).append(repr(slot.unit.name))
    reasons = {
        SlotState.IN_USE: "in use at the same time",
        SlotState.HELD: "kept by the program beyond their run",
        SlotState.FILLING: "being fetched",
    }
    holders = "; ".join(
        f"{', '.join(sorted(taken[state]))} {reason}" for state, reason in reasons.items() if state in taken
    )
    nbytes = sum(unit.nbytes for unit in units)
    names = ", ".join(repr(unit.name) for unit in units)
    return BudgetError(
        f"no room on the device for {names} ({nbytes} bytes): of {memory.nbytes} bytes for weights, "
        f"{holders or 'none are in use, but no piece is large enough'}"
    )
