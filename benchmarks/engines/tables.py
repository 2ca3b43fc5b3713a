"""The rows, tables and chart of a record's cases, computed from plain data. GB are 10^9 bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .case import Case
from .processes import pooled
from .roofline import Roofline, roofline

HEADERS = (
    "mode",
    "tokens",
    "resident",
    "engine",
    "ms/step",
    "quartiles",
    "kernels",
    "x roofline",
    "device GB",
    "host GB",
    "exact",
)
HOST_BINDS = 0.9  # the host limits a resident run if its call takes this share of the step
REASON = 70  # characters of a reason that a table shows; the record has the whole text


def compare_fingerprints(mine: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """Return whether two fingerprints are equal bit for bit, and the largest difference between their samples."""
    pairs = list(zip(mine["sample"], reference["sample"], strict=False))
    return {
        "bit_exact": mine["sha256"] == reference["sha256"],
        "max_abs_diff_of_sample": max((abs(a - b) for a, b in pairs), default=0.0),
    }


def rows(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row for each timed case, with its roofline and exactness as far as the same run allows.

    `entries`: the cases of a record; entries of one key are pooled. The roofline needs the link and the resident run of
    the same shape; without these its fields are None. `host_binds`: whether the host, and not the device, limits the
    resident run of the shape, so that the roofline says nothing about the engine.
    """
    entries = pooled(entries)
    link = next((e["result"]["link_bytes_per_second"] for e in entries if _ok(e, "link")), None)
    resident = {_shape(e["case"]): e["result"] for e in entries if _ok(e) and e["case"]["engine"] == "none"}
    found = []
    for entry in entries:
        case = Case(**entry["case"])
        if case.kind != "step":
            continue
        result = entry["result"]
        base = resident.get(_shape(entry["case"]))
        bound: Roofline | None = None
        if link and base and "phases_ms" in base and case.engine != "none":
            bound = roofline(case, base, link, result.get("report"))
        found.append(
            {
                "key": entry["key"],
                "case": case,
                "status": result["status"],
                "reason": result.get("reason"),
                "ms": result.get("ms_per_step"),
                "quartiles": result.get("quartiles_ms"),
                "kernel_ms": sum(result["kernel_ms"].values()) if result.get("kernel_ms") else None,
                "host_binds": _host_binds(base),
                "attach_seconds": result.get("attach_seconds"),
                "roofline": bound,
                "of_roofline": result["ms_per_step"] / bound.ms
                if bound and "ms_per_step" in result
                else None,
                "device_bytes": device_bytes(result),
                "host_bytes": result.get("host_rss_bytes"),
                "bit_exact": exactness(result, base),
                "packed": (result.get("report") or {}).get("resident_packed_units"),
            }
        )
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


def table(entries: list[dict[str, Any]], markdown: bool = False) -> str:
    """Return the rows as text columns or as a Markdown table; Carom's roofline is below each group of its shape."""
    lines: list[tuple[str, ...]] = []
    bounds: dict[tuple[str, ...], Roofline] = {}
    for row in rows(entries):
        case: Case = row["case"]
        engine = case.engine
        place: tuple[str, ...] = (case.mode, str(case.tokens), case.place)
        if engine == "none":
            place = (*place[:2], "all")
        elif engine == "carom":
            given = "" if case.by_bytes else f", {case.slots} slots"
            codec = "" if case.codec == "raw" else f", {case.codec}"
            engine = f"carom{given}{codec}" + (f", {row['packed']} stay packed" if row["packed"] else "")
            if row["roofline"]:
                bounds[(*place, f"roofline{given}{codec}")] = row["roofline"]
        elif engine == "musubi":
            engine = f"musubi, ring of {case.ring}"
        if row["ms"] is None:
            words = row["reason"] or ""
            if row["attach_seconds"] is not None:
                words = f"attached in {row['attach_seconds']:.2f} s"
            lines.append((*place, engine, row["status"], words[:REASON], *[""] * 5))
            continue
        exact = {True: "yes", False: "NO", None: ""}[row["bit_exact"]]
        lines.append(
            (*place, engine, f"{row['ms']:.1f}", _quartiles(row["quartiles"]), _number(row["kernel_ms"]),
             "host binds" if row["host_binds"] and case.engine != "none" else _number(row["of_roofline"]),
             _number(row["device_bytes"], 1e9), _number(row["host_bytes"], 1e9), exact)
        )  # fmt: skip
    lines += [(*key, f"{bound.ms:.1f}", "", "", "1.00", "", "", "") for key, bound in bounds.items()]
    lines.sort(key=lambda line: (line[0], int(line[1])))
    return _markdown(HEADERS, lines) if markdown else _columns(HEADERS, lines)


