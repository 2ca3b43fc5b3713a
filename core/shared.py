"""What several sessions share: a device, or one budget of bytes that they hold together.

Who gives way to whom, and when a move is worth the copies, is `shares.py`'s; `together.py` makes a session do it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable
from typing import Any

from .auto import Governor, Memory
from .errors import BudgetError
from .shares import Shares
from .sizes import format_size, parse_size


class Mates:
    """Sessions whose budgets follow the same memory."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # from reading what is left to saying what of it is taken
        self.shares = Shares()
        self.sessions: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def join(self, session: Any) -> None:
        """``session`` is the newest one now."""
        self.sessions[id(session)] = session
        self.shares.join(id(session))

    def leave(self, session: Any) -> None:
        """``session`` ended, or is bounded otherwise."""
        self.sessions.pop(id(session), None)
        self.shares.leave(id(session))


_devices: dict[Hashable, Mates] = {}


def mates_on(place: Hashable) -> Mates:
    """The sessions with ``vram="auto"`` on the device that ``place`` names."""
    return _devices.setdefault(place, Mates())


class SharedBudget:
    """Bytes of weights that several sessions hold together at most: give the same object as ``vram`` to each.

    ``size``: bytes, "12GiB" or "12GB". Each session holds what the others leave; a new one comes first and others give
    way to it, down to one slot each; later, bytes go where a session is short and used much more than others. A session
    that is parked holds nothing, and its least is kept for its return. ``by_size``: a new session asks of the others no
    more than its part by size, which suits models that are used by turns. Raises BudgetError for a size that is none.
    """

    def __init__(self, size: int | str, *, by_size: bool = False) -> None:
        try:
            self.nbytes = parse_size(size, setting="SharedBudget")
        except ValueError as error:
            raise BudgetError(str(error)) from error
        self.by_size = by_size
        self.later = 0  # bytes kept for sessions that are still to come
        self.mates = Mates()

    def __repr__(self) -> str:
        return f"SharedBudget({format_size(self.nbytes)})"

    @property
    def held_bytes(self) -> int:
        """Bytes that sessions hold."""
        return sum(
            each._promised_bytes() - each._unused_bytes() for each in list(self.mates.sessions.values())
        )

    @property
    def free_bytes(self) -> int:
        """Bytes that nobody holds or may hold without asking again, and that are kept for nobody."""
        return self.free_for(None)

    def free_for(self, session: Any) -> int:
        """What ``session`` may take beyond what it holds."""
        sessions = list(self.mates.sessions.values())
        taken = sum(each._promised_bytes() for each in sessions)
        taken += sum(each._kept_bytes() for each in sessions if each is not session)
        unused = 0 if session is None else session._unused_bytes()
        return max(0, self.nbytes - self.later - taken + unused)

    def part_of(self, session: Any, nbytes: int) -> int:
        """What ``session``, of ``nbytes`` in all, may ask the others to leave it."""
        if not self.by_size:
            return nbytes
        others = [
            other for other in self.mates.sessions.values() if other is not session and not other._closed
        ]
        everything = nbytes + sum(other._everything() for other in others)
        return min(nbytes, self.nbytes * nbytes // max(1, everything))

    def memory(self, device: Memory | None, session: Any = None) -> Memory:
        """What ``session`` may take: of the budget, or of ``device`` where that has less left."""
        free = self.free_for(session)
        if device is not None and device.free - Governor.headroom(device) < free:
            return device
        return Memory(self.nbytes, free, 0, 0 if device is None else device.ooms, weights_only=True)
