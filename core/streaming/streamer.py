"""Defines `Streamer`: runs the passes of one layout by a schedule, with the units in a pool.

A unit is a group of weights that cross to the device together. A slot is the device memory that holds a unit. `Run`
(run.py) uses the units in a pass: the hooks of units call it. The streamer makes what a run needs (the region, the pool, the
schedule of the learnt order), begins passes, brings the slots into order after an interrupt, and closes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..common.errors import CaromError, UnsupportedError
from ..common.run_all import run_all
from ..device.engine import Engine
from ..device.pool import Pool
from ..device.pool_memory import PoolMemory
from ..device.slot import SlotState, SlotWaiters, User
from ..device.staging import Staging
from ..host.arena import Block, HostArena
from ..metrics.meter import Meter
from ..model import managed_tensor
from ..model.home import Home, ManagedUnit
from ..model.units import Unit
from ..placement.tier import Tier
from ..plan.learnt_order import KnownSchedules, LearntOrder, learnt
from ..plan.schedule import Schedule, UseOrder
from ..plan.schedule_follower import AccessOrder, ScheduleFollower
from ..stores.store import Store
from ..stores.transfer import Transfer
from .backward import Backward
from .first_uses import FirstUses
from .forwards import Forwards
from .gradients import GradientBuffers
from .no_room import NOTHING_PLANNED, PlannedBytes
from .root_forward import RootPass
from .run import Run
from .runner import HeldBytes, NextLayout, Use
from .unit import StreamedUnit
from .unit_schedules import schedule_units

_get_thread = threading.get_ident
_NOTHING_LEARNT = LearntOrder()
TOLD_AT_ONCE = 64  # fetches after which a store is told anew what follows, at most


class Streamer:
    """The `Runner` of one layout. See the top of the file.

    ``store``: where the bytes of the units lie. ``tier``: the same object, asked for what a `Store` does not know: the list
    of units, staging memory, and residents that are not loaded yet.
    ``planned``: device memory that the plan gives to other things than the region.
    ``pool``: the units on the device. ``run``: uses them. ``follower``: the schedule of the learnt order.
    ``torn``: whether an interrupt (KeyboardInterrupt, for instance) ended a pass, and the slots were not brought into
    order yet (`interrupted`).
    """

    def __init__(
        self, engine: Engine, region_bytes: int, meter: Meter, tier: Tier, planned: PlannedBytes = NOTHING_PLANNED
    ) -> None:  # fmt: skip
        self.engine, self.meter, self.tier, self.planned = engine, meter, tier, planned
        self.region_bytes, self.next_layout = region_bytes, NextLayout()
        self.store: Store = tier
        self.staging: Staging | None = None  # set if units are copied packed
        self.units: list[StreamedUnit] = []
        self.lock = threading.RLock()
        self.slot_waiters = SlotWaiters(self.lock)
        self.closed = self.torn = False
        self.order = AccessOrder(())
        self._known = _NOTHING_LEARNT  # the order before this layout, with what its first pass has shown
        self._told: Schedule | None = None  # the schedule whose fetches the store knows
        self._told_until = 0  # the number of fetches up to which it knows them
        self._schedules = KnownSchedules()
        # Set during the first pass, if the use of some units is not known.
        self.first_uses: FirstUses | None = None
        self.memory = torch.empty(0, dtype=torch.uint8)  # all memory in which slots lie
        self.low = self.high = 0
        # True from the end of a backward that put gradients into host memory to the next forward.
        self.awaiting_optimizer = False
        self._gradient_buffers = GradientBuffers(engine)
        self.backward = Backward(self, self._gradient_buffers)
        self.forwards = Forwards(self)
        # Bound methods are stored once, because they are looked up for every operator and every saved tensor.
        self.computing, self.in_forward = self.forwards.computing, self.forwards.in_forward
        self.run_operator, self.handle = self.forwards.run_operator, self.backward.handle
        self.addressed = self.forwards.addressed
        self.transfer = Transfer(engine, meter)
        self.pool = Pool(engine, PoolMemory(engine), self.slot_waiters, self._others_active)
        self.run = self._make_run()
        self.follower = ScheduleFollower(self.order, self._make_schedule, self._schedules.passes_of(()))

    @property
    def device(self) -> torch.device:
        """The device on which the module computes."""
        return self.engine.device

    def start(
        self, arena: HostArena, known: LearntOrder = _NOTHING_LEARNT, schedules: KnownSchedules | None = None
    ) -> None:
        """Allocate the region for the tier's units, and start the tier. ``arena``: the allocator of gradient
        buffers. ``known``: the order of use under earlier layouts. ``schedules``: those made for earlier layouts.
        """
        self._known, self._schedules = known, schedules or self._schedules
        self._gradient_buffers.start(arena)
        self.units = [StreamedUnit(backing) for backing in self.tier.backings]
        self.order = self._expected_order(self._join_units())
        passes = self._schedules.passes_of(tuple(unit.backing.unit.names for unit in self.units))
        self.follower = ScheduleFollower(self.order, self._make_schedule, passes)
        if self.units:
            self.memory = self._make_region(self.region_bytes)
            self.low = self.memory.data_ptr()
            self.high = self.low + self.memory.numel()
        if self.tier.staging_bytes:
            self.staging = Staging(self.engine, self.tier.staging_bytes)
            self.transfer = Transfer(self.engine, self.meter, self.staging)
        # Kernels of other streams may still read the staging memory, because the allocator reuses memory.
        self.engine.synchronize()
        with self.lock:  # T2 of stores/store.py
            if not self.store.complete:
                self.read_ahead()
        self.tier.start(self.transfer, self)

    def _join_units(self) -> list[StreamedUnit]:
        """Return the units that stream at first."""
        return self.units

    def _make_region(self, nbytes: int) -> torch.Tensor:
        """Allocate the region of ``nbytes`` bytes, and return the memory in which all slots lie."""
        self.pool.set_region(nbytes)
        return self.pool.memory.region.memory

    def _others_active(self) -> bool:
        return self.forwards.other_thread_active() or self.backward.other_pass_active()

    def _make_run(self) -> Run:
        return Run(self, self.pool)

    def begin_step(self, gradient: bool, part: int) -> None:
        """Begin a step in the meter. The arguments are those of `Meter.forward_begins`."""
        self.meter.forward_begins(gradient, part)
        self.pool.wait = self.wait_timed if self.meter.timing else self.engine.wait

    def wait_timed(self, copied: Any) -> None:
        """Let the current stream wait for the event of the copy of the unit that is entered, in the meter's time."""
        before = self.meter.wait_begins()
        self.engine.wait(copied)
        self.meter.hold()
        self.meter.waited(before, self.engine.mark(), self.run.entering, managed_tensor.in_backward())

    def _make_schedule(self, order: UseOrder) -> Schedule:
        return schedule_units(order, self.tier.backings, self.region_bytes, self._schedules)

    # -- the order of use

    def _expected_order(self, units: Sequence[StreamedUnit]) -> AccessOrder:
        """Return a predictor that expects ``units`` as earlier layouts used them, or in the order of the model."""
        names = [unit.backing.unit.names for unit in units]
        uses = self._known.positions(names) if self._known.uses else []
        return AccessOrder(
            [unit.index for unit in units], learnt=[(units[place].index, kind) for place, kind in uses]
        )

    def watch(self, residents: Sequence[Unit], root: nn.Module) -> None:
        """Record in the first pass when those of ``residents``, units that stay on the device, are used whose place in
        the order is not known.
        """
        known = self._known.names()
        unknown = [unit for unit in residents if root not in unit.modules and known.isdisjoint(unit.names)]
        if unknown:
            self.first_uses = FirstUses(self.order, [unit.backing.unit.names for unit in self.units])
            self.first_uses.watch(unknown)

    def end_first_pass(self) -> None:
        """Note what the first pass has shown of the order of resident units."""
        first, self.first_uses = self.first_uses, None
        found = None if first is None else first.end()
        if found is not None:
            self._known = found.with_others(self._known)

    def learnt_order(self) -> LearntOrder | None:
        """Return the order of use of all units, as known now, or None after `close`."""
        if self.closed:
            return None
        names = [unit.backing.unit.names for unit in self.units]
        return learnt([(names[index], kind) for index, kind in self.order.uses()]).with_others(self._known)

    def expected_uses(self) -> list[tuple[int, bool]]:
        """Return the expected uses over one period, nearest first, as (unit, whether the use computes gradients)."""
        return self.order.expected()

    def finish_copies(self) -> None:
        """Wait until no copy reads host memory."""
        self.engine.synchronize()

    def in_host_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor``, or a copy of it in host memory if it is on a device."""
        host = torch.device("cpu")
        return tensor if self.engine.locate(tensor) == host else self.engine.move(tensor, host)

    def forget_views(self, unit: Any) -> None:
        """Forget the views of slots that were made for ``unit``, because the strides of one of its weights changed."""
        for proxy in self.units[unit.index].proxies:
            proxy.tensor = None
        self.run.slots.forget_views(self.units[unit.index])

    # -- using units

    def check_open(self, unit: StreamedUnit) -> None:
        """Raise CaromError if the session was closed, or if slots are in disorder after an interrupt and stay so. The message
        names ``unit``.
        """
        if self.closed:
            raise CaromError(
                f"unit {unit.name!r} is needed, but its session was closed, or its weights have moved since the forward"
            )
        if self.torn:
            self.recover()

    def read_back(self, backing: ManagedUnit, block: Block, after_fetch: Callable[[], None]) -> None:
        """Fetch the unit to a slot, call ``after_fetch``, and copy the slot's bytes to ``block``. Waits for
        the device.
        """
        unit, user = self.units[backing.index], User(_get_thread(), self.engine.stream())
        with self.lock:
            slot = self.run.acquire(unit, user)
        try:
            self.engine.synchronize()
            after_fetch()
            self.engine.synchronize(self.engine.copy_out(block.data, slot.views.base.detach()))
        finally:
            with self.lock:
                self.run.release(slot, (user,))

    def slot_at(self, address: int) -> Any:
        """Return the slot over ``address``, None if there is none."""
        return self.pool.memory.slot_at(address)

    def keep_version(self, slot: Any) -> None:
        """Note that the slot's bytes are those of the host now."""
        self.pool.keep_version(slot, slot.unit.version())

    def read_ahead(self) -> None:
        """Tell the store in which order units will be fetched, if that is not what it was told (T4 of stores/store.py)."""
        schedule = self.follower.schedule
        if schedule is not None and schedule is self._told and self.run.fetched < self._told_until:
            return
        if _get_thread() in self.run.issuing:
            return  # the garbage collector or a signal has called code that uses a unit (T2 of stores/store.py)
        upcoming = list(self.follower.upcoming())
        self.store.read_ahead([self.units[index].backing for index in upcoming])
        self._told = schedule
        # A store learns from the fetches how far the order was followed, until a unit is fetched for the second time. Tell it
        # the order anew after half of the different units: it reads ahead, so it needs to know what comes after them.
        self._told_until = self.run.fetched + min(TOLD_AT_ONCE, distinct_uses(upcoming) // 2)

    def evict_trainable(self) -> None:
        """Evict unused slots of trainable weights, because an optimizer is about to change the weights on the
        host.

        Waits for copies of these weights that are in progress.
        """
        self.awaiting_optimizer = True
        units = {unit for unit in self.units if unit.backing.trainable}
        for slot in self.pool.memory.slots():
            if slot.unit in units and slot.state in (SlotState.CACHED, SlotState.HELD):
                self.engine.synchronize(slot.now.copied)
        self.pool.drop_units(units)  # type: ignore[arg-type]

    def end_forward_uses(self) -> None:
        """End all uses of slots by forwards. Called after the forwards have failed. Uses by backward passes
        are not changed.
        """
        if not self.backward.has_uses:
            self._abandon_all()

    # -- interrupts

    def ended_by(self, error: BaseException) -> None:
        """Note that ``error`` ended what this thread does with slots. Only an interrupt leaves something to do."""
        if not isinstance(error, Exception):
            self.interrupted()

    def interrupted(self) -> None:
        """Note that an interrupt ends the passes of this thread.

        An interrupt may come between any two lines, so neither counters nor events can be relied on afterwards. Nothing
        is fetched until `recover` has brought the slots into order, which happens at once if no other thread's pass
        uses them.
        """
        self.torn = True
        managed_tensor.pop_left_handles(self)
        self.forwards.abandon()
        with self.lock:
            self.pool.abandon(_get_thread())  # threads that wait for a slot go on
            self.try_recover()

    def recover(self) -> None:
        """Bring the slots into order after an interrupt. Raises CaromError if another thread's pass uses them."""
        if not self.try_recover():
            raise CaromError(
                "a forward or backward of this session was interrupted (by a KeyboardInterrupt, for instance) while another "
                "thread's was running: call the module again once that one has ended"
            )

    def try_recover(self) -> bool:
        """Bring the slots into order after an interrupt, unless another pass uses them. Returns whether they are in
        order. Must be called under the lock.

        Everything is derived from what an interrupt cannot leave half done: the weights' homes hold all values, and
        a slot's state is one record. Waits for the device.
        """
        if self.closed or not self.torn:
            self.torn = False
            return True
        if self.forwards.other_thread_uses_slots() or self.backward.other_pass_active():
            return False
        self.engine.synchronize()
        self.forwards.restore_modules()
        self.backward.forget()
        self.slot_waiters.forget()
        self._drop_slots()
        self.follower.forget_position()
        self._told = None
        if self.staging is not None:
            self.staging.clear()
        self.store.recover()
        self.meter.abandon()
        self.torn = False
        return True

    def _abandon_all(self) -> None:
        threads = {_get_thread()}
        for slot in self.pool.memory.slots():
            threads |= {user.thread for user in slot.now.users}
            if slot.now.state is SlotState.FILLING:
                threads.add(slot.now.thread)
        for thread in threads:
            self.pool.abandon(thread)

    def _drop_slots(self) -> None:
        """Evict all slots, except those of which the model keeps views. Called while the device is idle."""
        self._abandon_all()
        self.run.issuing.clear()
        self.pool.drop_units(set(self.units))  # type: ignore[arg-type]
        self.run.held = [slot for slot in self.pool.memory.slots() if slot.state is SlotState.HELD]
        self.run.slots.drop_views()

    # -- passes

    def begin_pass(self, part: nn.Module | None) -> RootPass:
        """Begin a pass on this thread: the root's forward, or that of ``part``, a module below the root."""
        if not managed_tensor.in_backward():
            with self.lock:
                self.follower.expect_pass()
        self.forwards.root_begins(part)
        return RootPass(self)

    def in_use(self, by: Use) -> bool:
        """Return whether units are in use as ``by`` says."""
        match by:
            case Use.PASS:
                return not self.idle
            case Use.BACKWARD:
                return self.backward.running
            case Use.GRAPH:
                return any(unit.in_graphs for unit in self.units)
            case Use.WAIT:
                return self.slot_waiters.sleeping > 0

    @property
    def idle(self) -> bool:
        """Whether no pass is running, so that the layout may be changed."""
        return not (self.forwards.active or self.backward.running)

    def replace_slot_views(self, state: dict[str, Any], names: dict[str, Home]) -> None:
        """Replace slot views in the state dict ``state``, which was made while units run, by the values of
        the host tensors.

        ``names``: the home (the object that reads the host value) of each streamed tensor, by the tensor's
        name.
        """
        with self.lock:
            for name, home in names.items():
                tensor = state.get(name)
                if isinstance(tensor, torch.Tensor) and managed_tensor.in_slots(self, _address(tensor)):
                    state[name] = home.value()

    # -- closing

    def held_bytes(self) -> HeldBytes:
        """Return the device memory of the region and of the staging buffer, in bytes."""
        staging = 0 if self.staging is None else self.staging.nbytes
        return HeldBytes(0 if self.closed else self.region_bytes, staging)

    def close(self) -> None:
        """Wait for the device and release the region. Memory of running forwards is freed when their views
        are dropped. After an error everything is released nevertheless, and the call may be repeated.
        """
        run_all(self._wait_and_write_back, self._release_slots, self.store.close)

    def _wait_and_write_back(self) -> None:
        """Wait for the device, and copy values to the host that are only in slots."""
        with self.lock:
            try:
                self.engine.synchronize()
            except Exception:
                raise
            except BaseException:  # an interrupt: the device still works with the slots
                self.engine.synchronize()
                raise
            if not self.closed:
                self._write_back_held()

    def _write_back_held(self) -> None:
        """Copy values to the host that the model wrote through slot views which it still keeps."""
        for slot in self.run.held:
            with contextlib.suppress(UnsupportedError):
                self.forwards.write_back(slot)

    def _release_slots(self) -> None:
        """Give up all slots, and put the host tensors back into the modules."""
        with self.lock:
            self.closed = True
            self.end_first_pass()
            self.slot_waiters.slot_freed()  # waiting threads then raise CaromError
            self.forwards.restore_modules()
            self.backward.forget()
            self._gradient_buffers.close()
            for unit in self.units:
                unit.forget()
            self.run.held.clear()
            self.staging, self.transfer = None, Transfer(self.engine, self.meter)
            self.memory = torch.empty(0, dtype=torch.uint8)
            self.low = self.high = 0
            self.pool.close()
            self.run.slots.clear()
            self.follower.due.clear()
            self.follower.expect_pass()  # the latest pass becomes a known one


def distinct_uses(units: Sequence[int]) -> int:
    """Return the number of ``units`` before the first one that comes again."""
    seen: set[int] = set()
    for unit in units:
        if unit in seen:
            break
        seen.add(unit)
    return len(seen)


def _address(tensor: torch.Tensor) -> int:
    """Return the address of the tensor's bytes, 0 if the tensor has no storage."""
    try:
        with torch._C.DisableTorchFunctionSubclass():
            return tensor.data_ptr()
    except RuntimeError:  # tensor subclasses without storage
        return 0
