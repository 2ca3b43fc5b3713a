"""`make_report`: collects a session's figures in a `Report`. `describe`: describes a plan in one sentence.

Residents are units (groups of weights) that stay on the device. Slots are the device memory through which the
other units stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..common.sizes import format_size
from ..host.arena import HostArena
from ..metrics.report import Report, UnitPlace
from ..metrics.step_figures import Medians
from ..model.units import Carving, Entry
from ..plan.residency import Plan
from .layout import Layout

PACKED = "packed on the device, unpacked at each use"


@dataclass(frozen=True)
class Held:
    """The device memory that a session holds, in bytes.

    ``budget_bytes``: the budget.
    ``peak_bytes``: the most bytes of the budget that were held.
    ``slot_bytes``: the slot region now.
    ``staging_bytes``: the staging buffer now.
    ``pooled_bytes``: residents in a comfy-aimdo pool.
    ``pool``, ``pool_reason``: the pool in use ("torch" or "aimdo"), and the reason for that choice.
    """

    budget_bytes: int
    peak_bytes: int
    slot_bytes: int
    staging_bytes: int = 0
    pooled_bytes: int = 0
    pool: str = "torch"
    pool_reason: str = ""
    packed_bytes: int = 0  # packed bytes of the units that stay on the device packed
    packed_raw_bytes: int = 0  # bytes of these units when unpacked
    packed_units: int = 0  # the number of these units


def stall_share(layout: Layout) -> float | None:
    """Return the share of the last measured steps' seconds in which computing waited for weights.

    Returns None if nothing was measured. The call does not wait for the device.
    """
    with layout.runner.lock:
        found = layout.meter.medians()
    if not found.seconds or found.stall_seconds is None:
        return None
    return found.stall_seconds / found.seconds


def make_report(
    held: Held, layout: Layout, arena: HostArena, device: str, notes: tuple[str, ...] = ()
) -> Report:
    """Return the report on the steps so far under ``layout``. Waits for the device.

    ``held``: the device bytes.
    ``arena``: the session's host memory.
    ``device``: the engine's name.
    ``notes``: notes on the device.
    """
    carving, plan, placement, meter = layout.carving, layout.plan, layout.placement, layout.meter
    with layout.runner.lock:
        meter.finish()
    tier = placement.tier.figures()
    disk = tier.read
    disk_rate = disk.read_bytes / disk.reading_seconds if disk and disk.reading_seconds > 0 else None
    figures = meter.medians(disk_rate)
    stages = _stages(figures, disk_rate)
    packed = {id(unit.unit) for unit in placement.streamed if unit.on_device}
    places = tuple(
        UnitPlace(unit.name, unit.raw_bytes, bool(reason), reason)
        for index, unit in enumerate(carving.units)
        for reason in (plan.resident.get(index, PACKED if id(unit) in packed else ""),)
    )
    need = tuple(UnitPlace(entry.name, entry.nbytes, True, reason) for entry, reason in carving.resident)
    count = len(carving.units) - len(plan.resident) - held.packed_units
    return Report(
        vram_budget_bytes=held.budget_bytes,
        vram_peak_bytes=held.peak_bytes,
        resident_bytes=placement.resident_bytes + held.pooled_bytes + held.packed_bytes,
        resident_packed_bytes=held.packed_bytes,
        resident_packed_raw_bytes=held.packed_raw_bytes,
        resident_packed_units=held.packed_units,
        slot_bytes=held.slot_bytes,
        pinned_bytes=arena.pinned_bytes,
        pinned_peak_bytes=arena.pinned_peak_bytes,
        raw_bytes_per_step=figures.raw_bytes,
        wire_bytes_per_step=figures.wire_bytes,
        peer_bytes=tier.peer_bytes,
        peer_wire_bytes_per_step=figures.peer_bytes,
        transfers_per_weight=figures.transfers / count if count else 0.0,
        step_seconds=figures.seconds,
        compute_seconds=figures.compute_seconds,
        stall_seconds=figures.stall_seconds,
        roofline_seconds=figures.roofline_seconds,
        **_split(figures),
        predicted_seconds=plan.predicted_seconds,
        hidden_fraction=figures.hidden_fraction,
        link_bytes_per_second=figures.link_bytes_per_second,
        units=len(carving.units),
        resident_by_choice=tuple(place for place in places if place.resident),
        resident_by_need=need,
        adapter_bytes=placement.adapter_bytes,
        streamed_bytes=tier.streamed_bytes - held.packed_raw_bytes,
        waiting_bytes=tier.waiting_bytes,
        staging_bytes=held.staging_bytes,
        packed_units=tier.packed_units,
        decode_seconds=figures.decode_seconds,
        effective_link_bytes_per_second=_effective(figures),
        # Where host and device are one memory, no copy is slower for being from pageable memory.
        pageable_bytes=0 if device.startswith(("cpu", "mps")) else arena.pageable_bytes,
        steps=figures.steps,
        device=device,
        pool=held.pool,
        pool_reason=held.pool_reason,
        kind="train" if figures.train else "infer",
        notes=(*notes, *arena.notes, *placement.notes, *placement.tier.notes, *(disk.notes if disk else ())),
        ram_budget_bytes=disk.ram_budget_bytes if disk else 0,
        ram_peak_bytes=disk.ram_peak_bytes if disk else 0,
        disk_bytes_per_step=figures.disk_bytes,
        disk_wait_seconds=disk.wait_seconds if disk else 0.0,
        disk_bytes_per_second=disk_rate,
        link_seconds=stages.get("link"),
        disk_seconds=stages.get("disk"),
        bound_by="host" if figures.host_bound else max(stages, key=lambda stage: stages[stage], default=""),
        spans=meter.spans(),
        places=places,
    )


def _split(figures: Medians) -> dict[str, Any]:
    """Return the report's fields on the parts of a step; empty if nothing was measured."""
    split = figures.split
    if split is None:
        return {}
    return {
        "kernel_seconds": sum(split.kernel_seconds),
        "host_late_seconds": split.host_late_seconds,
        "gap_seconds": split.gap_seconds if split.source == "profiler" else None,
        "decode_contention_seconds": None
        if split.contention_seconds is None
        else sum(split.contention_seconds),
        "kernel_source": split.source,
    }


