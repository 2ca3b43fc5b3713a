"""`Pool`: the places of a session's units on the device, and their states.

A unit is a group of weights that cross to the device together; a slot is the range of device memory that holds a unit.
The pool is asked for a slot before a copy (`issue`, or `fault` where the schedule has not foreseen the use), and told when
the copy was issued to the device (`complete`), when a user begins and ends (`enter`, `leave`), and which units to give up
(`drop_units`). It does not know where bytes come from, in which order units are used, or what a module is.

Nothing here relies on the schedule: what lies in a place, and who uses it, is looked up at each `enter` and each `issue`.
So any offsets are safe, and bad ones only cost time. The rules:

P1  A place is overwritten only after the events of its last reads, on each stream that was let read it.
P2  A place that was filled and never read is overwritten only after the event of the copy that filled it. Copies are in
    order among themselves, but a decoder that overwrites the place runs on another stream.
P3  Bytes that are in use, held or being filled are not overwritten.
P4  What a copy overwrites is unmarked before the copy is issued, and the new unit is marked after it. So a readable slot
    has all its bytes, and slots that are readable or being filled never overlap.
P5  A stream reads a slot only after it has waited for the event of the copy.
P6  A user gets the version that it asks for, or the one that other users of the unit read at that time.
P7  A place lies within its chunk. Memory is written only after the device was idle once since the allocation (other
    streams may still read what the allocator hands out again), and given back only when the device is idle and no one
    uses it.
P8  A state changes as `NEXT` (slot.py) says, by one assignment of a whole record.
P9  A copy that was begun and not completed (it failed, or an interrupt came) keeps its place until the device was idle.
P10 A unit has one slot in which it is looked for. Another slot holds it only as long as the program keeps a view there.
P11 A thread waits only for threads that use slots and do not wait themselves.
P12 A slot without memory (LOST) is neither read nor overwritten, and no fault takes it. Only an `issue` for this slot does.
    Where other programs may take pages (`Chunk.lossy`), no fault takes any place: its pages may be gone, whatever its state.

`Pool.check` verifies what of them can be seen between two calls. The pool's owner calls `cancel_copies` after a copy that
failed, and `abandon` after an exception that is no `Exception` (a KeyboardInterrupt). Both may be called again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping

from ..common.errors import BrokenRuleError, CaromError
from .engine import Engine
from .pool_check import check_pool
from .pool_memory import Chunk, Extents, PoolMemory, extents_over, put_slot
from .pool_room import bytes_for, find_places_beside, no_room, spare_chunks
from .slot import (
    NEXT,
    NO_EVENTS,
    NO_STREAMS,
    NOBODY,
    Issue,
    Slot,
    SlotRecord,
    SlotState,
    SlotUnit,
    SlotWaiters,
    User,
    record,
)

_FREE, _FILLING, _CACHED = SlotState.FREE, SlotState.FILLING, SlotState.CACHED
_IN_USE, _HELD, _LOST = SlotState.IN_USE, SlotState.HELD, SlotState.LOST
_READABLE = frozenset({_CACHED, _IN_USE, _HELD})
_get_thread = threading.get_ident


class Pool:
    """The slots in ``memory``. Must be called under the lock of ``waiters``.

    ``others_active``: returns whether another thread runs a forward or backward pass, in which it may drop a view at any
    time. ``wait``: lets the current stream wait for an event; `Engine.wait` until it is replaced.
    """

    def __init__(
        self, engine: Engine, memory: PoolMemory, waiters: SlotWaiters, others_active: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._engine, self.memory, self._waiters = engine, memory, waiters
        self.wait: Callable[[object], None] = engine.wait
        self._others_active = others_active
        self._last: dict[SlotUnit, Slot] = {}  # the slot in which each unit is looked for, whatever its state
        self.closed = False

    # -- a copy

    def issue(self, slot: Slot, version: int) -> Issue:
        """Take the slot's place for a copy of ``version`` of its unit.

        If it was TAKEN, the caller issues the copy into ``slot.target`` after the events ``slot.after``, and then calls
        `complete`. If it was REFUSED, a later `enter` returns None.
        """
        last = self._last.get(slot.unit)
        if last is not None and last.now.state is not _FREE and _serves(last.now, version):
            return Issue.PRESENT
        if slot.offset < 0 or slot.end > slot.chunk.nbytes:  # P7: a chunk that was given back has 0 bytes
            return Issue.REFUSED
        over = extents_over(slot.chunk.extents, slot.offset, slot.end)
        for extent in over:
            other = extent.slot
            if other.now.state is _HELD:
                _end_hold(self._engine, other, self._last.get(other.unit) is other)
            state = other.now.state
            if not (state is _FREE or state is _CACHED or (state is _LOST and other is slot)):  # P3, P12
                return Issue.REFUSED
        self._begin(slot, version, over, NOBODY)
        return Issue.TAKEN

    def _begin(self, slot: Slot, version: int, over: Extents, users: frozenset[User]) -> None:
        """Set the slots of the extents ``over``, whose bytes the copy overwrites, to FREE, and ``slot`` to FILLING.

        ``users``: those that use the unit once the copy is issued.
        """
        after: tuple[object, ...] = ()
        for extent in over:
            if extent.slot.now.state is _CACHED:
                _unmark(self._engine, extent.slot)  # P4: before the copy
            # Also of what was unmarked earlier: of the bytes that a copy over a part has left, it alone knows the events.
            after += extent.slot.now.after  # P1, P2
        if len(over) > 1:
            after = tuple(dict.fromkeys(after))  # each event once
        last = self._last.get(slot.unit)
        if last is not None and last.now.state is _CACHED:
            _unmark(self._engine, last)  # P10
        # The events first: once the slot is the one over these bytes, it alone knows them (P1).
        slot.now = record(
            (NEXT[slot.now.state][_FREE], 0, NOBODY, None, NO_STREAMS, NO_EVENTS, after, False, 0)
        )
        slot.chunk.extents = put_slot(slot.chunk.extents, slot.offset, slot.end, slot)
        self._last[slot.unit] = slot
        filling, thread = NEXT[_FREE][_FILLING], _get_thread()
        slot.now = record((filling, version, users, None, NO_STREAMS, NO_EVENTS, after, False, thread))  # P8

    def complete(self, slot: Slot, copied: object) -> None:
        """Mark the slot as holding its unit, after the event ``copied``. The copy was issued without an error."""
        now = slot.now
        if now.users:
            self.wait(copied)  # P5
        streams = frozenset(user.stream for user in now.users) if now.users else NO_STREAMS
        state = NEXT[now.state][_IN_USE if now.users else _CACHED]
        slot.now = record(
            (state, now.version, now.users, copied, streams, NO_EVENTS, (), False, 0)
        )  # P4: after it
        if self._waiters.asleep:
            self._waiters.slot_freed()  # P11

    def cancel_copies(self, thread: int) -> None:
        """Give up the copies that ``thread`` has begun and not completed. Waits for the device."""
        self._engine.synchronize()  # P9
        for slot in self.memory.slots():
            if slot.now.state is _FILLING and slot.now.thread == thread:
                slot.now = SlotRecord(NEXT[_FILLING][_FREE])
                self._engine.freed(slot.chunk.memory, slot.offset, slot.end)

    # -- a use

    def enter(self, unit: SlotUnit, version: int, user: User) -> Slot | None:
        """Let ``user`` read ``unit`` on its stream, the current one. Returns the unit's slot, or None if ``version`` of
        the unit is not on the device. The user then calls `leave` once; a use inside a use of the same unit is another user's.
        """
        slot = self._last.get(unit)
        if slot is None:
            return None
        now = slot.now
        if now.state not in _READABLE or (now.version != version and not now.users):  # P4, P6
            return None
        waited = now.waited
        if user.stream not in waited:
            self.wait(now.copied)  # P5
            waited = waited | {user.stream}
        users, in_use = now.users | {user} if now.users else frozenset((user,)), NEXT[now.state][_IN_USE]
        slot.now = record((in_use, now.version, users, now.copied, waited, now.reads, (), now.held, 0))
        return slot

    def leave(self, slot: Slot, user: User, held: bool = False) -> None:
        """End the use by ``user``, whose kernels were issued. Does nothing if the use was abandoned already.

        ``held``: whether the program keeps a view of the slot. If the event cannot be recorded, the use goes on, and the
        owner calls `abandon`.
        """
        now = slot.now
        if now.state is not _IN_USE or user not in now.users:
            return
        reads, stream = now.reads, user.stream
        event = self._engine.record(stream, reads.get(stream))  # P1: before the user is gone
        if stream not in reads:
            reads = {**reads, stream: event}
        users, held = now.users - {user} if len(now.users) > 1 else NOBODY, held or now.held
        state = _IN_USE if users else _HELD if held else _CACHED
        slot.now = record(
            (NEXT[_IN_USE][state], now.version, users, now.copied, now.waited, reads, (), held, 0)
        )
        # Also where users remain: those that are left may all wait themselves.
        if self._waiters.asleep:
            self._waiters.slot_freed()  # P11

    def keep_version(self, slot: Slot, version: int) -> None:
        """Note that the slot's bytes are ``version`` of its unit, because what the program wrote there was copied home."""
        slot.now = slot.now._replace(version=version)

    def fault(self, wants: Mapping[SlotUnit, int], user: User) -> list[Slot]:
        """Let ``user`` read several units, each of its version, at once: for one operator, or for a unit without a schedule, or
        whose place in the schedule is in use. Returns a slot for each; the caller copies into those that are FILLING, on this
        thread, and completes them.

        Room is taken in the region. Then cached units are given up. Then the thread waits while others use slots, and the
        lock is free meanwhile. Raises BudgetError if all of that gives no room, CaromError if the pool was closed,
        torch.OutOfMemoryError.
        """
        deadline = self._waiters.new_deadline()
        while True:
            if self.closed:
                raise CaromError("weights are needed on the device, but their session was closed")
            end_holds(self)
            # Nothing is taken yet: threads that wait with a part of what they need would wait for each other (P11).
            here = {
                unit: last
                for unit in wants
                if (last := self._last.get(unit)) and _serves(last.now, wants[unit])
            }
            absent = [unit for unit in wants if unit not in here]
            if not any(slot.now.state is _FILLING for slot in here.values()):
                here, places = find_places_beside(self.memory, wants, self._last, here)
                if places is not None:
                    break
                if _trade_chunks(self._engine, self.memory, bytes_for(absent), here.values()):
                    continue
            mine, used = _uses(self.memory, user.thread)
            held = any(slot.now.state is _HELD for slot in self.memory.slots())
            if not self._waiters.wait_for_slot(mine, used, held and self._others_active(), deadline):  # P11
                raise no_room(self.memory, absent)
        missing = {
            unit: self.memory.slot_for(unit, place, self._last.get(unit)) for unit, place in places.items()
        }
        for unit, slot in missing.items():
            over = extents_over(slot.chunk.extents, slot.offset, slot.end)
            self._begin(slot, wants[unit], over, frozenset({user}))
        for unit in here:
            self.enter(unit, wants[unit], user)
        return [self._last[unit] for unit in wants]

    def abandon(self, thread: int) -> None:
        """Forget the copies and uses of ``thread``, which an interrupt has ended. Waits for the device."""
        self.cancel_copies(thread)
        self._waiters.forget_thread(thread)
        for slot in self.memory.slots():
            now = slot.now
            users = frozenset(user for user in now.users if user.thread != thread)
            if now.state is not _IN_USE or users == now.users:
                continue
            # No event came after the reads of these users, but the device was idle since (P1). A stream on which no other
            # user read the slot has to wait anew.
            waited = now.waited & (now.reads.keys() | {user.stream for user in users})
            held = now.held or slot.kept  # P3: a traceback, for instance, keeps views
            state = _IN_USE if users else _HELD if held else _CACHED
            slot.now = SlotRecord(
                NEXT[_IN_USE][state], now.version, users, now.copied, waited, now.reads, (), held
            )
        self._waiters.slot_freed()  # P11

    # -- memory that is given up

    def drop_units(self, units: Collection[SlotUnit]) -> int:
        """Give up ``units``, except those that are in use, held or being filled; return the bytes of memory given back.

        A chunk is given back when none of the units for which it was reserved lies in it any more. Chunks that faults have
        allocated are given back too. Waits for the device if there is any. Must be called outside
        passes, or to reclaim memory.
        """
        dropped = frozenset(units)
        for slot in self.memory.slots():
            if slot.unit not in dropped:
                continue
            if slot.now.state is _HELD:
                _end_hold(self._engine, slot, looked_for=False)
            if slot.now.state is _CACHED:
                _unmark(self._engine, slot)
        unclaimed = [chunk for chunk in self.memory.chunks[1:] if _unclaimed(chunk, dropped)]  # P7
        before = self.memory.nbytes
        if unclaimed:
            _free_slots(self._engine, unclaimed)
            self.memory.give_back(unclaimed)
        return before - self.memory.nbytes

    def lose_slot(self, slot: Slot) -> None:
        """Note that another program took, or may take, the pages of the slot's place in a VBAR."""
        for extent in (over := extents_over(slot.chunk.extents, slot.offset, slot.end)):
            if extent.slot.now.state in (_FILLING, _IN_USE, _HELD):
                raise BrokenRuleError(
                    "P12", "pages that nobody uses", extent.slot.now.state.name, extent.slot.unit.name
                )
        for extent in over:
            if extent.slot.now.state is _CACHED:
                _unmark(self._engine, extent.slot)
        # P1: the pages may be there still when the place gets memory again, if it shares them with places that keep theirs.
        after = tuple({event: None for extent in over for event in extent.slot.now.after})
        slot.chunk.extents = put_slot(slot.chunk.extents, slot.offset, slot.end, slot)
        slot.now = SlotRecord(NEXT[slot.now.state][_LOST], after=after)
        self._engine.freed(slot.chunk.memory, slot.offset, slot.end)

    def set_region(self, nbytes: int) -> None:
        """Give the region back, and allocate one of ``nbytes``. Its slots cannot be filled any more. Waits for the device.

        Views that the program keeps in the region keep their memory. Must be called outside passes. Raises
        torch.OutOfMemoryError; then there is no region.
        """
        for slot in self.memory.region.slots:
            if slot.now.state in (_FILLING, _IN_USE):
                raise BrokenRuleError("P7", "a region that nobody uses", slot.now.state.name, slot.unit.name)
        _free_slots(self._engine, (self.memory.region,))
        self.memory.set_region(nbytes)

    def close(self) -> None:
        """Give all memory back. What still runs keeps its own alive. Waits for the device. Threads that wait in `fault`
        raise CaromError.
        """
        self.closed = True
        _free_slots(self._engine, self.memory.chunks)
        self.memory.give_back(self.memory.chunks)
        self._waiters.slot_freed()  # P11

    def check(self) -> None:
        """Raise BrokenRuleError if a rule is broken. Takes time in proportion to the number of slots."""
        check_pool(self.memory, self._last)


