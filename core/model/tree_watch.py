"""Detection of changes in a module tree, such as added adapters or replaced weights. Fast enough to run
before every forward.
"""

from __future__ import annotations

from itertools import chain

from torch import nn

from .compiling import CompiledParts
from .units import Entry, collect


class Tree:
    """A record of every module's children, parameters and buffers, by the ids of these objects."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        tables = [t for m in root.modules() for t in (m._modules, m._parameters, m._buffers)]
        # Views of the modules' dicts. A view shows later changes of its dict.
        self._members = [table.values() for table in tables if table]
        self._sizes, self._ids = list(map(len, self._members)), self._now()
        self._parts = CompiledParts(root)

    def _now(self) -> list[int]:
        # A tree has thousands of dicts and this runs before every forward, so the loop runs in C. Ids are
        # kept instead of tensors because references would keep device memory of removed weights alive.
        """Return the ids of all members as they are now."""
        return list(map(id, chain.from_iterable(self._members)))

    def changed(self) -> bool:
        """Return whether any module's children, parameters or buffers differ from the record."""
        return list(map(len, self._members)) != self._sizes or self._now() != self._ids

    def compiled(self) -> bool:
        """Return whether torch.compile compiled a module of the tree."""
        return self._parts.found()

    def lent(self) -> bool:
        """Return whether a parameter is replaced temporarily by another tensor, as
        `torch.func.functional_call` does.
        """
        return any(
            value is not None and not isinstance(value, nn.Parameter)
            for module in self._root.modules()
            for value in module._parameters.values()
        )

    def buffers(self) -> set[int]:
        """Return the ids of the tree's buffers as it is now."""
        tables = (module._buffers for module in self._root.modules())
        return {id(tensor) for table in tables for tensor in table.values() if tensor is not None}

    def entries(self) -> list[Entry]:
        """Return an entry for each tensor of the tree as it is now."""
        return collect(self._root)
