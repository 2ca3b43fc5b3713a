"""Notices that a module tree changed: adapters wrapped in, weights replaced. Cheap enough for every forward."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from operator import is_, methodcaller
from typing import Any

from torch import nn

from .units import Entry, collect

_members = methodcaller("values")


class Tree:
    """A fingerprint of every module's children, parameters and buffers, by identity."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        tables = [t for m in root.modules() for t in (m._modules, m._parameters, m._buffers)]
        self._tables = [table for table in tables if table]
        self._sizes, self._known = list(map(len, self._tables)), list(self._now())

    def _now(self) -> Iterator[Any]:
        # Without a step of Python's for each table: there are thousands, and it runs before every forward.
        return chain.from_iterable(map(_members, self._tables))

    def changed(self) -> bool:
        """Whether any table's members are others than when the fingerprint was taken."""
        return list(map(len, self._tables)) != self._sizes or not all(map(is_, self._now(), self._known))

    def entries(self) -> list[Entry]:
        """The tree's tensors as they are now."""
        return collect(self._root)
