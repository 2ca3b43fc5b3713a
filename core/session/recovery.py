"""`Recovery`: lets a pass that ran out of device memory run again, with fewer weights on the device."""

from __future__ import annotations

from ..streaming.pass_retry import PassSnapshot
from .layout_manager import OutOfMemory
from .policies.device_memory import DeviceMemory
from .policies.raise_budget import RaiseBudget


class Recovery:
    """Handles passes that ran out of device memory, if the pass can be repeated.

    A budget that follows the device's free memory is lowered (`DeviceMemory`). A budget that a host
    application set and that has been raised since is lowered to the application's value again
    (`RaiseBudget`).
    """

    def __init__(self, memory: DeviceMemory, raise_budget: RaiseBudget) -> None:
        self._memory, self._raise_budget = memory, raise_budget

    @property
    def watches(self) -> bool:
        """Whether any pass may run again: the budget follows the device, or may rise above the budget of a
        host application.
        """
        return self._memory.governor is not None or self._raise_budget.room is not None

    def before(self, args: tuple, kwargs: dict) -> PassSnapshot | None:
        """Return a snapshot of the module's state and inputs before a pass, or None if the pass will not run
        again.
        """
        if self._raise_budget.room is not None:
            return self._raise_budget.before(args, kwargs)
        return self._memory.before(args, kwargs)

    def went_well(self, before: PassSnapshot) -> None:
        """Record that a pass with the snapshot ``before`` has succeeded."""
        if self._raise_budget.room is not None:
            self._raise_budget.went_well(before)
        else:
            self._memory.went_well(before)

    def recover(self, error: BaseException, before: PassSnapshot | None) -> bool:
        """Reduce the weights on the device after ``error``. Returns whether the pass may run again."""
        if not isinstance(error, OutOfMemory):
            return False
        if self._raise_budget.room is not None:
            return self._raise_budget.recover(error, before)
        return self._memory.recover(error, before)
