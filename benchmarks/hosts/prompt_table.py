"""The results of `prompts` as text, and what is wrong in them. The module is pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

GB = 1e9


def line(prompt: dict[str, Any]) -> str:
    """Return the figures of one prompt."""
    parts = ", ".join(
        f"{name} {seconds:.2f}" for name, seconds in prompt["parts_s"].items() if seconds >= 0.005
    )
    memory = prompt["memory"].get("sum_bytes", 0) / GB
    device = prompt.get("device_peak_bytes")
    words = [f"prompt {prompt['prompt'] + 1}: {prompt['wall_s']:.2f} s ({parts})"]
    words.append(f"read {prompt['read_bytes'].get('storage', 0) / GB:.2f} GB, process {memory:.1f} GB")
    if device is not None:
        words.append(f"card {device / GB:.2f} GB")
    if prompt["link_bytes"]:
        words.append(", ".join(f"{key} {count / GB:.2f} GB" for key, count in prompt["link_bytes"].items()))
    if "failed" in prompt:
        words.append(f"FAILED: {prompt['failed']}")
    return "; ".join(words)


def pairs(record: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield (stock's run, Carom's run) of the same configuration."""
    known = {}
    for run in record["runs"]:
        key = tuple(run[name] for name in ("case", "limit", "cache", "round", "link"))
        if run["loader"] == "stock":
            known[key] = run
        elif key in known:
            yield known[key], run


def faults(record: dict[str, Any]) -> list[str]:
    """Return a line for each run that failed, and for each result that differs from stock's."""
    found = []
    for run in record["runs"]:
        where = f"{run['case']}, {run['loader']}, {run['cache']}, limit {run['limit']}"
        if run["status"] == "failed":
            found.append(f"{where}: failed: {run['reason'][-300:]}")
        for prompt in run.get("prompts", ()):
            if "failed" in prompt or prompt["errors"]:
                found.append(
                    f"{where}, prompt {prompt['prompt'] + 1}: {prompt.get('failed')} {prompt['errors'][:3]}"
                )
            if not all(result["finite"] for result in prompt["results"].values()):
                found.append(f"{where}, prompt {prompt['prompt'] + 1}: a result is not finite")
    for stock, carom in pairs(record):
        for one, other in zip(stock.get("prompts", ()), carom.get("prompts", ()), strict=False):
            for name, result in one["results"].items():
                # The kernels that torch chooses for convolutions may differ from process to process.
                if name != "image" and result["hash"] != other["results"].get(name, {}).get("hash"):
                    found.append(f"{carom['case']}, prompt {one['prompt'] + 1}: {name} differs from stock's")
    return found


def table(record: dict[str, Any]) -> str:
    """Return the seconds of each prompt, stock beside Carom."""
    rows = []
    for stock, carom in pairs(record):
        limit = "all" if stock["limit"] is None else f"{stock['limit'] / (1 << 30):.0f} GiB"
        rows.append(f"{stock['case']}, {limit}, {stock['cache']}{', copies counted' * stock['link']}")
        for run in (stock, carom):
            seconds = "  ".join(f"{prompt['wall_s']:7.2f}" for prompt in run.get("prompts", ()))
            rows.append(f"  {run['loader']:6} {seconds or run.get('reason', '')[-80:]}")
    return "\n".join(rows)
