"""The rule-based planner: divides a module into units and decides which of them stay on the device, without
measured times.

A unit is a group of weights that are copied to the device together. A block of the model is the natural unit:
one copy and one wait serve everything inside the block. Large blocks are nevertheless split into parts, as
long as a part is large enough for the rate of the link (the connection between host and device). Smaller
units shorten the time in which the device waits, for three reasons: the slot region (the device memory
through which units stream) holds more units, a copy starts as soon as a part has been used, and the number of
bytes that stay on the device can be chosen in finer steps. docs/units.md describes the sizes of units and
slots. The grain is the number of bytes to whose multiples the device's allocator rounds up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..common.errors import BudgetError
from ..common.sizes import MIB, format_size
from ..model.units import Carving, Unit
from ..placement.packer import EXPECTED, packs
from ..plan.region import ALIGN
from ..plan.residency import SMALL_UNIT, Plan, UnitSize, Wish, plan_residency, resident_cost, round_up

COARSE = 256 * MIB  # bytes; unit size if the host is the bottleneck, because fewer units take less host time
PART = 128 * MIB  # bytes; `carom doctor` measures the link's rate for copies of this size and of smaller ones

Carve = Callable[..., Carving]  # `model.units.carve` for one module


@dataclass(frozen=True)
class Settings:
    """The inputs of a planner, apart from the module.

    ``vram``: budget in bytes.
    ``granularity``, ``training``: as in `stream`.
    ``stay``: names of tensors that must stay on the device, with the reason.
    ``from_file``: returns whether a tensor's bytes come from a weights file; None if there is no weights
    file.
    ``packs``: whether to reserve staging memory, in which packed weights are unpacked.
    ``among``: names of the units that stay on the device before any others, apart from small units; None for none.
    ``wires``: returns the bytes of a unit when packed, 0 if the unit cannot be packed; None if units may not
    stay on the device packed.
    ``staged``: returns the staging bytes that a unit takes, 0 for none; None if these are not known.
    ``trains``: whether backward passes are known to go through the module, whatever weights they train.
    ``links``: the number of links over which weights are copied at the same time.
    ``compiled``: whether torch.compile compiled the module or a part of it.
    ``coarse``: whether units are to be large, because the host is the bottleneck.
    ``region_bytes``: bytes that the slot region should have at least.
    ``gradients``: whether passes record gradients. If not, trainable weights that do not fit into the budget count as
    frozen.
    ``one_decoded``: whether a region with room for one decoded unit suffices, see `Packing`.
    """

    vram: int
    granularity: str
    training: str | None
    stay: dict[str, str]
    from_file: Callable[[torch.Tensor], Any] | None = None
    packs: bool = False  # whether weights are copied to the device packed
    among: frozenset[str] | None = None
    wires: Callable[[Unit], int] | None = None
    staged: Callable[[Unit], int] | None = None
    trains: bool = False
    links: int = 1
    compiled: bool = False
    gradients: bool = True
    coarse: bool = False
    region_bytes: int = 0
    one_decoded: bool = False


def decide(carve: Carve, settings: Settings, grain: int) -> tuple[Carving, Plan]:
    """Return a carving (a division of the module into units) and the plan for that carving.

    ``carve``: `model.units.carve` for the module.
    ``grain``: the bytes to whose multiples the device's allocator rounds up. Raises BudgetError with the
    smallest budget that works, and UnsupportedError for tensors that cannot be managed.
    """
    limits = _limits(carve, settings)
    error: BudgetError | None = None
    # Trainable weights stay on the device if they fit into the budget. Otherwise they are streamed.
    for training in ("resident", "stream") if settings.training is None else (settings.training,):
        for limit in limits:
            carving = cut(carve, replace(settings, training=training), limit)
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
            # With a single slot, no copy overlaps computing. Go on to the next smaller limit if there is one.
            # Do the same if packed weights found no staging memory.
            crosses = plan.staging_bytes > 0 or limit is not None or settings.compiled
            enough = _least_slots(carving, settings) if plan.staging_bytes else 2
            if (plan.slots >= enough and crosses) or plan.all_resident or limit == limits[-1]:
                return carving, plan
        if error is None:
            return carving, plan
        if not carving.adapters:
            break
    assert error is not None
    try:
        raise error
    finally:
        del error  # the error's traceback would keep this frame alive, and with it the carving's tensors


def _adapters_too_large(nbytes: int, vram: int) -> BudgetError:
    """Return the error for trainable weights of ``nbytes`` bytes that must stay on the device but exceed the
    budget.
    """
    return BudgetError(
        f"vram={format_size(vram)} is too small: trainable weights of {format_size(nbytes)} stay resident; the least budget "
        f"that works is {nbytes} bytes",
        nbytes,
    )


def _limits(carve: Carve, settings: Settings) -> list[int | None]:
    """Return the limits on the bytes of a unit that `decide` tries, in order. None stands for blocks that are
    not split; 1 byte splits a block as far as it can be split.
    """
    if settings.granularity != "auto":
        return [None]
    finest = sorted({max(1, settings.vram // 3), max(1, settings.vram // 6), 1}, reverse=True)
    if settings.compiled:  # compiled code runs fastest in one piece, so do not split it
        return [None, *finest]
    parts: list[int | None] = [
        COARSE if settings.coarse else PART,
        *(n for n in finest if n < PART),
    ]
    # Packed bytes wait for a staging buffer and not for a slot, so whole blocks cause no gaps between copies.
    # A training step uses each unit three times, and each use takes host time, so fewer units are better in
    # training.
    return [None, *parts] if settings.packs and _trains(cut(carve, settings, None), settings) else parts


def divided(units: list[Unit]) -> list[str]:
    """Return a note for the report on streamed ``units`` that are parts of blocks of a compiled module."""
    parts = [unit for unit in units if unit.kind in ("phase", "layer")]
    if not parts:
        return []
    return [
        f"torch.compile: blocks are divided into {len(parts)} units (first {parts[0].name!r}), and compiled code breaks at each "
        "of them, so gradients can differ from those of the resident compiled module in the last bits; "
        "granularity='block', with a larger vram if it asks for one, keeps blocks whole"
    ]


def cut(carve: Carve, settings: Settings, limit: int | None) -> Carving:
    """Return the module divided into units, each of at most ``limit`` bytes where it can be split.

    With ``limit=None``, no unit is split because of its size.
    """
    stream_trainable = settings.training == "stream"

    def carved() -> Carving:
        return carve(
            granularity=settings.granularity, limit=limit, stream_trainable=stream_trainable,
            stay=settings.stay, from_file=settings.from_file,
            untrained=stream_trainable and not settings.gradients,
        )  # fmt: skip

    carving = carved()
    if settings.training is None and sum(entry.nbytes for entry in carving.adapters) > settings.vram:
        stream_trainable = True  # full fine-tuning: the weights themselves are trainable
        carving = carved()
    return carving


@dataclass(frozen=True)
class Problem:
    """The properties of a carving (a module divided into units) that a planner depends on.

    ``units``: the sizes of the units, in order of use.
    ``fixed``: device bytes of tensors that must stay on the device.
    ``wish``: the preferred size of the slot region.
    """

    units: list[UnitSize]
    fixed: int
    wish: Wish


def problem(carving: Carving, settings: Settings, grain: int) -> Problem:
    """Return the properties of ``carving`` that a planner depends on."""
    wires = settings.wires if settings.packs else None
    counted = [entry.nbytes for entry, _ in carving.resident if entry.counted]
    fixed = resident_cost([round_up(nbytes, ALIGN) for nbytes in counted], grain)
    # The small parts of a split block (norms, biases) are kept on the device, which is better than copying
    # them.
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
) -> Plan:
    """Return the plan that ``plan(vram, packed)`` makes, with staging memory for packed weights if possible.

    Staging memory is reserved if ``settings.packs`` is set, some units stream, and the budget has room for
    it. It holds two of the largest packed units if possible, so that one is copied while the other is
    unpacked; otherwise it holds one. The region then has room for at least two decoded units, or one
    (`_least_slots`). Units may stay on the device packed (``packed``) only with staging
    memory.
    """
    whole = plan(settings.vram, False)
    if settings.packs and not whole.all_resident:
        for staging in _staging(carving, settings, grain):
            try:
                found = plan(settings.vram - staging, True)
            except BudgetError:
                continue
            if found.slots >= min(_least_slots(carving, settings), whole.slots):
                return replace(found, vram_budget_bytes=settings.vram, staging_bytes=staging)
    return whole


def _staging(carving: Carving, settings: Settings, grain: int) -> list[int]:
    """Return the staging sizes in bytes that fit into the budget, the best first.

    The best size holds two packed units, so that one is copied while the other is unpacked. For a unit whose
    halves can be copied one after the other (`Staging.pieces`), it holds only one unit. The smaller size
    always holds one packed unit.
    """
    if settings.staged is None:
        units = [unit for unit in carving.units if any(map(packs, unit.entries))]
        wires = [round_up(int(unit.nbytes * EXPECTED), ALIGN) for unit in units]
        twice = [_wire(unit) if halves(unit) else 2 * wire for wire, unit in zip(wires, units, strict=True)]
    else:
        wires = [round_up(settings.staged(unit), ALIGN) for unit in carving.units]
        twice = [2 * wire for wire in wires]
    best, least = round_up(max(twice, default=0), grain), round_up(max(wires, default=0), grain)
    return [size for size in dict.fromkeys((best, least)) if 0 < size < settings.vram]


def _wire(unit: Unit) -> int:
    """Return an estimate of the packed bytes of ``unit``, which was not packed yet.

    Only bfloat16 tensors are counted as packed, because other dtypes shrink less, and by how much varies.
    """
    sizes = [
        int(entry.nbytes * EXPECTED)
        if packs(entry) and entry.tensor.dtype is torch.bfloat16
        else entry.nbytes
        for entry in unit.entries
    ]
    return sum(round_up(size, ALIGN) for size in sizes)


def halves(unit: Unit) -> bool:
    """Return whether no tensor of ``unit`` takes more than half of the unit's bytes."""
    return 2 * max(entry.nbytes for entry in unit.entries) <= unit.nbytes


