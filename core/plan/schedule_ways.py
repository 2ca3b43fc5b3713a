"""Chooses how units are held, by one formula for the seconds of a cycle.

A cycle takes as long as what is busy longest: the link with what crosses it, the device with its computing and decoding,
or the host with the crossings that it issues. Each of the four ways (`Way`) loads these differently, and takes other
bytes of the device:

    way              device bytes   link     decoding     host
    cached raw       raw            0        0            0
    cached packed    packed         0        each visit   each visit
    streamed packed  0              packed   each visit   each visit
    streamed raw     0              raw      0            each visit

A visit is a use, or several uses in a row. So units are packed where the link binds, and raw where computing binds. The
units that stay are a prefix of the permutation of `resident_order`: the first of them raw, the others packed. The
formula decides both lengths. Units that cannot be packed are held raw in any case.

The module imports no torch and has no side effects.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from .residency import round_up
from .schedule import Times, UnitCost, UseOrder, Way, slot_bytes
from .schedule_residents import enclosing_zone, prefix_costs, resident_order

_STEPS = 64  # numbers of raw units that are tried where units may stay packed


@dataclass(frozen=True)
class Split:
    """How units are held: the first ``raw`` of the permutation stay unpacked, those up to ``kept`` stay packed, and the
    others stream, packed if ``packs``.
    """

    raw: int
    kept: int
    packs: bool


@dataclass(frozen=True)
class WayCosts:
    """What the units of ``order`` cost in each way, and the order in which they are chosen to stay: ``permutation``.

    ``compute``: seconds of computing in a cycle. ``packed``: packed bytes by unit, 0 where a unit cannot be packed.
    ``enclosing``: the number of units whose uses contain uses of others; they come first in the permutation, and all of
    them stay or none does, in which case they take ``zone_bytes`` of the region.

    The other sequences have an entry for each prefix of the permutation, the empty one first. They are sums over the
    prefix (device bytes, seconds on the link in a cycle, seconds of decoding, visits), and the largest slot and the
    largest packed form of the units behind it (``largest``, ``largest_packed``).
    """

    order: UseOrder
    units: tuple[UnitCost, ...]
    permutation: Sequence[int]
    times: Times
    compute: float
    grain: int
    enclosing: int
    zone_bytes: int
    packed: Sequence[int]
    raw_bytes: Sequence[int]
    largest: Sequence[int]
    packed_bytes: Sequence[int]
    largest_packed: Sequence[int]
    raw_link: Sequence[float]
    packed_link: Sequence[float]
    decoding: Sequence[float]
    visits: Sequence[int]

    def seconds(self, split: Split) -> float:
        """Return the seconds of a cycle by the formula."""
        link = self.packed_link if split.packs else self.raw_link
        decoded = (self.decoding[-1] if split.packs else self.decoding[split.kept]) - self.decoding[split.raw]
        return max(
            link[-1] - link[split.kept],
            self.compute + decoded,
            (self.visits[-1] - self.visits[split.raw]) * self.times.host_seconds,
        )

    def ways(self, split: Split) -> tuple[Way, ...]:
        """Return the way of each unit."""
        found = [Way.STREAMED_RAW] * len(self.permutation)
        for index, unit in enumerate(self.permutation):
            if index < split.raw or (index < split.kept and not self.packed[unit]):
                found[unit] = Way.CACHED_RAW
            elif self.packed[unit] and (index < split.kept or split.packs):
                found[unit] = Way.CACHED_PACKED if index < split.kept else Way.STREAMED_PACKED
        return tuple(found)

    def staging_bytes(self, split: Split) -> int:
        """Return the bytes of the two buffers in which packed units arrive."""
        return 2 * slot_bytes(self.largest_packed[split.kept]) if split.packs else 0

    def room(self, split: Split, capacity: int) -> int:
        """Return the bytes that ``split`` leaves of ``capacity`` for the region."""
        taken = self.raw_bytes[split.raw] + self.packed_bytes[split.kept] - self.packed_bytes[split.raw]
        return (capacity - taken - round_up(self.staging_bytes(split), self.grain)) // self.grain * self.grain

    def leaves_region(self, split: Split, capacity: int, multiple: float) -> bool:
        """Return whether a region of ``multiple`` times the largest unit that passes through it is left."""
        zone_bytes = self.zone_bytes if split.raw < self.enclosing else 0
        return zone_bytes + multiple * self.largest[split.raw] <= self.room(split, capacity)

    def raw_split(self, capacity: int, multiple: float) -> Split:
        """Return the split with the most units that stay, all of them raw, with a region as in `leaves_region`."""
        for raw in range(len(self.permutation), max(0, self.enclosing - 1), -1):
            split = Split(raw, raw, False)
            if self.raw_bytes[raw] <= capacity and self.leaves_region(split, capacity, multiple):
                return split
        return Split(0, 0, False)

    def packed_split(self, capacity: int, multiple: float, packs: bool) -> Split | None:
        """Return the split of the least seconds with packed units, None if there is none.

        ``multiple``: see `leaves_region`. ``packs``: whether the units that stream are packed, too.
        """
        splits = list[Split]()
        most = bisect_right(self.raw_bytes, capacity) - 1
        for raw in range(0, most + 1, max(1, most // _STEPS)):
            split = Split(raw, self._most_kept(raw, capacity, multiple, packs), packs)
            some = packs or split.kept > raw
            if some and not 0 < raw < self.enclosing and self.leaves_region(split, capacity, multiple):
                splits.append(split)
        # Of equal seconds the one with the most raw units, which cost the device nothing.
        return min(splits, key=lambda split: (self.seconds(split), -split.raw), default=None)

    def _most_kept(self, raw: int, capacity: int, multiple: float, packs: bool) -> int:
        """Return how many units may stay if the first ``raw`` of them are raw."""
        kept = len(self.permutation)
        while kept > raw and not self.leaves_region(Split(raw, kept, packs), capacity, multiple):
            over = multiple * self.largest[raw] - self.room(Split(raw, kept, packs), capacity)
            # Fewer packed units, by the bytes that are over. Staging then takes more or as much.
            kept = min(kept - 1, bisect_right(self.packed_bytes, self.packed_bytes[kept] - over) - 1)
        return max(kept, raw)


def way_costs(order: UseOrder, units: Sequence[UnitCost], times: Times, grain: int) -> WayCosts:
    """Return the costs of ``units``. ``grain``: see `make_schedule`."""
    permutation = resident_order(order, units)
    link, rate, counts = times.link, times.decode_bytes_per_second, _count_visits(order)
    # Without a decoder nothing can be packed.
    packed = [cost.packed if rate and counts[unit] else 0 for unit, cost in enumerate(units)]
    raw = [cost.nbytes for cost in units]
    wire = [some or whole for some, whole in zip(packed, raw, strict=True)]
    passing = [counts[unit] > 0 and unit not in order.enclosing for unit in permutation]
    return WayCosts(
        order,
        tuple(units),
        permutation,
        times,
        sum(times.compute),
        grain,
        len(order.enclosing),
        enclosing_zone(order, permutation, units).nbytes,
        packed,
        prefix_costs(permutation, units, grain),
        _largest_behind(
            [slot_bytes(raw[unit]) * single for unit, single in zip(permutation, passing, strict=True)]
        ),
        _sums(round_up(wire[unit], grain) for unit in permutation),
        _largest_behind([packed[unit] for unit in permutation]),
        _sums(counts[unit] * link.seconds(raw[unit]) for unit in permutation),
        _sums(counts[unit] * link.seconds(wire[unit]) for unit in permutation),
        _sums(counts[unit] * raw[unit] / rate if rate and packed[unit] else 0.0 for unit in permutation),
        _sums(counts[unit] for unit in permutation),
    )


def _count_visits(order: UseOrder) -> Counter[int]:
    """Return how often each unit is visited in a cycle; uses in a row are one visit."""
    return Counter(
        unit for before, unit in zip((-1, *order.uses), order.uses, strict=False) if unit != before
    )


def _sums(values: Iterable[float]) -> list:
    return list(accumulate(values, initial=0))


def _largest_behind(values: Sequence[int]) -> list[int]:
    """Return the largest of ``values`` behind each prefix, 0 behind all."""
    return list(accumulate(reversed(values), max, initial=0))[::-1]
