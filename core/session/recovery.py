"""`Recovery`: lets a pass run again that ran out of device memory, or in which a unit found no room in the region.

A unit is a group of weights that cross to the device together. The region is the device memory through which units that
stream pass. The pass runs again with fewer weights on the device, or with a larger region.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable

import torch

from ..common.errors import BudgetError
from ..streaming.pass_retry import PassSnapshot
from .layout_manager import LayoutManager, OutOfMemory
from .model_changes import ModelChanges
from .policies.device_memory import DeviceMemory
from .policies.raise_budget import RaiseBudget


class Recovery:
    """Handles passes that ran out of device memory, if the pass can be repeated.

    A budget that follows the device's free memory is lowered (`DeviceMemory`). A budget that a host
    application set and that has been raised since is lowered to the application's value again
    (`RaiseBudget`). Before a session's first pass it is not known how many units the module uses at once; if they find no
    room, the region becomes larger at the expense of units that stay on the device (`ModelChanges`). The same holds for
    the first pass after a review of the layout by measured times, which may make the region smaller.

    ``review_due``: returns whether such a review is due before the next pass.
    """

    def __init__(
        self, manager: LayoutManager, changes: ModelChanges, memory: DeviceMemory, raise_budget: RaiseBudget,
        review_due: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._manager, self._changes = manager, changes
        self._memory, self._raise_budget = memory, raise_budget
        self._review_due = review_due
        # Whether no pass has succeeded yet in a region of this size, and none has recorded gradients.
        self._first_pass = True

    @property
    def watches(self) -> bool:
        """Whether any pass may run again: the budget follows the device, or may rise above the budget of a
        host application, or this is the session's first pass, or the first one after a review.
        """
        if self._memory.governor is not None or self._raise_budget.room is not None or self._first_pass:
            return True
        packing = self._manager.wanted.packing
        if packing is None or packing.plain:
            return False  # a review makes the region smaller only where weights cross packed (`Packing.one_decoded`)
        return self._manager.attached and self._review_due()

    def watch_next_pass(self) -> None:
        """Let the next pass run again if a unit finds no room. Called after a review has changed the layout."""
        self._first_pass = True

    def before(self, args: tuple, kwargs: dict) -> PassSnapshot | None:
        """Return a snapshot of the module's state and inputs before a pass, or None if the pass will not run
        again.
        """
        if self._raise_budget.room is not None:
            return self._raise_budget.before(args, kwargs)
        if self._memory.governor is not None:
            return self._memory.before(args, kwargs)
        manager = self._manager
        if torch.is_grad_enabled() or not manager.attached or manager.layout.plan.all_resident:
            self._first_pass = False
            return None
        with manager.lock:
            # While another pass runs, the module holds views of slots, which the snapshot would keep in use.
            return PassSnapshot(manager.module.root, args, kwargs) if manager.gate.idle else None

    def went_well(self, before: PassSnapshot) -> None:
        """Record that a pass with the snapshot ``before`` has succeeded."""
        self._first_pass = False
        if self._raise_budget.room is not None:
            self._raise_budget.went_well(before)
        else:
            self._memory.went_well(before)

    def recover(self, error: BaseException, before: PassSnapshot | None) -> bool:
        """Reduce the weights on the device after ``error``, or enlarge the region. Returns whether the pass may run again."""
        if isinstance(error, BudgetError):
            return self._make_room(error, before)
        if not isinstance(error, OutOfMemory):
            return False
        if self._raise_budget.room is not None:
            return self._raise_budget.recover(error, before)
        return self._memory.recover(error, before)

    def _make_room(self, error: BudgetError, before: PassSnapshot | None) -> bool:
        """Enlarge the region after a unit found no room in it. Returns whether the pass may run again."""
        manager = self._manager
        with manager.lock:
            if before is None or not manager.gate.idle or not before.restore():
                return False
            # The frames of the failed pass would keep views of slots, and with them the memory of the region.
            traceback.clear_frames(error.__traceback__)
            return self._changes.follow_passes()
