"""Defines `Streamer`: fetches streamed units into device slots ahead of their use, and orders copies and
kernels by events.

A unit is a group of tensors that are copied together. A slot is the device memory that holds a unit while it
is used. The region is the device memory of all slots. All methods that change slots run under one lock, and
no call waits for the device, except where a docstring or a comment says so. Kernels that read a slot run only
on streams that wait for the event of the slot's copy. A copy overwrites a slot only after the events of the
slot's last reads, on whichever streams these reads were issued (backward and recomputation run on autograd's
threads).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from ..common.errors import CaromError, UnsupportedError
from ..common.run_all import run_all
from ..device.engine import Engine
from ..device.slot_wait import SlotWaiters
from ..device.staging import Staging
from ..host.arena import Block, HostArena
from ..metrics.meter import Meter
from ..model import managed_tensor
from ..model.home import Home, ManagedUnit
from ..model.units import Unit
from ..placement.backing import Backing, Link
from ..placement.tier import Tier
from ..plan.access_order import AccessOrder
from ..plan.learnt_order import LearntOrder, learnt
from ..plan.region import FreedRanges, Region, Slot, SlotState
from .backward import Backward
from .first_uses import FirstUses, names_of
from .forward import Runs, restore_weight_lists
from .gradients import GradientBuffers
from .host_mapped_slots import NOTHING_RESERVED, HostMappedSlots, ReservedBytes, no_room
from .prefetch import Prefetcher, fetch_order
from .root_forward import RootPass
from .runner import HeldBytes, Use
from .unit import StreamedUnit, Views, make_views

if TYPE_CHECKING:
    from .vbar_slots import VbarSlots

_OFFSET_BITS = 48
_NOTHING_LEARNT = LearntOrder()


class Streamer:
    """The `Runner` of one layout: the slots of its streamed units, in one region of device memory.

    ``tier``: the store of the units, which makes their backings (the objects that copy a unit's bytes).
    ``vbar``: the range of device addresses (VBAR) in which units may stay on the device beside the slots,
    None without comfy-aimdo.
    ``reserved``: device memory that the plan reserves outside the region.
    ``held``: slots of which the model keeps views beyond the unit's forward.
    ``last``: the unit that was used last in a forward.
    ``torn``: whether an interrupt (KeyboardInterrupt, for instance) ended a pass, and the slots were not brought into
    order yet (`interrupted`).
    """

    # Whether prefetch decisions may be cached, where they depend only on the order of use and the region.
    caches_decisions = True

    def __init__(
        self, engine: Engine, region_bytes: int, meter: Meter, tier: Tier, vbar: VbarSlots | None = None,
        reserved: ReservedBytes = NOTHING_RESERVED,
    ) -> None:  # fmt: skip
        self.engine, self.meter, self.tier, self.vbar, self.reserved = engine, meter, tier, vbar, reserved
        self.staging: Staging | None = None  # set if units are copied packed
        self.units: list[StreamedUnit] = []
        self.lock = threading.RLock()
        self.slot_waiters = SlotWaiters(self.lock)
        self.closed = self.torn = False
        self.order = AccessOrder(())
        self._known = _NOTHING_LEARNT  # the order before this layout, with what its first pass has shown
        self.first_uses: FirstUses | None = (
            None  # set during the first pass, if the use of some units is not known
        )
        self.region = Region(region_bytes, 0)
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.low = self.high = 0
        self._freed = FreedRanges()
        self.held: list[Slot] = []
        self.last: StreamedUnit | None = None  # last unit used in a forward; None after a use for gradients
        self.prefetcher = Prefetcher(self, self.caches_decisions and vbar is None and not tier.reads_ahead)
        # True from the end of a backward that put gradients into host memory to the next forward.
        self.awaiting_optimizer = False
        self._gradient_buffers = GradientBuffers(engine)
        self.backward = Backward(self, self._gradient_buffers)
        self.runs = Runs(self)
        # Bound methods are stored once, because they are looked up for every operator and every saved tensor.
        self.computing, self.in_forward = self.runs.computing, self.runs.in_forward
        self.run_operator, self.handle = self.runs.run_operator, self.backward.handle
        self.addressed, self.to_stay = self.runs.addressed, self.runs.to_stay
        self.host_mapped = HostMappedSlots(self)
        self.mapped = self.host_mapped.ranges
        self.link = self._link(None)

    @property
    def device(self) -> torch.device:
        """The device on which the module computes."""
        return self.engine.device

    def start(self, arena: HostArena, known: LearntOrder = _NOTHING_LEARNT) -> None:
        """Allocate the region for the tier's units, and start the tier. ``arena``: the allocator of gradient
        buffers. ``known``: the order of use under earlier layouts.
        """
        self._known = known
        self._gradient_buffers.start(arena)
        self.host_mapped.start(arena)
        self.units = [StreamedUnit(backing) for backing in self.tier.backings]
        nbytes, largest = self.region.nbytes, max((unit.nbytes for unit in self.units), default=0)
        if self.vbar is None:
            self.order = self._expected_order(self.units)
            self.region = Region(nbytes, largest)
        else:
            self.order = self._expected_order(self.vbar.join(self))
            self.region = self.vbar.make_region(nbytes, largest)
        if self.units:
            self.memory = self.engine.allocate(nbytes) if self.vbar is None else self.vbar.reserve()
            self.low = self.memory.data_ptr()
            self.high = self.low + self.memory.numel()
        staging_bytes = self.tier.staging_bytes
        if staging_bytes:
            self.staging = Staging(self.engine, staging_bytes)
            self.link = self._link(self.staging)
        # The region may be memory that kernels of other streams still read, because the allocator reuses it.
        # Wait before the first copy into the region.
        self.engine.synchronize()
        self.tier.start(self.link)

    # -- the order of use

    def _expected_order(self, units: Sequence[StreamedUnit]) -> AccessOrder:
        """Return a predictor that expects ``units`` as earlier layouts used them, or in the order of the model."""
        names = [names_of(unit.backing.unit) for unit in units]
        uses = self._known.positions(names) if self._known.uses else []
        return AccessOrder(
            [unit.index for unit in units], learnt=[(units[place].index, kind) for place, kind in uses]
        )

    def watch(self, residents: Sequence[Unit], root: nn.Module) -> None:
        """Record in the first pass when those of ``residents``, units that stay on the device, are used whose place in
        the order is not known.
        """
        known = self._known.names()
        unknown = [
            unit for unit in residents if root not in unit.modules and known.isdisjoint(names_of(unit))
        ]
        if unknown:
            self.first_uses = FirstUses(self.order, [names_of(unit.backing.unit) for unit in self.units])
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
        names = [names_of(unit.backing.unit) for unit in self.units]
        return learnt([(names[index], kind) for index, kind in self.order.uses()]).with_others(self._known)

    def expected_uses(self) -> list[tuple[int, bool]]:
        """Return the expected uses over one period, nearest first, as (unit, whether the use computes gradients)."""
        return self.order.expected()

    # -- using units

    def acquire(self, unit: StreamedUnit, backward: bool = False) -> Slot:
        """Return the unit's slot, which kernels on the current stream may read from now on. Every call is
        paired with `release`.

        ``backward``: whether the slot is used to compute gradients. Raises BudgetError if every slot is in
        use and the device cannot read the unit from host memory.
        """
        # Disable dispatch modes (fake tensors, operator counters), which must not see Carom's copies.
        if torch._C._len_torch_dispatch_stack():
            with _disable_current_modes():
                return self._acquire(unit, backward)
        return self._acquire(unit, backward)

    def _acquire(self, unit: StreamedUnit, backward: bool) -> Slot:
        """Do the work of `acquire` under the lock."""
        with self.lock:
            if self.closed or self.torn:
                self._check_open(unit)
            if self.vbar is not None:
                slot = self.vbar.acquire(unit, backward)
                if slot is not None:
                    return slot
            if self.held or self.backward.has_uses:
                self.end_finished_uses(unit)
            foreseen = self.order.access(unit.index, backward, managed_tensor.in_backward())
            self.last = None if backward else unit
            slot = unit.slot
            if slot is not None and slot.users == 0 and slot.version != unit.version():
                self.evict(slot)
                slot = None
            if slot is None:
                slot = self._fetch(unit)
                foreseen = False
            slot.users += 1
            slot.state = SlotState.IN_USE
            try:
                if self.meter.profiling:
                    came = self.engine.mark()
                    self.wait(slot)
                    self.meter.unit_begins(unit.name, came, self.engine.mark())
                else:
                    self.wait(slot)
                # if the use was foreseen, the last release has already prefetched all that fits
                if not foreseen:
                    self._prefetch()
            except Exception:
                slot.users -= 1
                slot.state = SlotState.IN_USE if slot.users else SlotState.KEPT
                raise
            return slot

    def used_on(self, slot: Slot) -> None:
        """Record that a slot in use is now used to compute gradients. Must be called under the lock."""
        if self.vbar is not None and self.vbar.has(slot):
            return
        self.last = None
        if not self.order.access(slot.unit.index, True, managed_tensor.in_backward()):
            self._prefetch()

    def release(self, slot: Slot, streams: set | None = None) -> None:
        """End one use of the slot. Called after the kernels that read it have been issued on ``streams``
        (default: the current stream).
        """
        if self.vbar is not None and self.vbar.has(slot):
            self.vbar.release(slot, streams)
            return
        with self.lock:
            try:
                engine, reads = self.engine, slot.reads
                if self.meter.profiling:
                    self.meter.unit_ends(slot.unit.name, engine.mark())
                for stream in streams or (engine.stream(),):
                    reads[stream] = engine.record(stream, reads.get(stream))
            except BaseException:
                # Without an event of the last reads, the slot may be overwritten only when the device is
                # idle, so wait for that.
                with contextlib.suppress(Exception):
                    self.engine.synchronize()
                raise
            finally:
                slot.users -= 1
                if slot.users == 0:
                    slot.state = SlotState.KEPT
                self.slot_waiters.slot_freed()
            if slot.users == 0 and slot.unit.backing.trainable:
                slot.unit.empty_proxies()
            if slot.users == 0 and slot.unit.slot is slot:
                if slot.views.kept_elsewhere() and self.kept_by_model(slot):
                    slot.state = SlotState.HELD
                    if slot not in self.held:
                        self.held.append(slot)
                else:
                    slot.state = SlotState.KEPT
                # Do not prefetch if prefetching would stop at the same unit as last time. But while units are
                # still being read from disk, prefetch anyway: a read may have ended since, and the tier has
                # to be told of every use.
                if not (self.tier.complete and self.prefetcher.still_stuck(slot)):
                    self._prefetch()

    def release_all(self, uses: Sequence[tuple[Slot, set | None]]) -> None:
        """Release the slots of all ``uses``, even if a release fails. Raises the first error afterwards."""
        failure: BaseException | None = None
        for slot, streams in uses:
            try:
                self.release(slot, streams)
            except BaseException as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def kept_by_model(self, slot: Slot) -> bool:
        """Return whether the model keeps a view of the slot.

        Views in modules' lists of weights and in cached wrapper objects are dropped first, because they are
        Carom's own.
        """
        views, homes = slot.views, slot.unit.homes
        if views.around is not None:  # wrapper objects of quantised weights may cache views
            views.around.clear()
        restore_weight_lists(
            slot.unit, {id(view): home.tensor for view, home in zip(views.tensors, homes, strict=True)}
        )
        return views.kept_elsewhere()

    def views(self, slot: Slot) -> Views:
        """Return views of the unit's tensors in ``slot``."""
        return slot.views or self._make_views(slot)

    def _make_views(self, slot: Slot) -> Views:
        """Return views of the unit's tensors at the slot's offset. They are made once for each offset."""
        unit = slot.unit
        found = unit.views.get(slot.offset)
        if found is None:
            with torch.inference_mode(False), torch.no_grad():
                base = self.engine.alias(self.memory, slot.offset, unit.nbytes)
            found = make_views(unit, base)
            unit.remember(slot.offset, found)
        slot.views = found
        return found

    def finish_copies(self) -> None:
        """Wait until no copy reads host memory."""
        self.engine.synchronize()

    def in_host_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor``, or a copy of it in host memory if it is on a device."""
        host = torch.device("cpu")
        return tensor if self.engine.locate(tensor) == host else self.engine.move(tensor, host)

    def forget_views(self, unit: ManagedUnit) -> None:
        """Forget the views of slots that were made for ``unit``, because the strides of one of its weights changed."""
        streamed = self.units[cast("Backing", unit).index]
        streamed.views.clear()
        for proxy in streamed.proxies:
            proxy.tensor = None

    def wait(self, slot: Slot) -> None:
        """Let the current stream wait for the event of the copy to the slot."""
        stream = self.engine.stream()
        if stream in slot.waited:
            return
        if self.meter.timing:
            before = self.meter.wait_begins()
            self.engine.wait(slot.copied)
            self.meter.hold()
            self.meter.waited(before, self.engine.mark(), slot.unit.name, managed_tensor.in_backward())
        else:
            self.engine.wait(slot.copied)
        slot.waited.add(stream)

    # -- fetching

    def _check_open(self, unit: StreamedUnit) -> None:
        """Raise CaromError if the session was closed, or if an interrupt left the slots in disorder. The message
        names ``unit``.
        """
        if self.closed:
            raise CaromError(
                f"unit {unit.name!r} is needed, but its session was closed, or its weights have moved since the forward"
            )
        if self.torn:
            self.recover()

    def _fetch(self, unit: StreamedUnit) -> Slot:
        """Fetch a unit that is needed now. Slots that are not in use may be evicted for it."""
        if self.vbar is not None:
            self.vbar.pin_region()
        if not self.tier.complete:
            self.tier.open()
            self._expect(unit)
        place = self.region.place(unit.nbytes, self.prefetcher.uses())
        deadline = self.slot_waiters.new_deadline()
        while place is None:
            freed = self._wait_for_slot(deadline)
            self._check_open(unit)  # the session may have been closed meanwhile
            if not freed:
                return self._outside_region(unit)
            if unit.slot is not None:  # another thread fetched the unit meanwhile
                return unit.slot
            self.end_finished_uses(unit)
            place = self.region.place(unit.nbytes, self.prefetcher.uses())
        self.prefetcher.filling = True
        try:
            return self.fill(unit, *place)
        finally:
            self.prefetcher.filling = False

    def _outside_region(self, unit: StreamedUnit) -> Slot:
        """Return a slot in host memory for a unit that finds no room in the region. Raises BudgetError if the
        device cannot read host memory.
        """
        slot = self.host_mapped.slot(unit)
        stuck = [other for other in self.region.slots if other.users or other.state is SlotState.HELD]
        if slot is None:
            raise no_room(self, unit, stuck)
        held = [other.unit for other in stuck if other.state is SlotState.HELD]
        for other in held or [unit]:
            reason = "the model keeps it beyond its unit's run" if held else "used together with other units"
            for home in other.homes:
                self.runs.to_stay.setdefault(home.entry.name, reason)
        return slot

    def _wait_for_slot(self, deadline: float) -> bool:
        """Wait until another thread releases a slot. Returns False if waiting cannot help or ``deadline`` has
        passed.
        """
        mine = self.runs.slots_used_by_thread() + self.backward.slots_used_by(threading.get_ident())
        views_may_be_dropped = bool(self.held) and (
            self.runs.other_thread_active() or self.backward.other_pass_active()
        )
        return self.slot_waiters.wait_for_slot(mine, self.region.users, views_may_be_dropped, deadline)

    def fill(self, unit: StreamedUnit, offset: int, victims: list[Slot]) -> Slot:
        """Evict ``victims``, and enqueue the fetch of ``unit`` into a new slot at ``offset`` in the region.
        Returns the slot.
        """
        for victim in victims:
            self.evict(victim)
        slot = Slot(unit, offset, unit.nbytes, unit.version(), unit.index << _OFFSET_BITS | offset)
        after, left = self._freed.events_over(offset, slot.end)
        slot.copied = unit.backing.fetch(self.views(slot).target, after, self.link)
        self._freed = left
        self.prefetcher.changed()
        self.region.add(slot)
        unit.slot = slot
        return slot

    def _link(self, staging: Staging | None) -> Link:
        """Return the objects with which backings copy from host to device. ``staging``: memory for packed
        bytes, None if none are.
        """
        return Link(
            self.engine, self.meter, self.lock, staging,
            upcoming=lambda: self.order.upcoming(),
            foresee=lambda: self._expect(None),
            idle=lambda: self.idle,
            mapped_bytes=lambda: self.host_mapped.nbytes,
        )  # fmt: skip

    def read_back(self, backing: Backing, block: Block, after_fetch: Callable[[], None]) -> None:
        """Fetch the unit to a slot, call ``after_fetch``, and copy the slot's bytes to ``block``. Waits for
        the device.
        """
        unit = self.units[backing.index]
        slot = self.acquire(unit)
        try:
            self.engine.synchronize()
            after_fetch()
            self.engine.synchronize(self.engine.copy_out(block.data, self.views(slot).base.detach()))
        finally:
            self.release(slot)

    def evict(self, slot: Slot) -> None:
        """Remove the slot from the region. Later copies into its memory wait for the events of its last
        reads.
        """
        self.prefetcher.changed()
        self._freed.add(slot)  # recorded first, so that a KeyboardInterrupt in between cannot lose the events
        self.region.remove(slot)
        if slot.unit.slot is slot:
            slot.unit.slot = None
        self.engine.freed(self.memory, slot.offset, slot.end)

    def ready(self, unit: StreamedUnit) -> bool:
        """Return whether the unit may be prefetched.

        False if the unit is in the VBAR and needs no slot, or if an optimizer is about to change its host
        bytes.
        """
        if self.vbar is not None and self.vbar.at_home(unit):
            return False
        return not (self.awaiting_optimizer and unit.backing.trainable)

    def _prefetch(self) -> None:
        """Prefetch the units that are needed next, and let the tier read later ones ahead."""
        if self.vbar is not None and not self.vbar.slot_bytes:
            return
        self.prefetcher.prefetch()
        if not self.tier.complete:
            self._expect(None)

    def _expect(self, unit: StreamedUnit | None) -> None:
        """Tell the tier in which order units will be fetched.

        Units whose slots will still hold them at their next use come last, because they have to be fetched
        only later.
        ``unit``: the unit that is needed now, None if there is none.
        """
        if self.tier.complete:
            return
        self.tier.expect(fetch_order(self.order, self.region, self.units, unit, self.tier.used_lately))

    # -- uses of slots that end

    def end_finished_uses(self, unit: StreamedUnit | None = None) -> None:
        """End uses of slots that are over: those of a backward pass that goes on to ``unit``, and those of
        slots whose views were dropped.
        """
        self.release_all(self.backward.take_finished_uses(unit))
        if self.held:
            gone = [slot for slot in self.held if not self.views(slot).kept_elsewhere()]
            for slot in self.held:
                self.runs.write_back(slot)
            for slot in gone:
                self.held.remove(slot)
                if slot.users == 0:
                    slot.reads[self.engine.stream()] = self.engine.record(self.engine.stream())
                    slot.state = SlotState.KEPT
        if self.vbar is not None:
            self.vbar.unpin_idle()

    def evict_trainable(self) -> None:
        """Evict unused slots of trainable weights, because an optimizer is about to change the weights on the
        host.

        Waits for copies of these weights that are in progress.
        """
        self.awaiting_optimizer = True
        slots = self.region.slots if self.vbar is None else [*self.region.slots, *self.vbar.slots]
        for slot in [slot for slot in slots if slot.unit.backing.trainable and slot.users == 0]:
            self.engine.synchronize(slot.copied)
            if slot.state is not SlotState.HELD:
                self.evict(slot)

    def free_all(self) -> None:
        """End all uses of slots by forwards. Called after the forwards have failed. Uses by backward passes
        are not changed.
        """
        self.prefetcher.changed()
        self.prefetcher.filling = False
        for slot in self.region.slots if self.vbar is None else [*self.region.slots, *self.vbar.slots]:
            self._free(slot)
        if self.vbar is not None:
            self.vbar.unpin_idle()

    def _free(self, slot: Slot) -> None:
        """End the uses of the slot by forwards."""
        users = self.backward.use_count(slot)
        if slot.users != users:
            slot.users = users
            slot.reads[self.engine.stream()] = self.engine.record(self.engine.stream())
            if not users:
                slot.state = SlotState.KEPT

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
        self.runs.abandon()
        with self.lock:
            self.slot_waiters.slot_freed()  # threads that wait for a slot raise CaromError
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
        a slot is valid if the region and its unit both refer to it. Waits for the device.
        """
        if self.closed or not self.torn:
            self.torn = False
            return True
        if self.runs.other_thread_uses_slots() or self.backward.other_pass_active():
            return False
        self.engine.synchronize()
        self.runs.restore_modules()
        self.backward.forget()
        self.slot_waiters.forget()
        self._drop_slots()
        self.order.restart()
        self.prefetcher.restart()
        if self.staging is not None:
            self.staging.clear()
        self.tier.recover()
        self.meter.abandon()
        self.last = None
        self.torn = False
        return True

    def _drop_slots(self) -> None:
        """Evict all slots, except those of which the model keeps views. Called while the device is idle."""
        self.held = []
        for slot in self.region.slots if self.vbar is None else [*self.region.slots, *self.vbar.slots]:
            valid = slot.unit.slot is slot and slot.views is not None
            if valid and slot.views.kept_elsewhere() and self.kept_by_model(slot):
                slot.users, slot.state, slot.reads = 0, SlotState.HELD, {}
                self.held.append(slot)
        for unit in self.units:
            if unit.slot not in self.held:
                unit.slot = None
                unit.views.clear()
        freed = [slot for slot in self.region.slots if slot not in self.held]
        self.region.slots = [slot for slot in self.region.slots if slot in self.held]
        if self.vbar is not None:
            self.vbar.drop_slots(self.held)
        self._freed = FreedRanges()
        for slot in freed:
            self.engine.freed(self.memory, slot.offset, slot.end)

    # -- passes

    def begin_pass(self, part: nn.Module | None) -> RootPass:
        """Begin a pass on this thread: the root's forward, or that of ``part``, a module below the root."""
        self.runs.root_begins(part)
        return RootPass(self)

    def in_use(self, by: Use) -> bool:
        """Return whether units are in use as ``by`` says."""
        match by:
            case Use.PASS:
                return not self.idle
            case Use.BACKWARD:
                return self.backward.running
            case Use.GRAPH:
                return not self.unreferenced
            case Use.WAIT:
                return self.slot_waiters.sleeping > 0

    @property
    def idle(self) -> bool:
        """Whether no pass is running, so that the layout may be changed."""
        return not (self.runs.active or self.backward.running)

    @property
    def unreferenced(self) -> bool:
        """Whether no autograd graph holds handles of the units of this layout."""
        return not any(unit.in_graphs for unit in self.units)

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
        return HeldBytes(0 if self.closed else self.region.nbytes, staging)

    def _write_back_held(self) -> None:
        """Copy values to the host that the model wrote through slot views which it still keeps."""
        for slot in self.held:
            with contextlib.suppress(UnsupportedError):
                self.runs.write_back(slot)

    def close(self) -> None:
        """Wait for the device and release the region. Memory of running forwards is freed when their views
        are dropped. After an error everything is released nevertheless, and the call may be repeated.
        """
        run_all(self._wait_and_write_back, self._release_slots, self.tier.close, self.host_mapped.close)

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

    def _release_slots(self) -> None:
        """Give up all slots, and put the host tensors back into the modules."""
        with self.lock:
            self.closed = True
            self.end_first_pass()
            self.slot_waiters.slot_freed()  # waiting threads then raise CaromError
            self.runs.close()
            self.backward.forget()
            self._gradient_buffers.close()
            for unit in self.units:
                unit.slot = None
                unit.views.clear()
                unit.forget()
            self.region.slots.clear()
            self.held.clear()
            self.prefetcher.close()
            self.staging, self.link = None, self._link(None)
            self.memory = torch.empty(0, dtype=torch.uint8)
            self.low = self.high = 0
            if self.vbar is not None:
                self.vbar.close()


def _address(tensor: torch.Tensor) -> int:
    """Return the address of the tensor's bytes, 0 if the tensor has no storage."""
    try:
        with torch._C.DisableTorchFunctionSubclass():
            return tensor.data_ptr()
    except RuntimeError:  # tensor subclasses without storage
        return 0
