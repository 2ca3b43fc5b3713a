"""The mechanism: brings units into slots, tells when they may be read and overwritten, looks ahead.

Host threads enter under one lock; nothing here waits for the device. What a slot promises:
it is read only on streams that wait for its copy's event, and overwritten only by a copy that waits for
the events of its last reads, wherever those were issued (backward and recomputation on autograd threads).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from . import ops
from .backward import Backward
from .crossing import bring, prepare
from .errors import BudgetError, CaromError, UnsupportedError
from .from_host import FromHost
from .landing import Landings
from .lookahead import LookAhead
from .meter import Meter
from .packed_here import PackedHere
from .plan import round_up
from .runs import Runs, hand_back
from .schedule import Order
from .slots import Region, Slot, SlotState, Tails
from .staging import Staging
from .store.arena import Block, HostArena
from .streamed import Owner, Streamed, Views, make_views
from .transfer import Engine
from .units import Unit
from .waiting import Waiting

_OFFSET_BITS = 48


class Streamer:
    """Runs the streamed units of one session through one region of device memory."""

    remembers = True  # whether what is looked for ahead follows from the order of use and the region alone

    def __init__(self, engine: Engine, region_bytes: int, meter: Meter, staging_bytes: int = 0) -> None:
        self.engine, self.meter = engine, meter
        self._staging_bytes = staging_bytes
        self.staging: Staging | None = None  # where packed units have any
        self.packed_here = PackedHere(engine)
        self.units: list[Streamed] = []
        self.lock = threading.RLock()
        self._waiting = Waiting(self.lock)
        self.closed = False
        self.order = Order(())
        self.region = Region(region_bytes, 0)
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.low = self.high = 0
        self._tails = Tails()
        self.held: list[Slot] = []
        self.last: Streamed | None = None  # that was used, where not for gradients
        self.ahead = LookAhead(self, self.remembers)
        self.resting = False  # between a backward that made host gradients and the next forward
        self._landings = Landings(engine)
        self.backward = Backward(self, self._landings)
        self.runs = Runs(self)
        self.from_host = FromHost(self)
        self.fixed_bytes = 0  # device bytes of the plan beside the region

    def add(self, unit: Unit, index: int, block: Block) -> Streamed:
        """Take a unit whose bytes are in ``block``; its owners are added by the caller, before `start`."""
        streamed = Streamed(self, unit, index, block, nbytes=unit.nbytes)
        self.units.append(streamed)
        return streamed

    def start(self, arena: HostArena) -> None:
        """All units are known: make the region. Memory for gradients will come from ``arena``."""
        self._landings.start(arena)
        self.from_host.start(arena)
        for unit in self.units:
            unit.sites = [
                (site.table, site.name, which)
                for which, owner in enumerate(unit.owners)
                for site in owner.entry.sites
            ]
        self.order = Order([unit.index for unit in self.units])
        self.region = Region(self.region.nbytes, max((unit.nbytes for unit in self.units), default=0))
        if self.units:
            self.memory = self._reserve()
            self.low = self.memory.data_ptr()
            self.high = self.low + self.memory.numel()
        if any(unit.decoder is not None for unit in self.units):
            self.staging = Staging(self.engine, self._staging_bytes)
            prepare(self.staging, self.units, self.engine)
        # Memory that other streams were still using when it was freed must not be copied into early.
        self.engine.synchronize()

    def _reserve(self) -> torch.Tensor:
        return self.engine.allocate(self.region.nbytes)

    # -- using units

    def acquire(self, unit: Streamed, backward: bool = False) -> Slot:
        """The unit's slot, readable on the current stream from here on; pairs with `release`.

        Raises BudgetError when everything in the region is in use.
        """
        # Fake tensors, counters: our copies are none of their business.
        if torch._C._len_torch_dispatch_stack():
            with _disable_current_modes():
                return self._acquire(unit, backward)
        return self._acquire(unit, backward)

    def _acquire(self, unit: Streamed, backward: bool) -> Slot:
        with self.lock:
            if self.closed:
                self._need_open(unit)
            if self.held or self.backward.reading:
                self.settle(unit)
            foreseen = self.order.access(unit.index, backward, ops.in_backward())
            self.last = None if backward else unit
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
                if self.meter.profiling:
                    came = self.engine.mark()
                    self.wait(slot)
                    self.meter.came(unit.name, came, self.engine.mark())
                else:
                    self.wait(slot)
                if not foreseen:  # else the last release has asked for all that fits
                    self._look_ahead()
            except BaseException:
                slot.users -= 1
                slot.state = SlotState.IN_USE if slot.users else SlotState.KEPT
                raise
            return slot

    def used_on(self, slot: Slot) -> None:
        """A slot in use is used for gradients now (under the lock)."""
        self.last = None
        if not self.order.access(slot.unit.index, True, ops.in_backward()):
            self._look_ahead()

    def release(self, slot: Slot, streams: set | None = None) -> None:
        """The kernels that read the slot have been issued (on ``streams``; default: the current one)."""
        with self.lock:
            try:
                engine, reads = self.engine, slot.reads
                if self.meter.profiling:
                    self.meter.left(slot.unit.name, engine.mark())
                for stream in streams or (engine.stream(),):
                    reads[stream] = engine.record(stream, reads.get(stream))
            except BaseException:
                # Without the event nobody may overwrite the slot before the device is idle.
                with contextlib.suppress(Exception):
                    self.engine.synchronize()
                raise
            finally:
                slot.users -= 1
                if slot.users == 0:
                    slot.state = SlotState.KEPT
                self._waiting.slot_freed()
            if slot.users == 0 and slot.unit.trainable:
                slot.unit.park_sinks()
            if slot.users == 0 and slot.unit.slot is slot:
                if slot.views.kept_elsewhere() and self._kept_by_others(slot):
                    slot.state = SlotState.HELD
                    if slot not in self.held:
                        self.held.append(slot)
                else:
                    slot.state = SlotState.KEPT
                if not self._still_stuck(slot):
                    self._look_ahead()

    def release_all(self, uses: Sequence[tuple[Slot, set | None]]) -> None:
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
        """Whether anybody keeps a view once modules that list their weights have the host's back, and wrappers are let go."""
        views, owners = slot.views, slot.unit.owners
        if views.around is not None:  # a wrapper may remember views
            views.around.let_go()
        hand_back(slot.unit, {id(view): o.tensor for view, o in zip(views.tensors, owners, strict=True)})
        return views.kept_elsewhere()

    def views(self, slot: Slot) -> Views:
        """The unit's tensors in ``slot``."""
        return slot.views or self._made(slot)

    def _made(self, slot: Slot) -> Views:
        unit = slot.unit
        found = unit.views.get(slot.offset)
        if found is None:
            with torch.inference_mode(False), torch.no_grad():
                base = self.engine.alias(self.memory, slot.offset, unit.nbytes)
            found = make_views(unit, base)
            unit.remember(slot.offset, found)
        slot.views = found
        return found

    def wait(self, slot: Slot) -> None:
        """The current stream goes on only when the slot's bytes are there."""
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

    def _need_open(self, unit: Streamed) -> None:
        if self.closed:
            raise CaromError(f"unit {unit.name!r} is needed, but its session was closed")

    def _fetch(self, unit: Streamed) -> Slot:
        """Bring a unit that is needed now, at the cost of anything that is not in use."""
        place = self.region.place(unit.nbytes, self.ahead.uses())
        give_up = self._waiting.patience()
        while place is None:
            freed = self._freed_soon(give_up)
            self._need_open(unit)  # the region went while this thread slept
            if not freed:
                return self._outside_region(unit)
            if unit.slot is not None:  # another thread wanted the same unit
                return unit.slot
            self.settle(unit)
            place = self.region.place(unit.nbytes, self.ahead.uses())
        self.ahead.busy = True
        try:
            return self.fill(unit, *place)
        finally:
            self.ahead.busy = False

    def _outside_region(self, unit: Streamed) -> Slot:
        """A slot for a unit that finds no room in the region. Raises BudgetError where there can be none."""
        slot = self.from_host.slot(unit)
        stuck = [other for other in self.region.slots if other.users or other.state is SlotState.HELD]
        if slot is None:
            needed = unit.nbytes + sum(other.nbytes for other in stuck)
            least = self.fixed_bytes + round_up(needed, self.engine.grain)
            raise BudgetError(self._no_room(unit, stuck, least), least)
        held = [other.unit for other in stuck if other.state is SlotState.HELD]
        for other in held or [unit]:
            reason = "the model keeps it beyond its unit's run" if held else "used together with other units"
            for owner in other.owners:
                self.runs.to_stay.setdefault(owner.entry.name, reason)
        return slot

    def _freed_soon(self, give_up: float) -> bool:
        """Wait for another thread's slot; False when none will be freed by waiting."""
        mine = self.runs.mine() + self.backward.uses(threading.get_ident())
        momentary = bool(self.held) and (self.runs.elsewhere() or self.backward.elsewhere())
        return self._waiting.another(mine, self.region.users, momentary, give_up)

    def fill(self, unit: Streamed, offset: int, victims: list[Slot]) -> Slot:
        for victim in victims:
            self._evict(victim)
        slot = Slot(unit, offset, unit.nbytes, unit.version(), unit.index << _OFFSET_BITS | offset)
        after, left = self._tails.over(offset, slot.end)
        slot.copied = self._bring(unit, self.views(slot).target, after)
        self._tails = left
        self.ahead.changed()
        self.region.add(slot)
        unit.slot = slot
        return slot

    # Issues the copy of a unit's bytes to a target once events are reached: its done event.
    _bring = bring

    def stay_packed(self, units: Sequence[Streamed]) -> None:
        """From now on ``units`` are unpacked from the device's own memory. Raises torch.OutOfMemoryError."""
        if units:
            self.packed_here.keep(units)

    def packed_leave(self, wanted: int) -> int:
        """Units that stay packed give up ``wanted`` bytes, what is needed last first; returns how many it was."""
        return self.packed_here.leave(wanted, lambda unit: self.order.next_place(unit.index))

    def _evict(self, slot: Slot) -> None:
        self.ahead.changed()
        self._tails.leave(slot)  # first: an interrupt between the two must not lose its events
        self.region.remove(slot)
        if slot.unit.slot is slot:
            slot.unit.slot = None
        self.engine.freed(self.memory, slot.offset, slot.end)

    def _still_stuck(self, released: Slot) -> bool:
        """Whether looking ahead would end where it did last."""
        return self.ahead.still_stuck(released)

    def ready(self, unit: Streamed) -> bool:
        """Whether the unit may be brought ahead: its bytes will not change before they are used."""
        return not (self.resting and unit.trainable)

    def late(self, unit: Streamed) -> bool:
        """Whether the unit's bytes are still on their way to the host. Nothing that is needed after it is brought
        before it: that would lie in its place, be given up for it unused, and cross twice."""
        return False

    def _look_ahead(self) -> None:
        """Ask for what is expected next, as far as that evicts nothing needed sooner."""
        self.ahead.look()

    def _no_room(self, unit: Streamed, stuck: list[Slot], least: int) -> str:
        names = ", ".join(repr(slot.unit.name) for slot in stuck)
        return (
            f"no slot for unit {unit.name!r} ({unit.nbytes} bytes): the region of {self.region.nbytes} bytes is taken "
            f"by {names}, in use at the same time or kept by the model beyond their run, and {self.engine.name} cannot read "
            f"host memory that is not pinned; raise vram to {least} bytes or ram, use a finer granularity, or enable "
            "gradient checkpointing"
        )

    # -- uses that end

    def settle(self, unit: Streamed | None = None) -> None:
        """End uses that are over: another unit's turn in this thread's backward, views dropped at last."""
        self.release_all(self.backward.settle(unit))
        if self.held:
            gone = [slot for slot in self.held if not self.views(slot).kept_elsewhere()]
            for slot in self.held:
                self.runs.keep_writes(slot)
            for slot in gone:
                self.held.remove(slot)
                if slot.users == 0:
                    slot.reads[self.engine.stream()] = self.engine.record(self.engine.stream())
                    slot.state = SlotState.KEPT

    def rest(self) -> None:
        """An optimizer is about to change the host weights: nothing of them may be kept or on its way."""
        self.resting = True
        for slot in [slot for slot in self.region.slots if slot.unit.trainable and slot.users == 0]:
            self.engine.synchronize(slot.copied)
            if slot.state is not SlotState.HELD:
                self._evict(slot)

    def free_all(self) -> None:
        """End the uses of forwards: what was under way has been given up. Backwards end theirs themselves."""
        self.ahead.changed()
        self.ahead.busy = False
        for slot in self.region.slots:
            self._free(slot)

    def _free(self, slot: Slot) -> None:
        users = self.backward.readings(slot)
        if slot.users != users:
            slot.users = users
            slot.reads[self.engine.stream()] = self.engine.record(self.engine.stream())
            if not users:
                slot.state = SlotState.KEPT

    @property
    def idle(self) -> bool:
        """Whether no pass is under way, so that tensors may be laid out anew."""
        return not (self.runs.active or self.backward.running)

    @property
    def unreferenced(self) -> bool:
        """Whether no autograd graph is left that would ask for today's units."""
        return not any(unit.in_graphs for unit in self.units)

    def true_values(self, state: dict[str, Any], names: dict[str, Owner]) -> None:
        """Replace slot views in a state dict (taken while units run) by the host tensors they stand for."""
        with self.lock:
            for name, owner in names.items():
                tensor = state.get(name)
                if isinstance(tensor, torch.Tensor) and self.low <= _address(tensor) < self.high:
                    state[name] = owner.value()

    # -- host bytes that change

    def refresh(self, units: list[Streamed] | None = None) -> None:
        """Do not trust kept copies of ``units`` (default: all)."""
        with self.lock:
            for unit in self.units if units is None else units:
                unit.epoch += 1

    # -- end

    def _keep_last_writes(self) -> None:
        """What the model wrote through views that it still keeps."""
        for slot in self.held:
            with contextlib.suppress(UnsupportedError):
                self.runs.keep_writes(slot)

    def make_host_room(self, nbytes: int) -> None:
        """``nbytes`` of host memory are about to be taken for this streamer."""

    def close(self) -> None:
        """Wait for the device and give the region up. Runs in progress keep their views alive."""
        with self.lock:
            self.engine.synchronize()
            if not self.closed:
                self._keep_last_writes()
            self.closed = True
            self._waiting.slot_freed()  # whoever waits for one is told that there will be none
            self.runs.close()
            self.backward.close()
            self._landings.close()
            self.packed_here.close()
            self.from_host.close()
            for unit in self.units:
                unit.slot = unit.decoder = None
                unit.views.clear()
            self.region.slots.clear()
            self.held.clear()
            self.ahead = LookAhead(self, False)  # what it knows would keep the region
            self.staging = None
            self.memory = torch.empty(0, dtype=torch.uint8)
            self.low = self.high = 0


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # no storage of its own
        return 0


__all__ = ["Owner", "Streamed", "Streamer", "Views"]
