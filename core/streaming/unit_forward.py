"""Defines `UnitForward`, the wrapper of a streamed unit's forward, which acquires and releases the unit's
slot.

A slot is the device memory that holds a unit (a group of streamed tensors) while it is used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..model.compiling import compiling, quiet, untraced
from ..model.managed_tensor import in_backward
from .unit import StreamedUnit

if TYPE_CHECKING:
    from .streamer import Streamer

_graph_task = torch._C._current_graph_task_id  # -1 outside backward passes


class UnitForward:
    """Makes the wrapper of the forward of one of a unit's modules. The wrapper calls `Run.enter` before the forward,
    and `Run.leave` afterwards, also after an error. After an interrupt it calls `Streamer.interrupted`.

    The unit and the streamer are attributes, so that the wrapper can serve the next layout too: code that torch.compile
    compiled refers to the wrapper, and would have to be compiled again for another one.
    ``place``: as in `untraced`.
    ``streamer``: the streamer of the present layout, None while the module belongs to no streamed unit.
    """

    def __init__(self, place: tuple) -> None:
        self._place = place
        self.streamer: Streamer | None = None

    def connect(self, unit: StreamedUnit, streamer: Streamer) -> None:
        """Let the wrapper serve ``unit``, a unit of ``streamer``."""
        self.streamer, self._unit, self._run = streamer, unit, streamer.run

    def disconnect(self) -> None:
        """Drop the references to the streamer, whose layout ends."""
        if self.streamer is not None:
            self.streamer = None
            del self._unit, self._run

    def _interrupted(self) -> None:
        if self.streamer is not None:
            self.streamer.interrupted()

    def _begins_pass(self) -> bool:
        """Return whether a call is outside the root's forward and outside backward passes. Called under torch.compile."""
        return not self._run.local.mine.roots and not in_backward()

    def _enter_compiled(self) -> Any:
        """Enter the unit's run, under torch.compile."""
        try:
            return self._run.enter(self._unit)
        except Exception:
            raise
        except BaseException:
            self._interrupted()
            raise

    def _leave_compiled(self, entered: Any) -> None:
        """End the unit's run, under torch.compile. Called in a ``finally`` clause."""
        error = sys.exc_info()[1]
        try:
            if error is not None and not isinstance(error, Exception):
                self._interrupted()
            else:
                self._run.leave(entered)
        except Exception:
            raise
        except BaseException:
            self._interrupted()
            raise

    def wrap(self, inner: Callable, as_pass: Callable[[Callable], Callable]) -> Callable:
        """Return the wrapper of ``inner``.

        ``as_pass``: returns a function that calls its argument as a pass of its own. It is used for calls outside the
        root's forward and outside backward passes.
        """
        # Outside torch.compile, `forward` calls the methods of `Run` directly. Under torch.compile, it calls
        # wrappers made by `quiet`, which the compiler does not trace but which take time in every call. It reads no
        # attribute of `self` then, because the guards of compiled code would compare the attribute's value.
        # The compiler cannot break a graph inside `except` clauses, so the compiled path has only a `finally`.

        def wrapper(outside: Callable | None) -> Callable:
            """Return the wrapper. ``outside``: runs calls that become passes, None for a call that is in a pass."""

            def forward(*args: Any, **kwargs: Any) -> Any:
                if compiling() is not None:
                    if outside is not None and _quiet_begins(self):
                        return outside(*args, **kwargs)
                    entered = _quiet_enter(self)
                    try:
                        return inner(*args, **kwargs)
                    finally:
                        _quiet_leave(self, entered)
                if outside is not None and not self._run.local.mine.roots and _graph_task() == -1:
                    return outside(*args, **kwargs)
                # An interrupt may come at any line of Carom's code, so all of it is inside this `try`.
                try:
                    run = self._run
                    entered = run.enter(self._unit)
                    try:
                        result = inner(*args, **kwargs)
                    except Exception:
                        run.leave(entered)
                        raise
                    run.leave(entered)
                    return result
                except Exception:
                    raise
                except BaseException:
                    self._interrupted()
                    raise

            return untraced(forward, (self._place, outside is None))

        # A wrapper that referred to itself would keep the module alive until the garbage collector runs.
        return wrapper(as_pass(wrapper(None)))


# One of each serves all units, because making them for each unit took a large part of the time to attach a model.
_quiet_begins = quiet(UnitForward._begins_pass)
_quiet_enter, _quiet_leave = quiet(UnitForward._enter_compiled), quiet(UnitForward._leave_compiled)
