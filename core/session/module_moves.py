"""`ModuleMoves`: what ``.to()`` and similar methods of a streamed module ask of its session."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import nn

from .phase import Phase

if TYPE_CHECKING:
    from .assembly import Parts


def park(parts: Parts, keep: bool = False) -> None:
    """Release the session's device memory. ``keep``, errors: as in `Session.park`."""
    manager = parts.manager
    with manager.gate.between_passes("parked"):
        manager.need_open()
        if not manager.phase.parked:
            manager.gate.refuse_awaited()
            parts.ledger.leave_device()
            manager.park(keep)


class ModuleMoves:
    """The `root_apply.Movable` of a session. It does not keep the session's module alive."""

    def __init__(self, module: nn.Module, parts: Parts) -> None:
        self._module, self._parts = weakref.ref(module), parts

    @property
    def module(self) -> nn.Module:
        """The session's module. Called by its own methods, so it exists."""
        found = self._module()
        assert found is not None
        return found

    @property
    def device(self) -> torch.device:
        """The device on which the module computes."""
        return self._parts.engine.device

    @property
    def put_aside(self) -> bool:
        """Whether the session is parked with host copies of all weights, for a quick return to the device."""
        return self._parts.manager.phase is Phase.ASIDE

    def dtypes(self) -> set[torch.dtype]:
        """Return the dtypes of the module's tensors."""
        return {entry.tensor.dtype for entry in self._parts.manager.layout.entries()}

    def park(self) -> None:
        """Release the device memory of the session."""
        park(self._parts)

    def unpark(self) -> None:
        """Move the weights to the device again."""
        self._parts.passes.unpark()
