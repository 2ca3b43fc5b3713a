"""Defines `VbarSlots`: each unit has a fixed range (its home) in a VBAR of comfy-aimdo. A unit streams
through slots while its home has no memory.

A VBAR is a range of device addresses whose memory pages can be taken away when other programs need memory. (A
home in this module is a range of a VBAR, not a `model.home.Home`.) A unit is a group of tensors that are
copied together. The VBAR begins with the slot region, the device memory through which units stream. Its pages
are pinned permanently: they cannot be taken away. The homes follow in order of priority. Only pages below an
address, the watermark, may get memory. A unit whose home ends below the watermark stays at home: its bytes
are copied there once, and later the signature of the pages shows whether they still hold the bytes. The pages
of a home are pinned while the unit is in use. A unit whose home lost its memory streams like any other, from
the same host bytes, until the session raises the watermark again.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import torch

from ..device import vbar
from ..device.engine import Engine
from ..device.vbar import Bar, NativeError
from ..device.vbar_layout import PooledRegion, VbarRanges
from ..plan.region import Slot, SlotState

if TYPE_CHECKING:
    from .streamer import Streamer
    from .unit import StreamedUnit

OutOfMemory: Any = getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError)


class VbarSlots:
    """The homes of one streamer's units in the VBAR ``bar``. Their pages take at most ``room`` bytes. Must be
    called under the streamer's lock.
    """

    def __init__(self, engine: Engine, bar: Bar, homes: VbarRanges, room: int) -> None:
        self._engine = engine
        self._streamer: Streamer | None = None
        self._bar: Bar | _ClosedBar = bar
        self._homes = homes
        self._room = room // vbar.PAGE * vbar.PAGE
        self._region = PooledRegion(0, 0, [])
        self._region_pinned = False
        self._pins: list[Slot] = []  # slots (at home) of units whose pages are pinned
        # Signatures of the pages of each home when the unit was copied there, by the unit's index.
        self._signatures: dict[int, tuple[int, ...]] = {}
        self._losses = 0
        self._trouble = ""
        self._watermark = self._allowed  # the watermark as last known
        bar.set_watermark(self._watermark)

    @property
    def streamer(self) -> Streamer:
        """The streamer that these homes serve."""
        assert self._streamer is not None
        return self._streamer

    @property
    def units(self) -> list[StreamedUnit]:
        """The units that have homes."""
        return self.streamer.units

    @property
    def lock(self) -> threading.RLock:
        """The streamer's lock."""
        return self.streamer.lock

    def join(self, streamer: Streamer) -> list[StreamedUnit]:
        """Attach these homes to ``streamer``, which has its units already. Returns the units that stream at
        first.
        """
        self._streamer = streamer
        return self.away

    def make_region(self, nbytes: int, largest: int) -> PooledRegion:
        """Create and return the slot region of ``nbytes`` in front of the homes. ``largest``: bytes of the
        largest unit.
        """
        self._region = PooledRegion(nbytes, largest, [start for start, _ in self._homes.places.values()])
        return self._region

    def has(self, slot: Slot) -> bool:
        """Return whether the slot is a unit's home, and not in the slot region."""
        return slot.offset >= self._region.nbytes

    @property
    def _allowed(self) -> int:
        """The highest watermark, in bytes, with which the VBAR's pages take at most the room."""
        return min(self._bar.nbytes, self._room + self._unbacked_bytes)

    @property
    def _unbacked_bytes(self) -> int:
        """Bytes of the slot region while it has no memory yet. They are in front of the homes, and do not
        count against the room.
        """
        return self._homes.begin if self._homes.later and not self._region_pinned else 0

    def reserve(self) -> torch.Tensor:
        """Return the VBAR's memory as a tensor, with the slot region first. Raises torch.OutOfMemoryError if
        no page is free.
        """
        bar = self._bar
        assert isinstance(bar, Bar)
        if not self._homes.later:
            self.pin_region()
            return self._engine.at(bar.address, bar.nbytes, bar)
        # torch can determine the device of an address only while the address has memory.
        if bar.fault(0, 1) is None:
            raise OutOfMemory(f"carom: no page of {vbar.PAGE} bytes is free on {self._engine.name}")
        memory = self._engine.at(bar.address, bar.nbytes, bar)
        bar.unpin(0, 1)
        bar.set_watermark(0)  # release the page
        bar.prioritize()
        bar.set_watermark(self._watermark)
        return memory

    def pin_region(self) -> None:
        """Pin memory for the slot region permanently. Homes lose memory if the room does not suffice for
        both. Raises torch.OutOfMemoryError.
        """
        if self._region_pinned:
            return
        self._region_pinned = True
        if self._watermark > self._allowed:
            self._lower_watermark(self._allowed)
        if self._bar.fault(0, self._homes.region_bytes) is None and not self._retry_pinning():
            self._region_pinned = False
            raise OutOfMemory(
                f"carom: no {self._homes.region_bytes} bytes are free for slots on {self._engine.name}"
            )
        self.note_losses()

    def _retry_pinning(self) -> bool:
        """Raise the watermark if past memory pressure left it below the end of the slot region, and try again
        to pin the region.

        Returns whether the region is pinned.
        """
        self._bar.prioritize()
        pages = -(-self._homes.region_bytes // vbar.PAGE) * vbar.PAGE
        self._bar.set_watermark(max(pages, -(-self._watermark // vbar.PAGE) * vbar.PAGE))
        return self._bar.fault(0, self._homes.region_bytes) is not None

    # -- units at home and units that stream

    @property
    def away(self) -> list[StreamedUnit]:
        """The units that stream."""
        return [unit for unit in self.units if not self.at_home(unit)]

    def at_home(self, unit: StreamedUnit) -> bool:
        """Return whether the unit may stay at its home."""
        return self._homes.places[unit.index][1] <= self._watermark

    @property
    def held_bytes(self) -> int:
        """Device memory in bytes that the VBAR takes now."""
        return self._bar.loaded_bytes

    @property
    def most_bytes(self) -> int:
        """Device memory in bytes that the VBAR may take at most."""
        return max(0, self._allowed - self._unbacked_bytes)

    @property
    def now_bytes(self) -> int:
        """The part of `most_bytes` that the VBAR may use under the present memory pressure of other programs."""
        return max(0, -(-self._watermark // vbar.PAGE) * vbar.PAGE - self._unbacked_bytes)

    @property
    def slot_bytes(self) -> int:
        """Bytes of the slot region, 0 while it has no memory."""
        return self._homes.region_bytes if self._region_pinned else 0

    @property
    def trouble(self) -> str:
        """The error text of the native memory pool, "" if there was none."""
        return self._trouble

    def losses(self) -> int:
        """Return how many times memory pressure has taken memory from homes since the last call."""
        with self.lock:
            self.note_losses()
            found, self._losses = self._losses, 0
            return found

    @property
    def reduced(self) -> bool:
        """Whether memory pressure has taken memory from homes that fit in the room."""
        return self._watermark < self._allowed

    def holds(self, room: int, whole: bool) -> bool:
        """Return whether a room of ``room`` bytes needs no new layout. ``whole``: whether the room would hold
        every unit.
        """
        if whole and self._region_pinned and self._homes.nbytes > room // vbar.PAGE * vbar.PAGE:
            return False  # a new layout would need no slots, and could hold every unit
        return room // vbar.PAGE * vbar.PAGE >= self._homes.region_bytes

    def prioritize(self) -> None:
        """Let other VBARs of this process lose memory before this VBAR, and allow memory for all homes within
        the room again.

        Must be called between passes.
        """
        self.rise(self._room)
        with self.lock:
            self._bar.prioritize()
            self._bar.set_watermark(-(-self._watermark // vbar.PAGE) * vbar.PAGE)

    def deprioritize(self) -> None:
        """Let this VBAR lose memory before the other VBARs of this process."""
        with self.lock:
            self._bar.deprioritize()

    def limit(self, room: int) -> None:
        """Set the room to ``room`` bytes of pages. Homes lose memory, or may get memory again. Must be called
        between passes.
        """
        with self.lock:
            self._room = room // vbar.PAGE * vbar.PAGE
            if self._allowed < self._watermark:
                self._lower_watermark(self._allowed)
            else:
                self.rise(room)

    def rise(self, room: int) -> None:
        """Raise the watermark so that more homes may have memory, within ``room`` bytes of pages and within the
        limit that `limit` set. Must be called between passes.
        """
        with self.lock:
            top = min(self._allowed, room // vbar.PAGE * vbar.PAGE + self._unbacked_bytes)
            if top > self._watermark:
                self._bar.prioritize()
                self._watermark = top
                self._bar.set_watermark(top)

    def _lower_watermark(self, top: int) -> None:
        """Lower the watermark to ``top`` bytes. Evict the slots of unpinned homes that end above the
        watermark.
        """
        self._watermark = min(self._watermark, top)
        self._bar.set_watermark(-(-self._watermark // vbar.PAGE) * vbar.PAGE)
        self._forget_lost()

    def note_losses(self) -> None:
        """Compare the watermark with its last known value, and record the homes that lost their memory to
        memory pressure.
        """
        now = self._watermark if isinstance(self._bar, _ClosedBar) else self._bar.watermark
        if now < self._watermark:
            self._watermark = now
            self._losses += 1
            self._forget_lost()

    def _forget_lost(self) -> None:
        """Evict the slots of unpinned homes that end above the watermark."""
        for slot in [slot for slot in self.slots if slot.end > self._watermark and slot not in self._pins]:
            self.streamer.evict(slot)

    @property
    def slots(self) -> list[Slot]:
        """The slots of units that are at home."""
        return list(self._region.homes.values())

    # -- using units

    def acquire(self, unit: StreamedUnit, backward: bool) -> Slot | None:
        """Return the unit's slot at home, in use and readable on the current stream. Returns None if the unit
        has to stream.
        """
        slot = self._home_of(unit)
        if slot is None:
            return None
        streamer = self.streamer
        streamer.last = None if backward else unit
        slot.users += 1
        slot.state = SlotState.IN_USE
        try:
            streamer.wait(slot)
        except BaseException:
            slot.users -= 1
            slot.state = SlotState.IN_USE if slot.users else SlotState.KEPT
            self.unpin_idle()
            raise
        return slot

    def _home_of(self, unit: StreamedUnit) -> Slot | None:
        """Return the unit's slot at home, pinned and with the unit's bytes. Returns None if the unit has to
        stream.
        """
        streamer = self.streamer
        if streamer.held or streamer.backward.has_uses:
            streamer.end_finished_uses(unit)
        slot = unit.slot
        if slot is not None and not self.has(slot):
            if not self.at_home(unit) or slot.users or slot.state is SlotState.HELD:
                return None
            self.streamer.evict(slot)  # this slot is in the region, and the home has memory again
            slot = None
        if slot is not None and slot in self._pins:
            if slot.users or slot.version == unit.version():
                return slot
        elif not self.at_home(unit):
            return None
        return self._fill_home(unit)

    def _fill_home(self, unit: StreamedUnit) -> Slot | None:
        """Pin the unit's home, and copy the unit there unless the pages still hold its bytes. Returns None if
        there is no memory.
        """
        start, end = self._homes.places[unit.index]
        slot = unit.slot
        if slot is None or slot not in self._pins:
            signature = self._fault(start, end)
            if signature is None:
                return None
            if signature != self._signatures.get(unit.index):
                self.note_losses()  # the pages are new, so other homes may have lost their pages
            elif slot is not None and slot.version == unit.version():
                self._pins.append(slot)
                return slot
        else:  # the home is pinned because the model keeps a view, and the host bytes have changed
            signature = self._signatures[unit.index]
            self._pins.remove(slot)
        try:
            if slot is not None:
                self.streamer.evict(slot)
            tier = self.streamer.tier
            if not tier.complete:
                tier.open()
                # The learnt order contains only units that stream. So read the units at home ahead in the
                # order of the model.
                following = [other.index for other in self.units[unit.index + 1 :] if other.slot is None]
                tier.expect([unit.index, *following])
            slot = self.streamer.fill(unit, start, [])
        except BaseException:
            self._bar.unpin(start, end)
            raise
        self._signatures[unit.index] = signature
        self._pins.append(slot)
        return slot

    def _fault(self, start: int, end: int) -> tuple[int, ...] | None:
        """Pin the pages from ``start`` to ``end``. Returns the signature of the pages, or None if there is no
        memory.
        """
        try:
            signature = self._bar.fault(start, end)
        except NativeError as error:  # memory is short: the unit streams from now on
            self._trouble, signature = str(error), None
        if signature is None:
            self.note_losses()
            # Memory for the pages was refused although they are below the watermark. Lower the watermark, so
            # that this home is not tried again.
            if self._watermark >= end:
                self._losses += 1
                self._lower_watermark(start)
        return signature

    def release(self, slot: Slot, streams: set | None = None) -> None:
        """Release one use of a slot at home, as `Streamer.release` does for slots in the region."""
        streamer = self.streamer
        with streamer.lock:
            try:
                for stream in streams or (self._engine.stream(),):
                    slot.reads[stream] = self._engine.record(stream, slot.reads.get(stream))
            except BaseException:
                # Without an event of the last reads, the slot may be overwritten only when the device is
                # idle, so wait for that.
                self._engine.synchronize()
                raise
            finally:
                slot.users -= 1
                if slot.users == 0:
                    slot.state = SlotState.KEPT
                streamer.slot_waiters.slot_freed()
            over = slot.users == 0 and slot.unit.slot is slot
            if over and streamer.views(slot).kept_elsewhere() and streamer.kept_by_model(slot):
                slot.state = SlotState.HELD
                if slot not in streamer.held:
                    streamer.held.append(slot)
            self.unpin_idle()

    def unpin_idle(self) -> None:
        """Unpin unused homes, so that memory pressure may take their pages. comfy-aimdo waits for the device
        before it takes pages.
        """
        idle = [slot for slot in self._pins if slot.users == 0 and slot.state is not SlotState.HELD]
        for slot in idle:
            self._pins.remove(slot)
            self._bar.unpin(*self._homes.places[slot.unit.index])
            if slot.end > self._watermark and slot.unit.slot is slot:
                self.streamer.evict(slot)

    # -- end

    def drop_slots(self, held: list[Slot]) -> None:
        """Drop the slots at home that are not ``held``. Called after an interrupt, while the device is idle."""
        for slot in [slot for slot in self._pins if slot not in held]:
            self._pins.remove(slot)
            self._bar.unpin(*self._homes.places[slot.unit.index])
        self._region.homes = {slot.offset: slot for slot in self.slots if slot in held}
        self._signatures = {slot.unit.index: self._signatures[slot.unit.index] for slot in self._pins}

    def close(self) -> None:
        """Release the pages now, except pages of which other code keeps views."""
        self._region.homes.clear()
        bar, self._bar = self._bar, _ClosedBar()
        self._region_pinned = False
        if isinstance(bar, Bar):
            with contextlib.suppress(NativeError):
                for slot in self._pins:
                    if slot.users == 0 and slot.state is not SlotState.HELD:
                        bar.unpin(*self._homes.places[slot.unit.index])
                bar.set_watermark(0)
        self._pins.clear()
        self._signatures.clear()


class _ClosedBar:
    """A substitute for a closed VBAR, without memory. After this replaces the VBAR, only tensors that use the
    VBAR's memory keep it alive.
    """

    nbytes = loaded_bytes = watermark = 0

    def fault(self, start: int, end: int) -> tuple[int, ...] | None:
        """Return None: a closed VBAR has no memory."""
        return None

    def unpin(self, start: int, end: int) -> None:
        """Do nothing: pins end with the VBAR."""

    def prioritize(self) -> None:
        """Do nothing: a closed VBAR has no pages."""

    def deprioritize(self) -> None:
        """Do nothing: a closed VBAR has no pages."""

    def set_watermark(self, nbytes: int) -> None:
        """Do nothing: a closed VBAR has no pages."""
