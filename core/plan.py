"""PURE. Which units stay on the device and how large the slot region is, to the byte, for one budget.

This is the documented simple rule of the first version: what must be resident is; small units are
resident because small copies lose link rate; the region gets room for three of the largest streamed
units (two, or one, where the budget is short); what is left keeps units resident, spread evenly in
the order of use so that each streamed unit is hidden behind the same compute; the rest widens the
region. The same input gives the same plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .errors import BudgetError
from .sizes import MIB, format_size

GRAIN = 2 * MIB  # bytes; device allocators round large buffers up to this
SMALL_UNIT = 8 * MIB  # bytes; copies below it lose link rate (measured)


@dataclass(frozen=True)
class UnitSize:
    """What the planner needs to know of a unit; ``loose``: used outside any module's own forward."""

    name: str
    nbytes: int
    loose: bool = False


@dataclass(frozen=True)
class Plan:
    """``resident``: unit index -> reason, by choice. Bytes are of the device."""

    vram_budget_bytes: int
    fixed_bytes: int  # resident by need, and adapters
    region_bytes: int
    resident: dict[int, str]
    slots: int  # of the largest streamed unit

    @property
    def all_resident(self) -> bool:
        return self.region_bytes == 0


def round_up(nbytes: int) -> int:
    """``nbytes`` as an allocator reserves it."""
    return -(-nbytes // GRAIN) * GRAIN


def resident_cost(sizes: Sequence[int]) -> int:
    """Device bytes of resident units: large ones have a buffer each, small ones share one."""
    small = sum(size for size in sizes if size < SMALL_UNIT)
    return round_up(small) + sum(round_up(size) for size in sizes if size >= SMALL_UNIT)


def least_budget(units: Sequence[UnitSize], fixed_bytes: int) -> int:
    """The smallest budget in bytes that works: one slot for the largest unit, everything streamed."""
    return fixed_bytes + round_up(max((unit.nbytes for unit in units), default=0))


def plan_residency(units: Sequence[UnitSize], budget: int, fixed_bytes: int = 0, slots: int = 3) -> Plan:
    """Residency for ``budget`` device bytes of which ``fixed_bytes`` are spoken for.

    Raises BudgetError naming the largest unit and the least budget that works.
    """
    sizes = [unit.nbytes for unit in units]
    everything = resident_cost(sizes)
    available = budget - fixed_bytes
    if everything <= available:
        return Plan(budget, fixed_bytes, 0, dict.fromkeys(range(len(units)), "everything fits"), 0)
    resident: dict[int, str] = {}
    # Small units first, loose ones before them: they are the worst to stream.
    small = sorted(
        (i for i, unit in enumerate(units) if unit.nbytes < SMALL_UNIT or unit.loose),
        key=lambda i: (not units[i].loose, units[i].nbytes, i),
    )
    big = [i for i, unit in enumerate(units) if i not in set(small)]

    def region_for(count: int) -> int:
        return round_up(count * max((sizes[i] for i in range(len(units)) if i not in resident), default=0))

    def spent() -> int:
        return resident_cost([sizes[i] for i in resident])

    floor = round_up(max((sizes[i] for i in big), default=0))
    for index in small:
        resident[index] = "used outside a module of its own" if units[index].loose else "small"
        if spent() + max(floor, min(3, slots) * floor if big else 0) > available:
            del resident[index]
    count = next((c for c in range(max(1, slots), 0, -1) if spent() + region_for(c) <= available), 0)
    while count == 0 and resident:  # a streamed small unit asked for more than the kept ones leave
        resident.pop(next(reversed(resident)))
        count = next((c for c in range(max(1, slots), 0, -1) if spent() + region_for(c) <= available), 0)
    if count == 0:
        largest = max(units, key=lambda unit: unit.nbytes)
        least = least_budget(units, fixed_bytes)
        raise BudgetError(
            f"vram={format_size(budget)} is too small: unit {largest.name!r} needs a slot of "
            f"{format_size(largest.nbytes)} and {format_size(fixed_bytes)} must stay resident; the least "
            f"budget that works is {least} bytes ({format_size(least)})",
            least,
        )
    _spread(units, [i for i in range(len(units)) if i not in resident], resident, available, count)
    if len(resident) == len(units):  # rounding let the last unit in: nothing streams
        return Plan(budget, fixed_bytes, 0, resident, 0)
    streamed = [sizes[i] for i in range(len(units)) if i not in resident]
    region = min((available - spent()) // GRAIN * GRAIN, round_up(sum(streamed)))
    if min(streamed) == max(streamed):  # units of one size use whole slots only
        region = min(region, round_up(region // streamed[0] * streamed[0]))
    return Plan(budget, fixed_bytes, region, resident, region // max(streamed))


def _spread(
    units: Sequence[UnitSize], candidates: list[int], resident: dict[int, str], available: int, slots: int
) -> None:
    """Add as many bytes of ``candidates`` as fit beside ``slots`` slots, evenly over their order."""
    sizes = [unit.nbytes for unit in units]

    def fits(index: int) -> bool:
        chosen = [sizes[i] for i in resident] + [sizes[index]]
        streamed = [sizes[i] for i in candidates if i not in resident and i != index]
        if not streamed:
            return resident_cost(chosen) <= available
        return resident_cost(chosen) + round_up(slots * max(streamed)) <= available

    total = sum(sizes[i] for i in candidates)
    room = (
        available
        - resident_cost([sizes[i] for i in resident])
        - round_up(slots * max(sizes[i] for i in candidates))
    )
    share = max(0.0, min(1.0, room / total))
    credit = 0.0
    for index in candidates:
        credit += share * sizes[index]
        if credit >= sizes[index] * 0.999 and fits(index):
            resident[index] = "spread evenly over the order of use"
            credit -= sizes[index]
    # What rounding left: largest first, then the order of use.
    for index in sorted(candidates, key=lambda i: (-sizes[i], i)):
        if index not in resident and fits(index):
            resident[index] = "fits into what is left"
