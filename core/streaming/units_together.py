"""Defines `acquire_together`: the slots of several units that one operator reads.

A unit is a group of weights that cross to the device together. The region is the device memory through which units pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..common.errors import BudgetError
from ..device.slot import User

if TYPE_CHECKING:
    from .run import Run
    from .streamer import Streamer
    from .unit import StreamedUnit, UnitSlot


def acquire_together(
    streamer: Streamer, run: Run, units: Sequence[StreamedUnit], user: User
) -> list[UnitSlot]:
    """Return the slots of ``units``, which an operator on the stream of ``user`` reads. Raises BudgetError if they have no
    room at once. Otherwise like `Run.acquire`, and under the same lock.
    """
    taken: list[Any] = []
    asked = streamer.next_layout.region_bytes
    try:
        for unit in units:
            taken.append(run.acquire(unit, user))
        if all(user in slot.now.users for slot in taken):
            return taken
        # An interrupt of another thread came while this one waited, and the first ones were given up.
        return acquire_together(streamer, run, units, user)
    except BudgetError as error:
        refused = error
    finally:
        if len(taken) < len(units):
            run.release_all([(slot, (user,)) for slot in taken])
    # The first ones may lie so that the others do not fit beside them.
    found = _fetch_side_by_side(streamer, run, units, user) if taken and run.may_move else None
    if found is None:
        raise refused.with_traceback(None)
    streamer.next_layout.region_bytes = asked
    return found


def _fetch_side_by_side(
    streamer: Streamer, run: Run, units: Sequence[StreamedUnit], user: User
) -> list[Any] | None:
    """Fetch ``units`` to places beside each other, those too that lie elsewhere and that nobody uses. Returns None if there
    is no room.
    """
    run.issuing.add(user.thread)
    try:
        found: list[Any] = run.pool.fault({unit: unit.version() for unit in units}, user)
    except BudgetError:
        if not streamer.torn:
            return None
    finally:
        run.issuing.discard(user.thread)
    if streamer.torn:  # an interrupt of another thread came while this one waited
        streamer.check_open(units[0])  # it brings the slots into order, which gives up those that were found
        return _fetch_side_by_side(streamer, run, units, user)
    try:
        for slot in found:
            run.copy_unit(slot)
    except Exception:
        run.release_all([(slot, (user,)) for slot in found])
        raise
    return found
