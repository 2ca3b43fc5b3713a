"""`ModelChanges`: follows a module tree that changes while the module streams.

Such changes are adapters and weights that are added or removed, and tensors that the model replaces.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from types import MappingProxyType
from typing import Any

import torch

from ..budget import optimizer_reserve
from ..common.errors import CaromError
from ..model.units import MODELS_OWN, Entry
from .layout_manager import LayoutManager

logger = logging.getLogger("carom")


class ModelChanges:
    """Follows changes of a session's module tree. Called when a forward of the root module begins, never in a pass."""

    def __init__(self, manager: LayoutManager) -> None:
        self._manager = manager
        self._no_room_for: tuple[int, Any] | None = (
            None  # a VRAM budget in bytes, and the names of the weights that did not fit into it
        )

    def keep_resident(self) -> None:
        """Keep weights resident from now on that passes found to be slow when streamed, if the budget has room."""
        manager = self._manager
        with manager.lock:
            wanted, vram = manager.present(), manager.ledger.vram
            to_stay = manager.layout.streamer.runs.to_stay
            fresh = {name: why for name, why in to_stay.items() if name not in wanted.stay}
            to_stay.clear()
            if not fresh or self._no_room_for == (vram, fresh.keys()):
                return
            following = dataclasses.replace(wanted, stay=MappingProxyType({**wanted.stay, **fresh}))
            if manager.try_plan(following) is None:  # no room: these weights are streamed as before
                self._no_room_for = vram, fresh.keys()
                return
            manager.change(following, reuse=False)

    def adopt(self) -> None:
        """Bring the layout in line with a module tree that changed.

        New adapters, and new tensors that fit into the budget, move to the device within the present layout. Weights
        that were replaced or removed, quantised weights that changed, and new tensors that do not fit, need a new
        layout.
        """
        manager = self._manager
        with manager.lock:
            layout = manager.layout
            if layout.tree.lent():
                return
            self._follow_replaced()
            quantized = manager.module.quantized
            if quantized is not None and quantized.stale:
                logger.info("carom: quantised weights came or were replaced; laying them out anew")
                manager.change(manager.present(), reuse=False)
                return
            entries = layout.tree.entries()
            known = {id(entry.tensor) for entry in layout.entries()}
            fresh = [entry for entry in entries if id(entry.tensor) not in known]
            gone = known - {id(entry.tensor) for entry in entries}
            buffers = [entry for entry in fresh if entry.is_buffer and not entry.trainable]
            for entry in buffers:
                layout.placement.made_here(entry)
            if gone:
                self._note_replaced()
            else:
                for entry in buffers:
                    self._is_models_own(entry)
            weights = [entry for entry in fresh if not entry.trainable and entry.counted]
            left = manager.ledger.vram - manager.ledger.held_bytes
            if gone or sum(entry.nbytes for entry in weights) > left:
                logger.info("carom: the module's weights changed; laying them out anew")
                manager.change(manager.present(), reuse=False)
                return
            self._take_in(fresh)

    def _take_in(self, fresh: list[Entry]) -> None:
        """Move new tensors to the device within the present layout."""
        manager = self._manager
        layout = manager.layout
        adapted = bool(layout.carving.adapters)
        for entry in fresh:
            if entry.trainable:
                layout.placement.adapt(entry)
                layout.carving.adapters.append(entry)
            else:
                layout.placement.keep([], [entry])
                reason = "appeared after stream" if entry.counted else MODELS_OWN
                layout.carving.resident.append((entry, reason))
        manager.note_tree()
        manager.ledger.holder.account()
        if layout.carving.adapters and not adapted:
            if manager.ledger.governor is not None:
                manager.wanted = dataclasses.replace(
                    manager.wanted, training=optimizer_reserve.where_trained(manager.module.root)
                )
            self._lay_out_for_training()

    def _lay_out_for_training(self) -> None:
        """Make a layout for training once the first adapters have been added, where training needs a larger region.

        With a backward in each step, units kept in slots at the turns of a step save more time than residents.
        """
        manager = self._manager
        plan, wanted = manager.layout.plan, manager.present()
        if plan.all_resident or wanted.profile is not None:
            return
        new = manager.try_plan(wanted)
        if new is not None and new.region_bytes > plan.region_bytes:
            logger.info("carom: adapters came; laying the weights out for training")
            manager.change(wanted, reuse=False)

    def follow(self) -> None:
        """Note the tensors that the model replaced or created since the last forward began.

        Called before a layout is taken back.
        """
        self._follow_replaced()
        layout = self._manager.layout
        known = {id(entry.tensor) for entry in layout.entries()}
        with contextlib.suppress(CaromError):  # tensors that cannot be managed must not stop the layout's end
            for entry in () if layout.tree.lent() else layout.tree.entries():
                if entry.is_buffer and not entry.trainable and id(entry.tensor) not in known:
                    layout.placement.made_here(entry)

    def _follow_replaced(self) -> None:
        """Let the layout's entries refer to the tensors with which the model replaced resident tensors.

        A buffer (statistics, a cache) may be replaced by one of another shape or dtype. Other tensors are followed only
        if shape and dtype are the same.
        """
        manager = self._manager
        layout, checkpoint = manager.layout, manager.module.checkpoint
        replaced: dict[int, Entry] = {}
        before = []  # the replaced tensors, kept alive so that their ids stay unique during the comparison
        known: set[int] = set()
        for entry, _ in layout.carving.resident:
            old = entry.tensor
            new = _stands_now(entry)
            if new is None or new is old or new.requires_grad:
                continue
            filed = checkpoint is not None and checkpoint.of(old) is not None
            same = (new.shape, new.dtype) == (old.shape, old.dtype) and not new.is_inference()
            if not same and (filed or not entry.is_buffer):
                continue
            known = known or {id(entry.tensor) for entry in layout.entries()}
            if id(new) in known:  # the new tensor belongs to another entry
                continue
            entry.tensor = new
            replaced[id(old)] = entry
            before.append(old)
            known.add(id(new))
            if not filed:
                self._is_models_own(entry)
        if replaced:
            layout.placement.replaced(replaced)

    def _note_replaced(self) -> None:
        """Mark buffers in units that the model replaced, so that the next layouts keep them resident."""
        for unit in self._manager.layout.carving.units:
            for entry in unit.entries:
                if entry.is_buffer:
                    new = _stands_now(entry)
                    if new is not None and new is not entry.tensor and not new.requires_grad:
                        self._stay(entry.name)

    def _is_models_own(self, entry: Entry) -> None:
        """Stop counting a buffer against the budget that the model creates as it runs: it is like an activation.

        The next layouts keep the buffer resident. Parameters are left as they are.
        """
        if entry.is_buffer:
            entry.counted = False
            self._stay(entry.name)

    def _stay(self, name: str) -> None:
        manager = self._manager
        stay = MappingProxyType({**manager.wanted.stay, name: MODELS_OWN})
        manager.wanted = dataclasses.replace(manager.wanted, stay=stay)


def _stands_now(entry: Entry) -> torch.Tensor | None:
    """Return the tensor that the module tree holds now in the place of ``entry``.

    None where the place is empty, or where the entry has several places that hold different tensors.
    """
    found: torch.Tensor | None = entry.sites[0].table.get(entry.sites[0].name)
    return found if all(site.table.get(site.name) is found for site in entry.sites) else None
