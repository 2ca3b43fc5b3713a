"""Defines `unit_forward`, the wrapper of a streamed unit's forward, which acquires and releases the unit's
slot.

A slot is the device memory that holds a unit (a group of streamed tensors) while it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..model.compiling import compiling, quiet, untraced
from ..model.managed_tensor import in_backward
from .forward import Runs
from .unit import StreamedUnit


def unit_forward(
    unit: StreamedUnit, runs: Runs, as_pass: Callable[[Callable], Callable]
) -> Callable[[Callable], Callable]:
    """Return a wrapper for the forward of one of the unit's modules. It calls `Runs.enter` before the forward and
    `Runs.leave` afterwards, also after exceptions.

    ``as_pass``: returns a function that calls its argument as a pass of its own. It is used for calls outside the
    root's forward and outside backward passes.
    """
    # Outside torch.compile, `forward` calls these methods directly. Under torch.compile, it calls wrappers
    # made by `quiet`, which the compiler does not trace but which take time in every call.
    enter, leave = runs.enter, runs.leave
    quiet_enter, quiet_leave = quiet(enter), quiet(leave)

    local = runs.local

    def make(inner: Callable) -> Callable:
        @untraced
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not local.runs and not in_backward():
                return outside(*args, **kwargs)
            plain = compiling() is None
            slot, gradient = enter(unit) if plain else quiet_enter(unit)
            try:
                return inner(*args, **kwargs)
            finally:
                if plain:
                    leave(unit, slot, gradient)
                else:
                    quiet_leave(unit, slot, gradient)

        outside = as_pass(forward)
        return forward

    return make
