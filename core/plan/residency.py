"""A rule that decides which units stay on the device, and how many bytes the slot region gets, for a memory
budget.

A unit is a group of tensors that is copied to the device together. A unit is *resident* if it stays on the
device; the others are *streamed*, that is, copied for their uses to slots of a region of device memory. The
rule needs no measurements. Units that must be resident stay. Small units stay, because small copies do not
reach the full rate of the link. The slot region gets space for three of the largest streamed units (two or one
where the budget is short), or for as many bytes as a `Wish` asks for. The remaining budget keeps further units
on the device, spread evenly over the order of use, so that each copy of a streamed unit has the same amount of
computation to hide behind. Bytes left over enlarge the region. The result is a `Plan` that is exact to the
byte, and the same input always gives the same plan.

A unit may stay *packed*: the device keeps its compressed bytes and unpacks them into a slot at each use, so
that more units fit and no bytes of them are copied from the host. The module imports no torch and has no side
effects.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from ..common.errors import BudgetError
from ..common.sizes import MIB, format_size

GRAIN = 2 * MIB  # bytes; the CUDA and HIP caching allocators round large buffers up to a multiple of this
SMALL_UNIT = 8 * MIB  # bytes; smaller copies are slower, `carom doctor` measures the link's rate by size


@dataclass(frozen=True)
class UnitSize:
    """The properties of a unit (a group of tensors that is copied together) that a plan depends on.

    ``nbytes``: unpacked bytes; ``loose``: whether the tensors are used outside any module's own forward;
    ``block``: whether the unit belongs to one of the model's repeated blocks; ``packed``: device bytes of the
    unit's packed form, 0 where the unit cannot be packed.
    """

    name: str
    nbytes: int
    loose: bool = False
    block: bool = True
    packed: int = 0


@dataclass(frozen=True)
class Wish:
    """The size to aim for when sizing the slot region: ``slots`` times the largest unit, and at least
    ``nbytes`` bytes.
    """

    slots: int = 3
    nbytes: int = 0


@dataclass(frozen=True)
class Plan:
    """A decision which units stay on the device and how device memory is divided.

    All byte counts are device bytes.

    ``resident``: unit index -> reason, for units that stay by choice; ``packed``: indices of the units whose
    packed bytes stay on the device (``packed_bytes`` in all) and are unpacked into a slot at each use.
    """

    vram_budget_bytes: int
    fixed_bytes: int  # weights that must be resident, and adapters
    region_bytes: int
    resident: dict[int, str]
    slots: int  # how many slots of the largest streamed unit the region holds
    staging_bytes: int = 0  # buffer that packed bytes are copied to before they are unpacked
    predicted_seconds: float | None = None  # predicted seconds of a step, None where no steps were measured
    packed: frozenset[int] = frozenset()
    packed_bytes: int = 0

    @property
    def all_resident(self) -> bool:
        """Whether every unit is on the device, so that no slot region is needed."""
        return self.region_bytes == 0


def round_up(nbytes: int, grain: int = GRAIN) -> int:
    """Return ``nbytes`` rounded up to a multiple of ``grain``, as the device's allocator reserves memory."""
    return -(-nbytes // grain) * grain


def resident_cost(sizes: Sequence[int], grain: int = GRAIN) -> int:
    """Return the device bytes of resident units of ``sizes``: a buffer for each large unit, one for all small
    ones.
    """
    small = sum(size for size in sizes if size < SMALL_UNIT)
    return round_up(small, grain) + sum(round_up(size, grain) for size in sizes if size >= SMALL_UNIT)


def packed_cost(sizes: Iterable[int], grain: int = GRAIN) -> int:
    """Return the device bytes of units that stay packed: a buffer for each, so that each can be freed
    separately.
    """
    return sum(round_up(size, grain) for size in sizes)


def choose_packed(
    packed_sizes: Sequence[int], first: Collection[int], room: int, grain: int = GRAIN
) -> frozenset[int]:
    """Return the units that stay packed in ``room`` device bytes, once their packed sizes are known.

    ``packed_sizes``: packed bytes by unit, 0 where a unit could not be packed. The units in ``first`` are
    tried before the others, each set by ascending index.
    """
    chosen: set[int] = set()
    for index in (*sorted(first), *(i for i in range(len(packed_sizes)) if i not in first)):
        cost = round_up(packed_sizes[index], grain)
        if 0 < cost <= room:
            chosen.add(index)
            room -= cost
    return frozenset(chosen)


def least_budget(units: Sequence[UnitSize], fixed_bytes: int, grain: int = GRAIN) -> int:
    """Return the smallest budget in bytes that works: a slot for the largest unit, and no optional residents."""
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
    """Return the plan for ``budget`` device bytes, of which ``fixed_bytes`` are taken by weights that must be
    resident.

    ``wish``: the region size to aim for; ``grain``: bytes to whose multiples the device's allocator rounds;
    ``among``: units that stay before any others, apart from small ones (None: no unit comes first). Others stay
    only beside all of them, so that a layout whose budget changes moves few units; ``packed``: whether
    units that can be packed stay in packed form. Raises BudgetError, which names the largest unit and the
    smallest budget that works.
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
    staying = _ResidentSet(units, grain)
    resident = staying.raw

    def price(index: int) -> int:
        """Return the device bytes that keeping the unit takes."""
        return units[index].packed if packed and units[index].packed else sizes[index]

    def region() -> int:
        """Return the region bytes to reserve in addition to the units that stay so far."""
        return rounded(max(count * staying.largest_streamed, min(wished, staying.streamed_bytes)))

    def stay(index: int, reason: str) -> bool:
        """Keep the unit if that leaves space for the region, and return whether the unit was kept."""
        raw = not (packed and units[index].packed)
        staying.add(index, reason, raw)
        if staying.cost + region() <= available:
            return True
        staying.remove(index, raw)
        return False

    # First choose the number of slots: as many as fit, up to the wish. Then keep the small units that belong
    # to no block.
    count = next((c for c in range(max(1, wish.slots), 1, -1) if rounded(c * sizes[largest]) <= available), 1)
    apart = [i for i, unit in enumerate(units) if unit.loose or (not unit.block and unit.nbytes < SMALL_UNIT)]
    beside = available - resident_cost([sizes[i] for i in apart], grain)
    wished = min(wish.nbytes, max(beside, 0) // grain * grain)
    for index in sorted(apart, key=lambda i: (not units[i].loose, sizes[i], i)):
        staying.add(index, "used outside a module of its own" if units[index].loose else "small")
        if staying.cost + region() > available:
            staying.remove(index)

    def spread(rest: list[int]) -> None:
        """Keep units of ``rest`` as far as the budget allows."""
        total = sum(price(i) for i in rest)
        room = available - staying.cost - region()
        share = max(0.0, min(1.0, room / total)) if total else 0.0
        credit = 0.0
        # Spread the residents evenly: each unit adds its share of the free bytes to a credit, and a unit stays
        # whenever the credit covers its size.
        for index in rest:
            credit += share * price(index)
            if credit >= price(index) * 0.999 and stay(index, "spread evenly over the order of use"):
                credit -= price(index)
        # Fill the bytes that rounding left over, the largest units first.
        for index in sorted(rest, key=lambda i: (-price(i), i)):
            if index not in resident and index not in staying.packed:
                stay(index, "fits into what is left")

    left = [i for i in range(len(units)) if i not in resident]
    first = left if among is None else [i for i in left if i in among]
    spread(first)
    # Where some units come first, those that stay packed are kept unpacked instead if the leftover bytes allow it.
    for index in sorted(staying.packed if among is not None else (), key=lambda i: (-sizes[i], i)):
        staying.remove(index, raw=False)
        staying.add(index, "fits into what is left")
        if staying.cost + region() > available:
            staying.remove(index)
            staying.add(index, raw=False)
    if all(index in resident for index in first):
        spread([index for index in left if index not in resident])
    streamed = [sizes[i] for i in range(len(units)) if i not in resident]
    rest_bytes = (available - staying.cost) // grain * grain
    region_bytes = min(rest_bytes, rounded(sum(streamed)))
    if min(streamed) == max(streamed):  # for units of one size, part of a slot is of no use
        region_bytes = min(region_bytes, rounded(region_bytes // streamed[0] * streamed[0]))
    return Plan(
        budget, fixed_bytes, region_bytes, resident, region_bytes // max(streamed),
        packed=frozenset(staying.packed), packed_bytes=staying.packed_bytes,
    )  # fmt: skip


class _ResidentSet:
    """A set of units that stay on the device, unpacked (``raw``) or packed, with the byte counts that a plan
    needs.

    The counts are updated at each change, so that planning n units takes time proportional to n.
    """

    def __init__(self, units: Sequence[UnitSize], grain: int) -> None:
        self.raw: dict[int, str] = {}  # unit -> reason
        self.packed: set[int] = set()
        self.packed_bytes = 0
        # Unpacked bytes of all units that are not in ``raw``.
        self.streamed_bytes = sum(unit.nbytes for unit in units)
        self._units, self._grain = units, grain
        # Bytes of the small and of the large units in ``raw``, as in `resident_cost`.
        self._small = self._large = 0
        self._descending = sorted(range(len(units)), key=lambda i: -units[i].nbytes)  # the largest unit first
        self._positions = {index: position for position, index in enumerate(self._descending)}
        self._first = 0  # all units before this position of ``_descending`` are in ``raw``

    def add(self, index: int, reason: str = "", raw: bool = True) -> None:
        """Add the unit, unpacked (``raw``) or packed."""
        if raw:
            self.raw[index] = reason
        else:
            self.packed.add(index)
        self._count(index, raw, 1)

    def remove(self, index: int, raw: bool = True) -> None:
        """Remove the unit, which was added with the same ``raw``."""
        if raw:
            del self.raw[index]
            self._first = min(self._first, self._positions[index])
        else:
            self.packed.remove(index)
        self._count(index, raw, -1)

    def _count(self, index: int, raw: bool, sign: int) -> None:
        """Add (``sign`` 1) or subtract (``sign`` -1) the unit's bytes in the counts."""
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
        """The device bytes of all units in the set."""
        return round_up(self._small, self._grain) + self._large + self.packed_bytes

    @property
    def largest_streamed(self) -> int:
        """The unpacked bytes of the largest unit that is not in ``raw``; 0 if there is no such unit."""
        while self._first < len(self._descending) and self._descending[self._first] in self.raw:
            self._first += 1
        left = self._first < len(self._descending)
        return self._units[self._descending[self._first]].nbytes if left else 0
