"""Access of tests to what a session holds: `inside(session)`.

`Answers` is the way in for tests whose subject is behaviour: exactness, transfers, timing, faults, budgets, threads,
interrupts, orders. It answers in the terms of every form of `core`: units, slots, bytes. Only this file knows which
objects have the answers, so a change of those objects changes no such test.

`Inside` adds the parts of a session under the names of today's objects. They are for tests of these objects alone, which
go together with the object. Uses of `inside(session)` when `Answers` was made (685 in 84 files):

| part | uses, files | most in the folders | way in now |
|---|---|---|---|
| `engine` and what it counts | 143, 31 | session 48, budget 35, streaming 25, device 17, placement 11 | the same |
| `held_bytes`, `promised_bytes`, `least_bytes`, `ram` | 107, 21 | budget 40, session 34, streaming 14, device 9 | the same |
| `placement.streamed` | 99, 45 | placement 42, session 15, model 11, streaming 11 | `streamed`: 81. 18 stay: they take backings |
| `ledger`, `mates`, `governor`, policies | 86, 24 | budget 48, session 21 | stay until the Governor replaces them |
| `streamer` | 68, 29 | streaming 26, session 15, placement 10 | `slots`, `surprises`, `arrangement` and others: 43. 25 stay: tests of its parts |
| `arena`, `carving`, `vram`, `layout` | 60, 27 | session 27, budget 13, placement 12 | `pinned_bytes`, `units`, `capacity`, `resident_names`: 52 |
| `placement.tier`, `.residents` and others | 43, 18 | placement 29, session 9 | stay: tests of tiers and residents |
| `placement` as an identity | 33, 11 | budget 19, session 6, streaming 5 | `arrangement`: 30 |
| `manager` and host resources | 30, 19 | session 11, placement 7, model 6 | `on_disk`: 4 |
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import torch
from carom.core.device.slot import SlotState
from carom.core.session.assembly import parts
from carom.core.session.session import Session


@dataclass(frozen=True)
class UnitAnswer:
    """One unit: weights that cross together. ``weights``: their names. ``nbytes``: its bytes in a slot."""

    name: str
    kind: str
    nbytes: int
    weights: tuple[str, ...]


@dataclass(frozen=True)
class StreamedAnswer(UnitAnswer):
    """One unit that streams.

    ``wire_bytes``: bytes that cross for one fetch; ``packed``: whether they are packed; ``on_device``: whether the
    packed bytes stay on the device, so that nothing crosses; ``trainable``: whether a weight requires a gradient.
    """

    wire_bytes: int
    packed: bool
    on_device: bool
    trainable: bool


@dataclass(frozen=True)
class SlotAnswer:
    """One slot: ``unit`` (name) lies at ``offset`` of the region. ``state``: FILLING, CACHED, IN_USE or HELD.
    ``users``: uses that have not ended.
    """

    unit: str
    offset: int
    nbytes: int
    state: str
    users: int


class Answers:
    """What a session holds, in words that do not depend on the objects that hold it."""

    def __init__(self, session: Any) -> None:
        self._session = session
        made = parts(session)
        self._manager, self._ledger = made.manager, made.ledger

    @property
    def engine(self) -> Any:
        """The engine of the session's device. That of a simulated device counts copies, bytes and allocations."""
        return self._manager.engine

    # -- units

    @property
    def units(self) -> list[UnitAnswer]:
        """All units in the order of the model, those that stay on the device included."""
        return [UnitAnswer(*_unit(unit)) for unit in self._manager.layout.carving.units]

    @property
    def streamed(self) -> list[StreamedAnswer]:
        """The units that stream, in the order of the model."""
        return [
            StreamedAnswer(*_unit(one.unit), one.wire_bytes, one.packed, one.on_device, one.trainable)
            for one in self._manager.layout.placement.streamed
        ]

    @property
    def resident_names(self) -> frozenset[str]:
        """The names of the units that stay on the device, packed ones included."""
        return self._manager.layout.resident_names()

    @property
    def on_disk(self) -> bool:
        """Whether weights wait on disk: in a file of the user, or spilled there."""
        return self._manager.module.checkpoint is not None

    @property
    def surprises(self) -> int:
        """How many uses came in another order than the learnt one."""
        return self._manager.layout.runner.order.surprises

    @property
    def arrangement(self) -> object:
        """What is replaced when weights are arranged anew: the same object as long as nothing was."""
        return self._manager.layout.placement

    # -- slots

    @property
    def slots(self) -> list[SlotAnswer]:
        """What lies in the region now, by offset."""
        found = [
            slot
            for slot in self._manager.layout.runner.pool.memory.slots()
            if slot.state not in (SlotState.FREE, SlotState.LOST) and not slot.chunk.lossy
        ]
        found.sort(key=lambda slot: slot.offset)
        return [
            SlotAnswer(slot.unit.name, slot.offset, slot.unit.nbytes, slot.state.name, len(slot.now.users))
            for slot in found
        ]

    @property
    def held_slots(self) -> list[str]:
        """The names of the units in slots that the program keeps views of, beyond the unit's run."""
        return [slot.unit.name for slot in self._manager.layout.runner.run.held]

    @property
    def units_in_modules(self) -> list[str]:
        """The names of the units whose forward runs, or whose slot's views are in the modules."""
        found = self._manager.layout.runner.units
        return [unit.name for unit in found if unit.depth or unit.shown]

    @property
    def computing(self) -> bool:
        """Whether this thread counts as in a step."""
        return self._manager.layout.runner.forwards.computing()

    def begin_pass(self) -> None:
        """Begin a pass on this thread, as a call of the module does, and leave it open."""
        self._manager.layout.runner.forwards.root_begins()

    def end_pass(self) -> None:
        """End the pass that `begin_pass` began."""
        self._manager.layout.runner.forwards.root_ends(False)

    def end_finished_uses(self) -> None:
        """End the uses of slots that are over, which a session notices at its next use of a slot only."""
        self._manager.layout.runner.run.end_finished_uses()

    @property
    def region_memory(self) -> torch.Tensor:
        """The device memory that streamed units pass through; empty after close."""
        return self._manager.layout.runner.memory

    # -- bytes

    @property
    def region_bytes(self) -> int:
        """Bytes of the region that streamed units pass through."""
        return self._manager.layout.runner.region_bytes

    @property
    def capacity(self) -> int:
        """Device bytes that the session may hold: its VRAM budget."""
        return self._ledger.vram

    @property
    def held_bytes(self) -> int:
        """Device bytes that the session holds."""
        return self._ledger.held_bytes

    @property
    def promised_bytes(self) -> int:
        """Bytes of a shared budget that are set aside for the session."""
        return self._ledger.promised_bytes

    @property
    def least_bytes(self) -> int:
        """The least device bytes with which the session works."""
        return self._ledger.least_bytes

    @property
    def pinned_bytes(self) -> int:
        """Bytes of host memory that the session has pinned."""
        return self._manager.host.arena.pinned_bytes

    @property
    def ram(self) -> int:
        """The RAM budget in bytes."""
        return self._manager.wanted.ram


