"""Units and residency for a module under a budget: how fine to carve, and how large the region is to be.

Blocks are the natural unit: one copy, one wait, no matter what happens inside. Large blocks are split
into their parts all the same where each part is still a copy at full link rate, because bubbles shrink
with the unit: a region holds more of them, a copy starts as soon as a part has been used, and residency
comes in finer steps. (Measured: docs/units.md.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..common.errors import BudgetError
from ..common.sizes import MIB, format_size
from ..model.units import Carving, Unit, carve
from ..placement.packer import EXPECTED, packs
from ..plan.region import ALIGN
from ..plan.residency import SMALL_UNIT, Plan, UnitSize, Wish, plan_residency, resident_cost, round_up

COARSE = 256 * MIB  # bytes; where the host binds: fewer units cost it less
PART = 128 * MIB  # bytes; copies of a quarter of this are still at 98 % of the link rate (measured)


@dataclass(frozen=True)
class Settings:
    """``vram``: budget in bytes; ``granularity`` and ``training`` as in `stream`; ``stay``: names -> why resident;
    ``from_file``: whether a tensor's bytes come from a weights file (None: there is none); ``packs``: whether room is
    wanted in which packed weights are decoded; ``among``: names of units that alone may stay, but for small ones (None:
    any); ``wires``: what a unit packs to (0: it does not), where units may stay packed on the device; ``unpacking``: bytes/s
    of output at which the device unpacks, where that was measured; ``staged``: bytes of that room that a unit takes (0: none),
    where they are known; ``trains``: whether backwards are known to go through it, whatever they train."""

    vram: int
    granularity: str
    training: str | None
    stay: dict[str, str]
    from_file: Callable[[torch.Tensor], Any] | None = None
    packs: bool = False  # whether weights cross packed
    among: frozenset[str] | None = None
    wires: Callable[[Unit], int] | None = None
    unpacking: float | None = None
    staged: Callable[[Unit], int] | None = None
    trains: bool = False


def decide(module: nn.Module, settings: Settings, grain: int) -> tuple[Carving, Plan]:
    """A carving of ``module`` and the plan for it; ``grain``: bytes the device's allocator rounds up to.

    Raises BudgetError with the least budget that works, UnsupportedError for tensors that cannot be managed.
    """
    limits = _limits(module, settings)
    error: BudgetError | None = None
    # Trainable weights stay where they fit, and stream where they do not.
    for training in ("resident", "stream") if settings.training is None else (settings.training,):
        for limit in limits:
            carving = cut(module, replace(settings, training=training), limit)
            adapters = sum(entry.nbytes for entry in carving.adapters) if settings.training is None else 0
            try:
                plan = with_staging(
                    carving,
                    settings,
                    grain,
                    functools.partial(by_rule, problem(carving, settings, grain), carving, settings, grain),
                )
                if adapters > settings.vram:
                    raise _adapters_too_large(adapters, settings.vram)
            except BudgetError as reason:
                if adapters > (reason.least_bytes or 0):
                    reason = _adapters_too_large(adapters, settings.vram)
                if error is None or (reason.least_bytes or 0) < (error.least_bytes or 0):
                    error = reason.with_traceback(None)
                continue
            # One slot overlaps nothing: prefer finer units while there are any, also to those that find no room to cross packed.
            crosses = plan.staging_bytes > 0 or limit is not None or compiled(module)
            if (plan.slots >= 2 and crosses) or plan.all_resident or limit == limits[-1]:
                return carving, plan
        if error is None:
            return carving, plan
        if not carving.adapters:
            break
    assert error is not None
    try:
        raise error
    finally:
        del error  # with its traceback it would keep this frame, and so the carving's tensors


def _adapters_too_large(nbytes: int, vram: int) -> BudgetError:
    """Trainable weights that are to stay resident alone exceed the budget."""
    return BudgetError(
        f"vram={format_size(vram)} is too small: trainable weights of {format_size(nbytes)} stay resident; the least budget "
        f"that works is {nbytes} bytes",
        nbytes,
    )


def _limits(module: nn.Module, settings: Settings) -> list[int | None]:
    """Bytes of the largest units, as they are to be tried."""
    if settings.granularity != "auto":
        return [None]
    finest: list[int | None] = [settings.vram // 3, settings.vram // 6, 1]
    if compiled(module):  # what is compiled as one runs best as one
        return [None, *finest]
    parts: list[int | None] = [PART, *(n for n in finest if n is not None and n < PART)]
    # Packed bytes wait for a staging buffer, not for a slot: whole blocks leave no bubbles, and a step of training uses each
    # unit three times, which costs the host.
    return [None, *parts] if settings.packs and _trains(cut(module, settings, None), settings) else parts


def plan_within(carving: Carving, settings: Settings, grain: int) -> Plan:
    """A plan by the rule for units that are carved already. Raises BudgetError."""
    given = problem(carving, settings, grain)
    return with_staging(carving, settings, grain, functools.partial(by_rule, given, carving, settings, grain))


def compiled(module: nn.Module) -> bool:
    """Whether any part of ``module`` is compiled."""
    return any(
        getattr(part, "_compiled_call_impl", None) is not None or "_orig_mod" in part._modules
        for part in module.modules()
    )


def cut(module: nn.Module, settings: Settings, limit: int | None) -> Carving:
    """``module`` in units of at most ``limit`` bytes where they can be split."""
    stream_trainable = settings.training == "stream"

    def carved() -> Carving:
        return carve(
            module, granularity=settings.granularity, limit=limit, stream_trainable=stream_trainable,
            stay=settings.stay, from_file=settings.from_file,
        )  # fmt: skip

    carving = carved()
    if settings.training is None and sum(entry.nbytes for entry in carving.adapters) > settings.vram:
        stream_trainable = True  # full fine-tuning: the weights themselves are trainable
        carving = carved()
    return carving


@dataclass(frozen=True)
class Problem:
    """What a planner is given of a carving: ``fixed`` bytes are spoken for."""

    units: list[UnitSize]
    fixed: int
    wish: Wish


def problem(carving: Carving, settings: Settings, grain: int) -> Problem:
    """The planner's view of ``carving``."""
    wires = settings.wires if settings.packs else None
    counted = [entry.nbytes for entry, _ in carving.resident if entry.counted]
    fixed = resident_cost([round_up(nbytes, ALIGN) for nbytes in counted], grain)
    # Of the parts of a split block the small ones (norms, biases) are better kept than copied.
    least = min(SMALL_UNIT, carving.largest // 8)
    units = [
        UnitSize(
            unit.name,
            unit.nbytes,
            unit.kind == "loose",
            unit.kind == "block" or unit.nbytes >= least,
            wires(unit) if wires is not None else 0,
        )
        for unit in carving.units
    ]
    return Problem(units, fixed, _wish(carving, settings))


def with_staging(
    carving: Carving,
    settings: Settings,
    grain: int,
    plan: Callable[[int, bool], Plan],
    rule: Callable[[int, bool], Plan] | None = None,
) -> Plan:
    """``plan(vram, packed)`` with room for packed weights to be decoded in, where they are to be, some stream, and it is
    there: two of the largest wires, so that one is copied while the other is decoded, or one. With it units may stay ``packed``.
    ``rule``: the same in no time, where ``plan`` is a search; it tells whether there is something to search for."""
    quick = rule or plan
    whole = quick(settings.vram, False)
    if settings.packs and not whole.all_resident:
        for staging in _staging(carving, settings, grain):
            try:
                found = quick(settings.vram - staging, True)
            except BudgetError:
                continue
            if found.slots >= min(2, whole.slots):
                if rule is not None:
                    found = plan(settings.vram - staging, True)
                return replace(found, vram_budget_bytes=settings.vram, staging_bytes=staging)
    return whole if rule is None else plan(settings.vram, False)


def _staging(carving: Carving, settings: Settings, grain: int) -> list[int]:
    """Bytes that packed weights could be decoded in within the budget, the best first: twice a wire, so that one is copied
    while the other is decoded, or once where its halves cross one after the other (`Staging.pieces`)."""
    if settings.staged is None:
        units = [unit for unit in carving.units if any(map(packs, unit.entries))]
        wires = [round_up(int(unit.nbytes * EXPECTED), ALIGN) for unit in units]
        twice = [_wire(unit) if _halves(unit) else 2 * wire for wire, unit in zip(wires, units, strict=True)]
    else:
        wires = [round_up(settings.staged(unit), ALIGN) for unit in carving.units]
        twice = [2 * wire for wire in wires]
    best, least = round_up(max(twice, default=0), grain), round_up(max(wires, default=0), grain)
    return [size for size in dict.fromkeys((best, least)) if 0 < size < settings.vram]


def _wire(unit: Unit) -> int:
    """Bytes that a unit packs to, before any of it was: other dtypes than bfloat16 gain less, which differs."""
    sizes = [
        int(entry.nbytes * EXPECTED)
        if packs(entry) and entry.tensor.dtype is torch.bfloat16
        else entry.nbytes
        for entry in unit.entries
    ]
    return sum(round_up(size, ALIGN) for size in sizes)


def _halves(unit: Unit) -> bool:
    """Whether none of the unit's tensors is more than half of it."""
    return 2 * max(entry.nbytes for entry in unit.entries) <= unit.nbytes


def by_rule(
    given: Problem, carving: Carving, settings: Settings, grain: int, vram: int, packed: bool
) -> Plan:
    """Raises BudgetError."""
    among = settings.among
    names = {unit.name: index for index, unit in enumerate(carving.units)}
    # Units that are carved otherwise than those that were named are chosen from freely.
    chosen = {names[name] for name in among} if among is not None and among <= names.keys() else None
    return plan_residency(given.units, vram, given.fixed, given.wish, grain, chosen, packed)


def _wish(carving: Carving, settings: Settings) -> Wish:
    """Bytes kept at a turn are as good as resident, so training takes three blocks; forwards alone take two thirds of one (predicted
    steps of a DiT and of Flux get shorter down to there, for any budget), and half of one where weights cross packed: they wait
    for the staging buffer, not for a slot. Whole blocks that do take two slots: the rest
    is as good resident, and costs the host nothing."""
    if not carving.split_bytes:
        large = settings.packs and carving.largest > PART
        return Wish(3 if _trains(carving, settings) and not large else 2)
    block = carving.split_bytes
    return Wish(
        2, 3 * block if _trains(carving, settings) else block // 2 if settings.packs else 2 * block // 3
    )


def _trains(carving: Carving, settings: Settings) -> bool:
    if settings.trains or carving.adapters:
        return True
    return any(entry.trainable for unit in carving.units for entry in unit.entries)
