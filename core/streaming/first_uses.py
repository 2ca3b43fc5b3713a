"""Defines `FirstUses`: the order in which units that stay on the device are used, recorded in the first pass of a layout.

Nothing of Carom's runs when such a unit is used, so the order is not known when a later layout streams the unit. The
forwards of these units are wrapped for one pass, unless the order is known from an earlier layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..model.interpose import Wrapped
from ..model.managed_tensor import in_backward
from ..model.units import Unit
from ..plan.learnt_order import FORWARD, LearntOrder, Names, learnt
from ..plan.schedule_follower import AccessOrder


class FirstUses:
    """The uses of resident units in one pass, between those of the streamed units that ``order`` records.

    ``streamed``: the names of the tensors of each streamed unit.
    """

    def __init__(self, order: AccessOrder, streamed: list[Names]) -> None:
        self._order, self._streamed = order, streamed
        self._seen: list[tuple[int, Names]] = []  # each with the number of accesses before it in the pass
        self._wrapped = Wrapped()

    def watch(self, units: Iterable[Unit]) -> None:
        """Record the first use of each module of ``units``, which stay on the device."""
        for unit in units:
            names = unit.names
            for module in unit.modules:
                self._wrapped.forward(module, self._recording(names), traced=True)

    def _recording(self, names: Names) -> Callable[[Callable], Callable]:
        seen, order, done = self._seen, self._order, False

        def make(inner: Callable) -> Callable:
            def forward(*args: Any, **kwargs: Any) -> Any:
                nonlocal done
                if not torch.compiler.is_compiling() and not done and not in_backward():
                    done = True
                    seen.append((order.pass_length, names))
                return inner(*args, **kwargs)

            return forward

        return make

    def end(self) -> LearntOrder | None:
        """Remove the wrappers, and return the order of the pass, or None if nothing was recorded. Idempotent."""
        self._wrapped.undo()
        seen, self._seen = self._seen, []
        if not seen:
            return None
        uses: list[tuple[Names, int]] = []
        for place, (unit, kind) in enumerate(self._order.pass_uses()):
            while seen and seen[0][0] <= place:
                uses.append((seen.pop(0)[1], FORWARD))
            uses.append((self._streamed[unit], kind))
        return learnt(uses + [(names, FORWARD) for _, names in seen])
