"""`ManagedModule`: a session's module, with its weights file, its quantised weights and its wrapped forwards. `Known`: what was
learnt of a module, which is kept for later layouts and later sessions of it.
"""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..common.errors import WeightsError
from ..device.engine import Engine
from ..host.node_group import NodeGroup
from ..host.shared_image import SharedImage
from ..model.quantized import FlattenedWeights
from ..placement.bound_checkpoint import Checkpoint
from ..placement.disk_binding import bind_memory, bind_replaced
from ..placement.file_binding import bind_file
from ..placement.first_rank_values import follow_first_rank
from ..placement.flat_views import FlatViews
from ..placement.packed_tensor import give_back
from ..placement.shared_weights import share_files, share_memory
from ..plan.learnt_order import KnownSchedules, LearntOrder
from ..streaming.root_hooks import RootHooks
from .host_resources import HostResources


@dataclass
class Known:
    """What is known of one module.

    ``order``: the order in which its weights were used last. ``schedules``: the schedules that were made for it.
    """

    order: LearntOrder = field(default_factory=LearntOrder)
    schedules: KnownSchedules = field(default_factory=KnownSchedules)


# By a module of the tree that holds tensors: sessions of one model may have different root objects. Two models that share
# this module share what is known; a wrong order costs time only.
_known: weakref.WeakKeyDictionary[nn.Module, Known] = weakref.WeakKeyDictionary()


def recall_known(root: nn.Module) -> Known:
    """Return what was noted last for the module tree ``root``."""
    return _known.get(_key(root)) or Known()


def note_known(root: nn.Module, known: Known) -> None:
    """Keep ``known`` for the next session of the module tree ``root``."""
    _known[_key(root)] = known


def _key(root: nn.Module) -> nn.Module:
    below = (module for module in root.modules() if module is not root)
    return next((module for module in below if module._parameters or module._buffers), root)


class ManagedModule:
    """The module that a session streams, and the session's changes to the module that are kept from one
    layout to the next.

    ``root``: a second object with the attributes of the user's module (`share_attributes`), so that the session does
    not keep that module alive.
    ``disk``: as in `carom.stream`.
    ``checkpoint``: the weights that are in files, or None if all are in memory.
    ``quantized``: the module's quantised weights, flattened so that their inner tensors are streamed; None
    for a module with a weights file that holds no quantised weights.
    ``hooks``: the wrapped forwards.
    ``flat_views``: the weights that are views of tensors that other code keeps.
    """

    def __init__(self, root: nn.Module, hooks: RootHooks, disk: str | os.PathLike[str] | None = None) -> None:
        self.root, self.hooks, self.disk = root, hooks, disk
        self.checkpoint: Checkpoint | None = None
        self.quantized: FlattenedWeights | None = None
        self.flat_views = FlatViews(root)
        self._lost: WeightsError | None = None

    @property
    def name(self) -> str:
        """The name of the module's class, for messages."""
        return type(self.root).__name__

    def bind(self, weights: Any, engine: Engine, keep_packed: bool) -> None:
        """Bind the module to the file ``weights``, or flatten its quantised weights if ``weights`` is None.

        ``keep_packed``: copy packed tensors of the file to the device packed. Raises WeightsError and
        UnsupportedError.
        """
        if weights is None:
            self.quantized = FlattenedWeights(self.root)
            return
        self.checkpoint = bind_file(self.root, weights)
        if self.checkpoint.quantised is not None:
            self.quantized = FlattenedWeights(self.root)
            self.checkpoint.quantised.bind_inner(self.root, self.checkpoint.bind)
            self.quantized.follow()
        if keep_packed:
            self.checkpoint.stay_packed(engine)

    def share(self, node: NodeGroup, ram: int, image: SharedImage) -> None:
        """Let frozen weights stream from memory that the ranks of ``node`` share, and add that memory to ``image``. Give the
        other tensors the values of the first rank.

        ``ram``: the budget of the machine's host memory in bytes. Raises as `share_memory`, `share_files` and
        `follow_first_rank` do.
        """
        if self.checkpoint is not None:
            share_files(self.checkpoint, node, ram, image)
        else:
            self.checkpoint = share_memory(self.root, node, image)
            if self.quantized is not None:
                self.quantized.follow()
        self.note(follow_first_rank(self.root, node))

    def note(self, note: str) -> None:
        """Add ``note`` to the report of a module whose weights are in files; "" adds nothing."""
        if note and self.checkpoint is not None:
            self.checkpoint.note(note)

    def move_to_disk(self, ram: int) -> bool:
        """Let the weights stream from disk from now on, if `disk` allows it. Returns whether that changed.

        Called while no layout is in effect. ``ram``: the budget of host memory in bytes. Raises BudgetError and
        WeightsError as `bind_memory` does.
        """
        if self.disk is None or self.checkpoint is not None:
            return False
        self.checkpoint = bind_memory(self.root, self.disk, ram)
        if self.quantized is not None:
            self.quantized.follow()
        return self.checkpoint is not None

    def follow_replaced(self, ram: int) -> None:
        """Let tensors stream that replaced weights from files. Called while no layout is in effect.

        ``ram``: the budget of host memory in bytes. Raises as `bind_replaced` does.
        """
        if self.checkpoint is not None:
            bind_replaced(self.root, self.checkpoint, self.disk, ram)

    @property
    def simple(self) -> bool:
        """Whether all weights are plain tensors: no weight comes from a file, and none is quantised."""
        return self.checkpoint is None and not len(self.quantized or ())

    def unbind(self, host: HostResources, engine: Engine) -> None:
        """Restore the module's own tensors and forwards. Idempotent. After an error for lack of memory, the
        call may be repeated.
        """
        self.hooks.remove()
        give_back(host.shelf, engine.move)
        if self.checkpoint is not None:
            self.checkpoint.unbind()
        if self.quantized is not None:
            self.quantized.close()
        if self.checkpoint is not None and self.checkpoint.quantised is not None:
            self.checkpoint.quantised.undo()
        self.flat_views.restore()

    def raise_lost(self) -> None:
        """Raise the WeightsError for values that `unbind` could not restore. The next call does nothing."""
        lost, self._lost = self._lost, None
        if lost is not None:
            raise lost

    def forget(self) -> None:
        """Drop the references to the module and its tensors. Called after `unbind`."""
        self.hooks.forget()
        if self.checkpoint is not None:
            self._lost = self.checkpoint.lost
            self.checkpoint.quantised = None
        self.checkpoint = self.quantized = None
        del self.root, self.flat_views

    def tensor(self, name: str) -> torch.Tensor | None:
        """Return the parameter or buffer ``name`` (a dotted path), or None if the module has no such tensor."""
        path, _, leaf = name.rpartition(".")
        try:
            module = self.root.get_submodule(path)
        except AttributeError:
            return None
        found: torch.Tensor | None = module._parameters.get(leaf)
        return module._buffers.get(leaf) if found is None else found
