"""`Slot`: a range of device memory for one unit. `SlotState` and `NEXT`: its states, and which may follow which.
`SlotWaiters`: host threads that wait, with a deadline, until another thread no longer uses a slot.

A unit is a group of weights that cross to the device together. What a slot holds, and who uses it, is one frozen
`SlotRecord`. `Pool` (pool.py) alone writes it, and replaces it in one assignment, so that a KeyboardInterrupt between any
two lines leaves a record that is true.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from enum import Enum, auto
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from ..common.errors import BrokenRuleError

if TYPE_CHECKING:
    from .pool_memory import Chunk

NO_MEMORY = torch.empty(0, dtype=torch.uint8)  # stands for memory that was given back


class SlotState(Enum):
    """What lies in a slot, as seen by the host when it issues work to the device."""

    FREE = auto()  # not the unit's bytes; others may lie there
    FILLING = auto()  # the host is issuing the copy of the unit's bytes; not readable yet
    CACHED = auto()  # the unit's bytes, which nobody uses; readable after the event of the copy
    IN_USE = auto()  # the unit's bytes; a forward, a backward or an operator uses them
    HELD = auto()  # the unit's bytes, which the program (autograd, for instance) keeps a view of
    LOST = auto()  # no memory: other programs took the pages of the VBAR in which the slot lies

    # Enum's own hash is a Python function, which three look-ups of each `enter` would call.
    __hash__ = object.__hash__


class _Following(dict[SlotState, SlotState]):
    """The states that may follow ``present``. Indexing with one of them returns it, at the cost of no Python call.

    Indexing with another state raises BrokenRuleError.
    """

    def __init__(self, present: SlotState, following: set[SlotState]) -> None:
        super().__init__((state, state) for state in following)
        self._present = present

    def __missing__(self, following: SlotState) -> SlotState:
        allowed = ", ".join(sorted(state.name for state in self))
        raise BrokenRuleError("P8", f"one of {allowed} after {self._present.name}", following.name)


class Issue(Enum):
    """What `Pool.issue` answers.

    ``TAKEN``: the place was taken, and the caller copies. ``PRESENT``: the unit is there already, or on its way.
    ``REFUSED``: the place is in use.
    """

    TAKEN = auto()
    PRESENT = auto()
    REFUSED = auto()


_S = SlotState
# A state is changed by `slot.now = SlotRecord(NEXT[present][following], ...)`, and by nothing else (rule P8).
NEXT: Mapping[SlotState, _Following] = {
    # FREE again: the slot takes over the events that the copy into it will wait for.
    _S.FREE: _Following(_S.FREE, {_S.FREE, _S.FILLING, _S.LOST}),
    # IN_USE: users waited for the copy. FREE: the copy failed or was interrupted.
    _S.FILLING: _Following(_S.FILLING, {_S.CACHED, _S.IN_USE, _S.FREE}),
    _S.CACHED: _Following(_S.CACHED, {_S.IN_USE, _S.FREE, _S.LOST}),
    # IN_USE again: one user more or less. FREE: the pool was closed during the use.
    _S.IN_USE: _Following(_S.IN_USE, {_S.IN_USE, _S.CACHED, _S.HELD, _S.FREE}),
    # FREE: the pool gave the memory back, and the view keeps it alive; or the unit has another slot by now.
    _S.HELD: _Following(_S.HELD, {_S.IN_USE, _S.CACHED, _S.FREE}),
    _S.LOST: _Following(_S.LOST, {_S.FREE}),
}


class User:
    """Who uses slots: one thread on one stream, at one depth of nested uses. Users are compared by identity.

    ``thread``: the id of the thread, which `Pool.abandon` is given. ``stream``: the stream whose kernels read the slots.
    """

    __slots__ = ("thread", "stream")

    def __init__(self, thread: int, stream: Any) -> None:
        self.thread, self.stream = thread, stream


NOBODY: frozenset[User] = frozenset()
NO_STREAMS: frozenset[Any] = frozenset()
NO_EVENTS: Mapping[Any, Any] = MappingProxyType({})


class SlotRecord(NamedTuple):
    """All that changes in a slot. Which fields count depends on the state.

    ``version``: of the weights that were copied. ``users``: who uses the bytes, or waits for them while FILLING.
    ``copied``: the event after which the bytes are there. ``waited``: the streams that wait for ``copied`` already.
    ``reads``: the event after the last read since the copy, by stream; never changed in place.
    ``after``: the events that a copy into the slot has to wait for, while FREE or FILLING.
    ``held``: whether the program kept a view when one of the users left. ``thread``: the id of the thread that issues the
    copy, while FILLING.
    """

    state: SlotState
    version: int = 0
    users: frozenset[User] = NOBODY
    copied: Any = None
    waited: frozenset[Any] = NO_STREAMS
    reads: Mapping[Any, Any] = NO_EVENTS
    after: tuple[Any, ...] = ()
    held: bool = False
    thread: int = 0


# Makes a record of all nine fields at once. The class itself, which has defaults, takes twice as long.
record: Callable[[tuple[Any, ...]], SlotRecord] = partial(tuple.__new__, SlotRecord)


class SlotUnit(Protocol):
    """What the pool knows of a unit: a name for errors, and its bytes (more than 0). Units are compared by identity."""

    @property
    def name(self) -> str: ...
    @property
    def nbytes(self) -> int: ...


class Slot:
    """The range of ``chunk`` from ``offset`` that holds ``unit``. A slot is made once and filled many times.

    ``base``: exactly the unit's bytes, with a storage of its own where possible. ``target``: the same memory for copies;
    writing to it does not raise the version counter that autograd checks.
    ``views``: what the owner of the pool made of ``base``; the pool only calls its `kept_elsewhere`.
    """

    __slots__ = ("unit", "chunk", "offset", "end", "base", "target", "views", "now", "__weakref__")

    def __init__(self, unit: SlotUnit, chunk: Chunk, offset: int, base: torch.Tensor) -> None:
        self.unit, self.chunk, self.offset, self.end = unit, chunk, offset, offset + unit.nbytes
        self.base, self.target = base, base.data
        self.views: Any = None
        self.now = SlotRecord(SlotState.FREE)

    @property
    def state(self) -> SlotState:
        """The slot's state."""
        return self.now.state

    @property
    def after(self) -> tuple[Any, ...]:
        """The events that the copy into the slot has to wait for, while it is FILLING."""
        return self.now.after

    @property
    def gone(self) -> bool:
        """Whether the memory was given back, so that the slot cannot be filled any more."""
        return self.target is NO_MEMORY

    @property
    def kept(self) -> bool:
        """Whether the program keeps a view of the slot now."""
        return self.views is not None and self.views.kept_elsewhere()

    def forget_memory(self) -> None:
        """Drop the references to the memory, which is given back."""
        self.views = None
        self.base = self.target = NO_MEMORY


