"""`Planner`: makes the carving and the plan for a request (`Wanted`) by the rule, and prices requests by measured
times.

A carving is the division of a module into units (groups of weights that are copied together). A plan tells
which units stay on the device, and the size of the slot region (the device memory through which the other
units stream).
"""

from __future__ import annotations

import dataclasses

from ..common.errors import BudgetError
from ..device.engine import Engine
from ..model.compiling import CompiledParts
from ..model.units import Carving, Unit
from ..placement import packer
from ..placement.packed_residents import crossing_bytes, wire_bytes, worth_keeping
from ..plan.predict import PackedTransfer
from ..plan.profile import TensorTimes, learn
from ..plan.residency import Plan
from . import measured_planner, rule_planner
from .carving_cache import CarvingCache
from .host_resources import HostResources
from .layout import Layout, Wanted
from .managed_module import ManagedModule
from .measured_planner import Advice, Priced


class Planner:
    """Makes plans for one session's module.

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
        self._carvings = CarvingCache(module.root)
        self._least: tuple[Layout, int] | None = None

    # -- plans

    def plan(self, wanted: Wanted) -> tuple[Carving, Plan]:
        """Return the carving and the plan for ``wanted``.

        Raises BudgetError with the smallest budget that works, and UnsupportedError for tensors that cannot be
        managed.
        """
        return self._decide(self.settings(wanted))

    def _decide(self, chosen: rule_planner.Settings) -> tuple[Carving, Plan]:
        return rule_planner.decide(self._carvings.carve, chosen, self._engine.grain)

    def settings(self, wanted: Wanted) -> rule_planner.Settings:
        """Return the inputs of the planning functions for ``wanted``."""
        checkpoint = self._module.checkpoint
        filed = None if checkpoint is None else checkpoint.wires
        policy = wanted.packing
        packs = policy is not None and not policy.plain
        # Packing a unit that could stay on the device unpacked takes time and host memory. Do this only if
        # measured times show a benefit. Units that are packed in their file stay packed without measurements:
        # more of them fit, and the others are read from the drive and cross the link at each use.
        packs_now = (
            policy is not None
            and packs
            and policy.residents
            and policy.stay_on_device
            and self._engine.unpacks
        )
        stays_packed = packs_now or filed is not None
        trains = wanted.gradients or self.backward or self._training is not None
        links, compiled = 1 if self._host.peers is None else self._host.peers.links, self.compiled()
        # Backward passes keep units from use to use, further links copy several units at a time, compiled code may use
        # several at once, and ``region_bytes`` says that the module did.
        one_decoded = (
            policy is not None
            and policy.one_decoded
            and not (trains or compiled or wanted.region_bytes)
            and links == 1
        )

        return rule_planner.Settings(
            wanted.vram, self._granularity, self._training or wanted.training, dict(wanted.stay),
            None if checkpoint is None else checkpoint.of, packs or filed is not None, wanted.residents_among,
            self.wire_bytes if stays_packed else None,
            None if filed is None else filed.nbytes, self.backward,
            links, compiled, trains, wanted.coarse, wanted.region_bytes, one_decoded,
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
            chosen = self.settings(dataclasses.replace(wanted, vram=0, residents_among=None))
            if chosen.training is None and present.carving.adapters:
                chosen = dataclasses.replace(chosen, training="resident")
            try:
                self._decide(chosen)
                least = 0
            except BudgetError as error:
                least = error.least_bytes or 0
            self._least = present, least
        return self._least[1]

    def forget_replaced(self) -> None:
        """Drop results that refer to tensors which the module does not have any more. Called after a layout has ended."""
        self._carvings.forget_replaced()

    def forget(self) -> None:
        """Drop all results, which refer to the module's tensors. Called after the session was closed."""
        self._carvings.forget()
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
        self.forget_least()

    # -- measured times

    def profile(self, layout: Layout) -> TensorTimes | None:
        """Return the measured times of the steps under ``layout`` (a profile), or None if the steps do not
        suffice.
        """
        measured = layout.meter.profile()
        if self._module.checkpoint is not None:
            return None  # predictions do not include the rate of reads from a drive
        if measured is None or layout.plan.all_resident or self._engine.blocking:
            return None
        units, rate = layout.carving.units, self.decode_rate
        unpacking = (
            {units[index].name: units[index].nbytes / rate for index in self._transfers(layout)}
            if rate
            else None
        )
        return learn(
            measured_planner.pieces(layout.carving), layout.streamed_indices(), layout.runner.expected_uses(), measured,
            unpacking=unpacking,
        )  # fmt: skip

    def chooses_packing(self, layout: Layout) -> bool:
        """Return whether measured times decide how the weights of ``layout`` are packed."""
        return layout.placement.tier.packs and self._module.checkpoint is None and not self._engine.blocking

    def advise(self, layout: Layout, wanted: Wanted, copies: bool) -> Advice | None:
        """Return the advice whether to change from ``layout`` to a faster layout. Returns None if the steps give no
        profile.

        ``wanted``: a request with the budget for the new layout.
        ``copies``: as in `measured_planner.advise`.
        """
        tier = layout.placement.tier
        if tier.decode_bytes_per_second and self._engine.decode_bytes_per_second is None:
            self.decode_rate = tier.decode_bytes_per_second
        learnt = self.profile(layout)
        if learnt is None:
            return None
        self.backward = self.backward or learnt.train
        together = measured_planner.blocks(self._module.root)
        now = self._transfers(layout)
        if self.decode_rate and now:  # layouts may differ in the units that they unpack
            unpacked = measured_planner.pieces(layout.carving)
            learnt = learnt.without_unpacking(
                self.decode_rate, [unpacked[index] for index in now], learnt.link
            )

        def priced(request: Wanted) -> Priced:
            carving, plan = self.plan(request)
            packing = request.packing
            packs = packing is not None and not packing.plain and plan.staging_bytes > 0
            transfers = {
                index: self._transfer(unit, index in plan.packed, plan.staging_bytes)
                for index, unit in enumerate(carving.units)
                if packs and index not in plan.resident and self._packs(unit)
            }
            seconds = measured_planner.step_seconds(carving, plan, learnt, together, transfers)
            return Priced(request, carving, dataclasses.replace(plan, predicted_seconds=seconds), seconds)

        present = measured_planner.step_seconds(layout.carving, layout.plan, learnt, together, now)
        packed, raw = self._ways(dataclasses.replace(wanted, residents_among=None))
        plain = None if raw is None else priced(raw)
        if plain is not None and plain.streamed_bytes > wanted.ram:
            plain = None
        best = measured_planner.choose([priced(way) for way in packed], None)
        narrow = [] if layout.meter.records or learnt.at_once else self._with_one_decoded(layout, best)
        best = measured_planner.choose([best, *map(priced, narrow)], plain)
        advice = measured_planner.advise(
            layout.carving, layout.plan, present, best, learnt, copies, best is plain
        )
        if learnt.host_bound and not wanted.coarse:
            coarse = priced(dataclasses.replace(best.wanted, coarse=True))
            return measured_planner.spare_host(advice, coarse, learnt)
        return advice

    def predicted_seconds(self, layout: Layout, learnt: TensorTimes) -> float:
        """Return the seconds of a step under ``layout``, by the times ``learnt`` (without unpacking)."""
        together = measured_planner.blocks(self._module.root)
        return measured_planner.step_seconds(
            layout.carving, layout.plan, learnt, together, self._transfers(layout)
        )

    def _transfers(self, layout: Layout) -> dict[int, PackedTransfer]:
        """Return what uses of the packed units of ``layout`` copy and unpack, by index."""
        units = zip(layout.streamed_indices(), layout.placement.streamed, strict=True)
        return {
            index: self._transfer(unit.unit, unit.on_device, layout.plan.staging_bytes)
            for index, unit in units
            if unit.packed and self.decode_rate
        }

    def _ways(self, wanted: Wanted) -> tuple[list[Wanted], Wanted | None]:
        """Return the requests for ``wanted`` that differ in how units are packed: those in which weights cross as they
        do now, the simplest first, and the one in which they cross raw instead of packed, None if that is decided.
        """
        policy = wanted.packing
        if policy is None or policy.plain or not self.decode_rate:
            return [wanted], None
        policy = dataclasses.replace(policy, one_decoded=False)
        ways = [dataclasses.replace(policy, residents=False)]
        if policy.stay_on_device and self._engine.unpacks:
            ways.append(dataclasses.replace(policy, residents=True))
        raw = dataclasses.replace(policy, plain=True, residents=False) if policy.auto else None
        return (
            [dataclasses.replace(wanted, packing=way) for way in ways],
            None if raw is None else dataclasses.replace(wanted, packing=raw),
        )

    def _with_one_decoded(self, layout: Layout, best: Priced) -> list[Wanted]:
        """Return the requests that differ from ``best`` in that one decoded unit has room in the region, so that more units
        stay on the device. There are none where weights do not cross packed, or units may be in use at the same time.

        In the first one, all units that stay in the present ``layout`` stay, unless residents are held in another way then.
        In the last one, those that stay are spread anew, which moves more of them.
        """
        policy, present = best.wanted.packing, layout.wanted.packing
        if policy is None or not best.plan.staging_bytes:
            return []
        spread = dataclasses.replace(best.wanted, packing=dataclasses.replace(policy, one_decoded=True))
        if not self.settings(spread).one_decoded:
            return []
        if present is None or (present.plain, present.residents) != (policy.plain, policy.residents):
            return [spread]
        return [dataclasses.replace(spread, residents_among=layout.resident_names()), spread]

    def _packs(self, unit: Unit) -> bool:
        return any(packer.packs(entry) for entry in unit.entries)

    def _transfer(self, unit: Unit, stays: bool, staging_bytes: int) -> PackedTransfer:
        """Return what a use of ``unit``, which is packed, copies and unpacks. ``stays``: whether its packed bytes are on
        the device. ``staging_bytes``: bytes of the staging memory.
        """
        assert self.decode_rate
        copied = 0 if stays else crossing_bytes(unit, self._host.shelf, packer.EXPECTED)
        seconds = unit.nbytes / self.decode_rate
        if 2 * copied <= staging_bytes:
            return PackedTransfer(copied, seconds)
        in_halves = rule_planner.halves(unit)
        return PackedTransfer(copied, seconds, 2 if in_halves else 1, 2 if in_halves else 1)
