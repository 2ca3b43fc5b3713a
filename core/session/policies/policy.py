"""`Policy`: the interface of an object that may request another layout between steps. `Observation`: the
state that it decides on.

A layout assigns each weight to device memory, or to host memory or a file from which it is streamed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from ...budget.holder import Holder
from ...budget.ledger import BudgetLedger
from ...common.memory_snapshot import Memory
from ...host import probe
from ...host.probe import HostMemory
from ...streaming.runner import Use
from ..layout import Layout, Outcome, Wanted
from ..layout_manager import LayoutManager


@dataclass(frozen=True)
class StepClock:
    """The progress of a layout's steps.

    ``steps``: the number of steps begun.
    ``settled``: the number of steps measured.
    ``awaiting``: whether the backward of the last forward may still follow.
    ``now``: the host's clock in seconds.
    ``virtual``: whether the device's clock is simulated, so that the host's seconds have no meaning.
    """

    steps: int
    settled: int
    awaiting: bool
    now: float
    virtual: bool


class Observation:
    """The state of a session between two steps. Each figure is read at most once, for all policies that are
    due.

    ``layout``: the layout in effect.
    ``wanted``: the request for the layout, with the present budget.
    ``clock``: the progress of the layout's steps.
    """

    def __init__(self, manager: LayoutManager, clock: StepClock) -> None:
        self._ledger: BudgetLedger = manager.ledger
        self._holder: Holder = manager.ledger.holder
        self.layout: Layout = manager.layout
        self.wanted: Wanted = manager.present()
        self.clock = clock

    @classmethod
    def now(cls, manager: LayoutManager) -> Observation:
        """Return an observation of the present state."""
        return cls(manager, clock_of(manager))

    @cached_property
    def memory(self) -> Memory | None:
        """The device memory as far as the session may use it. None if the device's memory is unknown."""
        return self._ledger.memory()

    @cached_property
    def host_memory(self) -> HostMemory:
        """The sizes and limits of the host's memory, in bytes."""
        return probe.host_memory()

    @cached_property
    def held_bytes(self) -> int:
        """The device bytes that weights take now."""
        return self._ledger.held_bytes

    @cached_property
    def least_bytes(self) -> int:
        """The smallest VRAM budget that works, in bytes."""
        return self._ledger.least_bytes

    @cached_property
    def everything_bytes(self) -> int:
        """The bytes that all weights would take on the device."""
        return self._ledger.everything_bytes

    @property
    def unreferenced(self) -> bool:
        """Whether no autograd graph needs the layout's units."""
        return not self.layout.runner.in_use(Use.GRAPH)


def clock_of(manager: LayoutManager) -> StepClock:
    """Return the progress of the present layout's steps."""
    meter = manager.layout.meter
    return StepClock(
        meter.steps, meter.settled, meter.awaiting, time.monotonic(), manager.engine.virtual_clock
    )


class Policy(Protocol):
    """An object that decides between steps whether another layout is wanted. Policies do not use each other."""

    def next_step(self, settled: int) -> float:
        """Return the number of measured steps after which `due` has to be called.

        ``settled``: the number of steps measured so far.
        """

    def due(self, clock: StepClock) -> bool:
        """Return whether `decide` has to be called now."""

    def decide(self, seen: Observation) -> Wanted | None:
        """Return the request for another layout, or None to keep the present layout."""

    def fallback(self, failed: Wanted, error: BaseException) -> Wanted | None:
        """Return the next request to try if ``failed`` could not be made because the device's memory did
        not suffice or weights could not move to disk, or None to give up.

        ``error``: the error that was raised.
        """

    def took(self, outcome: Outcome) -> None:
        """Record the outcome of the change to the layout that `decide` requested."""
