"""`Policy`: what decides between steps whether another layout is wanted; `Observation`: what policies are shown."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from ...budget.ledger import BudgetLedger, Holder
from ...common.memory_snapshot import Memory
from ...host import probe
from ...host.probe import HostMemory
from ..layout import Layout, Outcome, Wanted
from ..layout_manager import LayoutManager


@dataclass(frozen=True)
class StepClock:
    """How far a layout's steps have come: ``steps`` begun, ``settled`` measured, and ``now`` in seconds.

    ``awaiting``: the last step's times were not read yet. ``virtual``: the device's clock is simulated, so that seconds of
    the host mean nothing.
    """

    steps: int
    settled: int
    awaiting: bool
    now: float
    virtual: bool


class Observation:
    """What is so between two steps. Each figure is read once, for all policies that are due."""

    def __init__(self, manager: LayoutManager, clock: StepClock) -> None:
        self._ledger: BudgetLedger = manager.ledger
        self._holder: Holder = manager.ledger.holder
        self.layout: Layout = manager.layout
        self.wanted: Wanted = manager.present()
        self.clock = clock

    @classmethod
    def now(cls, manager: LayoutManager) -> Observation:
        """Return what is so now."""
        return cls(manager, clock_of(manager))

    @cached_property
    def memory(self) -> Memory | None:
        """What the session may take of the device; None where nothing tells."""
        return self._ledger.memory()

    @cached_property
    def host_memory(self) -> HostMemory:
        """What the host has left."""
        return probe.host_memory()

    @cached_property
    def held_bytes(self) -> int:
        """Device memory that weights take."""
        return self._ledger.held_bytes

    @cached_property
    def least_bytes(self) -> int:
        """The smallest budget that works, in bytes."""
        return self._ledger.least_bytes

    @cached_property
    def everything_bytes(self) -> int:
        """What all weights would take on the device."""
        return self._ledger.everything_bytes

    @property
    def unreferenced(self) -> bool:
        """Whether no autograd graph needs the layout's units."""
        return self.layout.streamer.unreferenced


def clock_of(manager: LayoutManager) -> StepClock:
    """Return the clock of the present layout's steps."""
    meter = manager.layout.meter
    return StepClock(
        meter.steps, meter.settled, meter.awaiting, time.monotonic(), manager.engine.virtual_clock
    )


class Policy(Protocol):
    """Decides between steps whether another layout is wanted. Knows no other policy."""

    def next_step(self, settled: int) -> float:
        """Return the number of measured steps from which `due` is to be asked; ``settled``: measured so far."""

    def due(self, clock: StepClock) -> bool:
        """Return whether the policy wants to look now."""

    def decide(self, seen: Observation) -> Wanted | None:
        """Return the layout to change to, None to keep the present one."""

    def fallback(self, failed: Wanted, error: BaseException) -> Wanted | None:
        """Return another layout to try where the device's memory did not suffice for ``failed``, None for none."""

    def took(self, outcome: Outcome) -> None:
        """Note what became of the layout that `decide` asked for."""