_PATIENCE = 20.0  # seconds that a thread waits for a slot that other threads use
_POLL = 0.001  # seconds between checks whether other threads have dropped their views


class SlotWaiters:
    """The threads of one session that wait for a slot. Must be called under ``lock``, which protects the slots.

    ``asleep``: ids of the threads that wait now. `Pool.leave` reads the set instead of calling a method.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self._freed = threading.Condition(lock)
        self.asleep: set[int] = set()
        self._used: dict[int, int] = {}  # by waiting thread: the number of slots that the thread itself uses

    @property
    def sleeping(self) -> int:
        """The number of threads that wait now."""
        return len(self.asleep)

    def forget(self) -> None:
        """Forget which threads wait. Called while none does."""
        self.asleep.clear()
        self._used.clear()

    def forget_thread(self, thread: int) -> None:
        """Forget that ``thread`` waits, because an interrupt has ended that."""
        self.asleep.discard(thread)
        self._used.pop(thread, None)

    def new_deadline(self) -> float:
        """Return the time (`time.monotonic`, in seconds) at which a thread that begins to wait now has to
        give up.
        """
        return time.monotonic() + _PATIENCE

    def slot_freed(self) -> None:
        """Wake all waiting threads, because a slot was released."""
        if self.asleep:
            self._freed.notify_all()

    def wait_for_slot(self, mine: int, used: int, views_may_be_dropped: bool, deadline: float) -> bool:
        """Wait until another thread releases a slot. Returns False if waiting cannot help or the deadline has
        passed.

        ``mine``: number of slots that this thread uses.
        ``used``: number of slots that all threads use.
        ``views_may_be_dropped``: another thread keeps a view of a slot (for instance in the traceback of a
        checkpoint's early stop), and may drop the view at any time without a notification.
        """
        left = max(0.0, deadline - time.monotonic())
        # Waiting helps only if a thread that does not itself wait uses a slot.
        if used - mine > sum(self._used.values()):
            thread = threading.get_ident()
            try:
                self._used[thread] = mine
                return self._sleep(left)
            finally:
                self._used.pop(thread, None)
        if views_may_be_dropped:
            self._sleep(min(left, _POLL))
            return left > 0
        return False

    def _sleep(self, seconds: float) -> bool:
        """Wait for a notification, at most ``seconds``. Returns whether there was a notification."""
        thread = threading.get_ident()
        try:
            self.asleep.add(thread)
            return self._freed.wait(seconds)
        finally:
            self.asleep.discard(thread)
