"""Defines `Backward`: fetches units again in backward passes, when autograd asks for saved tensors, and sends
weight gradients to the host.

A unit is a group of streamed tensors. A slot is the device memory that holds a unit while it is used. A
handle is the object that autograd saves in place of a view of a slot. One `Backward` serves one streamer,
under the streamer's lock. A backward pass is registered when a gradient reaches a result of the forward, or at the first
use of a unit or delivery of a gradient in it. Autograd calls
a callback at the end of the pass; if the pass fails, autograd destroys the callback without a call. Within a
pass, each thread reads one unit at a time. A slot stays in use until autograd has dropped every view of the
slot that it was given.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..common.errors import CaromError, UnsupportedError
from ..device.slot import SlotState, User
from ..model import managed_tensor
from .gradients import GradientBuffers

if TYPE_CHECKING:
    from ..model.home import Home
    from .run import Run
    from .streamer import Streamer
    from .unit import StreamedUnit, UnitSlot

graph_task = torch._C._current_graph_task_id


@dataclass(eq=False)
class _SlotUse:
    """The use of one unit's slot by one thread of a backward pass.

    The use lasts until the thread needs another unit and autograd has dropped all ``views`` of the slot.
    ``users``: the users of the slot by the stream that reads it.
    """

    slot: UnitSlot
    users: dict[Any, User]
    thread: int
    views: list[weakref.ref] = field(default_factory=list)
    # False while the unit has only been recomputed, and no node has asked for a saved tensor to compute
    # gradients.
    gradients_began: bool = True

    @property
    def finished(self) -> bool:
        """Whether autograd has dropped all views of the slot."""
        for reference in self.views:  # noqa: SIM110 - a generator takes twice as long, at every turn
            if reference() is not None:
                return False
        return True


class _EndCallback:
    """A callback that autograd calls at the end of a backward pass. If it is destroyed without a call, the
    pass has failed.
    """

    _called = True  # until `__init__` has ended: an interrupt in it leaves nothing to report

    def __init__(self, backward: Backward, task: int) -> None:
        self._backward, self._task = backward, task
        self._called = False

    def __call__(self) -> None:
        """Report that the backward pass has ended."""
        try:
            self._called = True
            self._backward.end_pass(self._task)
        except BaseException as error:
            self._backward.ended_by(error, self._task)
            raise

    def __del__(self) -> None:
        """Report that the backward pass has failed, if the callback was never called."""
        try:
            if not self._called:
                self._backward.fail_pass(self._task)
        except BaseException as error:  # Python prints it, and raises nothing here
            self._backward.ended_by(error, self._task)
            raise


class Backward:
    """The backward passes of one streamer."""

    def __init__(self, streamer: Streamer, landings: GradientBuffers) -> None:
        self._streamer, self._gradient_buffers = streamer, landings
        # ids (autograd graph tasks) of the passes in progress, each with the thread that registered the pass
        self._tasks: dict[int, int] = {}
        # by thread id: the use of the unit that the thread reads now
        self._current_uses: dict[int, _SlotUse] = {}
        self._ending_uses: list[_SlotUse] = []

    @property
    def running(self) -> bool:
        """Whether a backward pass is in progress."""
        return bool(self._tasks)

    @property
    def has_uses(self) -> bool:
        """Whether a backward pass uses slots, or has used slots whose uses are not yet known to be over."""
        return bool(self._current_uses or self._ending_uses)

    def other_pass_active(self) -> bool:
        """Return whether a backward pass of another thread is in progress.

        The backward of a reentrant checkpoint runs within another pass of its thread, which cannot continue
        before this backward ends.
        """
        present, mine = graph_task(), threading.get_ident()
        return any(thread != mine and task != present for task, thread in self._tasks.items())

    def ended_by(self, error: BaseException, task: int) -> None:
        """Note that ``error`` ended the callback at the end of the pass with the id ``task``."""
        self._tasks.pop(task, None)
        self._streamer.ended_by(error)

    # -- a pass

    def begins(self) -> None:
        """Register the backward pass whose gradient has reached the root module's result."""
        try:
            with self._streamer.lock:
                self.register_pass()
        except BaseException as error:
            self._streamer.ended_by(error)
            raise

    def register_pass(self) -> None:
        """Register the current backward pass if it is not registered yet, and queue a callback for its end.

        Must be called under the streamer's lock.
        """
        task = graph_task()
        if task == -1 or task in self._tasks or self._streamer.closed:
            return
        # The callback is queued first, because it removes the task, also after an interrupt.
        torch.autograd.Variable._execution_engine.queue_callback(_EndCallback(self, task))
        self._tasks[task] = threading.get_ident()
        if len(self._tasks) == 1:
            self._streamer.meter.backward_begins()

    def end_pass(self, task: int) -> None:
        """End the pass with the id ``task``: wait for its gradients, and add them to ``.grad`` on the host."""
        streamer = self._streamer
        with streamer.lock:
            self._close_pass(task)
            landed = self._gradient_buffers.arrive(task)
            if not self._tasks:
                self._drop_proxies()
                if landed:
                    streamer.evict_trainable()
                streamer.meter.backward_ends()
            ended = not self._tasks
        landed.add_up(streamer.forwards.show_host_tensors)
        if ended:
            streamer.tier.end_backward()

    def fail_pass(self, task: int) -> None:
        """End the failed pass with the id ``task`` without gradients. Slots of which autograd still holds
        views are not reused yet.
        """
        streamer = self._streamer
        with streamer.lock:
            self._tasks.pop(task, None)
            self._gradient_buffers.forget(task)
            if streamer.closed:
                return
            if streamer.torn:
                streamer.try_recover()
                return
            self._close_pass(task)
            _cancel_failed_copies(streamer.run)
            if not self._tasks:
                self._drop_proxies()
                streamer.meter.abandon()

    def _close_pass(self, task: int) -> None:
        """Remove the pass with the id ``task``, and end its uses of slots of which autograd holds no view any
        more.
        """
        self._tasks.pop(task, None)
        if not self._tasks:
            for thread in list(self._current_uses):
                self._ending_uses.append(self._current_uses.pop(thread))
            self._streamer.forwards.drop_addressed()
        self._streamer.run.end_finished_uses()

    def _drop_proxies(self) -> None:
        """Let the next forward create new `Deliver` nodes for trainable weights.

        In a backward pass, autograd runs the newest ready node first. If a node was older than a forward, it
        would run after the whole backward of that forward, and until then the gradients of all weights would
        occupy device memory.
        """
        if not self._streamer.forwards.active:
            for unit in self._streamer.units:
                for proxy in unit.proxies if unit.backing.trainable else ():
                    proxy.tensor = None
                    proxy.forget_uses()

    # -- handles

    def handle(self, saved: torch.Tensor) -> managed_tensor.Handle:
        """Return the handle that autograd keeps in place of ``saved``, a view of a slot. Raises CaromError if
        the slot was reused.
        """
        streamer, address = self._streamer, saved.data_ptr()
        running = streamer.run.local.mine.entered
        slot: Any = running[-1][1] if running else None
        # A node mostly saves a weight of the unit that runs, whose slot is in use.
        if slot is None or not 0 <= address - slot.base.data_ptr() < slot.unit.nbytes:
            slot = streamer.slot_at(address)
        if slot is None:
            raise CaromError(
                "autograd saves a view of a slot that holds no unit any more; please report this"
            )
        unit, start = slot.unit, address - slot.base.data_ptr()
        return managed_tensor.Handle(self, unit, unit.in_graphs.token(), saved, start)

    def continue_use(self, slot: UnitSlot, user: User) -> bool:
        """Keep ``slot`` in use by ``user`` after a run of its unit if the run was a recomputation in this thread's
        backward pass. Returns whether it was.

        The next computation of the thread is that of the unit's gradients, which read the same slot. So no
        event has to be recorded, and no other unit has to be prefetched, before the gradients are computed.
        """
        thread = threading.get_ident()
        if graph_task() not in self._tasks or thread in self._current_uses or self._streamer.closed:
            return False
        self._current_uses[thread] = _SlotUse(slot, {user.stream: user}, thread, gradients_began=False)
        return True

    def unpack(self, handle: managed_tensor.Handle) -> torch.Tensor:
        """Fetch the unit of ``handle`` again, and return the saved tensor as a view of the unit's slot.
        Called for an autograd node.
        """
        streamer = self._streamer
        try:
            with streamer.lock:
                if graph_task() not in self._tasks:
                    self.register_pass()
                thread = threading.get_ident()
                use, stream = self._current_uses.get(thread), streamer.engine.stream()
                if use is None or use.slot.unit is not handle.unit:
                    user = User(thread, stream)
                    slot = streamer.run.acquire(handle.unit, user, backward=True)
                    use = self._current_uses[thread] = _SlotUse(slot, {stream: user}, thread)
                else:
                    if not use.gradients_began:
                        use.gradients_began = True
                        streamer.run.computes_gradients(use.slot)
                    if stream not in use.users:
                        use.users[stream] = streamer.run.acquire_anew(use.slot)
                saved = use.slot.views.saved.get(handle.place)
                view = (use.slot.views.view(handle.place) if saved is None else saved).detach()
                use.views.append(weakref.ref(view))
                if streamer.engine.watches_slots:
                    streamer.engine.read(view)
            if torch.is_grad_enabled():
                # With create_graph=True this node may save slot views itself, which have to be replaced by
                # handles too. Autograd gives each node a thread-local state of its own, so these hooks end with
                # the node.
                managed_tensor.push_handles(streamer)
            return view
        except BaseException as error:
            streamer.ended_by(error)
            raise

    def take_finished_uses(self, unit: StreamedUnit | None) -> list[tuple[UnitSlot, tuple[User, ...]]]:
        """Remove the uses that are over, and return (slot, users of the slot) for each.

        ``unit``: the unit that this thread reads next.
        """
        if self._current_uses:
            thread = threading.get_ident()
            use = self._current_uses.get(thread)
            if use is not None and use.slot.unit is not unit:
                del self._current_uses[thread]
                self._ending_uses.append(use)
        if not self._ending_uses:
            return []
        finished: list[tuple[UnitSlot, tuple[User, ...]]] = []
        unfinished: list[_SlotUse] = []
        for use in self._ending_uses:
            if use.finished:
                finished.append((use.slot, tuple(use.users.values())))
            else:
                unfinished.append(use)
        self._ending_uses = unfinished
        return finished

    # -- gradients of trainable streamed weights

    def deliver(self, home: Home, gradient: torch.Tensor) -> None:
        """Begin to copy ``gradient``, of the weight of ``home``, to the host. `end_pass` waits for all copies
        of the pass at once.
        """
        try:
            with self._streamer.lock:
                self.register_pass()
                self._gradient_buffers.send(home, gradient, graph_task())
        except BaseException as error:
            self._streamer.ended_by(error)
            raise

    def deliver_given(self, home: Home, gradient: torch.Tensor) -> None:
        """Begin to copy ``gradient``, the sum of what autograd functions that were given the weight itself have
        computed.

        Autograd sums all gradients of a weight in the order in which they arrive. Where operators use the weight
        too, that order is kept if they used it once, before the functions. Raises UnsupportedError otherwise.
        """
        with self._streamer.lock:
            unit = self._streamer.units[home.unit.index]
            proxy = unit.proxies[unit.homes.index(home)]
            if (proxy.uses > 1 or proxy.given_first) and self._gradient_buffers.has(home, graph_task()):
                raise UnsupportedError(
                    f"{home.entry.name} streams, and both an autograd function that was given the weight and several other "
                    "uses compute gradients of it, whose sum would be rounded in another order: keep trainable parameters "
                    "resident with training='resident', and run forwards without a backward under torch.no_grad()"
                )
        self.deliver(home, gradient)

    def forget(self) -> None:
        """Drop the records of all uses of slots, and gradients that are on their way to the host. Called when no
        backward pass will use them.
        """
        self._current_uses.clear()
        self._ending_uses.clear()
        self._gradient_buffers.forget_all()


def _cancel_failed_copies(run: Run) -> None:
    """Give up the copies whose issue has failed (P9 of device/pool.py). Waits for the device if there are any."""
    filling = {slot.now.thread for slot in run.pool.memory.slots() if slot.state is SlotState.FILLING}
    for thread in filling - run.issuing:
        run.pool.cancel_copies(thread)
