"""`Phase`: what state a session is in, and which changes of state are allowed."""

from __future__ import annotations

from enum import Enum, auto


class Phase(Enum):
    """The state of a session's weights."""

    NEW = auto()  # no layout was made yet
    LAYING_OUT = auto()  # a layout is being taken back or made
    ATTACHED = auto()  # the present layout serves passes
    PARKED = auto()  # the device is released; the next forward lays the weights out again
    ASIDE = auto()  # parked, with pinned host copies of all weights for a quick return
    CLOSED = auto()  # the module is its owner's again

    @property
    def parked(self) -> bool:
        """Whether the device is released and the module still attached."""
        return self in (Phase.PARKED, Phase.ASIDE)

    @property
    def settled(self) -> bool:
        """Whether module and session are whole: nothing is half laid out."""
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
    """Return ``following`` if a session in phase ``present`` may enter that phase. Raises RuntimeError otherwise."""
    if following not in _NEXT[present]:
        raise RuntimeError(f"a session cannot go from {present.name} to {following.name}")
    return following
