"""Defines `Run`: the uses of the units of one layout, from the hook of a unit to the copies of the next ones.

A unit is a group of weights that cross to the device together. A slot is the device memory that holds a unit. The pool
(`device.pool.Pool`) knows what lies in each slot and who uses it. The schedule (`plan.schedule.Schedule`) is a table made
once for an order of uses: one place in the region for each fetch, and the fetches to issue after each use. A pass plans
nothing. Each use of a unit takes two steps:

1. The hook of a unit calls `enter`. The pool is asked for the unit. If it is there, the current stream waits for the
   event of its copy. Views of the slot take the places of the weights in the unit's modules, and their own forward runs.
2. The hook calls `leave`. The weights' own tensors go back to their places. The pool records an event of the reads. The
   fetches that the schedule has for this position are issued: the pool takes the place, the store copies to it. A fetch
   whose place is still in use, or whose bytes are not read from disk yet, is tried again at the next use, and those
   behind it wait, because the link copies in the order of issue.

Backward passes (backward.py) and single operators (forwards.py) use units by the same two steps, `acquire` and `release`.
What is seldom lies behind one test each: a unit that is not there, because no schedule foresaw the use or its copy was
late (`_fault`); steps that are timed; uses that end later than the forward; views that the model wrote to or keeps. Where
the order of uses is not known (the first backward, or a module that is used in a new way), each unit is a fault, until a
pass begins whose order is known. What the schedule says is never relied on: the pool refuses a copy over bytes in use.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..common.errors import BudgetError
from ..device.slot import Issue, SlotState, User
from ..model.interpose import is_exporting as exporting
from ..model.interpose import tracing
from ..model.managed_tensor import pop_handles, push_handles, refuse_transforms, transforms
from .no_room import no_room
from .unit import StreamedUnit, UnitSlot, UnitSlots

if TYPE_CHECKING:
    from ..device.pool import Pool
    from .streamer import Streamer

_get_thread = threading.get_ident
_records_gradients = torch.is_grad_enabled
_graph_task = torch._C._current_graph_task_id  # -1 outside backward passes
_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack

# One run of a unit's forward: the unit, its slot, the user of the slot, and whether gradients are recorded.
Entered = tuple[StreamedUnit, UnitSlot, User, bool]


class Run:
    """The uses of the units of one layout. Must be called under the streamer's lock, but for `enter` and `leave`.

    ``pool``: the units on the device. ``slots``: the slots that were made, with their views. ``held``: those of which the
    model keeps views beyond the unit's forward. ``local``: what runs on the present thread. ``issuing``: threads that are
    taking a place or issuing a copy. ``fetched``: the number of copies so far. ``entering``: the name of the unit that is
    entered now, where steps are timed. ``may_move``: whether a unit that nobody uses may be fetched to another place, for
    others to fit beside it.
    """

    may_move = True

    def __init__(self, streamer: Streamer, pool: Pool) -> None:
        self._streamer, self.lock = streamer, streamer.lock
        self.pool, self.local = pool, streamer.forwards.local
        self.slots = UnitSlots(pool.memory)
        self.held: list[Any] = []
        self.issuing: set[int] = set()
        self.fetched = 0
        self.entering = ""

    # -- a unit's own forward

    def enter(self, unit: StreamedUnit) -> Entered:
        """Acquire the unit's slot, and put views of it into the unit's modules. Called before the unit's forward; `leave`
        undoes this.
        """
        if _modes() or tracing() is not None or transforms() is not None or exporting():
            refuse_transforms(unit.name)
        mine, gradient, streamer = self.local.mine, _records_gradients(), self._streamer
        with self.lock:
            user, stream = mine.user, streamer.engine.stream()
            if user is None or user.stream != stream or unit.depth:
                user = mine.user = User(_get_thread(), stream)
            entered = unit, self.acquire(unit, user), user, gradient
            mine.entered.append(entered)
            self._show(entered)
        if gradient:
            push_handles(streamer)
        return entered

    def leave(self, entered: Entered) -> None:
        """Put the host tensors back into the unit's modules, and release the slot. Called after the unit's forward."""
        _, _, _, gradient = entered
        if gradient:
            pop_handles(self._streamer)
        with self.lock:
            running = self.local.mine.entered
            if running and running[-1] is entered:
                running.pop()
                self.end(entered)
            elif entered in running:  # runs that began later have not ended
                running.remove(entered)
                self.end(entered)
            # else it was ended already, when the root's forward ended

    def end(self, entered: Entered) -> None:
        """Do the work of `leave` for a run that is no longer among the thread's runs."""
        unit, slot, user, gradient = entered
        unit.depth -= 1
        clean = continues = False
        try:
            if unit.depth == 0:
                unit.hide()
                views = slot.views
                clean = not unit.backing.trainable and views is not None and views.untouched()
                if not clean:
                    self._streamer.forwards.write_back(slot)
                continues = gradient and self._streamer.backward.continue_use(slot, user)
        finally:
            if continues:
                self.local.mine.user = None  # the backward pass goes on as this user
            else:
                self.release(slot, (user,), clean)

    def _show(self, entered: Entered) -> None:
        """Put views of the slot into the unit's modules, unless a run around this one has done so."""
        unit, slot, user, gradient = entered
        unit.depth += 1
        trainable = unit.backing.trainable
        if unit.depth > 1 and not (gradient and trainable and not unit.differentiable):
            return
        try:
            if not trainable:
                unit.show(slot.views.tensors)
                return
            unit.hide()
            autocast = torch.is_autocast_enabled(self._streamer.engine.device.type)
            unit.show_trainable(slot.views.tensors, gradient, autocast)
        except Exception:
            self.local.mine.entered.remove(entered)
            self.end((unit, slot, user, False))
            raise

    # -- uses of slots

    def acquire(self, unit: StreamedUnit, user: User, backward: bool = False) -> UnitSlot:
        """Return the unit's slot, which kernels on the stream of ``user``, the current one, may read from now on. Every
        call is paired with `release`.

        ``backward``: whether the slot is used to compute gradients. Raises BudgetError if the units that are in use
        or kept by the program leave no room for this one.
        """
        if _modes():  # fake tensors and operator counters, for instance, must not see Carom's copies
            with _disable_current_modes():
                return self.acquire(unit, user, backward)
        streamer = self._streamer
        if streamer.closed or streamer.torn:
            streamer.check_open(unit)
        if self.held or streamer.backward.has_uses:
            self.end_finished_uses(unit)
        follower, meter, in_backward = streamer.follower, streamer.meter, _graph_task() != -1
        if in_backward:
            streamer.backward.register_pass()
        follower.begin_use(unit.index, backward, in_backward)
        came = None
        if meter.timing:
            self.entering = unit.name
            came = streamer.engine.mark() if meter.profiling else None
        slot: Any = self.pool.enter(unit, unit.version(), user)
        if slot is None:
            slot = self._fault(unit, user)
        if came is not None:
            meter.unit_begins(unit.name, came, streamer.engine.mark())
        if follower.due:
            self.issue_due()
        return slot

    def acquire_anew(self, slot: Any) -> User:
        """Let the current stream read a slot that this thread uses on another stream. Returns the further user of it."""
        user = User(_get_thread(), self._streamer.engine.stream())
        self.entering = slot.unit.name
        self.pool.enter(slot.unit, slot.now.version, user)
        return user

    def computes_gradients(self, slot: Any) -> None:
        """Note that a slot in use is now used to compute gradients."""
        self._streamer.follower.begin_use(slot.unit.index, True, _graph_task() != -1)

    def release(self, slot: Any, users: Sequence[User], clean: bool = False) -> None:
        """End the uses of the slot by ``users``, whose kernels have been issued.

        ``clean``: whether it is known that the model neither wrote to the slot nor keeps views of it.
        """
        streamer, unit = self._streamer, slot.unit
        if streamer.meter.profiling:
            streamer.meter.unit_ends(unit.name, streamer.engine.mark())
        # The pool may have been closed since, which ends all uses.
        if slot.now.state is SlotState.IN_USE:
            self.leave_pool(slot, users, clean)
        follower = streamer.follower
        follower.end_use(unit.index)
        if follower.due:
            self.issue_due()
        if not streamer.store.complete:
            streamer.read_ahead()  # T4 of stores/store.py

    def leave_pool(self, slot: Any, users: Sequence[User], clean: bool) -> None:
        """Let the pool record the reads by ``users``. ``clean``: as in `release`."""
        held = False
        if not clean and len(slot.now.users) <= len(users):
            if slot.unit.backing.trainable:
                slot.unit.empty_proxies()
            held = slot.views.kept_elsewhere() and slot.views.kept_by_model(slot.unit)
        try:
            for user in users:
                self.pool.leave(slot, user, held)
        except BaseException:
            self.pool.abandon(_get_thread())
            raise
        if held and slot.now.state is SlotState.HELD and slot not in self.held:
            self.held.append(slot)

    def release_all(self, uses: Sequence[tuple[UnitSlot, Sequence[User]]]) -> None:
        """Release the slots of all ``uses``, even if a release fails. Raises the first error afterwards."""
        failure: BaseException | None = None
        for slot, users in uses:
            try:
                self.release(slot, users)
            except BaseException as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def end_finished_uses(self, unit: StreamedUnit | None = None) -> None:
        """End uses of slots that are over: those of a backward pass that goes on to ``unit``, and those of
        slots whose views were dropped.
        """
        self.release_all(self._streamer.backward.take_finished_uses(unit))
        if self.held:
            for slot in self.held:
                self._streamer.forwards.write_back(slot)
            self.held = [slot for slot in self.held if slot.state is SlotState.HELD and slot.kept]

    # -- fetches

    def issue_due(self) -> None:
        """Issue the fetches that are due, in their order. Stops at the first one whose place is in use, whose bytes are not
        read yet, or whose weights the optimizer has still to update.
        """
        if _get_thread() in self.issuing:
            return  # the garbage collector or a signal has called code that uses a unit (T2 of stores/store.py)
        streamer = self._streamer
        follower, store = streamer.follower, streamer.store
        due = follower.due
        while due and (schedule := follower.schedule) is not None:
            number = due[0]
            unit = streamer.units[schedule.unit_of[number]]
            if streamer.awaiting_optimizer and unit.backing.trainable:
                break
            if not store.ready(unit.backing):  # T3 of stores/store.py
                break
            slot = self.slots[unit, schedule.offsets[number]]
            issued = self.pool.issue(slot, unit.version())
            if issued is Issue.REFUSED:
                break
            if issued is Issue.TAKEN:
                self.copy_unit(slot)
            # A use that began and ended during the copy may have changed what is due.
            if due and due[0] == number:
                due.popleft()

    def copy_unit(self, slot: Any) -> None:
        """Copy the unit of ``slot`` into it, if the pool has taken the place for that."""
        now = slot.now
        if now.state is not SlotState.FILLING:
            return
        self.issuing.add(now.thread)
        streamer = self._streamer
        try:
            target = (slot.views or self.slots.views(slot)).target
            copied = streamer.store.fetch(slot.unit.backing, target, now.after, streamer.transfer)
        except Exception:
            self.pool.cancel_copies(now.thread)
            raise
        finally:
            self.issuing.discard(now.thread)
        self.pool.complete(slot, copied)
        self.fetched += 1

    def _fault(self, unit: StreamedUnit, user: User) -> Any:
        """Fetch a unit that is needed now and is not on the device."""
        streamer = self._streamer
        offset, version = streamer.follower.offset_now(), unit.version()
        if offset is not None:
            # In its place, so that a fetch that was late overwrites nothing that is needed sooner.
            slot = self.slots[unit, offset]
            if self.pool.issue(slot, version) is Issue.TAKEN:
                self.copy_unit(slot)
                return self.pool.enter(unit, version, user)
        self.issuing.add(user.thread)
        try:
            (found,) = self.pool.fault({unit: version}, user)
        except BudgetError as error:
            if not streamer.torn:
                raise no_room(streamer, unit, error) from None
        finally:
            self.issuing.discard(user.thread)
        if streamer.torn:  # an interrupt of another thread came while this one waited
            streamer.check_open(
                unit
            )  # it brings the slots into order, which gives up the slot that was found
            return self._fault(unit, user)
        self.copy_unit(found)
        return found
