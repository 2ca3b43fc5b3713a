"""Access to the parts of a session for tests: `inside(session)`."""

from __future__ import annotations

import gc
from typing import Any

from carom.core.session.assembly import parts
from carom.core.session.session import Session


class Inside:
    """The parts of ``session``, under the names of the objects that own them."""

    def __init__(self, session: Any) -> None:
        self._session = session
        made = parts(session)
        self.manager, self.weights, self.ledger = made.manager, made.weights, made.ledger
        self.memory, self.host_memory = made.memory, made.host_memory
        self.raise_budget, self.replan, self.policies = made.raise_budget, made.replan, made.policies
        self.passes = made.passes

    @property
    def layout(self) -> Any:
        return self.manager.layout

    @property
    def engine(self) -> Any:
        return self.manager.engine

    @property
    def placement(self) -> Any:
        return self.manager.layout.placement

    @property
    def streamer(self) -> Any:
        return self.manager.layout.streamer

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
    def vram(self) -> int:
        return self.ledger.vram

    @property
    def ram(self) -> int:
        return self.manager.wanted.ram

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
    def held_bytes(self) -> int:
        return self.ledger.held_bytes

    @property
    def promised_bytes(self) -> int:
        return self.ledger.promised_bytes

    @property
    def least_bytes(self) -> int:
        return self.ledger.least_bytes

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
    """Return the parts of ``session``."""
    return Inside(session)


def open_sessions() -> list[Session]:
    """Return the sessions of this process that are not closed."""
    return [found for found in gc.get_objects() if type(found) is Session and not found.closed]
