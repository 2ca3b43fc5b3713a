"""Notices that a module tree changed: adapters wrapped in, weights replaced. Cheap enough for every forward."""

from __future__ import annotations

from torch import nn

from .units import Entry, collect


class Tree:
    """A fingerprint of every module's children, parameters and buffers, by identity."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._tables = [
            (table, list(map(id, table.values())))
            for module in root.modules()
            for table in (module._modules, module._parameters, module._buffers)
        ]
        self._tables = [(table, ids) for table, ids in self._tables if ids or table]

    def changed(self) -> bool:
        """Whether any table's members are others than when the fingerprint was taken."""
        return any(list(map(id, table.values())) != ids for table, ids in self._tables)

    def entries(self) -> list[Entry]:
        """The tree's tensors as they are now."""
        return collect(self._root)