def _effective(figures: Medians) -> float | None:
    """Return the effective rate of the link: unpacked bytes of weights per second of copying. Returns None if
    nothing was measured.
    """
    if figures.link_bytes_per_second is None or not figures.wire_bytes:
        return None
    crossed = figures.wire_bytes + figures.peer_bytes
    return figures.link_bytes_per_second * figures.raw_bytes / crossed


def _stages(figures: Medians, disk_rate: float | None) -> dict[str, float]:
    """Return the seconds of a step that each stage ("compute", "link", "disk") would take by itself.

    The stage with the most seconds is the bottleneck. The result is empty if nothing was measured.
    """
    if figures.compute_seconds is None:
        return {}
    stages = {"compute": figures.compute_seconds}
    if figures.link_bytes_per_second:
        stages["link"] = figures.wire_bytes / figures.link_bytes_per_second
    if disk_rate:
        stages["disk"] = figures.disk_bytes / disk_rate
    return stages


def training_note(untrained: list[Entry], carving: Carving, gradients: bool) -> list[str]:
    """Return a note for the report on weights that require gradients and do not fit into the budget.

    ``untrained``: those that count as frozen. ``gradients``: whether a forward has recorded gradients.
    """
    if untrained:
        size = format_size(sum(entry.nbytes for entry in untrained))
        return [
            f"{len(untrained)} weights ({size}) require gradients, but no forward has recorded any: they are laid out and packed "
            "as frozen weights are, and the first forward that records gradients lays them out for training "
            "(training='stream' does so at once)"
        ]
    if gradients and any(entry.trainable for unit in carving.units for entry in unit.entries):
        return [
            "a forward recorded gradients, so weights that require gradients are laid out for training: they cross as they "
            "are, and their gradients arrive in host memory (run inference under torch.no_grad())"
        ]
    return []


def describe(plan: Plan, units: int, device: str) -> str:
    """Return ``plan`` described in one sentence; ``units``: the number of units, ``device``: the engine's name."""
    budget = format_size(plan.vram_budget_bytes)
    if plan.all_resident:
        return f"all {units} units fit into {budget} and stay on {device}"
    stay = len(plan.resident) + len(plan.packed)
    packed = f" ({len(plan.packed)} of them packed)" if plan.packed else ""
    return (
        f"{units - stay} of {units} units stream through {plan.slots} slots "
        f"({format_size(plan.region_bytes)}) on {device}, {stay} stay{packed}; budget {budget}"
    )
