"""What is learnt of a module lives with it: a table is made once for an order, units and a region, and a changed order costs
faults in one pass.

A table is a schedule of fetches for an order of uses. A fault is a use of a unit that is not on the device and not on its
way there.
"""

from __future__ import annotations

import random

import carom
import pytest
import torch
from carom.core.device.pool import Pool
from carom.core.streaming import unit_schedules
from tests_inside import inside
from tests_limits import units_apart_from
from torch import nn

WIDTH, DEPTH = 32, 12
X = torch.linspace(-1, 1, 2 * WIDTH).reshape(2, WIDTH)
UNIT = sum(t.nbytes for t in nn.Linear(WIDTH, WIDTH).parameters()) + 1024


class Steered(nn.Module):
    """Blocks of which a call may leave out some, as samplers do with some layers, or with a control network."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.requires_grad_(False)

    def forward(self, x, order=range(DEPTH)):
        for index in order:
            x = x + torch.tanh(self.blocks[index](x))
        return x


class Counted:
    """A session of one model. ``tables``: how many were made; ``faults``: how many uses found no unit."""

    def __init__(self, monkeypatch) -> None:
        self.net, self.twin = Steered(), Steered()
        self.tables = self.faults = 0
        make, enter = unit_schedules.schedule_in_region, Pool.enter

        def made(*arguments):
            self.tables += 1
            return make(*arguments)

        def entered(pool, *arguments):
            slot = enter(pool, *arguments)
            self.faults += slot is None
            return slot

        monkeypatch.setattr(unit_schedules, "schedule_in_region", made)
        monkeypatch.setattr(Pool, "enter", entered)

    def stream(self, slots: float):
        return carom.stream(
            self.net,
            device=carom.SimulatedDevice(),
            vram=int(slots * UNIT),
            codec="raw",
            granularity="layer",
        )

    def call(self, order=range(DEPTH), train: bool = False) -> int:
        """Call the model once, and train it if ``train``. Return the number of faults."""
        before, x = self.faults, X.clone().requires_grad_(train)
        want, got = self.twin(x, order), self.net(x, order)
        assert torch.equal(want, got)
        if train:
            assert torch.equal(*(torch.autograd.grad(y.sum(), x)[0] for y in (want, got)))
        return self.faults - before


@pytest.fixture
def counted(monkeypatch) -> Counted:
    units_apart_from(monkeypatch)
    monkeypatch.setattr("carom.core.session.rule_planner.SMALL_UNIT", 1)
    return Counted(monkeypatch)


def without(session, *places: int) -> list[int]:
    """All blocks without those units of the streamed ones that lie at ``places``."""
    streamed = [int(unit.name.rpartition(".")[2]) for unit in inside(session).streamed]
    left_out = {streamed[place] for place in places}
    return [index for index in range(DEPTH) if index not in left_out]


def test_a_return_to_the_device_to_a_budget_and_to_a_session_makes_no_table_again(counted):
    with counted.stream(5) as session:
        counted.call()
        made = counted.tables
        assert made
        session.park()
        counted.call()
        assert counted.tables == made, "after a park"
        session.set_budget(vram=int(8 * UNIT))
        counted.call()
        other = counted.tables
        assert other > made
        for slots in (5, 8, 5):
            session.set_budget(vram=int(slots * UNIT))
            counted.call()
        assert counted.tables == other, "after a change of the budget and back"
    with counted.stream(5):
        counted.call()
    assert counted.tables == other, "in another session"


def test_a_changed_order_costs_faults_in_one_pass_and_the_way_back_none_beyond_the_change(counted):
    with counted.stream(5) as session:
        fewer = without(session, 2, 5)
        for _ in range(3):
            counted.call()
        assert counted.call(fewer) > 2
        assert counted.call(fewer) <= 1  # its table begins with a unit that nobody fetched ahead
        assert [counted.call(fewer) for _ in range(3)] == [0, 0, 0]
        made = counted.tables
        for _ in range(3):
            assert counted.call() <= 2, (
                "the order was known, and only what its table fetched before is missing"
            )
            assert [counted.call() for _ in range(3)] == [0, 0, 0]
            assert counted.call(fewer) <= 2
            assert [counted.call(fewer) for _ in range(2)] == [0, 0]
        assert counted.tables == made


@pytest.mark.parametrize("turn", ["ab", "aba", "aab"])
def test_orders_in_turns_are_foreseen(turn, counted):
    with counted.stream(5) as session:
        orders = {"a": range(DEPTH), "b": without(session, 2, 5)}
        for name in turn * 4:
            counted.call(orders[name])
        made = counted.tables
        assert [counted.call(orders[name]) for name in turn * 3] == [0] * 3 * len(turn)
        assert counted.tables == made


def test_a_fetch_to_a_place_that_is_still_in_use_is_made_up_for_at_the_next_use(counted):
    kept = []

    class Kept(nn.Linear):
        """Its weights are kept until the next block begins."""

        def forward(self, x):
            kept[:] = [self.weight]
            return super().forward(x)

    for block in counted.net.blocks:
        block.__class__ = Kept
    with counted.stream(5), torch.no_grad():
        for _ in range(3):
            counted.call()
        assert [counted.call() for _ in range(3)] == [0, 0, 0]
        kept.clear()


def test_training_and_inference_keep_a_table_each(counted):
    with counted.stream(5):
        for train in (False, True):
            for _ in range(3):
                counted.call(train=train)
        made = counted.tables
        for count in (3, 5, 2):
            for train in (False, True):
                assert counted.call(train=train) <= 2
                assert [counted.call(train=train) for _ in range(count)][1:] == [0] * (count - 1)
        assert counted.tables == made


def test_known_orders_are_known_after_a_park_and_in_the_next_session(counted):
    with counted.stream(5) as session:
        fewer = without(session, 2, 5)
        for order in (range(DEPTH), fewer):
            for _ in range(3):
                counted.call(order)
        made = counted.tables
        session.park()
        for order in (range(DEPTH), fewer):
            assert counted.call(order) <= 3
    with counted.stream(5):
        assert counted.call(fewer) <= 3 and counted.call() <= 3
    assert counted.tables == made


def test_the_last_pass_before_a_park_is_known_after_it(counted):
    with counted.stream(5) as session:
        fewer = without(session, 2, 5)
        for order in (range(DEPTH), range(DEPTH), fewer):
            counted.call(order)
        session.park()
        counted.call()
        assert counted.call(fewer) <= 1


@pytest.mark.parametrize("seed", range(3))
def test_calls_in_no_order_make_few_tables(seed, counted):
    chance = random.Random(seed)
    with counted.stream(5) as session:
        orders = [range(DEPTH), without(session, 2, 5), without(session, 0), list(reversed(range(DEPTH)))]
        for order in orders * 2:
            counted.call(order)
        found = [counted.call(chance.choice(orders)) for _ in range(60)]
        streamed = len(inside(session).streamed)
        assert sum(found) / len(found) <= 3 < streamed
        assert counted.tables <= 8, "one for each order, and for the turns that came twice"


class Noting(nn.Linear):
    """Notes when it computes."""

    def forward(self, x):
        self.events.append("computes")
        return super().forward(x)


def test_the_fetches_of_a_known_order_begin_before_its_first_unit_computes(monkeypatch):
    net, events, ways = Steered(), [], (range(DEPTH), range(DEPTH - 1, -1, -1))
    for block in net.blocks:
        block.__class__, block.events = Noting, events
    with torch.no_grad(), carom.stream(
        net, device=carom.SimulatedDevice(), vram=4 * UNIT, granularity="layer", codec="raw"
    ) as session:  # fmt: skip
        for way in (*ways, *ways, ways[1]):
            net(X, way)
        store = inside(session).streamer.store
        fetch = store.fetch
        monkeypatch.setattr(store, "fetch", lambda *args: (events.append("fetch"), fetch(*args))[1])
        events.clear()
        net(X, ways[0])
    assert events[:3] == ["fetch", "fetch", "computes"], "of the first unit, and of one that is used later"
