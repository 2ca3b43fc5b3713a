"""Random problems for schedules, a slow reference that knows single blocks of the region, and predictions of steps."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from carom.core.plan.predict import Link, Prediction, Workload, predict
from carom.core.plan.region import ALIGN
from carom.core.plan.schedule import Schedule, Times, UnitCost, UseOrder, Way
from carom.core.plan.schedule_ways import least_capacity, prefix_costs
from carom.core.session.measured_planner import fetches_of_step
from hypothesis import strategies as st

RATE = 1e9
GRAIN = ALIGN


def forward(count):
    return UseOrder(tuple(range(count)))


def there_and_back(count, groups=(), updates=frozenset({0})):
    work = Workload(tuple(range(count)), (1.0,) * count, (2.0,) * count, groups)
    return UseOrder(tuple(use.unit for use in work.uses()), updates=updates)


@st.composite
def nested(draw, count):
    """Blocks of one or two units that are used inside the use of another one."""
    uses, ends, unit = [], [], 0
    while unit < count:
        inside = min(draw(st.integers(0, 2)), count - unit - 1)
        begin = len(uses)
        uses += range(unit, unit + inside + 1)
        ends += [begin + inside, *range(begin + 1, begin + inside + 1)]
        unit += inside + 1
    return UseOrder(tuple(uses), tuple(ends))


@st.composite
def orders(draw, count):
    kind = draw(st.sampled_from(["forward", "train", "checkpointed", "groups", "turns", "nested", "any"]))
    half = count // 2
    if kind == "forward":
        return forward(count)
    if kind == "train":
        return there_and_back(count)
    if kind == "checkpointed":
        return there_and_back(count, tuple((unit,) for unit in range(count)))
    if kind == "groups":
        return there_and_back(count, (tuple(range(half)), tuple(range(half, count))))
    if kind == "nested":
        return draw(nested(count))
    if kind == "turns":
        first, second = tuple(range(half)), tuple(range(half, count))
        return UseOrder(first * draw(st.integers(1, 3)) + second * draw(st.integers(1, 3)))
    uses = tuple(draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=3 * count)))
    return UseOrder(uses, updates=frozenset(draw(st.sets(st.integers(0, len(uses) - 1), max_size=2))))


@st.composite
def problems(draw, most=12):
    """Arguments of `make_schedule`: blocks of up to 12 times `ALIGN` bytes, some trainable, some that can be packed."""
    count = draw(st.integers(2, most))
    blocks = draw(st.sampled_from([st.integers(1, 12), st.just(4), st.sampled_from([2, 6])]))
    units = []
    for _ in range(count):
        nbytes = draw(blocks) * ALIGN - draw(st.sampled_from([0, 0, 7]))
        trainable = draw(st.sampled_from([False, False, True]))
        packed = 0 if trainable else draw(st.sampled_from([0, int(0.7 * nbytes)]))
        units.append(UnitCost(nbytes, packed, trainable))
    order = draw(orders(count))
    least, most_bytes = least_capacity(order, units, GRAIN), prefix_costs(range(count), units, GRAIN)[-1]
    capacity = least + int((most_bytes - least) * draw(st.floats(0, 1.1)))
    factor = draw(st.sampled_from([0.01, 0.5, 1.0, 3.0]))
    seconds = tuple(units[unit].nbytes / RATE * factor for unit in order.uses)
    decoder = draw(st.sampled_from([None, 2 * RATE, 20 * RATE]))
    return order, tuple(units), capacity, Times(Link(RATE, 1e-7), seconds, decoder), GRAIN


class Broken(Exception):
    """The reference found that the table does not work."""


def replay_blocks(schedule: Schedule) -> list[int]:
    """Replay the table over single blocks of the region; return the units fetched in each cycle once it repeats.

    Raises `Broken` where a unit is used that is not wholly there, or with old weights, or is overwritten in use.
    """
    order, units = schedule.order, schedule.units
    blocks = [(-1, 0)] * -(-schedule.region_bytes // ALIGN)  # unit and version of what lies in each block
    version = [0] * len(units)
    fetched: list[int] = []
    open_uses: list[tuple[int, int]] = []

    def place(unit):
        first = schedule.offsets[unit] // ALIGN
        return range(first, first + -(-units[unit].nbytes // ALIGN))

    def fetch(unit, counted=True):
        for block in place(unit):
            if any(blocks[block][0] == user for _, user in open_uses):
                raise Broken(f"{unit} overwrites what is in use")
            blocks[block] = unit, version[unit]
        if counted:
            fetched.append(unit)

    for cycle in range(3):
        if cycle == 2:
            fetched.clear()
        for position, unit in enumerate(order.uses):
            if position in order.updates:
                version = [number + units[index].trainable for index, number in enumerate(version)]
            for other in schedule.before.get(position, ()):
                fetch(other)
            open_uses = [use for use in open_uses if use[0] >= position]
            if schedule.ways[unit] is not Way.CACHED_RAW:
                if any(blocks[block] != (unit, version[unit]) for block in place(unit)):
                    if cycle:
                        raise Broken(f"{unit} is not there at {position}")
                    fetch(unit, counted=False)
                open_uses.append((order.end(position), unit))
            open_uses = [use for use in open_uses if use[0] > position]
            for other in schedule.after[position]:
                fetch(other)
    return fetched


def predicted(
    sizes: Sequence[int],
    resident: Collection[int],
    region_bytes: int,
    work: Workload,
    link: Link,
    **options: Any,
) -> Prediction:
    """Predict a step with the fetches of a session's schedule. The arguments are those of `predict`."""
    fetches = fetches_of_step(work, sizes, resident, region_bytes)
    return predict(sizes, resident, region_bytes, work, link, fetches, **options)
