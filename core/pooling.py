"""Which pool a session's resident weights are in, and what it does when a pool gives way or may grow back.

A mixin of `Session`. With torch's allocator a resident unit simply lies on the device; with comfy-aimdo every unit
has a home in a VBAR (`pooled.py`), and the budget is its watermark: a change of budget is no new layout.
"""

from __future__ import annotations

import dataclasses
import logging
import time

from . import aimdo
from .account import Held
from .aimdo import Native, NativeError
from .attach import wanted_residents
from .auto import Regrowth
from .disk import Disk
from .disk_streamer import DiskStreamer
from .homes import lay_out
from .plan import Plan
from .pooled import Pooled, PooledDiskStreamer, PooledStreamer
from .simulated import SimulatedEngine
from .sizes import format_size
from .streamed import Streamed
from .streamer import Streamer
from .together import Together
from .units import Carving, Unit

logger = logging.getLogger("carom")
_LOOKS = 0.25  # seconds between readings of a device's memory
_TINY = 8  # a resident unit smaller than the largest by this factor is not worth a home


class Pools(Together):
    """The pool of a `Session` (which see for the fields)."""

    plan: Plan
    _carving: Carving
    _ram: int
    _peak: int
    _peak_under = 0  # bytes: the budget of that peak

    def _chooses_pool(self, pool: str) -> None:
        """``pool`` as given to `stream`."""
        self._pool = pool
        self._pool_reason = ""
        self._native: Native | None = None
        self._regrow: Regrowth | None = None  # of a budget that is fixed, after pressure took some of it
        self._regrow_looked = 0.0
        if pool == "torch":
            self._pool_reason = "as asked for"
            return
        found = aimdo.find(self._engine, asked=pool == "aimdo")
        if isinstance(found, str):
            self._refuse_pool(found)
            return
        self._native = found
        self._pool_reason = (
            "as asked for" if pool == "aimdo" else "installed, supported and not in use by others"
        )

    def _refuse_pool(self, reason: str) -> None:
        """Go on with torch's allocator."""
        self._native, self._pool_reason = None, reason
        level = logging.WARNING if self._pool == "aimdo" else logging.DEBUG
        logger.log(level, "carom: pool=%r: torch's allocator instead: %s", self._pool, reason)

    @property
    def _pooled(self) -> Pooled | None:
        """The streamer, where it streams from homes."""
        streamer = self.__dict__.get("_streamer")
        return streamer if isinstance(streamer, Pooled) else None

    # -- layout

    def _divide(self, disk: Disk | None) -> tuple[list[Unit], list[Unit]]:
        """(units for torch's allocator, units that stream or have homes), in order.

        Raises NativeError where host memory cannot keep what may have to give way.
        """
        resident, streamed = wanted_residents(self._carving, self.plan)
        if self._native is None:
            return resident, streamed
        least = self._carving.largest // _TINY
        kept = [unit for unit in resident if unit.kind == "loose" or unit.nbytes < least]
        apart = {id(unit) for unit in kept}
        rest = [unit for unit in self._carving.units if id(unit) not in apart]
        if not rest:
            raise NativeError("no weights that could give way")
        needed = sum(unit.nbytes for unit in rest)
        if self._pool == "auto" and disk is None and needed > self._ram:
            raise NativeError(
                f"all {format_size(needed)} of weights would need a copy on the host, where {format_size(self._ram)} "
                "may be pinned"
            )
        return kept, rest

    def _make_streamer(self, disk: Disk | None, units: list[Unit]) -> Streamer:
        """For ``units``; residents are on the device already. Raises NativeError."""
        region = self.plan.region_bytes
        engine, meter = self._engine, self._meter
        if self._native is None:
            return (
                Streamer(engine, region, meter, self.plan.staging_bytes)
                if disk is None
                else DiskStreamer(engine, region, meter, disk, self.plan.staging_bytes)
            )
        number = {id(unit): index for index, unit in enumerate(self._carving.units)}
        resident = [i for i, unit in enumerate(units) if number[id(unit)] in self.plan.resident]
        room = self._vram - self._placement.resident_bytes
        if (
            self._governor is not None
        ):  # a budget that is found, not given: a slot of whole pages is the least
            room = max(room, _pages(max(unit.nbytes for unit in units)))
            if not self._claims(max(self._vram, self._placement.resident_bytes + room)):
                raise NativeError(f"no page of {format_size(aimdo.PAGE)} is left of {self._shared}")
        homes = lay_out([unit.nbytes for unit in units], resident, region, room)
        if homes is None:
            raise NativeError(
                f"{format_size(max(0, room))} for weights hold no slot in pages of {format_size(aimdo.PAGE)}"
            )
        engine.synchronize()
        engine.trim()  # what torch's allocator keeps unused would come before the weights
        streamer: Pooled = (
            PooledStreamer(engine, homes.region_bytes, meter)
            if disk is None
            else PooledDiskStreamer(engine, homes.region_bytes, meter, disk)
        )
        streamer.move_in(self._native.bar(homes.nbytes), homes, room)
        return streamer

    def _away(self) -> list[Streamed]:
        """Units that stream now."""
        pooled = self._pooled
        return self._placement.streamed if pooled is None else pooled.away

    # -- accounts

    def _held_bytes(self) -> int:
        pooled = self._pooled
        if pooled is not None:
            return self._placement.resident_bytes + pooled.held_bytes
        staging = 0 if self._streamer.staging is None else self._streamer.staging.nbytes
        packed = self._streamer.packed_here.nbytes
        region = 0 if self._streamer.closed else self._streamer.region.nbytes
        return self._placement.resident_bytes + region + staging + packed

    def _account(self) -> None:
        """Tensors went to the device, or left it; or the budget changed."""
        pooled = self._pooled
        self._peak_anew()
        if pooled is None:
            self._peak = max(self._peak, self._held_bytes())
            return
        room = self._vram - self._placement.resident_bytes
        if pooled.holds(room, whole=False) and pooled.most_bytes > room:
            pooled.limit(room)
        self._peak = max(self._peak, self._placement.resident_bytes + pooled.most_bytes)
        self._follow_pool(pooled)

    def _peak_anew(self) -> None:
        """What is reported as the most is so of the present budget, not of a larger one before it."""
        if self._vram < self._peak_under:
            self._peak = 0
        self._peak_under = self._vram

    def _follow_pool(self, pooled: Pooled) -> None:
        """The plan says what lives on the device now."""
        away = {id(unit.unit) for unit in pooled.away}
        resident = {
            index: self.plan.resident.get(index, "at home in the pool")
            for index, unit in enumerate(self._carving.units)
            if id(unit) not in away
        }
        if resident != self.plan.resident or pooled.slot_bytes != self.plan.region_bytes:
            slots = pooled.slot_bytes // self._carving.largest if self._carving.largest else 0
            self.plan = dataclasses.replace(
                self.plan,
                resident=resident,
                region_bytes=pooled.slot_bytes,
                slots=slots,
                predicted_seconds=None,
            )

    def _holdings(self, parked: bool) -> Held:
        """Device bytes for the report, and whose memory it is."""
        pooled = self._pooled
        if pooled is None:
            slots = 0 if parked else self._streamer.region.nbytes
            staging = 0 if self._streamer.staging is None else self._streamer.staging.nbytes
            packed = self._streamer.packed_here
            return Held(
                self._vram, self._peak, slots, staging, pool="torch", pool_reason=self._pool_reason,
                packed_bytes=packed.nbytes, packed_raw_bytes=packed.raw_bytes, packed_units=len(packed),
            )  # fmt: skip
        reason = "; ".join(part for part in (self._pool_reason, pooled.trouble) if part)
        if not parked:
            with pooled.lock:
                pooled.notice()
                self._follow_pool(pooled)
        slots, held = pooled.slot_bytes, pooled.held_bytes
        return Held(self._vram, self._peak, slots, 0, max(0, held - slots), "aimdo", reason)

    # -- pressure

    def _watch_pool(self, pooled: Pooled) -> None:
        """Between steps: what pressure took is known; it comes back once there has been room for a while."""
        if pooled.losses():
            logger.info("carom: other memory was needed: %d units stream now", len(pooled.away))
            self._follow_pool(pooled)
            if self._governor is not None:  # the budget follows, and rises again by its own rule
                self._governor.gave()
                self._vram = min(self._vram, self._placement.resident_bytes + pooled.now_bytes)
                return
            self._regrow = self._regrow or Regrowth()
            self._regrow.lost()
        now = time.monotonic()
        due = isinstance(self._engine, SimulatedEngine) or now - self._regrow_looked >= _LOOKS
        if self._regrow is None or not pooled.reduced or not due or not self._streamer.unreferenced:
            return
        self._regrow_looked = now
        memory = self._engine.memory()
        if memory is None:
            return
        target = self._regrow.read(memory, pooled.now_bytes, pooled.most_bytes)
        if target is not None:
            pooled.rise(target)
            self._follow_pool(pooled)

    def _least_in_pool(self) -> int:
        """The smallest budget that the pool can keep to, 0 where there is none."""
        if self._pooled is None:
            return 0
        return self._placement.resident_bytes + _pages(max(unit.nbytes for unit in self._pooled.units))

    def _move_watermark(self, budget: int, everything: int) -> bool:
        """Keep to ``budget`` without a new layout; False where that needs one. ``everything``: what all weights take."""
        pooled = self._pooled
        room = budget - self._placement.resident_bytes
        if pooled is None or not pooled.holds(room, whole=budget >= everything):
            return False
        self._vram = budget
        pooled.limit(room)
        self._account()
        return True


def _pages(nbytes: int) -> int:
    return -(-nbytes // aimdo.PAGE) * aimdo.PAGE
