"""Defines `make_tier`, which chooses the tier (the store) of a layout's streamed units: a file, packed or
pinned host memory.

Only this module names the kinds of tiers. Sessions look up `make_tier` in this module for each layout, so a
function that replaces it here gives them a tier of another kind (tests/placement/test_toy_tier.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..device.engine import Engine
from ..model.units import Carving
from ..plan.residency import Plan, resident_cost
from .file_source import FileSource
from .file_tier import FileTier
from .host_store import HostStore
from .packed_tier import PackedTier
from .packer import Packing
from .pinned_tier import PinnedTier
from .tier import Tier


@dataclass(frozen=True, eq=False)
class TierWish:
    """The properties that a layout requires of its tier.

    ``source``: the weights file, None if the weights are in host memory.
    ``packing``: how weights are packed, None if they are copied to the device unpacked.
    """

    engine: Engine
    store: HostStore
    carving: Carving
    plan: Plan
    source: FileSource | None = None
    packing: Packing | None = None


def make_tier(wish: TierWish) -> Tier:
    """Return the tier with the properties ``wish``."""
    engine, store, plan, packing = wish.engine, wish.store, wish.plan, wish.packing
    if wish.source is not None:
        stay_packed = {id(wish.carving.units[index]) for index in plan.packed}
        sizes = [unit.nbytes for index, unit in enumerate(wish.carving.units) if index in plan.resident]
        used = plan.fixed_bytes + plan.region_bytes + plan.staging_bytes + plan.packed_bytes
        spare = max(0, plan.vram_budget_bytes - used - resident_cost(sizes, engine.grain))
        return FileTier(engine, store.arena, wish.source, plan.staging_bytes, stay_packed, spare)
    copies = store.copies
    holds_packed = bool(store.shelf) or (copies is not None and copies.packs)
    if holds_packed or (packing is not None and plan.staging_bytes):
        # The slot region (the device memory of all slots), staging memory and packed residents are allocated
        # only after packing. Until then their bytes serve as scratch memory for packing.
        room = plan.region_bytes + plan.staging_bytes + plan.packed_bytes
        return PackedTier(engine, store, packing or Packing(), plan.staging_bytes, room, wish.carving.largest)
    return PinnedTier(engine, store)
