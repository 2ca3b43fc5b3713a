"""`Recovery`: what happens after a pass ran out of memory."""

from __future__ import annotations

from ..streaming.pass_retry import PassSnapshot
from .layout_manager import OutOfMemory
from .policies.device_memory import DeviceMemory
from .policies.leftover import Leftover


class Recovery:
    """Lets a pass that ran out of memory run again with fewer weights on the device, where the pass can be repeated.

    A budget that follows the device falls (`DeviceMemory`); one that a host set goes back to the host's (`Leftover`).
    """

    def __init__(self, memory: DeviceMemory, leftover: Leftover) -> None:
        self._memory, self._leftover = memory, leftover

    @property
    def watches(self) -> bool:
        """Whether passes may run again at all."""
        return self._memory.governor is not None or self._leftover.room is not None

    def before(self, args: tuple, kwargs: dict) -> PassSnapshot | None:
        """Return what a pass finds, where the pass may have to run again; None where it may not."""
        if self._leftover.room is not None:
            return self._leftover.before(args, kwargs)
        return self._memory.before(args, kwargs)

    def recover(self, error: BaseException, before: PassSnapshot | None) -> bool:
        """Hold less after ``error``. Returns whether the pass may run again."""
        if not isinstance(error, OutOfMemory):
            return False
        if self._leftover.room is not None:
            return self._leftover.recover(error, before)
        return self._memory.recover(error, before)
