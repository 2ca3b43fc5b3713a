"""Streaming with weights that may give way: each unit has a home in a VBAR, and streams through slots when it is not there.

The VBAR begins with the slot region, pinned for good; homes follow in the order in which they are to stay. What ends
below the watermark lives at home: it is brought once, found there by its signature, pinned while it is in use. What
pressure took streams as any other unit, from the same host bytes, until the session lets the watermark rise again.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from . import aimdo
from .aimdo import Bar, NativeError
from .disk_streamer import DiskStreamer
from .homes import Homes, PooledRegion
from .schedule import Order
from .slots import Slot, SlotState
from .store.arena import HostArena
from .streamed import Streamed
from .streamer import Streamer

OutOfMemory: Any = getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError)


class Pooled(Streamer):
    """A streamer whose units may live at home. `move_in` comes before `start`."""

    remembers = False  # homes come and go
    region: PooledRegion

    def move_in(self, bar: Bar, homes: Homes, room: int) -> None:
        """Let units live in ``bar``, with at most ``room`` bytes of pages."""
        self._bar: Bar | _Gone = bar
        self._homes = homes
        self._room = room // aimdo.PAGE * aimdo.PAGE
        self._region_pinned = False
        self._pins: list[Slot] = []  # of homes
        self._signatures: dict[int, tuple[int, ...]] = {}  # of what was brought home, by unit
        self._losses = 0
        self._trouble = ""
        self._top = self._allowed  # homes that end below it may be lived in, as far as is known
        bar.set_watermark(self._top)

    @property
    def _allowed(self) -> int:
        """The watermark that keeps to the room."""
        return min(self._bar.nbytes, self._room + self._apart)

    @property
    def _apart(self) -> int:
        """Bytes below the homes that have no memory yet."""
        return self._homes.begin if self._homes.later and not self._region_pinned else 0

    def start(self, arena: HostArena) -> None:
        super().start(arena)
        starts = [start for start, _ in self._homes.places.values()]
        self.region = PooledRegion(self.region.nbytes, max(unit.nbytes for unit in self.units), starts)
        self.order = Order([unit.index for unit in self.away])

    def _reserve(self) -> torch.Tensor:
        bar = self._bar
        assert isinstance(bar, Bar)
        if not self._homes.later:
            self._pin_region()
            return self.engine.at(bar.address, bar.nbytes, bar)
        # A device address has a device only while it has memory.
        if bar.fault(0, 1) is None:
            raise OutOfMemory(f"carom: no page of {aimdo.PAGE} bytes is free on {self.engine.name}")
        memory = self.engine.at(bar.address, bar.nbytes, bar)
        bar.unpin(0, 1)
        bar.set_watermark(0)  # the page goes again
        bar.prioritize()
        bar.set_watermark(self._top)
        return memory

    def _pin_region(self) -> None:
        """Memory for the slots, for good; homes give way where the room does not hold both."""
        if self._region_pinned:
            return
        self._region_pinned = True
        if self._top > self._allowed:
            self._lower(self._allowed)
        if self._bar.fault(0, self._homes.region_bytes) is None and not self._insist():
            self._region_pinned = False
            raise OutOfMemory(
                f"carom: no {self._homes.region_bytes} bytes are free for slots on {self.engine.name}"
            )
        self.notice()

    def _insist(self) -> bool:
        """Pressure that has passed may have left a watermark below the slots: lift it over them, and try once more."""
        self._bar.prioritize()
        pages = -(-self._homes.region_bytes // aimdo.PAGE) * aimdo.PAGE
        self._bar.set_watermark(max(pages, -(-self._top // aimdo.PAGE) * aimdo.PAGE))
        return self._bar.fault(0, self._homes.region_bytes) is not None

    # -- what lives where

    @property
    def away(self) -> list[Streamed]:
        """The units that stream."""
        return [unit for unit in self.units if not self._at_home(unit)]

    def _at_home(self, unit: Streamed) -> bool:
        return self._homes.places[unit.index][1] <= self._top

    @property
    def held_bytes(self) -> int:
        """Device memory of the VBAR now."""
        return self._bar.loaded_bytes

    @property
    def most_bytes(self) -> int:
        """Device memory that the VBAR may have at once."""
        return max(0, self._allowed - self._apart)

    @property
    def now_bytes(self) -> int:
        """Of `most_bytes`, what pressure has left."""
        return max(0, -(-self._top // aimdo.PAGE) * aimdo.PAGE - self._apart)

    @property
    def slot_bytes(self) -> int:
        return self._homes.region_bytes if self._region_pinned else 0

    @property
    def trouble(self) -> str:
        """What the native pool failed with, "" where it did not."""
        return self._trouble

    def losses(self) -> int:
        """How often pressure took homes since this was asked last."""
        with self.lock:
            self.notice()
            found, self._losses = self._losses, 0
            return found

    @property
    def reduced(self) -> bool:
        """Whether homes that the room would hold were taken."""
        return self._top < self._allowed

    def holds(self, room: int, whole: bool) -> bool:
        """Whether ``room`` bytes can be kept to without a new layout; ``whole``: they would hold every unit."""
        if whole and self._region_pinned and self._homes.nbytes > room // aimdo.PAGE * aimdo.PAGE:
            return False  # without slots everything would be at home
        return room // aimdo.PAGE * aimdo.PAGE >= self._homes.region_bytes

    def limit(self, room: int) -> None:
        """At most ``room`` bytes of pages from now on: homes give way, or are wanted again. Between passes only."""
        with self.lock:
            self._room = room // aimdo.PAGE * aimdo.PAGE
            if self._allowed < self._top:
                self._lower(self._allowed)
            else:
                self.rise(room)

    def rise(self, room: int) -> None:
        """Homes are wanted again, as far as ``room`` bytes of pages (and the limit) go. Between passes only."""
        with self.lock:
            top = min(self._allowed, room // aimdo.PAGE * aimdo.PAGE + self._apart)
            if top > self._top:
                self._bar.prioritize()
                self._top = top
                self._bar.set_watermark(top)

    def _lower(self, top: int) -> None:
        self._top = min(self._top, top)
        self._bar.set_watermark(-(-self._top // aimdo.PAGE) * aimdo.PAGE)
        self._forget_lost()

    def notice(self) -> None:
        """Learn what pressure took since the last look."""
        now = self._top if isinstance(self._bar, _Gone) else self._bar.watermark
        if now < self._top:
            self._top = now
            self._losses += 1
            self._forget_lost()

    def _forget_lost(self) -> None:
        for slot in [slot for slot in self._home_slots if slot.end > self._top and slot not in self._pins]:
            self._evict(slot)

    @property
    def _home_slots(self) -> list[Slot]:
        return list(self.region.homes.values()) if isinstance(self.region, PooledRegion) else []

    # -- using units

    def _acquire(self, unit: Streamed, backward: bool) -> Slot:
        with self.lock:
            slot = None if self.closed else self._home_of(unit)
            if slot is None:
                return super()._acquire(unit, backward)
            self.last = None if backward else unit
            slot.users += 1
            slot.state = SlotState.IN_USE
            try:
                self.wait(slot)
            except BaseException:
                slot.users -= 1
                slot.state = SlotState.IN_USE if slot.users else SlotState.KEPT
                self._unpin_idle()
                raise
            return slot

    def used_on(self, slot: Slot) -> None:
        if slot.offset < self.region.nbytes:
            super().used_on(slot)

    def _home_of(self, unit: Streamed) -> Slot | None:
        """The unit's slot at home, pinned and filled; None where it has to stream."""
        if self.held or self.backward.reading:
            self.settle(unit)
        slot = unit.slot
        if slot is not None and slot.offset < self.region.nbytes:
            if not self._at_home(unit) or slot.users or slot.state is SlotState.HELD:
                return None
            self._evict(slot)  # home again
            slot = None
        if slot is not None and slot in self._pins:
            if slot.users or slot.version == unit.version():
                return slot
        elif not self._at_home(unit):
            return None
        return self._bring_home(unit)

    def _bring_home(self, unit: Streamed) -> Slot | None:
        start, end = self._homes.places[unit.index]
        slot = unit.slot
        if slot is None or slot not in self._pins:
            signature = self._fault(start, end)
            if signature is None:
                return None
            if signature != self._signatures.get(unit.index):
                self.notice()  # it was mapped: other homes may have made room
            elif slot is not None and slot.version == unit.version():
                self._pins.append(slot)
                return slot
        else:  # a view of it is kept, and the host's bytes are others now
            signature = self._signatures[unit.index]
            self._pins.remove(slot)
        try:
            if slot is not None:
                self._evict(slot)
            slot = self.fill(unit, start, [])
        except BaseException:
            self._bar.unpin(start, end)
            raise
        self._signatures[unit.index] = signature
        self._pins.append(slot)
        return slot

    def _fault(self, start: int, end: int) -> tuple[int, ...] | None:
        try:
            signature = self._bar.fault(start, end)
        except NativeError as error:  # known to happen when memory is short: the unit streams from now on
            self._trouble, signature = str(error), None
        if signature is None:
            self.notice()
            if self._top >= end:  # refused though it is below the watermark: do not ask again
                self._losses += 1
                self._lower(start)
        return signature

    def release(self, slot: Slot, streams: set | None = None) -> None:
        if slot.offset < self.region.nbytes:
            super().release(slot, streams)
            return
        with self.lock:
            try:
                for stream in streams or (self.engine.stream(),):
                    slot.reads[stream] = self.engine.record(stream, slot.reads.get(stream))
            except BaseException:
                # Without the event nobody may overwrite the slot before the device is idle.
                self.engine.synchronize()
                raise
            finally:
                slot.users -= 1
                if slot.users == 0:
                    slot.state = SlotState.KEPT
                self._waiting.slot_freed()
            over = slot.users == 0 and slot.unit.slot is slot
            if over and self.views(slot).kept_elsewhere() and self._kept_by_others(slot):
                slot.state = SlotState.HELD
                if slot not in self.held:
                    self.held.append(slot)
            self._unpin_idle()

    def _unpin_idle(self) -> None:
        """Homes that nobody uses may be taken. (comfy-aimdo waits for the device before it takes one.)"""
        idle = [slot for slot in self._pins if slot.users == 0 and slot.state is not SlotState.HELD]
        for slot in idle:
            self._pins.remove(slot)
            self._bar.unpin(*self._homes.places[slot.unit.index])
            if slot.end > self._top and slot.unit.slot is slot:
                self._evict(slot)

    def settle(self, unit: Streamed | None = None) -> None:
        super().settle(unit)
        self._unpin_idle()

    # -- slots

    def _fetch(self, unit: Streamed) -> Slot:
        self._pin_region()
        return super()._fetch(unit)

    def ready(self, unit: Streamed) -> bool:
        return not self._at_home(unit) and super().ready(unit)

    def _look_ahead(self) -> None:
        if self._region_pinned:
            super()._look_ahead()

    def rest(self) -> None:
        super().rest()
        for slot in self._home_slots:
            if slot.unit.trainable and slot.users == 0 and slot.state is not SlotState.HELD:
                self.engine.synchronize(slot.copied)
                self._evict(slot)

    def free_all(self) -> None:
        super().free_all()
        for slot in self._home_slots:
            self._free(slot)
        self._unpin_idle()

    # -- end

    def close(self) -> None:
        """As the base does; pages are given back now, but for those under views that others keep."""
        with self.lock:
            super().close()
            if isinstance(self.region, PooledRegion):
                self.region.homes.clear()
            bar, self._bar = self._bar, _Gone()
            self._region_pinned = False
            if isinstance(bar, Bar):
                with contextlib.suppress(NativeError):
                    for slot in self._pins:
                        if slot.users == 0 and slot.state is not SlotState.HELD:
                            bar.unpin(*self._homes.places[slot.unit.index])
                    bar.set_watermark(0)
            self._pins.clear()
            self._signatures.clear()


class _Gone:
    """In the place of a VBAR that was left: tensors over it keep it, and nothing else."""

    nbytes = loaded_bytes = watermark = 0

    def fault(self, start: int, end: int) -> tuple[int, ...] | None:
        return None

    def unpin(self, start: int, end: int) -> None:
        """What was pinned goes with the VBAR."""

    def prioritize(self) -> None:
        """Nothing is left to be wanted."""

    def set_watermark(self, nbytes: int) -> None:
        """Nothing is left."""


class PooledStreamer(Pooled, Streamer):
    """Homes and slots filled from host memory."""


class PooledDiskStreamer(Pooled, DiskStreamer):
    """Homes and slots filled through a host cache from disk."""

    def _bring(self, unit: Streamed, target: torch.Tensor, after: list[Any]) -> Any:
        if self.cache is not None and not self.cache.complete and self._at_home(unit):
            # The order knows of what streams only: what else is not there yet is read ahead in the model's own order.
            following = [other.index for other in self.units[unit.index + 1 :] if other.slot is None]
            self.cache.expect([unit.index, *following])
        return super()._bring(unit, target, after)
