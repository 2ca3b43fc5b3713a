"""One budget for several sessions: what one leaves another may hold, and the newest comes first.

Who gives way to whom, and when a move is worth the copies, is `shares.py`'s, as for ``vram="auto"``; this bounds the sum.
"""

from __future__ import annotations

import weakref
from typing import Any

from .auto import Governor, Memory
from .errors import BudgetError
from .sizes import format_size, parse_size


class SharedBudget:
    """Bytes of weights that several sessions hold together at most: give the same object as ``vram`` to each.

    ``size``: bytes, "12GiB" or "12GB". Each session holds what the others leave; a new one comes first and others give
    way to it, down to one slot each; later, bytes go where a session is short and used much more than others.
    Raises BudgetError for a size that is none.
    """

    def __init__(self, size: int | str) -> None:
        try:
            self.nbytes = parse_size(size, setting="SharedBudget")
        except ValueError as error:
            raise BudgetError(str(error)) from error
        self._sessions: weakref.WeakSet[Any] = weakref.WeakSet()

    def __repr__(self) -> str:
        return f"SharedBudget({format_size(self.nbytes)})"

    def join(self, session: Any) -> None:
        """``session`` holds of it from now on; it has ``_promised_bytes()``."""
        self._sessions.add(session)

    def leave(self, session: Any) -> None:
        """``session`` holds nothing of it any more."""
        self._sessions.discard(session)

    @property
    def held_bytes(self) -> int:
        """Bytes that sessions hold or may hold without asking again."""
        return sum(session._promised_bytes() for session in list(self._sessions))

    @property
    def free_bytes(self) -> int:
        """Bytes that nobody holds."""
        return max(0, self.nbytes - self.held_bytes)

    def memory(self, device: Memory | None) -> Memory:
        """What a session may take: of the budget, or of ``device`` where that has less left."""
        if device is not None and device.free - Governor.headroom(device) < self.free_bytes:
            return device
        return Memory(
            self.nbytes, self.free_bytes, 0, 0 if device is None else device.ooms, weights_only=True
        )
