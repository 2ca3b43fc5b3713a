"""PURE. Which units stay on the device and how large the slot region is, to the byte, for one budget.

This is the documented simple rule of the first version: what must be resident is; small units are
resident because small copies lose link rate; the region gets room for three of the largest streamed
units (two, or one, where the budget is short), or for as many bytes as `Wish` says; what is left keeps
units resident, spread evenly in the order of use so that each streamed unit is hidden behind the same
compute; the rest widens the region. The same input gives the same plan.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from .errors import BudgetError
from .sizes import MIB, format_size

GRAIN = 2 * MIB  # bytes; the CUDA and HIP allocators round large buffers up to this
SMALL_UNIT = 8 * MIB  # bytes; copies below it lose link rate (measured)


@dataclass(frozen=True)
class UnitSize:
    """What the planner needs to know of a unit.

    ``loose``: used outside any module's own forward; ``block``: one of the repeats that make the model.
    """

    name: str
    nbytes: int
    loose: bool = False
    block: bool = True


@dataclass(frozen=True)
class Wish:
    """What the region should hold where the budget allows: ``slots`` of the largest unit, and ``nbytes``."""

    slots: int = 3
    nbytes: int = 0


@dataclass(frozen=True)
class Plan:
    """``resident``: unit index -> reason, by choice. Bytes are of the device."""

    vram_budget_bytes: int
    fixed_bytes: int  # resident by need, and adapters
    region_bytes: int
    resident: dict[int, str]
    slots: int  # of the largest streamed unit
    staging_bytes: int = 0  # where packed bytes land before they are decoded
    predicted_seconds: float | None = None  # of a step, where the first steps were measured

    @property
    def all_resident(self) -> bool:
        return self.region_bytes == 0


def round_up(nbytes: int, grain: int = GRAIN) -> int:
    """``nbytes`` as an allocator of that ``grain`` reserves it."""
    return -(-nbytes // grain) * grain


def resident_cost(sizes: Sequence[int], grain: int = GRAIN) -> int:
    """Device bytes of resident units: large ones have a buffer each, small ones share one."""
    small = sum(size for size in sizes if size < SMALL_UNIT)
    return round_up(small, grain) + sum(round_up(size, grain) for size in sizes if size >= SMALL_UNIT)


def least_budget(units: Sequence[UnitSize], fixed_bytes: int, grain: int = GRAIN) -> int:
    """The smallest budget in bytes that works: one slot for the largest unit, everything streamed."""
    return fixed_bytes + round_up(max((unit.nbytes for unit in units), default=0), grain)


def plan_residency(
    units: Sequence[UnitSize],
    budget: int,
    fixed_bytes: int = 0,
    wish: Wish = Wish(),
    grain: int = GRAIN,
    among: Collection[int] | None = None,
) -> Plan:
    """Residency for ``budget`` device bytes of which ``fixed_bytes`` are spoken for.

    ``grain``: bytes the device's allocator rounds up to; ``among``: units that alone may stay, but for small ones (None:
    any). Raises BudgetError naming the largest unit and the least budget that works.
    """
    sizes = [unit.nbytes for unit in units]
    everything = resident_cost(sizes, grain)
    available = budget - fixed_bytes
    if everything <= available or (not units and available < 0):
        if available < 0:
            raise BudgetError(
                f"vram={format_size(budget)} is too small: {format_size(fixed_bytes)} cannot be streamed and must "
                f"stay resident; the least budget that works is {fixed_bytes} bytes",
                fixed_bytes,
            )
        return Plan(budget, fixed_bytes, 0, dict.fromkeys(range(len(units)), "everything fits"), 0)
    largest = max(range(len(units)), key=lambda i: sizes[i])
    least = least_budget(units, fixed_bytes, grain)
    if budget < least:
        raise BudgetError(
            f"vram={format_size(budget)} is too small: unit {units[largest].name!r} needs a slot of "
            f"{format_size(sizes[largest])} and {format_size(fixed_bytes)} must stay resident; the least "
            f"budget that works is {least} bytes ({format_size(least)})",
            least,
        )
    rounded = functools.partial(round_up, grain=grain)
    cost = functools.partial(resident_cost, grain=grain)
    resident: dict[int, str] = {}

    def region_for(streamed: list[int]) -> int:
        return rounded(max(count * max(streamed, default=0), min(wished, sum(streamed))))

    def fits(extra: int) -> bool:
        chosen = [sizes[i] for i in resident] + [sizes[extra]]
        streamed = [sizes[i] for i in range(len(units)) if i not in resident and i != extra]
        return cost(chosen) + region_for(streamed) <= available

    # As many slots as there is room for, up to the wish; then the small units that are no blocks.
    count = next((c for c in range(max(1, wish.slots), 1, -1) if rounded(c * sizes[largest]) <= available), 1)
    wished = min(wish.nbytes, available // grain * grain)
    apart = [i for i, unit in enumerate(units) if unit.loose or (not unit.block and unit.nbytes < SMALL_UNIT)]
    for index in sorted(apart, key=lambda i: (not units[i].loose, sizes[i], i)):
        if fits(index):
            resident[index] = "used outside a module of its own" if units[index].loose else "small"
    rest = [i for i in range(len(units)) if i not in resident and (among is None or i in among)]
    total = sum(sizes[i] for i in rest)
    streamed = [sizes[i] for i in range(len(units)) if i not in resident]
    room = available - cost([sizes[i] for i in resident]) - region_for(streamed)
    share = max(0.0, min(1.0, room / total)) if total else 0.0
    credit = 0.0
    for index in rest:  # evenly: each unit's share accrues until it pays for a whole one
        credit += share * sizes[index]
        if credit >= sizes[index] * 0.999 and fits(index):
            resident[index] = "spread evenly over the order of use"
            credit -= sizes[index]
    for index in sorted(rest, key=lambda i: (-sizes[i], i)):  # what rounding left
        if index not in resident and fits(index):
            resident[index] = "fits into what is left"
    streamed = [sizes[i] for i in range(len(units)) if i not in resident]
    spent = cost([sizes[i] for i in resident])
    region = min((available - spent) // grain * grain, rounded(sum(streamed)))
    if min(streamed) == max(streamed):  # units of one size use whole slots only
        region = min(region, rounded(region // streamed[0] * streamed[0]))
    return Plan(budget, fixed_bytes, region, resident, region // max(streamed))
