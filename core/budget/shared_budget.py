"""`SharedBudget`: one budget of device bytes for several sessions. `Mates`: the sessions that share memory.

The module `priority` decides which session gives way (gives up device bytes for another session) and
when. The module `ledger` carries that out for one session. A pass is one forward of a session's module. A
parked session holds no device memory until its next pass.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable
from dataclasses import replace
from typing import Any, Protocol

from ..common.errors import BudgetError
from ..common.memory_snapshot import Memory
from ..common.sizes import format_size, parse_size
from .device_governor import Governor
from .priority import PriorityOrder


class BudgetMember(Protocol):
    """The view that a shared budget, or another session, has of a session. All sizes are device bytes.

    `BudgetLedger` implements this protocol and explains each property.
    """

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
        """Give up to ``nbytes`` bytes to another session, and return the bytes given.

        Never raises: an error of the giving session must not reach the session that asks.
        """


class Mates:
    """The sessions whose budgets depend on the same memory: one device, or one shared budget.

    ``lock``: held from the reading of free bytes until the bytes taken are recorded. ``coming``: held by
    a new session from its request for bytes until the session is laid out; a thread that takes both locks
    takes ``coming`` first. ``order``: decides which session gives way. ``members``: id of a session's
    ledger -> ledger.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.coming = threading.RLock()
        self.order = PriorityOrder()
        # Every change replaces the dictionary, so that other threads can iterate over the old one
        # undisturbed.
        self.members: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._changing = threading.RLock()

    def join(self, member: BudgetMember) -> None:
        """Add ``member`` as the newest session."""
        with self._changing:
            self.order.only(self.members)  # sessions may have been dropped without being closed
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


# Place -> the sessions there, for as long as any session refers to them. A place may be the id of an
# object that lives as long as its sessions.
_devices: weakref.WeakValueDictionary[Hashable, Mates] = weakref.WeakValueDictionary()
_finding = threading.Lock()


def mates_on(place: Hashable) -> Mates:
    """Return the sessions with ``vram="auto"`` on the device that ``place`` names."""
    with _finding:
        return _devices.setdefault(place, Mates())


