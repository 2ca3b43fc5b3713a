"""Rows of the records of `carom bench` and of the benchmark suite: engines on the diffusion transformer (DiT)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, fields
from typing import Any

from ..engines import case_rows
from ..engines.case import Case
from ..engines.case_rows import device_bytes, exactness
from .rows import Row, pooled, split

NO_OFFLOADING = "no offloading"
_DEFAULTS = {field.name: field.default for field in fields(Case) if field.default is not MISSING}
# Settings that say what is computed, not how an engine does it: the rows of a group agree in them.
_JOB = ("batch", "rank", "heads", "repeat", "adapter_dtype", "checkpoint", "seed")
# Settings that change neither the job nor the engine, or that stand in the words of a group or a case.
_SILENT = {
    "engine", "mode", "kind", "d", "depth", "tokens", "resident", "slots", "vram", "steps", "warmup", "device", "codec",
    "verify", "touch_bytes", "limit_s",
}  # fmt: skip


def rows(record: dict[str, Any]) -> list[Row]:
    """Return the rows of a record of engines. The processes of one case are pooled in one row."""
    entries = [entry for entry in record["cases"] if entry["case"]["kind"] != "touch"]
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for entry in entries:
        case = entry["case"]
        groups.setdefault(_names(case, entry["key"]), []).append(entry)
    floors = _floors(record)
    found = [_row(name, members, groups, floors) for name, members in groups.items()]
    return [row for row in found if row is not None]


def _row(
    name: tuple[str, ...],
    members: list[dict[str, Any]],
    groups: dict[tuple[str, ...], list[dict[str, Any]]],
    floors: dict[str, tuple[float | None, bool]],
) -> Row | None:
    group, case, metric, unit = name
    done = [entry["result"] for entry in members if entry["result"]["status"] == "ok"]
    measured = [_measured(result, metric) for result in done]
    if not done or None in measured:
        result = members[-1]["result"]
        words = f"{result['status']}: {result.get('reason') or 'no figure'}"
        return Row(group, case, metric, unit, note=words)
    first = done[0]
    row: dict[str, Any] = pooled(
        [value for value in measured if value is not None],
        [value for result in done for value in result.get("samples_ms", ())] if metric == "step" else (),
        [result["quartiles_ms"] for result in done if result.get("quartiles_ms")],
    )
    if metric != "step":
        return Row(group, case, metric, unit, **row)
    base = [
        entry["result"]
        for other, entries in groups.items()
        if other == (group, NO_OFFLOADING, metric, unit)
        for entry in entries
        if entry["result"]["status"] == "ok"
    ]
    if base and case != NO_OFFLOADING:
        samples = [value for result in base for value in result.get("samples_ms", ())]
        row |= {
            "base": pooled([result["ms_per_step"] for result in base], samples)["value"],
            "base_case": NO_OFFLOADING,
            "same_bits": _all(exactness(result, base[0]) for result in done),
        }
    report = first.get("report") or {}
    floor, host_binds = floors.get(members[0]["key"], (None, False))
    packed = report.get("resident_packed_units")
    notes = (
        f"{packed} units stay packed" if packed else "",
        "the host limits the run without offloading, so there is no roofline" if host_binds else "",
        split(report) if report.get("host_late_seconds") is not None else "",
    )
    return Row(
        group,
        case,
        metric,
        unit,
        **row,
        floor=floor,
        device_bytes=max((device_bytes(result) or 0 for result in done), default=0) or None,
        host_bytes=first.get("host_rss_bytes"),
        kernels=tuple((first.get("kernel_ms") or {}).items()),
        note="; ".join(filter(None, notes)),
    )


def _floors(record: dict[str, Any]) -> dict[str, tuple[float | None, bool]]:
    """Return by key the roofline of a case in ms, and whether there is none because the host limits the resident run.

    A record whose resident runs kept no kernel times has only the rooflines that it names itself: phases between events
    contain the gaps that a late host leaves.
    """
    found: dict[str, tuple[float | None, bool]] = {
        key: (one["ms"], False) for key, one in record.get("rooflines", {}).items()
    }
    if any(entry["result"].get("kernel_ms") for entry in record["cases"]):
        for row in case_rows.rows(record["cases"]):
            if row.roofline:
                found[row.key] = (None, True) if row.host_binds else (row.roofline.ms, False)
    return found


def _names(case: dict[str, Any], key: str) -> tuple[str, str, str, str]:
    """Return group, case, metric and unit of a case. `key`: its key in the record; the last word of a host-time case
    says what the blocks do.
    """
    if case["kind"] == "link":
        return "link", "pinned copy of one block", "rate", "GB/s"
    group = f"DiT, {case['depth']} blocks of width {case['d']}, {_mode(case)}, {case['tokens']} tokens"
    group += "".join(f", {_setting(case, name)}" for name in _JOB if _differs(case, name))
    if case["kind"] == "host":
        return group, f"Carom, blocks {key.rpartition('-')[2]}", "host time added to a call of a block", "us"
    if not case["steps"]:
        return group, _engine(case), "attaching", "s"
    return group, _engine(case), "step", "ms"


def _mode(case: dict[str, Any]) -> str:
    return "inference" if case["mode"] == "infer" else "LoRA training"


def _engine(case: dict[str, Any]) -> str:
    """Return the engine with its settings."""
    engine, parts = case["engine"], []
    if engine == "none":
        return NO_OFFLOADING
    if case.get("vram") is not None:
        parts.append(f"{case['vram'] / 1e9:.3g} GB budget")
    if case["resident"] or case.get("vram") is None:
        parts.append(f"{case['resident']} of {case['depth']} blocks resident")
    if engine == "carom":
        parts.append(case["codec"])
        engine = "Carom"
    if (engine == "Carom" and case.get("vram") is None) or _differs(case, "slots"):
        parts.append(f"{case['slots']} slots")
    others = (name for name in case if name not in _SILENT and name not in _JOB)
    parts += [_setting(case, name) for name in others if _differs(case, name)]
    return f"{engine}, {', '.join(parts)}"


def _differs(case: dict[str, Any], name: str) -> bool:
    unused = name in ("rank", "adapter_dtype", "checkpoint") and case["mode"] == "infer"
    return name in case and not unused and case[name] != _DEFAULTS.get(name)


def _setting(case: dict[str, Any], name: str) -> str:
    return f"{name.replace('_', ' ')} {case[name]}"


def _measured(result: dict[str, Any], metric: str) -> float | None:
    if metric == "rate":
        return result["link_bytes_per_second"] / 1e9
    if metric == "attaching":
        return result.get("attach_seconds")
    if metric == "step":
        return result.get("ms_per_step")
    return result.get("added_us")


def _all(verdicts: Iterator[bool | None]) -> bool | None:
    """Return whether all verdicts that are known hold; None if none is known."""
    known = [verdict for verdict in verdicts if verdict is not None]
    return all(known) if known else None
