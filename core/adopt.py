"""A module tree that changes while it streams: adapters and weights that come, tensors that the model replaces or writes.

A mixin of `Session`. Runs where a root forward begins, never within a pass.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import Any

import torch
from torch import nn

from . import stepping
from .attach import Placement
from .auto import Governor
from .checkpoint import Checkpoint
from .errors import BudgetError, CaromError
from .learn import Learnt
from .plan import Plan
from .streamer import Streamer
from .tree import Tree
from .units import MODELS_OWN, Carving, Entry
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
    _checkpoint: Checkpoint | None

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
            entries = self._tree.entries()
            known = {id(entry.tensor) for entry in self._known()}
            fresh = [entry for entry in entries if id(entry.tensor) not in known]
            gone = known - {id(entry.tensor) for entry in entries}
            buffers = [entry for entry in fresh if entry.is_buffer and not entry.trainable]
            for entry in buffers:
                self._placement.made_here(entry)
            if gone:
                self._note_replaced()
            else:
                for entry in buffers:
                    self._is_models_own(entry)
            weights = [entry for entry in fresh if not entry.trainable and entry.counted]
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
                    reason = "appeared after stream" if entry.counted else MODELS_OWN
                    self._carving.resident.append((entry, reason))
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
        """Resident buffers that the model replaced (statistics, caches) are its new ones now, whatever their size; other
        tensors only where the new ones are of their kind."""
        replaced: dict[int, Entry] = {}
        before = []  # alive for as long as their ids are compared
        known: set[int] = set()
        for entry, _ in self._carving.resident:
            old = entry.tensor
            new = _stands_now(entry)
            if new is None or new is old or new.requires_grad:
                continue
            filed = self._checkpoint is not None and self._checkpoint.of(old) is not None
            same = (new.shape, new.dtype) == (old.shape, old.dtype) and not new.is_inference()
            if not same and (filed or not entry.is_buffer):
                continue
            known = known or {id(entry.tensor) for entry in self._known()}
            if id(new) in known:  # it stands for another
                continue
            entry.tensor = new
            replaced[id(old)] = entry
            before.append(old)
            known.add(id(new))
            if not filed:
                self._is_models_own(entry)
        if replaced:
            self._placement.replaced(replaced)

    def _follow_made(self) -> None:
        """Buffers that the model made since the last forward began: those on the device go home in the end."""
        known = {id(entry.tensor) for entry in self._known()}
        with contextlib.suppress(CaromError):  # whatever else came, the end goes on
            for entry in () if self._tree.lent() else self._tree.entries():
                if entry.is_buffer and not entry.trainable and id(entry.tensor) not in known:
                    self._placement.made_here(entry)

    def _note_replaced(self) -> None:
        """Large buffers that the model replaced stay from now on: it makes them."""
        for unit in self._carving.units:
            for entry in unit.entries:
                if entry.is_buffer:
                    new = _stands_now(entry)
                    if new is not None and new is not entry.tensor and not new.requires_grad:
                        self._stay[entry.name] = MODELS_OWN

    def _is_models_own(self, entry: Entry) -> None:
        """The model makes this buffer as it runs: it is not counted, as activations are not."""
        if entry.is_buffer:
            entry.counted = False
            self._stay[entry.name] = MODELS_OWN

    def _known(self) -> list[Entry]:
        carving = self._carving
        units = [entry for unit in carving.units for entry in unit.entries]
        return units + [entry for entry, _ in carving.resident] + carving.adapters


def _stands_now(entry: Entry) -> torch.Tensor | None:
    """What stands in the tree where ``entry`` was found; None where its places differ."""
    found: torch.Tensor | None = entry.sites[0].table.get(entry.sites[0].name)
    return found if all(site.table.get(site.name) is found for site in entry.sites) else None
