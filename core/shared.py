"""What several sessions share: a device, or one budget of bytes that they hold together.

Who gives way to whom, and when a move is worth the copies, is `shares.py`'s; `together.py` makes a session do it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

from .auto import Governor, Memory
from .errors import BudgetError
from .shares import Shares
from .sizes import format_size, parse_size


class Mates:
    """Sessions whose budgets follow the same memory."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # from reading what is left to saying what of it is taken
        self.coming = threading.RLock()  # from asking for room to being laid out; taken before ``lock``
        self.shares = Shares()
        # Another one with every change: who goes through it in a thread of its own is not disturbed.
        self.sessions: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._changing = threading.RLock()

    def join(self, session: Any) -> None:
        """``session`` is the newest one now."""
        with self._changing:
            self.shares.only(self.sessions)  # some may have been dropped unclosed
            sessions = self.sessions.copy()
            sessions[id(session)] = session
            self.sessions = sessions
            self.shares.join(id(session))

    def leave(self, session: Any) -> None:
        """``session`` ended, or is bounded otherwise."""
        with self._changing:
            sessions = self.sessions.copy()
            sessions.pop(id(session), None)
            self.sessions = sessions
            self.shares.leave(id(session))


# Those that a session has. A place may be the id of something that lives as long as its sessions.
_devices: weakref.WeakValueDictionary[Hashable, Mates] = weakref.WeakValueDictionary()
_finding = threading.Lock()


def mates_on(place: Hashable) -> Mates:
    """The sessions with ``vram="auto"`` on the device that ``place`` names, for as long as there is one."""
    with _finding:
        return _devices.setdefault(place, Mates())


class SharedBudget:
    """Bytes of weights that several sessions hold together at most: give the same object as ``vram`` to each.

    ``size``: bytes, "12GiB" or "12GB". Each session holds what the others leave; a new one comes first and others give
    way to it, down to one slot each; later, bytes go where a session is short and used much more than others. A session
    that is parked holds nothing, and its least is kept for its return. ``by_size``: a new session asks of the others no
    more than its part by size, which suits models that are used by turns. ``grows``: ``size`` is a guess to begin with, and
    rises by what passes leave of the device, as with ``vram="auto"``. Raises BudgetError for a size that is none.
    """

    def __init__(self, size: int | str, *, by_size: bool = False, grows: bool = False) -> None:
        try:
            self.nbytes = parse_size(size, setting="SharedBudget")
        except ValueError as error:
            raise BudgetError(str(error)) from error
        self.by_size, self.grows = by_size, grows
        self.first = self.nbytes  # bytes, to which it returns where a new session's passes are yet to be seen
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
        return max(0, self.nbytes - self._spoken_for(session))

    def _spoken_for(self, session: Any) -> int:
        """Bytes that ``session`` cannot have, or holds: promised, kept for who returns, for who is still to come."""
        sessions = list(self.mates.sessions.values())
        taken = sum(each._promised_bytes() for each in sessions)
        taken += sum(each._kept_bytes() for each in sessions if each is not session)
        return self.later + taken - (0 if session is None else session._unused_bytes())

    def part_of(self, session: Any, nbytes: int, of: int | None = None) -> int:
        """What ``session``, of ``nbytes`` in all, may ask the others to leave it; ``of`` the budget, or of so many bytes."""
        if not self.by_size:
            return nbytes
        others = [
            other for other in self.mates.sessions.values() if other is not session and not other._closed
        ]
        everything = nbytes + sum(other._everything() for other in others)
        return min(nbytes, (self.nbytes if of is None else of) * nbytes // max(1, everything))

    def memory(self, device: Memory | None, session: Any = None) -> Memory:
        """What ``session`` may take: of the budget, or of ``device`` where that has less left, or more to grow into."""
        free = self.free_for(session)
        if device is not None:
            left = device.free - Governor.headroom(device)
            unheld = min(max(0, left), self._unheld(session)) if self.grows else 0
            if left - unheld < free or (self.grows and left - unheld > free):
                return replace(device, free=device.free - unheld)
        return Memory(self.nbytes, free, 0, 0 if device is None else device.ooms, weights_only=True)

    # -- one that grows

    def _unheld(self, session: Any) -> int:
        """Bytes that may be free on the device as yet, but are others' than ``session``'s."""
        others = [each for each in list(self.mates.sessions.values()) if each is not session]
        return self.later + sum(each._kept_bytes() + each._unheld_bytes() for each in others)

    def could_be(self, memory: Memory, session: Any) -> int:
        """Bytes that the budget can rise to by what ``memory``, which `memory` told ``session``, leaves."""
        more = memory.free - Governor.headroom(memory) - self.free_for(session)
        return self.nbytes + (max(0, more) if self.grows and not memory.weights_only else 0)

    def rise(self, nbytes: int) -> None:
        """It is ``nbytes`` larger."""
        self.nbytes += max(0, nbytes)

    @property
    def grown(self) -> int:
        """Bytes that it rose by; below zero where a pass ran out of memory."""
        return self.nbytes - self.first if self.grows else 0

    def fall(self) -> None:
        """A pass ran out of memory: what was given up for that is nobody's until the device is seen to have it."""
        if self.grows:
            self.nbytes = min(self.nbytes, self._spoken_for(None))

    def fall_back(self, least: int = 0, of: int | None = None) -> None:
        """A new session's passes are yet to be seen: as at first, or, where others hold more, ``least`` bytes for that one
        of those that it had grown to (or of ``of``)."""
        if self.grows:
            most = self.nbytes if of is None else of
            self.nbytes = max(self.first, min(most, self._spoken_for(None) + least))
