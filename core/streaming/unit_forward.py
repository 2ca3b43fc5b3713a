"""Defines `unit_forward`, the wrapper of a streamed unit's forward that acquires and releases the unit's
slot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..model.compiling import compiling, quiet, untraced
from .forward import Runs
from .unit import StreamedUnit


def unit_forward(unit: StreamedUnit, runs: Runs) -> Callable[[Callable], Callable]:
    """Return a wrapper that enters the unit's slot before a forward and leaves it afterwards, also after
    exceptions."""
    # Outside torch.compile, `forward` calls the methods directly. The wrappers that `quiet` makes, which keep
    # the methods out of torch.compile, cost time in every call.
    enter, leave = runs.enter, runs.leave
    quiet_enter, quiet_leave = quiet(enter), quiet(leave)

    def make(inner: Callable) -> Callable:
        @untraced
        def forward(*args: Any, **kwargs: Any) -> Any:
            plain = compiling() is None
            slot, gradient = enter(unit) if plain else quiet_enter(unit)
            try:
                return inner(*args, **kwargs)
            finally:
                if plain:
                    leave(unit, slot, gradient)
                else:
                    quiet_leave(unit, slot, gradient)

        return forward

    return make
