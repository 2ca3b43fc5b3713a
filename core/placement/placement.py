"""Defines `Placement`: moves a module's tensors to where a plan wants them (device memory or a tier), and
moves them back.

`ResidentPlacer` moves residents to the device; the `Tier` stores streamed units. Changes to tensors (memory,
class) are made here, changes to modules in `model.interpose`. Both are undone in the reverse order, also
after a failure in between.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..device.engine import Engine
from ..host.arena import return_freed_memory
from ..model.home import Runtime
from ..model.units import Carving, Unit
from ..plan.residency import Plan
from .backing import Backing
from .host_store import HostStore
from .resident_placer import ResidentPlacer
from .residents import DeviceTensors
from .tier import Tier


class Placement:
    """The places of a carving's tensors under one plan; `undo` moves every tensor back."""

    def __init__(self, engine: Engine, store: HostStore, tier: Tier) -> None:
        self.tier = tier
        self.residents = ResidentPlacer(engine, store, tier)
        self.notes: list[str] = []
        # These methods only concern residents.
        self.keep, self.adapt = self.residents.keep, self.residents.adapt
        self.keep_matching_residents = self.residents.keep_matching_residents
        self.replaced, self.made_here = self.residents.replaced, self.residents.made_here

    @property
    def device_tensors(self) -> DeviceTensors:
        """The tensors that are on the device."""
        return self.residents.device_tensors

    @property
    def streamed(self) -> list[Backing]:
        """The backings of the streamed units, in model order."""
        return self.tier.backings

    def stream(self, units: Sequence[Unit], runtime: Runtime) -> list[Backing]:
        """Store ``units`` in the tier, to be streamed by ``runtime``, and move the deferred residents to the
        device."""
        self.tier.place(units, runtime, self.residents)
        self.residents.place_remaining()
        return_freed_memory()
        return self.tier.backings

    def settled(self) -> None:
        """Note that all tensors are in place, so that no tensor received from the previous layout is left to be
        matched."""
        self.device_tensors.received.clear()

    # -- figures

    @property
    def resident_bytes(self) -> int:
        """Device bytes of residents, as the allocator reserves them."""
        return self.residents.resident_bytes

    @property
    def loaded_bytes(self) -> int:
        """Bytes that were copied to the device for residents of this placement."""
        return self.residents.loaded_bytes

    @property
    def adapter_bytes(self) -> int:
        """Device bytes of trainable tensors that stay on the device."""
        return self.residents.adapter_bytes

    @property
    def streamed_host_bytes(self) -> int:
        """Bytes of the streamed units in slots."""
        return self.tier.streamed_bytes

    @property
    def wire_bytes(self) -> int:
        """Bytes of the streamed units that cross the link when all are fetched once."""
        return self.tier.wire_bytes

    @property
    def came_on_device(self) -> bool:
        """Whether streamed weights were on a device when the session attached, and have to return there."""
        return self.tier.came_on_device

    # -- moving tensors back

    def undo_keeping_residents(self) -> None:
        """Undo the placement, but keep residents on the device, for the next placement to take over."""
        left = self.device_tensors.hand_over()
        self.device_tensors.take_over([moved for moved in left if moved.tensor.is_inference()])
        self.undo()
        self.device_tensors.take_over([moved for moved in left if not moved.tensor.is_inference()])

    def undo(self) -> None:
        """Restore every tensor's object, class and device, with its present value, and unpin host memory."""
        with torch.inference_mode(False), torch.no_grad():
            self.tier.undo()
            self.residents.undo()


def wanted_residents(carving: Carving, plan: Plan) -> tuple[list[Unit], list[Unit]]:
    """Return (resident units, streamed units) of a plan, each in model order."""
    resident = [unit for index, unit in enumerate(carving.units) if index in plan.resident]
    streamed = [unit for index, unit in enumerate(carving.units) if index not in plan.resident]
    return resident, streamed
