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
    """Return a wrapper for the forward of one of the unit's modules. It calls `Runs.enter` before the forward, and
    `Runs.leave` afterwards, also after an error. After an interrupt it calls `Streamer.interrupted`.

    ``as_pass``: returns a function that calls its argument as a pass of its own. It is used for calls outside the
    root's forward and outside backward passes.
    """
    # Outside torch.compile, `forward` calls these methods directly. Under torch.compile, it calls wrappers
    # made by `quiet`, which the compiler does not trace but which take time in every call.
    enter, leave = runs.enter, runs.leave
    quiet_enter, quiet_leave, interrupted = quiet(enter), quiet(leave), quiet(runs.interrupted)

    local = runs.local

    def make(inner: Callable) -> Callable:
        def wrapper(outside: Callable | None) -> Callable:
            """Return the wrapper. ``outside``: runs calls that become passes, None for a call that is in a pass."""

            @untraced
            def forward(*args: Any, **kwargs: Any) -> Any:
                if outside is not None and not local.mine.roots and not in_backward():
                    return outside(*args, **kwargs)
                # An interrupt may come at any line of Carom's code, so all of it is inside this `try`.
                try:
                    plain = compiling() is None
                    slot, gradient = enter(unit) if plain else quiet_enter(unit)
                    try:
                        result = inner(*args, **kwargs)
                    except Exception:
                        (leave if plain else quiet_leave)(unit, slot, gradient)
                        raise
                    (leave if plain else quiet_leave)(unit, slot, gradient)
                    return result
                except Exception:
                    raise
                except BaseException:
                    interrupted()
                    raise

            return forward

        # A wrapper that referred to itself would keep the module alive until the garbage collector runs.
        return wrapper(as_pass(wrapper(None)))

    return make
