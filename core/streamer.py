"""The mechanism: brings units into slots, tells when they may be read and overwritten, looks ahead.

Host threads enter under one lock; nothing here waits for the device. What a slot promises:
it is read only on streams that wait for its copy's event, and overwritten only by a copy that waits
for the events of its last reads, wherever those were issued (backward and recomputation run on
autograd threads).
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from . import ops
from .errors import BudgetError, CaromError, UnsupportedError
from .meter import Meter
from .schedule import NEVER, Order
from .slots import Region, Slot, SlotState
from .store.arena import Block, HostArena, storage_bytes
from .transfer import Engine, storage_uses
from .units import Entry, Unit

graph_task = torch._C._current_graph_task_id
_OWN_REFERENCES = 3  # of a cached view: its list, the loop that looks, the argument of getrefcount
_PATIENCE = 20.0  # seconds to wait for a slot that another thread uses
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
    target: torch.Tensor  # the same for our copies: writing to it raises no version that autograd checks
    tensors: list[torch.Tensor]
    uses: int | None  # of the storage, when nobody but us holds it
    addresses: list[int] = field(default_factory=list)  # of the tensors, when made
    saved: dict[tuple, torch.Tensor] = field(default_factory=dict)  # views that autograd asked for, by place

    @property
    def version(self) -> int:
        """Raised by every write of the model to any of the tensors (they share the counter)."""
        return self.base._version

    def view(self, place: tuple) -> torch.Tensor:
        """The view of a handle's place; the caller takes an alias of its own."""
        found = self.saved.get(place)
        if found is None:
            dtype, shape, stride, start = place
            before = storage_uses(self.base)
            with torch.inference_mode(False), torch.no_grad():
                typed = self.base.view(dtype)
                found = typed.as_strided(
                    shape, stride, typed.storage_offset() + start // typed.element_size()
                )
            del typed
            self.saved[place] = found
            if self.uses is not None and before is not None:
                self.uses += (storage_uses(self.base) or 0) - before
        return found

    def kept_elsewhere(self) -> bool:
        """Whether anybody else holds one of the tensors, or another tensor of their storage."""
        if self.uses is not None and (storage_uses(self.base) or 0) > self.uses:
            return True
        count = sys.getrefcount
        return any(count(tensor) > _OWN_REFERENCES for tensor in self.tensors)


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
    sites: list[tuple[dict, str, int]] = field(default_factory=list)  # table, name, which owner
    standing: list[tuple[dict, str, Any, Any]] = field(default_factory=list)  # table, name, ours, the host's
    entered: int = 0  # the slot's version when it was swapped in
    differentiable: bool = False  # what stands carries gradients of trainable weights to the host

    @property
    def name(self) -> str:
        return self.unit.name

    @property
    def nbytes(self) -> int:
        return self.unit.nbytes

    @property
    def host(self) -> torch.Tensor:
        """The unit's bytes as they cross (uint8)."""
        return self.block.data

    def version(self) -> int:
        """Changes whenever torch sees the host tensors change."""
        return self.epoch + sum(owner.host._version for owner in self.owners)


@dataclass(eq=False)
class _Reading:
    """A backward's use of one unit: lasts until another unit is used and autograd dropped what it was given."""

    slot: Slot
    streams: set
    given: list[weakref.ref] = field(default_factory=list)


class _End:
    """Told by autograd of a backward's end; dropped uncalled when the backward fails."""

    def __init__(self, streamer: Streamer, task: int) -> None:
        self._streamer, self._task, self._called = streamer, task, False

    def __call__(self) -> None:
        self._called = True
        self._streamer._backward_ends(self._task)

    def __del__(self) -> None:
        if not self._called:
            self._streamer._backward_failed(self._task)


