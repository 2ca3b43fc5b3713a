"""Prediction of the order in which units are used: learned from past accesses and checked at every access.

A unit is a group of weights that is copied to the device together. The history of accesses serves as the
prediction. A training or sampling loop uses the same units again one period later, so a pointer follows the
history one period behind the present, and the accesses recorded after the pointer are the expected ones. While
each access matches the expected one, nothing is searched. After a mismatch (a "surprise") the pointer moves to
the earlier position whose preceding accesses match the latest ones over the longest stretch. This covers the
repeated calls of a sampler, the change from forward to backward, gradient accumulation, several forwards before
one backward, and training alternating with sampling. The caller does not have to say which of these is running.
The module imports no torch and has no side effects.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

NEVER = 1 << 60  # the position and the distance of a use that is not expected
_KINDS = 3  # kinds of use of a unit: forward, recomputation in a backward, computing gradients


class AccessOrder:
    """A predictor of the next uses of units, where a use is a forward, a recomputation in a backward, or a
    gradient.

    ``initial``: the unit indices in the order that is expected before any access was seen (the order of a
    forward). The first backward is a surprise, because a backward runs in another order. Until the predictor
    has seen that order once, it expects no use during a backward. ``limit``: the number of accesses that are
    remembered. ``context``: the number of accesses that are compared after a surprise.
    """

    def __init__(
        self,
        initial: Sequence[int],
        *,
        learnt: Sequence[tuple[int, int]] = (),
        limit: int = 1 << 15,
        context: int = 512,
    ) -> None:
        """``learnt``: the uses of one period under an earlier layout, as `uses` returned them, instead of ``initial``."""
        self._limit = limit
        self._context = context
        self.surprises = 0  # accesses that were not the expected ones
        # keys: _KINDS * unit + kind of use
        self._history: list[int] = [
            _KINDS * unit + kind for unit, kind in learnt or [(unit, 0) for unit in initial]
        ]
        self._guessed = (
            0 if learnt else len(self._history)
        )  # the first accesses of the history, which were not seen
        self._positions: dict[int, list[int]] = {}  # key -> ascending positions in the history
        self._index()
        self.at = -1  # position in the history that corresponds to the latest access
        self.epoch = 0  # raised whenever positions looked up earlier can no longer be compared with `at`

    def access(self, unit: int, backward: bool = False, recomputed: bool = False) -> bool:
        """Record a use of ``unit`` and return whether that use was the expected one.

        ``backward``: the use computes gradients; ``recomputed``: the use repeats a forward within a backward,
        as activation checkpointing does.
        """
        key = _KINDS * unit + (2 if backward else 1 if recomputed else 0)
        history, following = self._history, self.at + 1
        expected = following < len(history) and history[following] == key
        if expected:
            self.at = following
        else:
            self.surprises += 1
            self.at = self._find_matching_position(key)
            self.epoch += 1
        positions = self._positions.get(key)
        if positions is None:
            positions = self._positions[key] = []
        positions.append(len(history))
        history.append(key)
        if len(history) > 2 * self._limit:
            self._drop_oldest()
        return expected

    def upcoming(self) -> Iterator[int]:
        """Yield the units expected next, nearest first, over one period; a unit may occur several times."""
        history = self._history
        for position in range(self.at + 1, len(history)):
            yield history[position] // _KINDS

    def expected(self) -> list[tuple[int, bool]]:
        """Return the expected uses over one period, nearest first, as (unit, whether the use computes
        gradients).
        """
        return [(key // _KINDS, key % _KINDS == 2) for key in self._history[self.at + 1 :]]

    @property
    def recorded(self) -> int:
        """The number of accesses in the history."""
        return len(self._history)

    def uses(self, start: int | None = None) -> list[tuple[int, int]]:
        """Return the uses of the last period as (unit, kind of use), or the accesses since `recorded` was ``start``.

        Accesses that are expected but were never seen are left out.
        """
        start = max(self.at + 1, self._guessed) if start is None else start
        return [divmod(key, _KINDS) for key in self._history[start:]]

    @property
    def period(self) -> int:
        """The number of accesses after which the order repeats; 0 where nothing is expected.

        While `epoch` does not change, ``at`` modulo the period determines all expected uses.
        """
        return max(0, len(self._history) - 1 - self.at)

    def next_place(self, unit: int) -> int:
        """Return the position in the history where ``unit`` is expected next, or NEVER.

        The result is valid until `at` reaches that position or `epoch` changes.
        """
        best, at, known = NEVER, self.at, self._positions
        for key in range(_KINDS * unit, _KINDS * unit + _KINDS):
            positions = known.get(key)
            # The comparison with the last position is a cheap early exit, because most units have no further
            # use of some kinds.
            if positions and positions[-1] > at:
                found = positions[bisect_right(positions, at)]
                if found < best:
                    best = found
        return best

    def next_use(self, unit: int) -> int:
        """Return the number of accesses until ``unit`` is expected (1: the very next access), or NEVER."""
        position = self.next_place(unit)
        return NEVER if position == NEVER else position - self.at

    def restart(self) -> None:
        """Expect nothing until the next access has shown where in the history it is. Called after an interrupt, which
        may have come between the steps of `access`.
        """
        self.at = len(self._history)
        self.epoch += 1
        self._index()

    def _find_matching_position(self, key: int) -> int:
        """Return the latest position of ``key`` whose preceding accesses match the present ones over the
        longest stretch.

        Return the end of the history, where nothing is expected, if ``key`` was never seen.
        """
        history = self._history
        end = len(history) - 1  # position of the access before this one
        best, longest = -1, -1
        for position in reversed(self._positions.get(key, ())[-64:]):
            length = 0
            while (
                length < self._context
                and position - 1 - length >= 0
                and history[position - 1 - length] == history[end - length]
            ):
                length += 1
            if length > longest:
                best, longest = position, length
        if best < 0:
            return len(history)
        return best

    def _index(self) -> None:
        """Rebuild the table of positions by key from the history."""
        self._positions = {}
        for position, key in enumerate(self._history):
            self._positions.setdefault(key, []).append(position)

    def _drop_oldest(self) -> None:
        """Drop the oldest accesses from the history, but none at or after the pointer `at`."""
        drop = min(len(self._history) - self._limit, max(0, self.at))
        del self._history[:drop]
        self.at -= drop
        self._guessed = max(0, self._guessed - drop)
        self.epoch += 1
        self._index()
