"""Defines `LearntOrder`: the order in which the tensors of a module were used, from one layout of the module to the
next.

A layout divides the module into units (groups of tensors that are copied together), of which some stream. Layouts
differ in their units and in what streams, so the order is kept by the names of tensors. The module imports no torch and
has no side effects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FORWARD = 0  # the kind of use that a forward is, see `AccessOrder`
_MOST = 1 << 12  # the latest uses that are kept

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
        following: dict[
            str, list[Names]
        ] = {}  # what comes after the first use of a tensor; "": at the beginning
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
