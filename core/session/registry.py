"""A registry of the session that streams each module. Only one session at a time may stream a module tree."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch import nn

from ..common.errors import UnsupportedError
from ..model import managed_tensor
from .phase import Phase

if TYPE_CHECKING:
    from .layout_manager import LayoutManager

# The manager of the session of every module in a streamed tree. Keys and values are weak references, so that
# dropping the last reference to a module also frees the module's session.
_managers: weakref.WeakKeyDictionary[nn.Module, weakref.ref[LayoutManager]] = weakref.WeakKeyDictionary()


def enter(module: nn.Module, manager: LayoutManager) -> None:
    """Register the session of ``manager`` for all modules that the tree of ``module`` contains at this moment."""
    for part in module.modules():
        _managers[part] = weakref.ref(manager)


def leave(module: nn.Module, manager: LayoutManager) -> None:
    """Remove the entries of the session of ``manager`` from the registry."""
    for part in module.modules():
        if (found := _managers.get(part)) is not None and found() is manager:
            del _managers[part]


def refuse_streamed(module: nn.Module) -> None:
    """Raise UnsupportedError if a session streams ``module``, a submodule of it, or a module that contains it."""
    parts = list(module.modules())
    for part in parts:
        if _streams(part):
            raise UnsupportedError(
                f"{'this module' if part is module else f'its part {type(part).__name__}'} is streamed already; "
                "close that session first"
            )
    if any(
        isinstance(tensor, (managed_tensor.HostParameter, managed_tensor.HostTensor))
        for part in parts
        for tensor in (*part._parameters.values(), *part._buffers.values())
    ):
        raise UnsupportedError(
            "weights of this module are streamed as part of another; close that session first"
        )


def _streams(module: nn.Module) -> bool:
    """Return whether an open session streams ``module``."""
    found = _managers.get(module)
    manager = None if found is None else found()
    return manager is not None and manager.phase is not Phase.CLOSED
