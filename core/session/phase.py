"""`Phase`: the state of a session, and `advance`: the check of a change of state."""

from __future__ import annotations

from enum import Enum, auto


class Phase(Enum):
    """The state of a session's weights."""

    NEW = auto()  # no layout was made yet
    LAYING_OUT = auto()  # a layout is being taken back or made
    ATTACHED = auto()  # the present layout serves passes
    PARKED = auto()  # the device is released; the next forward makes a layout again
    ASIDE = auto()  # parked, with pinned host copies of all weights for a quick return
    CLOSED = auto()  # the module is restored; the session is over

    @property
    def parked(self) -> bool:
        """Whether the device is released while the module still belongs to the session."""
        return self in (Phase.PARKED, Phase.ASIDE)

    @property
    def settled(self) -> bool:
        """Whether no layout is partly made, so that module and session are in a consistent state."""
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
    """Return ``following`` if a session may go from ``present`` to that phase. Raises RuntimeError otherwise."""
    if following not in _NEXT[present]:
        raise RuntimeError(f"a session cannot go from {present.name} to {following.name}")
    return following
