"""`DeviceWeights`: tells the budget ledger how much device memory a session's weights take, and what they can
give up.

Residents are weights that stay on the device. A slot is the device memory that holds a streamed unit (a group
of weights) while it is used. A VBAR is a range of device addresses of comfy-aimdo, whose pages can lose their
memory to other programs.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable

import torch

from ..device.engine import Engine
from ..placement.placement import wanted_residents
from ..plan.residency import resident_cost, round_up
from ..streaming.runner import Use
from ..streaming.vbar_slots import VbarSlots
from . import settings
from .layout_manager import LayoutManager
from .summary import Held
from .weight_pool import WeightPool, whole_pages

_ROUNDING = 1.03  # factor on a model's bytes, because allocators round sizes up


class DeviceWeights:
    """A `budget.holder.Holder` for the layouts of a `LayoutManager`. All sizes are device bytes.

    ``resize``: makes a layout for a budget in bytes.
    ``name``: the class name of the module, for messages.
    """

    def __init__(self, manager: LayoutManager, pool: WeightPool, resize: Callable[[int], None]) -> None:
        self._manager, self._pool = manager, pool
        self._engine: Engine = manager.engine
        self._ledger = manager.ledger
        self.resize = resize
        self.name = manager.module.name

    # -- answers to the ledger

    @property
    def closed(self) -> bool:
        """Whether no layout has been made yet, or the session was closed."""
        return self._manager.unused

    @property
    def attached(self) -> bool:
        """Whether a layout is in effect."""
        return self._manager.attached

    @property
    def vbar(self) -> VbarSlots | None:
        """The units' memory in a VBAR, None if torch's allocator is used."""
        return self._manager.vbar

    @property
    def held_bytes(self) -> int:
        """Device memory that weights take now: residents, slots, staging buffer, and units that stay on the
        device packed.
        """
        layout, pooled = self._manager.layout, self.vbar
        if pooled is not None:
            return layout.placement.resident_bytes + pooled.held_bytes
        held, placement = layout.runner.held_bytes(), layout.placement
        return placement.resident_bytes + held.slots + held.staging + placement.tier.device_bytes

    @property
    def pool_promise(self) -> int | None:
        """The most bytes that residents and the VBAR may take together, None if there is no VBAR."""
        pooled = self.vbar
        return None if pooled is None else self._manager.layout.placement.resident_bytes + pooled.most_bytes

    @property
    def vbar_bytes(self) -> int:
        """Device memory of the VBAR."""
        pooled = self.vbar
        return 0 if pooled is None else pooled.held_bytes

    @property
    def everything_bytes(self) -> int:
        """The bytes that all of the module's weights take on the device."""
        layout = self._manager.layout
        sizes = [unit.nbytes for unit in layout.carving.units]
        return layout.plan.fixed_bytes + resident_cost(sizes, self._engine.grain)

    @property
    def loading_bytes(self) -> int:
        """An upper limit of the bytes that all of the module's weights take on the device. Used before any
        layout was made.
        """
        root = self._manager.module.root
        sizes = (t.numel() * t.element_size() for t in (*root.parameters(), *root.buffers()))
        return int(sum(round_up(size, 512) for size in sizes) * _ROUNDING)

    @property
    def least_bytes(self) -> int:
        """The smallest budget that works with the module's present tensors."""
        manager = self._manager
        least = manager.planner.least_bytes(manager.wanted, manager.layout)
        pooled = self.vbar
        if pooled is None:
            return least
        largest = max(unit.nbytes for unit in pooled.units)
        return max(least, manager.layout.placement.resident_bytes + whole_pages(largest))

    @property
    def streamed_bytes(self) -> int:
        """Bytes of the units that stream now."""
        layout, pooled = self._manager.layout, self.vbar
        if pooled is not None:
            return sum(unit.nbytes for unit in pooled.away)
        return sum(unit.nbytes for unit in wanted_residents(layout.carving, layout.plan)[1])

    @property
    def waiting_bytes(self) -> int | None:
        """Host bytes that would be freed if the weights in host memory moved to a device that shares the
        host's memory.

        None for devices with memory of their own, and for weights from files.
        """
        manager = self._manager
        if not self._engine.shares_host or manager.module.checkpoint is not None:
            return None
        if not manager.attached:
            return settings.waiting_bytes(manager.module.root)
        return manager.layout.placement.wire_bytes

    @property
    def host_bytes(self) -> int:
        """Host bytes in which the weights wait now, or of the RAM cache of weights from files."""
        manager = self._manager
        if not manager.attached:
            return settings.waiting_bytes(manager.module.root)
        figures = manager.layout.placement.tier.figures()
        return figures.waiting_bytes if figures.read is None else figures.read.ram_peak_bytes

    @property
    def movable(self) -> bool:
        """Whether the session may move weights to or off the device on its own initiative.

        False for trainable weights under DistributedDataParallel: a weight that leaves the device and returns
        loses the hook on its gradient accumulator, so gradients would no longer be averaged. False for a
        module whose streamed weights were on the device originally: undoing a layout moves all of them to the
        device.
        """
        layout = self._manager.layout
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        return not (distributed and layout.carving.adapters) and not layout.placement.came_on_device

    @property
    def may_give(self) -> bool:
        """Whether residents may leave the device now.

        True if weights are movable, no autograd graph needs them, and no backward of the last step is
        outstanding.
        """
        layout = self._manager.layout
        return self.movable and not (layout.runner.in_use(Use.GRAPH) or layout.meter.awaiting)

    def hold_idle(self, locks: contextlib.ExitStack) -> bool:
        """Block passes of the session while ``locks`` are held. Returns False at once if a pass is running."""
        manager = self._manager
        if not manager.lock.acquire(blocking=False):
            return False
        locks.callback(manager.lock.release)
        if not manager.attached:
            return False
        runner = manager.layout.runner
        if not runner.lock.acquire(blocking=False):
            return False
        locks.callback(runner.lock.release)
        return not runner.in_use(Use.PASS)

    # -- reports to the ledger

    def account(self) -> None:
        """Report the bytes held to the ledger. Called after tensors moved to or off the device, or the budget
        changed.
        """
        pooled, ledger = self.vbar, self._ledger
        if pooled is None:
            ledger.note_held(self.held_bytes)
            return
        resident = self._manager.layout.placement.resident_bytes
        room = ledger.vram - resident
        if pooled.holds(room, whole=False) and pooled.most_bytes > room:
            pooled.limit(room)
        ledger.note_held(resident + pooled.most_bytes)
        self.follow_vbar(pooled)

    def follow_vbar(self, pooled: VbarSlots) -> None:
        """Update the plan with the units that are in the VBAR now."""
        layout = self._manager.layout
        plan, carving = layout.plan, layout.carving
        away = {id(unit.unit) for unit in pooled.away}
        resident = {
            index: plan.resident.get(index, "at home in the pool")
            for index, unit in enumerate(carving.units)
            if id(unit) not in away
        }
        if resident != plan.resident or pooled.slot_bytes != plan.region_bytes:
            slots = pooled.slot_bytes // carving.largest if carving.largest else 0
            self._manager.note_plan(
                dataclasses.replace(
                    plan,
                    resident=resident,
                    region_bytes=pooled.slot_bytes,
                    slots=slots,
                    predicted_seconds=None,
                )
            )

    def move_watermark(self, budget: int) -> bool:
        """Set the budget to ``budget`` bytes by moving the VBAR's watermark. Returns False if that needs a
        new layout.

        Pages of the VBAR above the watermark get no memory.
        """
        pooled = self.vbar
        room = budget - self._manager.layout.placement.resident_bytes
        if pooled is None or not pooled.holds(room, whole=budget >= self.everything_bytes):
            return False
        self._ledger.set(budget)
        pooled.limit(room)
        self.account()
        return True

    def holdings(self) -> Held:
        """Return the device bytes that the session holds, and their pool (allocator), for the report."""
        manager, ledger, pooled = self._manager, self._ledger, self.vbar
        if pooled is None:
            now, packed = manager.layout.runner.held_bytes(), manager.layout.placement.tier.figures()
            return Held(
                ledger.vram, ledger.peak_bytes, now.slots, now.staging, pool="torch", pool_reason=self._pool.reason,
                packed_bytes=packed.packed_resident_bytes, packed_raw_bytes=packed.packed_resident_raw_bytes,
                packed_units=packed.packed_resident_units,
            )  # fmt: skip
        reason = "; ".join(part for part in (self._pool.reason, pooled.trouble) if part)
        if not manager.phase.parked:
            with pooled.lock:
                pooled.note_losses()
                self.follow_vbar(pooled)
        slots, held = pooled.slot_bytes, pooled.held_bytes
        return Held(ledger.vram, ledger.peak_bytes, slots, 0, max(0, held - slots), "aimdo", reason)
