"""The rows of a record's cases: each timed case with its roofline, and whether its bits are those of the resident run.

The module is pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .case import Case
from .processes import pooled
from .roofline import Roofline, roofline

HOST_BINDS = 0.9  # the host limits a resident run if its call takes this share of the step


def compare_fingerprints(mine: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """Return whether two fingerprints are equal bit for bit, and the largest difference between their samples."""
    pairs = list(zip(mine["sample"], reference["sample"], strict=False))
    return {
        "bit_exact": mine["sha256"] == reference["sha256"],
        "max_abs_diff_of_sample": max((abs(a - b) for a, b in pairs), default=0.0),
    }


@dataclass(frozen=True)
class CaseRow:
    """A timed case beside the others of its run.

    ``roofline``: None on a CPU, which computes and copies with the same cores; without the link and the resident run of
    the same shape; and for ai-toolkit with residents, which are linears chosen at random, of unknown size. ``of_roofline``: the step time divided by it. ``bit_exact``: whether the results are the resident
    run's; None if they were not compared. ``host_binds``: whether the host, and not the device, limits the resident run
    of the shape; the roofline then says nothing about the engine.
    """

    key: str
    case: Case
    roofline: Roofline | None
    of_roofline: float | None
    bit_exact: bool | None
    host_binds: bool


def rows(entries: list[dict[str, Any]]) -> list[CaseRow]:
    """Return one row for each timed case. `entries`: the cases of a record; entries of one key are pooled."""
    entries = pooled(entries)
    link = next((e["result"]["link_bytes_per_second"] for e in entries if _ok(e, "link")), None)
    resident = {_shape(e["case"]): e["result"] for e in entries if _ok(e) and e["case"]["engine"] == "none"}
    found = []
    for entry in entries:
        case, result = Case(**entry["case"]), entry["result"]
        if case.kind != "step":
            continue
        base = resident.get(_shape(entry["case"]))
        bound: Roofline | None = None
        random_residents = case.engine == "ai-toolkit" and case.resident > 0
        comparable = case.engine != "none" and case.device != "cpu" and not random_residents
        if link and base and "phases_ms" in base and comparable:
            bound = roofline(case, base, link, result.get("report"))
        share = result["ms_per_step"] / bound.ms if bound and "ms_per_step" in result else None
        row = CaseRow(entry["key"], case, bound, share, exactness(result, base), _host_binds(base))
        found.append(row)
    return found


def _host_binds(resident: dict[str, Any] | None) -> bool:
    """Return whether the host limited the resident run on a device that works beside it."""
    if not resident or not resident.get("kernel_ms"):
        return False
    return resident["host_ms_per_step"] >= HOST_BINDS * resident["ms_per_step"] and (
        sum(resident["kernel_ms"].values()) < HOST_BINDS * resident["ms_per_step"]
    )


def device_bytes(result: dict[str, Any]) -> int | None:
    """Return the peak device bytes: from the allocator, or from Carom's own count if the device is the host."""
    if result.get("peak_reserved_bytes") is not None:
        return result["peak_reserved_bytes"]
    return (result.get("report") or {}).get("vram_peak_bytes")


def exactness(result: dict[str, Any], base: dict[str, Any] | None) -> bool | None:
    """Return whether every fingerprint of `result` equals the resident run's; None if there is no fingerprint to
    compare.
    """
    mine = result.get("fingerprint")
    reference = (base or {}).get("fingerprint")
    if not mine or not reference or result is base:
        return None
    names = [name for name in reference if name != "passes_agree"]
    return all(compare_fingerprints(mine[name], reference[name])["bit_exact"] for name in names)


def _ok(entry: dict[str, Any], kind: str = "step") -> bool:
    return entry["case"]["kind"] == kind and entry["result"]["status"] == "ok"


def _shape(case: dict[str, Any]) -> tuple[Any, ...]:
    names = ("mode", "d", "depth", "tokens", "batch", "rank", "heads", "device", "adapter_dtype", "seed")
    return tuple(case[name] for name in names if not (name == "rank" and case["mode"] == "infer"))
