"""The printed table of a `comfy_gpu` record."""

from __future__ import annotations

from typing import Any

from . import comfy_alternation

GIB = 1 << 30


def same_latents(record: dict[str, Any]) -> bool:
    """Return whether all runs computed the same bits, and finite values."""
    done = [run for run in record["runs"] if run["status"] == "ok"]
    runs = [run for run in done if not run.get("alternating")]
    turns = [run for run in done if run.get("alternating")]
    hashes = {
        tuple(run[name]["hash"] for name in ("first", "second", "third") if name in run) for run in runs
    }
    # The settled prompt has the seed of the second prompt, so the images must be equal.
    if any(run["settled"]["hash"] != run["second"]["hash"] for run in runs if "settled" in run):
        return False
    hashes_of_turns = {run["turns"][0]["hash"] for run in turns}
    same = len(hashes) <= 1 and len(hashes_of_turns) <= 1 and all(run["same_latents"] for run in turns)
    return same and all(run["second"]["finite"] for run in runs)


def verdict(record: dict[str, Any]) -> str:
    """Return `same_latents` in words, or a text that says that too few runs ended for a comparison."""
    if not same_latents(record):
        return "DIFFERENT"
    done = [run for run in record["runs"] if run["status"] == "ok"]
    # Two models in turns are compared between turns, all else between runs.
    if len(done) < 2 and not any(run.get("alternating") for run in done):
        return "not compared, which takes two runs that end"
    return "equal, bit for bit"


def limit_of(run: dict[str, Any]) -> str:
    return "no limit" if run["limit"] is None else f"{run['limit'] / GIB:g} GiB"


def line(run: dict[str, Any]) -> str:
    if run["status"] != "ok":
        return f"{limit_of(run)} {run['loader']}: {run['status']}: {run['reason']}"
    if run.get("alternating"):
        return f"{limit_of(run)} {run['loader']}, two models: a turn {run['turn_s']:.2f} s"
    return f"{limit_of(run)} {run['loader']}: {run['s_per_iteration']:.4f} s/it, first image {run['first']['wall_s']:.1f} s"


def table(record: dict[str, Any]) -> str:
    """Return the comparison with a line for each run."""
    lines = [
        f"{'free':<9}{'loader':<16}{'s/it':>8}{'of stock':>9}{'first s':>8}{'2nd s':>7}{'card GiB':>9}{'host GiB':>9}"
        f"{'x file':>7}{'read 2nd, 3rd MB':>18}{'waited':>8}  latent"
    ]
    stock: dict[Any, float] = {}
    turns = [run for run in record["runs"] if run.get("alternating")]
    for run in record["runs"]:
        if run in turns and run["status"] == "ok":
            continue
        if run["status"] != "ok":
            lines.append(
                f"{limit_of(run):<9}{run['loader']:<16}{run['status']}: {run['reason'].splitlines()[-1][:90]}"
            )
            continue
        seconds = run["s_per_iteration"]
        if run["loader"] == "stock":
            stock[run["limit"]] = seconds
        ratio = f"{seconds / stock[run['limit']]:.3f}" if run["limit"] in stock else ""
        key = "anonymous_bytes" if "anonymous_bytes" in run["host"]["peak"] else "resident_bytes"
        peak = run["host"]["peak"][key] - run["host"]["before"][key]
        card = f"{run['card']['peak_bytes'] / GIB:.2f}" if "card" in run else ""
        reads = ", ".join(
            f"{run[name]['read_bytes'].get('storage', 0) / 1e6:.0f}"
            for name in ("second", "third")
            if name in run
        )
        report = run["second"]["report"] or {}
        waited = (
            f"{100 * report['stall_seconds'] / report['step_seconds']:.1f} %"
            if report.get("step_seconds") and report.get("stall_seconds") is not None
            else ""
        )
        settled = run.get("s_per_iteration_settled")
        lines.append(
            f"{limit_of(run):<9}{run['loader']:<16}{seconds:>8.4f}{ratio:>9}{run['first']['wall_s']:>8.2f}{run['second']['wall_s']:>7.2f}{card:>9}"
            f"{peak / GIB:>9.2f}{peak / record['file_bytes']:>7.2f}{reads:>18}{waited:>8}  {run['second']['hash'][:10]}"
            + (f"  settled {settled:.4f}" if settled else "")
        )
    lines += [
        f"{limit_of(run):<9}{run['loader']:<16}two models: {comfy_alternation.line(run)}"
        for run in turns
        if run["status"] == "ok"
    ]
    lines.append(f"latents: {verdict(record)}")
    return "\n".join(lines)
