"""PURE. The order in which units are used: learnt, verified at every access, relearnt on a surprise.

The history of accesses predicts itself: after a pass the same units come again one period later, so a
pointer follows the history one period behind the present, and what came after it then is expected
now. While each access is what the pointer expected nothing is searched. On a surprise the pointer
jumps to the past place whose preceding accesses agree longest with the latest ones. That covers a
sampler's repeated calls, the forward/backward turn, gradient accumulation, several forwards before a
backward, and training and sampling by turns, without being told which of them it is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

NEVER = 1 << 60
_KINDS = 3  # of uses: forward, recomputation, gradients


class Order:
    """Accesses are of a unit in a forward, in its recomputation, or for its gradients; ``initial`` is the order expected
    before anything is known. That a backward goes another way than the forward is so a surprise at first: while it
    is, nothing is expected, instead of what came next in the forward."""

    def __init__(self, initial: Sequence[int], *, limit: int = 1 << 15, context: int = 512) -> None:
        self._limit = limit  # accesses remembered
        self._context = context  # accesses compared on a surprise
        self.surprises = 0
        self._history: list[int] = [_KINDS * unit for unit in initial]
        self._places: dict[int, list[int]] = {}
        self._index()
        self.at = -1  # the place in the learnt order that corresponds to now
        self.epoch = 0  # raised when places found earlier are no longer to be compared with `at`

    def access(self, unit: int, backward: bool = False, again: bool = False) -> bool:
        """Note that ``unit`` is used now, for gradients (``backward``) or recomputed in a backward (``again``); True when
        that was expected."""
        key = _KINDS * unit + (2 if backward else 1 if again else 0)
        history, following = self._history, self.at + 1
        expected = following < len(history) and history[following] == key
        if expected:
            self.at = following
        else:
            self.surprises += 1
            self.at = self._resync(key)
            self.epoch += 1
        places = self._places.get(key)
        if places is None:
            places = self._places[key] = []
        places.append(len(history))
        history.append(key)
        if len(history) > 2 * self._limit:
            self._forget()
        return expected

    def upcoming(self) -> Iterator[int]:
        """Units expected next, nearest first, over one period (units may repeat)."""
        history = self._history
        for place in range(self.at + 1, len(history)):
            yield history[place] // _KINDS

    def expected(self) -> list[tuple[int, bool]]:
        """What is expected over one period, nearest first: (unit, whether for gradients)."""
        return [(key // _KINDS, key % _KINDS == 2) for key in self._history[self.at + 1 :]]

    @property
    def period(self) -> int:
        """Uses after which the order comes again: as long as `epoch` does not change, ``at`` modulo it tells all that is
        expected. 0 where nothing is."""
        return max(0, len(self._history) - 1 - self.at)

    def next_place(self, unit: int) -> int:
        """The place in the learnt order where ``unit`` is expected again, NEVER when it is not expected.

        Holds until `at` has reached it or `epoch` has changed.
        """
        best, at, known = NEVER, self.at, self._places
        for key in range(_KINDS * unit, _KINDS * unit + _KINDS):
            places = known.get(key)
            # What comes last of it is behind now: most uses are not of all kinds in what is left of the history.
            if places and places[-1] > at:
                found = places[bisect_right(places, at)]
                if found < best:
                    best = found
        return best

    def next_use(self, unit: int) -> int:
        """Accesses until ``unit`` is expected again (1: the very next), NEVER when it is not expected."""
        place = self.next_place(unit)
        return NEVER if place == NEVER else place - self.at

    def _resync(self, key: int) -> int:
        """The most recent past place of ``key`` with the longest agreeing context; -1: none."""
        history = self._history
        end = len(history) - 1  # the last access before this one
        best, longest = -1, -1
        for place in reversed(self._places.get(key, ())[-64:]):
            length = 0
            while (
                length < self._context
                and place - 1 - length >= 0
                and history[place - 1 - length] == history[end - length]
            ):
                length += 1
            if length > longest:
                best, longest = place, length
        if best < 0:  # never seen: nothing is expected until it is
            return len(history)
        return best

    def _index(self) -> None:
        self._places = {}
        for place, key in enumerate(self._history):
            self._places.setdefault(key, []).append(place)

    def _forget(self) -> None:
        """Drop the oldest accesses, keeping what the pointer still needs."""
        drop = min(len(self._history) - self._limit, max(0, self.at))
        del self._history[:drop]
        self.at -= drop
        self.epoch += 1
        self._index()
