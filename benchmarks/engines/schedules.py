"""Predicted seconds of schedules beside those of the planner and the prefetcher, over random cases. It needs no GPU.

    python -m carom.benchmarks.engines.schedules [--cases 300] [--seed 0] [--json FILE]

A case is a set of 24 to 1,000 units of 1 to 700 MiB, a budget between the least one and all of them, a link, and an order
of uses: inference, training, training with activation checkpointing, two models in turns, two models interleaved (as a
control network and its model), or a prompt (text encoder, two models for some steps each, decoder). `make_schedule` and
`check_schedule` make and check its table; `predict_schedule` predicts the seconds of a cycle. The base is what today's
engine does: the plan of `plan_residency` with the region that the rule wishes for, and `predict`, which replays the
prefetcher. Both predictions describe the same machine, with one link and one stream.

A second table has cases with a decoder, where units may be packed: the base is the better one of today's plans without
and with packed units. The times of making a table are those of the process, the least of three.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.common.errors import BudgetError
from ...core.common.sizes import MIB
from ...core.plan.predict import Link, PackedTransfer, Use, Workload, predict
from ...core.plan.residency import UnitSize, Wish, least_budget, plan_residency, resident_cost, round_up
from ...core.plan.schedule import Times, UnitCost, UseOrder
from ...core.plan.schedule_check import check_schedule
from ...core.plan.schedule_maker import make_schedule
from ...core.plan.schedule_seconds import predict_schedule
from .record import new_record, write_record

TOOL = "carom schedules"
KINDS = ("inference", "training", "checkpointed training", "two models in turns", "interleaved", "prompt")
MEDIAN, NINE_OF_TEN, WORST = 1.0, 1.03, 1.15  # bounds of the seconds over today's
PACKED_SHARE = 0.69  # packed bytes over raw ones, as of bfloat16 weights
ALIGN = 512
# Tables whose time is measured: units, kind of order, the largest unit in MiB, bound in seconds.
TABLES = (
    (1000, "inference", 200, 0.05),
    (1000, "training", 200, 0.05),
    (1000, "checkpointed training", 200, 0.05),
    (10000, "inference", 2, 1.0),
)


@dataclass(frozen=True)
class ScheduleCase:
    """A problem for both planners. ``uses``: (unit, seconds) in order; ``slots``: the slots that today's rule wishes for."""

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


def seconds_today(case: ScheduleCase) -> float:
    """Return the predicted seconds of a cycle with today's plans, the better one if units may be packed."""
    sizes, wish = list(case.sizes), Wish(case.slots)
    work = _Cycle(
        tuple(range(len(sizes))),
        (1.0,) * len(sizes),
        cycle=tuple(Use(unit, seconds) for unit, seconds in case.uses),
    )
    units = [UnitSize(str(unit), size, packed=case.packed(size)) for unit, size in enumerate(sizes)]
    plan = plan_residency(units, case.capacity, wish=wish)
    best = predict(sizes, plan.resident, plan.region_bytes, work, case.link, steps=2).seconds
    rate = case.decode_bytes_per_second
    if rate is None:
        return best
    try:
        staging = round_up(2 * max(unit.packed for unit in units))
        plan = plan_residency(units, case.capacity - staging, wish=wish, packed=True)
    except BudgetError:
        return best
    packed = {
        unit: PackedTransfer(0 if unit in plan.packed else units[unit].packed, size / rate)
        for unit, size in enumerate(sizes)
        if unit not in plan.resident
    }
    found = predict(sizes, plan.resident, plan.region_bytes, work, case.link, steps=2, packed=packed)
    return min(best, found.seconds)


def compare(case: ScheduleCase) -> dict[str, Any]:
    """Make, check and predict the schedule of ``case``; return its figures beside today's."""
    problem = case.problem()
    begin = time.process_time()
    schedule = make_schedule(*problem)
    made = time.process_time() - begin
    check_schedule(schedule)
    today, seconds = seconds_today(case), predict_schedule(schedule, problem[-1]).seconds
    return {
        "kind": case.kind,
        "units": len(case.sizes),
        "uses": len(case.uses),
        "budget_share": round(case.capacity / sum(case.sizes), 3),
        "seconds": seconds,
        "today_seconds": today,
        "computing_seconds": sum(seconds for _, seconds in case.uses),
        "transfers": schedule.transfers,
        "table_seconds": round(made, 4),
    }


def figures(rows: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Return the median, the value that nine of ten do not exceed, and the worst of the seconds over today's."""
    ratios = sorted(row["seconds"] / row["today_seconds"] for row in rows)
    nine = ratios[math.ceil(0.9 * len(ratios)) - 1]
    return {
        "count": len(ratios),
        "median": statistics.median(ratios),
        "nine_of_ten": nine,
        "worst": ratios[-1],
    }


def table_seconds(count: int, kind: str, largest: int) -> float:
    """Return the seconds that a table of ``count`` units of up to ``largest`` MiB takes, the least of three."""
    chance = random.Random(count)
    sizes = [chance.randint(MIB // ALIGN, largest * MIB // ALIGN) * ALIGN for _ in range(count)]
    uses, phases = _uses(chance, kind, [size / 50e9 for size in sizes])
    case = ScheduleCase(kind, tuple(sizes), uses, phases, 2, sum(sizes) // 3, Link(25e9))
    problem = case.problem()

    def once() -> float:
        begin = time.process_time()
        make_schedule(*problem)
        return time.process_time() - begin

    return min(once() for _ in range(3))


def _print_figures(title: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Print the figures of ``rows``, by kind and of all, and return them."""
    print(f"{title}: seconds over today's\n{'':24} cases  median  9 of 10   worst")
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
    record["cases"], record["packed_cases"] = raw, packed
    record["figures"] = _print_figures("Units that cross raw", raw)
    record["packed_figures"] = _print_figures("Units that may be packed", packed)
    slowest = max((*raw, *packed), key=lambda row: row["table_seconds"])
    print(
        f"slowest table: {slowest['table_seconds'] * 1e3:.0f} ms, {slowest['kind']}, {slowest['units']} units, "
        f"{slowest['uses']} uses"
    )
    record["tables"], late = [], False
    for count, kind, largest, bound in TABLES:
        seconds = table_seconds(count, kind, largest)
        late |= seconds > bound
        record["tables"].append({"units": count, "kind": kind, "seconds": round(seconds, 4), "bound": bound})
        print(f"table of {count} units, {kind}: {seconds * 1e3:.0f} ms (bound {bound * 1e3:.0f})")
    if options.json:
        write_record(record, options.json)
    whole = record["figures"]["all"]
    within = (
        round(whole["median"], 3) <= MEDIAN
        and whole["nine_of_ten"] <= NINE_OF_TEN
        and whole["worst"] <= WORST
    )
    return int(late or not within)


if __name__ == "__main__":
    sys.exit(main())
