"""Defines `Runner`: what a session, its policies and its report ask of the object that runs a layout's passes.

A pass is one forward of the session's module, or of a module below it that is called outside the root's forward. A
unit is a group of weights that are copied to the device together. A slot is the device memory that holds a streamed
unit while it is used.

Rules of the interface:

R1. A session uses a runner through the members of `Runner` only (tests/repository/test_runner.py). Where the units lie
    on the device, and in which order they are fetched, is known in `core/streaming` only.
R2. `start` is called once, and no pass begins before it has returned. `close` may be called at any time, and again.
R3. While a thread holds ``lock``, no other thread begins a pass or enters a unit. So a layout that no pass and no graph
    uses stays unused until the caller gives ``lock`` back.
R4. A thread that takes both ``lock`` and the session's layout lock takes the layout lock first.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from torch import nn

from ..host.arena import HostArena
from ..plan.learnt_order import KnownSchedules, LearntOrder


class Use(Enum):
    """What may need the units of a layout, so that the layout cannot change.

    ``PASS``: a forward or a backward is in progress. An interrupt between two lines can leave this use behind without a
    thread that ends it (`running_passes`).
    ``BACKWARD``: a backward is in progress.
    ``GRAPH``: an autograd graph holds handles of units, which its backward would fetch.
    ``WAIT``: a pass waits for another thread to release a slot.
    """

    PASS = auto()
    BACKWARD = auto()
    GRAPH = auto()
    WAIT = auto()


@dataclass(frozen=True)
class HeldBytes:
    """The device memory in bytes through which units stream.

    ``slots``: the memory of slots.
    ``staging``: the memory in which packed bytes arrive before they are decoded.
    """

    slots: int
    staging: int


@dataclass
class NextLayout:
    """What passes have shown that the next layout should have. Passes set it, and the session clears it between passes.

    ``stay``: names of weights to keep on the device, each with the reason in words.
    ``region_bytes``: bytes of a region that holds the units that were needed at once and found no room, 0 if all did.
    """

    stay: dict[str, str] = field(default_factory=dict)
    region_bytes: int = 0


class RunningPass(Protocol):
    """One pass that has begun. The wrappers of forwards (`root_forward`) end it; a session only hands it to them."""

    @property
    def runner(self) -> Runner:
        """The object that runs the pass."""

    def end_forward(self, failed: bool) -> None:
        """End the pass. ``failed``: whether its forward raised an error. Not called after an interrupt, which ends with
        `Runner.interrupted` instead.
        """

    def begin_backward(self) -> None:
        """Note that a backward of the pass's results begins. Called on the thread that autograd runs it on."""

    def no_backward(self) -> None:
        """Note that the pass has no result from which a backward could start."""


class Runner(Protocol):
    """What runs the passes of one layout.

    ``lock``: protects the slots and the counts of passes, see R3 and R4. Reentrant. A session holds it also while it
    reads the layout's `Meter`, which passes write.
    ``next_layout``: what passes have shown that the next layout should have. Read and changed with ``lock`` held.
    """

    lock: threading.RLock
    next_layout: NextLayout

    def start(self, arena: HostArena, known: LearntOrder, schedules: KnownSchedules) -> None:
        """Allocate the device memory of the streamed units, and begin to serve fetches. Waits for the device.

        Called with the layout lock held, once the units' weights lie in their tier. ``arena``: allocates pinned host
        memory for gradients. ``known``: the order of use under earlier layouts. ``schedules``: those made for earlier
        layouts, to which this one adds its own. Raises torch.OutOfMemoryError.
        """

    def begin_pass(self, part: nn.Module | None) -> RunningPass:
        """Begin a pass on this thread, and return it. Called with the layout lock and ``lock`` held.

        ``part``: the module whose forward the pass is, None for the root. Brings the slots into order first, if an
        interrupt ended an earlier pass; raises CaromError if another thread's pass prevents that.
        """

    def interrupted(self) -> None:
        """Note that an interrupt (KeyboardInterrupt, for instance) ends the passes of this thread.

        Nothing is fetched until the slots were brought into order. That happens at once, or in `begin_pass` if another
        thread's pass uses slots. Waits for the device. Takes ``lock``; may be called on any thread and in any phase.
        """

    def in_use(self, by: Use) -> bool:
        """Return whether units of the layout are in use as ``by`` says. Does not wait. May be called in any phase; a
        caller that acts on False holds ``lock`` (R3).
        """

    def held_bytes(self) -> HeldBytes:
        """Return the device memory that is held now, in bytes. Nothing is held after `close`. Does not wait. Called after
        `start`.
        """

    def learnt_order(self) -> LearntOrder | None:
        """Return the order of use of all units, as known now, for the next layout of the module. Returns None after
        `close`. Called between passes, with the layout lock held.
        """

    def expected_uses(self) -> list[tuple[int, bool]]:
        """Return the uses of streamed units over one period, the next one first, as (position of the unit among the
        layout's streamed units, whether the use computes gradients). Called between passes.
        """

    def close(self) -> None:
        """Wait for the device, write values home that are only in slots, put the module's own tensors back, and give up
        all memory. A pass that still runs raises CaromError at its next unit.

        Called with the layout lock held. After an error everything is given up nevertheless, and the call may be
        repeated.
        """
