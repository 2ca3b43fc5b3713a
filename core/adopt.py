"""A module tree that changes while it streams: adapters and weights that come, tensors that the model replaces or writes.

A mixin of `Session`. Runs where a root forward begins, never within a pass.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

from torch import nn

from . import stepping
from .attach import Placement
from .auto import Governor
from .errors import BudgetError
from .learn import Learnt
from .plan import Plan
from .streamer import Streamer
from .tree import Tree
from .units import Carving, Entry
from .wrapped import LaidOpen

logger = logging.getLogger("carom")


class Adopts:
    """Follows changes of a `Session`'s tree (which see for the fields)."""

    module: nn.Module
    _streamer: Streamer
    _placement: Placement
    plan: Plan
    _carving: Carving
    _learnt: Learnt | None
    _tree: Tree
    _lock: threading.RLock
    _vram: int
    _stay: dict[str, str]
    _governor: Governor | None
    _kept: str | None
    _laid_open: LaidOpen | None
    _no_room_for: tuple[int, Any] | None = None  # a budget, and names of weights that it had no room for

    def _decide(self) -> Any:
        raise NotImplementedError

    def _again(self) -> None:
        raise NotImplementedError

    def _held_bytes(self) -> int:
        raise NotImplementedError

    def _account(self) -> None:
        raise NotImplementedError

    def _let_stay(self) -> None:
        """Weights that are safe, but slow, when streamed stay from now on, where the budget allows."""
        with self._lock:
            to_stay = self._streamer.runs.to_stay
            fresh = {name: why for name, why in to_stay.items() if name not in self._stay}
            to_stay.clear()
            if not fresh or self._no_room_for == (self._vram, fresh.keys()):
                return
            before = dict(self._stay)
            self._stay.update(fresh)
            try:
                self._decide()
            except BudgetError:  # they go on streaming
                self._stay, self._no_room_for = before, (self._vram, fresh.keys())
                return
            self._again()

    def _adopt(self) -> None:
        """The tree changed: adapters and small tensors that came move to the device; weights are laid out anew."""
        with self._lock:
            if self._tree.lent():
                return
            self._follow_replaced()
            if self._laid_open is not None and self._laid_open.stale:
                logger.info("carom: quantised weights came or were replaced; laying them out anew")
                self._again()
                return
            known = {id(entry.tensor) for entry in self._known()}
            fresh = [entry for entry in self._tree.entries() if id(entry.tensor) not in known]
            gone = known - {id(entry.tensor) for entry in self._tree.entries()}
            weights = [entry for entry in fresh if not entry.trainable]
            if gone or sum(entry.nbytes for entry in weights) > self._vram - self._held_bytes():
                logger.info("carom: the module's weights changed; laying them out anew")
                self._again()
                return
            adapted = bool(self._carving.adapters)
            for entry in fresh:
                if entry.trainable:
                    self._placement.adapt(entry)
                    self._carving.adapters.append(entry)
                else:
                    self._placement.keep([], [entry])
                    self._carving.resident.append((entry, "appeared after stream"))
            self._tree = Tree(self.module)
            self._account()
            if self._carving.adapters and not adapted:
                if self._governor is not None:
                    self._kept = stepping.where_trained(self.module)
                self._for_training()

    def _for_training(self) -> None:
        """The first adapters came: what the slots hold at a step's turns is worth more than residents now."""
        if self.plan.all_resident or self._learnt is not None:
            return
        try:
            _, plan = self._decide()
        except BudgetError:
            return  # what is there goes on working
        if plan.region_bytes > self.plan.region_bytes:
            logger.info("carom: adapters came; laying the weights out for training")
            self._again()

    def _follow_replaced(self) -> None:
        """Small resident tensors that the model replaced by others of their kind (running statistics) are theirs now."""
        for entry, _ in self._carving.resident:
            old = entry.tensor
            new = entry.sites[0].table.get(entry.sites[0].name)
            if (
                new is None
                or new is old
                or new.requires_grad
                or (new.shape, new.dtype) != (old.shape, old.dtype)
            ):
                continue
            if all(site.table.get(site.name) is new for site in entry.sites):
                entry.tensor = new
                self._placement.replaced(old, new)

    def _known(self) -> list[Entry]:
        carving = self._carving
        units = [entry for unit in carving.units for entry in unit.entries]
        return units + [entry for entry, _ in carving.resident] + carving.adapters
