"""`Wanted`: a request for a layout. `Layout`: the present memory of a session's weights. `Outcome`: the
result of a change of layout.

A unit is a group of weights that are copied to the device together. A layout keeps some units on the device
(residents) and streams the others through slots, the device memory that units share in turn. The region is
the device memory of all slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property
from types import MappingProxyType

from ..metrics.meter import Meter
from ..model.tree_watch import Tree
from ..model.units import Carving, Entry, Unit
from ..placement.backing import Backing
from ..placement.packer import Packing
from ..placement.placement import Placement
from ..plan.residency import Plan
from ..streaming.runner import Runner


@dataclass(frozen=True)
class Wanted:
    """A request for a layout.

    ``vram``, ``ram``: budgets in bytes.
    ``packing``: how weights are packed, None if they are stored and copied to the device unpacked.
    ``residents_among``: names of the units that stay on the device before any others, apart from small units;
    None for none.
    ``stay``: names of tensors that must stay on the device, with the reason.
    ``training``: how trainable weights are kept ("resident" or "stream"), None if their size decides.
    ``gradients``: whether a forward has recorded gradients. Until then, weights that do not fit into the budget count
    as frozen even if they require gradients.
    ``region_bytes``: bytes that the region should have at least if the budget allows, because so many were needed at once.
    ``coarse``: whether units are to be large, because the device waited for Python at the uses of smaller ones.
    ``note``: a sentence about these budgets for the report.
    ``store``: the name of the store of streamed weights, None for the one that the other settings ask for.
    """

    vram: int
    ram: int
    packing: Packing | None = None
    residents_among: frozenset[str] | None = None
    stay: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    training: str | None = None
    gradients: bool = False
    region_bytes: int = 0
    coarse: bool = False
    note: str = ""
    store: str | None = None


class Outcome(Enum):
    """The result of a change of layout. The module and the session are usable after each result."""

    TOOK = auto()  # the wanted layout is in effect
    FELL_BACK = auto()  # the device's memory did not suffice; a fallback layout is in effect
    PARKED = auto()  # no layout is in effect; the next forward makes the wanted layout


@dataclass(frozen=True)
class Layout:
    """The present memory of a session's weights, and the objects that serve passes. Immutable: a new layout
    is a new object.

    ``wanted``: the request for which the layout was made.
    ``carving``: the division of the module into units.
    ``plan``: which units stay on the device, and the size of the slot region.
    ``placement``: the memory of each tensor.
    ``runner``: runs the passes.
    ``meter``: counted bytes and measured times.
    ``tree``: the record of the module tree for which the layout was made.
    ``compiled``: whether the layout was made for a module that torch.compile compiled, as a whole or in parts.
    ``untrained``: whether weights that require gradients count as frozen in this layout.
    """

    wanted: Wanted
    carving: Carving
    plan: Plan
    placement: Placement
    runner: Runner
    meter: Meter
    tree: Tree
    compiled: bool = False
    untrained: bool = False

    def entries(self) -> list[Entry]:
        """Return the entries of all tensors in the carving: those of units, tensors that must stay on the
        device, and adapters.
        """
        units = [entry for unit in self.carving.units for entry in unit.entries]
        return units + [entry for entry, _ in self.carving.resident] + self.carving.adapters

    def resident_names(self) -> frozenset[str]:
        """Return the names of the units that stay on the device, unpacked or packed."""
        plan = self.plan
        return frozenset(
            unit.name
            for index, unit in enumerate(self.carving.units)
            if index in plan.resident or index in plan.packed
        )

    def streamed_indices(self) -> list[int]:
        """Return the positions in ``carving.units`` of the units that stream, in order."""
        known = {id(unit): index for index, unit in enumerate(self.carving.units)}
        return [known[id(unit.unit)] for unit in self.placement.streamed]

    @cached_property
    def one_decoded(self) -> bool:
        """Return whether the region may have room for one decoded unit only, see `Packing`."""
        wanted = self.wanted
        if wanted.packing is None or not wanted.packing.one_decoded or self.plan.all_resident:
            return False
        return not (wanted.gradients or wanted.region_bytes)

    @property
    def trains(self) -> bool:
        """Return whether any weight is trained."""
        return bool(self.carving.adapters) or any(
            entry.trainable for unit in self.placement.streamed for entry in unit.unit.entries
        )

    def below(self, modules: set[int] | None) -> list[Backing]:
        """Return the backings of the streamed units with a tensor in one of ``modules`` (ids of modules).
        None: of all streamed units.

        A backing is the object that copies a unit's bytes to the device.
        """
        return [unit for unit in self.placement.streamed if modules is None or _lies_in(unit.unit, modules)]


def _lies_in(unit: Unit, modules: set[int]) -> bool:
    return any(id(site.module) in modules for entry in unit.entries for site in entry.sites)
