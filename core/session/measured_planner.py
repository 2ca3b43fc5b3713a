"""From what the first steps taught to a better layout: which carving, which residents, and whether it is worth the move."""

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
WORTH = 0.03  # of a step that a new layout must save
FINER = 0.99  # of the time with whole blocks that parts must stay below: they cost more of the host
SETTLING = 0.1  # seconds for hooks, slots and plans of a layout whose weights are in host memory already; an estimate
# Bytes/s at which what leaves the device, or was never packed, comes to lie in the host's pinned memory. An estimate: record
# host-samples has relayouts of gigabytes in 1.4 and 0.9 s; where memory is used for the first time they take longer.
HOSTING = 1.5e9
TRUSTED = 0.25  # of the measured step that the prediction of the present layout may be off


@dataclass(frozen=True)
class Advice:
    """A layout and what it is predicted to save of the present step (``now``), in seconds; ``move``: seconds that
    the change takes."""

    carving: Carving
    plan: Plan
    now: float
    saves: float
    move: float
    reason: str  # why not to take it, "" when it is worth while
    understood: bool  # whether the present step takes about what is predicted for it
    searched: bool = False  # whether ``plan`` was found, and is not the present one
    vram: int = 0  # the budget that a found ``plan`` is for

    @property
    def steps(self) -> float:
        """Steps after which the change has paid for itself."""
        return self.move / self.saves if self.saves > 0 else float("inf")


def pieces(carving: Carving) -> list[UnitTensors]:
    """Units as `learn` sees them."""
    return [
        UnitTensors(unit.name, {entry.name: entry.nbytes for entry in unit.entries}, _trains(unit))
        for unit in carving.units
    ]


def _trains(unit: Unit) -> int:
    """Where weights of ``unit`` train, its bytes that never pack."""
    if not any(entry.trainable for entry in unit.entries):
        return 0
    return sum(entry.nbytes for entry in unit.entries if not packs(entry))


def decide_with(
    module: nn.Module, settings: rule_planner.Settings, grain: int, learnt: TensorTimes
) -> tuple[Carving, Plan]:
    """As `decide.decide`, by the shortest predicted step. Raises as that does."""
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
        # The link was measured with packed bytes: where these find no room, it would be slower than this says.
        plain = settings.packs and not found.staging_bytes and not found.all_resident
        if plain and best is not None and best[1].staging_bytes:
            continue
        if best is None or seconds < FINER * fastest or (was_plain and not plain):
            best, fastest, was_plain = (carving, found), seconds, plain
    # Where neither fits, the rule goes finer, or says what would.
    return best or rule_planner.decide(module, settings, grain)


def uses(work: Workload, plan: Plan) -> int:
    """How often a step uses what passes through slots."""
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
    """Whether a layout other than ``plan`` of ``carving`` is worth while. ``copies``: what streams keeps its host block.

    ``learnt``: without unpacking, where ``settings`` tells its rate. ``steps``: seen so far. While not even the fastest
    step that any layout allows would have made up for the change in so many, nothing is searched, and ``saves`` is what
    that step would save.
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
    # The link's rate is of what its bytes unpack to.
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
    # What stays may do so packed.
    dense = min((unit.packed / unit.nbytes for unit in units if rate and unit.packed), default=1.0)
    available = int((settings.vram - plan.staging_bytes - plan.fixed_bytes) / dense)
    floor = floor_seconds(sizes, available, work, learnt.link)
    # What streams is copied in host memory, and pinned, whatever else a new layout asks for.
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
    if copies:  # and not what streams
        move = min(move, SETTLING)
    move += _crossing(carving, plan, new_carving, new) / learnt.link.bytes_per_second
    move += _leaving(carving, plan, new_carving, new) / HOSTING
    reason = nothing if saves < WORTH * now else ""
    return Advice(
        new_carving, new, now, saves, move, reason, understood=True, searched=True, vram=settings.vram
    )


def _residents(carving: Carving, plan: Plan) -> dict[frozenset[str], int]:
    """Bytes of what stays raw, by its tensors."""
    return {
        frozenset(entry.name for entry in carving.units[index].entries): carving.units[index].nbytes
        for index in plan.resident
    }


def _crossing(carving: Carving, plan: Plan, new_carving: Carving, new: Plan) -> int:
    """Bytes of residents that leave the device or come to it: a unit that stays just so does not move."""
    before, after = _residents(carving, plan), _residents(new_carving, new)
    return sum((before | after)[unit] for unit in before.keys() ^ after.keys()) + new.packed_bytes


def _leaving(carving: Carving, plan: Plan, new_carving: Carving, new: Plan) -> int:
    """Bytes that get a place in host memory: raw residents that stay no longer, and streamed units that are cut otherwise."""
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
    """Tensors by block: what a checkpoint recomputes together."""
    carving = carve(module, granularity="block", stream_trainable=True)
    return [frozenset(entry.name for entry in unit.entries) for unit in carving.units if unit.kind == "block"]
