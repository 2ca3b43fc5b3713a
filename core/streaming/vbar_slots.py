"""Defines `VbarSlots`: each unit has a fixed range (its home) in a VBAR of comfy-aimdo. A unit streams
through slots while its home has no memory.

A VBAR is a range of device addresses whose memory pages can be taken away when other programs need memory. (A
home in this module is a range of a VBAR, not a `model.home.Home`.) A unit is a group of tensors that are
copied together. The VBAR begins with the slot region, the device memory through which units stream. From the
first unit that streams on, its pages stay pinned: they cannot be taken away. The homes follow in order of priority. Only pages below an
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
from ..device.pool_memory import Chunk
from ..device.slot import Issue, Slot, SlotState, User
from ..device.vbar import Bar, NativeError
from ..device.vbar_layout import VbarRanges
from .unit import StreamedUnit

if TYPE_CHECKING:
    from .vbar_streamer import VbarStreamer

OutOfMemory: Any = getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError)
_WITH_BYTES = frozenset({SlotState.CACHED, SlotState.IN_USE, SlotState.HELD})


class VbarSlots:
    """The homes of one streamer's units in the VBAR ``bar``. Their pages take at most ``room`` bytes. Must be
    called under the streamer's lock.
    """

    def __init__(self, engine: Engine, bar: Bar, homes: VbarRanges, room: int) -> None:
        self._engine = engine
        self._streamer: VbarStreamer | None = None
        self._bar: Bar | _ClosedBar = bar
        self._homes = homes
        self._room = room // vbar.PAGE * vbar.PAGE
        self._region_pinned = False
        self._chunk: Chunk | None = None  # the memory of all homes
        self._slots: dict[int, Slot] = {}  # the slot at home of each unit that was there, by the unit's index
        self._pins: list[Slot] = []  # slots (at home) of units whose pages are pinned
        # Signatures of the pages of each home when the unit was copied there, by the unit's index.
        self._signatures: dict[int, tuple[int, ...]] = {}
        self._losses = 0
        self._trouble = ""
        self._watermark = self._allowed  # the watermark as last known
        bar.set_watermark(self._watermark)

    @property
    def streamer(self) -> VbarStreamer:
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

    def join(self, streamer: VbarStreamer) -> list[StreamedUnit]:
        """Attach these homes to ``streamer``, which has its units already. Returns the units that stream at
        first.
        """
        self._streamer = streamer
        return self.away

    def has(self, slot: Slot) -> bool:
        """Return whether the slot is a unit's home, and not in the slot region."""
        return self._slots.get(slot.unit.index) is slot  # type: ignore[attr-defined]

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
        """Give the streamer's pool the memory of the slot region and of the homes. Returns the memory of the whole VBAR.

        Raises torch.OutOfMemoryError if no page is free.
        """
        bar, homes = self._bar, self._homes
        assert isinstance(bar, Bar)
        if not homes.later:
            self.pin_region()
            memory = self._engine.at(bar.address, bar.nbytes, bar)
        else:
            # torch can determine the device of an address only while the address has memory.
            if bar.fault(0, 1) is None:
                raise OutOfMemory(f"carom: no page of {vbar.PAGE} bytes is free on {self._engine.name}")
            memory = self._engine.at(bar.address, bar.nbytes, bar)
            bar.unpin(0, 1)
            bar.set_watermark(0)  # release the page
            bar.prioritize()
            bar.set_watermark(self._watermark)
        with torch.inference_mode(False), torch.no_grad():
            region, rest = memory[: homes.region_bytes], memory[homes.begin :]
        self._chunk = self.streamer.pool.memory.set_ranges(region, rest)
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
                away = self.away
                self._bar.prioritize()
                self._watermark = top
                self._bar.set_watermark(top)
                # What lies in the region is used there, so units would not come home as long as the region keeps them.
                self.streamer.pool.drop_units([unit for unit in away if self.at_home(unit)])

    def _lower_watermark(self, top: int) -> None:
        """Lower the watermark to ``top`` bytes. Unpinned homes that end above the watermark lose their units."""
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
        """Note that unpinned homes that end above the watermark have lost their units."""
        for slot in self._slots.values():
            if slot not in self._pins:
                self._lose_above(slot)

    def _lose_above(self, slot: Slot) -> None:
        """Note that the home ``slot``, which is not pinned, has lost its unit, if it ends above the watermark."""
        if self._range_of(slot)[1] > self._watermark:
            self._lose(slot)

    def _lose(self, slot: Slot) -> None:
        """Note that the home ``slot``, which is not pinned, has lost its unit, if it had it."""
        if slot.state is SlotState.CACHED:
            self.streamer.pool.lose_slot(slot)

    def _range_of(self, slot: Slot) -> tuple[int, int]:
        """Return where in the VBAR the home ``slot`` begins and ends."""
        return self._homes.begin + slot.offset, self._homes.begin + slot.end

    # -- using units

    def enter_home(self, unit: StreamedUnit, user: User) -> Slot | None:
        """Let ``user`` read the unit at its home on its stream, the current one. Returns the home's slot, or None if the
        unit has to stream.

        The pages stay pinned until `unpin_idle` finds the slot unused.
        """
        known = self._slots.get(unit.index)
        pinned = known is not None and known in self._pins
        if pinned:
            assert known is not None
            # Until the unit is entered, the pin is this call's: the garbage collector may unpin idle homes in between.
            self._pins.remove(known)
            signature = self._signatures[unit.index]
        else:
            found = self._fault(*self._homes.places[unit.index]) if self.at_home(unit) else None
            if found is None:
                return None
            signature = found
        entered = None
        try:
            home = known or self._make_slot(unit)
            if signature != self._signatures.get(unit.index):
                self._lose(home)
                self._signatures[unit.index] = signature
            version, now = unit.version(), home.now
            there = now.state in _WITH_BYTES and (now.version == version or bool(now.users))
            if there or self._fill_home(unit, home, version):
                entered = self.streamer.pool.enter(unit, version, user)
            return entered
        finally:
            if pinned or (entered is not None and entered is self._slots.get(unit.index)):
                self._pins.append(self._slots[unit.index])
            else:
                self._bar.unpin(*self._homes.places[unit.index])

    def _make_slot(self, unit: StreamedUnit) -> Slot:
        """Return a new slot at the unit's home, which is pinned: torch makes tensors only over addresses with memory."""
        assert self._chunk is not None
        offset = self._homes.places[unit.index][0] - self._homes.begin
        made = self._slots[unit.index] = self.streamer.pool.memory.make_slot(unit, self._chunk, offset)
        return made

    def _fill_home(self, unit: StreamedUnit, home: Slot, version: int) -> bool:
        """Copy the unit to its home, which is pinned. Returns False if it is in use or held elsewhere, or in another
        version.
        """
        streamer = self.streamer
        if not streamer.store.complete:
            # The learnt order contains only units that stream. So read the units at home ahead in the
            # order of the model.
            here = {slot.unit for slot in streamer.pool.memory.slots() if slot.state in _WITH_BYTES}
            following = [other.backing for other in self.units[unit.index + 1 :] if other not in here]
            streamer.store.read_ahead([unit.backing, *following])
        if streamer.pool.issue(home, version) is not Issue.TAKEN:
            return False
        streamer.run.copy_unit(home)
        return True

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

    def unpin_idle(self) -> None:
        """Unpin unused homes, so that memory pressure may take their pages. comfy-aimdo waits for the device
        before it takes pages.
        """
        busy = (SlotState.IN_USE, SlotState.HELD)
        for slot in [slot for slot in self._pins if slot.state not in busy]:
            self._pins.remove(slot)
            self._bar.unpin(*self._range_of(slot))
            self._lose_above(slot)

    # -- end

    def close(self) -> None:
        """Release the pages now, except pages of which other code keeps views."""
        bar, self._bar = self._bar, _ClosedBar()
        self._region_pinned = False
        if isinstance(bar, Bar):
            with contextlib.suppress(NativeError):
                for slot in self._pins:
                    if slot.state not in (SlotState.IN_USE, SlotState.HELD):
                        bar.unpin(*self._range_of(slot))
                bar.set_watermark(0)
        self._pins.clear()
        self._slots.clear()
        self._chunk = None


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
