"""`WeightPool`: whose memory a session's resident weights are in, torch's allocator's or comfy-aimdo's VBARs.

With torch's allocator a resident unit lies on the device. With comfy-aimdo every unit has a home in a VBAR
(`streaming.vbar_slots`), and the budget is the VBAR's watermark: another budget is no new layout.
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
from ..streaming.streamer import Streamer
from ..streaming.vbar_slots import VbarSlots

logger = logging.getLogger("carom")
_TINY = 8  # a resident unit smaller than the largest unit by this factor is not worth a home


class WeightPool:
    """The pool that ``pool=`` of `carom.stream` asks for, or torch's where that cannot be had.

    ``native``: comfy-aimdo, None where torch's allocator is used; ``reason``: why.
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
        """Go on with torch's allocator, for ``reason``."""
        self.native, self.reason = None, reason
        level = logging.WARNING if self.asked == "aimdo" else logging.DEBUG
        logger.log(level, "carom: pool=%r: torch's allocator instead: %s", self.asked, reason)

    def divide(
        self, carving: Carving, plan: Plan, ram: int, from_file: bool
    ) -> tuple[list[Unit], list[Unit]]:
        """Return (units for torch's allocator, units that stream or have homes), in order.

        ``ram``: bytes of host memory that may be pinned. Raises NativeError where host memory cannot keep the units that may
        have to leave the device.
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
    ) -> Streamer:  # fmt: skip
        """Return the streamer of ``units``. ``resident_bytes``: device memory of the residents, which are there already.

        Raises NativeError where the VBAR has no room for a slot.
        """
        engine, region = self._engine, plan.region_bytes
        if self.native is None:
            return Streamer(engine, region, meter, tier)
        number = {id(unit): index for index, unit in enumerate(carving.units)}
        resident = [i for i, unit in enumerate(units) if number[id(unit)] in plan.resident]
        room = ledger.vram - resident_bytes
        if (
            ledger.governor is not None
        ):  # a budget that is found, not given: a slot of whole pages is the least
            room = max(room, whole_pages(max(unit.nbytes for unit in units)))
            if not ledger.claim(max(ledger.vram, resident_bytes + room)):
                raise NativeError(f"no page of {format_size(vbar.PAGE)} is left of {ledger.shared}")
        homes = lay_out([unit.nbytes for unit in units], resident, region, room)
        if homes is None:
            raise NativeError(
                f"{format_size(max(0, room))} for weights hold no slot in pages of {format_size(vbar.PAGE)}"
            )
        engine.synchronize()
        engine.trim()  # what torch's allocator keeps unused would come before the weights
        slots = VbarSlots(engine, self.native.bar(homes.nbytes), homes, room)
        return Streamer(engine, homes.region_bytes, meter, tier, slots)


def whole_pages(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to whole pages of a VBAR."""
    return -(-nbytes // vbar.PAGE) * vbar.PAGE
