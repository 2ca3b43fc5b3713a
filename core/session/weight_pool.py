"""`WeightPool`: the memory of the weights that stay on the device (residents), from torch's allocator or in
comfy-aimdo's VBARs.

A VBAR is a range of device addresses. Its pages can lose their memory to other programs, and only pages below
an address, the watermark, may get memory. A unit is a group of weights that are copied together. With torch's
allocator, a resident unit is always on the device. With comfy-aimdo, every unit has its own range of a VBAR
(`streaming.vbar_slots`), and the budget determines the VBAR's watermark. So another budget needs no new
layout.
"""

from __future__ import annotations

import logging

from ..budget.ledger import BudgetLedger
from ..common.sizes import format_size
from ..device import vbar
from ..device.engine import Engine
from ..device.vbar import Native, NativeError
from ..device.vbar_layout import lay_out
from ..metrics.meter import Meter
from ..model.units import Carving, Unit
from ..placement.placement import wanted_residents
from ..placement.tier import Tier
from ..plan.residency import Plan
from ..streaming.no_room import PlannedBytes
from ..streaming.streamer import Streamer
from ..streaming.vbar_slots import VbarSlots
from ..streaming.vbar_streamer import VbarStreamer

logger = logging.getLogger("carom")
_TINY = 8  # resident units smaller than the largest unit by this factor are not put into the VBAR


class WeightPool:
    """The pool that the argument ``pool`` of `carom.stream` asks for, or torch's allocator if that pool is
    unavailable.

    ``asked``: the argument.
    ``native``: comfy-aimdo, None if torch's allocator is used.
    ``reason``: why the pool in use was chosen, for the report.
    """

    def __init__(self, engine: Engine, asked: str) -> None:
        self._engine, self.asked = engine, asked
        self.reason = "as asked for"
        self.native: Native | None = None
        if asked == "torch":
            return
        found = vbar.find(engine, asked=asked == "aimdo")
        if isinstance(found, str):
            self.refuse(found)
            return
        self.native = found
        if asked == "auto":
            self.reason = "installed, supported and not in use by others"

    @property
    def name(self) -> str:
        """The pool in use: "torch" or "aimdo"."""
        return "torch" if self.native is None else "aimdo"

    def refuse(self, reason: str) -> None:
        """Use torch's allocator from now on; ``reason``: why, for the report."""
        self.native, self.reason = None, reason
        level = logging.WARNING if self.asked == "aimdo" else logging.DEBUG
        logger.log(level, "carom: pool=%r: torch's allocator instead: %s", self.asked, reason)

    def divide(
        self, carving: Carving, plan: Plan, ram: int, from_file: bool
    ) -> tuple[list[Unit], list[Unit]]:
        """Return two lists, each in order: the units in torch's allocator, and the units that are streamed or
        in the VBAR.

        ``ram``: bytes of host memory that may be pinned.
        ``from_file``: whether weights come from a file.

        Raises NativeError if no unit could leave the device, or if host memory has no room for the units that
        may have to leave the device.
        """
        resident, streamed = wanted_residents(carving, plan)
        if self.native is None:
            return resident, streamed
        least = carving.largest // _TINY
        kept = [unit for unit in resident if unit.kind == "loose" or unit.nbytes < least]
        apart = {id(unit) for unit in kept}
        rest = [unit for unit in carving.units if id(unit) not in apart]
        if not rest:
            raise NativeError("no weights that could give way")
        needed = sum(unit.nbytes for unit in rest)
        if self.asked == "auto" and not from_file and needed > ram:
            raise NativeError(
                f"all {format_size(needed)} of weights would need a copy on the host, where {format_size(ram)} "
                "may be pinned"
            )
        return kept, rest

    def make_streamer(
        self, carving: Carving, plan: Plan, units: list[Unit], meter: Meter, tier: Tier, ledger: BudgetLedger,
        resident_bytes: int,
    ) -> tuple[Streamer, VbarSlots | None]:  # fmt: skip
        """Return the streamer of ``units``, and the units' memory in a VBAR, None if torch's allocator is used.

        ``resident_bytes``: device memory that residents already take.

        Raises NativeError if the VBAR has no room for a slot (the device memory that holds a streamed unit).
        """
        engine, region = self._engine, plan.region_bytes
        planned = PlannedBytes(plan.vram_budget_bytes - region, plan.fixed_bytes + plan.staging_bytes)
        if self.native is None:
            return Streamer(engine, region, meter, tier, planned), None
        number = {id(unit): index for index, unit in enumerate(carving.units)}
        resident = [i for i, unit in enumerate(units) if number[id(unit)] in plan.resident]
        room = ledger.vram - resident_bytes
        # the budget is automatic: raise it to at least one slot of whole pages
        if ledger.governor is not None:
            room = max(room, whole_pages(max(unit.nbytes for unit in units)))
            if not ledger.claim(max(ledger.vram, resident_bytes + room)):
                raise NativeError(f"no page of {format_size(vbar.PAGE)} is left of {ledger.shared}")
        homes = lay_out([unit.nbytes for unit in units], resident, region, room)
        if homes is None:
            raise NativeError(
                f"{format_size(max(0, room))} for weights hold no slot in pages of {format_size(vbar.PAGE)}"
            )
        engine.synchronize()
        engine.trim()  # memory that torch's allocator caches would take precedence over the VBAR's weights
        slots = VbarSlots(engine, self.native.bar(homes.nbytes), homes, room)
        return VbarStreamer(engine, homes.region_bytes, meter, tier, planned, slots), slots


def whole_pages(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to whole pages of a VBAR."""
    return -(-nbytes // vbar.PAGE) * vbar.PAGE
