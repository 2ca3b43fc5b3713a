"""Decides whether the ranks of a machine fetch weights together (`Gather`), by a measurement on all of them."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from ..common.errors import GroupError
from ..common.sizes import MIB
from ..device.engine import Engine
from ..host.node_group import NodeGroup
from ..placement.fetch_order import WHOLE, FetchOrder
from ..placement.gather import Gather
from .assembly import Parts
from .layout import Layout

_SAMPLE = 64 * MIB  # most bytes that are copied to measure
_REPEATS = 3
_WORTH = 0.95  # gathering is chosen if it takes at most this share of the time of whole copies


def begin(parts: Parts, node: NodeGroup) -> str:
    """Let the ranks of ``node`` fetch weights together if that is faster than each on its own, and return a note.

    To be called on all ranks at once, before the first layout. If they fetch together, all get the smallest of their
    VRAM budgets, and their layouts stay as they are.
    """
    manager, image = parts.manager, parts.manager.host.image
    assert image is not None
    alone = node.size < 2 or not node.whole
    if alone or not image.complete or not node.all(_possible(parts.engine)):
        return ""
    if not node.all(os.environ.get(WHOLE) != "0"):
        return f"each rank copies whole units, because the environment variable {WHOLE} is 0"
    order = FetchOrder(node.exchange_numbers, node.rank)
    gather = Gather(parts.engine, node.device_group(parts.engine.device), node.rank, node.size, order)
    image.pin(manager.host.arena)  # copies from memory that is not pinned have another rate
    sample = image.sample(_SAMPLE)
    whole, together = measure(parts.engine, node, sample, gather)
    rates = [f"{sample.numel() / seconds / 1e9:.3g} GB/s" for seconds in (whole, together)]
    if together > _WORTH * whole:
        return f"each rank copies whole units: {rates[0]}, and {rates[1]} if the ranks gathered them"
    manager.host.gather = gather
    manager.leave_vbars("the ranks of a group gather weights in torch's memory only")
    parts.memory.end()  # the budget no longer follows the device's memory
    parts.policies.stop()
    parts.ledger.set(min(node.exchange(parts.ledger.vram, "comparing VRAM budgets")))
    return f"each rank copies a part of each unit, and the ranks gather it: {rates[1]}, and {rates[0]} with whole copies"


def require_equal(node: NodeGroup, layout: Layout) -> None:
    """Raise GroupError on all ranks unless their layouts are equal, as gathering requires."""
    plan, units = layout.plan, layout.carving.units
    streamed = [(unit.name, unit.nbytes) for index, unit in enumerate(units) if index not in plan.resident]
    layouts = node.exchange(
        (streamed, plan.region_bytes, plan.staging_bytes, sorted(plan.packed)), "comparing layouts"
    )
    if any(other != layouts[0] for other in layouts):
        raise GroupError(
            "carom.stream(group=...): the ranks fetch weights together, and their layouts differ; use the same devices, "
            "settings and adapters on all ranks, or set vram to bytes"
        )


def measure(engine: Engine, node: NodeGroup, source: torch.Tensor, gather: Gather) -> tuple[float, float]:
    """Return the seconds in which each rank has all of ``source`` (uint8, host memory) on its device: by a copy of the
    whole, and by a copy of its part and an all-gather.

    All ranks copy at the same time. Both times are those of the slowest rank.
    """
    target = node.together("measuring links", lambda: engine.allocate(source.numel()))
    parts = gather.parts(source.numel())

    def whole() -> Any:
        return engine.copy_in(target, source, (), False)[0]

    def together() -> Any:
        event: Any = None
        for start, end in parts.spans(source.numel()):
            event, _ = engine.copy_in(target[start:end], source[start:end], (), False)
        return gather.run(parts, target, event, "the measurement of links")

    times = []
    for run in (whole, together):
        found = []
        for _ in range(1 + _REPEATS):  # the first run also sets up NCCL's channels
            node.exchange(None, "measuring links")
            began = time.perf_counter()
            engine.synchronize(run())
            found.append(max(node.exchange(time.perf_counter() - began, "measuring links")))
        times.append(sorted(found[1:])[_REPEATS // 2])
    return times[0], times[1]


def _possible(engine: Engine) -> bool:
    """Return whether the device has a link to measure."""
    return engine.device.type == "cuda"
