"""`Phase`: the state of a session, and `advance`: the check of a change of state.

A layout assigns each weight to device memory, or to host memory or a file from which it is streamed.
"""

from __future__ import annotations

from enum import Enum, auto


class Phase(Enum):
    """The state of a session's weights."""

    NEW = auto()  # no layout has been made yet
    LAYING_OUT = auto()  # a layout is being undone or made
    ATTACHED = auto()  # the present layout serves passes
    PARKED = auto()  # the session uses no device memory; the next forward makes a layout again
    ASIDE = auto()  # like PARKED, with pinned host copies of all weights for a quick return
    CLOSED = auto()  # the module is restored; the session is over

    @property
    def parked(self) -> bool:
        """Whether the session uses no device memory, and the module still belongs to the session."""
        return self in (Phase.PARKED, Phase.ASIDE)

    @property
    def settled(self) -> bool:
        """Whether no layout is partly made or partly undone, so that module and session are in a consistent
        state.
        """
        return self in (Phase.ATTACHED, Phase.PARKED, Phase.ASIDE, Phase.CLOSED)


_NEXT = {
    Phase.NEW: {Phase.LAYING_OUT, Phase.CLOSED},
    Phase.LAYING_OUT: {Phase.ATTACHED, Phase.PARKED, Phase.ASIDE, Phase.CLOSED},
    Phase.ATTACHED: {Phase.LAYING_OUT, Phase.PARKED},
    Phase.PARKED: {Phase.LAYING_OUT, Phase.PARKED},
    Phase.ASIDE: {Phase.LAYING_OUT, Phase.PARKED},
    Phase.CLOSED: set[Phase](),
}


def advance(present: Phase, following: Phase) -> Phase:
    """Return ``following`` if a session may change from the phase ``present`` to it. Otherwise raise
    RuntimeError.
    """
    if following not in _NEXT[present]:
        raise RuntimeError(f"a session cannot go from {present.name} to {following.name}")
    return following
