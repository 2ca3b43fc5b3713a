"""`Planner`: carvings and plans for what a session wants, by the rule or by measured times."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Hashable
from typing import Any

from ..common.errors import BudgetError
from ..device.engine import Engine
from ..model.units import Carving, Unit, carving_matches
from ..placement import packer
from ..placement.packed_residents import wire_bytes
from ..plan.profile import TensorTimes, learn
from ..plan.residency import Plan
from . import measured_planner, rule_planner
from .host_tier import HostTier
from .layout import Layout, Wanted
from .managed_module import ManagedModule
from .measured_planner import Advice

logger = logging.getLogger("carom")
_REMEMBERED = 8  # searched plans


class Planner:
    """Plans for one session's module. Remembers searches, which take tenths of a second.

    ``granularity`` and ``training``: as in `carom.stream`. ``backward``: whether backwards are known to go through the module
    though nothing in it trains (adapters that others keep). ``decode_rate``: bytes of output per second at which the device
    unpacks, None where that was not measured.
    """

    def __init__(
        self, module: ManagedModule, engine: Engine, host: HostTier, granularity: str, training: str | None,
        backward: bool,
    ) -> None:  # fmt: skip
        self._module, self._engine, self._host = module, engine, host
        self._granularity, self._training = granularity, training
        self.backward = backward
        self.decode_rate = engine.decode_bytes_per_second
        self._searched: dict[Hashable, tuple[TensorTimes, Carving, Plan]] = {}
        self._least: tuple[Layout, int] | None = None

    # -- plans

    def plan(self, wanted: Wanted, present: Layout | None) -> tuple[Carving, Plan]:
        """Return the units and the residency for ``wanted``; ``present``: the layout so far, whose units may serve again.

        Raises BudgetError with the least budget that works, UnsupportedError for tensors that cannot be managed.
        """
        root, grain = self._module.root, self._engine.grain
        chosen = self.settings(wanted)
        if wanted.profile is None:
            return rule_planner.decide(root, chosen, grain)
        if (
            wanted.residents_among is not None
            and present is not None
            and carving_matches(present.carving, root)
        ):
            with contextlib.suppress(BudgetError):
                return present.carving, rule_planner.plan_within(present.carving, chosen, grain)
        # Two models that take turns ask for the same budgets again and again.
        known = self._searched.get(_key(wanted))
        if known is not None and known[0] is wanted.profile and carving_matches(known[1], root):
            return known[1], known[2]
        carving, plan = measured_planner.decide_with(root, chosen, grain, wanted.profile)
        self.remember(wanted, carving, plan)
        return carving, plan

    def remember(self, wanted: Wanted, carving: Carving, plan: Plan) -> None:
        """Remember ``plan`` as the one to be found for ``wanted``, which has a profile."""
        assert wanted.profile is not None
        if len(self._searched) >= _REMEMBERED:
            self._searched.clear()
        self._searched[_key(wanted)] = wanted.profile, carving, plan

    def settings(self, wanted: Wanted, measured: bool = False) -> rule_planner.Settings:
        """Return what the planning functions are given for ``wanted``.

        ``measured``: times are known, whether or not ``wanted`` has them; only then may units stay packed on the device.
        """
        checkpoint = self._module.checkpoint
        filed = None if checkpoint is None else checkpoint.wires
        policy = wanted.packing
        packs = policy is not None and not policy.plain
        # Packing what could stay raw takes time and host memory: only where a step's times say that it pays.
        stays_packed = (
            policy is not None
            and policy.stay_on_device
            and packs
            and self._engine.unpacks
            and (measured or wanted.profile is not None)
        )

        return rule_planner.Settings(
            wanted.vram, self._granularity, self._training or wanted.training, dict(wanted.stay),
            None if checkpoint is None else checkpoint.of, packs or filed is not None, wanted.residents_among,
            self.wire_bytes if stays_packed else None, self.decode_rate if stays_packed else None,
            None if filed is None else filed.nbytes, self.backward,
        )  # fmt: skip

    def wire_bytes(self, unit: Unit) -> int:
        """Return the bytes that ``unit`` packs to, 0 where it does not pack."""
        return wire_bytes(unit, self._host.shelf, self._host.copies, packer.EXPECTED, packer.LEAST)

    def least_bytes(self, wanted: Wanted, present: Layout) -> int:
        """Return the smallest budget that works with the module's tensors, as of the layout ``present``."""
        if self._least is None or self._least[0].placement is not present.placement:
            chosen = self.settings(wanted)
            if chosen.training is None and present.carving.adapters:
                chosen = dataclasses.replace(chosen, training="resident")
            try:
                rule_planner.decide(
                    self._module.root, dataclasses.replace(chosen, vram=0), self._engine.grain
                )
                least = 0
            except BudgetError as error:
                least = error.least_bytes or 0
            self._least = present, least
        return self._least[1]

    def forget_least(self) -> None:
        """Compute `least_bytes` anew: the module's tensors may have changed."""
        self._least = None

    def compiled(self) -> bool:
        """Return whether any part of the module is compiled."""
        return rule_planner.compiled(self._module.root)

    # -- measured times

    def profile(self, layout: Layout) -> TensorTimes | None:
        """Return what the steps under ``layout`` teach, None where nothing can be told. The link's rate is of raw bytes."""
        placement, measured = layout.placement, layout.meter.profile()
        if self._module.checkpoint is not None:
            return None  # the drive's rate is not predicted
        if measured is None or layout.plan.all_resident or self._engine.blocking:
            return None
        learnt = learn(
            measured_planner.pieces(layout.carving), layout.streamed_indices(), layout.streamer.order.expected(),
            measured,
        )  # fmt: skip
        if learnt is None or not placement.wire_bytes:
            return None
        rate = learnt.link.bytes_per_second * placement.streamed_host_bytes / placement.wire_bytes
        return dataclasses.replace(learnt, link=dataclasses.replace(learnt.link, bytes_per_second=rate))

    def advise(
        self, layout: Layout, wanted: Wanted, copies: bool, steps: float = math.inf
    ) -> tuple[Advice, TensorTimes] | None:
        """Return a layout that is predicted to be faster than ``layout``, and the profile for it; None where nothing can be told.

        ``wanted``: with the budget to plan for. ``copies`` and ``steps``: as in `measured_planner.advise`.
        """
        learnt = self.profile(layout)
        if learnt is None:
            return None
        self.backward = self.backward or learnt.train
        chosen = self.settings(wanted, measured=True)
        if chosen.unpacking and not learnt.host_bound:  # layouts differ in what is unpacked
            units = [unit.unit for unit in layout.placement.streamed if unit.packed]
            names = {entry.name: entry.nbytes for unit in units for entry in unit.entries}
            learnt = learnt.without_unpacking(chosen.unpacking, names, learnt.link)
        learnt = learnt.without_host_waits()
        advice = measured_planner.advise(
            self._module.root, chosen, self._engine.grain, learnt, layout.carving, layout.plan, steps, copies
        )  # fmt: skip
        return advice, learnt

    def understood_profile(self, layout: Layout, wanted: Wanted, copies: bool) -> TensorTimes | None:
        """Return the profile of the steps so far, where they are understood and of the kind that the session is for."""
        try:
            found = self.advise(layout, wanted, copies, steps=0)
        except Exception as error:  # advice is a service: without it a layout is made by the rule
            logger.warning("carom: the steps so far cannot be planned with: %s", str(error))
            return None
        if found is None or not found[0].understood or found[1].train != (layout.trains or self.backward):
            return None
        return found[1]


def _key(wanted: Wanted) -> tuple[Any, ...]:
    """Return what a search depends on, beside the profile and the module."""
    policy = wanted.packing and dataclasses.replace(wanted.packing, auto=False)
    return wanted.vram, policy, frozenset(wanted.stay)
