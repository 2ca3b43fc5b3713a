"""Defines `register_store`, the table of the kinds of stores, and `make_tier`, which makes the store of a layout's
streamed units.

Only this module names the kinds that Carom has: weights in a file, packed or plain weights in pinned host memory. Sessions
look their kind up by name for each layout. `StreamSettings.store` names another kind, which some other code has registered
(tests/support/toy_store.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..common.errors import UnsupportedError
from ..device.engine import Engine
from ..model.units import Carving
from ..plan.residency import Plan, resident_cost
from ..stores.store import Store
from .file_source import FileSource
from .file_tier import FileTier
from .host_copies import HostStore
from .packed_tier import PackedTier
from .packer import Packing
from .pinned_tier import PinnedTier
from .stored_tier import StoredTier
from .tier import Tier


@dataclass(frozen=True, eq=False)
class StoreWish:
    """The properties that a layout requires of its store.

    ``source``: the weights file, None if the weights are in host memory.
    ``packing``: how weights are packed, None if they are copied to the device unpacked.
    ``kind``: the name of a registered store, None for the one that the other properties ask for.
    """

    engine: Engine
    store: HostStore
    carving: Carving
    plan: Plan
    source: FileSource | None = None
    packing: Packing | None = None
    kind: str | None = None


_MAKES: dict[str, Callable[[StoreWish], Store]] = {}


def register_store(name: str, make: Callable[[StoreWish], Store]) -> None:
    """Let sessions find a kind of store by ``name``.

    ``make``: called for each layout; returns a store without any weights. Raises ValueError if the name is taken.
    """
    if name in _MAKES:
        raise ValueError(f"a store is registered as {name!r} already: choose another name")
    _MAKES[name] = make


def require_store(name: str) -> None:
    """Raise UnsupportedError if no store is registered as ``name``."""
    if name not in _MAKES:
        raise UnsupportedError(f"store={name!r}: choose one of {', '.join(map(repr, sorted(_MAKES)))}")


def make_tier(wish: StoreWish) -> Tier:
    """Return the store with the properties ``wish``, as a tier, which gives the model's weights to it."""
    made = _MAKES[wish.kind or _kind(wish)](wish)
    # The tiers are stores that take over the memory of the weights themselves.
    return made if isinstance(made, Tier) else StoredTier(wish.engine, made)


def _kind(wish: StoreWish) -> str:
    """Return the name of the store that the weights and the codec ask for."""
    if wish.source is not None:
        return "file"
    copies = wish.store.copies
    holds_packed = bool(wish.store.shelf) or (copies is not None and copies.packs)
    if holds_packed or (wish.packing is not None and wish.plan.staging_bytes):
        return "packed"
    return "pinned"


# -- the kinds that Carom has


def _make_pinned(wish: StoreWish) -> PinnedTier:
    return PinnedTier(wish.engine, wish.store)


def _make_packed(wish: StoreWish) -> PackedTier:
    plan = wish.plan
    # The slot region (the device memory of all slots), staging memory and packed residents are allocated only after
    # packing. Until then their bytes serve as scratch memory for packing.
    room = plan.region_bytes + plan.staging_bytes + plan.packed_bytes
    packing, largest = wish.packing or Packing(), wish.carving.largest
    return PackedTier(wish.engine, wish.store, packing, plan.staging_bytes, room, largest)


def _make_file(wish: StoreWish) -> FileTier:
    assert wish.source is not None
    engine, plan = wish.engine, wish.plan
    stay_packed = {id(wish.carving.units[index]) for index in plan.packed}
    sizes = [unit.nbytes for index, unit in enumerate(wish.carving.units) if index in plan.resident]
    used = plan.fixed_bytes + plan.region_bytes + plan.staging_bytes + plan.packed_bytes
    spare = max(0, plan.vram_budget_bytes - used - resident_cost(sizes, engine.grain))
    return FileTier(engine, wish.store.arena, wish.source, plan.staging_bytes, stay_packed, spare)


register_store("pinned", _make_pinned)
register_store("packed", _make_packed)
register_store("file", _make_file)
