"""Predicted seconds of schedules beside those of a prefetcher, over random cases. It needs no GPU.

    python -m carom.benchmarks.engines.schedules [--cases 300] [--seed 0] [--json FILE]

A case is a set of 24 to 1,000 units of 1 to 700 MiB, a budget between the least one and all of them, a link, and an order
of uses: inference, training, training with activation checkpointing, two models in turns, two models interleaved (as a
control network and its model), or a prompt (text encoder, two models for some steps each, decoder). `make_schedule` and
`check_schedule` make and check its table; `predict_schedule` predicts the seconds of a cycle. The base is what Carom did
before it had schedules: the plan of `plan_residency` with the region that the rule wishes for, and the replay of a
prefetcher (`engines/prefetcher.py`). Both predictions describe the same machine, with one link and one stream.

A second table has cases with a decoder, where units may be packed: the base is the better one of the plans without and
with packed units. A third one has the tables of sessions, which keep the units of the base's plan on the device, and have
its region (`schedule_in_region`). The times of making a table are those of the process, the least of three.
"""

from __future__ import annotations

import argparse
import gc
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ...core.common.errors import BudgetError
from ...core.common.sizes import MIB
from ...core.plan.predict import Link, PackedTransfer, Use, Workload, predict
from ...core.plan.residency import Plan, UnitSize, Wish, least_budget, plan_residency, resident_cost, round_up
from ...core.plan.schedule import Schedule, Times, UnitCost, UseOrder
from ...core.plan.schedule_check import check_schedule
from ...core.plan.schedule_maker import make_schedule, schedule_in_region
from ...core.plan.schedule_seconds import predict_schedule
from ...core.session.measured_planner import fetches_of_step
from .prefetcher import prefetcher_seconds
from .record import new_record, write_record

Made = TypeVar("Made")
TOOL = "carom schedules"
KINDS = ("inference", "training", "checkpointed training", "two models in turns", "interleaved", "prompt")
MEDIAN, NINE_OF_TEN, WORST = 1.0, 1.03, 1.15  # bounds of the seconds over the base's
PACKED_SHARE = 0.69  # packed bytes over raw ones, as of bfloat16 weights
ALIGN = 512
# Tables whose time is measured: units, kind of order, the largest unit in MiB, bound in seconds.
TABLES = (
    (1000, "inference", 200, 0.05),
    (1000, "training", 200, 0.05),
    (1000, "checkpointed training", 200, 0.05),
    (10000, "inference", 2, 1.0),
)
# Those of a region of so many largest units, as a session makes them, where no unit stays (`schedule_in_region`).
REGIONS = (2, 3)


@dataclass(frozen=True)
class ScheduleCase:
    """A problem for both planners. ``uses``: (unit, seconds) in order; ``slots``: the slots that the rule wishes for."""

    kind: str
    sizes: tuple[int, ...]
    uses: tuple[tuple[int, float], ...]
    phases: tuple[int, ...]
    slots: int
    capacity: int
    link: Link
    decode_bytes_per_second: float | None = None

    def problem(self) -> tuple[UseOrder, tuple[UnitCost, ...], int, Times]:
        """Return the arguments of `make_schedule`."""
        order = UseOrder(tuple(unit for unit, _ in self.uses), phases=self.phases)
        units = tuple(UnitCost(size, self.packed(size)) for size in self.sizes)
        seconds = tuple(seconds for _, seconds in self.uses)
        return order, units, self.capacity, Times(self.link, seconds, self.decode_bytes_per_second)

    def packed(self, size: int) -> int:
        """Return the packed bytes of a unit of ``size`` bytes, 0 without a decoder."""
        return int(PACKED_SHARE * size) if self.decode_bytes_per_second else 0

    def plan(self) -> Plan:
        """Return the plan of the base, without packed units."""
        units = [UnitSize(str(unit), size) for unit, size in enumerate(self.sizes)]
        return plan_residency(units, self.capacity, wish=Wish(self.slots))

    def cycle(self) -> list[Use]:
        return [Use(unit, seconds) for unit, seconds in self.uses]