def by_rule(
    given: Problem, carving: Carving, settings: Settings, grain: int, vram: int, packed: bool
) -> Plan:
    """Return the plan of the rule for ``carving`` under a budget of ``vram`` bytes. Raises BudgetError.

    ``given``: the properties of ``carving``.
    ``packed``: whether weights are copied packed, so that units may stay on the device packed.
    """
    # The next unit's packed bytes wait in the staging buffer, so one decoded unit is room enough for them to cross.
    wish = Wish(1) if packed and _least_slots(carving, settings) == 1 else given.wish
    among = settings.among
    names = {unit.name: index for index, unit in enumerate(carving.units)}
    # The names are those of an earlier carving. If the present carving lacks any of these units, none comes first.
    chosen = {names[name] for name in among} if among is not None and among <= names.keys() else None
    return plan_residency(given.units, vram, given.fixed, wish, grain, chosen, packed)


def _wish(carving: Carving, settings: Settings) -> Wish:
    """Return the preferred size of the slot region.

    If blocks are split, the size is:
    - in training, three blocks, because bytes that stay in slots between the forward and the backward are as
      useful as bytes that stay on the device;
    - for forward passes alone, two thirds of a block, because predicted steps of a DiT and of Flux get
      shorter down to that size, whatever the budget;
    - for forward passes alone with weights that are copied packed, half of a block, because packed weights
      wait for the staging buffer and not for a slot.

    If blocks are whole, the size is three slots in training. It is two slots for forward passes alone, and
    for large blocks that are copied packed, because the remaining device bytes are better used for units that
    stay on the device, which take no host time.

    Each further link adds a slot and half of the bytes, because it has a copy under way while a unit is used.
    """
    further = settings.links - 1
    if not carving.split_bytes:
        large = settings.packs and carving.largest > PART
        return Wish((3 if _trains(carving, settings) and not large else 2) + further, settings.region_bytes)
    block = carving.split_bytes
    nbytes = 3 * block if _trains(carving, settings) else block // 2 if settings.packs else 2 * block // 3
    return Wish(2 + further, max(nbytes + further * nbytes // 2, settings.region_bytes))


def _least_slots(carving: Carving, settings: Settings) -> int:
    """Return how many decoded units the region must have room for where weights are copied packed."""
    return 1 if settings.one_decoded and not _trains(carving, settings) else 2


def _trains(carving: Carving, settings: Settings) -> bool:
    if settings.trains or carving.adapters:
        return True
    return any(entry.trainable for unit in carving.units for entry in unit.entries)