def _serves(now: SlotRecord, version: int) -> bool:
    """Return whether a slot need not be filled for a use of ``version``: its users share what they read (P6)."""
    return now.state in (_FILLING, _IN_USE) or (now.version == version and now.state in (_CACHED, _HELD))


def _unmark(engine: Engine, slot: Slot) -> None:
    """Note that the unit's bytes in ``slot``, which is CACHED, are given up."""
    now = slot.now
    # Each stream waited for the copy before it read, so the copy's own event is needed only without a read.
    after = tuple(now.reads.values()) or (now.copied,)  # P1, P2
    slot.now = record((NEXT[now.state][_FREE], 0, NOBODY, None, NO_STREAMS, NO_EVENTS, after, False, 0))
    if engine.watches_slots:
        engine.freed(slot.chunk.memory, slot.offset, slot.end)


def _free_slots(engine: Engine, chunks: Iterable[Chunk]) -> None:
    """Note that the bytes of all slots in ``chunks`` are given up, because the memory is."""
    for chunk in chunks:
        for slot in list(chunk.slots):
            if slot.now.state is _CACHED:
                _unmark(engine, slot)
            elif slot.now.state is not _FREE:
                slot.now = SlotRecord(NEXT[slot.now.state][_FREE])


def _trade_chunks(engine: Engine, memory: PoolMemory, nbytes: int, stay: Collection[Slot]) -> bool:
    """Give up cached units for a chunk of ``nbytes``, but not the slots ``stay``. Returns False if they do not suffice."""
    spare = spare_chunks(memory, nbytes, engine.grain, stay)
    if spare is None:
        return False
    _free_slots(engine, spare)
    memory.give_back(spare)
    memory.add_chunk(nbytes)
    return True


