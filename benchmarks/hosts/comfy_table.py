"""The printed table of a `comfy_gpu` record: one line for each limit and loader, over all its processes."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

GIB = 1 << 30
SETTLED = ", settled layout"


def samples(record: dict[str, Any]) -> Iterator[tuple[str, list[float]]]:
    """Yield the samples in seconds of every run that ended well, with the name of its case: iterations of the second
    prompt, and those of the settled layout as a case of their own.
    """
    for run in record["runs"]:
        if run["status"] == "ok":
            yield case_of(run), run["samples_s"]
            if "samples_settled_s" in run:
                yield case_of(run) + SETTLED, run["samples_settled_s"]


def case_of(run: dict[str, Any]) -> str:
    return f"{limit_of(run)}, {run['loader']}"


def same_latents(record: dict[str, Any]) -> bool:
    """Return whether all runs computed the same bits, and finite values."""
    runs = [run for run in record["runs"] if run["status"] == "ok"]
    hashes = {tuple(run[name]["hash"] for name in ("first", "second")) for run in runs}
    # The settled prompt has the seed of the second prompt, so the images must be equal.
    if any(run["settled"]["hash"] != run["second"]["hash"] for run in runs if "settled" in run):
        return False
    return len(hashes) <= 1 and all(run["second"]["finite"] for run in runs)


def verdict(record: dict[str, Any]) -> str:
    """Return `same_latents` in words, or a text that says that too few runs ended for a comparison."""
    if not same_latents(record):
        return "DIFFERENT"
    if sum(run["status"] == "ok" for run in record["runs"]) < 2:
        return "not compared, which takes two runs that end"
    return "equal, bit for bit"


def limit_of(run: dict[str, Any]) -> str:
    return "no limit" if run["limit"] is None else f"{run['limit'] / GIB:g} GiB"


def line(run: dict[str, Any]) -> str:
    if run["status"] != "ok":
        return f"{case_of(run)}: {run['status']}: {run['reason']}"
    settled = f", settled {run['s_per_iteration_settled']:.4f}" if "samples_settled_s" in run else ""
    first = run["first"]["wall_s"]
    return f"{case_of(run)}: {run['s_per_iteration']:.4f} s/it{settled}, first image {first:.1f} s"


def table(record: dict[str, Any]) -> str:
    """Return a line for each limit and loader, and what did not run.

    "waited" and "host late" are Carom's shares of a step; "kernels" is the time of an iteration in which at least one
    of the model's kernels ran, in a profiled prompt.
    """
    lines = [
        f"{'case':<38}{'n':>2}{'s/it':>8}{'quartiles':>17}{'of stock':>9}{'kernels':>8}{'waited':>8}{'late':>7}"
        f"{'1st img':>8}{'card GiB':>9}{'host GiB':>9}{'x file':>7}"
    ]
    groups: dict[str, list[dict[str, Any]]] = {}
    for run in record["runs"]:
        if run["status"] == "ok":
            groups.setdefault(case_of(run), []).append(run)
    for spread in record["pooled"]:
        lines.append(_line(record, spread, groups))
    lines += [
        f"{case_of(run)}: {run['status']}: {run['reason'].splitlines()[-1][:100]}"
        for run in record["runs"]
        if run["status"] != "ok"
    ]
    lines.append(f"latents: {verdict(record)}")
    return "\n".join(lines)


def _line(record: dict[str, Any], spread: dict[str, Any], groups: dict[str, list[dict[str, Any]]]) -> str:
    case = spread["case"]
    runs = groups[case.removesuffix(SETTLED)]
    run = runs[0]
    stock = case_of({**run, "loader": "stock"})
    base = next((one["median_s"] for one in record["pooled"] if one["case"] == stock), None)
    ratio = f"{spread['median_s'] / base:.3f}" if base else ""
    low, high = spread["quartiles_s"]
    text = f"{case:<38}{spread['processes']:>2}{spread['median_s']:>8.4f}{f'{low:.4f} to {high:.4f}':>17}{ratio:>9}"
    report = run["settled" if case.endswith(SETTLED) else "second"]["report"] or {}
    kernels = [one["profile"]["kernel_ms"] for one in runs if (one.get("profile") or {}).get("kernel_ms")]
    first = statistics.median(one["first"]["wall_s"] for one in runs)
    key = "anonymous_bytes" if "anonymous_bytes" in run["host"]["peak"] else "resident_bytes"
    host = max(one["host"]["peak"][key] - one["host"]["before"][key] for one in runs)
    card = f"{max(one['card']['peak_bytes'] for one in runs) / GIB:.2f}" if "card" in run else ""
    text += f"{f'{statistics.median(kernels):.1f}' if kernels else '':>8}"
    text += f"{_share(report, 'stall_seconds'):>8}{_share(report, 'host_late_seconds'):>7}"
    return text + f"{first:>8.2f}{card:>9}{host / GIB:>9.2f}{host / record['file_bytes']:>7.2f}"


def _share(report: dict[str, Any], name: str) -> str:
    if not report.get("step_seconds") or report.get(name) is None:
        return ""
    return f"{100 * report[name] / report['step_seconds']:.1f}%"
