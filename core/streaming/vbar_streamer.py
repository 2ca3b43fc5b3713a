"""Defines `VbarStreamer`: the runner of a layout whose units have homes in a VBAR (vbar_slots.py) and stream while these
have no memory.

A unit is a group of weights that cross to the device together. A slot is the device memory that holds a unit. A VBAR is
a range of device addresses whose pages other programs may take. A unit is looked for at its home first. Only units that
are not there pass through the slot region, and only their uses count in the order that the schedule is made for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..device.engine import Engine
from ..device.pool import end_holds
from ..device.slot import SlotState, User
from ..metrics.meter import Meter
from ..placement.tier import Tier
from .no_room import PlannedBytes
from .run import Run
from .streamer import Streamer
from .unit import StreamedUnit
from .vbar_slots import VbarSlots

_graph_task = torch._C._current_graph_task_id  # -1 outside backward passes
_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack


class VbarRun(Run):
    """The uses of units that are looked for at their homes first."""

    may_move = False  # a unit at home lies on pages that only `VbarSlots` pins

    def __init__(self, streamer: VbarStreamer) -> None:
        super().__init__(streamer, streamer.pool)
        self._homes = streamer.homes

    def acquire(self, unit: StreamedUnit, user: User, backward: bool = False) -> Any:
        if _modes():
            with _disable_current_modes():
                return self.acquire(unit, user, backward)
        streamer = self._streamer
        if streamer.closed or streamer.torn:
            streamer.check_open(unit)
        if _graph_task() != -1:
            streamer.backward.register_pass()
        if self.held or streamer.backward.has_uses:
            self.end_finished_uses(unit)
        self.entering = unit.name
        slot = self._homes.enter_home(unit, user)
        return super().acquire(unit, user, backward) if slot is None else slot

    def computes_gradients(self, slot: Any) -> None:
        if not self._homes.has(slot):
            super().computes_gradients(slot)

    def release(self, slot: Any, users: Sequence[User], clean: bool = False) -> None:
        if not self._homes.has(slot):
            super().release(slot, users, clean)
            return
        try:
            if slot.now.state is SlotState.IN_USE:  # the pool may have been closed since
                self.leave_pool(slot, users, clean)
        finally:
            self._homes.unpin_idle()

    def end_finished_uses(self, unit: StreamedUnit | None = None) -> None:
        super().end_finished_uses(unit)
        end_holds(self.pool)
        self._homes.unpin_idle()

    def issue_due(self) -> None:
        due, schedule = self._streamer.follower.due, self._streamer.follower.schedule
        if schedule is not None:
            units, at_home = self._streamer.units, self._homes.at_home
            for number in [number for number in due if at_home(units[schedule.unit_of[number]])]:
                due.remove(number)
        super().issue_due()

    def _fault(self, unit: StreamedUnit, user: User) -> Any:
        self._homes.pin_region()
        return super()._fault(unit, user)


class VbarStreamer(Streamer):
    """The `Runner` of one layout with ``homes`` in a VBAR. See the top of the file."""

    def __init__(
        self, engine: Engine, region_bytes: int, meter: Meter, tier: Tier, planned: PlannedBytes, homes: VbarSlots
    ) -> None:  # fmt: skip
        self.homes = homes
        super().__init__(engine, region_bytes, meter, tier, planned)

    def _make_run(self) -> Run:
        return VbarRun(self)

    def _join_units(self) -> list[StreamedUnit]:
        return self.homes.join(self)

    def _make_region(self, nbytes: int) -> torch.Tensor:
        return self.homes.reserve()

    # -- interrupts, and the end

    def _drop_slots(self) -> None:
        super()._drop_slots()
        self.homes.unpin_idle()

    def _release_slots(self) -> None:
        with self.lock:
            self.homes.close()  # first: the pool's states tell which pages are in use
            super()._release_slots()
