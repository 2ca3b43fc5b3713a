"""A registry of the session that streams each module. Only one session at a time may stream a module tree."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch import nn

from ..common.errors import UnsupportedError
from ..model import managed_tensor

if TYPE_CHECKING:
    from .session import Session

# The session of every module in a streamed tree. Keys and values are weak references, so that dropping the last
# reference to a module also frees the module's session.
_sessions: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Session]] = weakref.WeakKeyDictionary()


def enter(session: Session) -> None:
    """Register ``session`` for all modules that its tree contains at this moment."""
    for part in session.module.modules():
        _sessions[part] = weakref.ref(session)


def leave(session: Session) -> None:
    """Remove the entries of ``session`` from the registry."""
    for part in session.module.modules():
        if (found := _sessions.get(part)) is not None and found() is session:
            del _sessions[part]


def refuse_streamed(module: nn.Module) -> None:
    """Raise UnsupportedError if a session streams ``module``, a submodule of it, or a module that contains it."""
    for part in module.modules():
        if session_of(part) is not None:
            raise UnsupportedError(
                f"{'this module' if part is module else f'its part {type(part).__name__}'} is streamed already; "
                "close that session first"
            )
    if any(
        isinstance(p, (managed_tensor.HostParameter, managed_tensor.HostTensor))
        for p in (*module.parameters(), *module.buffers())
    ):
        raise UnsupportedError(
            "weights of this module are streamed as part of another; close that session first"
        )


def session_of(module: nn.Module) -> Session | None:
    """Return the open session that streams ``module``, or None if there is none."""
    found = _sessions.get(module)
    session = None if found is None else found()
    return None if session is None or session.closed else session
