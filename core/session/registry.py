"""Which session streams a module: one at a time, and that for the whole of its tree."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch import nn

from ..common.errors import UnsupportedError
from ..model import managed_tensor

if TYPE_CHECKING:
    from .session import Session

# Every module of a streamed tree. Weak on both sides: a dropped module takes its session with it.
_sessions: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Session]] = weakref.WeakKeyDictionary()


def enter(session: Session) -> None:
    """The session's tree, as it is now, is its own."""
    for part in session.module.modules():
        _sessions[part] = weakref.ref(session)


def leave(session: Session) -> None:
    """The tree is nobody's any more."""
    for part in session.module.modules():
        if (found := _sessions.get(part)) is not None and found() is session:
            del _sessions[part]


def refuse_streamed(module: nn.Module) -> None:
    """Raises UnsupportedError where a session streams ``module``, a part of it, or what it is a part of."""
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
    """The open session that streams ``module``."""
    found = _sessions.get(module)
    session = None if found is None else found()
    return None if session is None or session.closed else session
