"""`PassGate`: tells when a change of a session may begin, which no running pass and no awaited backward allows.

A pass is a forward of the session's module, or the backward that belongs to it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from weakref import WeakSet

from ..common.errors import UnsupportedError
from ..streaming.runner import Runner, Use
from ..streaming.running_passes import runs_elsewhere, runs_here

_POLL = 0.005  # seconds between two looks whether a pass of another thread has ended


class PassGate:
    """Lets changes of a session begin between passes.

    ``lock``: the lock of the session's layout, held while a pass begins and through every change.
    ``name``: the name of the module, for messages.
    ``runner``: returns the layout's runner, None if no layout is in effect.
    ``graphs``: one object for each forward whose backward may still be called.
    """

    def __init__(self, lock: threading.RLock, name: str, runner: Callable[[], Runner | None]) -> None:
        self._lock, self.name, self._runner = lock, name, runner
        self._waiting = 0  # number of threads in `between_passes` that wait for a pass to end
        self.graphs: WeakSet[object] = WeakSet()

    @property
    def idle(self) -> bool:
        """Whether a layout is in effect, no pass is running, and no autograd graph needs the layout's units."""
        runner = self._runner()
        return runner is not None and not (runner.in_use(Use.PASS) or runner.in_use(Use.GRAPH))

    def _in_use(self) -> Runner | None:
        """Return the layout's runner if a forward or backward pass is running, otherwise None."""
        runner = self._runner()
        return runner if runner is not None and runner.in_use(Use.PASS) else None

    @contextlib.contextmanager
    def between_passes(self, doing: str, *, inside: bool = False, ends_stuck: bool = False) -> Iterator[None]:
        """Hold the layout lock while no pass runs. Waits until the passes of other threads have ended.

        ``doing``: what the caller is about to do, for the error message.
        ``inside``: whether the caller may go on if this thread itself is in a pass. Otherwise UnsupportedError is
        raised.
        ``ends_stuck``: whether the caller may go on if a pass waits for a slot. That pass then ends with an error.
        """
        waits = False
        try:
            while True:
                with self._lock:
                    self._waiting -= waits
                    waits = False
                    runner = self._in_use()
                    if runner is None or not self._has_to_wait(runner, doing, inside, ends_stuck):
                        yield
                        return
                    self._waiting += 1
                    waits = True
                time.sleep(_POLL)
        finally:
            if waits:  # an interrupt while waiting
                self._waiting -= 1

    def runs_here(self) -> bool:
        """Return whether this thread is in a pass."""
        with self._lock:
            runner = self._in_use()
            return runner is not None and runs_here(runner)

    def _has_to_wait(self, runner: Runner, doing: str, inside: bool, ends_stuck: bool) -> bool:
        """Return whether a caller of `between_passes` has to wait for a pass. Arguments and errors: its."""
        if runs_here(runner):
            if inside:
                return False
            raise UnsupportedError(
                f"{self.name} cannot be {doing} within its own forward, or between a forward and its backward, which "
                "need its weights where they are: do that after the forward or backward has returned"
            )
        if ends_stuck and runner.in_use(Use.WAIT):
            return False
        return runs_elsewhere(runner)

    def let_others_first(self) -> None:
        """Wait for threads that waited in `between_passes` for this moment. Called before a pass begins.

        A thread that runs one pass after another would otherwise let them wait without end.
        """
        while self._waiting and self._in_use() is None:
            time.sleep(_POLL)

    def refuse_running(self) -> None:
        """Raise UnsupportedError if a pass is running, which a change of layout would break."""
        runner = self._in_use()
        if runner is not None and (runs_here(runner) or runs_elsewhere(runner)):
            raise UnsupportedError(
                f"the weights of {self.name} would have to move while its forward or backward runs: do this after "
                "the forward or backward has returned"
            )

    def refuse_awaited(self) -> None:
        """Raise UnsupportedError if the backward of a forward may still be called. Called before the session is parked."""
        runner = self._runner()
        if runner is not None and (len(self.graphs) > 0 or runner.in_use(Use.BACKWARD)):
            raise UnsupportedError(
                f"{self.name} cannot be parked between a forward and its backward: its weights would leave the "
                "device, and the backward could not find them. Call backward() first, or drop what the forward returned "
                "(under torch.no_grad() nothing is kept)"
            )

    def refuse_graphs(self) -> None:
        """Raise UnsupportedError if a backward is running, or an autograd graph needs the layout's units."""
        runner = self._runner()
        if runner is None:
            return
        with runner.lock:
            needed = len(self.graphs) > 0 or runner.in_use(Use.GRAPH) or runner.in_use(Use.BACKWARD)
        if needed:
            raise UnsupportedError(
                f"the budget of {self.name} cannot change between a forward and its backward: its weights would "
                "move, and the graph could not find them. Call backward() first, or drop what the forward returned (under "
                "torch.no_grad() nothing is kept), then set_budget() again"
            )
