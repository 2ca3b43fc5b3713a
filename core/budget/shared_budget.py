"""`SharedBudget`: one budget of bytes for several sessions; `Mates`: the sessions of one device or of one such budget.

`priority` decides which session gives way and when; `ledger` carries that out for one session.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable
from dataclasses import replace
from typing import Any, Protocol

from ..common.errors import BudgetError
from ..common.memory import Memory
from ..common.sizes import format_size, parse_size
from .device_governor import Governor
from .priority import PriorityOrder


class BudgetMember(Protocol):
    """What a shared budget, or another session, may know of a session. All sizes are bytes of the device."""

    priority: int

    @property
    def closed(self) -> bool: ...
    @property
    def held_bytes(self) -> int: ...
    @property
    def promised_bytes(self) -> int: ...
    @property
    def unused_bytes(self) -> int: ...
    @property
    def unheld_bytes(self) -> int: ...
    @property
    def kept_bytes(self) -> int: ...
    @property
    def least_bytes(self) -> int: ...
    @property
    def everything_bytes(self) -> int: ...
    @property
    def spare_bytes(self) -> int: ...

    def give(self, nbytes: int, of_device: bool = False) -> int:
        """Give up to ``nbytes`` bytes, and return how many. Never raises: an error of the giver stays with the giver."""


class Mates:
    """The sessions whose budgets follow the same memory, and the order of their locks.

    ``coming`` is taken before ``lock``: the first from asking for room to being laid out, the second from reading what is
    left to saying what of it is taken.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()  # from reading what is left to saying what of it is taken
        self.coming = threading.RLock()  # from asking for room to being laid out; taken before ``lock``
        self.order = PriorityOrder()
        # Another one with every change: who goes through it in a thread of its own is not disturbed.
        self.members: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._changing = threading.RLock()

    def join(self, member: BudgetMember) -> None:
        """Add ``member`` as the newest session."""
        with self._changing:
            self.order.only(self.members)  # some may have been dropped unclosed
            members = self.members.copy()
            members[id(member)] = member
            self.members = members
            self.order.join(id(member), member.priority)

    def leave(self, member: BudgetMember) -> None:
        """Remove ``member``, whose session ended or has another budget now."""
        with self._changing:
            members = self.members.copy()
            members.pop(id(member), None)
            self.members = members
            self.order.leave(id(member))


# Those that a session has. A place may be the id of something that lives as long as its sessions.
_devices: weakref.WeakValueDictionary[Hashable, Mates] = weakref.WeakValueDictionary()
_finding = threading.Lock()


def mates_on(place: Hashable) -> Mates:
    """Return the sessions with ``vram="auto"`` on the device that ``place`` names."""
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
        """The bytes that sessions hold."""
        return sum(each.promised_bytes - each.unused_bytes for each in list(self.mates.members.values()))

    @property
    def free_bytes(self) -> int:
        """Bytes that nobody holds or may hold without asking again, and that are kept for nobody."""
        return self.free_for(None)

    def free_for(self, member: BudgetMember | None) -> int:
        """Return the bytes that ``member`` may take beyond those that it holds."""
        return max(0, self.nbytes - self._spoken_for(member))

    def _spoken_for(self, member: BudgetMember | None) -> int:
        """Return the bytes that ``member`` holds or cannot have.

        These are promised to sessions, kept for parked ones, or kept for sessions that are still to come.
        """
        sessions = list(self.mates.members.values())
        taken = sum(each.promised_bytes for each in sessions)
        taken += sum(each.kept_bytes for each in sessions if each is not member)
        return self.later + taken - (0 if member is None else member.unused_bytes)

    def part_of(self, member: BudgetMember | None, nbytes: int, of: int | None = None) -> int:
        """Return the bytes that ``member``, with ``nbytes`` of weights, may ask other sessions to leave free.

        ``of``: the bytes to divide, the budget's where None.
        """
        if not self.by_size:
            return nbytes
        others = [other for other in self.mates.members.values() if other is not member and not other.closed]
        everything = nbytes + sum(other.everything_bytes for other in others)
        return min(nbytes, (self.nbytes if of is None else of) * nbytes // max(1, everything))

    def memory(self, device: Memory | None, member: BudgetMember | None = None) -> Memory:
        """Return what ``member`` may take of the budget, or of ``device`` where that has less left or more to grow into."""
        free = self.free_for(member)
        if device is not None:
            left = device.free - Governor.headroom(device)
            unheld = min(max(0, left), self._unheld(member)) if self.grows else 0
            if left - unheld < free or (self.grows and left - unheld > free):
                return replace(device, free=device.free - unheld)
        return Memory(self.nbytes, free, 0, 0 if device is None else device.ooms, weights_only=True)

    # -- one that grows

    def _unheld(self, member: BudgetMember | None) -> int:
        """Return the bytes promised to sessions other than ``member`` that the device may still report as free."""
        others = [each for each in list(self.mates.members.values()) if each is not member]
        return self.later + sum(each.kept_bytes + each.unheld_bytes for each in others)

    def could_be(self, memory: Memory, member: BudgetMember | None) -> int:
        """Return the bytes that the budget can rise to, given ``memory``, which `memory` returned for ``member``."""
        more = memory.free - Governor.headroom(memory) - self.free_for(member)
        return self.nbytes + (max(0, more) if self.grows and not memory.weights_only else 0)

    def rise(self, nbytes: int) -> None:
        """Raise the budget by ``nbytes``."""
        self.nbytes += max(0, nbytes)

    @property
    def grown(self) -> int:
        """The bytes that the budget rose by; negative after a pass ran out of memory."""
        return self.nbytes - self.first if self.grows else 0

    def fall(self) -> None:
        """Lower the budget to what is spoken for, after a pass ran out of memory."""
        if self.grows:
            self.nbytes = min(self.nbytes, self._spoken_for(None))

    def fall_back(self, least: int = 0, of: int | None = None) -> None:
        """Return to the first size for a new session, whose passes were not seen yet.

        Where other sessions hold more than the first size, keep ``least`` bytes for the new one, within the present size
        (or ``of`` bytes).
        """
        if self.grows:
            most = self.nbytes if of is None else of
            self.nbytes = max(self.first, min(most, self._spoken_for(None) + least))
