"""`ModelChanges`: adapts the layout to a module tree that changes while the module is streamed.

The changes are adapters and weights that are added or removed, and tensors that the model replaces. A layout
assigns each weight to device memory, or to host memory or a file from which it is streamed. A unit is a group
of weights that are copied to the device together.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from types import MappingProxyType
from typing import Any

import torch

from ..budget import optimizer_reserve
from ..common.errors import BudgetError, CaromError
from ..model.sharded import refuse_sharded
from ..model.shared_attributes import original_of
from ..model.units import MODELS_OWN, Entry
from .layout_manager import LayoutManager

logger = logging.getLogger("carom")


class ModelChanges:
    """Adapts a session to changes of its module tree. Called when a forward of the root module begins, never
    during a pass.
    """

    def __init__(self, manager: LayoutManager) -> None:
        self._manager = manager
        self._no_room_for: tuple[int, Any] | None = (
            # the VRAM budget in bytes at the last attempt, and the names of the weights that did not fit
            None
        )

    def follow_passes(self) -> bool:
        """Change the layout as passes have asked in `Runner.next_layout`, as far as the budget has room. Returns whether
        the region has become larger.

        Weights that the model writes to stay on the device from now on. The region becomes larger if units that were
        needed at once found no room in it.
        """
        manager = self._manager
        with manager.lock:
            asked = manager.layout.runner.next_layout
            stay, region_bytes = dict(asked.stay), asked.region_bytes
            asked.stay.clear()
            asked.region_bytes = 0
            grows = self._grow_region(region_bytes)
            wanted, vram = manager.present(), manager.ledger.vram
            fresh = {name: why for name, why in stay.items() if name not in wanted.stay}
            if fresh and self._no_room_for != (vram, fresh.keys()):
                following = dataclasses.replace(wanted, stay=MappingProxyType({**wanted.stay, **fresh}))
                if manager.try_plan(following) is None:  # no room: these weights are streamed as before
                    self._no_room_for = vram, fresh.keys()
                else:
                    manager.change(following, reuse=False)
            return grows

    def _grow_region(self, region_bytes: int) -> bool:
        """Let all layouts from now on have a region of ``region_bytes``, as far as the budget has room. Returns whether
        the present layout was replaced by one with a larger region.
        """
        manager = self._manager
        if region_bytes <= manager.wanted.region_bytes:
            return False
        manager.wanted = dataclasses.replace(manager.wanted, region_bytes=region_bytes)
        following = dataclasses.replace(manager.present(), residents_among=None)
        plan, present = manager.try_plan(following), manager.layout.plan
        if plan is None or not (plan.all_resident or plan.region_bytes > present.region_bytes):
            return False
        logger.info("carom: units that are needed at once found no room; making the region larger")
        manager.change(following, manager.shrunk)
        return True

    def adopt_compiled(self) -> None:
        """Adapt the layout to a module that torch.compile compiled after the layout was made.

        Blocks become whole units, and weights that were packed by the choice of ``codec="auto"`` are unpacked, because
        the guards of compiled code read weights. Not to be called while a backward may come: a forward that
        checkpoints would be recomputed in another layout.
        """
        manager = self._manager
        with manager.lock:
            layout, wanted = manager.layout, manager.present()
            if layout.tree.lent():
                return
            manager.planner.ran_compiled()
            packed = wanted.packing is not None and wanted.packing.auto
            following = dataclasses.replace(
                wanted, packing=None if packed else wanted.packing, residents_among=None
            )
            if not packed and not layout.placement.tier.arriving:
                with contextlib.suppress(BudgetError):
                    carving = manager.planner.plan(following)[0]
                    if [unit.name for unit in carving.units] == [unit.name for unit in layout.carving.units]:
                        manager.note_compiled()
                        return
            logger.info("carom: the module was compiled; laying its weights out in whole blocks")
            manager.change(following, manager.shrunk)

    def train(self) -> None:
        """Lay the weights out for training. Called before the first forward that records gradients, if weights that
        require gradients were counted as frozen until then, or if the region has room for one decoded unit only.
        """
        manager = self._manager
        with manager.lock:
            logger.info("carom: a forward records gradients; laying the weights out for training")
            frozen = not manager.layout.untrained  # then what stays on the device need not be moved
            wanted = dataclasses.replace(manager.present(), gradients=True, residents_among=None)
            manager.change(wanted, manager.shrunk, reuse=frozen)

    def adopt(self) -> None:
        """Adapt the layout to a module tree that has changed.

        New adapters, and new tensors that fit into the budget, move to the device within the present layout.
        A new layout is needed for weights that were replaced or removed, quantised weights that changed, and
        new tensors that do not fit. Raises UnsupportedError if parameters were divided among processes.
        """
        manager = self._manager
        with manager.lock:
            layout = manager.layout
            if layout.tree.lent():
                return
            # FSDP changes the class of the user's module object, which the session does not hold.
            refuse_sharded(original_of(manager.module.root), streamed=True)
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
        """Make a layout for training after the first adapters were added, if training needs a larger slot
        region.

        With a backward in each step, units that stay in slots between the forward and the backward save more
        time than residents do.
        """
        manager = self._manager
        plan, wanted = manager.layout.plan, manager.present()
        if plan.all_resident:
            return
        new = manager.try_plan(wanted)
        if new is not None and new.region_bytes > plan.region_bytes:
            logger.info("carom: adapters came; laying the weights out for training")
            manager.change(wanted, reuse=False)

    def follow(self) -> None:
        """Record the tensors that the model replaced or created since the last forward began.

        Called before a layout is undone.
        """
        self._follow_replaced()
        layout = self._manager.layout
        known = {id(entry.tensor) for entry in layout.entries()}
        if layout.tree.buffers() <= known or layout.tree.lent():
            return
        # a tensor that cannot be managed must not prevent the layout from being undone
        with contextlib.suppress(CaromError):
            for entry in layout.tree.entries():
                if entry.is_buffer and not entry.trainable and id(entry.tensor) not in known:
                    layout.placement.made_here(entry)

    def _follow_replaced(self) -> None:
        """Let the layout's entries refer to the new tensors with which the model replaced tensors on the
        device.

        A buffer (statistics, a cache) may be replaced by a buffer of another shape or dtype. For other
        tensors, shape and dtype must be the same.
        """
        manager = self._manager
        layout, checkpoint = manager.layout, manager.module.checkpoint
        replaced: dict[int, Entry] = {}
        before = []  # keeps the replaced tensors alive, so that their ids stay unique during the comparison
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
            entry.refer_to(new)
            replaced[id(old)] = entry
            before.append(old)
            known.add(id(new))
            if not filed:
                self._is_models_own(entry)
        if replaced:
            layout.placement.replaced(replaced)

    def _note_replaced(self) -> None:
        """Record buffers in streamed units that the model replaced. The next layouts keep them on the device."""
        for unit in self._manager.layout.carving.units:
            for entry in unit.entries:
                if entry.is_buffer:
                    new = _stands_now(entry)
                    if new is not None and new is not entry.tensor and not new.requires_grad:
                        self._stay(entry.name)

    def _is_models_own(self, entry: Entry) -> None:
        """Exclude a buffer from the VRAM budget if the model creates it as it runs, because it is then like
        an activation.

        The next layouts keep the buffer on the device. Parameters are left as they are.
        """
        if entry.is_buffer:
            entry.counted = False
            self._stay(entry.name)

    def _stay(self, name: str) -> None:
        manager = self._manager
        stay = MappingProxyType({**manager.wanted.stay, name: MODELS_OWN})
        manager.wanted = dataclasses.replace(manager.wanted, stay=stay)


def _stands_now(entry: Entry) -> torch.Tensor | None:
    """Return the tensor that the module tree now holds at the places (sites) of ``entry``.

    Returns None if a place is empty, or if the places hold different tensors.
    """
    found: torch.Tensor | None = entry.sites[0].table.get(entry.sites[0].name)
    return found if all(site.table.get(site.name) is found for site in entry.sites) else None
