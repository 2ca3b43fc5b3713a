"""Prices layouts by the times of the first steps: the device's computing, the rate of the link, and the rate at
which the device unpacks.

A layout is described by its carving (the division of the module into units, groups of weights that are copied
together) and its plan (which units stay on the device, and the size of the slot region). Both are made by the rule
(`rule_planner`) for any request. Measured times decide only what the rule cannot know: whether weights cross the link
packed (losslessly compressed) or raw, whether units that stay on the device are packed there, and whether the slot region
has room for one decoded unit only.

The times are those of the device and of the link. The host's delays are not among them (`Meter` holds the device
back to see it without them), and host time for a crossing is the same for packed and raw weights. So a slower host
does not change the choice.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from ..model.units import Carving, Unit, carve
from ..placement.packer import packs
from ..plan.predict import Fetches, PackedTransfer, Workload, predict
from ..plan.profile import TensorTimes, UnitTensors
from ..plan.region import ALIGN
from ..plan.residency import Plan
from ..plan.schedule import UnitCost, UseOrder
from ..plan.schedule_maker import schedule_in_region
from .layout import Wanted

WORTH = 0.03  # a change of layout must save at least this share of a step's seconds
FEWER = 0.75  # larger units must be at most this share of the smaller ones, where the host binds
# An estimate of the seconds for the hooks, slots and plan of a new layout, if all weights are in host memory
# already.
SETTLING = 0.1
# An estimate of the bytes/s at which weights are copied to pinned host memory, when they leave the device or
# were never packed. In the record host-samples, changes of layout of some gigabytes took 1.4 and 0.9 s. A
# change takes longer if host memory is used for the first time.
HOSTING = 1.5e9


@dataclass(frozen=True)
class Priced:
    """A layout and the predicted seconds of a step with it.

    ``wanted``: the request for which the rule made the layout.
    """

    wanted: Wanted
    carving: Carving
    plan: Plan
    seconds: float

    @property
    def streamed(self) -> int:
        """The number of units that do not stay on the device."""
        return len(self.carving.units) - len(self.plan.resident)

    @property
    def streamed_bytes(self) -> int:
        """Bytes of the units that do not stay on the device."""
        resident = self.plan.resident
        return sum(unit.nbytes for index, unit in enumerate(self.carving.units) if index not in resident)


@dataclass(frozen=True)
class Advice:
    """The layout to take, with its predicted benefit and cost.

    ``best``: the cheapest layout; ``now``: predicted seconds of a step with the present layout.
    ``saves``: predicted seconds by which the layout shortens a step; ``move``: seconds that the change of layout takes.
    ``worthwhile``: whether the layout should be taken, once it has paid for itself.
    ``learnt``: the times of which this is the result, without unpacking.
    """

    best: Priced
    now: float
    saves: float
    move: float
    worthwhile: bool
    learnt: TensorTimes

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


def blocks(module: nn.Module) -> Sequence[frozenset[str]]:
    """Return the names of each block's tensors: activation checkpointing recomputes a block's tensors together."""
    carving = carve(module, granularity="block", stream_trainable=True)
    return [frozenset(entry.name for entry in unit.entries) for unit in carving.units if unit.kind == "block"]


def step_seconds(
    carving: Carving,
    plan: Plan,
    learnt: TensorTimes,
    together: Sequence[frozenset[str]],
    packed: Mapping[int, PackedTransfer],
) -> float:
    """Return the predicted seconds of a step.

    ``learnt``: the measured times, without unpacking. ``together``: the result of `blocks`.
    ``packed``: the units that are unpacked at each use.
    """
    sizes = [unit.nbytes for unit in carving.units]
    work = learnt.workload(pieces(carving), together)
    fetches = fetches_of_step(work, sizes, plan.resident, plan.region_bytes)
    return predict(sizes, plan.resident, plan.region_bytes, work, learnt.link, fetches, packed=packed).seconds


def fetches_of_step(
    work: Workload, sizes: Sequence[int], resident: Collection[int], region_bytes: int
) -> Fetches:
    """Return the fetches of a step of ``work`` in which the units in ``resident`` stay on the device, and the others pass
    through a region of ``region_bytes`` bytes, as a session fetches them. ``sizes``: bytes by unit.

    Raises BudgetError if the region is smaller than a unit that passes through it.
    """
    uses = tuple(use.unit for use in work.uses() if use.unit not in resident)
    if not uses:
        return Fetches()
    order = UseOrder(uses, updates=frozenset({0} if work.train else ()))
    costs = [UnitCost(size, trainable=unit in work.trains) for unit, size in enumerate(sizes)]
    made = schedule_in_region(order, costs, region_bytes, ALIGN)
    return Fetches(made.order.uses, made.after, made.before, made.unit_of, made.laps)


def choose(packed: Sequence[Priced], raw: Priced | None) -> Priced:
    """Return the cheapest layout. ``packed``: those in which weights cross packed (or as they are packed now), the
    simplest first. ``raw``: the one in which they cross raw.

    A later one of ``packed`` must save `WORTH` of a step. Weights cross packed only where that is faster than ``raw``:
    where the link binds, packed weights cross sooner, and where computing binds, raw ones spare the unpacking.
    """
    best = packed[0]
    for other in packed[1:]:
        if other.seconds < (1 - WORTH) * best.seconds:
            best = other
    return raw if raw is not None and raw.seconds < best.seconds else best


def advise(
    carving: Carving, plan: Plan, now: float, best: Priced, learnt: TensorTimes, copies: bool, unpacks: bool
) -> Advice:
    """Return whether a change from the present layout (``carving``, ``plan``) to ``best`` is worthwhile.

    ``now``: predicted seconds of a step with the present layout.
    ``copies``: whether streamed units keep their blocks of host memory through the change.
    ``unpacks``: whether weights cross packed now and raw under ``best``.
    """
    # A new layout copies streamed units within host memory and pins them, even if they stay streamed.
    move = 2 * sum(unit.nbytes for unit in carving.units) / learnt.link.bytes_per_second
    if copies and not unpacks:  # streamed units keep their blocks, so only the fixed cost of a layout remains
        move = min(move, SETTLING)
    move += _crossing(carving, plan, best) / learnt.link.bytes_per_second
    move += _leaving(carving, plan, best) / HOSTING
    saves = now - best.seconds
    worthwhile = saves > 0 if unpacks else saves >= WORTH * now
    return Advice(best, now, saves, move, worthwhile, learnt)


def spare_host(advice: Advice, coarse: Priced, learnt: TensorTimes) -> Advice:
    """Return ``advice``, or the advice to take ``coarse`` instead, a layout with larger units.

    Called where the device waits for Python. Each use of a streamed unit takes the host time, so larger units are taken
    where they are at least a quarter fewer, and leave the device faster than the host is now.
    """
    if coarse.streamed > FEWER * advice.best.streamed or coarse.seconds > learnt.seconds:
        return advice
    move = (
        advice.move + coarse.streamed_bytes / HOSTING
    )  # the units are new, so all of them get new host memory
    return Advice(coarse, advice.now, max(advice.saves, WORTH * learnt.seconds), move, True, learnt)


def _residents(carving: Carving, plan: Plan) -> dict[frozenset[str], int]:
    """Return the bytes of each unit that stays on the device unpacked, by the set of the names of its
    tensors.
    """
    return {
        frozenset(entry.name for entry in carving.units[index].entries): carving.units[index].nbytes
        for index in plan.resident
    }


def _crossing(carving: Carving, plan: Plan, new: Priced) -> int:
    """Return the bytes of units that move to or off the device between the two layouts.

    A unit that is on the device in both layouts, with the same tensors, does not move.
    """
    before, after = _residents(carving, plan), _residents(new.carving, new.plan)
    return sum((before | after)[unit] for unit in before.keys() ^ after.keys()) + new.plan.packed_bytes


def _leaving(carving: Carving, plan: Plan, new: Priced) -> int:
    """Return the bytes for which the change needs new host memory.

    These are unpacked residents that leave the device, and streamed units whose tensors were grouped
    differently before.
    """
    after = _residents(new.carving, new.plan)
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
    for index, unit in enumerate(new.carving.units):
        names = frozenset(entry.name for entry in unit.entries)
        if index not in new.plan.resident and names not in known:
            leaving += sum(entry.nbytes for entry in unit.entries if entry.name not in gone)
    return leaving
