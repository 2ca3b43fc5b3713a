"""Defines `Placement`: moves a module's tensors to the memory that a plan assigns to them (device memory or a
tier), and moves them back.

Residents are tensors that stay on the device; `ResidentPlacer` moves them there. A `Tier` stores the streamed
units. Tensors (their memory and class) are changed in this package, modules are changed in `model.interpose`.
Both kinds of changes are undone in the reverse order, even if an error occurs halfway.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..common.run_all import run_all
from ..device.engine import Engine
from ..host.arena import return_freed_memory
from ..model.home import Runtime
from ..model.units import Carving, Unit
from ..plan.residency import Plan
from .backing import Backing
from .host_copies import HostStore
from .resident_placer import ResidentPlacer
from .residents import DeviceTensors
from .tier import Tier


class Placement:
    """The present memory of each tensor of a carving (a module divided into units) under one plan. `undo`
    moves every tensor back.
    """

    def __init__(self, engine: Engine, store: HostStore, tier: Tier) -> None:
        self.tier = tier
        self._store = store
        self.residents = ResidentPlacer(engine, store, tier)
        self.notes: list[str] = []
        # Methods that concern only residents are those of the placer.
        self.keep, self.adapt = self.residents.keep, self.residents.adapt
        self.keep_matching_residents = self.residents.keep_matching_residents
        self.put_aside = self.residents.put_aside
        self.replaced, self.made_here = self.residents.replaced, self.residents.made_here

    @property
    def device_tensors(self) -> DeviceTensors:
        """The tensors that are on the device."""
        return self.residents.device_tensors

    @property
    def streamed(self) -> list[Backing]:
        """The backings of the streamed units (the objects that fetch them), in the order of the model."""
        return self.tier.backings

    def stream(self, units: Sequence[Unit], runtime: Runtime) -> list[Backing]:
        """Store ``units`` in the tier, from which ``runtime`` streams them. Move residents that were deferred
        to the device.
        """
        copies, made = self._store.copies, self._store.arena.made
        returns = (
            copies is not None and len(copies) > 0
        )  # most weights lie in blocks, not in the C allocator's memory
        with self.residents.uploading(units):
            self.tier.place(units, runtime, self.residents)
            self.residents.place_remaining()
        if not returns or self._store.arena.made != made or self.residents.left_host:
            return_freed_memory()
        return self.tier.backings

    def settled(self) -> None:
        """Note that all tensors are in place. Tensors on the device that the previous layout left there are
        no longer matched after this.
        """
        self.device_tensors.received.clear()

    # -- figures

    @property
    def resident_bytes(self) -> int:
        """Device bytes of residents, as the allocator reserves them."""
        return self.residents.resident_bytes

    @property
    def loaded_bytes(self) -> int:
        """Bytes that were copied to the device for the residents of this placement."""
        return self.residents.loaded_bytes

    @property
    def adapter_bytes(self) -> int:
        """Device bytes of trainable tensors that stay on the device."""
        return self.residents.adapter_bytes

    @property
    def streamed_host_bytes(self) -> int:
        """Bytes of the streamed units when they are in slots (unpacked, with alignment)."""
        return self.tier.streamed_bytes

    @property
    def wire_bytes(self) -> int:
        """Bytes that are copied over the link if every streamed unit is fetched once."""
        return self.tier.wire_bytes

    @property
    def came_on_device(self) -> bool:
        """Whether streamed weights were on a device when the session was created. They have to return there
        at the end.
        """
        return self.tier.came_on_device

    # -- moving tensors back

    def undo_keeping_residents(self) -> None:
        """Undo the placement, but leave residents on the device, so that the next placement can use them."""
        left = self.device_tensors.hand_over()
        self.device_tensors.take_over([moved for moved in left if moved.tensor.is_inference()])
        self.undo()
        self.device_tensors.take_over([moved for moved in left if not moved.tensor.is_inference()])

    def undo_keeping_loaded(self) -> None:
        """Undo the placement, but leave residents that were loaded from a file on the device, for the next placement."""
        with torch.inference_mode(False), torch.no_grad():
            run_all(self.tier.undo_keeping_residents, self.residents.undo)

    def undo(self) -> None:
        """Restore every tensor's object, class and device, with its present value, and unpin host memory."""
        with torch.inference_mode(False), torch.no_grad():
            run_all(self.tier.undo, self.residents.undo)

    @property
    def undone(self) -> bool:
        """Whether no tensor is left to be restored by `undo`."""
        return self.tier.undone and self.device_tensors.empty


def wanted_residents(carving: Carving, plan: Plan) -> tuple[list[Unit], list[Unit]]:
    """Return (resident units, streamed units) of a plan, each in the order of the model."""
    resident = [unit for index, unit in enumerate(carving.units) if index in plan.resident]
    streamed = [unit for index, unit in enumerate(carving.units) if index not in plan.resident]
    return resident, streamed