def _unit(unit: Any) -> tuple[str, str, int, tuple[str, ...]]:
    return unit.name, unit.kind, unit.nbytes, tuple(entry.name for entry in unit.entries)


class Inside(Answers):
    """The answers, and the parts of ``session`` under the names of the objects that own them."""

    def __init__(self, session: Any) -> None:
        super().__init__(session)
        made = parts(session)
        self.manager, self.weights, self.ledger = made.manager, made.weights, made.ledger
        self.memory, self.host_memory = made.memory, made.host_memory
        self.raise_budget, self.replan, self.policies = made.raise_budget, made.replan, made.policies
        self.passes = made.passes

    @property
    def layout(self) -> Any:
        return self.manager.layout

    @property
    def placement(self) -> Any:
        return self.manager.layout.placement

    @property
    def streamer(self) -> Any:
        return self.manager.layout.runner

    @property
    def carving(self) -> Any:
        return self.manager.layout.carving

    @property
    def meter(self) -> Any:
        return self.manager.layout.meter

    @property
    def arena(self) -> Any:
        return self.manager.host.arena

    @property
    def copies(self) -> Any:
        return self.manager.host.copies

    @property
    def shelf(self) -> Any:
        return self.manager.host.shelf

    @property
    def checkpoint(self) -> Any:
        return self.manager.module.checkpoint

    @property
    def lock(self) -> Any:
        return self.manager.lock

    @property
    def packing(self) -> Any:
        return self.manager.wanted.packing

    @property
    def governor(self) -> Any:
        return self.ledger.governor

    @property
    def mates(self) -> Any:
        return self.ledger.mates

    @property
    def vbar(self) -> Any:
        return self.manager.vbar

    @property
    def failed(self) -> bool:
        return self.memory.failed

    @failed.setter
    def failed(self, value: bool) -> None:
        self.memory.failed = value

    @property
    def away(self) -> list[Any]:
        vbar = self.vbar
        return self.streamer.units if vbar is None else vbar.away

    def advice(self) -> Any:
        """Return the planner's advice from the steps so far, or None."""
        return self.replan._advise(self.layout, self.manager.present())

    def learn(self) -> Any:
        return self.manager.planner.profile(self.layout)

    def settings(self) -> Any:
        return self.manager.planner.settings(self.manager.present())

    @property
    def trains(self) -> bool:
        return self.layout.trains or self.manager.planner.backward

    def relay(self, **changes: Any) -> Any:
        """Lay the weights out again, with ``changes`` of the wanted layout."""
        import dataclasses

        return self.manager.change(dataclasses.replace(self.manager.present(), **changes))


def inside(session: Any) -> Inside:
    """Return the answers and the parts of ``session``."""
    return Inside(session)


def open_sessions() -> list[Session]:
    """Return the sessions of this process that are not closed."""
    return [found for found in gc.get_objects() if type(found) is Session and not found.closed]