class Streamer:
    """Runs the streamed units of one session through one region of device memory."""

    def __init__(self, engine: Engine, region_bytes: int, meter: Meter) -> None:
        self.engine, self.meter = engine, meter
        self.units: list[Streamed] = []
        self.lock = threading.RLock()
        self._freed = threading.Condition(self.lock)
        self.closed = False
        self.order = Order(())
        self.region = Region(region_bytes, 0)
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.low = self.high = 0
        self._arena: HostArena | None = None
        # Stretches whose slot is gone, with the events of its last reads: the next copy there waits for them.
        self._tails: list[tuple[int, int, list[Any]]] = []
        self._held: list[Slot] = []
        self._reading: dict[int, _Reading] = {}  # thread -> its backward's current use
        self._lingering: list[_Reading] = []
        self._tasks: set[int] = set()  # backward passes in progress
        self._last: Streamed | None = None
        self._roots = 0  # root forwards in progress
        self.runs = 0  # units' runs in progress
        self.written: list[Owner] = []  # whose slots the model wrote to
        self._resting = False  # between a backward that made host gradients and the next forward
        self._landed: list[tuple[Owner, torch.Tensor, Any, int]] = []  # ..., event, backward pass
        self._landings: list[Block] = []
        self._local = threading.local()
        self._anchor = torch.zeros(0, requires_grad=True)

    def add(self, unit: Unit, index: int, block: Block) -> Streamed:
        """Take a unit whose bytes are in ``block``; its owners are added by the caller, before `start`."""
        streamed = Streamed(self, unit, index, block)
        self.units.append(streamed)
        return streamed

    def start(self, arena: HostArena) -> None:
        """All units are known: make the region. Memory for gradients will come from ``arena``."""
        self._arena = arena
        for unit in self.units:
            unit.sites = [
                (site.table, site.name, which)
                for which, owner in enumerate(unit.owners)
                for site in owner.entry.sites
            ]
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
        if (
            torch._C._len_torch_dispatch_stack()
        ):  # fake tensors, counters: our copies are none of their business
            with _disable_current_modes():
                return self._acquire(unit, backward)
        return self._acquire(unit, backward)

    def _acquire(self, unit: Streamed, backward: bool) -> Slot:
        with self.lock:
            if self.closed:
                raise CaromError(f"unit {unit.name!r} is needed, but its session was closed")
            self._settle(unit)
            foreseen = self.order.access(unit.index, backward)
            self._last = unit
            slot = unit.slot
            if slot is not None and slot.users == 0 and slot.version != unit.version():
                self._evict(slot)
                slot = None
            if slot is None:
                slot = self._fetch(unit)
                foreseen = False
            slot.users += 1
            slot.state = SlotState.IN_USE
            try:
                self._wait(slot)
                if not foreseen:  # else the last release has asked for all that fits
                    self._look_ahead()
            except BaseException:
                slot.users -= 1
                slot.state = SlotState.IN_USE if slot.users else SlotState.KEPT
                raise
            return slot

    def release(self, slot: Slot, streams: set | None = None) -> None:
        """The kernels that read the slot have been issued (on ``streams``; default: the current one)."""
        with self.lock:
            try:
                for stream in streams or (self.engine.stream(),):
                    slot.reads[stream] = self.engine.record(stream, slot.reads.get(stream))
            except BaseException:
                # Without the event nobody may overwrite the slot before the device is idle.
                with contextlib.suppress(Exception):
                    self.engine.synchronize()
                raise
            finally:
                slot.users -= 1
                if slot.users == 0:
                    slot.state = SlotState.KEPT
                self._freed.notify_all()
            if slot.users == 0 and slot.unit.slot is slot:
                if self.views(slot).kept_elsewhere() and self._kept_by_others(slot):
                    slot.state = SlotState.HELD
                    self._held.append(slot)
                else:
                    slot.state = SlotState.KEPT
                self._look_ahead()

    def _release_all(self, uses: list[tuple[Slot, set | None]]) -> None:
        """Every one of them, also when one fails; the first failure is raised."""
        failure: BaseException | None = None
        for slot, streams in uses:
            try:
                self.release(slot, streams)
            except BaseException as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def _kept_by_others(self, slot: Slot) -> bool:
        """Give modules that list their own weights (as LSTMs do) the host's back; whether anybody still keeps a view."""
        views = self.views(slot)
        owners = slot.unit.owners
        self._hand_back(
            slot.unit, {id(view): o.tensor for view, o in zip(views.tensors, owners, strict=True)}
        )
        return views.kept_elsewhere()

    def _hand_back(self, unit: Streamed, hosts: dict[int, Any]) -> None:
        for module in {id(s.module): s.module for o in unit.owners for s in o.entry.sites}.values():
            for kept in vars(module).values():
                if type(kept) is list:
                    kept[:] = [hosts.get(id(item), item) for item in kept]

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
        target = base.data
        return Views(
            base, target, tensors, storage_uses(base), addresses=[tensor.data_ptr() for tensor in tensors]
        )

    def _wait(self, slot: Slot) -> None:
        stream = self.engine.stream()
        if stream in slot.waited:
            return
        if self.meter.timing:
            before = self.engine.mark()
            self.engine.wait(slot.copied)
            self.meter.waited(before, self.engine.mark(), slot.unit.name, ops.in_backward())
        else:
            self.engine.wait(slot.copied)
        slot.waited.add(stream)

    # -- fetching

    def _fetch(self, unit: Streamed) -> Slot:
        """Bring a unit that is needed now, at the cost of anything that is not in use."""
        place = self.region.place(unit.nbytes, self._use_of)
        give_up = time.monotonic() + _PATIENCE
        while place is None:
            # Another thread's run ends soon; what this thread itself uses does not end by waiting.
            if not self._used_elsewhere() or not self._freed.wait(max(0.0, give_up - time.monotonic())):
                raise BudgetError(self._no_room(unit))
            if unit.slot is not None:  # that thread wanted the same unit
                return unit.slot
            self._settle(unit)
            place = self.region.place(unit.nbytes, self._use_of)
        return self._fill(unit, *place)

    def _used_elsewhere(self) -> bool:
        """Whether another thread uses a slot."""
        mine = (
            getattr(self._local, "users", 0) + (threading.get_ident() in self._reading) + len(self._lingering)
        )
        return sum(slot.users for slot in self.region.slots) > mine

    def _fill(self, unit: Streamed, offset: int, victims: list[Slot]) -> Slot:
        for victim in victims:
            self._evict(victim)
        end = offset + unit.nbytes
        tails = [tail for tail in self._tails if tail[0] < end and offset < tail[1]]
        after = [event for tail in tails for event in tail[2]]
        slot = Slot(unit, offset, unit.nbytes, version=unit.version())
        views = self.views(slot)
        slot.copied, marks = self.engine.copy_in(views.target, unit.host, after, self.meter.timing)
        for tail in tails:
            self._tails.remove(tail)
            # What sticks out on either side keeps its events.
            self._tails += [
                (low, high, tail[2]) for low, high in ((tail[0], offset), (end, tail[1])) if low < high
            ]
        self.region.add(slot)
        unit.slot = slot
        backward = ops.in_backward()
        if self.engine.blocking and marks is not None:
            self.meter.waited(marks[0], marks[1], unit.name, backward)
        self.meter.copied(unit.name, marks, unit.nbytes, unit.unit.raw_bytes, backward)
        return slot

    def _evict(self, slot: Slot) -> None:
        self.region.remove(slot)
        if slot.reads:
            self._tails.append((slot.offset, slot.end, list(slot.reads.values())))
        if slot.unit.slot is slot:
            slot.unit.slot = None
        self.engine.freed(self.memory[slot.offset : slot.end])

    def _use_of(self, slot: Slot) -> float | None:
        """When the slot's unit is expected again; None while it must stay."""
        if slot.users or slot.state is SlotState.HELD:
            return None
        return self.order.next_use(slot.unit.index)

    def _look_ahead(self) -> None:
        """Ask for what is expected next, as far as that evicts nothing needed sooner."""
        # In backward a unit's recomputation is followed by its gradients, whether or not that is learnt yet.
        guarded = self._last.slot if self._last is not None and ops.in_backward() else None
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
            place = self.region.place(unit.nbytes, self._use_of, later_than=distance, guarded=guarded)
            if place is None:
                return
            self._fill(unit, *place)

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
        ops.refuse_transforms(unit.name)
        with self.lock:
            self.note_backward()
            slot = self.acquire(unit, backward=False)
            unit.depth += 1
            self.runs += 1
            self._local.users = getattr(self._local, "users", 0) + 1
            if unit.depth == 1 or (gradient and unit.trainable and not unit.differentiable):
                try:
                    self._swap_out(unit)
                    self._swap_in(unit, self.views(slot).tensors, gradient)
                except BaseException:
                    self._leave(unit, slot)
                    raise
        try:
            if gradient:
                ops.push_handles(self)
        except BaseException:
            with self.lock:
                self._leave(unit, slot)
            raise
        self._local.runs = getattr(self._local, "runs", 0) + 1
        return slot, gradient

    def leave(self, unit: Streamed, slot: Slot, gradient: bool) -> None:
        self._local.runs -= 1
        if gradient:
            ops.pop_handles()
        with self.lock:
            self._leave(unit, slot)

    def _leave(self, unit: Streamed, slot: Slot) -> None:
        if unit.depth == 0:
            return  # an interrupted pass was cleaned up meanwhile
        unit.depth -= 1
        self.runs -= 1
        self._local.users = max(0, getattr(self._local, "users", 0) - 1)
        try:
            if unit.depth == 0:
                if unit.differentiable:
                    self._hand_back(unit, {id(ours): host for _, _, ours, host in unit.standing})
                self._swap_out(unit)
                self._keep_writes(unit, slot)
        finally:
            self.release(slot)

    def _keep_writes(self, unit: Streamed, slot: Slot) -> None:
        """What the model wrote to its slot during the run goes to the host, where the weight lives."""
        views = self.views(slot)
        replaced = [t.data_ptr() != at for t, at in zip(views.tensors, views.addresses, strict=True)]
        if views.version == unit.entered and not any(replaced):
            return
        for owner, view in zip(unit.owners, views.tensors, strict=True):
            # One counter for the whole slot does not tell which tensor it was: look.
            with _disable_current_modes(), torch.no_grad():
                if view.shape != owner.host.shape or view.dtype != owner.host.dtype:
                    continue
                now = torch.empty_like(owner.host)
                self.engine.synchronize(self.engine.copy_out(now, view.detach()))
                if torch.equal(storage_bytes(now), storage_bytes(owner.host)):
                    continue
                owner.host.copy_(now)
            if owner not in self.written:
                self.written.append(owner)
        unit.epoch += 1
        unit.views.pop(slot.offset, None)
        self.views(slot)

    def _swap_in(self, unit: Streamed, tensors: list[torch.Tensor], gradient: bool) -> None:
        standing = unit.standing
        if unit.depth == 1:
            assert unit.slot is not None
            unit.entered = self.views(unit.slot).version
        unit.differentiable = gradient and unit.trainable
        for table, name, which in unit.sites:
            host = unit.owners[which].tensor
            if table.get(name) is host:
                ours = tensors[which]
                if gradient and unit.owners[which].trainable:
                    ours = self.differentiable(unit.owners[which], ours)
                table[name] = ours
                standing.append((table, name, ours, host))

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
        if getattr(self._local, "hosting", False):
            return False
        return getattr(self._local, "runs", 0) > 0 or ops.in_backward()

    def hosting(self, on: bool) -> None:
        """While on, this thread sees the host tensors, in a step too (a state dict is being taken)."""
        self._local.hosting = on

    def root_begins(self) -> None:
        """The root's forward starts on this thread."""
        with self.lock:
            if not ops.in_backward():
                self._resting = False
            if self._roots == 0 and not self._tasks:
                self.meter.forward_begins(torch.is_grad_enabled())
            self._roots += 1
            self._local.runs = getattr(self._local, "runs", 0) + 1

    def root_ends(self, failed: bool) -> None:
        self._local.runs = max(0, getattr(self._local, "runs", 0) - 1)
        with self.lock:
            self._roots -= 1
            if self._roots or self._tasks:
                return
            if not failed:
                self.meter.forward_ends()
                return
            self.meter.abandon()
            if self.runs:  # an interrupt may hit between any two lines: leave no unit half swapped
                self._clean()

    def _clean(self) -> None:
        self.runs = 0
        for unit in self.units:
            unit.depth = 0
            self._swap_out(unit)
        for slot in self.region.slots:
            if slot.users:
                slot.users = 0
                slot.reads[self.engine.stream()] = self.engine.record(self.engine.stream())
                slot.state = SlotState.KEPT

    def bounce(self, func: Callable, args: tuple, kwargs: dict, found: list[Any]) -> Any:
        """Run one operator with the slots of the streamed tensors ``found`` among its arguments."""
        gradient = torch.is_grad_enabled()
        ops.refuse_transforms(found[0]._carom.unit.name)
        owners: list[Owner] = [tensor._carom for tensor in found]
        slots: dict[int, tuple[Streamed, Slot]] = {}
        view: torch.Tensor | None = None
        replaced: dict[int, torch.Tensor] = {}
        try:
            with self.lock:
                self.note_backward()
                for owner in owners:
                    if id(owner.unit) not in slots:
                        slots[id(owner.unit)] = (owner.unit, self.acquire(owner.unit))
                for tensor, owner in zip(found, owners, strict=True):
                    unit, slot = slots[id(owner.unit)]
                    view = self.views(slot).tensors[unit.owners.index(owner)]
                    replaced[id(tensor)] = (
                        self.differentiable(owner, view) if gradient and owner.trainable else view
                    )
            args, kwargs = ops.substitute(args, kwargs, replaced)
            if not gradient or not ops.hooks_are_ours():
                return func(*args, **kwargs)
            ops.push_handles(self)
            try:
                return func(*args, **kwargs)
            finally:
                ops.pop_handles()
        finally:
            replaced, args, kwargs, view = {}, (), {}, None  # only the result may hold on to a slot
            self._release_all([(slot, None) for _, slot in slots.values()])

    # -- backward

    def handle(self, saved: torch.Tensor) -> Any:
        """What autograd keeps instead of ``saved``, a view of a slot."""
        offset = saved.data_ptr() - self.low
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
            view = self.views(reading.slot).view(handle.place).detach()
            reading.given.append(weakref.ref(view))
            self.engine.read(view)
        if torch.is_grad_enabled():
            # create_graph: what this node saves of the slot in its turn is a handle too. Autograd gives each
            # node thread-local state of its own, so these hooks end with the node.
            ops.push_handles(self)
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
            self._release_all([(reading.slot, reading.streams) for reading in over])
        if self._held:
            for slot in [slot for slot in self._held if not self.views(slot).kept_elsewhere()]:
                self._held.remove(slot)
                if slot.users == 0:
                    slot.reads[self.engine.stream()] = self.engine.record(self.engine.stream())
                    slot.state = SlotState.KEPT

    def note_backward(self) -> None:
        """Learn of a backward pass at its first use of anything here, and be told of its end."""
        task = graph_task()
        if task == -1 or task in self._tasks or self.closed:
            return
        self._tasks.add(task)
        if len(self._tasks) == 1:
            self.meter.backward_begins()
        torch.autograd.Variable._execution_engine.queue_callback(_End(self, task))

    def _backward_ends(self, task: int) -> None:
        with self.lock:
            landed = [landing for landing in self._landed if landing[3] == task]
            self._landed = [landing for landing in self._landed if landing[3] != task]
            self._tasks.discard(task)
            if not self._tasks:
                for thread in list(self._reading):
                    self._lingering.append(self._reading.pop(thread))
            self._settle(None)
            for event in {id(event): event for _, _, event, _ in landed}.values():
                self.engine.synchronize(event)
            if not self._tasks:
                if landed:
                    self._resting = True
                    self._drop_trainable()
                self.meter.backward_ends()
        # As autograd does: what one backward pass adds up for a weight is added to .grad once.
        sums: dict[int, tuple[Owner, torch.Tensor]] = {}
        for owner, gradient, _, _ in landed:
            if id(owner) in sums:
                sums[id(owner)][1].add_(gradient)
            else:
                sums[id(owner)] = (owner, gradient)
        for owner, gradient in sums.values():
            accumulate(owner, gradient)

    def _backward_failed(self, task: int) -> None:
        """A backward died: forget its uses; what autograd still holds stays protected until it is dropped."""
        with self.lock:
            self._tasks.discard(task)
            self._landed = [landing for landing in self._landed if landing[3] != task]
            if self._tasks or self.closed:
                return
            for thread in list(self._reading):
                self._lingering.append(self._reading.pop(thread))
            self._settle(None)
            self.meter.abandon()

    # -- gradients of trainable streamed weights

    def deliver(self, owner: Owner, gradient: torch.Tensor) -> None:
        """Start the gradient's way to the host; it is joined once, at the end of the backward."""
        with self.lock:
            self.note_backward()
            landing = self._landing(owner)
            event = self.engine.copy_out(landing, gradient.to(landing.dtype))
            self._landed.append((owner, landing, event, graph_task()))

    def _landing(self, owner: Owner) -> torch.Tensor:
        """A host buffer for one gradient that neither a pending copy nor ``.grad`` uses."""
        taken = {buffer.data_ptr() for _, buffer, _, _ in self._landed}
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

    @property
    def idle(self) -> bool:
        """Whether no pass is under way, so that tensors may be laid out anew."""
        return not (self.runs or self._roots or self._tasks)

    def true_values(self, state: dict[str, Any], names: dict[str, Owner]) -> None:
        """Replace slot views in a state dict (taken while units run) by the host tensors they stand for."""
        with self.lock:
            for name, owner in names.items():
                tensor = state.get(name)
                if isinstance(tensor, torch.Tensor) and self.low <= _address(tensor) < self.high:
                    state[name] = owner.host.detach()

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


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # no storage of its own
        return 0


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