@dataclass(frozen=True)
class _Cycle(Workload):
    """A workload with any order of uses, in which a unit may be used several times."""

    cycle: tuple[Use, ...] = ()

    def uses(self) -> list[Use]:
        return list(self.cycle)

    @property
    def phases(self) -> tuple[float, ...]:
        return (sum(use.seconds for use in self.cycle),)


def make_case(seed: int, index: int, most: int = 1000, decodes: bool = False) -> ScheduleCase:
    """Return case ``index`` of ``seed``; its kind is that of ``index`` in turn. ``most``: the most units."""
    chance = random.Random(f"{seed} {index} {decodes}")
    kind = KINDS[index % len(KINDS)]
    count = _spread(chance, 24, most)
    sizes = _sizes(chance, count)
    rate = chance.choice((6e9, 12e9, 25e9, 50e9))
    # Seconds of computing a forward over those of copying all units; units differ from it by up to `uneven`.
    ratio, uneven = math.exp(chance.uniform(math.log(0.1), math.log(2.0))), chance.choice((0.0, 0.2, 1.0))
    forward = tuple(size / rate * ratio * math.exp(chance.uniform(-uneven, uneven)) for size in sizes)
    uses, phases = _uses(chance, kind, forward)
    least, everything = least_budget([UnitSize("", size) for size in sizes], 0), resident_cost(sizes)
    capacity = least + int((everything - least) * chance.uniform(0.03, 0.95))
    decoder = rate * math.exp(chance.uniform(math.log(3), math.log(20))) if decodes else None
    slots = 3 if "training" in kind else 2
    return ScheduleCase(kind, sizes, uses, phases, slots, capacity, Link(rate), decoder)


def _spread(chance: random.Random, least: int, most: int) -> int:
    return int(math.exp(chance.uniform(math.log(least), math.log(most + 1))))


def _sizes(chance: random.Random, count: int) -> tuple[int, ...]:
    """Return bytes of units: of one size, of some sizes after one another or in turns, any, or one large and small ones."""
    largest = chance.choice((8, 32, 128, 700))

    def size() -> int:
        return int(math.exp(chance.uniform(0, math.log(largest))) * MIB) // ALIGN * ALIGN

    shape = chance.choice(("one", "after one another", "in turns", "any", "one large"))
    if shape == "any":
        return tuple(size() for _ in range(count))
    if shape == "in turns":
        parts = [size() for _ in range(chance.randint(2, 6))]
        return tuple(parts[unit % len(parts)] for unit in range(count))
    if shape == "after one another":
        parts = [size() for _ in range(chance.randint(2, 4))]
        cuts = sorted(chance.randint(0, count) for _ in parts[1:])
        return tuple(parts[sum(unit >= cut for cut in cuts)] for unit in range(count))
    one = size()
    first = min(700 * MIB, one * chance.randint(2, 6)) if shape == "one large" else one
    return (first,) + (one,) * (count - 1)


