"""`Wanted` and `Layout`: what a session asks for, and where its weights are."""

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
    """What a layout is asked for.

    ``vram``, ``ram``: budgets in bytes. ``packing``: how weights wait packed, None where they cross as they are.
    ``profile``: measured times to plan by, None to plan by the rule. ``residents_among``: names of the only units that may
    stay on the device (small ones apart), None for any. ``stay``: names of tensors that must stay, with the reason.
    ``training``: where trainable weights live ("resident", "stream"), None where their size decides.
    ``note``: a sentence for the report about these budgets.
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
    """What became of a change of layout. Module and session are whole in each case."""

    TOOK = auto()  # the wanted layout is in effect
    FELL_BACK = auto()  # the device's memory did not suffice; the fallback is in effect
    PARKED = auto()  # the session is parked and makes the wanted layout when it returns


@dataclass(frozen=True)
class Layout:
    """Where a session's weights are, and what runs them. Replaced whole by the next layout."""

    wanted: Wanted
    carving: Carving
    plan: Plan
    placement: Placement
    streamer: Streamer
    meter: Meter
    tree: Tree

    def entries(self) -> list[Entry]:
        """Every tensor of the module that the carving counts."""
        units = [entry for unit in self.carving.units for entry in unit.entries]
        return units + [entry for entry, _ in self.carving.resident] + self.carving.adapters

    def resident_names(self) -> frozenset[str]:
        """The names of the units that stay on the device, raw or packed."""
        plan = self.plan
        return frozenset(
            unit.name
            for index, unit in enumerate(self.carving.units)
            if index in plan.resident or index in plan.packed
        )

    def streamed_indices(self) -> list[int]:
        """The positions in ``carving.units`` of the units that stream, in order."""
        known = {id(unit): index for index, unit in enumerate(self.carving.units)}
        return [known[id(unit.unit)] for unit in self.placement.streamed]

    @property
    def trains(self) -> bool:
        """Whether any weight trains."""
        return bool(self.carving.adapters) or any(unit.trainable for unit in self.placement.streamed)

    def below(self, modules: set[int] | None) -> list[Backing]:
        """The streamed units with a tensor in one of ``modules`` (ids), or all of them for None."""
        return [unit for unit in self.placement.streamed if modules is None or _lies_in(unit.unit, modules)]


def _lies_in(unit: Unit, modules: set[int]) -> bool:
    return any(id(site.module) in modules for entry in unit.entries for site in entry.sites)