class SharedBudget:
    """The most bytes of weights that several sessions hold together.

    Pass the same object as ``vram`` to each session. Each session holds the bytes that the other sessions
    leave. To a new session the others give way, down to one slot each. Later, bytes move to a session that is
    short of memory and used much more than others. A parked session holds no bytes, but its least bytes are
    reserved for its return.

    ``size``: bytes, or a string such as "12GiB" or "12GB". ``by_size``: a new session asks the others for
    no more than its share of the budget in proportion to the sizes of the models, which suits models that
    are used in turns. ``grows``: ``size`` is a first guess, and the budget rises by the device memory
    that passes leave free, as with ``vram="auto"``. Raises BudgetError if ``size`` is not a valid size.

    Attributes: ``nbytes``: the present budget in bytes; ``mates``: the sessions.
    """

    def __init__(self, size: int | str, *, by_size: bool = False, grows: bool = False) -> None:
        try:
            self.nbytes = parse_size(size, setting="SharedBudget")
        except ValueError as error:
            raise BudgetError(str(error)) from error
        self.by_size, self.grows = by_size, grows
        self.first = self.nbytes  # first budget in bytes, restored when a new session has not run a pass yet
        self.later = 0  # bytes reserved for sessions that are still to be created
        self.mates = Mates()

    def __repr__(self) -> str:
        return f"SharedBudget({format_size(self.nbytes)})"

    @property
    def held_bytes(self) -> int:
        """The bytes that sessions hold."""
        return sum(each.promised_bytes - each.unused_bytes for each in list(self.mates.members.values()))

    @property
    def free_bytes(self) -> int:
        """Bytes of the budget that no session holds and that are neither promised nor reserved."""
        return self.free_for(None)

    def free_for(self, member: BudgetMember | None) -> int:
        """Return the bytes that ``member`` may take in addition to the bytes that it holds."""
        return max(0, self.nbytes - self._spoken_for(member))

    def _spoken_for(self, member: BudgetMember | None) -> int:
        """Return the bytes of the budget that ``member`` holds or cannot have.

        These bytes are promised to sessions, reserved for parked sessions, or reserved for sessions that
        are still to be created.
        """
        taken = 0
        for each in list(self.mates.members.values()):
            # Only one of the two numbers is above 0: a parked session has kept bytes, any other promised bytes.
            # A session of another thread may park between the two reads. It then counts by the promised bytes,
            # which are at least as many. No session can take bytes between the reads, if the caller holds the
            # lock of the sessions.
            promised = each.promised_bytes
            taken += promised if each is member else max(promised, each.kept_bytes)
        return self.later + taken - (0 if member is None else member.unused_bytes)

    def part_of(self, member: BudgetMember | None, nbytes: int, of: int | None = None) -> int:
        """Return the bytes that ``member`` may ask other sessions to leave free.

        ``nbytes``: the bytes of all weights of ``member``. ``of``: the bytes to divide among the sessions;
        None: the whole budget.
        """
        if not self.by_size:
            return nbytes
        others = [other for other in self.mates.members.values() if other is not member and not other.closed]
        everything = nbytes + sum(other.everything_bytes for other in others)
        return min(nbytes, (self.nbytes if of is None else of) * nbytes // max(1, everything))

    def memory(self, device: Memory | None, member: BudgetMember | None = None) -> Memory:
        """Return a snapshot of the memory that ``member`` may take.

        The snapshot is ``device`` if the device has fewer bytes left than the budget, or if the device has
        more bytes left and the budget grows. In a growing budget, bytes that are promised to other sessions
        and not on the device yet do not count as free. Otherwise the snapshot is a `Memory` for weights only,
        made of the budget.
        """
        free = self.free_for(member)
        if device is not None:
            left = device.free - Governor.headroom(device)
            unheld = min(max(0, left), self._unheld(member)) if self.grows else 0
            if left - unheld < free or (self.grows and left - unheld > free):
                return replace(device, free=device.free - unheld)
        return Memory(self.nbytes, free, 0, 0 if device is None else device.ooms, weights_only=True)

    # -- a budget that grows

    def _unheld(self, member: BudgetMember | None) -> int:
        """Return the bytes promised to sessions other than ``member`` that the device may still report as free."""
        others = [each for each in list(self.mates.members.values()) if each is not member]
        return self.later + sum(each.kept_bytes + each.unheld_bytes for each in others)

    def could_be(self, memory: Memory, member: BudgetMember | None) -> int:
        """Return the bytes to which the budget can rise; ``memory``: the result of `memory` for ``member``."""
        more = memory.free - Governor.headroom(memory) - self.free_for(member)
        return self.nbytes + (max(0, more) if self.grows and not memory.weights_only else 0)

    def rise(self, nbytes: int) -> None:
        """Raise the budget by ``nbytes``."""
        self.nbytes += max(0, nbytes)

    @property
    def grown(self) -> int:
        """The bytes by which the budget exceeds the first budget.

        The number may be negative after a pass ran out of memory.
        """
        return self.nbytes - self.first if self.grows else 0

    def fall(self) -> None:
        """Lower a growing budget to the bytes that are promised and reserved, after a pass ran out of memory."""
        if self.grows:
            self.nbytes = min(self.nbytes, self._spoken_for(None))

    def fall_back(self, least: int = 0, of: int | None = None) -> None:
        """Set a growing budget back to its first size, because a new session has not run a pass yet.

        If other sessions hold more than the first size, keep ``least`` bytes for the new session in
        addition, within the present budget (or within ``of`` bytes).
        """
        if self.grows:
            most = self.nbytes if of is None else of
            self.nbytes = max(self.first, min(most, self._spoken_for(None) + least))
