"""PURE. The plan that is predicted to be fastest: which units stay, once computing times and the link are known.

The region takes what the residents leave, so a plan is a set of residents. Candidates come from the simple
rule of `residency.py`, from spreads over the order at every useful size of the region, evenly by bytes or by what computing leaves
of them unhidden, and from the ends of the order (both turns). They are replayed, the likeliest first, as far as the work
allows, and the best is taken as it is. Small cases are searched whole. Where units can stay packed, all that stays is tried raw, all
of it packed, and half of it. The work is bounded by a count of uses, not by time, and nothing is random: the same input gives the same plan.
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

WORK = 24_000  # replayed uses; about 0.2 s of a core
CYCLES = (
    4,
    2,
)  # steps of each replay of inference, of training: slots may lie differently from one to the next
ALL_OF_FEW = 200_000  # replayed uses that every choice of `ALWAYS` units stays below
WHOLE = 12  # units of which every choice is tried, where the work allows,
ALWAYS = 8  # and of which it is whatever the work
FINAL = 6  # candidates whose order the longer replay decides
ENOUGH = 1.002  # of the floor: what is this close is not searched further
REGIONS = (2.0, 3.0, 4.0, 6.0, 1.5, 2.5, 1.0, 5.0, 8.0)  # of the largest streamed unit, the likeliest first
USUAL = (3.0, 2.0, 1.0)  # at the first of these that the budget allows, ways to spread are compared
HIDDEN = (0.0, 1.0, 0.5, 0.75)  # shares of the computing that weights are spread against
CHOSEN = "predicted to pay most"


@dataclass(eq=False)
class _Search:
    """Evaluated residencies of one problem."""

    units: Sequence[UnitSize]
    available: int
    grain: int
    workload: Workload
    link: Link
    work: int
    unpacking: Sequence[float] = ()  # seconds of it by unit
    loose: frozenset[int] = frozenset()  # stay raw whatever
    slots: int = 1  # of the largest streamed unit, that the region has at least
    waits: Sequence[float] = ()  # seconds for the host at each use of what is not there as it is
    sizes: list[int] = field(init=False)
    beside: list[float] = field(init=False)  # seconds that a use takes of the device beside its computing
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
        # What does not fit raw is unpacked; raw residents spare at most what the densest of them takes.
        spared = max((s / size for s, size in zip(self.unpacking, self.sizes, strict=False)), default=0.0)
        decoding = max(0.0, sum(self.unpacking) - spared * self.available)
        self.floor = max(self.floor, sum(self.workload.phases) + decoding)
        self.cycles = CYCLES[self.workload.train]
        self.passes = 4 if self.workload.train and self.workload.groups else 2 if self.workload.train else 1

    @property
    def over(self) -> bool:
        """Whether the work is spent, or nothing better can be found."""
        return self.work <= 0 or self.best <= ENOUGH * self.floor

    def region(self, resident: Iterable[int]) -> int | None:
        """Bytes the region gets beside ``resident``; None where they do not fit together."""
        raw, packed = self.divide(resident)
        streamed = [size for unit, size in enumerate(self.sizes) if unit not in raw]
        if not streamed:
            return None
        left = self.available - resident_cost([self.sizes[unit] for unit in raw], self.grain)
        left -= packed_cost((self.units[unit].packed for unit in packed), self.grain)
        region = min(left // self.grain * self.grain, round_up(sum(streamed), self.grain))
        if min(streamed) == max(streamed):  # units of one size use whole slots only
            region = min(region, round_up(region // streamed[0] * streamed[0], self.grain))
        return region if region >= self.slots * max(streamed) else None

    def divide(self, chosen: Iterable[int]) -> tuple[frozenset[int], frozenset[int]]:
        """Of the units that stay, those that stay raw, and packed."""
        packed = frozenset(u for u in chosen if u not in self.loose and self.units[u].packed)
        return frozenset(chosen) - packed, packed

    def cost(self, unit: int) -> int:
        """Device bytes of ``unit``, when it stays."""
        packs = unit not in self.loose and self.units[unit].packed > 0
        return round_up(self.units[unit].packed if packs else self.sizes[unit], self.grain)

    def replay(self, chosen: Iterable[int], region: int, steps: int) -> Prediction:
        """The step with these units staying."""
        raw, packed = self.divide(chosen)
        # What crosses packed waits for the staging buffer, not for a slot. (The link's rate is of what it unpacks to.)
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
        """Work of one replay: finding a place takes longer the more slots there are."""
        raw, _ = self.divide(resident)
        streamed = [size for unit, size in enumerate(self.sizes) if unit not in raw]
        slots = min(len(streamed), region * len(streamed) // sum(streamed))
        uses = self.passes * (len(self.units) + len(streamed) * slots * slots // 16)
        return (1 + self.cycles) * uses

    def try_(self, resident: Iterable[int]) -> None:
        """Predict the step with these residents, where they fit and the work is not spent."""
        chosen = frozenset(resident)
        region = self.region(chosen)
        if chosen in self.seen or region is None or self.over:
            return
        self.work -= self.price(chosen, region)
        self.seen[chosen] = self.replay(chosen, region, self.cycles).seconds
        self.best = min(self.best, self.seen[chosen])

    # -- candidates

    def spreads(self, kept: frozenset[int]) -> Iterator[frozenset[int]]:
        """Residents by each way to spread them, for each size of the region. The caller tries each before it asks for the next."""
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

        def leaving(slots: float, way: Callable[[int], frozenset[int]]) -> frozenset[int] | None:
            room = self.available - spent - round_up(int(slots * largest), self.grain)
            return kept | way(room) if room >= 0 else None

        # Each way at one size of the region, then the best ways at the others.
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
        """What to spread by: bytes, less those that hide behind a share of the computing; of the unit, or of it and as many
        around it as a region holds, since a copy hides behind what is computed before it."""
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

    def spread(self, free: list[int], weights: list[float], room: int, *, start: float) -> frozenset[int]:
        """Residents worth ``room`` bytes, evenly over the order by ``weights``."""
        costs = [self.cost(unit) for unit in free]
        wanted = sum(costs)
        share = min(1.0, room / wanted) * wanted / (sum(weights) or 1.0)
        credit, chosen = start * min(costs), set()
        for unit, weight, size in zip(free, weights, costs, strict=True):
            credit += share * weight
            if credit >= size * 0.999 and size <= room:
                chosen.add(unit)
                room -= size
                credit -= size
        return self.fill(chosen, free, room)

    def first(self, order: list[int], room: int) -> frozenset[int]:
        """The first of ``order`` that fit into ``room``."""
        chosen: set[int] = set()
        for unit in order:
            size = self.cost(unit)
            if size <= room:
                chosen.add(unit)
                room -= size
        return frozenset(chosen)

    def fill(self, chosen: set[int], free: list[int], room: int) -> frozenset[int]:
        """What rounding left."""
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
    """The plan for ``budget`` device bytes whose predicted step is shortest, and that prediction.

    ``unpacking``: bytes/s at which the device unpacks what crosses or stays packed, of which ``workload`` knows nothing;
    None: nothing is. ``two_slots``: at least, where the rule finds room for them. ``waits``: seconds by unit that the device waits
    for the host at each use, unless the unit stays as it is. Raises BudgetError as `plan_residency`
    does, whose plan is the first candidate: the choice is never worse.
    """
    seconds = [unit.nbytes / unpacking if unpacking and unit.packed else 0.0 for unit in units]
    packs = [index for index, unit in enumerate(units) if unpacking and unit.packed]
    ways = [frozenset[int](), frozenset(packs), frozenset(packs[::2])] if packs else [frozenset[int]()]
    if packs and any(waits):  # what waits for the host stays as it is
        middle = median(waits[index] for index in packs)
        ways += [way] if (way := frozenset(i for i in packs if waits[i] < middle)) else []
    found = []
    for way in ways:  # of equals the one that unpacks less
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
    """What packs stays packed; ``unpacking``: seconds by unit."""
    rule = plan_residency(units, budget, fixed_bytes, wish, grain, packed=True)
    sizes = [unit.nbytes for unit in units]
    if rule.all_resident or not units:
        return rule, predict(sizes, rule.resident, 0, workload, link, steps=1)
    loose = frozenset(index for index in rule.resident if units[index].loose)
    kept = frozenset(
        index for index, unit in enumerate(units) if index in rule.resident and (unit.loose or not unit.block)
    )
    # What is unpacked into the only slot there is waits for its reader: two, as `decide.with_staging` wants them.
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
