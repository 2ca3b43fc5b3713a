"""`Wanted`: a request for a layout. `Layout`: where a session's weights are now. `Outcome`: the result of a change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from types import MappingProxyType

from ..metrics.meter import Meter
from ..model.tree_watch import Tree
from ..model.units import Carving, Entry, Unit
from ..placement.backing import Backing
from ..placement.packer import Packing
from ..placement.placement import Placement
from ..plan.profile import TensorTimes
from ..plan.residency import Plan
from ..streaming.streamer import Streamer


@dataclass(frozen=True)
class Wanted:
    """The request that a layout is made for.

    ``vram``, ``ram``: budgets in bytes. ``packing``: how weights are packed, None where they wait and cross the link
    unpacked. ``profile``: measured times to plan by, None to plan by the rule. ``residents_among``: names of the only
    units, apart from small ones, that may stay on the device, None for any unit. ``stay``: names of tensors that must
    stay on the device, with the reason. ``training``: where trainable weights are kept ("resident" or "stream"), None
    where their size decides. ``note``: a sentence about these budgets for the report.
    """

    vram: int
    ram: int
    packing: Packing | None = None
    profile: TensorTimes | None = None
    residents_among: frozenset[str] | None = None
    stay: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    training: str | None = None
    note: str = ""


class Outcome(Enum):
    """The result of a change of layout. The module and the session are usable after each of them."""

    TOOK = auto()  # the wanted layout is in effect
    FELL_BACK = auto()  # the device's memory did not suffice; the fallback is in effect
    PARKED = auto()  # the session is parked and makes the wanted layout when it returns


@dataclass(frozen=True)
class Layout:
    """Where a session's weights are, and the objects that serve passes. Immutable: a new layout is a new object.

    ``wanted``: the request that the layout was made for. ``carving``: the module's division into units. ``plan``: which
    units stay on the device, and the size of the slot region. ``placement``: where each tensor is. ``streamer``: the
    slots at run time. ``meter``: counted bytes and measured times. ``tree``: the module tree that the layout covers.
    """

    wanted: Wanted
    carving: Carving
    plan: Plan
    placement: Placement
    streamer: Streamer
    meter: Meter
    tree: Tree

    def entries(self) -> list[Entry]:
        """Return the entries of all tensors in the carving: of units, of required residents and of adapters."""
        units = [entry for unit in self.carving.units for entry in unit.entries]
        return units + [entry for entry, _ in self.carving.resident] + self.carving.adapters

    def resident_names(self) -> frozenset[str]:
        """Return the names of the units that stay on the device, raw or packed."""
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

    @property
    def trains(self) -> bool:
        """Whether any weight trains."""
        return bool(self.carving.adapters) or any(unit.trainable for unit in self.placement.streamed)

    def below(self, modules: set[int] | None) -> list[Backing]:
        """Return the streamed units with a tensor in one of ``modules`` (ids of modules), or all of them for None."""
        return [unit for unit in self.placement.streamed if modules is None or _lies_in(unit.unit, modules)]


def _lies_in(unit: Unit, modules: set[int]) -> bool:
    return any(id(site.module) in modules for entry in unit.entries for site in entry.sites)