def _uses(
    chance: random.Random, kind: str, forward: Sequence[float]
) -> tuple[tuple[tuple[int, float], ...], tuple[int, ...]]:
    """Return the uses of a cycle, and the first positions of its phases."""
    count, phases, backward = len(forward), [0], tuple(2 * seconds for seconds in forward)
    if kind == "training":
        return _steps(forward, backward, ()), (0,)
    if kind == "checkpointed training":
        width = chance.choice((1, 1, 2, 4))
        groups = tuple(tuple(range(first, min(count, first + width))) for first in range(0, count, width))
        return _steps(forward, backward, groups), (0,)
    units = list(range(count))
    if kind == "two models in turns":
        cut, times = chance.randint(count // 4, 3 * count // 4), chance.choice((1, 1, 2, 3))
        units = units[:cut] * times + units[cut:] * chance.choice((1, times))
    elif kind == "interleaved":
        control, blocks = units[: count // 3], units[count // 3 :]
        mixed = [unit for pair in zip(blocks[::2], blocks[1::2], control, strict=False) for unit in pair]
        # The control network may run as a whole before, and its results are used beside the model's blocks.
        units = (control if chance.random() < 0.4 else []) + mixed
        units += [unit for unit in range(count) if unit not in set(units)]
    elif kind == "prompt":
        encoder, decoder, steps = count // 5, count // 10, chance.choice((2, 4, 8))
        cuts = (0, encoder, encoder + (count - encoder - decoder) // 2, count - decoder, count)
        units, phases = [], []
        for part, times in zip(range(4), (1, steps, steps, 1), strict=True):
            phases.append(len(units))
            units += list(range(cuts[part], cuts[part + 1])) * times
    return tuple((unit, forward[unit]) for unit in units), tuple(phases)


def _steps(
    forward: Sequence[float], backward: Sequence[float], groups: tuple[tuple[int, ...], ...]
) -> tuple[tuple[int, float], ...]:
    work = Workload(tuple(range(len(forward))), tuple(forward), tuple(backward), groups)
    return tuple((use.unit, use.seconds) for use in work.uses())


def base_seconds(case: ScheduleCase) -> float:
    """Return the predicted seconds of a cycle with a prefetcher, with the better one of two plans if units may be packed."""
    sizes, cycle = list(case.sizes), case.cycle()
    plan = case.plan()
    best = prefetcher_seconds(sizes, plan.resident, plan.region_bytes, cycle, case.link)
    rate = case.decode_bytes_per_second
    if rate is None:
        return best
    units = [UnitSize(str(unit), size, packed=case.packed(size)) for unit, size in enumerate(sizes)]
    try:
        staging = round_up(2 * max(unit.packed for unit in units))
        plan = plan_residency(units, case.capacity - staging, wish=Wish(case.slots), packed=True)
    except BudgetError:
        return best
    packed = {
        unit: PackedTransfer(0 if unit in plan.packed else units[unit].packed, size / rate)
        for unit, size in enumerate(sizes)
        if unit not in plan.resident
    }
    return min(best, prefetcher_seconds(sizes, plan.resident, plan.region_bytes, cycle, case.link, packed))


def session_seconds(case: ScheduleCase) -> tuple[float, float]:
    """Return the predicted seconds of a cycle with the table of a session, and the seconds that the table took."""
    sizes, plan = list(case.sizes), case.plan()
    count = len(sizes)
    work = _Cycle(tuple(range(count)), (1.0,) * count, cycle=tuple(case.cycle()))
    fetches, made = _timed(lambda: fetches_of_step(work, sizes, plan.resident, plan.region_bytes))
    found = predict(sizes, plan.resident, plan.region_bytes, work, case.link, fetches, steps=2)
    return found.seconds, made


def compare(case: ScheduleCase) -> dict[str, Any]:
    """Make, check and predict the schedule of ``case``; return its figures beside the base's."""
    problem = case.problem()
    schedule, made = _timed(lambda: make_schedule(*problem))
    check_schedule(schedule)
    row = _row(case, predict_schedule(schedule, problem[-1]).seconds, made)
    return {**row, "transfers": schedule.transfers}


def compare_session(case: ScheduleCase) -> dict[str, Any]:
    """Return the figures of the table that a session makes for ``case`` beside the base's."""
    return _row(case, *session_seconds(case))


def _row(case: ScheduleCase, seconds: float, made: float) -> dict[str, Any]:
    return {
        "kind": case.kind,
        "units": len(case.sizes),
        "uses": len(case.uses),
        "budget_share": round(case.capacity / sum(case.sizes), 3),
        "seconds": seconds,
        "base_seconds": base_seconds(case),
        "computing_seconds": sum(seconds for _, seconds in case.uses),
        "table_seconds": round(made, 4),
    }


def figures(rows: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Return the median, the value that nine of ten do not exceed, and the worst of the seconds over the base's."""
    ratios = sorted(row["seconds"] / row["base_seconds"] for row in rows)
    nine = ratios[math.ceil(0.9 * len(ratios)) - 1]
    return {
        "count": len(ratios),
        "median": statistics.median(ratios),
        "nine_of_ten": nine,
        "worst": ratios[-1],
    }


def table_seconds(count: int, kind: str, largest: int, slots: int | None = None) -> float:
    """Return the seconds that a table of ``count`` units of up to ``largest`` MiB takes, the least of three.

    ``slots``: the region in units of the largest size, for the table of a session; None: who stays is chosen, too.
    """
    chance = random.Random(count)
    sizes = [chance.randint(MIB // ALIGN, largest * MIB // ALIGN) * ALIGN for _ in range(count)]
    uses, phases = _uses(chance, kind, [size / 50e9 for size in sizes])
    case = ScheduleCase(kind, tuple(sizes), uses, phases, 2, sum(sizes) // 3, Link(25e9))
    order, units, capacity, times = case.problem()

    def make() -> Schedule:
        if slots is None:
            return make_schedule(order, units, capacity, times)
        return schedule_in_region(order, units, slots * max(sizes), ALIGN)

    return min(_timed(make)[1] for _ in range(3))


def _timed(make: Callable[[], Made]) -> tuple[Made, float]:
    """Return what ``make`` returns, and its seconds. As with timeit, the garbage collector, which looks at the objects of
    the whole process, does not run.
    """
    gc.disable()
    try:
        begin = time.process_time()
        made = make()
        return made, time.process_time() - begin
    finally:
        gc.enable()


def _print_figures(title: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Print the figures of ``rows``, by kind and of all, and return them."""
    print(f"{title}: seconds over a prefetcher's\n{'':24} cases  median  9 of 10   worst")
    found = {}
    for kind in (*KINDS, "all"):
        mine = [row for row in rows if kind in (row["kind"], "all")]
        if mine:
            found[kind] = figures(mine)
            one = found[kind]
            print(
                f"{kind:24} {one['count']:5} {one['median']:7.4f} {one['nine_of_ten']:8.4f} {one['worst']:7.4f}"
            )
    return found


def main(argv: list[str] | None = None) -> int:
    """Compare all cases, print the figures, and return 1 if a bound is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--cases", type=int, default=300, help="cases without packed units; a fifth as many with them"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write a record to this file")
    options = parser.parse_args(argv)
    record = new_record(TOOL, sys.argv[1:] if argv is None else argv) if options.json else dict[str, Any]()
    raw = [compare(make_case(options.seed, index)) for index in range(options.cases)]
    packed = [compare(make_case(options.seed, index, 300, True)) for index in range(options.cases // 5)]
    sessions = [compare_session(make_case(options.seed, index)) for index in range(options.cases)]
    record["cases"], record["packed_cases"], record["session_cases"] = raw, packed, sessions
    record["figures"] = _print_figures("Units that cross raw", raw)
    record["packed_figures"] = _print_figures("Units that may be packed", packed)
    record["session_figures"] = _print_figures("Tables of sessions", sessions)
    slowest = max((*raw, *packed, *sessions), key=lambda row: row["table_seconds"])
    print(
        f"slowest table: {slowest['table_seconds'] * 1e3:.0f} ms, {slowest['kind']}, {slowest['units']} units, "
        f"{slowest['uses']} uses"
    )
    record["tables"], late = [], False
    for count, kind, largest, bound in TABLES:
        for slots in (None, *REGIONS):
            seconds = table_seconds(count, kind, largest, slots)
            late |= seconds > bound
            what = kind if slots is None else f"{kind}, in a region of {slots} units"
            record["tables"].append(
                {"units": count, "kind": what, "seconds": round(seconds, 4), "bound": bound}
            )
            print(f"table of {count} units, {what}: {seconds * 1e3:.0f} ms (bound {bound * 1e3:.0f})")
    if options.json:
        write_record(record, options.json)
    within = all(
        round(whole["median"], 3) <= MEDIAN
        and whole["nine_of_ten"] <= NINE_OF_TEN
        and whole["worst"] <= WORST
        for whole in (record["figures"]["all"], record["session_figures"]["all"])
    )
    return int(late or not within)


if __name__ == "__main__":
    sys.exit(main())
