"""Measurement of the host time that Carom adds to a call of a block if the host limits the speed.

The difference is tens of microseconds in a call of hundreds. Two processes, or the same process two minutes later,
differ by more than that. Therefore one process alternates between plain and streamed runs. Each pair gives one
difference, and the median over the pairs is the figure.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from .case import Case
from .measure import synchronize

ROUNDS = 7


def host_time(case: Case, device: torch.device) -> dict[str, Any]:
    """Return the microseconds of wall time of a call of a block: plain, with Carom, and added by Carom (median over
    pairs).
    """
    from .dit import build, make_inputs
    from .peers import get_engine

    model = build(case)
    inputs = make_inputs(case, device)
    calls = case.depth * case.repeat
    taken: dict[str, list[float]] = {"none": [], "carom": []}
    for _ in range(ROUNDS):
        for name, seconds in taken.items():
            attached = get_engine(name).attach(model, case.but(engine=name), device)
            try:
                seconds.append(_per_step(_step(attached, case, inputs), case, device))
                report = attached.report()
            finally:
                attached.close()
    added = [c - n for n, c in zip(taken["none"], taken["carom"], strict=True)]
    each = {name: [1e6 * s / calls for s in seconds] for name, seconds in taken.items()}
    return {
        "plain_us": statistics.median(each["none"]),
        "carom_us": statistics.median(each["carom"]),
        "added_us": statistics.median(1e6 * s / calls for s in added),
        "pairs_us": each,
        "block_calls": calls,
        "transfers_per_weight": (report or {}).get("transfers_per_weight"),
    }


def _step(attached: Any, case: Case, inputs: tuple[torch.Tensor, ...]) -> Callable[[], Any]:
    if case.mode == "infer":
        return lambda: attached.infer(*inputs[:2])
    return lambda: attached.train(*inputs, lambda name: None)


def _per_step(step: Callable[[], Any], case: Case, device: torch.device) -> float:
    """Return the seconds of wall time of a step; host and device are idle before and after the timed steps."""
    for _ in range(case.warmup):
        step()
    synchronize(device)
    started = time.perf_counter()
    for _ in range(case.steps):
        step()
    synchronize(device)
    return (time.perf_counter() - started) / case.steps
