"""The mechanism: brings units into slots, tells when they may be read and overwritten, looks ahead.

Host threads enter under one lock; nothing here waits for the device. What a slot promises:
it is read only on streams that wait for its copy's event, and overwritten only by a copy that waits
for the events of its last reads, wherever those were issued (backward and recomputation run on
autograd threads).
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from . import ops
from .errors import BudgetError, CaromError, UnsupportedError
from .meter import Meter
from .schedule import NEVER, Order
from .slots import Region, Slot, SlotState
from .store.arena import Block, HostArena
from .transfer import Engine, storage_uses
from .units import Entry, Unit

_VIEW_SETS = 16  # slot positions whose views a unit remembers


class Owner:
    """What a streamed host tensor leads to: its entry, its unit, its streamer."""

    __slots__ = ("streamer", "unit", "entry", "host", "tensor", "trainable", "landing", "pending")

    def __init__(self, streamer: Streamer, unit: Streamed, entry: Entry, host: torch.Tensor) -> None:
        self.streamer, self.unit, self.entry, self.host = streamer, unit, entry, host
        self.tensor = entry.tensor
        self.trainable = entry.trainable
        self.landing: list[torch.Tensor] = []  # pinned host buffers gradients land in
        self.pending: list[torch.Tensor] = []  # landed (or landing) in this backward


@dataclass(eq=False)
class Views:
    """A unit's tensors at one position of the region, made once: ``tensors`` match the unit's owners."""

    base: torch.Tensor  # uint8, exactly the unit's bytes, where possible a storage of its own
    tensors: list[torch.Tensor]
    uses: int | None  # of the storage, when nobody but us holds it

    def kept_elsewhere(self) -> bool:
        return self.uses is not None and (storage_uses(self.base) or 0) > self.uses


@dataclass(eq=False)
class Streamed:
    """A unit at run time."""

    streamer: Streamer
    unit: Unit
    index: int
    block: Block
    owners: list[Owner] = field(default_factory=list)
    slot: Slot | None = None
    views: OrderedDict[int, Views] = field(default_factory=OrderedDict)
    depth: int = 0  # runs in progress: its slot views stand in the modules while above zero
    epoch: int = 0  # raised when the host bytes may have changed unseen
    trainable: bool = False
    standing: list[tuple[dict, str, Any, Any]] = field(default_factory=list)  # table, name, ours, the host's

    @property
    def name(self) -> str:
        return self.unit.name

    @property
    def nbytes(self) -> int:
        return self.unit.nbytes

    def version(self) -> int:
        """Changes whenever torch sees the host tensors change."""
        return self.epoch + sum(owner.host._version for owner in self.owners)


@dataclass(eq=False)
class _Reading:
    """A backward's use of one unit: lasts until another unit is used and autograd dropped what it was given."""

    slot: Slot
    streams: set
    given: list[weakref.ref] = field(default_factory=list)


