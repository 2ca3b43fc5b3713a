"""Proves the promises of a schedule by replaying its table; shares no code with what makes schedules.

The rules:

S1  What the schedule takes on the device is at most its capacity.
S2  A unit that passes through the region lies inside it, at a multiple of `ALIGN` bytes.
S3  A unit that stays on the device has no place in the region and is never fetched.
S4  A fetch overwrites no unit that is in use.
S5  A unit is in its place when it is used.
S6  A fetch brings what is not there and is used: no unit that is in its place with its present weights, and none that
    is overwritten before its use.
S7  A unit whose trainable weights changed is fetched between the change and its next use.
S8  Every cycle is the same: what lies in the region at the end of a cycle lies there at its begin.
S9  The transfers and wire bytes that the schedule names are those of its fetches.
S10 A unit is held in a way that it can be: only what can be packed is packed, and staging holds two packed units.

S4 and S5 together say that no place is overwritten before its last reader: an overwritten unit that has a reader left
is missing at that use. The module imports no torch and has no side effects.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from ..common.errors import BrokenRuleError
from .region import ALIGN
from .residency import SMALL_UNIT, round_up
from .schedule import Schedule, Way


def check_schedule(schedule: Schedule) -> None:
    """Raise `BrokenRuleError`, which names the first rule (S1 to S10) that ``schedule`` breaks, if there is one.

    Takes time in proportion to the uses and fetches of a cycle.
    """
    _check_ways(schedule)
    _check_bytes(schedule)
    _check_places(schedule)
    replay = _Replay(schedule)
    replay.run_cycle(strict=False)  # begins with an empty region: what misses is there from then on
    begin = list(replay.present)
    replay.transfers = replay.wire_bytes = 0
    replay.run_cycle(strict=True)
    if replay.present != begin:
        changed = set(begin).symmetric_difference(replay.present)
        raise BrokenRuleError(
            "S8", "the same units in the region after a cycle", f"a change of {len(changed)} of them"
        )
    counted, named = (replay.transfers, replay.wire_bytes), (schedule.transfers, schedule.wire_bytes)
    if counted != named:
        raise BrokenRuleError(
            "S9", f"{counted[0]} transfers of {counted[1]} bytes", f"{named[0]} of {named[1]} bytes"
        )


def _check_ways(schedule: Schedule) -> None:
    staged = 0
    for unit, (cost, way) in enumerate(zip(schedule.units, schedule.ways, strict=True)):
        if way.packed and not cost.packed:
            raise BrokenRuleError(
                "S10", "a unit that can be packed", f"{way.value} without packed bytes", str(unit)
            )
        if way is Way.STREAMED_PACKED:
            staged = max(staged, -(-cost.packed // ALIGN) * ALIGN)
    if schedule.staging_bytes < 2 * staged:
        raise BrokenRuleError("S10", f"staging of {2 * staged} bytes", f"{schedule.staging_bytes} bytes")


def _check_bytes(schedule: Schedule) -> None:
    grain, small = schedule.grain, 0
    taken = round_up(schedule.region_bytes, grain) + round_up(schedule.staging_bytes, grain)
    for cost, way in zip(schedule.units, schedule.ways, strict=True):
        if way is Way.CACHED_PACKED:
            taken += round_up(cost.packed, grain)
        elif way is Way.CACHED_RAW and cost.nbytes >= SMALL_UNIT:
            taken += round_up(cost.nbytes, grain)
        elif way is Way.CACHED_RAW:
            small += cost.nbytes
    taken += round_up(small, grain)
    if taken > schedule.capacity:
        raise BrokenRuleError("S1", f"at most {schedule.capacity} bytes on the device", f"{taken} bytes")


def _check_places(schedule: Schedule) -> None:
    used = set(schedule.order.uses)
    for unit, (offset, way) in enumerate(zip(schedule.offsets, schedule.ways, strict=True)):
        if way is Way.CACHED_RAW:
            if offset != -1:
                raise BrokenRuleError("S3", "no place in the region", f"offset {offset}", str(unit))
        elif unit in used:
            end = offset + schedule.units[unit].nbytes
            if offset < 0 or offset % ALIGN or end > schedule.region_bytes:
                raise BrokenRuleError(
                    "S2",
                    f"a place inside {schedule.region_bytes} bytes",
                    f"bytes {offset} to {end}",
                    str(unit),
                )
        elif offset != -1:
            raise BrokenRuleError("S2", "no place for a unit that is not used", f"offset {offset}", str(unit))


class _Replay:
    """The region during a replay of the table. ``present``: offset and unit of what lies there, by offset."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.present: list[tuple[int, int]] = []
        self.transfers = self.wire_bytes = 0
        self._in_use: list[tuple[int, int]] = []  # last position of the use, unit; the innermost use last
        self._there: set[int] = set()  # the units of ``present``
        self._unread: set[int] = set()  # those that were fetched and not used since
        self._stale: set[int] = set()  # those with weights from before an update

    def run_cycle(self, strict: bool) -> None:
        """Replay one cycle. If not ``strict``, a unit that misses is brought at its use."""
        schedule, order = self.schedule, self.schedule.order
        if len(schedule.after) != len(order.uses) or not schedule.before.keys() <= order.updates:
            raise BrokenRuleError(
                "S8", "fetches after each use and before updates", "another number of positions"
            )
        for position, unit in enumerate(order.uses):
            if position in order.updates:
                self._stale.update(there for there in self._there if schedule.units[there].trainable)
            self._fetch_all(schedule.before.get(position, ()), f"before position {position}", strict)
            if schedule.ways[unit] is not Way.CACHED_RAW:
                if strict and unit not in self._there:
                    raise BrokenRuleError(
                        "S5", f"the unit in its place at position {position}", "other bytes", str(unit)
                    )
                if strict and unit in self._stale:
                    raise BrokenRuleError(
                        "S7",
                        f"weights of the latest update at position {position}",
                        "older weights",
                        str(unit),
                    )
                self._overwrite(
                    unit
                )  # where the unit is there with its present weights, this changes nothing
                self._unread.discard(unit)
            self._in_use.append((order.end(position), unit))
            while self._in_use and self._in_use[-1][0] <= position:
                self._in_use.pop()
            self._fetch_all(schedule.after[position], f"after position {position}", strict)

    def _fetch_all(self, units: Iterable[int], moment: str, strict: bool) -> None:
        """Replay fetches of ``units`` at ``moment``, which is named in errors."""
        for unit in units:
            cost, way = self.schedule.units[unit], self.schedule.ways[unit]
            if way is Way.CACHED_RAW:
                raise BrokenRuleError("S3", "no fetch of a unit that stays", f"a fetch {moment}", str(unit))
            if self.schedule.offsets[unit] < 0:
                raise BrokenRuleError("S2", "fetches of units with a place", f"a fetch {moment}", str(unit))
            if strict and unit in self._there and unit not in self._stale:
                raise BrokenRuleError("S6", "no fetch of what is there", f"a fetch {moment}", str(unit))
            victims = self._overwrite(unit)
            if strict and not self._unread.isdisjoint(victims):
                wasted = min(self._unread.intersection(victims))
                raise BrokenRuleError("S6", "a use after its fetch", f"overwritten {moment}", str(wasted))
            self._unread.difference_update(victims)
            self._unread.add(unit)
            for victim in victims:
                if any(victim == user for _, user in self._in_use):
                    raise BrokenRuleError(
                        "S4", "no fetch into bytes in use", f"a fetch of unit {unit} {moment}", str(victim)
                    )
            if way.crosses:
                self.transfers += 1
                self.wire_bytes += cost.packed if way.packed else cost.nbytes

    def _overwrite(self, unit: int) -> list[int]:
        """Put ``unit`` in its place, and return the units that lay there, in part or wholly."""
        offset, units, present = self.schedule.offsets[unit], self.schedule.units, self.present
        first = bisect_left(present, (offset, -1))
        if first and present[first - 1][0] + units[present[first - 1][1]].nbytes > offset:
            first -= 1
        behind = bisect_left(present, (offset + units[unit].nbytes, -1))
        victims = [victim for _, victim in present[first:behind]]
        present[first:behind] = [(offset, unit)]
        self._stale.difference_update(victims, [unit])
        self._there.difference_update(victims)
        self._there.add(unit)
        return victims
