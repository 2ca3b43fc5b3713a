"""Lays a schedule out: from the ways in which units are held to the places of units and the table of fetches."""

from __future__ import annotations

from .region import ALIGN
from .residency import round_up
from .schedule import Schedule, Way, slot_bytes
from .schedule_fetches import find_visits, in_order_of_need, required_fetches
from .schedule_offsets import place_units
from .schedule_phases import place_by_phase
from .schedule_residents import enclosing_zone
from .schedule_ways import Split, WayCosts


def lay_out(costs: WayCosts, split: Split, capacity: int, by_phase: bool = False) -> Schedule:
    """Return the schedule in ``capacity`` bytes in which units are held as ``split`` says.

    ``by_phase``: whether units are placed by phases (`schedule_phases`).
    """
    order, units, count = costs.order, costs.units, len(costs.order.uses)
    ways = costs.ways(split)
    passing = {unit for unit in order.uses if ways[unit] is not Way.CACHED_RAW}
    visits = find_visits(order, passing, {unit for unit in passing if units[unit].trainable})
    sizes = {unit: slot_bytes(units[unit].nbytes) for unit in passing}
    zone = enclosing_zone(order, sorted(passing), units)
    single = [visit for visit in visits if visit.unit not in zone.offsets]
    everything = zone.nbytes + sum(size for unit, size in sizes.items() if unit not in zone.offsets)
    room = zone.nbytes, min(costs.room(split, capacity) // ALIGN * ALIGN, everything)
    if by_phase:
        places = place_by_phase(order, single, sizes, room)
    else:
        places = place_units([visit.unit for visit in single], sizes, room)
    offsets = {**zone.offsets, **places}
    after, before = in_order_of_need(required_fetches(visits, offsets, sizes, count), count)
    used = max((offset + sizes[unit] for unit, offset in offsets.items()), default=0)
    return Schedule(
        order,
        units,
        capacity,
        costs.grain,
        ways,
        round_up(used, costs.grain),
        costs.staging_bytes(split),
        tuple(offsets.get(unit, -1) for unit in range(len(units))),
        after,
        before,
    )
