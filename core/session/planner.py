"""`Planner`: makes the carving and the plan for a request (`Wanted`), by the rule or by measured times.

A carving is the division of a module into units (groups of weights that are copied together). A plan tells
which units stay on the device, and the size of the slot region (the device memory through which the other
units stream).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Hashable
from typing import Any

from ..common.errors import BudgetError
from ..device.engine import Engine
from ..model.compiling import CompiledParts
from ..model.units import Carving, Unit, carving_matches
from ..placement import packer
from ..placement.packed_residents import wire_bytes, worth_keeping
from ..plan.profile import TensorTimes, learn
from ..plan.residency import Plan
from . import measured_planner, rule_planner
from .host_resources import HostResources
from .layout import Layout, Wanted
from .managed_module import ManagedModule
from .measured_planner import Advice
from .plan_cache import PlanCache

logger = logging.getLogger("carom")
_REMEMBERED = 8  # most results of searches that are remembered


class Planner:
    """Makes plans for one session's module. Remembers the results of searches, which take tenths of a second.

    ``granularity``, ``training``: as in `carom.stream`.
    ``backward``: whether backward passes go through the module although none of its weights are trained
    (other code keeps the adapters).
    ``compiled``: whether torch.compile is known to run the module.
    ``decode_rate``: bytes of output per second at which the device unpacks, None if not measured.
    """

    def __init__(
        self, module: ManagedModule, engine: Engine, host: HostResources, granularity: str, training: str | None,
        backward: bool, compiled: bool,
    ) -> None:  # fmt: skip
        self._module, self._engine, self._host = module, engine, host
        self._granularity, self._training = granularity, training
        self.backward, self._run_compiled = backward, compiled
        self.decode_rate = engine.decode_bytes_per_second
        self._searched: dict[Hashable, tuple[TensorTimes, Carving, Plan]] = {}
        self._cache = PlanCache(module.root)
        self._least: tuple[Layout, int] | None = None

    # -- plans

    def plan(self, wanted: Wanted, present: Layout | None) -> tuple[Carving, Plan]:
        """Return the carving and the plan for ``wanted``.

        ``present``: the present layout, whose carving may be used again; None before the first layout. Raises
        BudgetError with the smallest budget that works, and UnsupportedError for tensors that cannot be
        managed.
        """
        chosen = self.settings(wanted)
        # What units take when they are packed is known better once they were packed.
        lasts = chosen.wires is None or self._module.checkpoint is not None
        known = self._cache.find(chosen, wanted.profile) if lasts else None
        if known is not None:
            return known
        carving, plan = self._decide(wanted, chosen, present)
        if lasts:
            self._cache.keep(chosen, wanted.profile, carving, plan)
        return carving, plan

    def _decide(
        self, wanted: Wanted, chosen: rule_planner.Settings, present: Layout | None
    ) -> tuple[Carving, Plan]:
        """Make the carving and the plan for ``wanted``. ``chosen``: the result of `settings`."""
        root, grain = self._module.root, self._engine.grain
        if wanted.profile is None:
            return rule_planner.decide(root, chosen, grain)
        if (
            wanted.residents_among is not None
            and present is not None
            and carving_matches(present.carving, root)
        ):
            with contextlib.suppress(BudgetError):
                return present.carving, rule_planner.plan_within(present.carving, chosen, grain)
        # Two models that run alternately request the same budgets again and again, so results of searches are
        # remembered.
        known = self._searched.get(_key(wanted))
        if known is not None and known[0] is wanted.profile and carving_matches(known[1], root):
            return known[1], known[2]
        carving, plan = measured_planner.decide_with(root, chosen, grain, wanted.profile)
        self.remember(wanted, carving, plan)
        return carving, plan

    def remember(self, wanted: Wanted, carving: Carving, plan: Plan) -> None:
        """Remember ``carving`` and ``plan`` as the result of the search for ``wanted``, which must have a profile."""
        assert wanted.profile is not None
        if len(self._searched) >= _REMEMBERED:
            self._searched.clear()
        self._searched[_key(wanted)] = wanted.profile, carving, plan

    def settings(self, wanted: Wanted, measured: bool = False) -> rule_planner.Settings:
        """Return the inputs of the planning functions for ``wanted``.

        ``measured``: whether measured times are known although ``wanted`` has no profile. Units may stay on
        the device packed only if times are known.
        """
        checkpoint = self._module.checkpoint
        filed = None if checkpoint is None else checkpoint.wires
        policy = wanted.packing
        packs = policy is not None and not policy.plain
        # Packing a unit that could stay on the device unpacked takes time and host memory. Do this only if
        # measured times show a benefit. Units that are packed in their file stay packed without measurements:
        # more of them fit, and the others are read from the drive and cross the link at each use.
        packs_now = (
            policy is not None
            and policy.stay_on_device
            and packs
            and self._engine.unpacks
            and (measured or wanted.profile is not None)
        )
        stays_packed = packs_now or filed is not None

        return rule_planner.Settings(
            wanted.vram, self._granularity, self._training or wanted.training, dict(wanted.stay),
            None if checkpoint is None else checkpoint.of, packs or filed is not None, wanted.residents_among,
            self.wire_bytes if stays_packed else None, self.decode_rate if packs_now else None,
            None if filed is None else filed.nbytes, self.backward,
            1 if self._host.peers is None else self._host.peers.links, self.compiled(),
            wanted.gradients or self.backward or self._training is not None,
        )  # fmt: skip

    def wire_bytes(self, unit: Unit) -> int:
        """Return the bytes of ``unit`` when packed, or 0 if it cannot be packed or packing saves little."""
        checkpoint = self._module.checkpoint
        if checkpoint is not None:
            return 0 if checkpoint.wires is None else worth_keeping(unit, checkpoint.wires.nbytes(unit))
        return wire_bytes(unit, self._host.shelf, self._host.copies, packer.EXPECTED, packer.LEAST)

    def least_bytes(self, wanted: Wanted, present: Layout) -> int:
        """Return the smallest VRAM budget in bytes that works with the module's tensors in the layout
        ``present``.
        """
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

    def forget(self) -> None:
        """Drop all results, which refer to the module's tensors. Called after the session was closed."""
        self._searched.clear()
        self._cache.forget()
        self._least = None

    def forget_least(self) -> None:
        """Let the next call of `least_bytes` compute the budget again, because the module's tensors may have
        changed.
        """
        self._least = None

    def compiled(self) -> bool:
        """Return whether any part of the module is compiled by torch.compile, or was run compiled."""
        return self._run_compiled or CompiledParts(self._module.root).found()

    def ran_compiled(self) -> None:
        """Record that torch.compile runs the module, as a part of what was compiled."""
        self._run_compiled = True
        self._searched.clear()
        self.forget_least()

    # -- measured times

    def profile(self, layout: Layout) -> TensorTimes | None:
        """Return the measured times of the steps under ``layout`` (a profile), or None if the steps do not
        suffice.

        The link's rate in the profile counts unpacked bytes, even if weights are copied packed.
        """
        placement, measured = layout.placement, layout.meter.profile()
        if self._module.checkpoint is not None:
            return None  # predictions do not include the rate of reads from a drive
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
        """Return the advice whether to change from ``layout`` to a faster layout, and the profile on which it
        is based.

        Returns None if the steps give no profile.
        ``wanted``: a request with the budget for the plan.
        ``copies``, ``steps``: as in `measured_planner.advise`.
        """
        learnt = self.profile(layout)
        if learnt is None:
            return None
        self.backward = self.backward or learnt.train
        chosen = self.settings(wanted, measured=True)
        if chosen.unpacking and not learnt.host_bound:  # the layouts may differ in the units that they unpack
            units = [unit.unit for unit in layout.placement.streamed if unit.packed]
            names = {entry.name: entry.nbytes for unit in units for entry in unit.entries}
            learnt = learnt.without_unpacking(chosen.unpacking, names, learnt.link)
        learnt = learnt.without_host_waits()
        advice = measured_planner.advise(
            self._module.root, chosen, self._engine.grain, learnt, layout.carving, layout.plan, steps, copies
        )  # fmt: skip
        return advice, learnt

    def understood_profile(self, layout: Layout, wanted: Wanted, copies: bool) -> TensorTimes | None:
        """Return the profile of the steps so far, or None if it cannot be relied on.

        The profile is relied on if the prediction for the present layout is close to the measured seconds,
        and the steps were of the session's kind (training or inference).
        ``wanted``, ``copies``: as in `advise`.
        """
        try:
            found = self.advise(layout, wanted, copies, steps=0)
        except Exception as error:  # advice is optional: without a profile the layout is planned by the rule
            logger.warning("carom: the steps so far cannot be planned with: %s", str(error))
            return None
        if found is None or not found[0].understood or found[1].train != (layout.trains or self.backward):
            return None
        return found[1]


def _key(wanted: Wanted) -> tuple[Any, ...]:
    """Return a dictionary key of those properties of ``wanted`` that a search depends on, apart from the
    profile.
    """
    policy = wanted.packing and dataclasses.replace(wanted.packing, auto=False)
    return wanted.vram, policy, frozenset(wanted.stay), wanted.gradients
