"""`check_pool`: verifies the rules of the pool (at the top of pool.py) as far as they can be seen between calls.

A unit is a group of weights that cross to the device together, a slot the range of device memory that holds one, a chunk
one allocation. What events order on the device (P2, and a part of P1, P5, P7 and P9) is not seen here: the simulated device
checks that. Whether a use got the right version (P6) and for whom a thread waits (P11) only tests can see.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..common.errors import BrokenRuleError
from .pool_memory import Chunk, PoolMemory
from .slot import Slot, SlotState, SlotUnit

_WITH_BYTES = frozenset({SlotState.CACHED, SlotState.IN_USE, SlotState.HELD})
_OWNS_ITS_PLACE = _WITH_BYTES | {SlotState.FILLING, SlotState.LOST}


def check_pool(memory: PoolMemory, last: Mapping[SlotUnit, Slot]) -> None:
    """Raise BrokenRuleError for the first rule that is broken. ``last``: the slot in which each unit is looked for."""
    for chunk in memory.chunks:
        _check_extents(chunk)
        for slot in list(chunk.slots):
            _check_place(slot)
            _check_record(slot)
            if (
                slot.state in (SlotState.CACHED, SlotState.IN_USE, SlotState.FILLING)
                and last.get(slot.unit) is not slot
            ):
                raise BrokenRuleError("P10", "one slot of the unit", "another one", slot.unit.name)
    for unit, slot in last.items():
        if slot.unit is not unit:
            raise BrokenRuleError("P10", "the unit's own slot", f"one of {slot.unit.name!r}", unit.name)
        if slot.gone and slot.state is not SlotState.FREE:
            raise BrokenRuleError("P7", "FREE without memory", slot.state.name, unit.name)


def _check_extents(chunk: Chunk) -> None:
    """Raise BrokenRuleError if the extents of ``chunk`` are not sorted, or overlap."""
    end = 0
    for extent in chunk.extents:
        if not end <= extent.begin < extent.end:
            raise BrokenRuleError(
                "P4", f"an extent from byte {end} on", f"{extent[:2]}", extent.slot.unit.name
            )
        end = extent.end


def _check_place(slot: Slot) -> None:
    """Raise BrokenRuleError if a copy of another slot lies over bytes that ``slot`` needs."""
    state, chunk = slot.state, slot.chunk
    if state not in _OWNS_ITS_PLACE:
        return
    if slot.gone or slot.end > chunk.nbytes or slot.base.data_ptr() != chunk.memory.data_ptr() + slot.offset:
        raise BrokenRuleError("P7", "memory of its chunk", "other memory", slot.unit.name)
    mine = [extent[:2] for extent in chunk.extents if extent.slot is slot]
    if mine != [(slot.offset, slot.end)]:
        rule = {SlotState.CACHED: "P4", SlotState.LOST: "P12"}.get(state, "P3")
        raise BrokenRuleError(
            rule, f"bytes {slot.offset} to {slot.end}", f"only {mine} ({state.name})", slot.unit.name
        )


def _check_record(slot: Slot) -> None:
    """Raise BrokenRuleError if the fields of the slot's record contradict its state."""
    now, name = slot.now, slot.unit.name
    if now.state is SlotState.FILLING:
        if not now.thread:
            raise BrokenRuleError("P9", "the thread that copies", "none", name)
        return
    if bool(now.users) is not (now.state is SlotState.IN_USE):
        raise BrokenRuleError(
            "P8", "users while IN_USE alone", f"{len(now.users)} users and {now.state.name}", name
        )
    if now.state not in _WITH_BYTES:
        return
    if now.held and now.state is SlotState.CACHED:
        raise BrokenRuleError("P3", "HELD while the program may keep a view", now.state.name, name)
    streams = {user.stream for user in now.users}
    if not streams <= now.waited:
        raise BrokenRuleError(
            "P5", "users whose streams wait for the copy", f"{len(streams - now.waited)} others", name
        )
    if not now.waited - streams <= now.reads.keys():
        raise BrokenRuleError(
            "P1", "an event of each stream that read", f"none of {len(now.waited - streams)}", name
        )