def _columns(headers: tuple[str, ...], lines: list[tuple[str, ...]]) -> str:
    # A reason may extend over the columns to its right, so it does not determine the width.
    short = [line for line in lines if line[4] not in ("ok", "skipped", "failed", "timeout")]
    widths = [max(len(line[i]) for line in (headers, *short)) for i in range(len(headers))]
    widths[3] = max(len(line[3]) for line in (headers, *lines))
    widths[4] = max(widths[4], 7)
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in (headers, *lines)
    )


def _markdown(headers: tuple[str, ...], lines: list[tuple[str, ...]]) -> str:
    split = ["---"] * len(headers)
    return "\n".join("| " + " | ".join(line) + " |" for line in (headers, split, *lines))


def _number(value: float | None, unit: float = 1.0) -> str:
    return "" if value is None else f"{value / unit:.2f}"


def _quartiles(pair: list[float] | None) -> str:
    return "" if pair is None else f"{pair[0]:.1f}-{pair[1]:.1f}"


def _ok(entry: dict[str, Any], kind: str = "step") -> bool:
    return entry["case"]["kind"] == kind and entry["result"]["status"] == "ok"


def _shape(case: dict[str, Any]) -> tuple[Any, ...]:
    names = ("mode", "d", "depth", "tokens", "batch", "rank", "heads", "device", "adapter_dtype", "seed")
    return tuple(case[name] for name in names if not (name == "rank" and case["mode"] == "infer"))


def chart(entries: list[dict[str, Any]], path: Path) -> None:
    """Draw bars of ms a step by engine to ``path``, with a panel for each shape and the roofline as a line.

    The file gets a temporary name first and is then renamed.
    """
    from matplotlib.figure import Figure

    panels: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    all_rows = [row for row in rows(entries) if row["ms"] is not None]
    for row in all_rows:
        case = row["case"]
        if case.engine != "none":
            panels.setdefault((*_of(case), case.place), []).append(row)
    for key, members in panels.items():  # every panel shows the resident run of its shape
        members[:0] = [r for r in all_rows if r["case"].engine == "none" and _of(r["case"]) == key[:4]]
    if not panels:
        panels = {(*_of(row["case"]), row["case"].place): [row] for row in all_rows}
    columns = min(3, max(1, len(panels)))
    lines = -(-max(1, len(panels)) // columns)
    figure = Figure(figsize=(4.6 * columns, 3.4 * lines), layout="constrained")
    for index, (key, members) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(lines, columns, index)
        members = sorted(members, key=lambda row: row["ms"])
        names = [_bar_name(row["case"]) for row in members]
        colours = ["#c2452d" if row["case"].engine == "carom" else "#9aa5ad" for row in members]
        bars = axes.barh(range(len(members)), [row["ms"] for row in members], color=colours)
        axes.set_yticks(range(len(members)), names, fontsize=8)
        axes.bar_label(bars, [_bar_text(row) for row in members], fontsize=7, padding=2)
        axes.margins(x=0.35)
        bounds = [row["roofline"].ms for row in members if row["roofline"] and row["case"].engine == "carom"]
        bounds = bounds or [row["roofline"].ms for row in members if row["roofline"]]
        if bounds:
            axes.axvline(min(bounds), color="black", linewidth=1, linestyle="--", label="roofline")
            axes.legend(fontsize=7, loc="lower right")
        mode, tokens, d, _, place = key
        stays = place if "/" not in place else f"{place.replace('/', ' of ')} blocks resident"
        axes.set_title(f"{mode}, {tokens} tokens, d={d}, {stays}", fontsize=8)
        axes.set_xlabel("ms a step", fontsize=8)
        axes.invert_yaxis()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    figure.savefig(temporary, format=path.suffix.lstrip(".") or "png", dpi=130)
    temporary.replace(path)


def _of(case: Case) -> tuple[str, int, int, int]:
    return case.mode, case.tokens, case.d, case.depth


def _bar_name(case: Case) -> str:
    if case.engine == "musubi":
        return f"musubi, ring of {case.ring}"
    if case.engine != "carom":
        return "no offloading" if case.engine == "none" else case.engine
    given = "" if case.by_bytes else f", {case.slots} slots"
    return f"carom{given}" + ("" if case.codec == "raw" else f", {case.codec}")


def _bar_text(row: dict[str, Any]) -> str:
    memory = f", {row['device_bytes'] / 1e9:.1f} GB" if row["device_bytes"] else ""
    return f"{row['ms']:.1f}{memory}"
