"""`Budgets`: the implementation of `Session.set_budget`. A budget that is impossible raises an error, and the
previous budgets stay in effect.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from ..budget.shared_budget import SharedBudget
from ..common.errors import UnsupportedError
from . import settings
from .device_weights import DeviceWeights
from .layout import Outcome, Wanted
from .layout_manager import LayoutManager
from .policies.device_memory import DeviceMemory
from .policies.host_memory import HostMemory
from .policies.raise_budget import RaiseBudget
from .policy_runner import PolicyRunner

_REMEMBERED = 8  # budgets


class Budgets:
    """Changes the VRAM and RAM budgets of one session between steps."""

    def __init__(
        self, manager: LayoutManager, weights: DeviceWeights, memory: DeviceMemory, host_memory: HostMemory,
        raise_budget: RaiseBudget, policies: PolicyRunner,
    ) -> None:  # fmt: skip
        self._manager, self._weights, self._memory = manager, weights, memory
        self._host_memory, self._raise_budget, self._policies = host_memory, raise_budget, policies
        self._among: dict[int, frozenset[str] | None] = {}  # `residents_among` of earlier budgets

    def set(self, vram: int | str | SharedBudget | None, ram: int | str | None) -> None:
        """Change the budgets as `Session.set_budget` describes. None leaves a budget as it is."""
        manager = self._manager
        ledger = manager.ledger
        with manager.gate.between_passes("given another budget"), contextlib.ExitStack() as taking:
            manager.need_open()
            if manager.host.gather is not None:
                raise UnsupportedError(
                    "the ranks of the group fetch weights together, so their budgets are fixed; close the session on all "
                    "ranks and call carom.stream again with other budgets"
                )
            manager.gate.refuse_graphs()
            if isinstance(vram, SharedBudget):
                joins = vram is not ledger.shared
                if joins:
                    taking.enter_context(ledger.coming(vram))
                taking.enter_context(vram.mates.lock)
                if joins:
                    ledger.make_room(vram.free_bytes, vram)
            before = manager.present()
            wanted = self._wanted(before, vram, ram)
            manager.check(wanted, keeps_ram=ram is None)
            restore = self._follow(wanted, vram)
            wanted = dataclasses.replace(wanted, training=manager.wanted.training)
            taking.close()
            if manager.phase.parked:  # the next forward makes a layout with the new budgets
                manager.wanted = wanted
                ledger.begin_peak()
                if vram is not None:
                    ledger.keep_least()
                if wanted.ram < before.ram:
                    manager.host.copies.unpin()
                    manager.host.kept.set_budget(min(wanted.ram, manager.host.kept.budget))
            else:
                self._change(wanted, before, restore)
            if ram is not None:
                self._host_memory.begin(ram == "auto")
            self._policies.plan_next()

    def _wanted(self, before: Wanted, vram: Any, ram: int | str | None) -> Wanted:
        """Return ``before`` with the budgets ``vram`` and ``ram``, converted to bytes."""
        manager = self._manager
        ledger, engine = manager.ledger, manager.engine
        waiting, wanted = self._weights.waiting_bytes or 0, before
        if vram is not None:
            mine = ledger.held_bytes
            if isinstance(vram, SharedBudget):
                mine = ledger.promised_bytes + ledger.kept_bytes if vram is ledger.shared else 0
            budget = settings.vram_budget(vram, engine, mine, waiting)
            budget, note = settings.within_dedicated(budget, engine, mine + waiting)
            among = self._residents_first(before, budget)
            wanted = dataclasses.replace(wanted, vram=budget, note=note, residents_among=among, training=None)
        if ram is not None:
            root, held = manager.module.root, ledger.held_bytes
            own = waiting if engine.shares_host else self._weights.host_bytes
            nbytes = settings.ram_beside_device(ram, engine, root, wanted.vram, own, held)
            wanted = dataclasses.replace(wanted, ram=nbytes)
        return wanted

    def _residents_first(self, before: Wanted, budget: int) -> frozenset[str] | None:
        """Return the names of the units that stay on the device before any others under ``budget``, None for none.

        They are those that are there, so that a smaller budget loads no unit, and a larger one stores none of them for
        streaming. The layout of a larger budget that was there before is made again.
        """
        if budget == before.vram:
            return before.residents_among
        self._among.pop(before.vram, None)
        self._among[before.vram] = before.residents_among
        if len(self._among) > _REMEMBERED:
            del self._among[next(iter(self._among))]
        names = self._manager.layout.resident_names()
        return names if budget < before.vram else self._among.get(budget, names)

    def _follow(self, wanted: Wanted, vram: Any) -> Any:
        """Let the budget follow the device's free memory, follow a shared budget, or be fixed, depending on
        ``vram``.

        Returns a function that restores the previous state.
        """
        manager, memory, raise_budget = self._manager, self._memory, self._raise_budget
        ledger = manager.ledger
        shared, governed, room, budget = (
            ledger.shared,
            ledger.governor is not None,
            raise_budget.room,
            ledger.vram,
        )

        def restore() -> None:
            memory.end()
            ledger.shared = shared
            ledger.set(budget)
            memory.begin(governed)
            raise_budget.room = room

        if vram is None:
            return lambda: None
        memory.end()
        ledger.shared = vram if isinstance(vram, SharedBudget) else None
        ledger.set(wanted.vram)
        memory.begin(vram == "auto" or ledger.shared is not None)
        if ledger.governor is not None:
            raise_budget.stop()  # the budget follows the device by itself, without RaiseBudget
        return restore

    def _change(self, wanted: Wanted, before: Wanted, restore: Any) -> None:
        """Make the layout ``wanted``. If that fails, make the layout ``before`` again and raise the
        error.

        ``restore``: called before the layout ``before`` is made again.
        """
        manager = self._manager
        copies = manager.host.copies
        failures: list[BaseException] = []

        def back(failed: Wanted, error: BaseException) -> Wanted | None:
            if failures:
                return None
            failures.append(error)
            restore()
            return before

        less = wanted.ram < before.ram
        outcome = manager.change(wanted, back, between=copies.unpin if less else None)
        if outcome is Outcome.FELL_BACK:
            try:
                raise failures[0]
            finally:
                failures.clear()  # break the reference cycle between the error's traceback and this frame