class Streamer:
    """Runs the streamed units of one session through one region of device memory."""

    def __init__(self, engine: Engine, region_bytes: int, meter: Meter) -> None:
        self.engine, self.meter = engine, meter
        self.units: list[Streamed] = []
        self.lock = threading.RLock()
        self.closed = False
        self.order = Order(())
        self.region = Region(region_bytes, 0)
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.low = self.high = 0
        self._arena: HostArena | None = None
        self._held: list[Slot] = []
        self._reading: dict[int, _Reading] = {}  # thread -> its backward's current use
        self._lingering: list[_Reading] = []
        self._tasks: set[int] = set()  # backward passes in progress
        self._last: Streamed | None = None
        self._roots = 0  # root forwards in progress
        self._resting = False  # between a backward that made host gradients and the next forward
        self._landed: list[tuple[Owner, torch.Tensor, Any]] = []
        self._landings: list[Block] = []
        self._local = threading.local()
        self._anchor = torch.zeros(0, requires_grad=True)
        self.on_backward_end: Callable[[], None] = lambda: None

    def add(self, unit: Unit, index: int, block: Block) -> Streamed:
        """Take a unit whose bytes are in ``block``; its owners are added by the caller, before `start`."""
        streamed = Streamed(self, unit, index, block)
        self.units.append(streamed)
        return streamed

    def start(self, arena: HostArena) -> None:
        """All units are known: make the region. Memory for gradients will come from ``arena``."""
        self._arena = arena
        self.order = Order([unit.index for unit in self.units])
        self.region = Region(self.region.nbytes, max((unit.nbytes for unit in self.units), default=0))
        if self.units:
            self.memory = self.engine.allocate(self.region.nbytes)
            self.low = self.memory.data_ptr()
            self.high = self.low + self.memory.numel()
        # Memory that other streams were still using when it was freed must not be copied into early.
        self.engine.synchronize()

    # -- using units

    def acquire(self, unit: Streamed, backward: bool = False) -> Slot:
        """The unit's slot, readable on the current stream from here on; pairs with `release`.

        Raises BudgetError when everything in the region is in use.
        """
        with self.lock:
            if self.closed:
                raise CaromError(f"unit {unit.name!r} is needed, but its session was closed")
            self._settle(unit)
            self.order.access(unit.index, backward)
            self._last = unit
            slot = unit.slot
            if slot is not None and slot.users == 0 and slot.version != unit.version():
                self._evict(slot)
                slot = None
            if slot is None:
                slot = self._fetch(unit, demand=True)
            slot.users += 1
            slot.state = SlotState.IN_USE
            self._wait(slot)
            self._look_ahead()
            return slot

    def release(self, slot: Slot, streams: set | None = None) -> None:
        """The kernels that read the slot have been issued (on ``streams``; default: the current one)."""
        with self.lock:
            for stream in streams or (self.engine.stream(),):
                slot.reads[stream] = self.engine.record(stream)
            slot.users -= 1
            if slot.users == 0 and slot.unit.slot is slot:
                if self.views(slot).kept_elsewhere():
                    slot.state = SlotState.HELD
                    self._held.append(slot)
                else:
                    slot.state = SlotState.KEPT
                self._look_ahead()

    def views(self, slot: Slot) -> Views:
        """The unit's tensors in ``slot``."""
        unit = slot.unit
        found = unit.views.get(slot.offset)
        if found is None:
            found = self._make_views(unit, slot.offset)
            while len(unit.views) >= _VIEW_SETS:
                oldest = next(iter(unit.views))
                del unit.views[oldest]
            unit.views[slot.offset] = found
        return found

    def _make_views(self, unit: Streamed, offset: int) -> Views:
        # Outside inference mode, so that the same views serve training too.
        with torch.inference_mode(False), torch.no_grad():
            base = self.engine.alias(self.memory, offset, unit.nbytes)
            tensors: list[torch.Tensor] = []
            for owner in unit.owners:
                entry = owner.entry
                piece = base[entry.offset : entry.offset + entry.nbytes].view(owner.host.dtype)
                view = piece.as_strided(owner.host.shape, owner.host.stride(), piece.storage_offset())
                is_parameter = isinstance(owner.tensor, nn.Parameter)
                tensors.append(nn.Parameter(view, requires_grad=False) if is_parameter else view)
        del piece, view
        return Views(base, tensors, storage_uses(base))

    def _wait(self, slot: Slot) -> None:
        stream = self.engine.stream()
        if stream in slot.waited:
            return
        before = self.engine.record(stream)
        self.engine.wait(slot.copied)
        self.meter.waited(before, self.engine.record(stream), slot.unit.name, ops.in_backward())
        slot.waited.add(stream)

    # -- fetching

    def _fetch(self, unit: Streamed, demand: bool) -> Slot:
        place = self.region.place(unit.nbytes, self._use_of)
        if place is None and demand:
            place = self.region.place(unit.nbytes, lambda slot: 0 if slot.users == 0 and not self._is_held(slot) else None)
        if place is None:
            raise BudgetError(self._no_room(unit))
        return self._fill(unit, *place)

    def _fill(self, unit: Streamed, offset: int, victims: list[Slot]) -> Slot:
        after = [event for victim in victims for event in victim.reads.values()]
        for victim in victims:
            self._evict(victim)
        slot = Slot(unit, offset, unit.nbytes, version=unit.version())
        views = self.views(slot)
        started, slot.copied = self.engine.copy_in(views.base, unit.block.data[: unit.nbytes], after)
        self.region.add(slot)
        unit.slot = slot
        if self.engine.blocking:
            self.meter.waited(started, slot.copied, unit.name, ops.in_backward())
        self.meter.copied(unit.name, started, slot.copied, unit.nbytes, unit.unit.raw_bytes, ops.in_backward())
        return slot

    def _evict(self, slot: Slot) -> None:
        self.region.remove(slot)
        if slot.unit.slot is slot:
            slot.unit.slot = None
        self.engine.freed(self.memory[slot.offset : slot.end])

    def _is_held(self, slot: Slot) -> bool:
        return slot.state is SlotState.HELD

    def _use_of(self, slot: Slot) -> float | None:
        """When the slot's unit is expected again; None while it must stay."""
        if slot.users or slot.state is SlotState.HELD:
            return None
        return self.order.next_use(slot.unit.index)

    def _look_ahead(self) -> None:
        """Ask for what is expected next, as far as that evicts nothing needed sooner."""
        room, seen = self.region.nbytes, set()
        for distance, index in enumerate(self.order.upcoming(), 1):
            if index in seen:
                continue
            seen.add(index)
            unit = self.units[index]
            room -= unit.nbytes
            if room < 0:
                return
            if unit.slot is not None or (self._resting and unit.trainable):
                continue
            place = self.region.place(unit.nbytes, self._free_before(distance))
            if place is None:
                return
            self._fill(unit, *place)

    def _free_before(self, distance: int) -> Callable[[Slot], float | None]:
        # In backward a unit's recomputation is followed by its gradients, whether or not that is learnt yet.
        guarded = self._last if ops.in_backward() else None

        def use(slot: Slot) -> float | None:
            if slot.unit is guarded:
                return None
            expected = self._use_of(slot)
            return expected if expected is not None and expected > distance else None

        return use

    def _no_room(self, unit: Streamed) -> str:
        stuck = [slot.unit.name for slot in self.region.slots if slot.users or slot.state is SlotState.HELD]
        return (
            f"no slot for unit {unit.name!r} ({unit.nbytes} bytes): the region of {self.region.nbytes} bytes is taken "
            f"by {', '.join(repr(name) for name in stuck)}, in use at the same time or kept by the model beyond "
            "their run; raise vram, use a finer granularity, or enable gradient checkpointing"
        )

    # -- the run of a unit's own forward: slot views stand in its modules

    def enter(self, unit: Streamed) -> tuple[Slot, bool]:
        """Swap the unit in for a run of its own forward; pairs with `leave`."""
        gradient = torch.is_grad_enabled()
        with self.lock:
            self.note_backward()
            if unit.trainable and not ops.in_backward():
                self._resting = False
            slot = self.acquire(unit, backward=False)
            unit.depth += 1
            if unit.depth == 1:
                try:
                    self._swap_in(unit, self.views(slot).tensors, gradient)
                except BaseException:
                    unit.depth = 0
                    self._swap_out(unit)
                    self.release(slot)
                    raise
        if gradient:
            ops.push_handles(self)
        self._local.runs = getattr(self._local, "runs", 0) + 1
        return slot, gradient

    def leave(self, unit: Streamed, slot: Slot, gradient: bool) -> None:
        self._local.runs -= 1
        if gradient:
            ops.pop_handles()
        with self.lock:
            unit.depth -= 1
            if unit.depth == 0:
                self._swap_out(unit)
            self.release(slot)

    def _swap_in(self, unit: Streamed, tensors: list[torch.Tensor], gradient: bool) -> None:
        standing = unit.standing
        for owner, view in zip(unit.owners, tensors, strict=True):
            ours = self.differentiable(owner, view) if gradient and owner.trainable else view
            for site in owner.entry.sites:
                table, name = site.table, site.name
                if table.get(name) is owner.tensor:
                    table[name] = ours
                    standing.append((table, name, ours, owner.tensor))

    def _swap_out(self, unit: Streamed) -> None:
        for table, name, ours, host in unit.standing:
            if table.get(name) is ours:  # a module that put something else there keeps it
                table[name] = host
        unit.standing.clear()

    def differentiable(self, owner: Owner, view: torch.Tensor) -> torch.Tensor:
        return ops.Deliver.apply(self._anchor, view, owner)

    # -- the use of units by single operators

    def computing(self) -> bool:
        """Whether this thread is in a step: a root forward, a unit's run, or a backward."""
        return getattr(self._local, "runs", 0) > 0 or ops.in_backward()

    def root_begins(self) -> None:
        """The root's forward starts on this thread."""
        if self._tasks and not ops.in_backward():
            self.abandon()  # a backward failed and told nobody
        self._local.runs = getattr(self._local, "runs", 0) + 1
        with self.lock:
            self._roots += 1
            self._resting = False
            self.meter.forward_begins(torch.is_grad_enabled())

    def root_ends(self, failed: bool) -> None:
        self._local.runs -= 1
        with self.lock:
            self._roots -= 1
            if not failed:
                self.meter.forward_ends()
                return
            self.abandon()
            if self._roots == 0:  # an interrupt may have hit between any two lines: leave no unit half swapped
                for unit in self.units:
                    unit.depth = 0
                    self._swap_out(unit)
                for slot in self.region.slots:
                    if slot.users:
                        slot.users = 0
                        slot.reads[self.engine.stream()] = self.engine.record()
                        slot.state = SlotState.KEPT

    def bounce(self, func: Callable, args: tuple, kwargs: dict, found: list[Any]) -> Any:
        """Run one operator with the slots of the streamed tensors ``found`` among its arguments."""
        gradient = torch.is_grad_enabled()
        owners: list[Owner] = [tensor._carom for tensor in found]
        slots: dict[int, tuple[Streamed, Slot]] = {}
        try:
            with self.lock:
                self.note_backward()
                for owner in owners:
                    if id(owner.unit) not in slots:
                        slots[id(owner.unit)] = (owner.unit, self.acquire(owner.unit))
                replaced = {}
                for tensor, owner in zip(found, owners, strict=True):
                    unit, slot = slots[id(owner.unit)]
                    view = self.views(slot).tensors[unit.owners.index(owner)]
                    replaced[id(tensor)] = self.differentiable(owner, view) if gradient and owner.trainable else view
            args, kwargs = ops.substitute(args, kwargs, replaced)
            if not gradient:
                return func(*args, **kwargs)
            ops.push_handles(self)
            try:
                return func(*args, **kwargs)
            finally:
                ops.pop_handles()
        finally:
            replaced = {}
            for _, slot in slots.values():
                self.release(slot)

    # -- backward

    def handle(self, saved: torch.Tensor, address: int) -> Any:
        """What autograd keeps instead of ``saved``, a view of a slot."""
        offset = address - self.low
        for slot in self.region.slots:
            if slot.offset <= offset < slot.end:
                return ops.Handle(self, slot.unit, saved, offset - slot.offset)
        raise CaromError("autograd saves a view of a slot that holds no unit any more; please report this")

    def unpack(self, handle: ops.Handle) -> torch.Tensor:
        """The saved tensor again, for the autograd node that asks for it."""
        with self.lock:
            self.note_backward()
            thread = threading.get_ident()
            reading = self._reading.get(thread)
            if reading is None or reading.slot.unit is not handle.unit:
                slot = self.acquire(handle.unit, backward=True)
                reading = self._reading[thread] = _Reading(slot, set())
            else:
                self._wait(reading.slot)
            reading.streams.add(self.engine.stream())
            view = handle.view(self.views(reading.slot).base)
            reading.given.append(weakref.ref(view))
            self.engine.read(view)
            return view

    def _settle(self, unit: Streamed | None) -> None:
        """End uses that are over: another unit's turn in this thread's backward, views dropped at last."""
        if self._reading:
            thread = threading.get_ident()
            reading = self._reading.get(thread)
            if reading is not None and reading.slot.unit is not unit:
                del self._reading[thread]
                self._lingering.append(reading)
        if self._lingering:
            over = [reading for reading in self._lingering if not ops.alive(reading.given)]
            self._lingering = [reading for reading in self._lingering if ops.alive(reading.given)]
            for reading in over:
                self.release(reading.slot, reading.streams)
        if self._held:
            for slot in [slot for slot in self._held if not self.views(slot).kept_elsewhere()]:
                self._held.remove(slot)
                if slot.users == 0:
                    slot.reads[self.engine.stream()] = self.engine.record()
                    slot.state = SlotState.KEPT

    def note_backward(self) -> None:
        """Learn of a backward pass at its first use of anything here, and be told of its end."""
        task = torch._C._current_graph_task_id()
        if task == -1 or task in self._tasks:
            return
        self._tasks.add(task)
        if len(self._tasks) == 1:
            self.meter.backward_begins()
        torch.autograd.Variable._execution_engine.queue_callback(lambda: self._backward_ends(task))

    def _backward_ends(self, task: int) -> None:
        with self.lock:
            self._tasks.discard(task)
            if self._tasks:  # a backward within a backward
                self._settle(None)
                return
            for thread in list(self._reading):
                self._lingering.append(self._reading.pop(thread))
            self._settle(None)
            landed, self._landed = self._landed, []
            if landed:
                self._resting = True
                for event in {id(event): event for _, _, event in landed}.values():
                    self.engine.synchronize(event)
                self._drop_trainable()
            self.meter.backward_ends()
        for owner, gradient, _ in landed:
            accumulate(owner, gradient)
        self.on_backward_end()

    def abandon(self) -> None:
        """A step failed: forget its uses; what autograd still holds stays protected until it is dropped."""
        with self.lock:
            self._tasks.clear()
            for thread in list(self._reading):
                self._lingering.append(self._reading.pop(thread))
            self._landed.clear()
            self._settle(None)
            self.meter.abandon()

    # -- gradients of trainable streamed weights

    def deliver(self, owner: Owner, gradient: torch.Tensor) -> None:
        """Start the gradient's way to the host; it is joined once, at the end of the backward."""
        with self.lock:
            self.note_backward()
            landing = self._landing(owner)
            event = self.engine.copy_out(landing, gradient.to(landing.dtype))
            self._landed.append((owner, landing, event))

    def _landing(self, owner: Owner) -> torch.Tensor:
        """A host buffer for one gradient that neither a pending copy nor ``.grad`` uses."""
        taken = {buffer.data_ptr() for _, buffer, _ in self._landed}
        current = owner.tensor.grad
        if current is not None:
            taken.add(current.data_ptr())
        for buffer in owner.landing:
            if buffer.data_ptr() not in taken:
                return buffer
        buffer = self.new_landing(owner)
        owner.landing.append(buffer)
        return buffer

    def new_landing(self, owner: Owner) -> torch.Tensor:
        """A fresh pinned host buffer laid out like the weight."""
        assert self._arena is not None
        block = self._arena.allocate(owner.entry.nbytes)
        self._arena.pin(block)
        self._landings.append(block)
        with torch.inference_mode(False):
            return block.data.view(owner.host.dtype).as_strided(owner.host.shape, owner.host.stride())

    def _drop_trainable(self) -> None:
        """An optimizer is about to change the host weights: nothing of them may be kept or on its way."""
        for slot in [slot for slot in self.region.slots if slot.unit.trainable and slot.users == 0]:
            self.engine.synchronize(slot.copied)
            if slot.state is not SlotState.HELD:
                self._evict(slot)

    def set_trainable(self, owner: Owner, trainable: bool) -> None:
        """``requires_grad`` of a streamed parameter was set: from the next run on its gradients go to the host."""
        owner.trainable = trainable
        owner.unit.trainable = any(other.trainable for other in owner.unit.owners)

    # -- host bytes that change

    def set_data(self, owner: Owner, tensor: torch.Tensor, new: torch.Tensor) -> None:
        """``parameter.data = new`` on a streamed parameter: its host bytes change, its place does not."""
        if new.device.type != "cpu" and new.device == self.engine.device:
            return  # moved to where it computes already (a submodule's .to): it stays streamed
        if new.shape != owner.host.shape or new.dtype != owner.host.dtype or new.device.type != "cpu":
            raise UnsupportedError(
                f"{owner.entry.name} is streamed as {owner.host.dtype} {tuple(owner.host.shape)}; it cannot become "
                f"{new.dtype} {tuple(new.shape)} on {new.device} while attached: close the session first"
            )
        owner.unit.epoch += 1
        if new.data_ptr() != owner.host.data_ptr():
            with torch.no_grad():
                owner.host.copy_(new)

    def refresh(self, units: list[Streamed] | None = None) -> None:
        """Do not trust kept copies of ``units`` (default: all)."""
        with self.lock:
            for unit in self.units if units is None else units:
                unit.epoch += 1

    # -- end

    def close(self) -> None:
        """Wait for the device and give the region up. Runs in progress keep their views alive."""
        with self.lock:
            self.engine.synchronize()
            self.closed = True
            for unit in self.units:
                self._swap_out(unit)
                unit.depth, unit.slot = 0, None
                unit.views.clear()
            self.region.slots.clear()
            self._held.clear()
            self._reading.clear()
            self._lingering.clear()
            self._landed.clear()
            for block in self._landings:
                block.unpin()
            self.memory = torch.empty(0, dtype=torch.uint8)
            self.low = self.high = 0


def accumulate(owner: Owner, gradient: torch.Tensor) -> None:
    """Add a landed gradient as autograd's own accumulation would, hooks included."""
    parameter = owner.tensor
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        for hook in list((parameter._backward_hooks or {}).values()):
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad.add_(gradient)
    for hook in list((getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()):
        hook(parameter)


__all__ = ["NEVER", "Owner", "Streamed", "Streamer", "Views"]
