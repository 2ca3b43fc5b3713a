"""Search for the plan with the shortest predicted step, from computing times and the speed of the link.

A plan decides which units (groups of weights that are copied together) stay on the device: the residents. The
other units are streamed, that is, copied for their uses to slots of a region of device memory. The region gets
the bytes that the residents leave, so a set of residents determines the plan. A resident is *raw* (unpacked) or
*packed* (unpacked on the device at each use). The candidates are:

- the residents that the rule of `residency.py` chooses;
- residents spread over the order of use, for several sizes of the region. The spread is even by bytes, or by
  the bytes whose copies are not hidden behind computing;
- the units at the start or at the end of the order of use, and the units that compute least per byte.

`predict` replays the candidates, the most promising first, until the allowed work is spent. The best one
becomes the plan unchanged. With few units, every set of residents is tried. Where units can stay packed,
the search runs with all residents raw, with all residents packed, and with every second packable unit
packed. The limit is a count of replayed uses, not time, and nothing is random: the same input always
gives the same plan. The module imports no torch and has no side effects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, combinations
from math import inf
from statistics import median

from .predict import Link, PackedTransfer, Prediction, Workload, floor_seconds, predict
from .residency import Plan, UnitSize, Wish, packed_cost, plan_residency, resident_cost, round_up

WORK = 24_000  # replayed uses that one search may take; about 0.2 s of one CPU core
# Steps of each replay, for (inference, training). Slots may lie at other offsets from step to step.
CYCLES = (
    4,
    2,
)
ALL_OF_FEW = 200_000  # replayed uses; trying every set of residents among `ALWAYS` units takes fewer
WHOLE = 12  # with at most this many units every set of residents is tried, if the work allows that
ALWAYS = 8  # with at most this many units every set of residents is tried, whatever the allowed work
FINAL = 6  # number of best candidates that a longer replay compares again
ENOUGH = 1.002  # the search ends at a step within this factor of the lower bound `_Search.floor`
# Sizes of the region to try, as multiples of the largest streamed unit, the most promising first.
REGIONS = (2.0, 3.0, 4.0, 6.0, 1.5, 2.5, 1.0, 5.0, 8.0)
# The ways of choosing residents are compared at the first of these sizes that the budget allows.
USUAL = (3.0, 2.0, 1.0)
HIDDEN = (0.0, 1.0, 0.5, 0.75)  # shares of the computing time that are assumed to hide copies
CHOSEN = "predicted to pay most"


@dataclass(eq=False)
class _Search:
    """The sets of residents evaluated for one planning problem, and methods that propose further sets.

    ``available``: device bytes for residents and the slot region. ``grain``: bytes to whose multiples the
    device's allocator rounds. ``work``: replayed uses that are still allowed. ``seen``: predicted seconds
    of a step by set of residents. ``best``: the least of these seconds. ``floor``: lower bound of a
    step's seconds under any plan. ``cycles``: steps of each replay. ``passes``: uses of each unit in one
    step, as `price` counts them. ``sizes``: unpacked bytes by unit.
    """

    units: Sequence[UnitSize]
    available: int
    grain: int
    workload: Workload
    link: Link
    work: int
    unpacking: Sequence[float] = ()  # seconds that the device takes to unpack each unit
    loose: frozenset[int] = frozenset()  # units that never stay packed
    slots: int = 1  # the least number of slots of the largest streamed unit in the region
    # By unit: seconds that the device waits for the host at each use, unless the unit is resident and raw.
    waits: Sequence[float] = ()
    sizes: list[int] = field(init=False)
    beside: list[float] = field(init=False)  # by unit: device seconds of a use in addition to computing
    floor: float = field(init=False)
    cycles: int = field(init=False)
    passes: int = field(init=False)
    seen: dict[frozenset[int], float] = field(default_factory=dict)
    best: float = inf  # seconds

    def __post_init__(self) -> None:
        self.sizes = [unit.nbytes for unit in self.units]
        nothing = [0.0] * len(self.units)
        self.beside = [a + b for a, b in zip(self.unpacking or nothing, self.waits or nothing, strict=True)]
        dense = min((unit.packed / unit.nbytes for unit in self.units if unit.packed), default=1.0)
        self.floor = floor_seconds(self.sizes, int(self.available / dense), self.workload, self.link)
        # Units that do not stay raw are unpacked at each use. Each raw resident byte saves at most the
        # unpacking seconds per byte of the unit that is slowest to unpack.
        spared = max((s / size for s, size in zip(self.unpacking, self.sizes, strict=False)), default=0.0)
        decoding = max(0.0, sum(self.unpacking) - spared * self.available)
        self.floor = max(self.floor, sum(self.workload.phases) + decoding)
        self.cycles = CYCLES[self.workload.train]
        self.passes = 4 if self.workload.train and self.workload.groups else 2 if self.workload.train else 1

    @property
    def over(self) -> bool:
        """Whether to end the search: the work is spent, or the best step is within `ENOUGH` of the floor."""
        return self.work <= 0 or self.best <= ENOUGH * self.floor

    def region(self, resident: Iterable[int]) -> int | None:
        """Return the bytes of the slot region when the units in ``resident`` stay.

        Return None if every unit stays raw, or if the region would hold fewer than `slots` slots.
        """
        raw, packed = self.divide(resident)
        streamed = [size for unit, size in enumerate(self.sizes) if unit not in raw]
        if not streamed:
            return None
        left = self.available - resident_cost([self.sizes[unit] for unit in raw], self.grain)
        left -= packed_cost((self.units[unit].packed for unit in packed), self.grain)
        region = min(left // self.grain * self.grain, round_up(sum(streamed), self.grain))
        if min(streamed) == max(streamed):  # for units of one size, part of a slot is of no use
            region = min(region, round_up(region // streamed[0] * streamed[0], self.grain))
        return region if region >= self.slots * max(streamed) else None

    def divide(self, chosen: Iterable[int]) -> tuple[frozenset[int], frozenset[int]]:
        """Split the units that stay into (units that stay raw, units that stay packed)."""
        packed = frozenset(u for u in chosen if u not in self.loose and self.units[u].packed)
        return frozenset(chosen) - packed, packed

    def cost(self, unit: int) -> int:
        """Return the device bytes that ``unit`` takes if it stays."""
        packs = unit not in self.loose and self.units[unit].packed > 0
        return round_up(self.units[unit].packed if packs else self.sizes[unit], self.grain)

    def replay(self, chosen: Iterable[int], region: int, steps: int) -> Prediction:
        """Predict a step when the units in ``chosen`` stay and the region has ``region`` bytes."""
        raw, packed = self.divide(chosen)
        # The copy of a packed unit waits for the staging buffer, not for a slot. Its size is given in
        # unpacked bytes, because the link's rate counts the unpacked bytes of such copies.
        there = {
            unit: PackedTransfer(0 if unit in packed else self.sizes[unit], seconds)
            for unit, seconds in enumerate(self.unpacking)
            if seconds and unit not in raw
        }
        work = self.workload
        if any(self.beside):
            work = work.with_added_seconds([0.0 if unit in raw else s for unit, s in enumerate(self.beside)])
        return predict(self.sizes, raw, region, work, self.link, steps=steps, packed=there)

    def price(self, resident: frozenset[int], region: int) -> int:
        """Return the work of one replay in uses; finding a place takes longer the more slots the region has."""
        raw, _ = self.divide(resident)
        streamed = [size for unit, size in enumerate(self.sizes) if unit not in raw]
        slots = min(len(streamed), region * len(streamed) // sum(streamed))
        uses = self.passes * (len(self.units) + len(streamed) * slots * slots // 16)
        return (1 + self.cycles) * uses

    def try_(self, resident: Iterable[int]) -> None:
        """Predict and record the step with these residents, if they fit and the search is not over.

        A set of residents that was already tried is not predicted again.
        """
        chosen = frozenset(resident)
        region = self.region(chosen)
        if chosen in self.seen or region is None or self.over:
            return
        self.work -= self.price(chosen, region)
        self.seen[chosen] = self.replay(chosen, region, self.cycles).seconds
        self.best = min(self.best, self.seen[chosen])

    # -- candidates

    def spreads(self, kept: frozenset[int]) -> Iterator[frozenset[int]]:
        """Yield sets of residents that contain ``kept``, for several sizes of the region.

        For each size, several ways choose which further units stay.

        The caller must pass each candidate to `try_` before it asks for the next one.
        """
        free = [unit for unit in self.workload.order if unit not in kept]
        largest = max(self.sizes[unit] for unit in free)
        spent = resident_cost([self.sizes[unit] for unit in kept], self.grain)
        ways: list[Callable[[int], frozenset[int]]] = [
            partial(self.spread, free, weights, start=start)
            for weights in self.weights(free, largest)
            for start in (0.0, 0.5)
        ]
        backward = self.workload.backward or [0.0] * len(self.units)
        thin = sorted(free, key=lambda u: (self.workload.forward[u] + backward[u]) / self.sizes[u])
        ways[4:4] = [partial(self.first, order) for order in (free, free[::-1], thin)]
        if any(self.waits):
            ways.insert(4, partial(self.first, sorted(free, key=lambda u: -self.waits[u] / self.sizes[u])))

        # Return the residents that ``way`` chooses when the region has ``slots`` times the bytes of the
        # largest unit; None if such a region does not fit.
        def leaving(slots: float, way: Callable[[int], frozenset[int]]) -> frozenset[int] | None:
            room = self.available - spent - round_up(int(slots * largest), self.grain)
            return kept | way(room) if room >= 0 else None

        # Try every way at one size of the region, then the ways at all other sizes, the best way first.
        usual = next((slots for slots in USUAL if leaving(slots, ways[0]) is not None), None)
        if usual is None:
            return
        scores = []
        for at, way in enumerate(ways):
            candidate = leaving(usual, way)
            assert candidate is not None
            yield candidate
            scores.append((self.seen.get(candidate, inf), at))
        for _, at in sorted(scores):
            for slots in REGIONS:
                candidate = leaving(slots, ways[at])
                if candidate is not None:
                    yield candidate

    def weights(self, free: list[int], largest: int) -> Iterator[list[float]]:
        """Yield lists of weights, one for each unit of ``free``, in proportion to which residents are spread.

        A weight is the unit's bytes minus the bytes that can be copied during a share (`HIDDEN`) of the
        computing time. The computing time is the unit's own, or that of all units around it within three
        times ``largest`` bytes, because a copy is hidden behind the computing of the units before it.
        """
        backward = self.workload.backward or [0.0] * len(self.units)
        passes = 2 if self.workload.train else 1
        rate = self.link.bytes_per_second
        hides = [rate * (self.workload.forward[u] + backward[u]) / passes for u in free]  # bytes
        sizes = [float(self.sizes[u]) for u in free]
        sums = [0.0, *accumulate(sizes)], [0.0, *accumulate(hides)]
        for hidden in HIDDEN:
            yield [max(size - hidden * hides[at], 0.0) + 1e-6 * size for at, size in enumerate(sizes)]
            if not hidden:
                continue
            wide, low, high = [], 0, 0
            for at, size in enumerate(sizes):
                while low < at and sums[0][at] - sums[0][low] > 3 * largest:
                    low += 1
                while high < len(free) and sums[0][high] - sums[0][at] <= 3 * largest:
                    high += 1
                around = sums[0][high] - sums[0][low]
                behind = hidden * (sums[1][high] - sums[1][low])
                wide.append(size * (max(around - behind, 0.0) / around + 1e-6))
            yield wide

    def spread(self, free: list[int], preferences: list[float], room: int, *, start: float) -> frozenset[int]:
        """Return residents of at most ``room`` bytes, spread evenly over ``free``, which is in the order of use.

        Each unit of ``free`` adds credit in proportion to its entry in ``preferences``. A unit becomes resident
        as soon as the credit covers its size, which is then subtracted from the credit. ``start``: the initial
        credit, as a fraction of the smallest unit's size. Units that fit into bytes left over are added.
        """
        costs = [self.cost(unit) for unit in free]
        wanted = sum(costs)
        share = min(1.0, room / wanted) * wanted / (sum(preferences) or 1.0)
        credit, chosen = start * min(costs), set()
        for unit, preference, size in zip(free, preferences, costs, strict=True):
            credit += share * preference
            if credit >= size * 0.999 and size <= room:
                chosen.add(unit)
                room -= size
                credit -= size
        return self.fill(chosen, free, room)

    def first(self, order: list[int], room: int) -> frozenset[int]:
        """Return units that fit into ``room`` bytes together, tried one after another in the given ``order``."""
        chosen: set[int] = set()
        for unit in order:
            size = self.cost(unit)
            if size <= room:
                chosen.add(unit)
                room -= size
        return frozenset(chosen)

    def fill(self, chosen: set[int], free: list[int], room: int) -> frozenset[int]:
        """Return ``chosen`` and the units of ``free``, largest first, that fit into the ``room`` bytes left."""
        for unit in sorted(free, key=lambda u: (-self.sizes[u], u)):
            size = self.cost(unit)
            if unit not in chosen and size <= room:
                chosen.add(unit)
                room -= size
        return frozenset(chosen)


def choose(
    units: Sequence[UnitSize],
    budget: int,
    fixed_bytes: int,
    workload: Workload,
    link: Link,
    *,
    wish: Wish | None = None,
    grain: int = 512,
    work: int = WORK,
    unpacking: float | None = None,
    two_slots: bool = False,
    waits: Sequence[float] = (),
) -> tuple[Plan, Prediction]:
    """Return the plan for ``budget`` device bytes with the shortest predicted step, and the prediction.

    ``fixed_bytes``, ``wish`` and ``grain``: see `plan_residency`. ``work``: replayed uses that the search
    may take. ``unpacking``: bytes/s at which the device unpacks packed units, a time that ``workload``
    does not include; None: no unit is packed. ``two_slots``: require a region of at least two slots of
    the largest streamed unit, if the plan of `plan_residency` has them. ``waits``: by unit, the seconds
    that the device waits for the host at each use, unless the unit is resident and raw.

    The plan of `plan_residency` is the first candidate, so the predicted step is never longer than under
    that plan. Raises BudgetError where `plan_residency` does.
    """
    seconds = [unit.nbytes / unpacking if unpacking and unit.packed else 0.0 for unit in units]
    packs = [index for index, unit in enumerate(units) if unpacking and unit.packed]
    ways = [frozenset[int](), frozenset(packs), frozenset(packs[::2])] if packs else [frozenset[int]()]
    if packs and any(waits):  # also try to pack only the units with short waits for the host
        middle = median(waits[index] for index in packs)
        ways += [way] if (way := frozenset(i for i in packs if waits[i] < middle)) else []
    found = []
    # Each of ``ways`` is a set of units to pack. The empty set is first, so that `min` below prefers it in a tie.
    for way in ways:
        some = [replace(unit, packed=unit.packed if i in way else 0) for i, unit in enumerate(units)]
        spend = work // len(ways)
        given = some, budget, fixed_bytes, workload, link, wish or Wish(), grain, spend, seconds
        found.append(_choose(*given, two_slots, waits))
        if found[0][0].all_resident:
            break
    return min(found, key=lambda one: one[1].seconds)


def _choose(
    units: Sequence[UnitSize], budget: int, fixed_bytes: int, workload: Workload, link: Link, wish: Wish, grain: int,
    work: int, unpacking: Sequence[float], two_slots: bool, waits: Sequence[float],
) -> tuple[Plan, Prediction]:  # fmt: skip
    """Return the plan and prediction of `choose` when every resident that can be packed stays packed.

    ``unpacking``: seconds that the device takes to unpack each unit.
    """
    rule = plan_residency(units, budget, fixed_bytes, wish, grain, packed=True)
    sizes = [unit.nbytes for unit in units]
    if rule.all_resident or not units:
        return rule, predict(sizes, rule.resident, 0, workload, link, steps=1)
    loose = frozenset(index for index in rule.resident if units[index].loose)
    kept = frozenset(
        index for index, unit in enumerate(units) if index in rule.resident and (unit.loose or not unit.block)
    )
    # With a single slot, a unit cannot be unpacked before the use of the preceding unit has ended. So require
    # two slots, as `with_staging` in session/rule_planner.py does.
    slots = min(2, rule.slots) if two_slots or any(unpacking) else 1
    search = _Search(units, budget - fixed_bytes, grain, workload, link, work, unpacking, kept, slots, waits)
    search.try_({*rule.resident, *rule.packed})
    free = [index for index in range(len(units)) if index not in loose]
    if len(free) <= ALWAYS:
        search.work = max(search.work, ALL_OF_FEW)
    whole = (1 << min(len(free), WHOLE + 1)) * (1 + search.cycles) * search.passes * len(units)
    if len(free) <= WHOLE and whole <= search.work:
        for count in range(len(free) + 1):
            for some in combinations(free, count):
                search.try_(loose | set(some))
    elif len(kept) < len(units):
        for candidate in search.spreads(kept):
            if search.over:
                break
            search.try_(candidate)
    ranked = sorted(search.seen, key=lambda c: (search.seen[c], len(c), sorted(c)))
    ranked = ranked[: FINAL if len(units) <= 60 else 1]
    chosen, region, exact = frozenset[int](), 0, None
    for candidate in ranked:
        room = search.region(candidate)
        assert room is not None
        found = search.replay(candidate, room, 4)
        if exact is None or found.seconds < exact.seconds:
            chosen, region, exact = candidate, room, found
    assert exact is not None
    before = search.replay({*rule.resident, *rule.packed}, rule.region_bytes, 4)
    if before.seconds <= exact.seconds * 1.001:
        return rule, before
    raw, packed = search.divide(chosen)
    streamed = max(size for unit, size in enumerate(sizes) if unit not in raw)
    reasons = {index: rule.resident.get(index, CHOSEN) for index in sorted(raw)}
    bytes_ = packed_cost((units[unit].packed for unit in packed), grain)
    return replace(
        rule, resident=reasons, region_bytes=region, slots=region // streamed, packed=packed, packed_bytes=bytes_
    ), exact  # fmt: skip
