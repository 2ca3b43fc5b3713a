"""Notices that a module tree changed: adapters wrapped in, weights replaced. Cheap enough for every forward."""

from __future__ import annotations

from itertools import chain

from torch import nn

from .units import Entry, collect


class Tree:
    """A fingerprint of every module's children, parameters and buffers, by identity."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        tables = [t for m in root.modules() for t in (m._modules, m._parameters, m._buffers)]
        self._members = [table.values() for table in tables if table]  # views: they follow their tables
        self._sizes, self._ids = list(map(len, self._members)), self._now()

    def _now(self) -> list[int]:
        # Without a step of Python's for each table: there are thousands, and it runs before every forward. Ids: the tensors
        # themselves would keep device memory of weights that have left.
        return list(map(id, chain.from_iterable(self._members)))

    def changed(self) -> bool:
        """Whether any table's members are others than when the fingerprint was taken."""
        return list(map(len, self._members)) != self._sizes or self._now() != self._ids

    def lent(self) -> bool:
        """Whether something other than a parameter stands in a parameter's place for a while, as `torch.func.functional_call` does."""
        return any(
            value is not None and not isinstance(value, nn.Parameter)
            for module in self._root.modules()
            for value in module._parameters.values()
        )

    def entries(self) -> list[Entry]:
        """The tree's tensors as they are now."""
        return collect(self._root)
