"""What is learnt of a module, from one layout and one session of it to the next: `LearntOrder` is the order in which its
tensors were used, `KnownSchedules` are the tables that were made for it.

A layout divides the module into units (groups of tensors that are copied together), of which some stream. Layouts
differ in their units and in what streams, so the order is kept by the names of tensors. A schedule
(`plan.schedule.Schedule`) is a table for an order of uses, the sizes of the units, and a region of device memory. A module
comes back to the same three when it returns to the device, when its budget changes to and fro, when another session
streams it, and when it is called in several ways in turns. The module imports no torch and has no side effects.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from .schedule import Schedule
from .schedule_follower import KnownPasses

FORWARD = 0  # the kind of use that a forward is, see `AccessOrder`
_MOST = 1 << 12  # the latest uses that are kept
_SCHEDULES = 16  # number of schedules that are kept: some orders in some budgets
_DIVISIONS = 4  # number of divisions into streamed units whose passes are known

Kept = TypeVar("Kept")
Names = tuple[str, ...]


@dataclass(frozen=True)
class LearntOrder:
    """The uses of one period, each as the names of the tensors that were used together and the kind of the use."""

    uses: tuple[tuple[Names, int], ...] = ()

    def names(self) -> set[str]:
        """Return the names of all tensors whose place in the order is known."""
        return {name for names, _ in self.uses for name in names}

    def with_others(self, other: LearntOrder) -> LearntOrder:
        """Return this order with the tensors that only ``other`` knows, each after the one that precedes it there."""
        known, seen = self.names(), set[str]()
        # What comes after the first use of a tensor; "": at the beginning.
        following: dict[str, list[Names]] = {}
        after = ""
        for names, kind in other.uses:
            new = tuple(name for name in names if name not in known and name not in seen)
            after = next((name for name in reversed(names) if name in known), after)
            if new and kind == FORWARD:
                following.setdefault(after, []).append(new)
                seen.update(new)
        if not following:
            return self
        uses = [(names, FORWARD) for names in following.pop("", ())]
        for names, kind in self.uses:
            uses.append((names, kind))
            for name in names:
                uses += [(inserted, FORWARD) for inserted in following.pop(name, ())]
        return LearntOrder(tuple(uses))

    def positions(self, units: Sequence[Names]) -> list[tuple[int, int]]:
        """Return the uses of ``units``, each given by the names of its tensors: (position in ``units``, kind of use).

        A unit that the order does not know is used after the one before it in ``units``.
        """
        order = self.with_others(LearntOrder(tuple((names, FORWARD) for names in units)))
        whole = {names: index for index, names in enumerate(units)}
        of = {name: index for index, names in enumerate(units) for name in names}
        found: list[tuple[int, int]] = []
        for names, kind in order.uses:
            if names in whole:
                found.append((whole[names], kind))
                continue
            for index in sorted({of[name] for name in names if name in of}):
                if not found or found[-1] != (index, kind):
                    found.append((index, kind))
        return found


def learnt(uses: Sequence[tuple[Names, int]]) -> LearntOrder:
    """Return the order of ``uses``, the latest ones if there are very many."""
    return LearntOrder(tuple(uses[-_MOST:]))


class KnownSchedules:
    """The schedules that were made lately for one module, so that none is made twice, and its passes."""

    def __init__(self) -> None:
        self._schedules: OrderedDict[Hashable, Schedule] = OrderedDict()
        self._passes: OrderedDict[Hashable, KnownPasses] = OrderedDict()

    def find(self, made_from: Hashable, make: Callable[[], Schedule]) -> Schedule:
        """Return the schedule of ``made_from``, which is everything that ``make`` makes it from."""
        return _find(self._schedules, made_from, make, _SCHEDULES)

    def passes_of(self, units: tuple[Names, ...]) -> KnownPasses:
        """Return the passes that are known where ``units`` stream, each given by the names of its tensors."""
        return _find(self._passes, units, KnownPasses, _DIVISIONS)


def _find(kept: OrderedDict[Hashable, Kept], key: Hashable, make: Callable[[], Kept], most: int) -> Kept:
    """Return what is kept for ``key``, or what ``make`` makes. What was not used for longest goes beyond ``most``."""
    found = kept[key] if key in kept else make()
    kept[key] = found
    kept.move_to_end(key)
    if len(kept) > most:
        kept.popitem(last=False)
    return found
