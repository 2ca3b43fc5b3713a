"""Defines `Prefetcher`: fetches units into slots before they are needed, as long as this evicts no unit that
is needed sooner (Belady's rule).

A unit is a group of streamed tensors. A slot is the device memory that holds a unit while it is used. The
region is the device memory of all slots. Each decision follows from the order of use and the contents of the
region, which repeat in every step. Decisions are therefore cached and replayed, which saves host time for
every unit of every step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from ..model import managed_tensor
from ..plan.access_order import NEVER, AccessOrder
from ..plan.region import Region, Slot, SlotState

if TYPE_CHECKING:
    from .streamer import Streamer
    from .unit import StreamedUnit

_MAX_DECISIONS = 8192  # number of cached decisions
_users: Callable[[Slot], int] = attrgetter("users")
_key: Callable[[Slot], int] = attrgetter("key")


class _Fill(NamedTuple):
    """A prefetch of ``unit`` to the offset ``offset`` in the region.

    ``victims``: the slots to evict, by their positions in the region's list of slots.
    ``distance``: number of uses of units until this unit is needed.
    """

    unit: StreamedUnit
    offset: int
    victims: tuple[int, ...]
    distance: int


class _Decision(NamedTuple):
    """The prefetches that follow from one state of the order of use and the region."""

    fills: tuple[_Fill, ...]
    stuck: int | None  # distance of the unit for which there was no room, None if all units found room
    after: tuple[int, ...]  # keys of the region's slots after the prefetches


class Prefetcher:
    """The prefetches of one streamer, under the streamer's lock.

    ``remembers``: whether decisions depend only on the order of use and the region, so that they can be
    cached.
    ``replayed``: number of decisions taken from the cache.
    """

    def __init__(self, streamer: Streamer, caches_decisions: bool) -> None:
        self._streamer = streamer
        self._remembers = caches_decisions
        # Where prefetching last stopped for lack of room: the epoch of the order, the position of the unit
        # for which there was no room, and the slot that could not be evicted.
        self._stuck: tuple[int, int, Slot | None] | None = None
        self._decisions: dict[Any, _Decision] = {}
        self._layout_key: tuple[int, ...] | None = None  # keys of the region's slots; None if outdated
        self._epoch = -1  # epoch of the order for which decisions are cached
        self.replayed = 0
        # True while slots are being filled. The garbage collector may end a use of a slot during that time,
        # and the end of that use must not start another prefetch.
        self.filling = False

    def changed(self) -> None:
        """Note that the region's contents have changed, so that prefetching may find room again."""
        self._stuck = self._layout_key = None

    def restart(self) -> None:
        """Make all decisions anew, after an interrupt."""
        self._decisions.clear()
        self.filling = False
        self.changed()

    def close(self) -> None:
        """Drop all cached decisions, because the region is released."""
        self._decisions.clear()
        self._remembers = False
        self.changed()

    def still_stuck(self, released: Slot) -> bool:
        """Return whether prefetching would stop at the same unit as last time, although ``released`` is no
        longer in use.
        """
        if self._stuck is None:
            return False
        order = self._streamer.order
        epoch, place, spared = self._stuck
        if epoch != order.epoch or order.at >= place:
            return False
        return self._place_of(released) <= place and (spared is None or self._place_of(spared) <= place)

    def uses(self, guarded: Slot | None = None) -> list[float | None]:
        """Return for each slot of the region the number of uses until its unit is needed again, or None for a
        slot that must not be evicted.

        ``guarded``: a slot that must not be evicted although it is unused.
        """
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
        """Return the position in the order of use at which the slot's unit is needed next."""
        order = self._streamer.order
        if slot.epoch != order.epoch or slot.next_place <= order.at or slot.next_place == NEVER:
            slot.next_place, slot.epoch = order.next_place(slot.unit.index), order.epoch
        return slot.next_place

    def prefetch(self) -> None:
        """Fetch the units that are needed next, as many as the region has room for."""
        if self.filling:
            return
        self.filling = True
        try:
            self._prefetch()
        finally:
            self.filling = False

    def _prefetch(self) -> None:
        """Replay the cached decision for the present state, or make and cache a new decision."""
        streamer = self._streamer
        self._stuck = None
        # In a backward pass, a recomputed unit is used again to compute its gradients, even if the learnt
        # order does not contain this use yet. So its slot must not be evicted.
        guarded = streamer.last.slot if streamer.last is not None and managed_tensor.in_backward() else None
        order, period = streamer.order, streamer.order.period
        if not self._remembers or streamer.awaiting_optimizer or not period:
            self._decide(guarded)
            return
        if self._epoch != order.epoch or len(self._decisions) >= _MAX_DECISIONS:
            self._decisions.clear()
            self._epoch = order.epoch
        slots = streamer.region.slots
        layout_key = self._layout_key
        if layout_key is None:
            layout_key = self._layout_key = tuple(map(_key, slots))
        if guarded is None and not streamer.held and not any(map(_users, slots)):
            key: Any = order.at % period, layout_key
        else:
            held = SlotState.HELD
            stay = [slot.users > 0 or slot is guarded or slot.state is held for slot in slots]
            key = order.at % period, layout_key, tuple(stay)
        known = self._decisions.get(key)
        if known is None:
            self._decisions[key] = self._decide(guarded)
        else:
            self.replayed += 1
            self._replay(known, guarded)

    def _replay(self, known: _Decision, guarded: Slot | None) -> None:
        """Carry out the prefetches of a cached decision."""
        streamer = self._streamer
        at, epoch, slots = streamer.order.at, streamer.order.epoch, streamer.region.slots
        for unit, offset, victims, distance in known.fills:
            slot = streamer.fill(unit, offset, [slots[place] for place in victims])
            slot.next_place, slot.epoch = at + distance, epoch
        self._layout_key = known.after
        if known.stuck is not None:
            self._stuck = epoch, at + known.stuck, guarded

    def _decide(self, guarded: Slot | None) -> _Decision:
        """Make and carry out the decision for the present state."""
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
            # Do not fetch a later unit before an earlier unit whose bytes are still being read from disk. The
            # later unit would take the place of the earlier unit, be evicted without a use, and be copied
            # twice.
            if not unit.backing.ready():
                return self._decided(fills, None)
            uses = uses or self.uses(guarded)
            place = region.place(unit.nbytes, uses, later_than=distance)
            if place is None:
                break
            offset, victims = place
            fills.append(_Fill(unit, offset, tuple(map(region.slots.index, victims)), distance))
            slot = streamer.fill(unit, offset, victims)
            slot.next_place, slot.epoch = order.at + distance, order.epoch
            # The new slot takes the positions of the evicted slots in the region's list of slots.
            at = region.slots.index(slot)
            uses[at : at + len(victims)] = [distance]
        else:
            return self._decided(fills, None)
        self._stuck = order.epoch, order.at + distance, guarded
        return self._decided(fills, distance)

    def _decided(self, fills: list[_Fill], stuck: int | None) -> _Decision:
        """Return the decision that consists of these prefetches, and update the key of the region.

        ``stuck``: distance of the unit for which there was no room, None if all units found room.
        """
        self._layout_key = tuple(map(_key, self._streamer.region.slots))
        return _Decision(tuple(fills), stuck, self._layout_key)


def fetch_order(
    order: AccessOrder,
    region: Region,
    units: Sequence[StreamedUnit],
    now: StreamedUnit | None,
    used_lately: AbstractSet[int],
) -> list[int]:
    """Return the indexes of the units that have to be fetched, in the order in which they are needed.

    Units that will still be in their slots at their next use come last, because that use needs no fetch.
    ``now``: a unit that is needed at once, None if there is none.
    ``used_lately``: indexes that are left out.
    """
    first: list[int] = []
    later: list[int] = []
    room, near, before = region.nbytes, set(), -1
    if now is not None:
        first, near, room = [now.index], {now.index}, room - now.nbytes
    for index in order.upcoming():
        if index == before:  # the recomputation and the gradients of a unit use the same slot
            continue
        before = index
        if index in used_lately:
            continue
        if room >= 0:
            again = index in near
            if not again:
                near.add(index)
                room -= units[index].nbytes
            if room >= 0 and (again or units[index].slot is not None):
                later.append(index)
                continue
        first.append(index)
    return first + later
