"""Which threads run a pass of a session, as their stacks show it.

A runner counts running passes. A KeyboardInterrupt between two lines can leave a count behind, and a caller that
waited for this count would wait without end. So callers that wait also look at the stacks.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Iterator
from types import FrameType

from ..model.managed_tensor import in_backward
from . import root_forward
from .runner import Runner

_looking = threading.RLock()
_BEGINS = object()  # what a frame has of a pass that begins


def runs_here(runner: Runner) -> bool:
    """Return whether this thread is in a pass of ``runner``, or in a backward pass."""
    return in_backward() or _in_pass(sys._getframe(), runner)


def runs_elsewhere(runner: Runner) -> bool:
    """Return whether another thread is in a pass of ``runner``, or in a backward pass."""
    own = threading.get_ident()
    with _without_collections():
        return any(
            _in_pass(frame, runner) or _in_backward(frame)
            for thread, frame in sys._current_frames().items()
            if thread != own
        )


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Let no garbage collection begin while the stacks of other threads are looked at.

    CPython before 3.12 makes the object of a frame when it is asked for, which may begin a collection. Code that the
    collection calls lets other threads run, whose frames may end meanwhile: the new object then refers to freed memory.
    And `sys._current_frames` holds the lock of the list of threads, for which a collection that frees a
    `threading.local` waits without end (seen in 3.11.7).
    """
    with _looking:  # another thread that looks at stacks would enable collections again
        enabled = gc.isenabled()
        try:
            gc.disable()
            yield
        finally:
            if enabled:
                gc.enable()


def _in_pass(frame: FrameType | None, runner: Runner) -> bool:
    while frame is not None:
        code = frame.f_code
        runs_pass = code.co_filename == root_forward.__file__ and code.co_name == root_forward.PASS
        if runs_pass:
            running = frame.f_locals.get("running", _BEGINS)
            # `running` is set when `begin_pass` has returned. Until then, the frame counts for every runner.
            if running is _BEGINS or getattr(running, "runner", None) is runner:
                return True
        frame = frame.f_back
    return False


def _in_backward(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "_engine_run_backward":
            return True
        frame = frame.f_back
    return False
