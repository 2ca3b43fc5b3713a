"""``codec="auto"`` chooses by the device's computing, the link and the decoder; the speed of the host does not matter."""

from __future__ import annotations

import carom
import pytest
import torch
from carom.benchmarks.engines.codec_choice import (
    BEFORE,
    DELAYS,
    HELD,
    HOST_SECONDS,
    WITHIN,
    Cell,
    Shape,
    row,
    run,
    simulated,
)
from carom.core.device.simulated import SimulatedEngine

BINDS, BALANCE, COMPUTES = (
    Shape(name, ((256,),) * 6, ratio, 10.0)
    for name, ratio in (("link", 6.0), ("both", 2.4), ("computing", 1.0))
)
SMALL = Shape("small blocks", ((128,),) * 8, 5.0, 10.0)


@pytest.mark.parametrize(
    ("shape", "train", "best"),
    [
        (BINDS, True, "lossless"), (BALANCE, False, "lossless"), (BALANCE, True, "lossless"), (COMPUTES, False, "raw"),
        (COMPUTES, True, "raw"), (SMALL, False, "lossless"), (SMALL, True, "lossless"),
    ],
    ids=lambda value: value.name if isinstance(value, Shape) else str(value),
)  # fmt: skip
def test_auto_is_within_three_percent_of_the_best_explicit_setting(shape, train, best):
    """The whole table: `python -m carom.benchmarks.engines.codec_choice`."""
    found = row(Cell(shape, 0.5, train), simulated(shape))
    assert found["ratio"] <= WITHIN < found["spread"], "a cell that does not tell shows nothing"
    assert found["chosen"] == found["best"] == best


@pytest.mark.parametrize(
    ("shape", "train"), [(BALANCE, False), (COMPUTES, False), (SMALL, True)],
    ids=["both", "computing", "small-train"],
)  # fmt: skip
def test_a_slower_host_does_not_turn_the_choice_round(shape, train):
    cell = Cell(shape, 0.5, train)

    def chosen(delay):
        host = simulated(shape, (1 + delay) * HOST_SECONDS)
        found = run(shape.model(train), cell, "auto", host, BEFORE + HELD, after=0)
        return found["codec"], found["predicted_seconds"]

    codec, seconds = chosen(0)
    for delay in DELAYS:
        slower = chosen(delay)
        assert slower[0] == codec
        assert slower[1] == pytest.approx(seconds, rel=0.01), "the host's delays are not among the times"


@pytest.mark.parametrize("codec", ["auto", "raw"])
def test_the_device_is_held_back_only_until_the_choice_between_packed_and_raw_is_made(codec, monkeypatch):
    held, hold, steps = [], SimulatedEngine.hold, 0
    monkeypatch.setattr(SimulatedEngine, "hold", lambda self, s: (held.append(steps), hold(self, s))[1])
    model, x = COMPUTES.model(train=False), torch.ones(16, COMPUTES.width, dtype=torch.bfloat16)
    slow = simulated(COMPUTES, 11 * HOST_SECONDS)
    with torch.no_grad(), carom.stream(model, device=slow, vram=COMPUTES.nbytes // 2, codec=codec) as session:
        for steps in range(14):  # noqa: B007 - `hold` reads it
            model(x)
        chosen = len(set(held))
        assert 0 < chosen <= HELD if codec == "auto" else not held
        session.park()
        for steps in range(14, 24):  # noqa: B007
            model(x)
        assert len(set(held)) == chosen, "a session that returns keeps its choice"
