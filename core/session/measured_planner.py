"""The measured planner: searches for a faster layout with the times of the first steps, and decides whether
to change to it.

In this module a layout is described by its carving (the division of the module into units) and its plan
(which units stay on the device, as residents, and the size of the slot region). A unit is a group of weights
that are copied together. A slot is the device memory that holds a streamed unit. The grain is the number of
bytes to whose multiples the device's allocator rounds up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from ..common.errors import BudgetError
from ..model.units import Carving, Unit, carve
from ..placement.packer import packs
from ..plan.predict import PackedTransfer, Workload, floor_seconds, predict
from ..plan.profile import TensorTimes, UnitTensors
from ..plan.residency import Plan
from ..plan.search import choose
from . import rule_planner

NOTHING = "no layout is predicted to be 3 % faster"
HOST = "the host binds: the device waits for Python to issue its work, and no layout is predicted to spare it 3 %"
WORTH = 0.03  # a new layout must save at least this share of a step's seconds
# Smaller units are chosen only if their predicted seconds are below this share of the best prediction so far,
# because they take more host time.
FINER = 0.99
# An estimate of the seconds for the hooks, slots and plan of a new layout, if all weights are in host memory
# already.
SETTLING = 0.1
# An estimate of the bytes/s at which weights are copied to pinned host memory, when they leave the device or
# were never packed. In the record host-samples, changes of layout of some gigabytes took 1.4 and 0.9 s. A
# change takes longer if host memory is used for the first time.
HOSTING = 1.5e9
# largest trusted error of the prediction for the present layout, as a share of the measured step
TRUSTED = 0.25


@dataclass(frozen=True)
class Advice:
    """A proposed layout (``carving``, ``plan``), with its predicted benefit and cost.

    ``now``: predicted seconds of a step with the present layout.
    ``saves``: predicted seconds by which the proposed layout shortens a step.
    ``move``: seconds that the change of layout takes.
    """

    carving: Carving
    plan: Plan
    now: float
    saves: float
    move: float
    reason: str  # why the layout should not be changed, "" if a change is worthwhile
    # whether the prediction for the present layout is close to the measured seconds of a step
    understood: bool
    searched: bool = False  # whether ``plan`` is the result of a search; otherwise it is the present plan
    vram: int = 0  # the budget in bytes that the search used

    @property
    def steps(self) -> float:
        """The number of steps after which the savings exceed the seconds of the change."""
        return self.move / self.saves if self.saves > 0 else float("inf")


def pieces(carving: Carving) -> list[UnitTensors]:
    """Return the units of ``carving`` in the form that `learn` takes: names, and bytes by tensor."""
    return [
        UnitTensors(unit.name, {entry.name: entry.nbytes for entry in unit.entries}, _trains(unit))
        for unit in carving.units
    ]


def _trains(unit: Unit) -> int:
    """Return the bytes of ``unit`` that are never packed, 0 where no weight of the unit trains."""
    if not any(entry.trainable for entry in unit.entries):
        return 0
    return sum(entry.nbytes for entry in unit.entries if not packs(entry))


def decide_with(
    module: nn.Module, settings: rule_planner.Settings, grain: int, learnt: TensorTimes
) -> tuple[Carving, Plan]:
    """Return the carving and plan with the shortest predicted step, or those of the rule if none fits the
    budget.

    Arguments and errors: those of `rule_planner.decide`.
    ``learnt``: the measured times.
    """
    limits: list[int | None] = [None]
    if settings.granularity == "auto" and not settings.compiled:
        limits += [rule_planner.COARSE, rule_planner.PART]
    together = blocks(module)
    best: tuple[Carving, Plan] | None = None
    fastest, was_plain = float("inf"), False
    for limit in limits:
        carving = rule_planner.cut(module, settings, limit)
        given = rule_planner.problem(carving, settings, grain)
        parts = pieces(carving)
        work, waits = learnt.workload(parts, together), learnt.host_waits(parts)

        def plan(
            vram: int, packed: bool, given: rule_planner.Problem = given, work: Workload = work,
            waits: Sequence[float] = waits,
        ) -> Plan:  # fmt: skip
            plan, found = choose(
                given.units, vram, given.fixed, work, learnt.link, wish=given.wish, grain=grain,
                unpacking=settings.unpacking if packed else None, two_slots=packed, waits=waits,
            )  # fmt: skip
            seconds = max(found.seconds, learnt.host_seconds(uses(work, plan)))
            return replace(plan, predicted_seconds=seconds)

        try:
            rule = partial(rule_planner.by_rule, given, carving, settings, grain)
            found = rule_planner.with_staging(carving, settings, grain, plan, rule)
        except BudgetError:
            continue
        seconds = found.predicted_seconds or 0.0
        # The link's rate was measured with packed bytes. A plan without staging memory copies unpacked bytes,
        # so its steps would take longer than predicted.
        plain = settings.packs and not found.staging_bytes and not found.all_resident
        if plain and best is not None and best[1].staging_bytes:
            continue
        if best is None or seconds < FINER * fastest or (was_plain and not plain):
            best, fastest, was_plain = (carving, found), seconds, plain
    # If no limit on the size of units fits, the rule tries smaller units, or raises BudgetError with the
    # smallest budget that works.
    return best or rule_planner.decide(module, settings, grain)


def uses(work: Workload, plan: Plan) -> int:
    """Return how many times a step uses units that pass through slots."""
    return sum(use.unit not in plan.resident for use in work.uses())


def advise(
    module: nn.Module,
    settings: rule_planner.Settings,
    grain: int,
    learnt: TensorTimes,
    carving: Carving,
    plan: Plan,
    steps: float = math.inf,
    copies: bool = False,
) -> Advice:
    """Return whether a change from the present layout (``carving``, ``plan``) is worthwhile, and to which
    layout.

    ``learnt``: the measured times, without the seconds of unpacking if ``settings`` contains the rate of
    unpacking.
    ``steps``: the number of steps so far.
    ``copies``: whether streamed units keep their blocks of host memory through the change.

    A lower limit for the seconds of a step is computed first, which no layout can go below. If even that
    saving would not have paid for the change within ``steps`` steps, no search is made. ``saves`` of the
    returned advice is then this largest possible saving.
    """
    sizes = [unit.nbytes for unit in carving.units]
    parts = pieces(carving)
    work, waits = learnt.workload(parts, blocks(module)), learnt.host_waits(parts)
    units, rate = rule_planner.problem(carving, settings, grain).units, settings.unpacking
    decoding = [
        unit.nbytes / rate
        if rate and plan.staging_bytes and unit.packed and index not in plan.resident
        else 0.0
        for index, unit in enumerate(units)
    ]
    # The link's rate in ``learnt`` counts unpacked bytes, so units that are copied packed are passed with
    # their unpacked sizes.
    here = {
        index: PackedTransfer(0 if index in plan.packed else sizes[index], seconds)
        for index, seconds in enumerate(decoding)
        if seconds
    }
    taken = [
        0.0 if i in plan.resident else a + b for i, (a, b) in enumerate(zip(decoding, waits, strict=True))
    ]
    beside = work.with_added_seconds(taken) if any(taken) else work
    now = predict(sizes, plan.resident, plan.region_bytes, beside, learnt.link, packed=here).seconds
    now = max(now, learnt.host_seconds(uses(work, plan)))
    # Units may stay on the device packed. So enlarge the available bytes by the best ratio of unpacked to
    # packed bytes.
    dense = min((unit.packed / unit.nbytes for unit in units if rate and unit.packed), default=1.0)
    available = int((settings.vram - plan.staging_bytes - plan.fixed_bytes) / dense)
    floor = floor_seconds(sizes, available, work, learnt.link)
    # A new layout copies streamed units within host memory and pins them, even if they stay streamed.
    move = 2 * sum(sizes) / learnt.link.bytes_per_second
    if abs(now - learnt.seconds) > TRUSTED * learnt.seconds:
        reason = (
            f"the present step is predicted as {now:.4g} s and takes {learnt.seconds:.4g} s: not understood"
        )
        return Advice(carving, plan, now, 0.0, move, reason, understood=False)
    most = now - max(floor, learnt.host_seconds(0))
    nothing = HOST if learnt.host_bound else NOTHING
    if most < WORTH * now:
        return Advice(carving, plan, now, 0.0, move, nothing, understood=True)
    if most * steps < move:
        return Advice(carving, plan, now, most, move, "", understood=True)
    new_carving, new = decide_with(module, settings, grain, learnt)
    then = new.predicted_seconds
    saves = 0.0 if then is None else now - then
    if copies:  # streamed units keep their blocks, so only the fixed cost of a layout remains
        move = min(move, SETTLING)
    move += _crossing(carving, plan, new_carving, new) / learnt.link.bytes_per_second
    move += _leaving(carving, plan, new_carving, new) / HOSTING
    reason = nothing if saves < WORTH * now else ""
    return Advice(
        new_carving, new, now, saves, move, reason, understood=True, searched=True, vram=settings.vram
    )


def _residents(carving: Carving, plan: Plan) -> dict[frozenset[str], int]:
    """Return the bytes of each unit that stays on the device unpacked, by the set of the names of its
    tensors.
    """
    return {
        frozenset(entry.name for entry in carving.units[index].entries): carving.units[index].nbytes
        for index in plan.resident
    }


def _crossing(carving: Carving, plan: Plan, new_carving: Carving, new: Plan) -> int:
    """Return the bytes of units that move to or off the device between the two layouts.

    A unit that is on the device in both layouts, with the same tensors, does not move.
    """
    before, after = _residents(carving, plan), _residents(new_carving, new)
    return sum((before | after)[unit] for unit in before.keys() ^ after.keys()) + new.packed_bytes


def _leaving(carving: Carving, plan: Plan, new_carving: Carving, new: Plan) -> int:
    """Return the bytes for which the change needs new host memory.

    These are unpacked residents that leave the device, and streamed units whose tensors were grouped
    differently before.
    """
    after = _residents(new_carving, new)
    staying = {name for tensors in after for name in tensors}
    before = _residents(carving, plan)
    leaving = sum(
        entry.nbytes
        for index in plan.resident
        for entry in carving.units[index].entries
        if entry.name not in staying
    )
    known = {frozenset(entry.name for entry in unit.entries) for unit in carving.units} - before.keys()
    gone = {name for tensors in before for name in tensors}
    for index, unit in enumerate(new_carving.units):
        names = frozenset(entry.name for entry in unit.entries)
        if index not in new.resident and names not in known:
            leaving += sum(entry.nbytes for entry in unit.entries if entry.name not in gone)
    return leaving


def blocks(module: nn.Module) -> Sequence[frozenset[str]]:
    """Return the names of each block's tensors: activation checkpointing recomputes a block's tensors together."""
    carving = carve(module, granularity="block", stream_trainable=True)
    return [frozenset(entry.name for entry in unit.entries) for unit in carving.units if unit.kind == "block"]
