"""The choice of the units (groups of weights) that stay on the device packed. Made once the packed bytes of
each unit are known.
"""

from __future__ import annotations

import dataclasses

from ..common.errors import CaromError
from ..model.units import Carving
from ..placement.backing import Backing
from ..placement.placement import Placement
from ..plan.residency import Plan, choose_packed
from .planner import Planner

_LEAST_PACKED = 0.9  # at least this share of the bytes that the plan keeps packed must be kept packed


class NotPacked(CaromError):
    """Raised if the weights that can stay on the device packed have fewer bytes than the plan requires."""


def choose(
    plan: Plan, carving: Carving, placement: Placement, planner: Planner, grain: int
) -> tuple[Plan, list[Backing]]:
    """Return ``plan`` restricted to the packed units that fit on the device, and the backings of these units.

    A backing is the object that copies a unit's bytes to the device.
    ``grain``: the bytes to whose multiples the device's allocator rounds up.

    Raises NotPacked if too few bytes of the units in ``plan.packed`` can stay packed.
    """
    known = {id(unit): index for index, unit in enumerate(carving.units)}
    indexed = [(known[id(unit.unit)], unit) for unit in placement.streamed]
    wires = [0] * len(carving.units)
    for index, unit in indexed:
        if unit.packed and planner.wire_bytes(unit.unit):
            wires[index] = unit.wire_bytes
    packed = choose_packed(wires, plan.packed, plan.packed_bytes, grain)
    sizes = [unit.nbytes for unit in carving.units]
    if sum(sizes[i] for i in packed) < _LEAST_PACKED * sum(sizes[i] for i in plan.packed):
        raise NotPacked("less than expected packs")
    return dataclasses.replace(plan, packed=packed), [unit for index, unit in indexed if index in packed]
