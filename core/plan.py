"""PURE. Which units stay on the device and how large the slot region is, to the byte, for one budget.

This is the documented simple rule of the first version: what must be resident is; small units are
resident because small copies lose link rate; the region gets room for three of the largest streamed
units (two, or one, where the budget is short), or for as many bytes as `Wish` says; what is left keeps
units on the device, spread evenly in the order of use so that each streamed unit is hidden behind the same
compute; the rest widens the region. The same input gives the same plan.

Units may stay *packed*: the device keeps their packed bytes and unpacks them into a slot at each use, so that more of
them fit, and nothing of them crosses.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from .errors import BudgetError
from .sizes import MIB, format_size

GRAIN = 2 * MIB  # bytes; the CUDA and HIP allocators round large buffers up to this
SMALL_UNIT = 8 * MIB  # bytes; copies below it lose link rate (measured)


@dataclass(frozen=True)
class UnitSize:
    """What the planner needs to know of a unit.

    ``loose``: used outside any module's own forward; ``block``: one of the repeats that make the model; ``packed``:
    device bytes it takes when it stays packed, 0 where it does not pack.
    """

    name: str
    nbytes: int
    loose: bool = False
    block: bool = True
    packed: int = 0


@dataclass(frozen=True)
class Wish:
    """What the region should hold where the budget allows: ``slots`` of the largest unit, and ``nbytes``."""

    slots: int = 3
    nbytes: int = 0


@dataclass(frozen=True)
class Plan:
    """``resident``: unit index -> reason, by choice; ``packed``: units that stay packed, and pass through the region as
    streamed ones do, in ``packed_bytes``. Bytes are of the device."""

    vram_budget_bytes: int
    fixed_bytes: int  # resident by need, and adapters
    region_bytes: int
    resident: dict[int, str]
    slots: int  # of the largest streamed unit
    staging_bytes: int = 0  # where packed bytes land before they are decoded
    predicted_seconds: float | None = None  # of a step, where the first steps were measured
    packed: frozenset[int] = frozenset()
    packed_bytes: int = 0

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


def packed_cost(sizes: Iterable[int], grain: int = GRAIN) -> int:
    """Device bytes of units that stay packed: each has a buffer of its own, so that each may go alone."""
    return sum(round_up(size, grain) for size in sizes)


def stay_packed(
    wires: Sequence[int], first: Collection[int], room: int, grain: int = GRAIN
) -> frozenset[int]:
    """Which units stay packed in ``room`` bytes, once it is known what they pack to (``wires``: 0 where they did not): of
    ``first``, then of the others, in order."""
    chosen: set[int] = set()
    for index in (*sorted(first), *(i for i in range(len(wires)) if i not in first)):
        cost = round_up(wires[index], grain)
        if 0 < cost <= room:
            chosen.add(index)
            room -= cost
    return frozenset(chosen)


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
    packed: bool = False,
) -> Plan:
    """Residency for ``budget`` device bytes of which ``fixed_bytes`` are spoken for.

    ``grain``: bytes the device's allocator rounds up to; ``among``: units that alone may stay, but for small ones (None:
    any); ``packed``: those that pack stay packed. Raises BudgetError naming the largest unit and the least budget that works.
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
    staying = _Staying(units, grain)
    resident = staying.raw

    def price(index: int) -> int:
        return units[index].packed if packed and units[index].packed else sizes[index]

    def region() -> int:
        return rounded(max(count * staying.largest_streamed, min(wished, staying.streamed_bytes)))

    def stay(index: int, reason: str) -> bool:
        """Keep a unit where that leaves room for the region."""
        raw = not (packed and units[index].packed)
        staying.add(index, reason, raw)
        if staying.cost + region() <= available:
            return True
        staying.remove(index, raw)
        return False

    # As many slots as there is room for, up to the wish; then the small units that are no blocks.
    count = next((c for c in range(max(1, wish.slots), 1, -1) if rounded(c * sizes[largest]) <= available), 1)
    apart = [i for i, unit in enumerate(units) if unit.loose or (not unit.block and unit.nbytes < SMALL_UNIT)]
    beside = available - resident_cost([sizes[i] for i in apart], grain)
    wished = min(wish.nbytes, max(beside, 0) // grain * grain)
    for index in sorted(apart, key=lambda i: (not units[i].loose, sizes[i], i)):
        staying.add(index, "used outside a module of its own" if units[index].loose else "small")
        if staying.cost + region() > available:
            staying.remove(index)
    rest = [i for i in range(len(units)) if i not in resident and (among is None or i in among)]
    total = sum(price(i) for i in rest)
    room = available - staying.cost - region()
    share = max(0.0, min(1.0, room / total)) if total else 0.0
    credit = 0.0
    for index in rest:  # evenly: each unit's share accrues until it pays for a whole one
        credit += share * price(index)
        if credit >= price(index) * 0.999 and stay(index, "spread evenly over the order of use"):
            credit -= price(index)
    for index in sorted(rest, key=lambda i: (-price(i), i)):  # what rounding left
        if index not in resident and index not in staying.packed:
            stay(index, "fits into what is left")
    # Where few may stay, what is left is theirs, as they are, before it is slots.
    for index in sorted(staying.packed if among is not None else (), key=lambda i: (-sizes[i], i)):
        staying.remove(index, raw=False)
        staying.add(index, "fits into what is left")
        if staying.cost + region() > available:
            staying.remove(index)
            staying.add(index, raw=False)
    streamed = [sizes[i] for i in range(len(units)) if i not in resident]
    rest_bytes = (available - staying.cost) // grain * grain
    region_bytes = min(rest_bytes, rounded(sum(streamed)))
    if min(streamed) == max(streamed):  # units of one size use whole slots only
        region_bytes = min(region_bytes, rounded(region_bytes // streamed[0] * streamed[0]))
    return Plan(
        budget, fixed_bytes, region_bytes, resident, region_bytes // max(streamed),
        packed=frozenset(staying.packed), packed_bytes=staying.packed_bytes,
    )  # fmt: skip


class _Staying:
    """Units that stay, whole (``raw``) or packed, and the sums that tell whether one more fits.

    The sums are kept up to date, so that a plan for n units takes time proportional to n.
    """

    def __init__(self, units: Sequence[UnitSize], grain: int) -> None:
        self.raw: dict[int, str] = {}  # unit -> reason
        self.packed: set[int] = set()
        self.packed_bytes = 0
        self.streamed_bytes = sum(unit.nbytes for unit in units)  # of all but ``raw``
        self._units, self._grain = units, grain
        self._small = self._large = 0  # bytes of ``raw``, as in `resident_cost`
        self._descending = sorted(range(len(units)), key=lambda i: -units[i].nbytes)
        self._places = {index: place for place, index in enumerate(self._descending)}
        self._first = 0  # before this place of ``_descending`` all are in ``raw``

    def add(self, index: int, reason: str = "", raw: bool = True) -> None:
        if raw:
            self.raw[index] = reason
        else:
            self.packed.add(index)
        self._count(index, raw, 1)

    def remove(self, index: int, raw: bool = True) -> None:
        if raw:
            del self.raw[index]
            self._first = min(self._first, self._places[index])
        else:
            self.packed.remove(index)
        self._count(index, raw, -1)

    def _count(self, index: int, raw: bool, sign: int) -> None:
        unit = self._units[index]
        if not raw:
            self.packed_bytes += sign * packed_cost([unit.packed], self._grain)
            return
        self.streamed_bytes -= sign * unit.nbytes
        if unit.nbytes < SMALL_UNIT:
            self._small += sign * unit.nbytes
        else:
            self._large += sign * round_up(unit.nbytes, self._grain)

    @property
    def cost(self) -> int:
        """Device bytes of what stays."""
        return round_up(self._small, self._grain) + self._large + self.packed_bytes

    @property
    def largest_streamed(self) -> int:
        """Bytes of the largest unit that is not in ``raw``."""
        while self._first < len(self._descending) and self._descending[self._first] in self.raw:
            self._first += 1
        left = self._first < len(self._descending)
        return self._units[self._descending[self._first]].nbytes if left else 0
