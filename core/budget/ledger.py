"""`BudgetLedger`: account for the device bytes that a session holds, was promised, and may give to others.

The rules are in `device_governor`, `shared_budget` and `priority`. The ledger applies these rules to one
session, which it accesses through the `Holder` protocol. A session "gives way" when it moves resident
weights off the device, or gives up promised bytes, so that another session can have the memory.

A pass is one forward of the session's module. A unit is a module whose weights are copied to the device
together. Units that stay on the device are resident; the others are streamed, that is, copied for each use. A
layout is the arrangement of a session's weights for a budget: which units are resident, and the device memory
for the others. A parked session holds no device memory and makes a new layout before its next pass. A VBAR is a
range of device addresses whose memory comfy-aimdo takes away when an allocation needs memory. The bytes promised
to a session are those that its weights take, or may take without asking again.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ..common.errors import BudgetError
from ..common.memory_snapshot import Memory
from ..common.sizes import format_size
from ..device.engine import Engine
from .device_governor import LOW, Governor, wherever
from .holder import Holder
from .shared_budget import Mates, SharedBudget

logger = logging.getLogger("carom")


class BudgetLedger:
    """The only object that changes a session's VRAM budget.

    ``vram``: the session's budget in bytes. ``priority``: sessions of lower priority give way first.
    ``shared``: the `SharedBudget` that the session takes part in, or None. ``mates``: the sessions that
    use the same memory, or None. ``governor``: the rule that lets the budget follow the device's free
    memory, or None for a fixed budget.
    """

    def __init__(self, engine: Engine, shared: SharedBudget | None) -> None:
        self._engine = engine
        self.shared = shared
        self.mates: Mates | None = None
        self.governor: Governor | None = None
        self._vram = 0
        self.priority = 0
        self._holder: Holder | None = None
        self._laying = 0  # bytes promised to a layout that is being made; 0 if none is
        self._keeps = 0  # bytes of a shared budget reserved for the session's return from being parked
        # The most cached bytes of the allocator (memory that passes use) seen when the session was parked.
        self._passing = 0
        self._peak = self._peak_under = 0  # the most bytes held, and the budget at that time

    def follow(self, holder: Holder) -> None:
        """Begin to account for the weights of ``holder``, the ledger's session."""
        self._holder = holder

    @property
    def holder(self) -> Holder:
        """The session that the ledger accounts for."""
        assert self._holder is not None
        return self._holder

    # -- the budget

    @property
    def vram(self) -> int:
        """The session's budget in bytes."""
        return self._vram

    def set(self, budget: int) -> None:
        """Set the session's budget to ``budget`` bytes."""
        self._vram = budget

    def allot(self, budget: int) -> None:
        """Set the session's budget to ``budget`` bytes, or to fewer where a shared budget leaves fewer."""
        with self.taking():
            self._vram = min(budget, self.most(budget))

    def most(self, otherwise: int) -> int:
        """Return the largest budget that a shared budget allows; ``otherwise`` if no budget is shared."""
        if self.shared is None:
            return otherwise
        return self.promised_bytes - self.unused_bytes + self.shared.free_for(self)

    def most_grown(self, memory: Memory, most: int, everything: int) -> int:
        """Return the largest budget that the session can have if a shared budget rises as ``memory`` allows.

        ``most``: the largest budget without that rise, returned where no rise is possible;
        ``everything``: bytes of all of the session's weights.
        """
        shared = self.shared
        if shared is None or self.holder.pool_promise is not None:
            return most
        total = shared.could_be(memory, self)
        return max(most, min(most + total - shared.nbytes, shared.part_of(self, everything, total)))

    def memory(self) -> Memory | None:
        """Return the device memory as the session may use it; None if the device's memory is unknown."""
        device, holder = self._engine.memory(), self.holder
        if device is not None and not self._engine.counts_all_memory:
            # The total lacks a VBAR's pages, because torch's allocator does not count them for this
            # process.
            device = replace(device, total=device.total + holder.vbar_bytes)
        waiting = holder.waiting_bytes
        if device is not None and waiting is not None:
            device = wherever(device, waiting)
        return device if self.shared is None else self.shared.memory(device, self)

    # -- what is held and promised

    @property
    def closed(self) -> bool:
        """Whether the session has no layout yet or was closed."""
        return self.holder.closed

    @property
    def held_bytes(self) -> int:
        """Device memory that the session's weights take now."""
        return self.holder.held_bytes

    @property
    def everything_bytes(self) -> int:
        """The bytes that all of the session's weights would take on the device."""
        return self.holder.everything_bytes

    @property
    def least_bytes(self) -> int:
        """The smallest budget that works for the session."""
        return self.holder.least_bytes

    @property
    def promised_bytes(self) -> int:
        """Device bytes that weights take, or may take under a shared budget without asking the budget again."""
        laying = self._laying  # read once, because another thread may end the layout meanwhile
        if laying:
            return laying
        holder = self.holder
        if not holder.attached:
            return 0
        if holder.pool_promise is not None:
            return holder.pool_promise
        held = holder.held_bytes
        return held if self.shared is None else max(held, min(self._vram, holder.everything_bytes))

    @property
    def unused_bytes(self) -> int:
        """The promised bytes that no weight takes now.

        The number is 0 while a layout is being made, if no layout is in effect, and for a session with a VBAR.
        """
        none = self._laying or not self.holder.attached or self.holder.pool_promise is not None
        return 0 if none else self.promised_bytes - self.held_bytes

    @property
    def unheld_bytes(self) -> int:
        """The promised bytes that may not be on the device yet; all of them while a layout is being made."""
        laying = self._laying  # read once, as in `promised_bytes`
        if laying:
            return laying
        return max(0, self.promised_bytes - self.held_bytes) if self.holder.attached else 0

    @property
    def kept_bytes(self) -> int:
        """Bytes of a shared budget that are reserved for the session's return from being parked."""
        return 0 if self._laying or self.holder.attached else self._keeps

    @property
    def spare_bytes(self) -> int:
        """Bytes that the session could give to another session now; 0 while a pass is running."""
        with contextlib.ExitStack() as locks:
            return max(0, self.promised_bytes - self.least_bytes) if self.holder.hold_idle(locks) else 0

    # -- the most that was held

    @property
    def peak_bytes(self) -> int:
        """The most device bytes that weights took under the present budget."""
        return self._peak

    def begin_peak(self) -> None:
        """Forget the peak if the present budget is smaller than the budget of that peak."""
        if self._vram < self._peak_under:
            self._peak = 0
        self._peak_under = self._vram

    def note_held(self, nbytes: int) -> None:
        """Note that weights take ``nbytes`` bytes of the device."""
        self.begin_peak()
        self._peak = max(self._peak, nbytes)

    # -- what others want

    def give(self, nbytes: int, of_device: bool = False) -> int:
        """Give up to ``nbytes`` bytes to another session, and return the bytes given.

        ``of_device``: the other session needs device memory, so promised bytes that are not held do not
        count. Never raises: if laying out the remaining weights fails, this session is parked, and its
        next forward tries again.
        """
        before = self.promised_bytes
        try:
            return self.release(nbytes, of_device)
        except Exception as error:
            # Log the error as text, because a log record that is kept would keep the frames of the
            # exception.
            logger.warning(
                "carom: %s could not give memory to another model: %s", self.holder.name, str(error)
            )
            return max(0, before - self.promised_bytes)

    def release(self, nbytes: int, of_device: bool = False) -> int:
        """Give up at most ``nbytes`` bytes of resident weights or promised bytes, and return the bytes given up.

        ``of_device``: see `give`. Return 0 for a fixed budget, while a pass is running, and while
        residents may not leave. Raises the errors of making a layout.
        """
        holder = self.holder
        with contextlib.ExitStack() as locks:
            if not holder.hold_idle(locks) or self.governor is None or not holder.may_give:
                return 0
            bounded = self.shared is not None and not of_device

            def has() -> int:
                return self.promised_bytes if bounded else self.held_bytes

            before = has()
            budget = max(self.least_bytes, before - nbytes)
            if budget >= before:
                return 0
            self.governor.gave()
            if bounded and holder.pool_promise is None and budget >= self.held_bytes:
                self._vram = budget  # no weight has to move: the bytes given up were promised but not held
                holder.account()
            else:
                holder.resize(budget)
            return max(0, before - has())

    def prioritize(self) -> None:
        """Let every other session on the same memory give way to this one first."""
        if self.mates is not None:
            self.priority = self.mates.order.highest(id(self))
            self.mates.order.set_priority(id(self), self.priority)
        else:
            self.priority = max(self.priority, 1)

    def deprioritize(self) -> None:
        """Let this session give way before every other one on the same memory."""
        if self.mates is not None:
            self.priority = self.mates.order.lowest(id(self))
            self.mates.order.set_priority(id(self), self.priority)
        else:
            self.priority = min(self.priority, -1)

    # -- what this session wants

    def ask(
        self, missing: int, of_device: bool = False, mates: Mates | None = None, needed: bool = False
    ) -> bool:
        """Let other sessions give up to ``missing`` bytes, and return whether any session gave bytes.

        ``of_device``: see `give`. ``mates``: the sessions to ask (default: those on the same memory).
        ``needed``: this session cannot run without these bytes, so sessions of higher priority give way
        too.
        """
        given = False
        mates = mates or self.mates
        if mates is not None and missing > 0:
            for key in mates.order.givers(id(self), needed):
                other = mates.members.get(key)
                if other is not None and missing > 0:
                    got = other.give(missing, of_device)
                    missing -= got
                    given = given or got > 0
        return given

    def make_room(self, budget: int, among: SharedBudget | None = None) -> bool:
        """Let other sessions give way if this new session's weights take more than ``budget`` bytes.

        ``among``: the shared budget that the session is about to join. Return whether the available bytes
        changed.
        """
        most = self.holder.loading_bytes
        shared = among or self.shared
        if shared is None:
            return self.ask(most - budget)
        grown, least = shared.grown, 0 if among is None else self.least_bytes
        most = max(least, shared.part_of(self, most, shared.nbytes - grown))
        given = self.ask(most - budget + grown, mates=shared.mates)
        shared.fall_back(least)
        return given or grown != 0

    def count_use(self) -> None:
        """Count a step that begins.

        If this session streams units and another session is used much less, let the other session give way.
        """
        mates = self.mates
        if mates is None or len(mates.members) < 2:
            return
        streamed, spare = self.holder.streamed_bytes, {}
        if streamed:
            spare = {
                key: other.spare_bytes for key, other in list(mates.members.items()) if other is not self
            }
        giver = mates.order.used(id(self), streamed > 0, spare)
        found = None if giver is None else mates.members.get(giver)
        if found is not None:
            found.give(self.holder.streamed_bytes)

    # -- locks of a shared budget

    def coming(self, shared: SharedBudget | None) -> contextlib.AbstractContextManager[Any]:
        """Return a lock that makes other new sessions of ``shared`` wait until this session is laid out."""
        return contextlib.nullcontext() if shared is None else shared.mates.coming

    def taking(self) -> contextlib.AbstractContextManager[Any]:
        """Return a lock under which no other session takes bytes of the shared budget."""
        return contextlib.nullcontext() if self.shared is None else self.shared.mates.lock

    def growing(self) -> contextlib.AbstractContextManager[Any]:
        """Return a lock under which no other session takes or frees memory of a shared budget that grows."""
        return self.taking() if self.shared is not None and self.shared.grows else contextlib.nullcontext()

    def may_grow(self, locks: contextlib.ExitStack) -> bool:
        """Hold the lock of `growing` until ``locks`` is closed; return False at once if the lock is taken."""
        if self.shared is None or not self.shared.grows:
            return True
        lock = self.shared.mates.lock
        if not lock.acquire(blocking=False):
            return False
        locks.callback(lock.release)
        return True

    # -- layouts

    @contextlib.contextmanager
    def laying_out(self) -> Iterator[None]:
        """Return a context, for the making of a layout, that keeps the promised bytes at their present number.

        The bytes that weights take may change inside the context without changing the promise.
        """
        with self.growing():
            before = self._laying
            self._laying = before or self.promised_bytes
            try:
                yield
            finally:
                self._laying = before

    def promise(self, nbytes: int) -> None:
        """Promise ``nbytes`` bytes to a session's first layout, or to the layout of a session that returns from
        being parked. 0 ends the promise.
        """
        self._laying = nbytes

    def claim(self, budget: int) -> bool:
        """Raise the promise to the layout that is being made to ``budget`` bytes; return True on success.

        Return False if the shared budget has too few free bytes.
        """
        with self.taking():
            more = budget - (self._laying or self._vram)
            if self.shared is not None and more > 0:
                if more > self.shared.free_for(self):
                    return False
                self._laying += more
            self._vram = max(self._vram, budget)
            return True

    def begin_with_least(self, least: int, had: int, error: BudgetError) -> None:
        """Set the budget to ``least`` bytes for a first layout.

        ``had``: bytes that the shared budget had free before other sessions gave way. If fewer than ``least``
        bytes are free, raises ``error``, or BudgetError if other sessions of the shared budget hold the
        missing bytes.
        """
        shared = self.shared
        if shared is not None:
            self.ask(least - shared.free_bytes, needed=True)
            shared.fall_back(least, had)
        free = self._engine.free_bytes() if shared is None else shared.free_bytes
        if least > free:
            if shared is None or least > shared.nbytes:
                raise error
            raise self.too_little(free, least) from error
        self._vram = least
        self._laying = 0 if shared is None else least

    # -- parked sessions

    def keep_least(self) -> None:
        """Reserve the parked session's least bytes for its return, if the budget is shared."""
        self._keeps = 0 if self.shared is None else self.least_bytes

    def leave_device(self) -> None:
        """Record the bytes that the allocator keeps for passes, before the session is parked."""
        memory = self.memory() if self.governor is not None else None
        self._passing = 0 if memory is None else max(self._passing, memory.cached)

    def return_to_device(self) -> None:
        """Choose the budget of a session that returns from being parked.

        If memory is short, other sessions give way first. Raises BudgetError if the session's least bytes
        are not free in a shared budget after that.
        """
        memory = self.memory()
        if self.governor is None or memory is None:
            return
        if self.mates is not None:
            self.mates.order.returned(id(self))
        passing = max(self._passing, memory.cached)  # bytes of free and cached memory that passes need

        def room(memory: Memory) -> int:
            return memory.free if memory.weights_only else memory.free + memory.cached - passing

        headroom = Governor.headroom(memory)
        budget, asked = self._vram, False
        if not memory.weights_only and room(memory) - int(LOW * headroom) < budget:
            asked = True
            if self.ask(budget + headroom - room(memory), of_device=True):
                memory = self.memory() or memory
            budget = min(budget, room(memory) - Governor.headroom(memory))
        if self.shared is not None:
            part = self.shared.part_of(self, self.everything_bytes)
            short = max(self.least_bytes, min(self._vram, part)) - self.shared.free_for(self)
            asked = asked or short > 0
            self.ask(short, needed=True)
        self._come_back(max(self.least_bytes, budget))
        if asked or self._vram < budget:
            self.governor.gave()

    # Set the budget and the promise to ``budget`` bytes, or to the free bytes of a shared budget if fewer.
    def _come_back(self, budget: int) -> None:
        with self.taking():
            least = self.least_bytes
            if self.shared is not None:
                left = self.shared.free_for(self)
                if left < least:
                    raise self.too_little(left, least)
                budget = min(budget, left)
            self._vram = self._laying = budget

    def too_little(self, left: int, least: int) -> BudgetError:
        """Return the error for a shared budget with ``left`` bytes free of the ``least`` bytes needed."""
        return BudgetError(
            f"{format_size(left)} of {self.shared} are left for {self.holder.name}, whose least is {least} bytes "
            f"({format_size(least)}): others hold the rest, and cannot give way now (they are in a step, or a graph still "
            "wants their weights); end their step, or give them less with set_budget(vram=...)",
            least,
        )
