"""Asking for units before they are needed, as far as that evicts nothing needed sooner.

What is asked for follows from the order of use and from what lies where in the region, and in a model's steps both come
again and again: what was decided there before is remembered, and found again instead of being worked out, which the host would
do anew for every unit of every step.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from . import ops
from .schedule import NEVER
from .slots import Slot, SlotState

if TYPE_CHECKING:
    from .streamed import Streamed
    from .streamer import Streamer

_MOST = 8192  # decisions that are remembered
_users: Callable[[Slot], int] = attrgetter("users")
_key: Callable[[Slot], int] = attrgetter("key")


class _Fill(NamedTuple):
    """``unit`` goes to ``offset`` in the region; ``victims``: which of its slots, in their order then, give way; ``distance``: uses
    until it is needed."""

    unit: Streamed
    offset: int
    victims: tuple[int, ...]
    distance: int


class _Decision(NamedTuple):
    fills: tuple[_Fill, ...]
    stuck: int | None  # at which distance there was no room
    after: tuple[int, ...]  # the slots that are in the region then


class LookAhead:
    """Of one streamer, under its lock. ``remembers``: whether what is asked for follows from the order and the region alone."""

    def __init__(self, streamer: Streamer, remembers: bool) -> None:
        self._streamer = streamer
        self._remembers = remembers
        # Where looking ahead ended for want of room: the order's epoch, the place of the unit, the slot spared.
        self._stuck: tuple[int, int, Slot | None] | None = None
        self._known: dict[Any, _Decision] = {}
        self._lie: tuple[int, ...] | None = None  # the keys of the region's slots; None: to be asked for
        self._epoch = -1  # of the order, whose period they are of
        self.found = 0  # decisions that were found again
        self.busy = False  # slots are being filled: a use that ends just then (the collector's doing) asks for nothing

    def changed(self) -> None:
        """What lies in the region is another: there may be room."""
        self._stuck = self._lie = None

    def still_stuck(self, released: Slot) -> bool:
        """Whether looking ahead would end where it did last: what gave up no slot then gives up none now."""
        if self._stuck is None:
            return False
        order = self._streamer.order
        epoch, place, spared = self._stuck
        if epoch != order.epoch or order.at >= place:
            return False
        return self._place_of(released) <= place and (spared is None or self._place_of(spared) <= place)

    def uses(self, guarded: Slot | None = None) -> list[float | None]:
        """When the slots' units are expected again, in the region's order; None for those that must stay."""
        order = self._streamer.order
        at, epoch = order.at, order.epoch
        held = SlotState.HELD
        uses: list[float | None] = []
        for slot in self._streamer.region.slots:
            if slot.users or slot is guarded or slot.state is held:
                uses.append(None)
            elif slot.epoch == epoch and at < (place := slot.next_place) < NEVER:
                uses.append(place - at)
            else:
                uses.append(self._place_of(slot) - at)
        return uses

    def _place_of(self, slot: Slot) -> int:
        """Where in the order the slot's unit is expected again."""
        order = self._streamer.order
        if slot.epoch != order.epoch or slot.next_place <= order.at or slot.next_place == NEVER:
            slot.next_place, slot.epoch = order.next_place(slot.unit.index), order.epoch
        return slot.next_place

    def look(self) -> None:
        """Ask for what is expected next."""
        if self.busy:
            return
        self.busy = True
        try:
            self._look()
        finally:
            self.busy = False

    def _look(self) -> None:
        streamer = self._streamer
        self._stuck = None
        # In backward a recomputation is followed by the unit's gradients, whether or not that is learnt yet.
        guarded = streamer.last.slot if streamer.last is not None and ops.in_backward() else None
        order, period = streamer.order, streamer.order.period
        if not self._remembers or streamer.resting or not period:
            self._decide(guarded)
            return
        if self._epoch != order.epoch or len(self._known) >= _MOST:
            self._known.clear()
            self._epoch = order.epoch
        slots = streamer.region.slots
        lie = self._lie
        if lie is None:
            lie = self._lie = tuple(map(_key, slots))
        if guarded is None and not streamer.held and not any(map(_users, slots)):
            key: Any = order.at % period, lie
        else:
            held = SlotState.HELD
            stay = [slot.users > 0 or slot is guarded or slot.state is held for slot in slots]
            key = order.at % period, lie, tuple(stay)
        known = self._known.get(key)
        if known is None:
            self._known[key] = self._decide(guarded)
        else:
            self.found += 1
            self._again(known, guarded)

    def _again(self, known: _Decision, guarded: Slot | None) -> None:
        streamer = self._streamer
        at, epoch, slots = streamer.order.at, streamer.order.epoch, streamer.region.slots
        for unit, offset, victims, distance in known.fills:
            slot = streamer.fill(unit, offset, [slots[place] for place in victims])
            slot.next_place, slot.epoch = at + distance, epoch
        self._lie = known.after
        if known.stuck is not None:
            self._stuck = epoch, at + known.stuck, guarded

    def _decide(self, guarded: Slot | None) -> _Decision:
        streamer = self._streamer
        region, units, order = streamer.region, streamer.units, streamer.order
        room, seen = region.nbytes, set()
        uses: list[float | None] = []
        fills: list[_Fill] = []
        for distance, index in enumerate(order.upcoming(), 1):
            if index in seen:
                continue
            seen.add(index)
            unit = units[index]
            room -= unit.nbytes
            if room < 0:
                break
            if unit.slot is not None or not streamer.ready(unit):
                continue
            if streamer.late(unit):
                return self._decided(fills, None)
            uses = uses or self.uses(guarded)
            place = region.place(unit.nbytes, uses, later_than=distance)
            if place is None:
                break
            offset, victims = place
            fills.append(_Fill(unit, offset, tuple(map(region.slots.index, victims)), distance))
            slot = streamer.fill(unit, offset, victims)
            slot.next_place, slot.epoch = order.at + distance, order.epoch
            # It stands in the region's order where its victims stood.
            at = region.slots.index(slot)
            uses[at : at + len(victims)] = [distance]
        else:
            return self._decided(fills, None)
        self._stuck = order.epoch, order.at + distance, guarded
        return self._decided(fills, distance)

    def _decided(self, fills: list[_Fill], stuck: int | None) -> _Decision:
        self._lie = tuple(map(_key, self._streamer.region.slots))
        return _Decision(tuple(fills), stuck, self._lie)
