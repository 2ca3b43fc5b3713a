"""The order of uses: `AccessOrder` predicts it, `KnownPasses` knows the ways in which a module is called, and
`ScheduleFollower` follows the schedule of the predicted order.

A unit is a group of weights that is copied to the device together. The history of accesses serves as the
prediction. A training or sampling loop uses the same units again one period later, so a pointer follows the
history one period behind the present, and the accesses recorded after the pointer are the expected ones. While
each access matches the expected one, nothing is searched. After a mismatch (a "surprise") the pointer moves to
the earlier position whose preceding accesses match the latest ones over the longest stretch. This covers the
repeated calls of a sampler, the change from forward to backward, gradient accumulation, several forwards before
one backward, and training alternating with sampling. The caller does not have to say which of these is running.

`AccessOrder` tells at each use of a unit whether it was the expected one. While it is, the position moves on in the
schedule of that order. After a use that was not expected the schedule is that of a known pass which has begun in the same
way. If there is none, there is no schedule until the next pass begins, which is expected to be like this one. The pointer
then goes to the begin of that pass (`AccessOrder.expect_cycle`), so the period is never more than a few passes, whatever the module did before.

The module imports no torch and has no side effects.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice

from .schedule import Schedule, UseOrder

KNOWN = 8  # number of different passes that are known
TURNS = 4  # the most passes of a cycle of known passes
_KINDS = 3  # kinds of use of a unit: forward, recomputation in a backward, computing gradients
_FORWARD = 0  # the kind of use that a forward is, see `AccessOrder`

Accesses = tuple[int, ...]  # uses of units, each a number that says the unit and the kind of use


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
        self._pass_begin = len(self._history)  # position of the first access of the latest pass

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

    def cycle(self, done: int) -> list[tuple[int, int]]:
        """Return the uses of one period as (unit, kind of use), the ``done`` latest accesses first. Empty where nothing is
        expected.
        """
        uses = [divmod(key, _KINDS) for key in self._history[self.at + 1 :]]
        return uses[-done:] + uses[:-done]

    def uses(self) -> list[tuple[int, int]]:
        """Return the uses of the last period as (unit, kind of use). What is expected but was never seen is left out."""
        return [divmod(key, _KINDS) for key in self._history[max(self.at + 1, self._guessed) :]]

    @property
    def pass_length(self) -> int:
        """The number of accesses in the latest pass until now."""
        return len(self._history) - self._pass_begin

    def pass_uses(self) -> list[tuple[int, int]]:
        """Return the uses in the latest pass until now as (unit, kind of use)."""
        return [divmod(key, _KINDS) for key in self.pass_accesses()]

    def begin_pass(self) -> Accesses:
        """Note that the next access is the first one of a pass. Return those of the pass before."""
        ended = self.pass_accesses()
        self._pass_begin = len(self._history)
        return ended

    def pass_accesses(self) -> Accesses:
        """Return the accesses of the latest pass until now."""
        return tuple(self._history[self._pass_begin :])

    def expect_cycle(self, cycle: Accesses) -> None:
        """Expect the accesses ``cycle`` again and again. They begin with those of the latest pass until now."""
        done = self.pass_length
        following = [*cycle[done:], *cycle[:done]]
        # As if there had been the cycle before, and the latest pass had begun anew at its end.
        self.at = len(self._history) - 1
        for key in following:
            self._positions.setdefault(key, []).append(len(self._history))
            self._history.append(key)
        self._pass_begin = len(self._history) - done

    def forget_pass(self) -> None:
        """Forget the accesses of the latest pass, and expect nothing until the next access has shown where in the history
        it is. Called after an interrupt, which may have come between the steps of `access`.
        """
        del self._history[self._pass_begin :]
        self.at = len(self._history)
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
        self._pass_begin = max(0, self._pass_begin - drop)
        self._index()


class KnownPasses:
    """The passes that were seen lately, and the one that a pass which has begun repeats.

    A module may be called in several ways: with other blocks, with gradients and without. After one pass of a new way the
    next pass is expected to be like it. Where calls come in turns, such as two forwards and a backward of both, the cycle
    of several passes is expected.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[Accesses, None] = OrderedDict()  # the one that was used last at the end
        self._latest: deque[Accesses] = deque(maxlen=2 * TURNS)

    def note(self, uses: Accesses) -> None:
        """Note a pass that has ended. ``uses``: empty if it used no unit."""
        if not uses:
            return
        self._known[uses] = None
        self._known.move_to_end(uses)
        if len(self._known) > KNOWN:
            self._known.popitem(last=False)
        self._latest.append(uses)

    def cycle_of(self, begun: Accesses) -> Accesses | None:
        """Return the cycle of uses that is expected of a pass which has begun with the uses ``begun``, and which is at
        the last of them. The cycle begins with ``begun``. Returns None if no pass is known that has begun so.
        """
        turns = self._turns()
        if turns[: len(begun)] == begun:
            return turns
        return next((uses for uses in reversed(self._known) if uses[: len(begun)] == begun), None)

    def _turns(self) -> Accesses:
        """Return the uses of the latest passes that came twice in turns, the fewest ones. Empty if none did."""
        latest = list(self._latest)
        for count in range(1, len(latest) // 2 + 1):
            if latest[-count:] == latest[-2 * count : -count]:
                return tuple(chain.from_iterable(latest[-count:]))
        return ()


class ScheduleFollower:
    """``order``: predicts the uses. ``make``: makes the schedule of an order of uses. ``known``: passes under earlier
    layouts of the same units.

    ``schedule``: the schedule in effect, None where the order is not known. It may give each fetch a
    number of its own (`Schedule.unit_of`).
    ``position``: the position of the latest use in it.
    ``due``: the numbers of the fetches that are to be issued, in the order of need. Whoever issues them removes them.
    """

    def __init__(
        self, order: AccessOrder, make: Callable[[UseOrder], Schedule], known: KnownPasses | None = None
    ) -> None:
        self.order, self._make, self._known = order, make, known or KnownPasses()
        self.schedule: Schedule | None = None
        self.position = -1
        self.due: deque[int] = deque()
        self._use_ended = True  # whether the fetches after the present position are due already
        self._pass_begins = True

    def expect_pass(self) -> None:
        """Note that the next use is the first one of a pass."""
        self._pass_begins = True
        self._known.note(self.order.begin_pass())

    def begin_use(self, unit: int, backward: bool, recomputed: bool) -> None:
        """Record a use of ``unit``. The arguments are those of `AccessOrder.access`."""
        schedule = self.schedule
        if schedule is not None and not self._use_ended:
            self.due.extend(schedule.after[self.position])
        self._use_ended = False
        if self.order.access(unit, backward, recomputed) and schedule is not None:
            self.position += 1
            if self.position == len(schedule.after):
                self.position = 0
            if schedule.before:
                self.due.extend(schedule.before.get(self.position, ()))
            if self.due and (number := schedule.order.uses[self.position]) in self.due:
                self.due.remove(number)  # it is used now, and fetched for that if it is not there
        else:
            self.due.clear()
            # Once no known pass has begun as this one has, none does after its later uses.
            self.schedule = self._find_schedule() if schedule is not None or self._pass_begins else None
        self._pass_begins = False

    def end_use(self, unit: int) -> None:
        """Note that a use of ``unit`` has ended. Uses that end at the begin of the next one need not be noted."""
        schedule = self.schedule
        if (
            not self._use_ended
            and schedule is not None
            and schedule.unit_of[schedule.order.uses[self.position]] == unit
        ):
            self._use_ended = True
            self.due.extend(schedule.after[self.position])

    def upcoming(self) -> Iterator[int]:
        """Return the units that are to be fetched, in the order in which fetches are issued. Units occur more than once."""
        schedule = self.schedule
        if schedule is None:
            return self.order.upcoming()
        fetches, ends = schedule.fetches_in_turn
        begin = ends[self.position] - (0 if self._use_ended else len(schedule.after[self.position]))
        due = [schedule.unit_of[number] for number in self.due]
        return chain(due, islice(fetches, begin, None), islice(fetches, begin))

    def offset_now(self) -> int | None:
        """Return the offset that the schedule gives the unit of the latest use, None where there is no schedule."""
        schedule = self.schedule
        return None if schedule is None else schedule.offsets[schedule.order.uses[self.position]]

    def forget_position(self) -> None:
        """Expect nothing until a pass has begun. Called after an interrupt, which may have come at any line."""
        self.order.forget_pass()
        self.schedule, self._use_ended, self._pass_begins = None, True, True
        self.due.clear()

    def _find_schedule(self) -> Schedule | None:
        """Return the schedule of the cycle that the pass is in, if one is known, and set the position in it."""
        begun = self.order.pass_accesses()
        known = self._known.cycle_of(begun)
        if known is not None:
            self.order.expect_cycle(known)
        elif not self._pass_begins:
            return None
        cycle = self.order.cycle(len(begun))
        if not cycle:
            return None
        self.position = len(begun) - 1
        # An optimizer may change trainable weights between a backward and the forward after it.
        updates = frozenset(
            position
            for position, (_, kind) in enumerate(cycle)
            if kind == _FORWARD and cycle[position - 1][1] != _FORWARD
        )
        found = self._make(UseOrder(tuple(unit for unit, _ in cycle), updates=updates))
        self.due.extend(fetches_before(found, self.position))
        return found


def fetches_before(schedule: Schedule, position: int) -> list[int]:
    """Return the entries that lie in the region after the use at ``position``, if the cycle before was the same.

    They are those whose places no other unit uses before their own next use. They are returned in the order of need,
    without the unit of that use.
    """
    uses, offsets, units = schedule.order.uses, schedule.offsets, schedule.units
    uses = uses[position:] + uses[:position]
    found: list[int] = []
    taken: list[tuple[int, int]] = []
    for unit in dict.fromkeys(uses):
        begin = offsets[unit]
        if begin < 0:  # stays on the device
            continue
        end = begin + units[unit].nbytes
        if all(high <= begin or end <= low for low, high in taken):
            found.append(unit)
        taken.append((begin, end))
    return [unit for unit in found if unit != uses[0]]