def end_holds(pool: Pool) -> None:
    """Let held slots of ``pool`` be overwritten or lose their pages, if the program has dropped its views of them."""
    for slot in pool.memory.slots():
        if slot.now.state is _HELD:
            _end_hold(pool._engine, slot, pool._last.get(slot.unit) is slot)


def _end_hold(engine: Engine, slot: Slot, looked_for: bool) -> None:
    """Let a held slot be overwritten, if the program has dropped its views. ``looked_for``: whether `Pool.enter` would
    return the slot.
    """
    if slot.kept:  # P3
        return
    now = slot.now
    # The program may have read its view after the last user left, on a stream of these or on the current one (P1).
    streams = {*now.reads, engine.stream()}
    reads = {stream: engine.record(stream, now.reads.get(stream)) for stream in streams}
    if looked_for:
        slot.now = SlotRecord(NEXT[_HELD][_CACHED], now.version, NOBODY, now.copied, now.waited, reads)
    else:  # P10
        slot.now = SlotRecord(NEXT[_HELD][_FREE], after=tuple(reads.values()))
        engine.freed(slot.chunk.memory, slot.offset, slot.end)


def _unclaimed(chunk: Chunk, dropped: frozenset[SlotUnit]) -> bool:
    """Return whether the memory of ``chunk`` is to be given back with the units ``dropped``.

    A unit that a fault has put there has no claim on it: it would take more than the session's capacity.
    """
    if chunk.lossy:  # P12
        return False
    if any(extent.slot.now.state in (_FILLING, _IN_USE, _HELD) for extent in chunk.extents):  # P7
        return False
    if any(slot.now.state is _CACHED for slot in chunk.reserved):
        return False
    return not chunk.reserved or any(slot.unit in dropped for slot in chunk.reserved)


def _uses(memory: PoolMemory, thread: int) -> tuple[int, int]:
    """Return the number of uses of slots by ``thread``, and by all threads. A copy that was begun is a use."""
    users = [user.thread for slot in memory.slots() for user in slot.now.users]
    users += [slot.now.thread for slot in memory.slots() if slot.now.state is _FILLING]
    return users.count(thread), len(users)
