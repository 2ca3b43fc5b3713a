"""Backward passes: units are used again through handles, and gradients of streamed weights go to the host.

One `Backward` serves one streamer, under its lock. A pass is known from the first use of anything here
(autograd tells its end, or drops `_End` uncalled when it fails). Within a pass each thread reads one
unit at a time; a slot stays in use until autograd has dropped every view it was given.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from . import ops
from .errors import CaromError
from .landing import Landings
from .slots import Slot

if TYPE_CHECKING:
    from .streamed import Owner, Streamed
    from .streamer import Streamer

graph_task = torch._C._current_graph_task_id


@dataclass(eq=False)
class _Reading:
    """A backward's use of one unit: lasts until another unit is used and autograd dropped what it was given."""

    slot: Slot
    streams: set
    thread: int
    given: list[weakref.ref] = field(default_factory=list)
    began: bool = True  # else the unit was recomputed, and no gradient has asked for it yet

    @property
    def over(self) -> bool:
        for reference in self.given:  # noqa: SIM110 - a generator takes twice as long, at every turn
            if reference() is not None:
                return False
        return True


class _End:
    """Told by autograd of a backward's end; dropped uncalled when the backward fails."""

    def __init__(self, backward: Backward, task: int) -> None:
        self._backward, self._task, self._called = backward, task, False

    def __call__(self) -> None:
        self._called = True
        self._backward.ends(self._task)

    def __del__(self) -> None:
        if not self._called:
            self._backward.failed(self._task)


class Backward:
    """The backward passes of one streamer."""

    def __init__(self, streamer: Streamer, landings: Landings) -> None:
        self._streamer, self._landings = streamer, landings
        self._tasks: set[int] = set()  # passes in progress
        self._reading: dict[int, _Reading] = {}  # thread -> its pass's current use
        self._lingering: list[_Reading] = []

    @property
    def running(self) -> bool:
        return bool(self._tasks)

    @property
    def reading(self) -> bool:
        """Whether uses are under way, or not yet known to be over."""
        return bool(self._reading or self._lingering)

    def elsewhere(self) -> bool:
        """Whether a pass other than this thread's is in progress."""
        return bool(self._tasks - {graph_task()})

    def uses(self, thread: int) -> int:
        """Slots that ``thread`` reads, and those it read that autograd has not let go of yet."""
        return (thread in self._reading) + sum(reading.thread == thread for reading in self._lingering)

    def readings(self, slot: Slot) -> int:
        """How many uses of ``slot`` are under way, or not yet known to be over."""
        return sum(reading.slot is slot for reading in (*self._reading.values(), *self._lingering))

    # -- a pass

    def begins(self) -> None:
        """A gradient reached the root's result."""
        with self._streamer.lock:
            self.note()

    def note(self) -> None:
        """Learn of a pass at its first use of anything here, and be told of its end. Called under the streamer's lock."""
        task = graph_task()
        if task == -1 or task in self._tasks or self._streamer.closed:
            return
        self._tasks.add(task)
        if len(self._tasks) == 1:
            self._streamer.meter.backward_begins()
        torch.autograd.Variable._execution_engine.queue_callback(_End(self, task))

    def ends(self, task: int) -> None:
        streamer = self._streamer
        with streamer.lock:
            self._over(task)
            landed = self._landings.arrive(task)
            if not self._tasks:
                self._renew_sinks()
                if landed:
                    streamer.rest()
                streamer.meter.backward_ends()
        landed.add_up()

    def failed(self, task: int) -> None:
        """A pass died: forget its uses; what autograd still holds stays protected until it is dropped."""
        streamer = self._streamer
        with streamer.lock:
            self._landings.forget(task)
            if streamer.closed:
                self._tasks.discard(task)
                return
            self._over(task)
            if not self._tasks:
                self._renew_sinks()
                streamer.meter.abandon()

    def _over(self, task: int) -> None:
        self._tasks.discard(task)
        if not self._tasks:
            for thread in list(self._reading):
                self._lingering.append(self._reading.pop(thread))
        self._streamer.settle()

    def _renew_sinks(self) -> None:
        """The next forward gets `Deliver` nodes of its own. Autograd runs what was made last first: a node that is older than
        a forward would run after all of its backward, and the gradients of all weights would wait for it on the device."""
        if not self._streamer.runs.active:
            for unit in self._streamer.units:
                for owner in unit.owners if unit.trainable else ():
                    owner.sink = None

    # -- handles

    def handle(self, saved: torch.Tensor) -> ops.Handle:
        """What autograd keeps instead of ``saved``, a view of a slot."""
        offset = saved.data_ptr() - self._streamer.low
        slot = self._streamer.region.at(offset)
        if slot is None:
            raise CaromError(
                "autograd saves a view of a slot that holds no unit any more; please report this"
            )
        return ops.Handle(self, slot.unit, saved, offset - slot.offset)

    def goes_on(self, slot: Slot) -> bool:
        """Whether the use of ``slot`` by a run that is over goes on: in a backward it was a recomputation, whose gradients are
        next. They need no event in between, and nothing else to be looked for."""
        thread = threading.get_ident()
        if graph_task() not in self._tasks or thread in self._reading or self._streamer.closed:
            return False
        self._reading[thread] = _Reading(slot, {self._streamer.engine.stream()}, thread, began=False)
        return True

    def unpack(self, handle: ops.Handle) -> torch.Tensor:
        """The saved tensor again, for the autograd node that asks for it."""
        streamer = self._streamer
        with streamer.lock:
            self.note()
            thread = threading.get_ident()
            reading, stream = self._reading.get(thread), streamer.engine.stream()
            if reading is None or reading.slot.unit is not handle.unit:
                slot = streamer.acquire(handle.unit, backward=True)
                reading = self._reading[thread] = _Reading(slot, {stream}, thread)
            else:
                if not reading.began:
                    reading.began = True
                    streamer.used_on(reading.slot)
                if stream not in reading.streams:
                    streamer.wait(reading.slot)
                    reading.streams.add(stream)
            view = reading.slot.views.view(handle.place).detach()
            reading.given.append(weakref.ref(view))
            streamer.engine.read(view)
        if torch.is_grad_enabled():
            # create_graph: what this node saves of the slot in its turn is a handle too. Autograd gives each
            # node thread-local state of its own, so these hooks end with the node.
            ops.push_handles(streamer)
        return view

    def settle(self, unit: Streamed | None) -> list[tuple[Slot, set]]:
        """Uses that are over now that this thread turns to ``unit``: slots, and the streams that read them."""
        if self._reading:
            thread = threading.get_ident()
            reading = self._reading.get(thread)
            if reading is not None and reading.slot.unit is not unit:
                del self._reading[thread]
                self._lingering.append(reading)
        if not self._lingering:
            return []
        over: list[tuple[Slot, set]] = []
        left: list[_Reading] = []
        for reading in self._lingering:
            if reading.over:
                over.append((reading.slot, reading.streams))
            else:
                left.append(reading)
        self._lingering = left
        return over

    # -- gradients of trainable streamed weights

    def deliver(self, owner: Owner, gradient: torch.Tensor) -> None:
        """Start the gradient's way to the host; it is joined once, at the end of the pass."""
        with self._streamer.lock:
            self.note()
            self._landings.send(owner, gradient, graph_task())

    def close(self) -> None:
        self._reading.clear()
        self._lingering.clear()
