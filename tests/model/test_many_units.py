"""What is done for every module of thousands takes time proportional to their number."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import carom
import pytest
import torch
from carom.core.model.units import carve
from carom.core.plan.residency import UnitSize, Wish, plan_residency
from carom.core.session.rule_planner import Settings, decide
from tests_inside import inside
from torch import nn


def seconds(function: Callable[[], object]) -> float:
    began = time.process_time()
    function()
    return time.process_time() - began


def ratio(function: Callable[[int], object], few: int) -> float:
    """How much longer eight times as many take."""
    function(few)  # what is done once
    small = max(seconds(lambda: function(few)) for _ in range(2))
    return min(seconds(lambda: function(few * 8)) for _ in range(3)) / small  # (the least disturbed of three)


@pytest.mark.parametrize("packed", [False, True])
def test_a_plan_takes_time_in_proportion_to_the_units(packed):
    def plan(count: int) -> None:
        units = [UnitSize(str(i), 512 * (1 + i % 3), i % 7 == 0, i % 5 > 0, 256) for i in range(count)]
        plan_residency(units, 256 * count, 0, Wish(3, 4096), 512, range(count), packed)

    assert ratio(plan, 1000) < 24  # 64, were it quadratic


def test_carving_and_planning_take_time_in_proportion_to_the_modules():
    models = {count: nn.Sequential(*[nn.Linear(4, 4) for _ in range(count)]) for count in (400, 3200)}

    def plan(count: int) -> None:
        model = models[count].requires_grad_(False)
        _, found = decide(partial(carve, model), Settings(300 * count, "auto", None, {}), 512)
        assert found.resident and not found.all_resident

    assert ratio(plan, 400) < 20  # 64, were it quadratic


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        self.count = self.count + 1
        return self.layer(x)


def test_following_replaced_buffers_takes_time_in_proportion_to_them():
    sessions = {}
    for count in (100, 800):
        model = nn.Sequential(*[Counts() for _ in range(count)]).requires_grad_(False)
        sessions[count] = carom.stream(model, device="cpu", vram=2048 * count)

    def follow(count: int) -> None:
        live = sessions[count]
        for _ in range(800 // count):  # (as many of the few, so that a clock's steps do not count)
            for module in live.module:
                module.count = module.count + 1
            inside(live).manager.leaving()

    follow(100)
    try:
        assert min(seconds(lambda: follow(800)) for _ in range(3)) < 4 * seconds(lambda: follow(100))
    finally:
        for live in sessions.values():
            live.close()
