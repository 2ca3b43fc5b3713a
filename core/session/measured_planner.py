"""The measured planner: from the times of the first steps, find a faster layout and decide whether to change to it.

A layout is described here by its carving and its plan.
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
WORTH = 0.03  # share of a step's seconds that a new layout must save
# Smaller units must take less than this share of the best predicted seconds so far: they cost more host time.
FINER = 0.99
# Seconds to make hooks, slots and plans of a layout whose weights are all in host memory already. An estimate.
SETTLING = 0.1
# Bytes/s at which weights are placed in the host's pinned memory, when they leave the device or were never packed.
# An estimate: the record host-samples has layout changes of gigabytes that took 1.4 and 0.9 s; a change takes
# longer where host memory is used for the first time.
HOSTING = 1.5e9
TRUSTED = 0.25  # largest error of the prediction for the present layout, as a share of the measured step


@dataclass(frozen=True)
class Advice:
    """A proposed layout (``carving``, ``plan``), with its predicted benefit and cost.

    ``now``: predicted seconds of a step with the present layout; ``saves``: predicted seconds by which the proposed
    layout shortens a step; ``move``: seconds that the change of layout takes.
    """

    carving: Carving
    plan: Plan
    now: float
    saves: float
    move: float
    reason: str  # why the layout should not be changed, "" where a change is worthwhile
    understood: bool  # whether the measured seconds of a step are close to the prediction
    searched: bool = False  # whether ``plan`` is the result of a search; otherwise it is the present plan
    vram: int = 0  # the budget in bytes that the search used

    @property
    def steps(self) -> float:
        """The number of steps after which the savings exceed the seconds of the change."""
        return self.move / self.saves if self.saves > 0 else float("inf")


def pieces(carving: Carving) -> list[UnitTensors]:
    """Return the units of ``carving`` as `learn` takes them: names, and bytes by tensor."""
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
    """Return the carving and plan with the shortest predicted step, or the rule's where none fits the budget.

    Arguments and errors: as of `rule_planner.decide`. ``learnt``: the measured times.
    """
    limits: list[int | None] = [None]
    if settings.granularity == "auto" and not rule_planner.compiled(module):
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
        # The link was measured with packed bytes. A plan without staging memory copies raw bytes, so its steps would
        # take longer than predicted.
        plain = settings.packs and not found.staging_bytes and not found.all_resident
        if plain and best is not None and best[1].staging_bytes:
            continue
        if best is None or seconds < FINER * fastest or (was_plain and not plain):
            best, fastest, was_plain = (carving, found), seconds, plain
    # Where no limit fits, the rule tries finer units, or raises BudgetError with the least budget that works.
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
    """Return whether a change from the present layout (``carving``, ``plan``) is worthwhile, and to which layout.

    ``learnt``: the measured times, without the seconds of unpacking where ``settings`` contains the rate of
    unpacking. ``steps``: the number of steps so far. ``copies``: whether streamed units keep their blocks of host
    memory through the change.
    No search is made while even the fastest step that any layout allows would not have paid for the change within
    ``steps`` steps. ``saves`` of the returned advice is then the saving of that fastest step.
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
    # The link's rate in ``learnt`` counts raw bytes, so units that cross packed are passed with their raw sizes.
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
    # Residents may be packed: scale the available bytes by the best ratio of packed to raw bytes.
    dense = min((unit.packed / unit.nbytes for unit in units if rate and unit.packed), default=1.0)
    available = int((settings.vram - plan.staging_bytes - plan.fixed_bytes) / dense)
    floor = floor_seconds(sizes, available, work, learnt.link)
    # A new layout copies streamed units within host memory, and pins them, whatever else changes.
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
    if copies:  # streamed units keep their blocks: only the fixed cost of a layout remains
        move = min(move, SETTLING)
    move += _crossing(carving, plan, new_carving, new) / learnt.link.bytes_per_second
    move += _leaving(carving, plan, new_carving, new) / HOSTING
    reason = nothing if saves < WORTH * now else ""
    return Advice(
        new_carving, new, now, saves, move, reason, understood=True, searched=True, vram=settings.vram
    )


def _residents(carving: Carving, plan: Plan) -> dict[frozenset[str], int]:
    """Return the bytes of each unit that is resident unpacked, by the set of its tensors' names."""
    return {
        frozenset(entry.name for entry in carving.units[index].entries): carving.units[index].nbytes
        for index in plan.resident
    }


def _crossing(carving: Carving, plan: Plan, new_carving: Carving, new: Plan) -> int:
    """Return the bytes of residents that leave the device or move to it.

    A unit that is resident in both layouts, with the same tensors, does not move.
    """
    before, after = _residents(carving, plan), _residents(new_carving, new)
    return sum((before | after)[unit] for unit in before.keys() ^ after.keys()) + new.packed_bytes


def _leaving(carving: Carving, plan: Plan, new_carving: Carving, new: Plan) -> int:
    """Return the bytes that need new host memory: of raw residents that leave the device, and of streamed units whose
    tensors were grouped differently before.
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
